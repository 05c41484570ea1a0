"""Kernel: a way to compute an FFN, as a record of two functions; and a decorator that registers the package's kernels.

`prepare` converts the weights to the form that a kernel needs (packed, for example); it is called for each copy of the
weights in memory. `build` returns the function to call, once per case; compiling belongs in `build`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ffncli.block.dtypes import find
from ffncli.block.steps import Dropout, Experts, Step, ffn_steps, parameters
from ffncli.show.text import plural

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Steps: TypeAlias = Sequence[Step]
Params: TypeAlias = "tuple[Tensor, ...]"
Computes: TypeAlias = "Callable[[Tensor, Params], Tensor]"
Prepare: TypeAlias = "Callable[[Steps, Mapping[str, Tensor]], Params]"
Build: TypeAlias = "Callable[[Steps, str, torch.dtype], Computes]"
Refuses: TypeAlias = Callable[[Steps], str | None]


def canonical(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return the weights unchanged, in step order."""
    return tuple(weights[name] for name in parameters(steps))


def any_block(steps: Steps) -> str | None:
    """Accept every block: return no reason against it."""
    return None


@dataclass(frozen=True)
class Kernel:
    """A kernel: `prepare(steps, weights) -> params` and `build(steps, device, dtype) -> f(x, params)`.

    `steps` run from ffn_input to ffn_output in eval mode (`kernel_steps`); `weights` are canonical, contiguous, on the
    device, in the dtype, and read-only. `f` maps x [tokens, d_model], also read-only, to a tensor of the same shape and
    dtype. `needs` lists requirements: `cuda`, `cpu`, `compiler`, `onednn`, `mkl`, `sm_89` (a GPU must have at least
    that compute capability), or a module (`triton` also needs a GPU, or Triton's interpreter). `refuses(steps)` returns
    why the kernel cannot compute a block, or None. `origin` is the file of a user's kernel.

    `trains`: gradients flow from f's output to x and to the params, and through `prepare` to the weights. `compiles`:
    the first call with each shape compiles; its time is reported separately. `dtypes`: the dtypes that the kernel
    computes in, by our names (`fp32`); None for all dtypes. `computes` declares that it computes in fewer bits than the
    case's dtype: a format and, if it helps, how (`fp8-rowwise`); such a kernel is checked against a wider bound, and
    compared only with kernels of its kind. `most_tokens`: f computes any number of tokens, but is meant for at most
    this many, so benchmarks of more tokens skip it; None: no limit. `per_weights`: the first call with new params or a
    new number of tokens creates data for them and keeps it (`PerWeights`), so that call must precede timing. If the
    kernel also compiles, the weights are part of its code: a benchmark then has only one copy of the weights, and must
    flush the caches to make that copy cold. `keeps`: what f keeps from one call to the next, so that only one thread at
    a time may call it: the params of the last call, or buffers, which the next call overwrites, even the output.
    `does` says how the kernel computes the block, for lists of kernels.
    """

    name: str
    build: Build
    prepare: Prepare = canonical
    needs: tuple[str, ...] = ()
    refuses: Refuses = any_block
    origin: str = ""
    trains: bool = True
    compiles: bool = False
    dtypes: tuple[str, ...] | None = None
    computes: str = ""
    most_tokens: int | None = None
    per_weights: bool = False
    keeps: Literal["", "params", "output"] = ""
    does: str = ""

    def forms(self, dtype: torch.dtype) -> int:
        """Return the most memory that the kernel's own form of the weights may take, as a multiple of the weights' size
        in this dtype. That form may be float32 if the dtype has 16 bits."""
        if self.prepare is canonical:
            return 0
        return 2 if dtype.itemsize == 2 and not self.per_weights else 1

    def missing(self, device: str) -> str | None:
        """Return in words which of the kernel's needs this machine lacks; None if nothing is missing."""
        for need in self.needs:
            if need == "cuda" and not device.startswith("cuda"):
                return "runs on a GPU only"
            if need == "cpu" and device.startswith("cuda"):
                return "runs on a CPU only"
            if need == "triton" and not device.startswith("cuda") and not interprets_triton():
                return "runs on a GPU only; with TRITON_INTERPRET=1 in the environment, ffn verify checks it on a CPU"
            if need == "compiler" and not device.startswith("cuda") and cxx() is None:
                return "no C++ compiler: install g++, or name one in CXX"
            if need == "onednn" and not _has_onednn():
                return "this build of torch has no oneDNN"
            if need == "mkl" and not _has_mkl():
                return "this build of torch has no MKL"
            if need.startswith(_CAPABILITY):
                if older := _older_gpu(need.removeprefix(_CAPABILITY), device):
                    return older
                continue
            module = "triton" if need == "compiler" and device.startswith("cuda") else need
            if module not in _NO_MODULES and find_spec(module) is None:
                return f"needs the module {module}"
        return None

    def refusal(
        self, steps: Steps, device: str, dtype: object, passes: str = "forward", tokens: int | None = None,
        cold: bool = False,
    ) -> str | None:  # fmt: skip
        """Return every reason why the kernel cannot run this case, joined by `; `; None if it can.

        `dtype` is torch's dtype or one of our names, `passes` is forward or forward+backward, `tokens` is the number of
        tokens if known, and `cold` is True if the weights are kept out of the caches by copying them.
        """
        row = find(str(dtype))
        name = row.name if row else str(dtype)
        reasons = [self.missing(device), self.refuses(steps)]
        if self.dtypes is not None and name not in self.dtypes:
            *most, last = self.dtypes
            known = f"{', '.join(most)} and {last}" if most else last
            reasons.append(f"computes in {known} only, not in {name}")
        if not self.trains and passes != "forward":
            reasons.append("computes forward only")
        if tokens is not None and self.most_tokens is not None and tokens > self.most_tokens:
            reasons.append(f"is meant for at most {self.most_tokens} {plural('token', self.most_tokens)}")
        if cold and self.per_weights and self.compiles:
            reasons.append(
                "its weights are part of compiled code, so copies of them cannot keep them cold: use --cache flush"
            )
        return "; ".join(reason for reason in reasons if reason) or None


