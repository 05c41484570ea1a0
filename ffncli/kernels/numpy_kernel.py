"""numpy: the block without torch's arithmetic. Tensors and arrays are views of each other; nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ffncli.block.steps import Activation, Norm, parameters
from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.pattern import dense, refuses_all_but_dense

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Arrays = Mapping[str, Array]
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _sigmoid(x: Array) -> Array:
    out: Array = 1.0 / (1.0 + np.exp(-x))
    return out


def _softplus(x: Array) -> Array:
    out: Array = np.logaddexp(x, x.dtype.type(0.0))
    return out


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _xielu(x: Array, learned: Arrays) -> Array:
    """Huang & Schlag 2024, as transformers' XIELUActivation computes it."""
    positive, negative = _softplus(learned["alpha_p"]), 0.5 + _softplus(learned["alpha_n"])
    return np.where(x > 0, positive * x * x, negative * (np.expm1(np.minimum(x, -1e-6)) - x)) + 0.5 * x


# Python's numbers take the array's dtype. Functions that need erf are missing: numpy has none.
FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.square(np.maximum(x, 0.0)),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "hardswish": lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "softplus": _softplus,
    "sqrtsoftplus": lambda x: np.sqrt(_softplus(x)),
    "elu": _elu,
    "selu": lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0.0))),
}
LEARNED: Mapping[str, Callable[[Array, Arrays], Array]] = {
    "prelu": lambda x, learned: np.where(x > 0, x, learned["weight"] * x),
    "xielu": _xielu,
}


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block: it needs a dense one whose activation numpy can compute."""
    shape = dense(steps)
    name = shape.act.function if shape else ""
    computed = name in FUNCTIONS or name in LEARNED
    return refuses_all_but_dense(steps) or (None if computed else f"numpy has no erf, which {name} needs")


@register("numpy", needs=("cpu",), refuses=refuses, trains=False, dtypes=("fp64", "fp32"))
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """x @ Wᵀ + b, by numpy's BLAS."""
    shape, names = dense(steps), tuple(parameters(steps))
    assert shape is not None
    act, lift = _activation(shape.act), _activation(shape.lift) if shape.lift else None

    def product(name: str, x: Array, w: Arrays) -> Array:
        out: Array = x @ w[f"{name}.weight"].T
        if (bias := w.get(f"{name}.bias")) is not None:
            out += bias
        return out

    def run(x: Tensor, params: Params) -> Tensor:
        w = {name: tensor.numpy() for name, tensor in zip(names, params, strict=True)}
        tokens = x.numpy()
        with np.errstate(over="ignore"):  # exp(-x) of a large negative x is infinite, and its inverse 0 as it should be
            up = product("up", tokens, w)
            if shape.gated:
                gate = product("gate", tokens, w)
                hidden = act(gate if shape.gate_scale == 1 else gate * shape.gate_scale, w) * (
                    lift(up, w) if lift else up
                )
            else:
                hidden = act(up, w)
            if shape.sub_norm is not None:
                hidden = _normed(shape.sub_norm, hidden, w.get("sub_norm.weight"), w.get("sub_norm.bias"))
            return torch.from_numpy(product("down", hidden, w))

    return run


def _activation(op: Activation) -> Callable[[Array, Arrays], Array]:
    """min(f(clip(x, low, high)), most) + plus."""
    alone, learned = FUNCTIONS.get(op.function), LEARNED.get(op.function)

    def call(x: Array, w: Arrays) -> Array:
        if op.low is not None or op.high is not None:
            x = np.clip(x, op.low, op.high)
        if op.soft_cap is not None:
            linear = op.soft_cap * np.tanh(x / op.soft_cap)
            y = linear if op.function == "identity" else linear * _sigmoid(x)
        elif alone is not None:
            y = alone(x)
        else:
            assert learned is not None
            y = learned(x, {name.removeprefix("act."): a for name, a in w.items() if name.startswith("act.")})
        y = y if op.most is None else np.minimum(y, op.most)
        return y + op.plus if op.plus else y

    return call


def _normed(op: Norm, x: Array, weight: Array | None, bias: Array | None) -> Array:
    """LayerNorm or RMSNorm over the last axis."""
    if op.kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + op.eps)
    if weight is not None:
        x = x * (1.0 + weight if op.weight == "one_plus" else weight)
    return x if bias is None else x + bias
