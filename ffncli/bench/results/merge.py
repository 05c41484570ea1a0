"""Merge several results into one: `ffn merge`, `ffncli.merge`. The parts of a grid may have run on different machines.

A case is never split: all its kernels come from one run on one machine, so no ratio compares machines. Nothing is lost:
the inputs are only read, and inputs that could only be merged by choosing between them (two results of one case, two
grids) are rejected, with their names. The merged files are written completely or not at all, and can be merged again.
"""

import os
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO

from ffncli.bench.records import BLOCK, STEP, Case
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.csv_file import HEADER, ROUNDS_HEADER, read_rows, rounds_lines, row_lines, unknown_column
from ffncli.bench.results.grid_file import WholeGrid, difference, grid_bytes, parse_grid, stored_grid
from ffncli.bench.results.journal import ResultFiles, locked, unfinished, unfinished_run
from ffncli.bench.results.row import ResultRow, case_columns, columns, name_of
from ffncli.block import recipe
from ffncli.block.steps import walk
from ffncli.errors import FFNError, option, shown, shown_path
from ffncli.kernels.kernel import kernel_steps
from ffncli.options.accept import PATH, PATHS, listed
from ffncli.options.opt import Opt, Options, call
from ffncli.options.shared import Force
from ffncli.options.shared import Path as FilePath
from ffncli.show.text import plural
from ffncli.system.files import check_writable, written_together
from ffncli.system.notebook import Shown

_NOT_RESULTS = (".rounds.csv", ".grid.json", ".csv.lock")  # files next to a result that `part-*` also matches
_JOURNAL = ".partial.jsonl"
_DAMAGED = "the file is damaged or belongs to another grid"


@dataclass(frozen=True)
class MissingCase:
    """A case of the grid that has no result: its part, and the file of the unfinished run that includes the case.

    `part` is like `3/8`, or empty if the run is not a part; `resume` is empty if no merged file includes the case.
    """

    case: str
    part: str = ""
    resume: str = ""


@dataclass(frozen=True)
class MergedFile:
    """One input: its machines, the number of its finished cases, and whether its run is unfinished."""

    file: str
    hosts: tuple[str, ...]
    cases: int
    unfinished: bool


@dataclass(frozen=True)
class Merged(Shown):
    """The merged result. `grid` is None if no input is a part of a grid; the missing cases are then unknown.

    `rows` are in the order of the grid or, without a grid, of the inputs.
    """

    csv: Path
    rounds: Path
    rows: tuple[ResultRow, ...]
    inputs: tuple[MergedFile, ...]
    missing: tuple[MissingCase, ...]
    grid: WholeGrid | None
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool | None:
        """Whether every case of the grid has a result; None if unknown."""
        if self.missing:
            return False
        return None if self.grid is None else True


@dataclass(frozen=True)
class _ResultInput:
    """The contents of one input. `unfinished_request` is set if its run has not ended."""

    files: ResultFiles
    rows: tuple[ResultRow, ...]
    grid: WholeGrid | None
    unfinished_request: BenchRequest | None

    @property
    def name(self) -> str:
        return shown_path(self.files.csv)

    def cases(self) -> Iterator[tuple[str, tuple[ResultRow, ...]]]:
        """Yield (case, its rows) for every run. A row that occurs twice, as in files joined with `cat`, counts once."""
        groups: dict[tuple[str, str], dict[ResultRow, None]] = {}
        for row in self.rows:
            groups.setdefault((row.case, row.run_id), {})[row] = None
        for (case, _), rows in groups.items():
            yield case, tuple(rows)


