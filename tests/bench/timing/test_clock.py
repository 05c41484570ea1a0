"""The CPU's clock on scripted readings: the sum of all calls, and the lower quartile of single ones."""

import itertools
import random

import numpy as np
import pytest

from ffncli.bench.timing import clock
from ffncli.bench.timing.clock import CpuClock


@pytest.mark.parametrize("count", [3, 4, 5, 12, 13, 100])
def test_the_lower_quartile_of_calls_that_are_timed_one_by_one(monkeypatch, count):
    draw = random.Random(count)
    calls = [draw.randrange(1_000, 9_000) for _ in range(count)]  # ns
    readings = itertools.accumulate(itertools.chain.from_iterable((700, took) for took in calls))
    monkeypatch.setattr(clock, "_READ", lambda: next(readings))
    monkeypatch.setattr(clock, "_THREAD", lambda: 0)
    mine, order = CpuClock(), []
    seconds = mine.time(lambda: order.append("call"), count, lambda: order.append("before"))
    assert order == ["before", "call"] * count
    assert seconds == pytest.approx(sum(calls) * 1e-9)
    assert mine.quartile_seconds == pytest.approx(np.quantile(calls, 0.25, method="weibull") * 1e-9)


def test_the_threads_clock_is_not_read_where_calls_compute_on_several(monkeypatch):
    monkeypatch.setattr(clock, "_THREAD", itertools.count(0, 5_000).__next__)
    for threads, of_calls, of_one_by_one in ((1, 5e-6, 15e-6), (2, None, None)):
        mine = CpuClock(threads)
        mine.time(lambda: None, 3)
        assert mine.thread_seconds == (of_calls and pytest.approx(of_calls))
        mine.time(lambda: None, 3, lambda: None)
        assert mine.thread_seconds == (of_one_by_one and pytest.approx(of_one_by_one))
    assert clock._THREAD() == 2 * 5_000 * 4


def test_calls_that_are_timed_together_or_are_too_few_have_no_quartile():
    mine = CpuClock()
    mine.time(lambda: None, 5, lambda: None)
    assert mine.quartile_seconds is not None
    mine.time(lambda: None, 5)
    assert mine.quartile_seconds is None
    mine.time(lambda: None, 2, lambda: None)
    assert mine.quartile_seconds is None
