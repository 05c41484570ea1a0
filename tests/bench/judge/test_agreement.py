"""What stands of a worker's outcomes beside its referee's report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.bench.judge.summary import agreed
from ffncli.bench.records import TWIN, Case, CaseReport, Finding, Job, Method, Outcome
from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import choices
from tests.bench import fake_worker

CASE = Case("s", "s", FFNSpec(8, 16), 4)
UNIT = fake_worker.unit(CASE, Job(0, (CASE,), choices(["eager,packed"]), "eager", Method()))
BLOCKS = sum(block.kernel == "packed" for block in UNIT.blocks)
RIGHT = {name: Finding(Outcome(name), answers=3, samples=BLOCKS) for name in ("eager", "packed")}


def stands(finding: Finding | None = None, outcome: Outcome | None = None, kernel: str = "packed") -> Outcome:
    findings = RIGHT | ({finding.outcome.kernel: finding} if finding else {})
    outcomes = tuple(outcome if outcome and o.kernel == kernel else o for o in UNIT.outcomes)
    unit = agreed(replace(UNIT, outcomes=outcomes), CaseReport(CASE.key, tuple(findings.values())))
    return next(o for o in unit.outcomes if o.kernel == kernel)


def test_where_both_say_ok_nothing_changes():
    assert agreed(UNIT, CaseReport(CASE.key, tuple(RIGHT.values()))) == UNIT


def test_without_a_report_nothing_is_ok():
    outcomes = agreed(UNIT, None).outcomes
    assert {(o.status, o.note) for o in outcomes} == {("failed", "the referee's report on this case did not arrive")}
    gone = Outcome("packed", "oom", "the worker was killed")
    assert agreed(replace(UNIT, outcomes=(gone,)), None).outcomes == (gone,)


@pytest.mark.parametrize("status", ["ok", "failed", "skipped", "oom"])
def test_what_the_referee_found_stands_whatever_the_worker_says(status):
    found = Finding(Outcome("packed", "wrong", "lower-precision: off", 0.1, 0.2), answers=3, samples=BLOCKS)
    outcome = stands(found, Outcome("packed", status, "", 1e-8, 1e-8))
    said = "patched-ffn: its worker calls it right, the referee does not: " if status == "ok" else ""
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
    assert stands(Finding(Outcome(TWIN, "wrong", "off")), kernel="eager").note.endswith("does not: off")
    assert stands(Finding(Outcome(TWIN, "wrong", "off"))).status == "ok"
    assert stands(replace(RIGHT["packed"], outcome=Outcome("packed", computes="int8"))).computes == "int8"
