"""The least difference that a row would have decided: there, and only from there on, its interval gives a verdict."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.bench.judge.ratios import verdict
from ffncli.bench.judge.statistics import Interval
from ffncli.bench.judge.warnings import resolvable_difference
from ffncli.bench.results.row import BenchWarning
from tests.bench.stored import row


@given(st.floats(-2, 2), st.floats(1e-4, 1.0), st.floats(0.005, 0.1))
def test_an_interval_as_wide_decides_from_there_on(center, half_width, margin):
    size = resolvable_difference(row(ratio_low=exp(center - half_width), ratio_high=exp(center + half_width)), margin)
    for factor, words in ((1.0001, ("slower", "faster")), (0.9999, ("inconclusive", "inconclusive"))):
        shift = log(1 + size) * factor
        found = [verdict(Interval(at, at - half_width, at + half_width), margin) for at in (shift, -shift)]
        if half_width > 2 * margin:  # else what is nearer may be the same, which is a verdict too
            assert tuple(found) == words


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": "eager"}, {"status": "failed"}, {"ratio_low": None}, {"ratio_high": None},
        {"warnings": (BenchWarning("preempted", "20 %"),)}, {"warnings": (BenchWarning("unresolved", "2 %"),)},
    ],
)  # fmt: skip
def test_nothing_is_resolved(changes):
    assert resolvable_difference(row(**{"ratio_low": 0.9, "ratio_high": 1.1, **changes}), 0.02) is None
