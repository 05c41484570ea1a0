"""DoctorCheck: one row of `ffn doctor`."""

from __future__ import annotations

from typing import Literal

from ffncli.dataclass import dataclass

CheckStatus = Literal["ok", "note", "missing", "bad"]


@dataclass(frozen=True)
class DoctorCheck:
    """One checked item. `advice` says what to do, empty if there is nothing to do.

    `missing` can be installed, `bad` is installed but does not work, `note` is worth knowing.
    """

    name: str
    value: str
    status: CheckStatus = "ok"
    advice: str = ""


def size_text(count: int) -> str:
    """`35.8 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
