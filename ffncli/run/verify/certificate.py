"""The certificate of a kernel: the referee's verdict, of which file it is, and where it was given."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from ffncli.errors import FFNError, option, shown_path
from ffncli.kernels.choice import KernelChoice
from ffncli.run.verify.checks.case import CheckRow
from ffncli.system import host
from ffncli.system.packages import installed
from ffncli.version import __version__


@dataclass(frozen=True)
class Certificate:
    """`kernel` is its label, `file` and `sha256` are its file's, None of a built-in one; `attribute` names it in there.

    `reason` is the first check that failed, empty of a certified kernel. `error_class` (`fp32-true`) and
    `batch_invariant` are None where they could not be measured. `environment`: versions and the machine, as `ffn bench`
    names them.
    """

    verdict: Literal["certified", "refused"]
    reason: str
    kernel: str
    attribute: str | None
    file: str | None
    sha256: str | None
    error_class: str | None
    error_rel: float | None
    batch_invariant: bool | None
    batch_invariance_demanded: bool
    dtype: str
    device: str
    threads: int
    seed: int
    tolerance: float | None
    started_utc: str
    environment: Mapping[str, str]


def first_reason(rows: Sequence[CheckRow]) -> str:
    """The first check that failed, and how: `state, other numbers in the same buffer: error 0.7 (limit 2.2e-05)`."""
    row = next((row for row in rows if row.passed is False), None)
    if row is None:
        return ""
    figures = [] if row.relative_error is None else [f"error {row.relative_error:.2g}"]
    if figures and row.tolerance:
        figures = [f"{figures[0]} (limit {row.tolerance:.2g})"]
    note = [row.note] if row.note and row.check != "precision" else []
    return f"{row.check}, {row.subject}: " + "; ".join([*figures, *note])


def file_digest(choice: KernelChoice) -> str | None:
    """The sha256 of a user's file; None of a built-in kernel."""
    if choice.file is None:
        return None
    try:
        return hashlib.sha256(choice.file.read_bytes()).hexdigest()
    except OSError as error:
        why = f"{option('kernel')}: cannot read {shown_path(Path(choice.kernel))}: {error.strerror}"
        raise FFNError(why, "give file.py:name") from None


def environment(device: str) -> dict[str, str]:
    """Versions and the machine, under the names of the columns of `ffn bench`."""
    cuda = device.startswith("cuda")
    return {
        "ffncli": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": installed("numpy") or "",
        "host": platform.node(),
        "cpu": host.cpu_name(),
        "isa": " ".join(host.isa()),
        "device_name": torch.cuda.get_device_name(torch.device(device)) if cuda else host.cpu_name(),
        "system": f"{sys.platform} {os.uname().release}" if hasattr(os, "uname") else sys.platform,
    }


def now_utc() -> str:
    """The time, as `ffn bench` writes it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
