"""Stored results held to each other: matching, environments, the gate in simulation, what never gates; the call."""

import itertools
import math
import random
from dataclasses import fields, replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffncli
from ffncli.bench.judge.compare import ResultComparison, Rules, compare
from ffncli.bench.judge.environment_match import match
from ffncli.bench.judge.statistics import welch
from ffncli.bench.results.csv_file import COLUMNS, ResultRows
from ffncli.bench.results.row import COMPARED, BenchWarning, ResultRow
from ffncli.errors import FFNError
from tests.bench.stored import around, row, table, write

GATE = Rules(threshold=0.03)


def held(slowdowns: list[float], rules: Rules = GATE, **changes: object) -> ResultComparison:
    return compare(table([1.0] * len(slowdowns), "base"), table(slowdowns, "new", **changes), rules)


# --- METHOD: the tests by name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", COMPARED)
def test_a_baseline_from_another_environment_is_refused_and_never_gates(field):
    base, new = table([1, 1], "base"), table([1.5, 1.5], "new", **{field: "another"})
    with pytest.raises(FFNError, match=rf"{field}: .* in BASE, another in NEW.*--allow-mismatch") as refused:
        compare(base, new, GATE)
    assert refused.value.code == 2
    shown = compare(base, new, replace(GATE, allow_mismatch=True))
    assert not shown.comparable
    assert [(m.field, m.new, m.rows) for m in shown.mismatches] == [(field, "another", 2)]
    assert [row.verdict for row in shown.rows] == ["slower", "slower"]
    assert shown.regressions == ()
    assert not any(row.gated for row in shown.rows)
    assert all(row.p_holm is None for row in shown.rows)


def test_replays_are_not_compared_with_launches():
    """Replayed from a graph a call takes 9 µs, launched 30: no regression of a kernel."""
    with pytest.raises(FFNError, match=r"launch: graphs in BASE, plain in NEW.*with the same --launch") as caught:
        compare(table([1.0], "base", launch="graphs"), table([3.0], "new", launch="plain"), GATE)
    assert caught.value.code == 2
    assert len(held([1.5], launch="").regressions) == 1  # on a CPU there is one way


def test_exactly_one_regression_among_many_rows_fails():
    found = held([1.0] * 19 + [1.10])
    assert [row.tokens for row in found.regressions] == [2**19]
    assert found.count("slower") == 1


def test_a_kernel_that_computes_in_fewer_bits_than_before_is_not_gated():
    found = held([1.5], computes="fp8-rowwise")
    assert found.regressions == ()
    assert found.rows[0].reason == "BASE computes in the case's dtype, the other in fp8-rowwise: not gated"
    both = compare(table([1.0], "base", computes="fp8"), table([1.5], "new", computes="fp8"), GATE)
    assert len(both.regressions) == 1


def test_improvements_alone_do_not_fail():
    found = held([0.7, 0.9, 0.5, 0.95])
    assert found.regressions == ()
    assert found.inconclusive == ()
    assert found.count("faster") == 4


# --- figures of a row -------------------------------------------------------------------------------------------------


def test_a_row_is_welch_on_logs_raw_and_per_anchor():
    base = row(around(1.0, 4, 0.02, 1), around(0.5, 4, 0.01, 2))
    new = row(around(1.1, 6, 0.02, 3), around(0.5, 6, 0.01, 4), run_id="new")
    (found,) = compare([base], [new]).rows

    def logs(one: ResultRow, anchored: bool) -> list[float]:
        pairs = zip(one.process_times_s, one.process_anchors_s, strict=True)
        return [math.log(t / a if anchored else t) for t, a in pairs]

    raw, per_anchor = welch(logs(base, False), logs(new, False)), welch(logs(base, True), logs(new, True))
    assert per_anchor is not None
    assert (found.ratio, found.ratio_low, found.ratio_high) == pytest.approx(
        (raw.ratio().value, raw.ratio().low, raw.ratio().high), rel=1e-12
    )
    assert (found.normalised_ratio, found.normalised_low, found.normalised_high) == pytest.approx(
        (per_anchor.ratio().value, per_anchor.ratio().low, per_anchor.ratio().high), rel=1e-12
    )
    assert found.p_holm == pytest.approx(max(raw.p_above(0.02), per_anchor.p_above(0.02)), rel=1e-9)
    assert (found.processes_base, found.processes_new) == (4, 6)
    assert found.base_time_s == pytest.approx(math.prod(base.process_times_s) ** (1 / 4))
    assert found.anchor_ratio == pytest.approx(found.ratio / found.normalised_ratio)