_NO_MODULES = ("cuda", "cpu", "compiler", "onednn", "mkl")


def _has_onednn() -> bool:
    """Return True if torch's CPU build has oneDNN's products with reordered weights."""
    import torch

    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _has_mkl() -> bool:
    """Return True if torch's CPU build has MKL's products with packed weights."""
    import torch

    return torch._C.has_mkl and hasattr(torch.ops.mkl, "_mkl_linear")


_CAPABILITY = "sm_"


def _older_gpu(least: str, device: str) -> str | None:
    """Return what a GPU needs if its compute capability is below `least` (`89`); None for other GPUs and CPUs."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor >= int(least):
        return None
    return f"needs a GPU of compute capability {least[:-1]}.{least[-1]}, but this one has {major}.{minor}"


def cxx() -> str | None:
    """Return the C++ compiler for torch.compile on a CPU: CXX if set, else g++, else clang++; None if there is none."""
    named = os.environ.get("CXX", "").strip()
    return next((path for name in ([named] if named else ["g++", "clang++"]) if (path := shutil.which(name))), None)


def interprets_triton() -> bool:
    """Return True if TRITON_INTERPRET runs Triton's kernels as Python: for checks, never for timing."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "yes", "on", "y")


REGISTERED: dict[str, Kernel] = {}


def register(name: str, does: str, **fields: Any) -> Callable[[Build], Build]:
    """Decorate the `build` of a kernel that comes with the package; `does` says how it computes the block, `fields` are
    the other fields of its Kernel."""

    def add(build: Build) -> Build:
        REGISTERED[name] = Kernel(name, build, does=does, **fields)
        return build

    return add


def kernel_steps(steps: Steps) -> tuple[Step, ...]:
    """Return the steps that a kernel computes: from ffn_input to ffn_output, without dropout, as in eval mode."""
    return without_dropout(ffn_steps(steps))


def without_dropout(steps: Steps) -> tuple[Step, ...]:
    """Return the steps without dropout, as in eval mode."""
    kept: list[Step] = []
    same: dict[str, str] = {}  # name of a dropout step → its input
    for step in steps:
        inputs = tuple(same.get(name, name) for name in step.inputs)
        if isinstance(step.op, Dropout):
            same[step.output] = inputs[0]
        else:
            op = step.op
            if isinstance(op, Experts):
                op = replace(op, program=without_dropout(op.program))
            kept.append(replace(step, op=op, inputs=inputs))
    return tuple(kept)
