"""admit: decide whether a result of a public suite may enter its table. Nothing is timed: files are read and
recomputed.

Figures that follow from the timed blocks are recomputed from them and compared with the rows; columns that follow from
the suite's definition are compared with the definition. Someone who makes up the timed blocks, too, can still cheat, so
an important result should be measured again.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from ffncli.bench.judge.gate import aa_of
from ffncli.bench.judge.ratios import differs
from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import Cache, Case, Method, Outcome, Status, TimedBlock, TimedUnit
from ffncli.bench.request.suite import CPU, PublicSuite, public_suite
from ffncli.bench.results.csv_file import parse_rounds, read_rows
from ffncli.bench.results.journal import ResultFiles
from ffncli.bench.results.row import ASKED, BLOCK_COLUMNS, MACHINE, ResultRow, case_columns, columns, name_of
from ffncli.errors import FFNError, clean, shown, shown_path
from ffncli.kernels import BUILT_IN
from ffncli.options.accept import PATH, TEXT
from ffncli.options.arguments import checked
from ffncli.show.text import percent
from ffncli.system.files import read_whole
from ffncli.system.notebook import Shown

MOST_OF_ROOF = 1.02
_SHA256 = re.compile(r"sha256 ([0-9a-f]{64})\b")
_MOST_ROUNDS_BYTES = 300_000_000
_CLOSE = 1e-9  # relative difference that two machines' logarithms may have


@dataclass(frozen=True)
class Condition:
    """One condition of admission: what must hold, and where it fails."""

    name: str
    statement: str
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the condition holds."""
        return not self.faults


@dataclass(frozen=True)
class Admission(Shown):
    """The conditions in order, and the judged rows."""

    suite: PublicSuite
    track: str
    path: Path
    rows: tuple[ResultRow, ...]
    conditions: tuple[Condition, ...]

    @property
    def admitted(self) -> bool:
        """Whether all conditions hold."""
        return all(condition.passed for condition in self.conditions)


@checked(path=PATH, suite=TEXT)
def admit(path: str | Path, suite: str = "ffn-1") -> Admission:
    """Judge a result: a CSV of `ffn bench --suite` with its rounds file next to it.

    Raises FFNError for an unknown suite, and for a file that is not a result of `ffn bench`.
    """
    definition, files = public_suite(suite), ResultFiles(Path(path).expanduser())
    rows = read_rows(files.csv)
    if not rows:
        raise FFNError(f"{shown_path(files.csv)} has no rows", "give a result of ffn bench --suite")
    track = rows[0].device if rows[0].device in definition.tracks else CPU
    blocks, why = _blocks(files)
    judged = _Judged(definition, track, rows, blocks, why)
    conditions = tuple(Condition(name, text, tuple(find(judged))) for name, (text, find) in _CONDITIONS.items())
    return Admission(definition, track, files.csv, rows, conditions)


def kernel_sha256(row: ResultRow) -> str:
    """Return the sha256 of a user's kernel file, from the row's note; empty if the note has none."""
    match = _SHA256.search(row.note)
    return match[1] if match else ""


def _blocks(files: ResultFiles) -> tuple[dict[tuple[str, str], list[TimedBlock]], str]:
    """Return a dict that maps each (run_id, case) to its blocks, and the reason if there are no blocks."""
    where = shown_path(files.rounds)
    blocks: dict[tuple[str, str], list[TimedBlock]] = {}
    try:
        for run_id, block in parse_rounds(read_whole(files.rounds, _MOST_ROUNDS_BYTES), where):
            blocks.setdefault((run_id, block.case), []).append(block)
    except OSError as error:
        return {}, f"cannot read {where}: {error.strerror}"
    except FFNError as error:
        return {}, error.message
    return blocks, ""


@dataclass(frozen=True)
class _Judged:
    """A result to be judged. `no_blocks` is the reason if there are no blocks."""

    suite: PublicSuite
    track: str
    rows: tuple[ResultRow, ...]
    blocks: Mapping[tuple[str, str], Sequence[TimedBlock]]
    no_blocks: str

    @cached_property
    def cases(self) -> dict[str, Case]:
        return {case.key: case for case in self.suite.cases(self.track)}

    @cached_property
    def ok(self) -> tuple[ResultRow, ...]:
        """The rows with times, for the suite's cases."""
        return tuple(row for row in self.rows if row.status == "ok" and row.case in self.cases)

    def of(self, case: str) -> tuple[ResultRow, ...]:
        return tuple(row for row in self.rows if row.case == case)