def test_ratios_to_the_own_baseline_are_shown():
    base = row(ratio=0.8, process_ratios=(0.5, 2.0, 1.0, 1.0, 8.0))
    (found,) = compare([base], [row(ratio=0.7, run_id="new")]).rows
    assert (found.base_ratio, found.new_ratio) == (pytest.approx(8 ** (1 / 5)), pytest.approx(0.7))


def test_several_files_of_a_side_add_their_processes():
    parts = [table([1.0], f"run {i}", count=2) for i in range(3)]
    (found,) = compare([r for part in parts for r in part], table([1.1], "new")).rows
    assert found.processes_base == 6
    times = [t for part in parts for t in part[0].process_times_s]
    assert found.base_time_s == pytest.approx(math.exp(sum(map(math.log, times)) / 6))


def test_two_files_of_one_process_each_are_evidence():
    base = [row([1.0 + 0.001 * i], run_id=f"b{i}") for i in range(3)]
    new = [row([1.2 + 0.001 * i], run_id=f"n{i}") for i in range(3)]
    assert [r.regression for r in compare(base, new, GATE).rows] == [True]


def test_a_file_named_twice_counts_once_and_two_answers_are_refused():
    base = table([1.0], "base")
    assert compare([*base, *base], table([1.0], "new")).rows[0].processes_base == 5
    with pytest.raises(FFNError, match="BASE has 'packed' twice with different figures"):
        compare([*base, replace(base[0], time_s=2.0)], table([1.0], "new"))


def test_holm_is_brute_force():
    """Adjusted p by its definition: the largest over all sets of at least as small p of how often each is tried."""
    found = held([1.0, 1.03, 1.035, 1.04, 1.045], noise=0.01)
    alone = held([1.0], noise=0.01).rows[0].p_holm
    ps = []
    for row_ in found.rows:
        side = [r for r in table([1.0] * 5, "base") if r.tokens == row_.tokens]
        other = [r for r in table([1.0, 1.03, 1.035, 1.04, 1.045], "new", noise=0.01) if r.tokens == row_.tokens]
        p = compare(side, other, GATE).rows[0].p_holm
        assert p is not None
        ps.append(p)
    assert alone == ps[0]
    for at, row_ in enumerate(found.rows):
        # closed testing: rejected where every set that holds the row is, by Bonferroni within the set
        sets = [s for size in range(1, 6) for s in itertools.combinations(range(5), size) if at in s]
        assert row_.p_holm == pytest.approx(max(min(1.0, len(s) * min(ps[i] for i in s)) for s in sets))


# --- what never gates -------------------------------------------------------------------------------------------------


def test_one_process_is_shown_and_not_gated():
    found = held([1.5], count=1)
    (one,) = found.rows
    assert (one.gated, one.regression, one.verdict, one.ratio_low) == (False, False, "inconclusive", None)
    assert one.ratio == pytest.approx(1.5, rel=0.05)
    assert "one process in NEW" in one.reason
    assert found.inconclusive == (one,)


def slow_machine(kernel: float, machine: float) -> ResultComparison:
    new = table([kernel], "new")[0]
    anchors = tuple(machine * a for a in new.process_anchors_s)
    return compare(table([1.0], "base"), [replace(new, process_anchors_s=anchors)], GATE)


def test_a_machine_that_itself_changed_never_gates():
    for kernel, machine in ((1.10, 1.10), (1.3, 1.10), (1.10, 0.9)):
        (one,) = slow_machine(kernel, machine).rows
        assert (one.gated, one.regression) == (False, False)
        assert one.reason.startswith("the machine itself changed, ")
    assert slow_machine(1.10, 1.10).rows[0].verdict == "inconclusive"
    assert "10 % slower" in slow_machine(1.10, 1.10).rows[0].reason
    assert slow_machine(1.10, 1.0).rows[0].regression


