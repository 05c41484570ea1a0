"""WAYS to compute a block: kernel name → module, loaded on first use. A new kernel is one file and one line here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module

from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.kernels.kernel import REGISTERED, Kernel
from ffncli.options.arguments import checked

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
# These kernels take seconds to minutes before their first answer.
COMPILING = (
    "compiled", "max_autotune", "frozen", "gemv", "triton_act", "fused_gate", "decode", "liger", "liger_act", "quack",
)  # fmt: skip
IN_FEWER_BITS = ("fp8", "int8", "int4")  # not compared with kernels that compute in the full dtype
ONLY_NAMED = (*COMPILING, *IN_FEWER_BITS, "batched")  # `batched` is only for a few tokens
BY_DEFAULT = tuple(name for name in BUILT_IN if name not in ONLY_NAMED)  # the kernels timed if none is named
OF_EXPERTS = ("grouped", "batched")  # compute only mixtures
OF_BOTH = ("eager",)  # compute mixtures and dense blocks; the remaining kernels compute only dense blocks
AUTO = "auto"  # the fastest kernel for a case on this machine, as measured by `ffn bench`
OVER_RANKS = ("dtensor",)  # only for blocks that are split over ranks: `ffn bench --tp N` includes them
ALIASES: Mapping[str, str] = {"conv": "conv1x1"}  # former names


def computing(names: Iterable[str], dense: bool, mixtures: bool) -> tuple[str, ...]:
    """Return the named kernels that can compute a kind of block that occurs: `dense` says whether dense blocks occur,
    `mixtures` whether mixtures of experts occur."""
    return tuple(n for n in names if n in OF_BOTH or (mixtures if n in OF_EXPERTS else dense))


def full_name(name: str) -> str:
    """Return the kernel's current name for any of its names, including former names."""
    return ALIASES.get(name, name)


@checked()
def kernel_names() -> tuple[str, ...]:
    """Return the names of the package's kernels, as accepted by `ffncli.kernel` and `--kernel`."""
    return tuple(BUILT_IN)


def unknown_kernel(name: str) -> FFNError:
    """Return the error for an unknown kernel name."""
    known = [*BUILT_IN, AUTO]
    hint = did_you_mean(name, known, f"known: {', '.join(known)}; a file's: --kernel file.py:name")
    return FFNError(f"--kernel: unknown kernel {shown(name)}", hint)


def built_in(name: str) -> Kernel:
    """Return the kernel with that name, importing its module now. Raises FFNError for an unknown name."""
    name = full_name(name)
    if name in OVER_RANKS:
        raise FFNError(f"--kernel: {name} computes blocks that are split over ranks", "time it: ffn bench --tp N")
    if name == AUTO:
        raise FFNError("--kernel: auto chooses a kernel for a case that is timed", "time it: ffn bench --kernel auto")
    if name not in BUILT_IN:
        raise unknown_kernel(name)
    import_module(BUILT_IN[name])
    return REGISTERED[name]


# --- the list of kernels ----------------------------------------------------------------------------------------------

_GPU = ("cuda", "triton", "sm_90")  # needs that only a GPU meets
_DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class KernelLine:
    """A kernel in the list. `computes` is how it computes the block, `blocks` which ones: `dense`, `mixtures` or both.

    `devices` are `cpu`, `cuda` or both, `passes` is `forward` or `forward+backward`, `most_tokens` the number of tokens
    for which it is meant; `needs` are modules and a GPU's least compute capability. `by_default`: it is timed if
    `--kernel` names none. `missing` is what this machine lacks, empty if nothing.
    """

    kernel: str
    computes: str
    blocks: str
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    passes: str
    most_tokens: int | None
    needs: tuple[str, ...]
    by_default: bool
    missing: str


def kernel_list(device: str = "cpu") -> tuple[KernelLine, ...]:
    """Return every kernel of the package, as seen from this device of this machine. Loads torch."""
    return tuple(_line(built_in(name), device) for name in BUILT_IN)


def _line(kernel: Kernel, device: str) -> KernelLine:
    name, needs = kernel.name, kernel.needs
    blocks = "dense and mixtures" if name in OF_BOTH else "mixtures" if name in OF_EXPERTS else "dense"
    on_gpu_only = any(need in _GPU for need in needs)
    devices = ("cuda",) if on_gpu_only else ("cpu",) if "cpu" in needs else ("cpu", "cuda")
    return KernelLine(
        name,
        kernel.does,
        blocks,
        kernel.dtypes or _DTYPES,
        devices,
        "forward+backward" if kernel.trains else "forward",
        kernel.most_tokens,
        tuple(need for need in needs if need not in ("cpu", "cuda")),
        name in BY_DEFAULT,
        kernel.missing(device) or "",
    )
