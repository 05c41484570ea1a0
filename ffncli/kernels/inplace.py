"""inplace: products, activation and gate are written to existing buffers, so that a call allocates little memory.

Forward only: values that a backward pass needs are overwritten.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.steps import Activation, parameters
from ffncli.kernels.dense import Function, Part, Weights, activation, body_of, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, register

# functions of torch.nn.functional that overwrite their argument with `inplace=True`
_INPLACE = ("relu", "relu6", "leaky_relu", "silu", "mish", "hardswish", "elu", "selu")
_WRITTEN: Mapping[str, Function] = {
    "identity": lambda x: x,
    "relu2": lambda x: x.relu_().square_(),
    "gelu": lambda x: torch.ops.aten.gelu_(x),
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "sigmoid": lambda x: x.sigmoid_(),
    "tanh": lambda x: x.tanh_(),
    "gelu_10": lambda x: torch.ops.aten.gelu_(x).clamp_(max=10.0),
    "quick_gelu": lambda x: x.mul_(torch.sigmoid(1.702 * x)),  # allocates one temporary
}


def changed(op: Activation) -> Function:
    """Return f(x, *learned) = min(f(clip(x, low, high)), most) + plus. It overwrites x if torch has an in-place version
    of the function; otherwise it returns a new tensor."""
    call = _function(op.function) if op.soft_cap is None else _soft_capped(op)
    if op == Activation(op.function, soft_cap=op.soft_cap):
        return call

    def run(x: Tensor, *learned: Tensor) -> Tensor:
        if op.low is not None or op.high is not None:
            x.clamp_(op.low, op.high)
        out = call(x, *learned)
        if op.most is not None:
            out.clamp_(max=op.most)
        return out.add_(op.plus) if op.plus else out

    return run


def _soft_capped(op: Activation) -> Function:
    cap = op.soft_cap or 0.0

    def run(x: Tensor) -> Tensor:
        share = None if op.function == "identity" else torch.sigmoid(x)  # allocates one temporary
        x.div_(cap).tanh_().mul_(cap)
        return x if share is None else x.mul_(share)

    return run


def _function(name: str) -> Function:
    row = TABLE[name]
    if name in _INPLACE and row.native is not None:
        return partial(getattr(functional, row.native[0]), **row.native[1], inplace=True)
    return _WRITTEN.get(name) or activation(Activation(name))


Multiplies = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]  # (x, weight, bias, buffer) → the buffer


def in_buffers(steps: Steps, multiply: Multiplies) -> Computes:
    """Return the block with each product, even the output, written by `multiply` to a buffer of its own.

    A buffer is reused by the next call, or replaced if the number of tokens changes.
    """
    widths = [axes[0].size for axes in parameters(steps).values()]

    def product(weight: int, bias: int) -> Part:
        buffer: Tensor | None = None

        def call(x: Tensor, p: Weights) -> Tensor:
            nonlocal buffer
            if buffer is None or buffer.shape[0] != x.shape[0]:
                with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
                    buffer = torch.empty(x.shape[0], widths[weight], dtype=x.dtype, device=x.device)
            return multiply(x, p[weight], p[bias], buffer)

        return call

    return computing(steps, product)


@register(
    "inplace",
    "into buffers that the next call overwrites",
    refuses=refuses_all_but_dense,
    trains=False,
    keeps="output",
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute down(act(gate) · up), with each result in a buffer that the next call overwrites."""

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)

    return in_buffers(steps, multiply)


def computing(steps: Steps, product: Callable[[int, int], Part]) -> Computes:
    """Return the block, f(x, params); it applies activation and gate in place to the result of a layer's product,
    whose function `product(*places)` returns."""
    body = body_of(steps)
    shape, learned, norm = body.shape, body.learned, body.norm
    act, lift = changed(shape.act), changed(shape.lift or Activation("identity"))
    first, up, down = product(*(body.gate if shape.gated else body.up)), product(*body.up), product(*body.down)

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        hidden = first(x, p)
        hidden = act(hidden if shape.gate_scale == 1 else hidden.mul_(shape.gate_scale), *p[learned])
        return down(norm(hidden.mul_(lift(up(x, p))) if shape.gated else hidden, p), p)

    return run
