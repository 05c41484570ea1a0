"""The rows of a stored case, computed again from its blocks as they were computed when they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import Cache, Case, Method, Outcome, Status, TimedBlock, TimedUnit
from ffncli.bench.results.row import ResultRow


def recomputed(case: Case, rows: Sequence[ResultRow], blocks: Sequence[TimedBlock]) -> Mapping[str, ResultRow]:
    """Kernel → its row as its blocks give it; status and errors, which no block has, are the stored ones."""
    outcomes = tuple(
        Outcome(row.kernel, cast(Status, row.status), "", row.error_max, row.error_rel, computes=row.computes)
        for row in rows
    )
    by_process: dict[int, list[TimedBlock]] = {}
    for block in blocks:
        by_process.setdefault(block.process, []).append(block)
    units = [
        TimedUnit(process, case.key, rows[0].baseline, cast(Cache, rows[0].cache), outcomes, tuple(mine))
        for process, mine in by_process.items()
    ]
    return {row.kernel: row for row in summarise(case, units, Method(), {})}