def test_raw_and_normalised_must_agree():
    """Anchors so noisy that the machine may have changed by anything: no evidence against the kernel."""
    base, new = table([1.0], "base")[0], table([1.10], "new")[0]
    noisy = replace(new, process_anchors_s=around(0.0105, 5, 0.08, 9))
    (one,) = compare([base], [noisy], GATE).rows
    assert one.gated
    assert (one.regression, one.verdict) == (False, "inconclusive")
    assert "times disagree with" in one.reason
    (steady,) = compare([base], [new], GATE).rows
    assert (steady.regression, steady.verdict) == (True, "slower")


def test_without_an_anchor_nothing_is_gated():
    (one,) = compare(table([1.0], "base"), [replace(r, process_anchors_s=()) for r in table([1.5], "new")], GATE).rows
    assert (one.gated, one.verdict, one.normalised_ratio) == (False, "slower", None)
    assert "no machine anchor" in one.reason


def test_a_run_without_its_anchors_leaves_the_side_without_one():
    new = table([1.5], "new")
    short = [*new, replace(new[0], run_id="another", process_anchors_s=())]
    (one,) = compare(table([1.0], "base"), short, GATE).rows
    assert (one.gated, one.normalised_ratio) == (False, None)
    assert "no machine anchor" in one.reason


@pytest.mark.parametrize("side", [0, 1])
def test_what_was_measured_beside_other_work_does_not_gate(side):
    sides = [table([1.0], "base"), table([1.5], "new")]
    (quiet,) = compare(*sides, GATE).rows
    sides[side] = [
        replace(r, warnings=(BenchWarning("load", "3.0"), BenchWarning("preempted", "24 % of the blocks")))
        for r in sides[side]
    ]
    (one,) = compare(*sides, GATE).rows
    assert (quiet.regression, one.gated, one.regression, one.p_holm) == (True, False, False, None)
    assert one.reason == f"other work ran on the cores in {('BASE', 'NEW')[side]}: not gated"


def test_a_twin_that_is_told_apart_does_not_gate():
    for side in range(2):
        sides = [table([1.0], "base"), table([1.5], "new")]
        sides[side] = [replace(r, aa_ratio=1.05, aa_low=1.03, aa_high=1.07) for r in sides[side]]
        (one,) = compare(*sides, GATE).rows
        assert (one.gated, one.regression) == (False, False)
        assert f"from itself in {('BASE', 'NEW')[side]}" in one.reason
    fine = [replace(r, aa_ratio=1.02, aa_low=1.015, aa_high=1.03) for r in table([1.5], "new")]
    assert compare(table([1.0], "base"), fine, GATE).rows[0].regression


@pytest.mark.parametrize(
    ("low", "high", "gated"),
    [
        (None, None, True),
        (0.981, 1.019, True),
        (1.021, None, False),  # its upper end was no number: above the margin wherever that was
        (None, 0.98, False),
        (1.021, 1.03, False),
        (0.97, 0.98, False),
        (0.0, 1.5, True),
        (-1.0, -0.5, False),  # no ratio at all, in a file that somebody wrote by hand
    ],
)
def test_a_baseline_that_differs_from_itself_is_not_compared_with_another_run(low, high, gated):
    base, new = ([replace(r, aa_low=low, aa_high=high) for r in table([1.0], run)] for run in ("base", "new"))
    assert compare(base, new, GATE).rows[0].gated == gated


@pytest.mark.parametrize("status", ["wrong", "failed", "oom", "skipped"])
def test_a_kernel_that_was_ok_and_is_not(status):
    base, new = table([1.0, 1.0], "base"), table([1.0, 1.0], "new")
    lost = replace(new[0], status=status, process_times_s=(), process_anchors_s=(), ratio=None)
    found = compare(base, [lost, new[1]], GATE)
    skipped = status == "skipped"
    assert found.rows[0].verdict == ("inconclusive" if skipped else "broken")
    assert [r.tokens for r in found.regressions] == ([] if skipped else [1])
    assert found.rows[0] in found.inconclusive or not skipped
    back = compare([lost, new[1]], base, GATE)
    assert (back.rows[0].verdict, back.regressions, back.inconclusive) == ("mended", (), ())
    neither = compare([lost], [replace(lost, run_id="x")], GATE)
    assert (neither.rows[0].verdict, neither.inconclusive, neither.kernels) == (None, (), ())
    other = [replace(r, cpu="another") for r in (lost, new[1])]
    assert compare(base, other, replace(GATE, allow_mismatch=True)).regressions == ()


