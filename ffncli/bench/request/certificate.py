"""Certificates of `ffn verify --referee`, which a benchmark names in its rows; each must be of a file that it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffncli.bench.records import Case
from ffncli.bench.request.kernels import ChosenKernels
from ffncli.block import activations
from ffncli.errors import FFNError, option, shown, shown_path
from ffncli.kernels.choice import KernelChoice
from ffncli.models.files.strict_json import read_object
from ffncli.version import __version__

_MOST_BYTES = 10_000_000


@dataclass(frozen=True)
class NamedCertificate:
    """`digest` is the sha256 of the certificate's own file. It holds for a dtype, a device and a kind of block."""

    digest: str
    dtype: str
    device: str
    activation: str
    gated: bool
    experts: bool

    def covers(self, case: Case) -> bool:
        """Whether the case is of what was certified; its widths and tokens may be others."""
        spec = case.spec
        same = (spec.activation, bool(spec.gated), spec.moe is not None) == (self.activation, self.gated, self.experts)
        return same and (case.dtype, case.device, case.passes) == (self.dtype, self.device, "forward")


def named_certificates(
    files: Sequence[str], chosen: ChosenKernels, cases: Sequence[Case]
) -> Mapping[str, NamedCertificate]:
    """Label → its certificate. Raises FFNError (exit 2) for a file that is none, or not of what will be measured."""
    by_label: dict[str, NamedCertificate] = {}
    for name in files:
        path = Path(name).expanduser()
        stored = read_object(path, _MOST_BYTES)
        certificate, block = stored.get("certificate"), stored.get("block")
        if not isinstance(certificate, dict) or not isinstance(block, dict):
            raise FFNError(
                f"{shown_path(path)} is not a certificate", "ffn verify -k mine.py:mlp --referee -o FILE.json"
            )
        if certificate.get("verdict") != "certified":
            raise FFNError(f"{shown_path(path)} says {shown(certificate.get('verdict'))}", "only a certified kernel's")
        kernels = [choice for choice in chosen.kernels if _is_of(certificate, choice)]
        if not kernels:
            label = shown(certificate.get("kernel"))
            hint = f"name it: {option('kernel', 'file.py:name')}"
            raise FFNError(f"{shown_path(path)} is of {label}, which is not measured", hint)
        for choice in kernels:
            _require_same(path, certificate, choice, chosen)
        named = _named(path, certificate, block)
        if not any(named.covers(case) for case in cases):
            of = f"{named.dtype}, {named.activation}{', gated' if named.gated else ''}, on {named.device}"
            raise FFNError(f"{shown_path(path)} is for {of}: no case is of that", "certify the kernel for this block")
        by_label |= {choice.label: named for choice in kernels}
    return by_label


def _is_of(certificate: Mapping[str, Any], choice: KernelChoice) -> bool:
    """Whether the certificate is of this kernel, by its name; a slowed one is another."""
    if choice.factor is not None:
        return False
    if choice.file is None:
        return certificate.get("file") is None and certificate.get("kernel") == choice.kernel
    file = certificate.get("file")
    same_file = isinstance(file, str) and Path(file).name == choice.file.name
    return same_file and certificate.get("attribute") == choice.attribute


def _require_same(path: Path, certificate: Mapping[str, Any], choice: KernelChoice, chosen: ChosenKernels) -> None:
    """Raises FFNError if the kernel's file, or our version for a built-in one, is not the certified one."""
    if choice.file is not None and certificate.get("sha256") != chosen.files[str(choice.file)]:
        why = f"{shown_path(choice.file)} is not the file that {shown_path(path)} certifies (another sha256)"
        raise FFNError(why, "certify it again: ffn verify --referee")
    surroundings = certificate.get("environment")
    version = surroundings.get("ffncli") if isinstance(surroundings, dict) else None
    if choice.file is None and version != __version__:
        why = f"{shown_path(path)} certifies {choice.kernel} of ffn {shown(version)}, this is {__version__}"
        raise FFNError(why, "certify it again: ffn verify --referee")


def _named(path: Path, certificate: Mapping[str, Any], block: Mapping[str, Any]) -> NamedCertificate:
    """What it holds for. Raises FFNError if it does not say."""
    dtype, device, activation = certificate.get("dtype"), certificate.get("device"), block.get("activation")
    if not (isinstance(dtype, str) and isinstance(device, str) and activation in activations.TABLE):
        raise FFNError(f"{shown_path(path)} does not say what it certifies", "ffn verify --referee writes it")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return NamedCertificate(digest, dtype, device, activation, block.get("gated") is True, bool(block.get("experts")))