@dataclass(frozen=True, kw_only=True)
class MergeQuestion(Options):
    """Merge results into `out`, a CSV, and write its rounds file and, for parts of a grid, its grid file next to it.

    `paths` are CSVs of `ffn bench` or of an earlier merge; other files of a run, which a pattern may also match, are
    skipped. `force` replaces existing files; `allow_mismatch` merges results from different versions. An incomplete
    grid is merged too; `missing` then lists the missing cases. Raises FFNError, before writing anything, for files that
    do not belong together.
    """

    paths: Annotated[
        FilePath | Iterable[FilePath],
        Opt(
            metavar="FILE.csv", accepts=PATHS, repeat=True,
            help="Results of ffn bench or ffn merge; the other files of a run are skipped.",
        ),
    ] = field(kw_only=False)  # fmt: skip
    out: Annotated[
        FilePath | None,
        Opt(
            "-o", "--output", metavar="FILE.csv", accepts=PATH, daily=True,
            help="The merged result; its rounds and its grid are written next to it.",
        ),
    ] = field(default=None, kw_only=False)  # fmt: skip
    force: Force = False
    allow_mismatch: Annotated[
        bool, Opt("--allow-mismatch", group="Merging", help="Merge results from different versions of ffncli or torch.")
    ] = False


def merged(question: MergeQuestion) -> Merged:
    """Merge the files that a question names."""
    if question.out is None:
        raise FFNError(f"{option('out')} is missing", f"name the merged result: {option('out', 'all.csv')}")
    files = ResultFiles(Path(os.path.expanduser(question.out)))
    if files.journal.exists():
        raise unfinished(files)
    grids: dict[bytes, WholeGrid] = {}
    sources = [_source(path, grids) for path in _results_among(listed(question.paths))]
    if any(os.path.realpath(source.files.csv) == os.path.realpath(files.csv) for source in sources):
        raise FFNError(f"{option('out')} {shown_path(files.csv)} is one of the files to merge", "name another file")
    grid = _one_grid(sources)
    notes = list(_mismatches(sources, question.allow_mismatch))
    chosen = _chosen(sources, grid)
    missing = tuple(_missing(sources, grid, chosen))
    if grid is None:
        more = "other cases are" if missing else "cases are"  # the missing cases of unfinished runs are known
        notes.append(f"no file is a part of a grid, so it is unknown whether {more} missing")
    order = chosen if grid is None else [case.key for case in grid.request.cases if case.key in chosen]
    rows = tuple(row for case in order for row in chosen[case])
    with locked(files.csv):
        for one in (files.csv, files.rounds, files.grid):
            check_writable(str(one), question.force, option("out"))
        notes += _write(files, rows, sources, grid)
    inputs = []
    for source in sources:
        cases = {row.case for row in source.rows} & chosen.keys()
        hosts = tuple(dict.fromkeys(row.host for row in source.rows if row.host))
        inputs.append(MergedFile(source.name, hosts, len(cases), source.unfinished_request is not None))
    return Merged(files.csv, files.rounds, rows, tuple(inputs), missing, grid, tuple(notes))


merge = call(MergeQuestion, merged, "merge")


# --- reading ----------------------------------------------------------------------------------------------------------


def _results_among(paths: Sequence[FilePath]) -> list[Path]:
    """Return the CSVs among these paths, without duplicates. Raises FFNError if there are no CSVs."""
    unlike: dict[str, Path] = {}
    for path in (Path(os.path.expanduser(one)) for one in paths):
        if path.name.endswith(_NOT_RESULTS):
            continue
        if path.name.endswith(_JOURNAL):  # a run may have been stopped before it had a CSV
            path = path.with_name(path.name.removesuffix(_JOURNAL) + ".csv")
        unlike.setdefault(os.path.realpath(path), path)
    if not unlike:
        raise FFNError("none of these files is a result", "give CSVs of ffn bench --save FILE.csv")
    return list(unlike.values())