# --- matching ---------------------------------------------------------------------------------------------------------

_ASKED = {
    "d_model": 1024, "d_ff": 4096, "activation": "gelu", "gated": False, "bias": True, "experts": 8, "top_k": 2,
    "shared_experts": 1, "tokens": 64, "dtype": "bf16", "passes": "forward+backward", "cache": "flush",
    "device": "cuda", "threads": 1, "kernel": "eager", "routing": "zipf:1.2", "input": "5e" * 32,
}  # fmt: skip


@pytest.mark.parametrize("field", _ASKED)
def test_another_question_is_not_compared(field):
    other = row(run_id="new", **{field: _ASKED[field]})
    found = compare([row()], [row(run_id="new"), other])
    assert len(found.rows) == 1
    assert len(found.only_in_new) == 1
    with pytest.raises(FFNError, match=f"no case and kernel in common; .*{'pass' if field == 'passes' else field}: "):
        compare([row()], [other])


def test_a_row_has_the_routing_and_the_input_that_it_was_measured_with():
    both = [row(run_id=name, routing="uniform", input="5e" * 32) for name in ("base", "new")]
    (compared,) = compare(both[:1], both[1:]).rows
    assert (compared.routing, compared.input) == ("uniform", "5e" * 32)


def test_what_is_typed_does_not_matter_but_cases_of_one_run_stay_apart():
    typed = row(source="mine.json", run_id="new")
    assert len(compare([row()], [typed]).rows) == 1
    two = [row(source="a"), row(source="b")]
    assert [r.block for r in compare(two, [replace(r, run_id="new") for r in two]).rows] == ["a", "b"]
    assert match([row()], [row()]).only_base == ()


def test_the_host_alone_decides_nothing():
    found = compare(table([1.0], "base"), table([1.1], "new", host="ci-2"), GATE)
    assert found.comparable
    assert found.rows[0].regression
    assert found.remarks == ("host: ci-1 in BASE, ci-2 in NEW",)


def on_machines(run: str, first: str, second: str, **second_changes) -> list[ResultRow]:
    """A merged result: two cases, each on a machine of its own."""
    one, two = table([1.0, 1.0], run)
    return [replace(one, host=first, run_id=run + "1"), replace(two, host=second, run_id=run + "2", **second_changes)]


def test_merged_results_are_compared_machine_by_machine():
    gpu = {"device_name": "H100", "driver": "580"}
    found = compare(on_machines("base", "a", "b", **gpu), on_machines("new", "a", "b", **gpu), GATE)
    assert (found.comparable, found.remarks) == (True, ())
    exchanged = [replace(row, host={"a": "b", "b": "a"}[row.host]) for row in on_machines("new", "a", "b", **gpu)]
    found = compare(on_machines("base", "a", "b", **gpu), exchanged, GATE)
    assert found.remarks == ("host: a, b in BASE, a, b in NEW",)  # of one kind: a remark, as for single machines
    with pytest.raises(FFNError, match=r"device_name: AMD EPYC 7B13 in BASE, H100 in NEW"):
        compare(on_machines("base", "a", "b"), on_machines("new", "a", "b", **gpu), GATE)


def test_a_field_that_one_side_did_not_record_differs():
    with pytest.raises(FFNError, match=r"isa: unknown in BASE, avx2 fma in NEW"):
        compare(table([1.0], "base", isa=""), table([1.0], "new"))
    assert compare(table([1.0], "base", isa=""), table([1.0], "new", isa="")).comparable


