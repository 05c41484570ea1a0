"""Speed against a swept size: reciprocals of the ratios, which size is swept, and what sets several sweeps apart."""

from dataclasses import replace
from math import exp, log, sqrt

import pytest

from ffncli.bench.judge.curves import require_sweeps, speed_sweeps, step_shares, thread_scaling, together
from ffncli.bench.records import BLOCK, Case
from ffncli.bench.results.row import ResultRow
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from tests.bench.stored import row

CASE = Case("64x256", "64x256", FFNSpec(64, 256, "silu", gated=True), tokens=1)


def pair(ratio: float, **changes):
    """eager, and packed at that ratio [0.5, 2] times it."""
    ends = {"ratio": ratio, "ratio_low": ratio / 2, "ratio_high": 2 * ratio, "verdict": "inconclusive"}
    return [row(kernel="eager", ratio=1.0, verdict="same", **changes), row(kernel="packed", **ends, **changes)]


def test_speed_is_the_reciprocal_of_the_ratio_and_its_ends_change_places():
    (sweep,) = speed_sweeps([*pair(0.8, tokens=64), *pair(1.25, tokens=1)])
    assert (sweep.axis, sweep.baseline, sweep.where, sweep.block) == ("tokens", "eager", "", "512x2048:silu, gated")
    eager, packed = sweep.curves
    assert [(p.size, p.speed) for p in eager.points] == [(1, 1.0), (64, 1.0)]
    assert [(p.size, p.speed, p.speed_low, p.speed_high) for p in packed.points] == [
        (1, pytest.approx(0.8), pytest.approx(0.4), pytest.approx(1.6)),
        (64, pytest.approx(1.25), pytest.approx(0.625), pytest.approx(2.5)),
    ]
    assert packed.points[0].verdict == "inconclusive"


def test_an_interval_without_an_end_and_a_kernel_that_failed():
    one, many = pair(0.8, tokens=1), pair(0.8, tokens=2)
    many[1] = replace(many[1], status="failed", ratio=None)
    one[1] = replace(one[1], ratio_high=None)
    (sweep,) = speed_sweeps([*one, *many])
    (point,) = sweep.curves[1].points
    assert (point.size, point.speed_low, point.speed_high) == (1, None, pytest.approx(2.5))


def test_what_the_size_decides_is_no_second_sweep_and_what_it_does_not_decide_is():
    """Caches change with tokens by themselves; dtypes do not."""
    rows = [r for tokens, cache in ((1, "cold-weights"), (64, "warm")) for dtype in ("fp32", "bf16")
            for r in pair(0.9, tokens=tokens, cache=cache, dtype=dtype)]  # fmt: skip
    assert [(sweep.where, len(sweep.curves)) for sweep in speed_sweeps(rows)] == [("fp32", 2), ("bf16", 2)]


@pytest.mark.parametrize(
    ("changes", "axis", "sweeps"),
    [
        ([{"threads": 1}, {"threads": 2}], "threads", [""]),
        ([{"d_ff": 256}, {"d_ff": 512}], "d_ff", [""]),
        ([{"d_model": 64, "d_ff": 256}, {"d_model": 128, "d_ff": 512}], "d_ff", [""]),
        ([{"tokens": t, "threads": n} for n in (1, 2) for t in (1, 4, 8)], "tokens", ["1 threads", "2 threads"]),
        ([{"tokens": t, "threads": n} for n in (1, 2, 4) for t in (1, 8)], "threads", ["1 tokens", "8 tokens"]),
        (
            [{"tokens": t, "routing": r} for r in ("uniform", "zipf:1.2") for t in (1, 8)],
            "tokens",
            ["uniform", "zipf:1.2"],
        ),
    ],
)
def test_the_size_with_most_values_is_the_axis(changes, axis, sweeps):
    found = speed_sweeps([r for change in changes for r in pair(0.9, **change)])
    assert [(sweep.axis, sweep.where) for sweep in found] == [(axis, where) for where in sweeps]


def test_a_width_that_is_swept_is_named_by_its_ends():
    found = speed_sweeps([*pair(0.9, d_ff=512), *pair(0.9, d_ff=128)])
    assert found[0].block == "silu, d_ff from 128 to 512"


def test_without_two_sizes_there_is_no_sweep():
    rows = [*pair(0.9, dtype="fp32"), *pair(0.9, dtype="bf16")]
    assert speed_sweeps(rows) == speed_sweeps([]) == ()
    with pytest.raises(FFNError, match="no size has two values"):
        require_sweeps(rows)


def test_parts_of_a_grid_are_one_sweep_on_machines_of_one_kind():
    """Each point is a ratio of one machine; machines of another kind have a curve of their own."""
    parts = [*pair(0.8, tokens=1, run_id="a"), *pair(0.9, tokens=2, run_id="b", host="ci-2")]
    (sweep,) = speed_sweeps(parts)
    assert [point.size for point in sweep.curves[1].points] == [1, 2]
    other = [r for tokens in (1, 2) for r in pair(0.7, tokens=4 * tokens, run_id="c", host="gpu", device_name="H100")]
    assert [(one.where, len(one.curves[0].points)) for one in speed_sweeps([*parts, *other])] == [
        ("AMD EPYC 7B13", 2),
        ("H100", 2),
    ]
    crossed = [r for run, dtypes in (("a", ("fp32", "bf16")), ("b", ("bf16", "fp32")))
               for tokens, dtype in zip((1, 2), dtypes, strict=True)
               for r in pair(0.8, tokens=tokens, dtype=dtype, run_id=run)]  # fmt: skip
    assert [(one.where, len(one.curves[0].points)) for one in speed_sweeps(crossed)] == [("fp32", 2), ("bf16", 2)]
    again = [*parts, *pair(0.8, tokens=1, run_id="d"), *pair(0.8, tokens=2, run_id="d")]
    assert [one.where for one in speed_sweeps(again)] == ["d"]