def _name(row: ResultRow) -> str:
    return f"{clean(row.kernel)[:80]} ({clean(row.case)[:120]})"


# --- the conditions ---------------------------------------------------------------------------------------------------


def _of_the_suite(judged: _Judged) -> Iterator[str]:
    for tag in dict.fromkeys(row.suite for row in judged.rows):
        if tag != judged.suite.tag:
            yield f"its column suite has {shown(tag or 'nothing', 100)}, not {judged.suite.tag}"


def _all_cases(judged: _Judged) -> Iterator[str]:
    present = dict.fromkeys(row.case for row in judged.rows)
    yield from (f"the case {clean(key)[:120]} is missing" for key in judged.cases if key not in present)
    yield from (
        f"{clean(key)[:120]} is not a case of the track {judged.track}" for key in present if key not in judged.cases
    )
    for row in judged.rows:
        if (case := judged.cases.get(row.case)) and (unlike := next(_unlike(row, case, judged.suite), "")):
            yield f"{_name(row)}: {unlike}"


def _unlike(row: ResultRow, case: Case, suite: PublicSuite) -> Iterator[str]:
    """Yield the columns that differ from the definition."""
    defined = case_columns(case) | {"seed": suite.seed}
    for name in (*BLOCK_COLUMNS, *ASKED, "world_size", "seed"):
        if name != "cache" and getattr(row, name) != defined[name]:
            yield f"{name_of(name)} is {shown(getattr(row, name))}, not {shown(defined[name])}"
    if row.cache not in ((case.cache, "shared") if case.cache == "warm" else (case.cache,)):
        yield f"cache is {shown(row.cache)}, not {case.cache}"


def _kernels(judged: _Judged) -> Iterator[str]:
    names = list(dict.fromkeys(row.kernel for row in judged.rows))
    for case in judged.cases:
        if (mine := [row.kernel for row in judged.of(case)]) and sorted(mine) != sorted(names):
            yield f"{shown(case, 120)} has the rows {', '.join(map(shown, mine))}, not {', '.join(map(shown, names))}"
    for row in judged.rows:
        if row.baseline != judged.suite.baseline:
            yield f"{_name(row)}: compared with {shown(row.baseline)}, not {judged.suite.baseline}"
        elif row.status == "ok" and row.kernel not in BUILT_IN and not kernel_sha256(row):
            yield f"{_name(row)}: its note has no sha256 of the kernel's file"


def _verified(judged: _Judged) -> Iterator[str]:
    from ffncli.bench.referee.rulings import error_limit

    base = {row.case: row for row in judged.rows if row.kernel == judged.suite.baseline}
    for row in judged.rows:
        case = judged.cases.get(row.case)
        if row.status == "wrong" or (row is base.get(row.case) and row.status != "ok"):
            yield f"{_name(row)} is {row.status}: {clean(row.note)[:120]}"
        elif row.status == "ok" and case is not None:
            baseline = base[row.case].error_max if row.case in base and row is not base[row.case] else None
            try:
                limit = error_limit(case, row.computes, baseline)
            except FFNError as error:
                yield f"{_name(row)}: {error.message}"
                continue
            if row.error_max is None or row.error_rel is None:
                yield f"{_name(row)} has no error against float64"
            elif row.error_max > limit:
                yield f"{_name(row)}: error {row.error_max:.2g}, more than the {limit:.2g} that rounding explains"


def _refereed(judged: _Judged) -> Iterator[str]:
    apart = judged.track == CPU  # on a GPU, the reference results are in the process that runs the kernels
    for row in judged.ok:
        if row.referee != "process" if apart else row.referee not in ("process", "worker"):
            yield f"{_name(row)}: its column referee has {shown(row.referee or 'nothing')}" + (
                ", not process: measure on Linux" if apart else ""
            )


def _rounds(judged: _Judged) -> Iterator[str]:
    if judged.no_blocks:
        yield judged.no_blocks
        return
    for key, case in judged.cases.items():
        mine = judged.of(key)
        runs = {row.run_id for row in mine}
        if len(runs) > 1:
            yield f"{clean(key)[:120]}: its rows come from {len(runs)} runs"
        elif runs:
            yield from _changed(mine, recomputed(case, mine, judged.blocks.get((runs.pop(), key), ())))


