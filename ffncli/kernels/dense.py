"""A dense FFN as kernels need it, read from the block's steps; and the operations between the FFN's matrices
(activation, gate, norm), which are the same in every kernel.

Activations are written as a user would write them in torch: the native function if there is one, otherwise a line of
torch. They are independent of the formulas in `block.activations`, so that each checks the other; only an activation
with neither a native function nor such a line runs its formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.block.steps import Activation, Add, Experts, Norm, Op, Step, parameters

_STEPS = ("gate", "up", "gate_scaled", "act", "lift", "hidden", "sub_norm", "down")


@dataclass(frozen=True)
class Dense:
    """One FFN of two or three matrices. `prefix` is the prefix of its steps' names (`shared.`).

    `act` is the activation's op; `lift` is applied to up before the product (gpt-oss); `gate_scale` multiplies the gate
    before its activation; `sub_norm` normalises the input of down (BitNet).
    """

    gated: bool
    act: Activation
    lift: Activation | None
    gate_scale: float
    sub_norm: Norm | None
    prefix: str = ""


def dense(steps: Sequence[Step], prefix: str = "") -> Dense | None:
    """Return the dense FFN formed by the steps whose names start with `prefix`; None if they do not form one."""
    by = {step.output.removeprefix(prefix): step for step in steps if step.output.startswith(prefix)}
    if not {"up", "act", "down"} <= set(by) or (not prefix and not set(by) <= set(_STEPS)):
        return None
    ops: dict[str, Op] = {name: step.op for name, step in by.items()}
    act, lift, norm, scale = ops["act"], ops.get("lift"), ops.get("sub_norm"), ops.get("gate_scaled", Add())
    assert isinstance(act, Activation)
    assert isinstance(scale, Add)
    assert lift is None or isinstance(lift, Activation)
    assert norm is None or isinstance(norm, Norm)
    return Dense("gate" in by, act, lift, scale.scale, norm, prefix)


def dense_block(steps: Sequence[Step]) -> Dense:
    """Return the dense FFN formed by these steps; the kernel must not have refused them."""
    block = dense(steps)
    assert block is not None
    return block


def refuses_odd_widths(steps: Sequence[Step], multiple: int) -> str | None:
    """Return why a kernel whose products need widths that are multiples of `multiple` cannot compute these steps."""
    sizes = (axis.size for axes in parameters(steps).values() if len(axes) > 1 for axis in axes)
    odd = next((size for size in sizes if size % multiple), None)
    return None if odd is None else f"computes widths that are multiples of {multiple} only, not {odd}"


def refuses_all_but_dense(steps: Sequence[Step]) -> str | None:
    """Return why a kernel for dense FFNs cannot compute these steps."""
    if dense(steps) is not None:
        return None
    return "cannot compute " + ("experts" if any(isinstance(step.op, Experts) for step in steps) else "this block")


Weights = Mapping[str, Tensor]
Between = Callable[[Tensor | None, Tensor, Weights], Tensor]


def between(shape: Dense) -> Between:
    """Return f(gate, up, weights) → the input of down, before any norm; `gate` is None in a plain block."""
    act, lift = activation(shape.act), activation(shape.lift) if shape.lift else None

    def plain(gate: Tensor | None, up: Tensor, w: Weights) -> Tensor:
        return act(up, learned(w, shape.prefix))

    def gated(gate: Tensor | None, up: Tensor, w: Weights) -> Tensor:
        assert gate is not None
        gate = gate if shape.gate_scale == 1 else gate * shape.gate_scale
        return act(gate, learned(w, shape.prefix)) * (lift(up, {}) if lift else up)

    return gated if shape.gated else plain


def normed(shape: Dense, x: Tensor, w: Weights) -> Tensor:
    """Apply the block's norm over d_ff (BitNet) to x [..., d_ff], with torch's functions; without a norm, return x."""
    return x if shape.sub_norm is None else norm(shape.sub_norm, f"{shape.prefix}sub_norm", x, w)


def norm(op: Norm, name: str, x: Tensor, w: Weights) -> Tensor:
    """Apply a norm to x with torch's functions; `name` is the prefix of the norm's parameters."""
    weight, bias = w.get(f"{name}.weight"), w.get(f"{name}.bias")
    weight = 1 + weight if op.weight == "one_plus" and weight is not None else weight
    if op.weigh == "input" and weight is not None:
        x, weight = x * weight, None
    if op.kind == "layernorm":
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, op.eps)
    out = functional.rms_norm(x, (x.shape[-1],), weight, op.eps)
    return out if bias is None else out + bias


def learned(w: Weights, prefix: str) -> dict[str, Tensor]:
    """Return the activation's learned parameters, keyed by their names in the activation."""
    start = f"{prefix}act."
    return {name.removeprefix(start): tensor for name, tensor in w.items() if name.startswith(start)}


Learned = Mapping[str, Tensor]


def _xielu(x: Tensor, learned: Learned) -> Tensor:
    """xIELU (Huang & Schlag 2024), as computed by transformers' XIELUActivation."""
    positive, negative = functional.softplus(learned["alpha_p"]), 0.5 + functional.softplus(learned["alpha_n"])
    curve = torch.expm1(torch.clamp(x, max=-1e-6)) - x
    return torch.where(x > 0, positive * x * x, negative * curve) + 0.5 * x


_WRITTEN: Mapping[str, Callable[[Tensor, Learned], Tensor]] = {
    "identity": lambda x, learned: x,
    "relu2": lambda x, learned: functional.relu(x).square(),
    "quick_gelu": lambda x, learned: x * torch.sigmoid(1.702 * x),
    "gelu_10": lambda x, learned: functional.gelu(x).clamp(max=10.0),
    "sqrtsoftplus": lambda x, learned: functional.softplus(x, threshold=40.0).sqrt(),
    "laplace": lambda x, learned: 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0)))),
    "prelu": lambda x, learned: functional.prelu(x, learned["weight"]),
    "xielu": _xielu,
}


def activation(op: Activation) -> Callable[[Tensor, Learned], Tensor]:
    """Return f(x, learned) = min(f(clip(x, low, high)), most) + plus; `learned` maps names to learned parameters."""
    call = _function(op.function) if op.soft_cap is None else partial(_soft_capped, op.function, op.soft_cap)
    if op == Activation(op.function, soft_cap=op.soft_cap):
        return call

    def limited(x: Tensor, learned: Learned) -> Tensor:
        if op.low is not None or op.high is not None:
            x = x.clamp(op.low, op.high)
        y = call(x, learned)
        if op.most is not None:
            y = y.clamp(max=op.most)
        return y + op.plus if op.plus else y

    return limited


def _soft_capped(name: str, cap: float, x: Tensor, learned: Learned) -> Tensor:
    linear = torch.tanh(x / cap) * cap
    return linear if name == "identity" else linear * torch.sigmoid(x)


def _function(name: str) -> Callable[[Tensor, Learned], Tensor]:
    row = TABLE[name]
    if row.native is not None:
        native, options = getattr(functional, row.native[0]), row.native[1]
        return lambda x, learned: native(x, **options)
    return _WRITTEN.get(name) or (lambda x, learned: row.f(x, with_learned(torch, learned)))
