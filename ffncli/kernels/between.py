"""What happens between the matrices of a dense FFN: the activation, the gate, a norm. The same in every kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Norm
from ffncli.kernels.activations import activation
from ffncli.kernels.pattern import Dense

Weights = Mapping[str, Tensor]
Between = Callable[[Tensor | None, Tensor, Weights], Tensor]


def between(shape: Dense) -> Between:
    """f(gate, up, weights) → the input of down, before any norm; `gate` is None in a plain block. Elementwise."""
    act, lift = activation(shape.act), activation(shape.lift) if shape.lift else None

    def plain(gate: Tensor | None, up: Tensor, w: Weights) -> Tensor:
        return act(up, learned(w, shape.prefix))

    def gated(gate: Tensor | None, up: Tensor, w: Weights) -> Tensor:
        assert gate is not None
        gate = gate if shape.gate_scale == 1 else gate * shape.gate_scale
        return act(gate, learned(w, shape.prefix)) * (lift(up, {}) if lift else up)

    return gated if shape.gated else plain


def normed(shape: Dense, x: Tensor, w: Weights) -> Tensor:
    """x [..., d_ff] after the block's norm over d_ff (BitNet), by torch's functions; unchanged without one."""
    return x if shape.sub_norm is None else norm(shape.sub_norm, f"{shape.prefix}sub_norm", x, w)


def norm(op: Norm, name: str, x: Tensor, w: Weights) -> Tensor:
    """x after a norm, by torch's functions; `name` begins those of its parameters."""
    weight, bias = w.get(f"{name}.weight"), w.get(f"{name}.bias")
    weight = 1 + weight if op.weight == "one_plus" and weight is not None else weight
    if op.weigh == "input" and weight is not None:
        x, weight = x * weight, None
    if op.kind == "layernorm":
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, op.eps)
    out = functional.rms_norm(x, (x.shape[-1],), weight, op.eps)
    return out if bias is None else out + bias


def learned(w: Weights, prefix: str) -> dict[str, Tensor]:
    """The activation's learned parameters, by their names in it."""
    start = f"{prefix}act."
    return {name.removeprefix(start): tensor for name, tensor in w.items() if name.startswith(start)}
