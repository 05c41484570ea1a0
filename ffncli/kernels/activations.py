"""Activations as a user would write them in torch: the native call if there is one, else a line of torch.

Written independently of the formulas of `block.activations`, so that each checks the other; a row in neither
table here runs its formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.block.steps import Activation

Learned = Mapping[str, Tensor]


def _xielu(x: Tensor, learned: Learned) -> Tensor:
    """Huang & Schlag 2024, as transformers' XIELUActivation computes it."""
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
    """min(f(clip(x, low, high)), most) + plus; the second argument holds the learned parameters, by name."""
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
        native, options = row.native
        return partial(_ignoring, partial(getattr(functional, native), **options))
    return _WRITTEN.get(name) or partial(_by_formula, row.f)


def _ignoring(call: Callable[[Tensor], Tensor], x: Tensor, learned: Learned) -> Tensor:
    return call(x)


def _by_formula(f: Callable[[Any, Any], Any], x: Tensor, learned: Learned) -> Tensor:
    out: Tensor = f(x, with_learned(torch, learned))
    return out
