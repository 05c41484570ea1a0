"""Axes: where values lie, and that ticks are round, inside, even and say where they stand."""

from __future__ import annotations

import math
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ffncli.show.plots.axes import axis

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE, FINITE, st.integers(2, 12))
def test_ticks_stand_where_they_say(one, other, most):
    place = axis([one, other])
    ticks = place.ticks(most)
    assert len(ticks) <= most
    for share, text in ticks:
        assert -1e-9 <= share <= 1 + 1e-9
        assert share == pytest.approx(place.share(float(text)), abs=1e-9)
    # Round: one digit of 1, 2 or 5 times a power of ten apart, and no gap that another tick would fill.
    values = [Decimal(text) for _, text in ticks]
    steps = {b - a for a, b in pairwise(values)}
    assert len(steps) <= 1
    for step in steps:
        assert step.normalize().as_tuple().digits in ((1,), (2,), (5,))
        assert len(ticks) > most / 2.5 - 1


@pytest.mark.parametrize(
    ("low", "high", "most", "labels"),
    [
        (-3, 3, 8, "-3 -2 -1 0 1 2 3"),
        (-0.17, 3, 5, "0 1 2 3"),
        (0, 1.13, 4, "0.0 0.5 1.0"),
        (-2e-4, 4.7e-4, 5, "-0.0002 0.0000 0.0002 0.0004"),
        (0, 3e-5, 4, "0 1e-5 2e-5 3e-5"),
        (0, 2.5e6, 4, "0 1e6 2e6"),
        (0, 150000, 4, "0 50000 100000 150000"),
    ],
)
def test_labels(low, high, most, labels):
    assert " ".join(text for _, text in axis([low, high]).ticks(most)) == labels


@pytest.mark.parametrize(
    ("low", "high", "most", "labels"),
    [
        (1, 64, 6, "1 2 5 10 20 50"),
        (1e-6, 0.5, 6, "1e-6 1e-5 0.0001 0.001 0.01 0.1"),
        (1e-300, 1e300, 7, "1e-300 1e-200 1e-100 1 1e100 1e200 1e300"),
        (0.02099, 0.02141, 6, "0.021 0.0211 0.0212 0.0213 0.0214"),
    ],
)
def test_labels_of_a_log_axis(low, high, most, labels):
    found = axis([low, high], log=True)
    assert " ".join(text for _, text in found.ticks(most)) == labels
    for share, text in found.ticks(most):
        truth = (math.log10(float(text)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        assert share == pytest.approx(truth, abs=1e-9)


@example(1.7e308, 1.7e308, 2)
@example(1.7e308, 1.6e308, 2)
@given(st.floats(5e-324, 1.7e308), st.floats(5e-324, 1.7e308), st.integers(2, 12))
def test_a_log_axis_never_fails(one, other, most):
    assert all(-1e-6 <= share <= 1 + 1e-6 for share, _ in axis([one, other], log=True).ticks(most))


@example([-1.7e308, 1.7e308], False)
@given(st.lists(st.floats(), min_size=1), st.booleans())
def test_all_values_lie_inside(values, log):
    placed = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    found = axis(values, log)
    assert (found is None) == (not placed)
    assume(found is not None)
    assert found.low < found.high
    assert all(-1e-9 <= found.share(v) <= 1 + 1e-9 for v in placed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_place(value):
    assert math.isnan(axis([0, 1]).share(value))
    assert math.isnan(axis([1, 2], log=True).share(value))


def test_what_is_not_above_zero_has_no_place_on_a_log_axis():
    assert axis([0.0, -1.0], log=True) is None
    assert math.isnan(axis([1, 2], log=True).share(0.0))


@pytest.mark.parametrize(("high", "labels"), [(1, "0 1"), (3, "0 1 2 3"), (47, "0 10 20 30 40")])
def test_what_is_counted_has_ticks_at_whole_numbers(high, labels):
    scale = axis([0, high])
    assert [text for _, text in scale.ticks(8, whole=True)] == labels.split()
    assert all(share == pytest.approx(scale.share(float(text))) for share, text in scale.ticks(8, whole=True))
