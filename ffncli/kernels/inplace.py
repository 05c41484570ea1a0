"""inplace: products, activation and gate are written to existing buffers, so that a call allocates little memory.

Forward only: values that a backward pass needs are overwritten.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.steps import Activation, parameters
from ffncli.kernels.dense import Learned, Weights, activation, dense_block, learned, normed, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Steps, by_name, register

Changes = Callable[[Tensor, Learned], Tensor]

# functions of torch.nn.functional that overwrite their argument with `inplace=True`
_INPLACE = ("relu", "relu6", "leaky_relu", "silu", "mish", "hardswish", "elu", "selu")
_WRITTEN: Mapping[str, Changes] = {
    "identity": lambda x, learned: x,
    "relu2": lambda x, learned: x.relu_().square_(),
    "gelu": lambda x, learned: torch.ops.aten.gelu_(x),
    "gelu_tanh": lambda x, learned: torch.ops.aten.gelu_(x, approximate="tanh"),
    "sigmoid": lambda x, learned: x.sigmoid_(),
    "tanh": lambda x, learned: x.tanh_(),
    "gelu_10": lambda x, learned: torch.ops.aten.gelu_(x).clamp_(max=10.0),
    "quick_gelu": lambda x, learned: x.mul_(torch.sigmoid(1.702 * x)),  # allocates one temporary
}


def changed(op: Activation) -> Changes:
    """Return f(x, learned) = min(f(clip(x, low, high)), most) + plus. It overwrites x if torch has an in-place version
    of the function; otherwise it returns a new tensor."""
    call = _function(op.function) if op.soft_cap is None else _soft_capped(op)

    def run(x: Tensor, learned: Learned) -> Tensor:
        if op.low is not None or op.high is not None:
            x.clamp_(op.low, op.high)
        out = call(x, learned)
        if op.most is not None:
            out.clamp_(max=op.most)
        return out.add_(op.plus) if op.plus else out

    return run


def _soft_capped(op: Activation) -> Changes:
    cap = op.soft_cap or 0.0

    def run(x: Tensor, learned: Learned) -> Tensor:
        share = None if op.function == "identity" else torch.sigmoid(x)  # allocates one temporary
        x.div_(cap).tanh_().mul_(cap)
        return x if share is None else x.mul_(share)

    return run


def _function(name: str) -> Changes:
    row = TABLE[name]
    if name in _INPLACE and row.native is not None:
        native: Callable[..., Tensor] = getattr(functional, row.native[0])
        options: dict[str, Any] = {**row.native[1], "inplace": True}
        return lambda x, learned: native(x, **options)
    return _WRITTEN.get(name) or activation(Activation(name))


class Buffers:
    """The buffers that each call writes its results to. They are reused by the next call, or replaced if the number of
    tokens changes."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}

    def of(self, name: str, x: Tensor, width: int) -> Tensor:
        """Return the buffer with that name: [tokens, width], uninitialised."""
        buffer = self._by_name.get(name)
        if buffer is None or buffer.shape[0] != x.shape[0]:
            with torch.inference_mode(False):  # a tensor created in inference mode cannot be written to outside of it
                buffer = self._by_name[name] = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        return buffer


@register("inplace", refuses=refuses_all_but_dense, trains=False)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute down(act(gate) · up), with each result, even the output, in a buffer that the next call overwrites."""
    buffers = Buffers()

    def product(name: str, x: Tensor, w: Weights) -> Tensor:
        weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
        out = buffers.of(name, x, weight.shape[0])
        return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)

    return by_name(parameters(steps), computing(steps, product))


def computing(steps: Steps, product: Callable[[str, Tensor, Weights], Tensor]) -> Callable[[Tensor, Weights], Tensor]:
    """Return the block, f(x, weights); it applies activation and gate in place to the result of `product(name, x,
    weights)`."""
    shape = dense_block(steps)
    act, lift = changed(shape.act), changed(shape.lift) if shape.lift else None

    def run(x: Tensor, w: Weights) -> Tensor:
        numbers = learned(w, shape.prefix)
        if shape.gated:
            gate = product("gate", x, w)
            hidden = act(gate if shape.gate_scale == 1 else gate.mul_(shape.gate_scale), numbers)
            up = product("up", x, w)
            hidden = hidden.mul_(lift(up, {}) if lift else up)
        else:
            hidden = act(product("up", x, w), numbers)
        return product("down", normed(shape, hidden, w), w)

    return run
