"""WAYS to compute a block: name → module, loaded on first use. A new kernel is one file and one line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module

from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.kernels.kernel import REGISTERED, Kernel

BUILT_IN: Mapping[str, str] = {
    "eager": "ffncli.kernels.eager",
    "module": "ffncli.kernels.module",
    "packed": "ffncli.kernels.packed",
    "inplace": "ffncli.kernels.inplace",
    "conv1x1": "ffncli.kernels.conv1x1",
    "onednn": "ffncli.kernels.onednn",
    "onednn_packed": "ffncli.kernels.onednn",
    "mkl": "ffncli.kernels.blas",
    "numpy": "ffncli.kernels.blas",
    "grouped": "ffncli.kernels.experts",
    "batched": "ffncli.kernels.experts",
    "fp8": "ffncli.kernels.fewer_bits",
    "compiled": "ffncli.kernels.compiled",
    "max_autotune": "ffncli.kernels.compiled",
    "frozen": "ffncli.kernels.compiled",
    "gemv": "ffncli.kernels.compiled",
    "triton_act": "ffncli.kernels.in_triton.kernels",
    "fused_gate": "ffncli.kernels.in_triton.kernels",
    "decode": "ffncli.kernels.in_triton.kernels",
    "int8": "ffncli.kernels.fewer_bits",
    "int4": "ffncli.kernels.fewer_bits",
    "liger": "ffncli.kernels.libraries",
    "liger_act": "ffncli.kernels.libraries",
    "quack": "ffncli.kernels.libraries",
}
# Take seconds to minutes before their first answer.
COMPILING = (
    "compiled", "max_autotune", "frozen", "gemv", "triton_act", "fused_gate", "decode", "liger", "liger_act", "quack",
)  # fmt: skip
IN_FEWER_BITS = ("fp8", "int8", "int4")  # compared with their like only
ONLY_NAMED = (*COMPILING, *IN_FEWER_BITS, "batched")  # the last: for a few tokens
BY_DEFAULT = tuple(name for name in BUILT_IN if name not in ONLY_NAMED)  # timed when no kernel is named
OF_EXPERTS = ("grouped", "batched")  # compute mixtures alone
OF_BOTH = ("eager",)  # compute mixtures and dense blocks; all others dense blocks alone
AUTO = "auto"  # the fastest of them for a case on this machine, as `ffn bench` finds it
OVER_RANKS = ("dtensor",)  # of blocks that are split over ranks alone: `ffn bench --tp N` has them
ALIASES: Mapping[str, str] = {"conv": "conv1x1"}  # former names


def computing(names: Iterable[str], dense: bool, mixtures: bool) -> tuple[str, ...]:
    """Those of these kernels that compute any of the kinds of blocks that there are."""
    return tuple(n for n in names if n in OF_BOTH or (mixtures if n in OF_EXPERTS else dense))


def full_name(name: str) -> str:
    """The kernel's current name for any of its names, former ones included."""
    return ALIASES.get(name, name)


def kernel_names() -> tuple[str, ...]:
    """The kernels of the package, as `ffncli.kernel` and `--kernel` take them."""
    return tuple(BUILT_IN)


def unknown_kernel(name: str) -> FFNError:
    """The error for an unknown kernel name."""
    known = [*BUILT_IN, AUTO]
    hint = did_you_mean(name, known, f"known: {', '.join(known)}; a file's: --kernel file.py:name")
    return FFNError(f"--kernel: unknown kernel {shown(name)}", hint)


def built_in(name: str) -> Kernel:
    """The kernel of that name; its module is imported now. Raises FFNError for an unknown one."""
    name = full_name(name)
    if name in OVER_RANKS:
        raise FFNError(f"--kernel: {name} computes blocks that are split over ranks", "time it: ffn bench --tp N")
    if name == AUTO:
        raise FFNError("--kernel: auto chooses a kernel for a case that is timed", "time it: ffn bench --kernel auto")
    if name not in BUILT_IN:
        raise unknown_kernel(name)
    import_module(BUILT_IN[name])
    return REGISTERED[name]
