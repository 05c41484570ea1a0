"""A worker's unit and the report of its referee: a kernel is ok where both say so, and as often as it was timed.

The worker has loaded users' files, so its Python may be patched from end to end. The referee has not, and its report
comes over a line of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ffncli.bench.records import TWIN, CaseReport, Finding, Outcome, TimedUnit
from ffncli.bench.wrong_codes import WrongCode


def agreed(unit: TimedUnit, report: CaseReport | None) -> TimedUnit:
    """The unit with the outcomes that stand; without a report none is ok."""
    if report is None:
        return replace(unit, outcomes=tuple(map(_unconfirmed, unit.outcomes)))
    findings = {finding.kernel: finding for finding in report.findings}
    blocks = Counter(block.kernel for block in unit.blocks)
    twin = findings.get(TWIN, Finding(TWIN))

    def stands(outcome: Outcome) -> Outcome:
        finding = findings.get(outcome.kernel, Finding(outcome.kernel))
        if outcome.kernel == unit.baseline and twin.wrong and not finding.wrong:
            finding = replace(finding, wrong=twin.wrong)
        return _confirmed(outcome, finding, blocks[outcome.kernel])

    return replace(unit, outcomes=tuple(map(stands, unit.outcomes)))


def _unconfirmed(outcome: Outcome) -> Outcome:
    if outcome.status != "ok":
        return outcome
    return replace(outcome, status="failed", note="the referee's report on this case did not arrive")


def _confirmed(outcome: Outcome, finding: Finding, blocks: int) -> Outcome:
    """The outcome, if the referee found nothing else and has seen an answer of every timed block."""
    outcome = replace(outcome, computes=finding.computes or outcome.computes)
    if outcome.status == "wrong":  # its note may name the cause, which the worker looked for
        return outcome
    if finding.wrong:
        differs = f"{WrongCode.PATCHED_FFN}: its worker calls it right, the referee does not: "
        note = (differs if outcome.status == "ok" else "") + finding.wrong
        return replace(outcome, status="wrong", note=note, error_max=finding.error_max, error_rel=finding.error_rel)
    if outcome.status != "ok":
        return outcome
    if not finding.answers or finding.samples < blocks:
        seen = f"{finding.samples} samples of {blocks} timed blocks" if finding.answers else "no answer"
        return replace(outcome, status="wrong", note=f"{WrongCode.PATCHED_FFN}: the referee was shown {seen}")
    return outcome
