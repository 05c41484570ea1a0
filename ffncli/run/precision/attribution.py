"""Whose an error is: the squared error of the output, E = ‖e‖², split by tensor and by pair of tensors.

With e_i the output's error if tensor i alone is rounded, E = Σ ‖e_i‖² + 2 Σ ⟨e_i, e_j⟩ + rest. The rest is what the
rounded tensors do together, such as the products of two rounding errors. All sums are in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import fsum

import torch
from torch import Tensor

from ffncli.run.precision.rounding import TENSORS

PAIRS = tuple(combinations(TENSORS, 2))


@dataclass(frozen=True)
class Attribution:
    """Shares of E, which add up to 1: of each tensor, of each pair (with its factor 2), and the rest. A share is None
    for what is not rounded, and every share is if E is 0."""

    by_tensor: Mapping[str, float | None]
    by_pair: Mapping[str, float | None]
    rest: float | None


def attribution(error: Tensor, alone: Mapping[str, Tensor]) -> Attribution:
    """Split the error of the output; `alone` has the errors with one tensor rounded, by the tensor's name."""
    whole = float(error.double().square().sum())
    if not whole:
        return Attribution(dict.fromkeys(TENSORS), {pair_name(*pair): None for pair in PAIRS}, None)
    parts = {name: float(one.double().square().sum()) / whole for name, one in alone.items()}
    pairs = {
        pair: 2 * float(torch.dot(alone[pair[0]].double().flatten(), alone[pair[1]].double().flatten())) / whole
        for pair in PAIRS if alone.keys() >= {*pair}
    }  # fmt: skip
    return Attribution(
        {name: parts.get(name) for name in TENSORS},
        {pair_name(*pair): pairs.get(pair) for pair in PAIRS},
        1.0 - fsum((*parts.values(), *pairs.values())),
    )


def pair_name(a: str, b: str) -> str:
    """Return the key of a pair: `x,W1`."""
    return f"{a},{b}"


def relative_errors(a: Tensor, b: Tensor) -> tuple[float | None, float | None]:
    """Return (‖a−b‖ / ‖b‖, max|a−b| / max|b|) in float64; None if b is 0 everywhere."""
    difference, exact = a.double() - b.double(), b.double()
    size = float(exact.norm())
    return (
        (float(difference.norm()) / size, float(difference.abs().max() / exact.abs().max())) if size else (None, None)
    )