def _changed(rows: Sequence[ResultRow], again: Mapping[str, ResultRow]) -> Iterator[str]:
    """Yield the columns that do not follow from the blocks."""
    for row in rows:
        if row.kernel not in again:
            yield f"{_name(row)} has no blocks"
            continue
        for name in columns("figure", recomputed=True):
            stored, computed = getattr(row, name), getattr(again[row.kernel], name)
            if not _same(stored, computed):
                yield f"{_name(row)}: {name} is {shown(stored)}, its blocks give {shown(computed)}"
                break


def _same(stored: object, computed: object) -> bool:
    if isinstance(stored, tuple) and isinstance(computed, tuple):
        return len(stored) == len(computed) and all(map(_same, stored, computed))
    if isinstance(stored, float) and isinstance(computed, (int, float)):
        return math.isclose(stored, computed, rel_tol=_CLOSE)
    return stored == computed


def _same_twice(judged: _Judged) -> Iterator[str]:
    for key in judged.cases:
        base = next((row for row in judged.of(key) if row.kernel == judged.suite.baseline), None)
        if base is None or base.status != "ok":
            continue
        if base.aa_low is None or base.aa_high is None:
            yield f"{clean(key)[:120]}: no interval for identical code timed twice"
        elif differs(aa_of(base), judged.suite.method(judged.track).margin):
            read = f"{base.aa_low:.3f} to {base.aa_high:.3f}"
            yield f"{clean(key)[:120]}: identical code timed twice gave ratios of {read}"


def _below_the_roof(judged: _Judged) -> Iterator[str]:
    least: dict[str, float] = {}
    for row in judged.ok:
        if row.roof_fraction is None:
            if not row.computes:  # the dtype's roof does not apply to a kernel that computes in fewer bits
                yield f"{_name(row)}: no roof was measured"
            continue
        for name, share in (("measured", row.roof_fraction), ("datasheet", row.datasheet_fraction)):
            if share is not None and share > MOST_OF_ROOF:
                yield f"{_name(row)}: {percent(share)} of the {name} roof"
        seconds = row.roof_fraction * (row.time_s or 0.0)  # the time of a call at the roof; equal for all kernels
        if not math.isclose(seconds, least.setdefault(row.case, seconds), rel_tol=1e-6):
            yield f"{_name(row)}: its roof differs from that of the case's other kernels"


def _processes(judged: _Judged) -> Iterator[str]:
    for row in judged.ok:
        if (row.processes or 0) < judged.suite.processes:
            yield f"{_name(row)}: {row.processes or 0} processes"


def _one_machine(judged: _Judged) -> Iterator[str]:
    for name in MACHINE:
        values = dict.fromkeys(getattr(row, name) for row in judged.rows)
        if len(values) > 1:
            yield f"{name} is {' and '.join(shown(value, 60) for value in values)}"


# A kernel that is `skipped`, `failed` or `oom` in a case has no time there, so it is not in that case's table.
_CONDITIONS: dict[str, tuple[str, Callable[[_Judged], Iterator[str]]]] = {
    "suite": ("the result names the suite and the sha256 of its definition", _of_the_suite),
    "cases": ("every case of one track, as defined, and no others", _all_cases),
    "kernels": ("the same kernels in every case, with the suite's baseline, and the sha256 of users' files", _kernels),
    "verified": ("every answer is right: rounding explains its error against float64", _verified),
    "referee": ("a separate process had the reference results (on a GPU: the kernels' process)", _refereed),
    "rounds": ("every block is present, and the rows' figures follow from the blocks", _rounds),
    "a/a": ("the baseline, timed twice, does not differ from itself by more than 2 %", _same_twice),
    "roof": ("at most 102 % of the roof (if the kernel computes in all bits of the dtype)", _below_the_roof),
    "processes": ("5 fresh processes or more", _processes),
    "environment": ("one machine, one version of everything", _one_machine),
}


# --- the rows of a case, from its blocks ------------------------------------------------------------------------------


def recomputed(case: Case, rows: Sequence[ResultRow], blocks: Sequence[TimedBlock]) -> Mapping[str, ResultRow]:
    """Map each kernel to its row, recomputed from the blocks; only status and errors come from the stored row."""
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
