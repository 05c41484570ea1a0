"""Python floats under torch's names, so that one formula serves both: `f(x, SCALAR)` and `f(x, torch)`.

Large arguments saturate as they do in torch instead of raising OverflowError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def _exp(x: float) -> float:
    return math.inf if x >= 709.0 else math.exp(x)


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = _exp(x)
    return e / (1.0 + e)


SCALAR = SimpleNamespace(
    exp=_exp,
    expm1=lambda x: math.inf if x >= 709.0 else math.expm1(x),
    log1p=math.log1p,
    erf=math.erf,
    erfc=math.erfc,
    tanh=math.tanh,
    sqrt=math.sqrt,
    sigmoid=_sigmoid,
    abs=abs,
    where=lambda condition, a, b: a if condition else b,
)


def with_learned(m: Any, values: Mapping[str, Any]) -> Any:
    """The namespace `m` plus learned parameters (`m.alpha_p`), floats or tensors of one element."""
    return SimpleNamespace(**{n: getattr(m, n) for n in vars(SCALAR)}, **values)
