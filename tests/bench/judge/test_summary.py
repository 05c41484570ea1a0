"""What a case's times are summarised to, and what stands of a worker's outcomes beside its referee's report."""

import dataclasses
from dataclasses import replace
from math import exp, log
from random import Random

import numpy as np
import pandas as pd
import pytest

from ffncli.bench.judge import roofline, warnings
from ffncli.bench.judge import statistics as statistics_module
from ffncli.bench.judge.ratios import paired
from ffncli.bench.judge.summary import agreed, certain, summarise
from ffncli.bench.judge.warnings import Code
from ffncli.bench.records import (
    ANCHOR,
    BLOCK,
    GEMM,
    TWIN,
    Case,
    CaseReport,
    Finding,
    Job,
    Method,
    Outcome,
    Roof,
    TimedBlock,
    TimedUnit,
)
from ffncli.bench.results.row import BenchWarning, ResultRow
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels.choice import choices
from tests.bench import fake_worker
from tests.bench.fake_clock import FakeClock
from tests.bench.units import CASE, QUICK, RUN, TIMES, units_of

CHI_SQUARED = {1: 3.841, 2: 5.991, 3: 7.815, 4: 9.488}  # 95 %, by degrees of freedom


def codes(row: ResultRow) -> list[str]:
    return [warning.code for warning in row.warnings]


def texts(row: ResultRow) -> tuple[str, ...]:
    return tuple(map(str, row.warnings))


def with_flags(units: list[TimedUnit], flags: tuple[str, ...], every: int = 1) -> list[TimedUnit]:
    changed = []
    for unit in units:
        blocks = [replace(b, flags=flags) if i % every == 0 else b for i, b in enumerate(unit.blocks)]
        changed.append(replace(unit, blocks=tuple(blocks)))
    return changed


def packed(units: list[TimedUnit], method: Method = QUICK) -> ResultRow:
    return next(r for r in summarise(CASE, units, method, RUN) if r.kernel == "packed")


def test_a_slow_kernel_is_timed_until_its_verdict_is_certain() -> None:
    method = replace(QUICK, processes=5, max_time=40.0)
    units = units_of({"eager": 0.15, "slow": 0.6, "near": 0.152, TWIN: 0.15, ANCHOR: 1e-3}, method)
    assert certain(CASE, units[:2], method) == {}
    left_out = certain(CASE, units[:3], method)
    assert left_out == {"slow": Outcome("slow", error_max=1e-7, error_rel=2e-7)}
    assert certain(CASE, units_of({"eager": 1e-3, "far": 4e-3, TWIN: 1e-3}, method), method) == {}  # takes little time
    later = [replace(unit, blocks=tuple(b for b in unit.blocks if b.kernel != "slow")) for unit in units[3:]]
    rows = {row.kernel: row for row in summarise(CASE, [*units[:3], *later], method, RUN)}
    row = rows["slow"]
    assert (row.verdict, row.processes, len(row.process_ratios)) == ("slower", 5, 3)
    assert row.ratio == pytest.approx(4, rel=0.01)
    assert "timed in 3 of 5 processes: its verdict was certain by then" in row.note
    assert "timed in" not in rows["near"].note


def test_a_row_for_every_kernel_and_its_columns() -> None:
    units = units_of()
    eager, row = summarise(CASE, units, QUICK, RUN)
    assert (eager.kernel, row.kernel, row.baseline, row.status, row.verdict) == (
        "eager",
        "packed",
        "eager",
        "ok",
        "faster",
    )
    assert (row.run_id, row.started_utc, row.torch, row.host) == ("r1", "2026-01-02T03:04:05Z", "2.13.0", "here")
    assert (row.d_model, row.d_ff, row.activation, row.gated, row.bias) == (512, 2048, "silu", True, False)
    assert (row.experts, row.top_k, row.shared_experts) == (0, 0, 0)
    assert (row.tokens, row.dtype, row.passes, row.cache, row.device, row.threads) == (
        *(32, "fp32", "forward", "shared", "cpu", 2),
    )
    of_packed = [b for u in units for b in u.blocks if b.kernel == "packed"]
    rounds = {(b.process, b.placement, b.round) for b in of_packed}
    placements, inner = {(b.process, b.placement) for b in of_packed}, min(b.inner for b in of_packed)
    assert (row.processes, row.placements, row.rounds, row.inner) == (5, len(placements), len(rounds), inner)
    assert len(rounds) >= 60
    assert (row.seed, row.precision, row.case, row.openmp) == (0, 0.02, CASE.key, "true;cores")
    assert row.warnings == ()
    assert row.page_faults_per_call == 0
    assert (eager.ratio, eager.ratio_low, eager.ratio_high, eager.verdict) == (1, 1, 1, "same")
    assert eager.process_ratios == (1.0,) * 5
    assert (row.error_max, row.error_rel, row.baseline_error_rel) == (5e-7, 2e-7, 2e-7)  # the worst of the processes


