"""Whether a unit that comes from a file or from another machine can be one of a run."""

from __future__ import annotations

from ffncli.bench.records import Case, TimedUnit
from ffncli.bench.request.grid import BenchRequest
from ffncli.errors import FFNError


def require_unit_of(request: BenchRequest, case: Case | None, unit: TimedUnit, where: str, hint: str = "") -> None:
    """Raises FFNError, with `where` it comes from, for a unit that the run cannot have; `case`: that of its key."""
    kernels = [outcome.kernel for outcome in unit.outcomes]
    named = {*kernels} == {*request.names} or request.method.by_step
    wrong = {
        "its case is none of the run's": case is None or case.key != unit.case,
        "its process is none of the run's": unit.process >= request.method.processes,
        "its baseline is not the run's": unit.baseline != request.baseline,
        "its kernels are not the run's": not named or len({*kernels}) != len(kernels),
        "its blocks are those of another unit": any(
            (block.process, block.case) != (unit.process, unit.case) for block in unit.blocks
        ),
        "its tokens per expert are not those of its experts": not _counts_experts(case, unit),
    }
    if why := next((words for words, is_so in wrong.items() if is_so), ""):
        raise FFNError(f"{where} is damaged: {why}", hint)


def _counts_experts(case: Case | None, unit: TimedUnit) -> bool:
    """Whether there is a number for each expert of the case, or none."""
    moe = case.spec.moe if case else None
    return len(unit.tokens_per_expert) in (0, moe.experts if moe else 0)
