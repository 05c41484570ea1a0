"""Verification that different ways of computing one block agree. CHECKS lists the checks, each a small function."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from ffncli.block.cost import cost
from ffncli.block.recipe import steps
from ffncli.block.steps import block_inputs, id_inputs
from ffncli.errors import FFNError, did_you_mean, option, shown, shown_path
from ffncli.frames import Tabular
from ffncli.kernels.choice import KernelChoice
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.model import Resolved
from ffncli.run.engine.inputs import InputSource
from ffncli.run.engine.prepare import BlockSummary, Prepared, block_summary, prepare
from ffncli.run.user.kernels import kernels_of
from ffncli.run.verify.certificate import Certificate
from ffncli.run.verify.checks import implementations, layouts, properties
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow, SplitRun, UserModule
from ffncli.run.verify.question import CHECK_STATEMENTS
from ffncli.system import host
from ffncli.system.packages import installed
from ffncli.version import __version__

_TOKENS, _FEW_TOKENS, _LARGE = 16, 4, 50_000_000


@dataclass(frozen=True)
class VerifyCheck:
    """A check: `states` is the statement that must be true; `rows` is the function that checks it."""

    states: str
    rows: Callable[[CheckedBlock], Iterator[CheckRow]]


def _over_ranks(case: CheckedBlock) -> Iterator[CheckRow]:
    from ffncli.run.verify.checks.over_ranks import over_ranks  # loads DTensor, which takes a second

    return over_ranks(case)


_ROWS: Mapping[str, Callable[[CheckedBlock], Iterator[CheckRow]]] = {
    "finite": properties.finite,
    "module": implementations.module,
    "convolution": properties.convolution,
    "tokens": properties.tokens,
    "collapse": properties.collapse,
    "nonlinearity": properties.nonlinearity,
    "zero": properties.zero,
    "shards": implementations.shards,
    "ranks": _over_ranks,
    "fused": implementations.fused,
    "kernels": implementations.kernels,
    "layout": layouts.layout,
}
CHECKS: Mapping[str, VerifyCheck] = {name: VerifyCheck(text, _ROWS[name]) for name, text in CHECK_STATEMENTS.items()}


@dataclass(frozen=True)
class Verdict(Tabular):
    """A verification's rows, in the order of CHECKS, with the model and the block; a referee adds a certificate."""

    rows: tuple[CheckRow, ...]
    model: Resolved
    ready: Prepared
    block: BlockSummary
    certificate: Certificate | None = None

    @property
    def failed(self) -> tuple[CheckRow, ...]:
        """The rows that did not pass."""
        return tuple(row for row in self.rows if row.passed is False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the model and on its run."""
        return (*self.model.notes, *map(str, self.model.differences), *self.ready.notes)


def verify_layer(
    resolved: Resolved,
    layer: int | str | None = None,
    *,
    input: InputSource | None = None,
    leading: tuple[int, ...] | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    checks: Sequence[str] | None = None,
    kernels: tuple[KernelChoice, ...] = (),
    tolerance: float | None = None,
    user_module: UserModule | None = None,
    against: Resolved | None = None,
    split: SplitRun | None = None,
) -> Verdict:
    """Verify one layer of a model; a built-in example uses its own weights and input.

    >>> verify_layer(load("64x256:gelu")).failed
    ()

    The default is to run all checks, on the built-in kernels that need no compilation, with the dtype's tolerance.
    `user_module` is the user's module if the model was identified from one; `split` is set if this process is one of
    several ranks. A failed check is a row, not an error.
    """
    names = check_names(checks)
    if split is None:
        names = tuple(name for name in names if name != "ranks")
    elif split.rank > 0:  # only rank 0 runs the other checks
        names = ("ranks",)
    chosen, train = resolved.model.layer(layer), None
    if leading is None and input is None and resolved.example is None:
        large = cost(steps(chosen.spec)).params > _LARGE
        leading, train = (_FEW_TOKENS if large else _TOKENS,), False
    ready = prepare(resolved, chosen, input=input, leading=leading, dtype=dtype, device=device, seed=seed, train=train)
    _require_covered(resolved, ready)
    flat = {name: ready.inputs[name].flatten(0, -2) for name in block_inputs(ready.steps)}
    case = CheckedBlock(
        resolved, ready.layer, ready.steps, ready.weights, flat, next(iter(ready.inputs.values())).dtype, device,
        seed or 0, tolerance, kernels_of(kernels, kernel_steps(ready.steps), ready.layer.spec, compiling=False),
        user_module, against, split,
    )  # fmt: skip
    # On GPUs, convolutions round float32 to 10 bits by default. `enabled` is passed because flags() would otherwise set
    # it to False.
    exact = torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False)
    with torch.no_grad(), exact:
        rows = tuple(_rows(case, names))
    return Verdict(rows, resolved, ready, block_summary(resolved, ready, device))


def check_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the requested checks in the order of CHECKS; None requests all."""
    for name in names or ():
        if name not in CHECKS:
            hint = did_you_mean(name, list(CHECKS), "checks: " + ", ".join(CHECKS))
            raise FFNError(f"{option('check')}: unknown check {shown(name)}", hint)
    return tuple(name for name in CHECKS if names is None or name in names)


def _require_covered(resolved: Resolved, ready: Prepared) -> None:
    """Raise FFNError for a layer that no check covers."""
    where, spec = f"{ready.layer.stack} layer {ready.layer.index}", ready.layer.spec
    if id_inputs(ready.steps):
        chooses = (str(g.layers[0]) for g in resolved.model.groups if not (g.spec.moe and g.spec.moe.lookup))
        other = next(chooses, None)
        hint = (
            f"{option('layer', other)} has a router that chooses"
            if other
            else "every layer of the model has such a table"
        )
        raise FFNError(
            f"{where}: a table of token ids chooses its experts, but the checks draw inputs without ids", hint
        )
    if spec.moe and spec.moe.router_width:
        raise FFNError(
            f"{where}: its router is an MLP, which no check or kernel covers",
            "`ffn trace` runs it, and `--explain` shows the sums",
        )


def _rows(case: CheckedBlock, names: Sequence[str]) -> Iterator[CheckRow]:
    """Yield the rows of the checks; if weights or input contain NaN or Inf, run only `finite` and `layout`."""
    broken = [row for row in properties.finite(case) if row.passed is False]
    rows: dict[str, tuple[CheckRow, ...]] = {}
    for name in sorted(names, key=lambda name: name != "ranks"):  # `ranks` first: other processes wait for it
        if broken and name not in ("finite", "layout"):
            rows[name] = (CheckRow(name, "all", note=f"not run: {broken[0].subject} with NaN or Inf"),)
            continue
        try:
            rows[name] = tuple(CHECKS[name].rows(case))
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented" not in str(error):
                raise
            why = f"torch does not support it here: {str(error).splitlines()[0][:120]}"
            rows[name] = (CheckRow(name, "all", note=why),)
    for name in names:
        yield from rows[name]


def file_digest(choice: KernelChoice) -> str | None:
    """Return the sha256 of a user's file; None for a built-in kernel."""
    if choice.file is None:
        return None
    try:
        return hashlib.sha256(choice.file.read_bytes()).hexdigest()
    except OSError as error:
        why = f"{option('kernel')}: cannot read {shown_path(Path(choice.kernel))}: {error.strerror}"
        raise FFNError(why, "give file.py:name") from None


def environment(device: str) -> dict[str, str]:
    """Return versions and the machine, under the column names of `ffn bench`."""
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
    """Return the current time in the format of `ffn bench`."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