# --- test thread scaling ----------------------------------------------------------------------------------------------


CASES = tuple(Case("8x16", "8x16", FFNSpec(8, 16, "relu"), 32, threads=n) for n in (4, 1, 2))


def timed_on(case: Case, times: tuple[float, ...], **more) -> ResultRow:
    return ResultRow(**{"case": case.key, "kernel": "eager", "status": "ok", "process_times_s": times, **more})


def test_the_fewest_threads_are_the_measure_of_the_others():
    four, one, two = CASES
    rows = [timed_on(four, (0.5, 0.5)), timed_on(one, (1.6, 1.6)), timed_on(two, (1.0, 1.0))]
    assert [(s.case, s.base_threads, s.threads) for s in thread_scaling(CASES, rows)] == [
        (two.key, 1, 2),
        (four.key, 1, 4),
    ]
    assert [(s.speed_up, s.efficiency) for s in thread_scaling(CASES, rows)] == [
        (pytest.approx(1.6), pytest.approx(0.8)),
        (pytest.approx(3.2), pytest.approx(0.8)),
    ]


def test_the_interval_is_students_of_both_sides_together():
    """Logs of both sides have the spread 0.01, three processes each: t of 4 degrees of freedom is 2.77645 in tables."""
    _, one, two = CASES
    before, after = (tuple(exp(log(mean) + step) for step in (-0.01, 0.0, 0.01)) for mean in (2.0, 1.25))
    (found,) = thread_scaling(CASES, [timed_on(one, before), timed_on(two, after)])
    half = 2.77645 * 0.01 * sqrt(2 / 3)
    assert (found.speed_up, found.efficiency) == (pytest.approx(1.6), pytest.approx(0.8))
    assert found.speed_up_low == pytest.approx(1.6 * exp(-half), rel=1e-6)
    assert found.speed_up_high == pytest.approx(1.6 * exp(half), rel=1e-6)


def test_one_process_has_no_interval():
    _, one, two = CASES
    (found,) = thread_scaling(CASES, [timed_on(one, (2.0,)), timed_on(two, (1.0,))])
    assert (found.speed_up, found.speed_up_low, found.speed_up_high) == (pytest.approx(2.0), None, None)


@pytest.mark.parametrize("more", [{"status": "failed"}, {"kernel": "packed"}, {"process_times_s": ()}])
def test_nothing_is_scaled_by_what_has_no_time(more):
    _, one, two = CASES
    assert thread_scaling(CASES, [timed_on(one, (2.0, 2.0)), timed_on(two, (1.0, 1.0), **more)]) == ()


def test_only_what_differs_in_threads_alone_is_compared():
    one = CASES[1]
    for other in (replace(one, threads=2, tokens=64), replace(one, threads=2, dtype="bf16")):
        assert thread_scaling((one, other), [timed_on(one, (2.0, 2.0)), timed_on(other, (1.0, 1.0))]) == ()
    gpu = [replace(one, device="cuda", threads=n) for n in (1, 2)]
    assert thread_scaling(gpu, [timed_on(case, (1.0, 1.0)) for case in gpu]) == ()


def test_no_speed_up_is_across_machines():
    four, one, two = CASES
    rows = [
        timed_on(one, (1.6, 1.6), host="a"),
        timed_on(two, (1.0, 1.0), host="b"),
        timed_on(four, (0.5, 0.5), host="b"),
    ]
    (only,) = thread_scaling(CASES, rows)
    assert (only.base_threads, only.threads, only.speed_up) == (2, 4, pytest.approx(2.0))


# --- test step shares -------------------------------------------------------------------------------------------------


def timed(name: str, share: float | None) -> ResultRow:
    return ResultRow(kernel=name, baseline=BLOCK, status="ok", time_s=share and share * 1e-3, ratio=share)


def test_shares_of_time_and_of_flops():
    case = Case("8x16", "8x16", FFNSpec(8, 16, "relu", bias=False), 2)
    up, act, down = 2 * 2 * 8 * 16, 2 * 16, 2 * 2 * 16 * 8
    found = step_shares(case, [timed(BLOCK, 1.0), timed("step up", 0.5), timed("step act", 0.125)])
    assert [one.flops_share for one in found] == [1.0, up / (up + act + down), act / (up + act + down)]
    assert found[1].flops_per_s == up / 0.5e-3
    assert together(found) == 0.625
    assert together(step_shares(case, [timed(BLOCK, 1.0), timed("step up", None), timed("step act", 0.1)])) is None
    assert together(found[:1]) is None


def test_what_is_inside_experts_is_no_further_share():
    case = Case("moe", "moe", FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)), 5)
    found = step_shares(case, [timed(BLOCK, 1.0), timed("step experts", 0.7), timed("step experts[e].gate", 0.2)])
    assert [one.inside for one in found] == [False, False, True]
    assert found[2].flops_share * (found[0].flops_per_s * 1e-3) == 2 * 5 * 2 * 8 * 24
    assert together(found) == 0.7
