"""A kernel as a function f(x): built once, for one block, device and dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Step, block_inputs, feature_axis, parameters, tables
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.kernels.choice import KernelChoice
from ffncli.kernels.kernel import Computes, Kernel, Params, kernel_steps
from ffncli.run.engine.prepare import dtype_name
from ffncli.run.user.kernels import kernel_of

Block = FFNSpec | Sequence[Step]


@dataclass(frozen=True)
class SharedKernel:
    """A kernel that threads share: `compute(x [tokens, d_model], params)` returns a tensor of the same shape, which no
    later call overwrites."""

    kernel: Kernel
    steps: tuple[Step, ...]
    device: torch.device
    dtype: torch.dtype
    compute: Computes


def built(kernel: Kernel, block: Sequence[Step], device: torch.device, dtype: torch.dtype) -> SharedKernel:
    """Build the kernel for these steps; raise FFNError with the kernel's reason if it cannot compute them."""
    inputs = block_inputs(block)
    several = f"this block takes {' and '.join(inputs)}" if len(inputs) > 1 else None
    if reason := several or kernel.refusal(block, str(device), dtype):
        raise FFNError(f"{kernel.name}: {reason}", "ffncli.kernel_names() lists the others")
    compute = kernel.build(block, str(device), dtype)
    if kernel.origin or kernel.keeps or kernel.per_weights or kernel.compiles:
        compute = _in_turn(compute, copies=bool(kernel.origin) or kernel.keeps == "output")
    return SharedKernel(kernel, tuple(block), device, dtype, compute)


def _in_turn(compute: Computes, copies: bool) -> Computes:
    """Admit one thread at a time, and copy the output if the next call may overwrite it: a user's kernel may keep
    anything."""
    lock = Lock()

    def run(x: Tensor, params: Params) -> Tensor:
        with lock:
            out = compute(x, params)
            return out.clone() if copies and isinstance(out, Tensor) else out

    return run


@dataclass(frozen=True)
class KernelFunction:
    """The function f(x): x [..., d_model] → a new tensor of the same shape, computed by one kernel with fixed weights.

    Gradients flow to x if the kernel supports them. Raise FFNError if x has another width, dtype or device.
    """

    built: SharedKernel
    params: Params
    d_model: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return the block's output for x."""
        built, shape = self.built, x.shape if isinstance(x, Tensor) else ()
        if (
            not shape
            or shape[-1] != self.d_model
            or x.dtype is not built.dtype
            or x.device != built.device
            or (x.requires_grad and not built.kernel.trains and torch.is_grad_enabled())
        ):
            raise self._refusal(x)
        if len(shape) == 2 and shape[0] and x.is_contiguous():
            return built.compute(x, self.params)
        return built.compute(x.reshape(-1, self.d_model).contiguous(), self.params).view(shape) if x.numel() else x

    def _refusal(self, x: Tensor) -> FFNError:
        name, device = self.built.kernel.name, self.built.device
        if not isinstance(x, Tensor):
            return FFNError(f"{name}: x must be a tensor [..., {self.d_model}], got a {type(x).__name__}")
        if x.dim() == 0 or x.shape[-1] != self.d_model:
            return FFNError(f"{name}: x has shape {list(x.shape)}, expected [..., {self.d_model}]")
        if x.dtype != self.built.dtype or x.device != device:
            there = f"{dtype_name(self.built.dtype)} on {device}"
            return FFNError(f"{name}: x is {dtype_name(x.dtype)} on {x.device}, the weights are {there}", "convert one")
        return FFNError(f"{name} computes forward only, and x requires a gradient", "call it under torch.no_grad()")


def kernel_function(choice: KernelChoice, block: Block, weights: Mapping[str, Tensor]) -> KernelFunction:
    """Build f(x) from a block's canonical weights [out, in], which must not change while f is in use.

    The block runs from ffn_input to ffn_output, without norms around it, as in eval mode. Raise FFNError for weights
    that are missing or unknown, or that have another shape, dtype or device.
    """
    whole = steps(block) if isinstance(block, FFNSpec) else tuple(block)
    inner = kernel_steps(whole)
    given = _checked(weights, whole, inner)
    like = given["down.weight" if "down.weight" in given else next(iter(given))]
    if choice.file is not None and not isinstance(block, FFNSpec):
        raise FFNError(f"{shown(choice.text)} needs the block as an ffncli.FFNSpec", "steps alone do not identify it")
    chosen = kernel_of(choice, inner, block if isinstance(block, FFNSpec) else FFNSpec(1, 1))
    ready = built(chosen, inner, like.device, like.dtype)
    axis = feature_axis(whole)
    return KernelFunction(ready, chosen.prepare(inner, given), axis.size if axis else like.shape[-1])


def _checked(weights: Mapping[str, Tensor], whole: Sequence[Step], inner: Sequence[Step]) -> dict[str, Tensor]:
    """Return the weights of the inner steps, contiguous and detached; ignore the weights of surrounding norms."""
    needed = {**parameters(inner), **tables(inner)}
    known = {**needed, **parameters(whole)}
    if unknown := next((name for name in weights if name not in known), None):
        has = f"this block has {', '.join(needed)}"
        raise FFNError(f"weights: no weight {shown(unknown)}", did_you_mean(str(unknown), list(needed), has))
    if missing := [name for name in needed if name not in weights]:
        given = ", ".join(map(str, weights)) or "none"
        raise FFNError(f"weights: {' and '.join(missing)} missing", f"given: {given}; all are [out, in]")
    first: tuple[str, Tensor] | None = None
    for name, axes in needed.items():
        tensor, shape = weights[name], [axis.size for axis in axes]
        if not isinstance(tensor, Tensor):
            raise FFNError(f"weights: {name} must be a tensor, got a {type(tensor).__name__}")
        if list(tensor.shape) != shape:
            sizes = ", ".join(f"{axis.name} = {axis.size}" for axis in axes)
            raise FFNError(f"weights: {name} has shape {list(tensor.shape)}, expected {shape} ({sizes})")
        if name in tables(inner):
            continue
        first = first or (name, tensor)
        if (tensor.dtype, tensor.device) != (first[1].dtype, first[1].device) or not tensor.is_floating_point():
            kinds = [f"{n} is {dtype_name(t.dtype)} on {t.device}" for n, t in (first, (name, tensor))]
            raise FFNError(f"weights: {', '.join(dict.fromkeys(kinds))}", "give all in one float dtype, on one device")
    return {name: weights[name].detach().contiguous() for name in needed}
