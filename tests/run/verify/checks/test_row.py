"""What counts as equal: errors, ulps and tolerances, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ffncli.run.measure.gap import tolerance_for
from ffncli.run.verify.checks.case import Judge, errors, not_finite

JUDGE = Judge("module", 1e-6, torch.float32)


def test_one_ulp_is_one():
    b = torch.tensor([1.0, -6.0, 0.25])
    a = torch.nextafter(b, torch.full_like(b, 100.0))
    largest, relative, ulps = errors(a, b, torch.float32)
    assert (largest, ulps) == (4 * 2.0**-23, 1.0)  # at -6, where the numbers are 4 times as far apart as at 1
    assert relative == largest / 6


def test_errors_where_the_reference_is_zero():
    zero = torch.zeros(3)
    assert errors(zero, zero, torch.float32) == (0.0, 0.0, 0.0)
    assert errors(zero + 0.5, zero, torch.float32) == (0.5, None, None)
    assert errors(torch.zeros(0), torch.zeros(0), torch.float32) == (0.0, 0.0, 0.0)


def test_equal_passes_within_the_tolerance_alone():
    one = torch.ones(2)
    assert JUDGE.equal("a", one + 9e-7, one).passed is True
    assert JUDGE.equal("a", one + 2e-6, one).passed is False
    assert JUDGE.equal("a", one, torch.zeros(2)).passed is False
    assert JUDGE.equal("a", torch.zeros(2), torch.zeros(2)).passed is True


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_never_passes(wrong):
    """Two NaN are no agreement, and no comparison with one is ever true."""
    bad, good = torch.tensor([1.0, wrong]), torch.ones(2)
    found = JUDGE.equal("a", bad, good)
    assert (found.passed, found.max_error) == (False, None)
    assert found.note == f"its output has 1 {'NaN' if math.isnan(wrong) else 'Inf'}"
    assert JUDGE.equal("a", good, bad).note.startswith("the reference has 1 ")
    assert JUDGE.equal("a", bad, bad).passed is False
    assert not_finite(torch.tensor([math.nan, math.inf, -math.inf])) == "1 NaN and 2 Inf"


def test_another_shape_fails():
    assert JUDGE.equal("a", torch.ones(2), torch.ones(3)).note == "shape [2], expected [3]"


def test_tolerances():
    eps = 2.0**-23
    assert tolerance_for(torch.float32, 256) == 4 * eps * 17
    assert tolerance_for(torch.float64, 256) == 4 * 2.0**-52 * 17
    assert tolerance_for(torch.float64, 256, torch.float32) == 4 * (eps + 2.0**-52 * 16)
    assert tolerance_for(torch.bfloat16, 256) == 4 * (2.0**-7 + eps * 16)  # it sums in float32