def test_how_calls_were_launched_and_processes_that_differ() -> None:
    units = units_of()
    assert packed(units).launch == ""
    replayed = [replace(unit, launch="graphs") for unit in units]
    assert (packed(replayed).launch, packed(replayed).warnings) == ("graphs", ())
    lost = replace(replayed[0], launch="", blocks=())  # nothing was timed there, so it was not launched differently
    assert not any(w.code == Code.ENVIRONMENT for w in packed([lost, *replayed[1:]]).warnings)
    one_plain = [*replayed[:-1], replace(units[-1], launch="plain")]
    assert "environment: launch" in texts(packed(one_plain))


def test_figures_of_a_row_against_the_model_of_the_clock() -> None:
    _, row = summarise(CASE, units_of(), QUICK, RUN)
    assert row.ratio_low < 0.9 < row.ratio_high
    assert row.ratio == pytest.approx(0.9, rel=5e-3)
    assert row.time_s == pytest.approx(0.9e-3, rel=5e-3)
    assert row.aa_ratio == pytest.approx(1, rel=5e-3)
    assert row.gemm_ratio == pytest.approx(0.9 / 0.8, rel=5e-3)
    assert row.process_anchors_s == pytest.approx([1.2e-3] * 5, rel=5e-3)
    assert row.process_times_s == pytest.approx([0.9e-3] * 5, rel=5e-3)
    assert exp(np.mean(np.log(row.process_ratios))) == pytest.approx(row.ratio)
    assert exp(np.mean(np.log(row.process_times_s))) == pytest.approx(row.time_s)


def test_the_same_units_make_the_same_rows_in_whatever_order() -> None:
    units = units_of()
    rows = summarise(CASE, units, QUICK, RUN)
    assert summarise(CASE, units, QUICK, RUN) == rows
    assert len(set(rows[1].process_times_s)) == 5
    shuffled = units[::-1]
    blocks = list(shuffled[0].blocks)
    Random(1).shuffle(blocks)
    shuffled[0] = replace(shuffled[0], blocks=tuple(blocks))
    assert summarise(CASE, shuffled, QUICK, RUN) == rows
    assert summarise(CASE, [], QUICK, RUN) == ()


def test_drift_of_20_percent_is_said_and_two_of_one_are_the_same() -> None:
    method = replace(QUICK, max_time=5.0)
    units = units_of(
        {**TIMES, "packed": 1e-3}, method, lambda p: FakeClock(drift=lambda t: 1 + 0.04 * p + 0.04 * t, seed=p)
    )
    row = packed(units, method)
    assert row.verdict == "same"
    assert Code.DRIFT in codes(row)
    assert 0.98 < row.aa_low <= row.aa_high < 1.02


@pytest.mark.parametrize("status", ["wrong", "oom", "failed", "skipped"])
def test_a_kernel_that_is_not_ok_in_one_process_has_no_time(status: str) -> None:
    units = units_of()
    bad = Outcome("packed", status, "why", error_max=0.5)  # type: ignore[arg-type]
    units[2] = replace(units[2], outcomes=(units[2].outcomes[0], bad))
    row = packed(units)
    assert (row.status, row.note, row.error_max) == (status, "why", 0.5)
    assert (row.time_s, row.ratio, row.verdict, row.process_times_s, row.process_ratios) == (None, None, "", (), ())
    graver = Outcome("packed", "wrong", "differs")
    units[1] = replace(units[1], outcomes=(units[1].outcomes[0], graver))
    assert (packed(units).status, packed(units).note) == ("wrong", "differs")