def test_the_same_run_on_both_sides_is_said():
    base = table([1.0, 1.0], "base")
    found = compare(base, base, GATE)
    assert all((r.ratio, r.verdict, r.regression) == (1.0, "same", False) for r in found.rows)
    assert found.remarks[0].startswith("both sides contain the same run")


@pytest.mark.parametrize("field", ["process_times_s", "process_anchors_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_times_that_no_clock_shows_are_refused(field, value):
    new = replace(row(run_id="new"), **{field: (1.0, 1.0, value, 1.0, 1.0)})
    with pytest.raises(FFNError, match=f"NEW: {field} of 'packed' must be above 0, got"):
        compare([row()], [new])
    with pytest.raises(FFNError, match="no process_times_s"):
        compare([row()], [row((), run_id="new")])


def test_geometric_means_per_kernel():
    base = [*table([1, 1], "base", kernel="a"), *table([1], "base", kernel="b")]
    new = [*table([2, 0.5], "new", kernel="a"), *table([3], "new", kernel="b")]
    found = {k.kernel: k for k in compare(base, new).kernels}
    assert (found["a"].cases, found["b"].cases) == (2, 1)
    assert (found["a"].ratio, found["b"].ratio) == (pytest.approx(1, rel=0.01), pytest.approx(3, rel=0.01))


times = st.lists(st.floats(1e-9, 1e4), min_size=1, max_size=5)


@given(times, times)
def test_a_swap_of_the_sides_inverts_ratios_and_swaps_words(base, new):
    sides = [[row(base)], [row(new, run_id="new")]]
    forth, back = compare(*sides).rows[0], compare(*reversed(sides)).rows[0]
    assert math.log(forth.ratio) == pytest.approx(-math.log(back.ratio), abs=1e-9)
    swapped = {"slower": "faster", "faster": "slower"}
    near = any(
        end and abs(abs(math.log(end)) - math.log(1.02)) < 1e-9
        for end in (forth.ratio_low, forth.ratio_high)
        if end and math.isfinite(end)
    )
    assert near or back.verdict == swapped.get(str(forth.verdict), forth.verdict)
    assert not (forth.regression and back.regression)


# --- the gate in simulation -------------------------------------------------------------------------------------------

REGIMES = {"clock": (0.015, 0.002), "state": (0.002, 0.010)}  # sd of what a process shares, of what each arm has alone


def simulated(drawn: random.Random, regime: str, slowdowns: list[float], run: str) -> list[ResultRow]:
    """Five processes, each with one offset for all arms and one for each arm, the anchor's too."""
    shared, own = REGIMES[regime]
    clocks = [drawn.gauss(0, shared) for _ in range(5)]
    return [
        row(
            [factor * math.exp(clock + drawn.gauss(0, own)) for clock in clocks],
            [0.5 * math.exp(clock + drawn.gauss(0, own)) for clock in clocks],
            tokens=at + 1,
            run_id=run,
        )
        for at, factor in enumerate(slowdowns)
    ]


def failing(regime: str, slowdowns: list[float], threshold: float, trials: int) -> float:
    """The share of trials in which any row fails."""
    drawn = random.Random(11)
    rules = Rules(threshold=threshold)
    return (
        sum(
            bool(
                compare(
                    simulated(drawn, regime, [1.0] * len(slowdowns), "base"),
                    simulated(drawn, regime, slowdowns, "new"),
                    rules,
                ).regressions
            )
            for _ in range(trials)
        )
        / trials
    )


@pytest.mark.parametrize("regime", REGIMES)
def test_the_gate_is_silent_on_equal_code_and_hears_five_percent(regime):
    assert failing(regime, [1.0] * 5, 0.01, 400) <= 0.01
    assert failing(regime, [1.05], 0.01, 400) >= 0.9


@pytest.mark.parametrize("regime", REGIMES)
def test_any_false_failure_stays_below_its_level_at_the_threshold(regime):
    """All rows slower by exactly what is allowed: the hardest case that may not fail."""
    assert failing(regime, [1.02] * 4, 0.02, 600) <= 0.06


def test_rows_cannot_hide_in_fields_that_nothing_reads():
    """Every field that names the machine is compared, in the question, or deliberately neither."""
    named = "cpu isa device_name driver blas openmp allocator math_mode torch numpy python launch_queues launch"
    named += " gpu_uuid power_limit_w cublas cudnn triton mig"  # what makes two GPUs of one model two machines
    assert set(COMPARED) == set(named.split()) < {f.name for f in fields(ResultRow)}
    assert {"host", "ffncli", "persistence"} & set(COMPARED) == set()


@pytest.fixture
def base(tmp_path) -> str:
    return write(tmp_path / "base.csv", table([1.0] * 3, "base"))


@pytest.fixture
def new(tmp_path) -> str:
    return write(tmp_path / "new.csv", table([1, 1.12, 0.9], "new"))


def cells(html: str) -> list[list[str]]:
    """The rows of a notebook's table, read as XML: it is well-formed."""
    return [[cell.text or "" for cell in line] for line in ElementTree.fromstring(html).iter("tr")]


def test_results_are_compared_as_the_command_does(base, new, call):
    found = ffncli.compare(base, new, fail_if_slower=0.05)
    assert [r.verdict for r in found.rows] == ["same", "slower", "faster"]
    assert [r.tokens for r in found.regressions] == [2]
    assert call("compare", base, new, "--fail-if-slower", "5%")[0] == 1
    assert repr(found) == "<ResultComparison of 3 rows: 1 same, 1 slower, 1 faster>"
    frame = found.frame()
    assert (frame["ratio"].tolist(), "pass" in frame) == ([r.ratio for r in found.rows], True)
    shown = cells(found._repr_html_())
    assert shown[0][-4:] == ["ratio", "ratio_low", "ratio_high", "verdict"]
    assert [line[-1] for line in shown[1:]] == ["same", "slower", "faster"]
    assert [line[-4] for line in shown[1:]] == [f"{r.ratio:.4g}" for r in found.rows]


def test_traces_are_compared_within_a_tolerance(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        ffncli.trace("4x8:relu", [1, 2, 3, 4], seed=seed, save=tmp_path / f"{name}.npz")
    same = ffncli.compare(tmp_path / "a.npz", tmp_path / "a.npz")
    assert (same.first, repr(same)) == (None, "<TraceComparison of 4 steps: all agree>")
    found = ffncli.compare(tmp_path / "a.npz", tmp_path / "b.npz")
    assert found.first == "up"
    assert found.frame()["step"].tolist()[:4] == ["x", "up", "act", "down"]
    assert [line[-1] for line in cells(found._repr_html_())[1:3]] == ["True", "False"]
    assert ffncli.compare(tmp_path / "a.npz", tmp_path / "b.npz", tolerance=1e9).first is None


def test_what_it_refuses(base, tmp_path):
    ffncli.trace("4x8:relu", [1, 2, 3, 4], save=tmp_path / "a.npz")
    trace = tmp_path / "a.npz"
    for arguments, options, words in (
        ((base, trace), {}, "holds results, .* a saved trace"),
        ((base, base), {"tolerance": 1e-3}, "tolerance is for saved traces"),
        ((trace, trace), {"margin": 0.1}, "margin is for results of ffn bench; these are saved traces"),
        (("no.csv", base), {}, "'no.csv' does not exist"),
        (([base, trace], base), {}, "is not a CSV; only results"),
        (([], base), {}, "one side has no files"),
    ):
        with pytest.raises(ffncli.FFNError, match=words):
            ffncli.compare(*arguments, **options)


def test_results_show_themselves():
    rows = ResultRows([row(time_s=1e-3, ratio_low=0.8, ratio_high=1.0, verdict="same"), row(ratio=None, kernel="<b>")])
    assert repr(rows).splitlines() == [
        "<ResultRows: 2",
        "  32 tokens, fp32, packed: ok, 0.001 s, ratio 0.900 [0.800, 1.000] same",
        "  32 tokens, fp32, <b>: ok>",
    ]
    assert [*rows.frame().columns] == [*COLUMNS]
    assert [line[6] for line in cells(rows._repr_html_())] == ["kernel", "packed", "<b>"]
    assert len(cells(ResultRows([row()] * 150)._repr_html_())) == 102  # the head, 100, and how many more
