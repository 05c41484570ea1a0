"""The gate finds exactly one regression among many rows, lets improvements pass, and is silent on noise."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from ffncli.bench.judge.gate import gate, not_faster
from ffncli.bench.judge.statistics import holm, mean, t_interval, t_quantile
from ffncli.bench.results.row import ResultRow


def row(name: str, log_ratios: list[float], **columns: object) -> ResultRow:
    ratios = tuple(exp(d) for d in log_ratios)
    mean = t_interval(log_ratios).map(exp) if len(log_ratios) > 1 else None
    ends = (mean.value, mean.low, mean.high) if mean else (None, None, None)
    base = ResultRow(
        kernel=name, baseline="eager", status="ok", process_ratios=ratios,
        **dict(zip(("ratio", "ratio_low", "ratio_high"), ends, strict=True)),
    )  # fmt: skip
    return replace(base, **columns)  # type: ignore[arg-type]


def around(ratio: float, seed: int, spread: float = 0.003, processes: int = 5) -> list[float]:
    return list(log(ratio) + np.random.default_rng(seed).normal(0, spread, processes))


def test_exactly_one_regression_among_many_is_found() -> None:
    rows = [row(f"k{i}", around(1.0, i)) for i in range(30)] + [row("slow", around(1.06, 99))]
    found = gate(rows, 0.03)
    assert [j.row.kernel for j in found.slower] == ["slow"]
    assert len(found.passed) == 30
    assert found.slower[0].low > 1.03


def test_improvements_alone_pass() -> None:
    found = gate([row(f"k{i}", around(0.8, i)) for i in range(5)], 0.03)
    assert not found.slower
    assert len(found.passed) == 5


def test_slower_than_allowed_is_not_slower_at_all() -> None:
    found = gate([row("k", around(1.02, 1, 0.001))], 0.03)
    assert found.passed
    assert gate([row("k", around(1.02, 1, 0.001))], 0.0).slower


def of(low: float, high: float, **columns: object) -> list[ResultRow]:
    """Return the rows of eager and of a kernel whose interval has these ends."""
    ends = {"ratio": (low * high) ** 0.5, "ratio_low": low, "ratio_high": high}
    return [row("eager", [0.0] * 5), row("k", [0.0] * 5, **ends | columns)]


def test_faster_is_faster_with_the_whole_interval() -> None:
    assert not_faster(of(0.90, 0.97), 0.03) == []
    assert not_faster(of(0.98, 0.99), 0.0) == []
    assert not_faster(of(0.98, 1.02), 0.03) == ["k is not 3 % faster than eager: ratio 1.000 [0.980, 1.020]"]


def test_what_may_be_faster_comes_with_the_difference_that_the_run_could_have_shown() -> None:
    """An interval from c / 1.25 to c × 1.25 ends at or below 0.96 if c ≤ 0.768, which is 23.2 % less time."""
    (text,) = not_faster(of(0.8, 1.25), 0.04)
    assert text == (
        "inconclusive: k may be 4 % faster than eager: ratio 1.000 [0.800, 1.250];"
        " this run could have shown a difference of 23 % or more"
    )
    assert not_faster(of(0.768 / 1.25, 0.768 * 1.25), 0.04) == []


def test_what_is_not_comparable_is_not_faster() -> None:
    (few,) = not_faster(of(0.5, 0.6, computes="fp8-rowwise"), 0.03)
    assert few == "k cannot be compared with eager: computes in fp8-rowwise, the other in the case's dtype"
    (once,) = not_faster([row("k", [log(0.5)])], 0.03)
    assert once == "k cannot be compared with eager: 1 process: its interval covers this process only"
    assert not_faster([row("eager", [0.0] * 5)], 0.03) == ["nothing was compared: both are the same kernel"]


def test_only_kernels_of_one_precision_are_gated() -> None:
    rows = [row("eager", [0.0] * 5), row("k", around(1.5, 1)), row("few bits", around(1.5, 2), computes="fp8-rowwise")]
    found = gate(rows, 0.03)
    assert [j.row.kernel for j in found.slower] == ["k"]
    assert [(r.kernel, why) for r, why in found.not_gated] == [
        ("few bits", "computes in fp8-rowwise, the other in the case's dtype")
    ]
    rows = [replace(one, computes="fp8-rowwise") for one in rows]
    assert [j.row.kernel for j in gate(rows, 0.03).slower] == ["k", "few bits"]


def test_wide_is_inconclusive() -> None:
    found = gate([row("k", around(1.04, 1, 0.05))], 0.03)
    assert [j.row.kernel for j in found.inconclusive] == ["k"]


def test_what_is_not_gated() -> None:
    slow = around(1.5, 1)
    rows = [
        row("one process", slow[:1]),
        row("unbounded", slow, ratio_high=None),
        row("wrong", slow, status="wrong"),
        row("untimed", []),
        row("eager", slow),
    ]
    found = gate(rows, 0.03)
    assert not [*found.slower, *found.passed, *found.inconclusive]
    assert [(r.kernel, why.split(":")[0]) for r, why in found.not_gated] == [
        ("one process", "1 process"),
        ("unbounded", "its interval is unbounded"),
        ("wrong", "wrong"),
        ("untimed", "no ratio"),
    ]


def test_a_widened_interval_needs_a_larger_regression() -> None:
    """On a busy machine the interval is wider than the spread of the processes; the gate believes the interval."""
    slow = row("slow", around(1.08, 1))
    assert gate([slow], 0.03).slower
    wide = replace(slow, ratio_low=slow.ratio / 1.1, ratio_high=slow.ratio * 1.1)
    assert [j.row for j in gate([wide], 0.03).inconclusive] == [wide]


def test_bounds_and_ps_agree() -> None:
    """The adjusted bound of the clearest row is above the threshold just where its adjusted p is below the level."""
    draw = np.random.default_rng(4)
    for _ in range(200):
        rows = [row(str(i), list(draw.normal(0.04, 0.01, 5))) for i in range(3)]
        found = gate(rows, 0.03)
        judged = sorted((*found.slower, *found.passed, *found.inconclusive), key=lambda j: j.p)
        assert (judged[0].low > 1.03) == (judged[0].p_holm < 0.05)
        assert [j.p_holm for j in judged] == pytest.approx(holm([j.p for j in judged]))
        for rank, one in enumerate(judged):
            logs = [log(r) for r in one.row.process_ratios]
            half = t_interval(logs).half_width / t_quantile(0.975, 4)
            assert log(one.low) == pytest.approx(mean(logs) - t_quantile(1 - 0.05 / (3 - rank), 4) * half)


def test_processes_that_agree_to_the_last_digit() -> None:
    assert gate([row("k", [log(1.1)] * 5)], 0.03).slower
    assert gate([row("k", [0.0] * 5)], 0.03).passed


def test_false_alarms() -> None:
    """Just at the threshold, in 5 % of the runs at most, of one row as of twenty; identical code never."""
    for rows in (1, 20):
        draws = np.random.default_rng(rows).normal(log(1.03), 0.005, (1000 if rows == 1 else 200, rows, 5))
        alarms = [bool(gate([row(str(i), list(d)) for i, d in enumerate(run)], 0.03).slower) for run in draws]
        assert np.mean(alarms) <= (0.065 if rows == 1 else 0.085)
        assert np.mean(alarms) > 0.015
    draws = np.random.default_rng(3).normal(0, 0.005, (300, 10, 5))
    alarms = [bool(gate([row(str(i), list(d)) for i, d in enumerate(run)], 0.02).slower) for run in draws]
    assert not any(alarms)


def test_power() -> None:
    draws = np.random.default_rng(5).normal(log(1.05), 0.004, (200, 5))
    assert np.mean([bool(gate([row("k", list(d))], 0.03).slower) for d in draws]) > 0.95
