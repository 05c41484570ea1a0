"""The requests to a kernel's host process, and the regions of tensors in the memory shared with the parent process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from mmap import mmap
from typing import Literal

import torch
from torch import Tensor

from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Step
from ffncli.kernels.choice import KernelChoice


@dataclass(frozen=True)
class Region:
    """A tensor's region of the shared memory: its first byte, its shape, its dtype."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor."""
        return self.start + prod(self.shape) * self.dtype.itemsize

    def of(self, memory: mmap) -> Tensor:
        """Return the tensor as a view of `memory`."""
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=prod(self.shape), offset=self.start)
        return flat.reshape(self.shape)


@dataclass(frozen=True)
class HostSetup:
    """The first request: the device, torch's thread count (None: torch's default), and the limit on allocated bytes."""

    device: str
    threads: int | None
    most_bytes: int | None


@dataclass(frozen=True)
class LoadRequest:
    """A request to load a kernel for a block. `size` is the size of the shared memory in bytes.

    `weights` are already in the memory; `inputs` are the regions for x [most tokens, d_model], `output` is the region
    for the result. With `backward`, `upstream` is the region for the gradient of the output, and `gradients` are the
    regions for the gradients of `x` and of the weights, by name.
    """

    choice: KernelChoice
    spec: FFNSpec
    steps: tuple[Step, ...]
    dtype: torch.dtype
    size: int
    weights: Mapping[str, Region]
    inputs: tuple[Region, ...]
    output: Region
    upstream: Region | None = None
    gradients: Mapping[str, Region] = field(default_factory=dict)


@dataclass(frozen=True)
class CallRequest:
    """A request to call the kernel on the first `tokens` tokens of the input region with index `place`, in inference
    mode or with `grad` mode on, though no tensor requires a gradient."""

    tokens: int
    place: int
    grad: bool = False


Layout = Literal["rows", "columns", "one row", "one value"]


@dataclass(frozen=True)
class GradientRequest(CallRequest):
    """A request to call the kernel, and to compute the gradients of the tensors in `trained` (`x` and weights).

    `layout` is how the gradient of the output lies in memory: contiguous `rows`, a transposed matrix (`columns`), or
    the first row, or the first value, expanded to the whole shape. `passes` is the number of backward passes over the
    same graph, of which the last one counts. `then` is the index of another input region: its gradients, with the same
    gradient of the output, are accumulated into those of the weights.
    """

    trained: tuple[str, ...] = ()
    layout: Layout = "rows"
    passes: int = 1
    then: int | None = None


def laid_out(upstream: Tensor, tokens: int, layout: Layout) -> Tensor:
    """Return the gradient of the output [tokens, d_model] in this layout, as a view of `upstream` [most tokens,
    d_model]."""
    width = upstream.shape[1]
    if layout == "rows":
        return upstream[:tokens]
    if layout == "columns":
        return upstream.flatten()[: tokens * width].view(width, tokens).T
    return (upstream[:1] if layout == "one row" else upstream[:1, :1]).expand(tokens, width)


@dataclass(frozen=True)
class TakeWeights:
    """A request to go on with the weights that are in the shared memory now, as with those of another layer."""


@dataclass(frozen=True)
class ShowWeights:
    """A request to write the current weights back to the shared memory, because a GPU has its own copies."""


@dataclass(frozen=True)
class ShowSurroundings:
    """A request for the files and the environment variables that the kernel's code has read."""


HostRequest = LoadRequest | CallRequest | GradientRequest | TakeWeights | ShowWeights | ShowSurroundings