def _source(path: Path, grids: dict[bytes, WholeGrid]) -> _ResultInput:
    """Read a result with its grid. `grids` holds the grids of earlier results, since all parts of a grid store the same
    grid.

    Raises FFNError, naming the file, if the result or the grid cannot be read or is damaged.
    """
    files = ResultFiles(path)
    raw = stored_grid(files.grid)
    grid = None if raw is None else grids.get(raw) or grids.setdefault(raw, parse_grid(raw, shown_path(files.grid)))
    run = unfinished_run(files)
    if run is None:
        rows = read_rows(path)
    else:
        rows = tuple(row for row in read_rows(path, growing=True) if row.run_id == run[0]) if path.exists() else ()
    if (run is None or path.exists()) and (column := unknown_column(path)):
        why = f"{shown_path(path)} has the column {shown(column)}, which this ffn does not know"
        raise FFNError(why, "merge with the version that measured it, so that nothing is lost")
    if any(not row.case for row in rows):
        raise FFNError(f"{shown_path(path)} has rows without a case", "measure it with this version")
    return _ResultInput(files, rows, grid, None if run is None else run[1])


def _one_grid(sources: Sequence[_ResultInput]) -> WholeGrid | None:
    """Return the grid that the inputs are parts of; None if there is no grid. Raises FFNError for different grids."""
    first = next((source for source in sources if source.grid is not None), None)
    if first is None or first.grid is None:
        return None
    for source in sources:
        if source.grid is None:
            why = f"{first.name} is a part of a grid, but {source.name} has no {shown_path(source.files.grid)}"
            raise FFNError(why, "copy that file too, or merge only parts")
        if source.grid is not first.grid and (unlike := difference(first.grid, source.grid)):
            why = f"{first.name} and {source.name} are parts of different grids: {unlike}"
            raise FFNError(
                why,
                "run all parts with the same options, --threads and --device too: their defaults depend on the machine",
            )
    return first.grid


def _mismatches(sources: Sequence[_ResultInput], allowed: bool) -> Iterator[str]:
    """Yield a note on every version that differs. Raises FFNError for the first difference unless differences are
    `allowed`."""
    for column in columns("environment", one_per_grid=True):
        files: dict[str, str] = {}
        for source in sources:
            for row in source.rows:
                if version := getattr(row, column):
                    files.setdefault(version, source.name)
        if len(files) > 1:
            text = f"{column} is " + ", ".join(f"{shown(version)} in {name}" for version, name in files.items())
            if not allowed:
                raise FFNError(text, f"measure all parts with one version, or give {option('allow_mismatch')}")
            yield text


# --- choosing ---------------------------------------------------------------------------------------------------------


def _chosen(sources: Sequence[_ResultInput], grid: WholeGrid | None) -> dict[str, tuple[ResultRow, ...]]:
    """Map each case to its rows, which are all from one run. Raises FFNError for two different results of a case, and
    for damaged results."""
    chosen: dict[str, tuple[ResultRow, ...]] = {}
    names: dict[str, str] = {}  # case → the input that provides its rows
    keys = {case.key for case in grid.request.cases} if grid else set()
    for source in sources:
        request = grid.request if grid else source.unfinished_request
        for case, rows in source.cases():
            if grid and case not in keys:
                raise FFNError(f"{source.name}: its grid has no case {shown(case, 120)}", _DAMAGED)
            if request and (why := _fault(rows, request)):
                if source.unfinished_request:  # the last rows of the case are not written yet
                    continue
                raise FFNError(f"{source.name}: {why} in the case {shown(case, 120)}", _DAMAGED)
            name = names.setdefault(case, source.name)
            if chosen.setdefault(case, rows) != rows:
                files = " and ".join(dict.fromkeys((name, source.name)))
                why = f"two different results of the case {shown(case, 120)} are in {files}"
                raise FFNError(why, "leave one of them out")
    return chosen


def _fault(rows: Sequence[ResultRow], request: BenchRequest) -> str:
    """Return the reason why these rows are not exactly the rows of a case of the request, or "" if they are."""
    kernels = [row.kernel for row in rows]
    unlike = next((row.baseline for row in rows if row.baseline != request.baseline), None)
    if unlike is not None:
        return f"the baseline is {shown(unlike)}, not {shown(request.baseline)}"
    case = next((case for case in request.cases if case.key == rows[0].case), None)
    if case and (unlike := next(filter(None, (_row_fault(row, case) for row in rows)), None)):
        return unlike
    if request.method.by_step:
        return _step_fault(kernels, case, rows[0].status == "ok") if case else ""
    if sorted(kernels) != sorted(request.names):
        return f"the kernels are {', '.join(kernels)}, not {', '.join(request.names)}"
    return ""