def test_how_a_unit_was_timed_is_no_note_of_a_kernel_that_was_not() -> None:
    units = [replace(unit, notes=("cold-weights would need 9 GB: warm instead",)) for unit in units_of()]
    lost = tuple(replace(o, status="failed", note="no") if o.kernel == "packed" else o for o in units[0].outcomes)
    eager, row = summarise(CASE, [replace(units[0], outcomes=lost), *units[1:]], QUICK, RUN)
    assert (row.status, row.note) == ("failed", "no")
    assert eager.note == "cold-weights would need 9 GB: warm instead"


def test_a_wrong_baseline_leaves_no_ratio() -> None:
    units = [
        replace(
            u,
            outcomes=(Outcome("eager", "wrong", "differs"), u.outcomes[1]),
            blocks=tuple(b for b in u.blocks if b.kernel not in ("eager", TWIN)),
        )
        for u in units_of()
    ]
    eager, row = summarise(CASE, units, QUICK, RUN)
    assert (eager.status, row.status, row.ratio, row.verdict) == ("wrong", "ok", None, "")
    assert row.time_s is not None
    assert "the baseline eager was not timed" in row.note


def test_one_process_is_said() -> None:
    method = replace(QUICK, processes=1)
    row = packed(units_of(method=method), method)
    assert texts(row)[0] == "one-process: 1 process"
    assert row.ratio_low is not None


def test_flags_of_more_than_a_tenth_of_the_blocks_are_a_warning() -> None:
    units = units_of()
    for flag in ("preempted", "throttled", "stolen"):
        row = packed(with_flags(units, (flag,), every=3))
        assert row.verdict == "faster"
        assert Code.PREEMPTED in codes(row)
        busy = next(w for w in row.warnings if w.code == Code.PREEMPTED)
        assert "--threads 1" in warnings.advice(busy)
        assert "--threads 1" in warnings.advice(busy, 2)
    row = packed(with_flags(units, ("preempted",), every=40))
    assert row.verdict == "faster"
    assert row.warnings == ()


@pytest.mark.parametrize("code", Code)
def test_nothing_is_advised_that_is_done_already(code) -> None:
    """On one thread there are none to take away; other advice is the same."""
    warning = BenchWarning(code, "20 % of the blocks")
    several, one = warnings.advice(warning, 2), warnings.advice(warning, 1)
    assert several == f"{warnings.ADVICE[code]} (ffn explain {warnings.TOPICS[code]})"
    assert "--threads" not in one
    assert (one == several) == ("--threads" not in several)
    assert one


def test_the_hosts_seconds_of_a_call_are_the_median_over_the_blocks() -> None:
    units = units_of()
    assert packed(units).launch_s is None
    blocks = [b for unit in units for b in unit.blocks if b.kernel == "packed"]
    seconds = {id(b): 3e-6 * (1 + i % 5) * b.inner for i, b in enumerate(blocks)}
    flagged = [
        replace(u, blocks=tuple(replace(b, flags=(f"host={seconds.get(id(b), 1.0):.3g}",)) for b in u.blocks))
        for u in units
    ]
    assert packed(flagged).launch_s == pytest.approx(float(np.median([seconds[id(b)] / b.inner for b in blocks])))


def test_a_gpus_state_is_judged_by_the_blocks_in_which_it_was_read() -> None:
    """NVML is read in one block of twenty: half of these readings say that the GPU lowered its clock, and to what."""
    blocks = (units_of()[0].blocks * 2)[:80]
    every = [replace(b, flags=("power=300",) if i % 20 == 0 else ()) for i, b in enumerate(blocks)]
    hot = [
        replace(b, flags=("gpu-throttled", "clock=0.61", *b.flags)) if i % 40 == 0 else b for i, b in enumerate(every)
    ]
    assert Code.GPU_THROTTLED not in [w.code for w in warnings.of_blocks(every)]
    assert {"gpu-throttled: 50 % of its readings", "clock: 61 % of the rated clock"} <= set(
        map(str, warnings.of_blocks(hot))
    )


def test_flags_that_only_warn() -> None:
    units = units_of()
    row = packed(with_flags(units, ("load=5.5", "clock=0.61", "cpu=0.44")))
    assert row.verdict == "faster"
    assert texts(row) == ("load: 5.5", "waiting: threads were busy 44 % of the time", "clock: 61 % of the rated clock")


