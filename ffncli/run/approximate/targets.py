"""The functions that `ffn approximate` fits blocks to. A target is one row; torch is not imported for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ffncli.errors import FFNError, did_you_mean, option, shown

Domain = tuple[float, float]
_CIRCLE: Domain = (-math.pi, math.pi)


@dataclass(frozen=True)
class Target:
    """One function of `inputs` numbers, each from `domain` by default.

    `f(m, *x)` is written over a namespace `m` with torch's names, as in `block/activations.py`; one x per input.
    """

    name: str
    formula: str
    f: Callable[..., Any]
    inputs: int = 1
    domain: Domain = _CIRCLE


def _bump(m: Any, x: Any) -> Any:
    inside = m.abs(x) < 1
    return m.where(inside, m.exp(1 - 1 / (1 - m.where(inside, x, 0 * x) ** 2)), 0 * x)


def _and(m: Any, a: Any, b: Any) -> Any:
    return m.where((a > 0.5) & (b > 0.5), 0 * a + 1, 0 * a)


_TARGETS = (
    Target("sin", "sin(x)", lambda m, x: m.sin(x)),
    Target("abs", "|x|", lambda m, x: m.abs(x)),
    Target("step", "1 if x ≥ 0 else 0", lambda m, x: m.where(x >= 0, 0 * x + 1, 0 * x)),
    Target("bump", "exp(1 − 1/(1 − x²)) if |x| < 1 else 0", _bump),  # smooth, and 0 outside
    Target("and", "1 if a > 1/2 and b > 1/2 else 0", _and, 2, (0.0, 1.0)),  # if A and B then C
)
TARGETS: dict[str, Target] = {target.name: target for target in _TARGETS}


def find(name: str) -> Target:
    """The target of that name. Raises FFNError for an unknown one, with the nearest."""
    key = name.strip().lower()
    if key not in TARGETS:
        raise FFNError(
            f"{option('targets')}: unknown target {shown(name)}",
            did_you_mean(key, list(TARGETS), "use one of " + ", ".join(TARGETS)),
        )
    return TARGETS[key]