def _row_fault(row: ResultRow, case: Case) -> str:
    """Return a column that contradicts the row's case or its status, or ""."""
    for name, defined in case_columns(case).items():
        # a file may lie elsewhere on another machine, and warm weights that exceed the cache are called shared
        if name not in ("source", "cache") and getattr(row, name) != defined:
            return f"{name_of(name)} is {shown(getattr(row, name))}, not {shown(defined)},"
    return "a row is ok without a time" if row.status == "ok" and row.time_s is None else ""


def _step_fault(names: Sequence[str], case: Case, ran: bool) -> str:
    """Return the fault in the rows of a --by-step case, or "". A case that `ran` has a row for its block and for each
    step."""
    steps = [BLOCK, *(f"{STEP}{name}" for name, _ in walk(kernel_steps(recipe.steps(case.spec))))]
    unlike = sorted({*steps} ^ {*names}) if ran else sorted({*names} - {*steps})
    if unlike:
        return f"{shown(unlike[0])} {'is missing' if unlike[0] in steps else 'is not a step'}"
    return "" if len({*names}) == len(names) else "a step is duplicated"


def _missing(sources: Sequence[_ResultInput], grid: WholeGrid | None, chosen: Container[str]) -> Iterator[MissingCase]:
    """Yield the cases that have no result, in the grid's order; without a grid, the cases that unfinished runs lack."""
    unfinished_cases = {
        case.key: source for source in sources if source.unfinished_request for case in source.unfinished_request.cases
    }
    parts = {} if grid is None else grid.part_of_case
    for case in unfinished_cases if grid is None else [case.key for case in grid.request.cases]:
        if case not in chosen:
            part = parts.get(case)
            yield MissingCase(case, str(part or ""), unfinished_cases[case].name if case in unfinished_cases else "")


# --- writing ----------------------------------------------------------------------------------------------------------


def _write(
    files: ResultFiles, rows: Sequence[ResultRow], sources: Sequence[_ResultInput], grid: WholeGrid | None
) -> list[str]:
    """Write the merged files; return a note if some cases have no rounds.

    All files are written completely before any is moved into place; the CSV is moved last. Raises FFNError (exit 3) if
    a file cannot be written.
    """
    stored = {} if grid is None else {files.grid: grid_bytes(grid)}
    with written_together(files.csv, files.rounds, *stored) as (result, rounds, *others):
        for file, contents in zip(others, stored.values(), strict=True):
            file.write(contents)
        result.write(HEADER.encode())
        for row in rows:
            result.write(row_lines([row]).encode())
        rounds.write(ROUNDS_HEADER.encode())
        lacking = _copy_rounds(rounds, rows, sources)
    if grid is None:
        files.grid.unlink(missing_ok=True)  # the grid of the replaced result
    if not lacking:
        return []
    gone = [one for one in sources if not one.files.rounds.exists() and any(row.case in lacking for row in one.rows)]
    why = f": there is no {shown_path(gone[0].files.rounds)}" if gone else ""
    return [f"the merged rounds file lacks {len(lacking)} {plural('case', len(lacking))}{why}"]


def _copy_rounds(file: BinaryIO, rows: Sequence[ResultRow], sources: Sequence[_ResultInput]) -> set[str]:
    """Copy the blocks of these rows, for each case from the first input that has its blocks; return the cases without
    blocks."""
    left = {(row.run_id, row.case) for row in rows}
    for source in sources:
        mine = left & {(row.run_id, row.case) for row in source.rows}
        if mine and source.files.rounds.exists():
            for key, line in rounds_lines(source.files.rounds, mine, growing=source.unfinished_request is not None):
                file.write(line.encode())
                left.discard(key)
    return {row.case for row in rows if (row.run_id, row.case) in left and row.time_s is not None}