def test_a_gpu_at_its_power_limit_warns_of_that_with_its_clock() -> None:
    units = units_of()
    row = packed(with_flags(units, ("power-capped", "sm=1020")))
    assert texts(row) == ("power-capped: 100 % of its readings, at 1020 MHz",)
    assert row.verdict == "faster"
    assert texts(packed(with_flags(units, ("power-capped",), every=40))) == ()


def test_a_twin_that_differs_widens_the_intervals() -> None:
    """Identical code read 6 % apart: 3 % are not told from that, half the time is."""
    near = packed(units_of({**TIMES, "packed": 1.03e-3, TWIN: 1.06e-3}))
    assert near.verdict == "inconclusive"
    assert texts(near)[0].startswith("unresolved: this machine cannot resolve 2 % here, A/A ratio 1.0")
    half = log(near.ratio_high / near.ratio_low) / 2
    assert half == pytest.approx(2.776 * log(1.06), rel=0.05)
    assert packed(units_of({**TIMES, "packed": 1.03e-3})).verdict == "slower"
    assert packed(units_of({**TIMES, "packed": 0.5e-3, TWIN: 1.06e-3})).verdict == "faster"


def test_missed_precision_says_how_many_rounds() -> None:
    method = replace(QUICK, precision=0.002, max_time=1.0)
    times = {**TIMES, "packed": 1.02e-3}
    row = packed(units_of(times, method=method, clock=lambda p: FakeClock(jitter=0.02, seed=p)), method)
    text = next(t for t in texts(row) if t.startswith("precision"))
    half = (log(row.ratio_high) - log(row.ratio_low)) / 2
    assert f"about {np.ceil(row.rounds * (half / log(1.002)) ** 2):.0f} rounds needed, {row.rounds} done" in text
    assert "±0.2 % wanted" in text
    twice = {**TIMES, "packed": 2e-3}
    row = packed(units_of(twice, method=method, clock=lambda p: FakeClock(jitter=0.02, seed=p)), method)
    text = next(t for t in texts(row) if t.startswith("precision"))
    assert text.endswith(f"{row.rounds} rounds done, the verdict is certain")


def test_spikes_are_said() -> None:
    units = []
    for unit in units_of():
        blocks = [replace(b, seconds=2 * b.seconds) if i % 7 == 0 else b for i, b in enumerate(unit.blocks)]
        units.append(replace(unit, blocks=tuple(blocks)))
    assert Code.SPIKES in codes(packed(units))


def test_alike_neighbours_widen() -> None:
    method = replace(QUICK, processes=12)
    units = units_of(method=method)
    shift = [0.02 * i for i in range(12)]
    units = [
        replace(u, blocks=tuple(_slower(b, shift[u.process]) if b.kernel == "packed" else b for b in u.blocks))
        for u in units
    ]
    row = packed(units, method)
    assert Code.CORRELATED in codes(row)
    plain = np.std(np.log(row.process_ratios), ddof=1) / np.sqrt(12) * 2.200985
    assert log(row.ratio_high / row.ratio) > 1.5 * plain


def _slower(block: TimedBlock, by: float) -> TimedBlock:
    return replace(block, seconds=block.seconds * exp(by))


def test_page_faults_that_differ_are_a_note() -> None:
    units = []
    for unit in units_of():
        blocks = [replace(b, flags=("faults=300",)) if b.kernel == "packed" else b for b in unit.blocks]
        units.append(replace(unit, blocks=tuple(blocks)))
    eager, row = summarise(CASE, units, QUICK, RUN)
    assert (eager.page_faults_per_call, row.page_faults_per_call) == (0, 300 / row.inner)
    assert row.note == f"{300 / row.inner:.0f} page faults per call (baseline 0): part of the ratio is mapping memory"
    assert eager.note == ""


