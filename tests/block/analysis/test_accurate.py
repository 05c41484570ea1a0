"""The form of every row that errors are measured against, to relative precision, against mpmath."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.analysis.curve import curve
from ffncli.block.formulas import with_learned
from ffncli.run.engine.functions import NAMESPACE
from tests.oracles.exact import EXACT

# Powers of 2 and what lies between them, as far out as fp16 and bf16 tell 0 apart from what is nearly 0.
POINTS = [s * v for e in range(-24, 6) for v in (2.0**e, 1.37 * 2.0**e) for s in (1, -1)] + [-11.5, -9.25, -6.0, -13.4]


def errors(name: str, values: list[float]) -> dict[float, float]:
    """x → relative error, above what rounding x itself does."""
    out = {}
    with mpmath.workdps(200):
        for x, value in zip(POINTS, values, strict=True):
            exact = EXACT[name](mpmath.mpf(x))
            size = max(abs(exact), mpmath.mpf(2) ** -200)  # below any number of fp32 and bf16
            out[x] = float(abs(value - exact) / size) / (1 + x * x)  # e^(-x²) has some x² times the error of x
    return {x: error for x, error in out.items() if error > 1e-14}


def test_every_row_has_an_exact_oracle():
    assert set(EXACT) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_curves_are_accurate_in_the_tails(name):
    assert errors(name, [curve(name).f(x) for x in POINTS]) == {}


@pytest.mark.parametrize("name", TABLE)
def test_tensors_too(name):
    learned = {n: torch.tensor(v, dtype=torch.float64) for n, v in TABLE[name].learned.items()}
    y = TABLE[name].accurate(torch.tensor(POINTS, dtype=torch.float64), with_learned(NAMESPACE, learned))
    assert errors(name, y.tolist()) == {}


@pytest.mark.parametrize("name", TABLE)
def test_both_forms_are_one_function(name):
    m = with_learned(NAMESPACE, {n: torch.tensor(v, dtype=torch.float64) for n, v in TABLE[name].learned.items()})
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    assert torch.allclose(TABLE[name].f(x, m), TABLE[name].accurate(x, m), rtol=0, atol=1e-14)


def test_nothing_raises_far_out():
    for name, row in TABLE.items():
        for x in (1e-300, 1e100, 1.7e308, math.inf):
            assert isinstance(curve(row.name).f(x), float), name
            assert isinstance(curve(row.name).f(-x), float), name
