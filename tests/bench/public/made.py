"""A result of ffn-1's CPU track as a good run leaves it, made up: blocks with chosen times, and their rows."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Outcome, Roof, TimedBlock, TimedUnit
from ffncli.bench.request.suite import public_suite
from ffncli.bench.results.csv_file import HEADER, ROUNDS_HEADER, block_lines, row_lines
from ffncli.bench.results.row import ResultRow

SUITE = public_suite("ffn-1")
RUN = {"run_id": "20261124T000000Z-0a0a0a0a", "started_utc": "2026-11-24T00:00:00Z"}
ENVIRONMENT = {"ffncli": "0.1", "torch": "2.13.0", "cpu": "a cpu", "device_name": "a cpu", "host": "here"}
FILE = "mine.py"
SHA256 = "5" * 64
TIMES = {"eager": 1e-2, "fast": 8e-3, TWIN: 1e-2, ANCHOR: 1.2e-2, GEMM: 7e-3}
Edit = Callable[[ResultRow], ResultRow]


def blocks_of(case: Case, process: int, times: Mapping[str, float]) -> tuple[TimedBlock, ...]:
    drawn = random.Random(f"{case.key} {process}")
    return tuple(
        TimedBlock(process, case.key, placement, number, at, name, 2, 2 * seconds * exp(drawn.gauss(0, 0.002)))
        for placement in range(3)
        for number in range(4)
        for at, (name, seconds) in enumerate(times.items())
    )


def result(
    folder: Path,
    edit: Edit = lambda row: row,
    times: Mapping[str, float] = TIMES,
    processes: int = 5,
    name: str = "made",
    run: Mapping[str, str] = RUN,
) -> Path:
    """The CSV, with its rounds file next to it; `edit` changes each row before it is written."""
    rows, rounds = _summarised(tuple(times.items()), processes, tuple(run.items()))
    return stored(folder / f"{name}.csv", [edit(replace(row, suite=SUITE.tag)) for row in rows], rounds)


@cache
def _summarised(
    times: tuple[tuple[str, float], ...], processes: int, run: tuple[tuple[str, str], ...]
) -> tuple[tuple[ResultRow, ...], str]:
    """(the rows, the rounds file) of a run: most tests change rows of one and the same."""
    rows: list[ResultRow] = []
    rounds, named = ROUNDS_HEADER, dict(run)
    for case in SUITE.cases("cpu"):
        units = [unit_of(case, process, dict(times)) for process in range(processes)]
        rows += summarise(case, units, SUITE.method("cpu"), named)
        rounds += block_lines(named["run_id"], [block for unit in units for block in unit.blocks])
    return tuple(rows), rounds


def unit_of(case: Case, process: int, times: Mapping[str, float]) -> TimedUnit:
    notes = {"fast": f"{FILE}, sha256 {SHA256}"}
    kernels = [kernel for kernel in times if not kernel.startswith("(")]
    outcomes = tuple(Outcome(kernel, "ok", notes.get(kernel, ""), 2e-7, 1e-7) for kernel in kernels)
    roof = Roof(9e12, 9e11, 32_000_000)
    blocks = blocks_of(case, process, times)
    return TimedUnit(process, case.key, "eager", case.cache, outcomes, blocks, roof, ENVIRONMENT, referee="process")


def stored(path: Path, rows: Sequence[ResultRow], rounds: str) -> Path:
    path.write_text(HEADER + row_lines(rows), "utf-8")
    path.with_suffix(".rounds.csv").write_text(rounds, "utf-8")
    return path


def changed(kernel: str, case: int | None = None, **values: Any) -> Edit:
    """An edit of the rows of one kernel, in one case or in all."""
    keys = [one.key for one in SUITE.cases("cpu")]
    only = keys if case is None else [keys[case]]
    return lambda row: replace(row, **values) if row.kernel == kernel and row.case in only else row