def test_above_a_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def figures(case: object, time_s: float | None, roof: Roof, device_name: str, **more: object) -> object:
        seen["roof"] = roof
        empty = {f.name: None for f in dataclasses.fields(roofline.RooflineFigures)}
        return roofline.RooflineFigures(**{**empty, "roof_fraction": 1.3, "flops": 7, "datasheet_fraction": 1.019})

    monkeypatch.setattr(roofline, "figures", figures)
    units = units_of()
    units = [replace(u, roof=Roof(1e9 * (u.process + 1), None)) for u in units]
    row = packed(units)
    assert seen["roof"] == Roof(5e9, None)
    assert row.flops == 7
    assert texts(row) == ("roof: 130 % of the measured roof",)
    assert warnings.advice(row.warnings[0]).endswith("check the cache mode or the timing (ffn explain roofline)")


def test_the_tokens_of_experts_are_means_over_processes_and_the_bytes_follow_them() -> None:
    spec = replace(CASE.spec, moe=MoE(4, 2))
    case = replace(CASE, spec=spec, routing="zipf:1.2", input="x.safetensors", input_sha256="5e" * 32)
    loads = [(4.0, 2.0, 0.0, 2.0), (6.0, 2.0, 0.0, 0.0), (5.0, 3.0, 0.0, 0.0)]
    units = [
        replace(u, tokens_per_expert=load, experts_touched=float(sum(n > 0 for n in load)))
        for u, load in zip(units_of(TIMES, replace(QUICK, processes=3)), loads, strict=True)
    ]
    row = summarise(case, units, replace(QUICK, processes=3), RUN)[0]
    assert (row.routing, row.input) == ("zipf:1.2", "5e" * 32)
    assert row.tokens_per_expert == pytest.approx((5, 7 / 3, 0, 2 / 3))
    expert, router, x = 3 * 512 * 2048 * 4, 512 * 4 * 4, 2 * 32 * 512 * 4
    assert row.bytes == round(7 / 3 * expert) + router + x
    plain = summarise(replace(case, routing="", input="", input_sha256=""), units_of(), QUICK, RUN)[0]
    assert (plain.routing, plain.input, plain.tokens_per_expert) == ("", "", ())
    traced = summarise(replace(case, routing="t.npz", routing_sha256="ab" * 32), units, QUICK, RUN)[0]
    assert traced.routing == "ab" * 32


def test_processes_of_unlike_environments_are_said() -> None:
    units = units_of()
    units[1] = replace(units[1], environment={**units[1].environment, "torch": "2.12"})
    assert "environment: torch" in texts(packed(units))


def test_another_card_or_power_limit_is_another_environment() -> None:
    gpu = {"gpu_uuid": "0123456789ab", "power_limit_w": "700", "cublas": "12.8.4", "mig": "1g.10gb"}
    units = [replace(unit, environment={**unit.environment, **gpu}) for unit in units_of()]
    row = packed(units)
    assert (row.gpu_uuid, row.power_limit_w, row.cublas, row.mig) == ("0123456789ab", 700.0, "12.8.4", "1g.10gb")
    units[1] = replace(
        units[1], environment={**units[1].environment, "gpu_uuid": "ba9876543210", "power_limit_w": "500"}
    )
    assert "environment: gpu_uuid, power_limit_w" in texts(packed(units))
    assert packed(units_of()).power_limit_w is None


def test_every_code_has_advice_and_no_separator() -> None:
    assert set(warnings.ADVICE) == set(Code)
    assert str(BenchWarning(Code.LOAD, "a; b")) == "load: a, b"
    unknown = BenchWarning.parse("from the future: x")
    assert unknown == BenchWarning("from the future", "x")
    assert unknown.code not in set(Code)
    assert warnings.advice(unknown) == ""
    assert warnings.advice(BenchWarning.parse("load: 3.1")) == f"{warnings.ADVICE[Code.LOAD]} (ffn explain noise)"


def test_summary_agrees_with_paired() -> None:
    units = units_of()
    blocks = [b for u in units for b in u.blocks]
    direct = paired(blocks, "packed", "eager")
    assert packed(units).ratio == exp(direct.interval.value)
    assert {b.kernel for b in blocks} == {"eager", "packed", TWIN, ANCHOR, GEMM}


