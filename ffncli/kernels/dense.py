"""A dense FFN as kernels need it, read from the block's steps: the places of its weights, its function, and the
operations between its matrices (activation, gate, norm), which are the same in every kernel.

Activations are written as a user would write them in torch: the native function if there is one, otherwise a line of
torch. They are independent of the formulas in `block.activations`, so that each checks the other; only an activation
with neither a native function nor such a line runs its formula.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.block.steps import Activation, Add, Experts, Norm, Op, Step, parameters
from ffncli.kernels.kernel import Computes, Params

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
    ops = {step.output.removeprefix(prefix): step.op for step in steps if step.output.startswith(prefix)}
    if not {"up", "act", "down"} <= set(ops) or (not prefix and not set(ops) <= set(_STEPS)):
        return None
    act, lift, norm, scale = ops["act"], ops.get("lift"), ops.get("sub_norm"), ops.get("gate_scaled", Add())
    assert isinstance(act, Activation)
    assert isinstance(scale, Add)
    assert lift is None or isinstance(lift, Activation)
    assert norm is None or isinstance(norm, Norm)
    return Dense("gate" in ops, act, lift, scale.scale, norm, prefix)


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


# --- weights by position ----------------------------------------------------------------------------------------------

Weights: TypeAlias = tuple[Any, ...]  # a kernel's params, then a None for the weights that the block does not have
Place: TypeAlias = Callable[[str], int]
Part: TypeAlias = Callable[[Tensor, Weights], Tensor]
Linear: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) → x · weightᵀ + bias


def places(names: Iterable[str]) -> Place:
    """Return a function that maps a weight's name to its index in `(*params, None)`, for params with these names.

    Kernels find out indices when they are built, so that a call looks up no name. A weight that the block does not have
    (a bias) has the index of the None.
    """
    at = {name: index for index, name in enumerate(names)}
    return lambda name: at.get(name, len(at))


def layer(name: str, place: Place) -> tuple[int, int]:
    """Return the places of a layer's weight and bias."""
    return place(f"{name}.weight"), place(f"{name}.bias")


class Body:
    """A dense FFN with its weights at known places: `gate`, `up` and `down` are pairs of weight and bias, `learned` are
    the activation's parameters. `lift` and `norm` are the identity if the block has none."""

    def __init__(self, shape: Dense, place: Place) -> None:
        self.shape, prefix = shape, shape.prefix
        self.gate, self.up, self.down = (layer(prefix + name, place) for name in ("gate", "up", "down"))
        first = place(f"{prefix}act.{next(iter(shape.act.parameters()), '')}")
        self.learned = slice(first, first + len(shape.act.parameters()))  # neighbours, since params are in step order
        self._function, self.lift = activation(shape.act), activation(shape.lift or Activation("identity"))
        self.norm = norm(shape.sub_norm, f"{prefix}sub_norm", place)

    def act(self, x: Tensor, p: Weights) -> Tensor:
        """Return the activation of the gate (of up in a plain block), which is scaled first."""
        scale = self.shape.gate_scale
        return self._function(x if scale == 1 else x * scale, *p[self.learned])

    def hidden(self, gate: Tensor | None, up: Tensor, *, p: Weights) -> Tensor:
        """Return the input of down; `gate` is None in a plain block."""
        return self.norm(self.act(up, p) if gate is None else self.act(gate, p) * self.lift(up), p)

    def nested(self, linear: Linear) -> Computes:
        """Return f(x, params) with products computed by `linear`.

        If nothing but an activation function stands between them, f is the expression that a user would write by hand:
        it costs as much, and frees each intermediate as early.
        """
        shape, act = self.shape, self._function
        (gate, gate_bias), (up, up_bias), (down, down_bias) = self.gate, self.up, self.down

        def plain(x: Tensor, params: Params) -> Tensor:
            p: Weights = (*params, None)
            return linear(act(linear(x, p[up], p[up_bias])), p[down], p[down_bias])

        def gated(x: Tensor, params: Params) -> Tensor:
            p: Weights = (*params, None)
            return linear(act(linear(x, p[gate], p[gate_bias])) * linear(x, p[up], p[up_bias]), p[down], p[down_bias])

        if shape == Dense(shape.gated, shape.act, None, 1, None, shape.prefix) and not shape.act.parameters():
            return gated if shape.gated else plain
        return self.composed(lambda weight, bias: lambda x, p: linear(x, p[weight], p[bias]))

    def composed(self, product: Callable[[int, int], Part]) -> Computes:
        """Return f(x, params), where `product(*places)` returns the function of a layer."""
        act, lift, norm, is_gated = self.act, self.lift, self.norm, self.shape.gated
        first, up, down = product(*(self.gate if is_gated else self.up)), product(*self.up), product(*self.down)

        def run(x: Tensor, params: Params) -> Tensor:
            p: Weights = (*params, None)
            hidden = act(first(x, p), p) * lift(up(x, p)) if is_gated else act(first(x, p), p)
            return down(norm(hidden, p), p)

        return run


