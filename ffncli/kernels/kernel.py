"""Kernel: a way to compute an FFN, as a record of two functions; and a decorator that registers the package's.

`prepare` puts the weights into the form that a kernel needs (packed, say), once for each copy or placement.
`build` returns the function to call, once for each case; compiling belongs there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from ffncli.block.dtypes import find
from ffncli.block.steps import Dropout, Experts, Op, Step, ffn_steps, parameters
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
    """The weights as they are, in step order."""
    return tuple(weights[name] for name in parameters(steps))


def any_block(steps: Steps) -> str | None:
    """Refuses nothing."""
    return None


@dataclass(frozen=True)
class Kernel:
    """`prepare(steps, weights) -> params` and `build(steps, device, dtype) -> f(x, params)`.

    `steps` run from ffn_input to ffn_output in eval mode (`kernel_steps`); `weights` are canonical, contiguous, on the
    device, in the dtype, and read-only. `f` maps x [tokens, d_model], also read-only, to a tensor of the same shape and
    dtype. `needs` names its requirements: `cuda`, `cpu`, `compiler`, `onednn`, `mkl`, `sm_89` (of a GPU: that compute
    capability or more), or a module (`triton` also needs a GPU, or Triton's interpreter). `refuses(steps)` returns why
    it cannot compute a block, or None.
    `origin` is the file of a user's kernel.

    `trains`: gradients flow from f's output to x and to the params, and through `prepare` to the weights.
    `compiles`: the first call with a shape compiles, which is reported separately. `dtypes`: those it computes in, by
    our names (`fp32`); None is all of them. `computes` declares fewer bits than the case's dtype has: a format and, if
    it helps, how (`fp8-rowwise`); such a kernel has a wider bound, and is compared with its like only. `most_tokens`: f
    computes any number of tokens, but was made for so many at most, so a benchmark of more leaves it out; None: no
    limit. `per_weights`: the first call with params and a number of tokens makes something for these two, and keeps it
    (`PerWeights`), so whoever times it makes that call before. If it also compiles, then the weights are in its code: a
    benchmark has one copy of them, which only a flush makes cold.
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

    def forms(self, dtype: torch.dtype) -> int:
        """Copies of the weights in this dtype that what it makes of them may take: of a form of its own, which may be
        float32 where the dtype has 16 bits.
        """
        if self.prepare is canonical:
            return 0
        return 2 if dtype.itemsize == 2 and not self.per_weights else 1

    def missing(self, device: str) -> str | None:
        """What it needs and this machine lacks, in words; None if nothing is missing."""
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
        """Every reason why it cannot run this case, joined by `; `; None if it can.

        `dtype` is torch's or one of our names, `passes` forward or forward+backward, `tokens` their number if known,
        `cold` whether copies of the weights keep them out of the caches.
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
            reasons.append(f"is for {self.most_tokens} {plural('token', self.most_tokens)} at most")
        if cold and self.per_weights and self.compiles:
            reasons.append(
                "its weights are in compiled code, one copy of them, so copies cannot keep them cold: --cache flush can"
            )
        return "; ".join(reason for reason in reasons if reason) or None


_NO_MODULES = ("cuda", "cpu", "compiler", "onednn", "mkl")


def _has_onednn() -> bool:
    """Whether torch's CPU build has oneDNN's products with reordered weights."""
    import torch

    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _has_mkl() -> bool:
    """Whether torch's CPU build has MKL's products with packed weights."""
    import torch

    return torch._C.has_mkl and hasattr(torch.ops.mkl, "_mkl_linear")


_CAPABILITY = "sm_"


def _older_gpu(least: str, device: str) -> str | None:
    """Why a GPU that is older than compute capability `least` (`89`) cannot do; None of others, and of a CPU."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor >= int(least):
        return None
    return f"needs a GPU of compute capability {least[:-1]}.{least[-1]}, this one has {major}.{minor}"


def cxx() -> str | None:
    """The C++ compiler for torch.compile on a CPU: CXX if set, else g++, else clang++; None without one."""
    named = os.environ.get("CXX", "").strip()
    return next((path for name in ([named] if named else ["g++", "clang++"]) if (path := shutil.which(name))), None)


def interprets_triton() -> bool:
    """Whether TRITON_INTERPRET makes Triton run its kernels as Python, on a CPU too: for a check, never for a time."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "yes", "on", "y")


REGISTERED: dict[str, Kernel] = {}


def register(
    name: str,
    *,
    prepare: Prepare = canonical,
    needs: tuple[str, ...] = (),
    refuses: Refuses = any_block,
    trains: bool = True,
    compiles: bool = False,
    dtypes: tuple[str, ...] | None = None,
    computes: str = "",
    most_tokens: int | None = None,
    per_weights: bool = False,
) -> Callable[[Build], Build]:
    """Decorates the `build` of a kernel that comes with the package."""

    def add(build: Build) -> Build:
        how = (trains, compiles, dtypes, computes, most_tokens, per_weights)
        REGISTERED[name] = Kernel(name, build, prepare, needs, refuses, "", *how)
        return build

    return add


def kernel_steps(steps: Steps) -> tuple[Step, ...]:
    """The steps that a kernel computes: from ffn_input to ffn_output, without dropout, as in eval mode."""
    return without_dropout(ffn_steps(steps))


def without_dropout(steps: Steps) -> tuple[Step, ...]:
    """The steps in eval mode."""
    kept: list[Step] = []
    same: dict[str, str] = {}  # a dropout's name → its input
    for step in steps:
        inputs = tuple(same.get(name, name) for name in step.inputs)
        if isinstance(step.op, Dropout):
            same[step.output] = inputs[0]
        else:
            kept.append(replace(step, op=_eval(step), inputs=inputs))
    return tuple(kept)


def _eval(step: Step) -> Op:
    """The step's op; dropout is removed from experts too."""
    return replace(step.op, program=without_dropout(step.op.program)) if isinstance(step.op, Experts) else step.op