def test_coverage_of_the_whole_way() -> None:
    """Rounds that stop on precision, five processes, spikes and a drift: how often the row's interval holds 0.9."""
    inside, trials = 0, 100
    method = replace(QUICK, precision=0.01, max_time=2.0)
    for trial in range(trials):
        units = units_of(
            {"eager": 1e-3, "packed": 0.9e-3},
            method,
            lambda p, trial=trial: FakeClock(  # type: ignore[misc]
                jitter=0.01, spike_chance=0.03, spike=0.5, drift=lambda t: 1 + 0.05 * t, seed=trial * 5 + p
            ),
        )
        row = packed(units, method)
        inside += row.ratio_low <= 0.9 <= row.ratio_high
    assert inside / trials >= 0.90


def by_numpy(units: list[TimedUnit], kernel: str, base: str | None) -> tuple[list[float], np.ndarray]:
    """([value, low, high], of the processes) of a kernel's time or ratio, from quiet blocks, untrimmed."""
    of_processes = []
    for unit in units:
        found: dict[int, list[float]] = {}
        for b in unit.blocks:
            if b.kernel == kernel:
                same = (o for o in unit.blocks if (o.placement, o.round, o.kernel) == (b.placement, b.round, base))
                against = next((o.seconds / o.inner for o in same), None if base else 1.0)
                if against is None:  # not every round has the bare products
                    continue
                found.setdefault(b.placement, []).append(np.log(b.seconds / b.inner / against))
        of_processes.append(centre(list(found.values())))
    u = np.array(of_processes)
    half = 2.7764451051977934 * u.std(ddof=1) / np.sqrt(5)  # Student's t, 97.5 %, 4 degrees of freedom
    return list(np.exp([u.mean(), u.mean() - half, u.mean() + half])), np.exp(u)


def centre(placements: list[list[float]]) -> float:
    """The median of all rounds; where their ranks differ among placements, the weighted mean of placements' medians."""
    ranks = pd.Series(np.concatenate(placements)).rank().to_numpy()
    parts = np.split(ranks, np.cumsum([len(p) for p in placements])[:-1])
    n = len(ranks)
    if 12 / (n * (n + 1)) * sum(p.sum() ** 2 / len(p) for p in parts) - 3 * (n + 1) <= CHI_SQUARED[len(parts) - 1]:
        return float(np.median(np.concatenate(placements)))
    errors = np.array([np.var(p, ddof=1) / len(p) for p in placements])
    return float(np.average([np.median(p) for p in placements], weights=1 / (errors + np.median(errors))))


def test_every_column_of_a_row_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_module, "autocorrelation", lambda values: None)
    units = []
    for u in units_of():
        ends = [replace(o, peak_memory_bytes=1000 + u.process, compile_s=2.0 + u.process) for o in u.outcomes]
        roof = Roof(1e12 + u.process, 1e10 - u.process, 1000 * u.process)
        units.append(replace(u, outcomes=tuple(ends), roof=roof))
    _, row = summarise(CASE, units, QUICK, RUN)
    time, times = by_numpy(units, "packed", None)
    ratio, ratios = by_numpy(units, "packed", "eager")
    assert [row.time_s, row.time_low_s, row.time_high_s] == pytest.approx(time, rel=1e-9)
    assert [row.ratio, row.ratio_low, row.ratio_high] == pytest.approx(ratio, rel=1e-9)
    assert [row.aa_ratio, row.aa_low, row.aa_high] == pytest.approx(by_numpy(units, TWIN, "eager")[0], rel=1e-9)
    assert row.gemm_ratio == pytest.approx(by_numpy(units, "packed", GEMM)[0][0], rel=1e-9)
    assert row.process_times_s == pytest.approx(times, rel=1e-9)
    assert row.process_ratios == pytest.approx(ratios, rel=1e-9)
    assert row.process_anchors_s == pytest.approx(by_numpy(units, ANCHOR, None)[1], rel=1e-9)
    assert (row.peak_memory_bytes, row.compile_s) == (1004, 6.0)
    flops, moved = 6 * 32 * 512 * 2048, 4 * (3 * 512 * 2048 + 2 * 32 * 512)
    least = max(flops / (1e12 + 4), (moved - 4000) / 1e10)  # the best roof of all, the largest cache
    assert (row.flops, row.bytes) == (flops, moved)
    assert row.tflops == pytest.approx(flops / time[0] / 1e12)
    assert row.gbytes_per_s == pytest.approx(moved / time[0] / 1e9)
    assert row.roof_fraction == pytest.approx(least / time[0], rel=1e-12)
    assert row.fusion_saving_max == pytest.approx(4 * 4 * 32 * 2048 / 1e10 / least, rel=1e-12)
    assert row.datasheet_fraction is None