def body_of(steps: Sequence[Step], names: Iterable[str] | None = None) -> Body:
    """Return the dense FFN formed by these steps, which the kernel must not have refused; its params have these names,
    or are in step order."""
    shape = dense(steps)
    assert shape is not None
    return Body(shape, places(names or parameters(steps)))


# --- between the matrices ---------------------------------------------------------------------------------------------


def norm(op: Op | None, name: str, place: Place) -> Part:
    """Return a norm over the last axis with torch's functions, f(x, weights); without a norm, the identity."""
    if op is None:
        return lambda x, p: x
    assert isinstance(op, Norm)
    (weight_at, bias_at), width, eps = layer(name, place), (op.axis.size,), op.eps

    def apply(x: Tensor, p: Weights) -> Tensor:
        weight, bias = p[weight_at], p[bias_at]
        weight = 1 + weight if op.weight == "one_plus" else weight
        if op.weigh == "input" and weight is not None:
            x, weight = x * weight, None
        if op.kind == "layernorm":
            return functional.layer_norm(x, width, weight, bias, eps)
        return plus(functional.rms_norm(x, width, weight, eps), bias)

    return apply


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias; x if there is no bias."""
    return x if bias is None else x + bias


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """xIELU (Huang & Schlag 2024), as computed by transformers' XIELUActivation."""
    positive, negative = functional.softplus(alpha_p), 0.5 + functional.softplus(alpha_n)
    curve = torch.expm1(torch.clamp(x, max=-1e-6)) - x
    return torch.where(x > 0, positive * x * x, negative * curve) + 0.5 * x


Function: TypeAlias = Callable[..., Tensor]  # (x, *learned parameters in the order of the activation's row)
_WRITTEN: Mapping[str, Function] = {
    "identity": lambda x: x,
    "relu2": lambda x: functional.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_10": lambda x: functional.gelu(x).clamp(max=10.0),
    "sqrtsoftplus": lambda x: functional.softplus(x, threshold=40.0).sqrt(),
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0)))),
    "prelu": functional.prelu,
    "xielu": _xielu,
}


def activation(op: Activation) -> Function:
    """Return f(x, *learned) = min(f(clip(x, low, high)), most) + plus: torch's own function if nothing is added to
    it."""
    call = _function(op.function) if op.soft_cap is None else partial(_soft_capped, op.function, op.soft_cap)
    if op == Activation(op.function, soft_cap=op.soft_cap):
        return call

    def limited(x: Tensor, *learned: Tensor) -> Tensor:
        if op.low is not None or op.high is not None:
            x = x.clamp(op.low, op.high)
        y = call(x, *learned)
        if op.most is not None:
            y = y.clamp(max=op.most)
        return y + op.plus if op.plus else y

    return limited


def _soft_capped(name: str, cap: float, x: Tensor) -> Tensor:
    linear = torch.tanh(x / cap) * cap
    return linear if name == "identity" else linear * torch.sigmoid(x)


def _function(name: str) -> Function:
    row = TABLE[name]
    if row.native is not None:
        native, options = row.native
        function: Function = getattr(functional, native)
        return partial(function, **options) if options else function
    written = _WRITTEN.get(name)
    return written or (lambda x, *learned: row.f(x, with_learned(torch, dict(zip(row.learned, learned, strict=True)))))