def test_a_mixture_and_tf32_are_told_to_the_row_and_the_roof() -> None:
    spec = replace(CASE.spec, moe=MoE(8, 2, shared_experts=1))
    case = replace(CASE, spec=spec, device="cuda", cache="flush", tokens=100_000)  # bound by arithmetic
    rows = {}
    for mode in ("tf32=on", "tf32=off"):
        told = {"device_name": "NVIDIA H200", "math_mode": f"highest {mode}"}
        units = [replace(u, environment={**u.environment, **told}) for u in units_of()]
        rows[mode] = summarise(case, units, QUICK, RUN)[1]
    row = rows["tf32=on"]
    assert (row.experts, row.top_k, row.shared_experts, row.cache) == (8, 2, 1, "shared")  # what was possible
    assert row.datasheet_fraction == pytest.approx(row.flops / 494.5e12 / row.time_s)
    assert rows["tf32=off"].datasheet_fraction == pytest.approx(row.flops / 67e12 / row.time_s)


def test_a_kernel_that_some_processes_lack_has_no_time() -> None:
    units = units_of()
    units[3] = replace(units[3], outcomes=units[3].outcomes[:1])
    row = packed(units)
    assert (row.time_s, row.note) == (None, "measured in only 4 of 5 processes")


def test_steps_have_none_of_the_blocks_figures() -> None:
    """A step's time against the block's FLOPs would be faster than any machine."""
    times = {BLOCK: 1e-3, "step gate": 3e-4, "step act": 1e-5, ANCHOR: 1e-3}
    units = [replace(u, roof=Roof(1e12, 1e10)) for u in units_of(times)]
    whole, *steps = summarise(CASE, units, QUICK, RUN)
    assert whole.flops
    assert whole.roof_fraction
    for row in steps:
        assert row.ratio is not None
        assert (row.flops, row.bytes, row.tflops, row.gbytes_per_s, row.roof_fraction) == (None,) * 5
        assert Code.ROOF not in codes(row)


def test_a_baseline_that_was_wrong_when_timed_is_compared_with_nothing() -> None:
    units = units_of()
    spoiled = [replace(o, status="wrong", note="its first answer") for o in units[2].outcomes if o.kernel == "eager"]
    units[2] = replace(units[2], outcomes=(*spoiled, units[2].outcomes[1]))
    base, row = summarise(CASE, units, QUICK, RUN)
    assert (base.status, base.ratio, base.time_s) == ("wrong", None, None)
    assert (row.status, row.ratio, row.verdict, row.aa_ratio, row.process_ratios) == ("ok", None, "", None, ())
    assert row.time_s == pytest.approx(TIMES["packed"], rel=0.01)
    assert "no ratio" in row.note


def test_the_roof_is_that_of_the_cache_mode_that_was_possible() -> None:
    roof = Roof(1e15, 1e10, 1 << 30)  # all fits into the cache
    asked = replace(CASE, cache="cold-weights")
    cold, warm = ([replace(u, cache=mode, roof=roof) for u in units_of()] for mode in ("cold-weights", "warm"))
    fractions = [summarise(asked, units, QUICK, RUN)[0].roof_fraction for units in (cold, warm)]
    assert fractions[0] > 10 * fractions[1] > 0
    mixed = [*cold[:4], warm[4]]
    assert any(text.startswith("environment: cache") for text in texts(summarise(asked, mixed, QUICK, RUN)[0]))


def test_a_kernel_without_an_outcome_in_every_process_is_not_ok() -> None:
    units = units_of()
    units[1] = replace(units[1], outcomes=units[1].outcomes[:1])
    _, row = summarise(CASE, units, QUICK, RUN)
    assert (row.status, row.time_s) == ("failed", None)


def test_processes_that_are_sure_of_themselves_and_differ_are_wanted_in_greater_number() -> None:
    units = []
    for u in units_of():
        blocks = tuple(
            replace(b, seconds=b.seconds * (1 + 0.1 * (u.process % 2))) if b.kernel == "packed" else b for b in u.blocks
        )
        units.append(replace(u, blocks=blocks, spent={"blocks": 0.1}))
    (text,) = [t for t in texts(summarise(CASE, units, QUICK, RUN)[1]) if t.startswith("precision")]
    assert "--processes" in text
    late = [replace(u, spent={"blocks": 0.6}) for u in units]
    (text,) = [t for t in texts(summarise(CASE, late, QUICK, RUN)[1]) if t.startswith("precision")]
    assert "--max-time" in text


SMALL = Case("s", "s", FFNSpec(8, 16), 4)
UNIT = fake_worker.unit(SMALL, Job(0, (SMALL,), choices(["eager,packed"]), "eager", Method()))
BLOCKS = sum(block.kernel == "packed" for block in UNIT.blocks)
RIGHT = {name: Finding(Outcome(name), answers=3, samples=BLOCKS) for name in ("eager", "packed")}


def stands(finding: Finding | None = None, outcome: Outcome | None = None, kernel: str = "packed") -> Outcome:
    findings = RIGHT | ({finding.outcome.kernel: finding} if finding else {})
    outcomes = tuple(outcome if outcome and o.kernel == kernel else o for o in UNIT.outcomes)
    unit = agreed(replace(UNIT, outcomes=outcomes), CaseReport(SMALL.key, tuple(findings.values())))
    return next(o for o in unit.outcomes if o.kernel == kernel)


def test_where_both_say_ok_nothing_changes():
    assert agreed(UNIT, CaseReport(SMALL.key, tuple(RIGHT.values()))) == UNIT


def test_a_kernel_that_was_left_out_keeps_its_outcome_without_a_finding():
    earlier = Outcome("packed", error_max=1e-7)
    report = CaseReport(SMALL.key, (RIGHT["eager"],))
    assert agreed(UNIT, report).outcomes[1].status == "wrong"
    assert agreed(UNIT, report, {"packed": earlier}).outcomes[1] == earlier


def test_without_a_report_nothing_is_ok():
    outcomes = agreed(UNIT, None).outcomes
    assert {(o.status, o.note) for o in outcomes} == {("failed", "the referee's report on this case did not arrive")}
    gone = Outcome("packed", "oom", "the worker was killed")
    assert agreed(replace(UNIT, outcomes=(gone,)), None).outcomes == (gone,)


@pytest.mark.parametrize("status", ["ok", "failed", "skipped", "oom"])
def test_what_the_referee_found_stands_whatever_the_worker_says(status):
    found = Finding(Outcome("packed", "wrong", "lower-precision: off", 0.1, 0.2), answers=3, samples=BLOCKS)
    outcome = stands(found, Outcome("packed", status, "", 1e-8, 1e-8))
    said = "patched-ffn: the worker found it correct, but the referee did not: " if status == "ok" else ""
    assert (outcome.status, outcome.note) == ("wrong", f"{said}lower-precision: off")
    assert (outcome.error_max, outcome.error_rel) == (0.1, 0.2)


def test_the_worker_s_note_of_a_wrong_kernel_names_its_cause():
    said = Outcome("packed", "wrong", "replay-by-id: off", 0.1, 0.2)
    assert stands(Finding(Outcome("packed", "wrong", "wrong-when-timed: off", 0.1, 0.2)), said) == said
    assert stands(outcome=said) == said


@pytest.mark.parametrize(
    ("finding", "seen"),
    [
        (Finding(Outcome("packed"), samples=BLOCKS), "no answer"),
        (Finding(Outcome("packed"), answers=3, samples=BLOCKS - 1), f"{BLOCKS - 1} samples of {BLOCKS} timed blocks"),
    ],
)
def test_an_answer_of_every_timed_block_has_been_shown(finding, seen):
    outcome = stands(finding)
    assert (outcome.status, outcome.note) == ("wrong", f"patched-ffn: the referee was shown {seen}")


def test_the_twin_is_the_baseline_s_and_a_format_is_what_was_declared():
    assert stands(Finding(Outcome(TWIN, "wrong", "off")), kernel="eager").note.endswith("did not: off")
    assert stands(Finding(Outcome(TWIN, "wrong", "off"))).status == "ok"
    assert stands(replace(RIGHT["packed"], outcome=Outcome("packed", computes="int8"))).computes == "int8"
