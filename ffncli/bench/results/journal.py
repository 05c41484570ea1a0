"""The files of a run in progress, which only grow, and their repair after a crash.

The journal, `NAME.partial.jsonl`, starts with the request, followed by a line per finished unit; the other two files
are created with the first unit. A unit's blocks are written to `NAME.rounds.csv` before its line is written to the
journal: a unit without a line was not finished, so its blocks are cut off. The rows of a case are written to `NAME.csv`
when its last process has finished; a resumed run rewrites that file from the units. The journal is deleted at the end.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ffncli.bench.records import Case, Method, TimedUnit
from ffncli.bench.request.grid import BenchRequest, from_json, to_json
from ffncli.bench.results.csv_file import HEADER, ROUNDS_HEADER, block_lines, parse_rounds, row_lines
from ffncli.bench.results.row import ResultRow
from ffncli.errors import ExitCode, FFNError, clean, shown, shown_path
from ffncli.models.files.json_records import Count, record_of
from ffncli.models.files.strict_json import parse_object
from ffncli.system.files import check_writable, open_to_read, read_whole, sha256_of, written_together, written_whole
from ffncli.system.host import cpu_name
from ffncli.version import __version__

_VERSION = 2
_MOST_BYTES = 300_000_000  # maximum size of a journal; the largest allowed run needs a third of it
_MOST_UNIT_BYTES = 300_000_000  # limit of a unit's blocks
_ANEW = "start the run again with --force"
Summarise = Callable[[Case, Sequence[TimedUnit], Method, Mapping[str, str]], tuple[ResultRow, ...]]


@dataclass(frozen=True)
class ResultFiles:
    """The files of one result, named after its CSV. Raises FFNError for a name without .csv."""

    csv: Path

    def __post_init__(self) -> None:
        if self.csv.suffix != ".csv" or self.csv.name.endswith(".rounds.csv"):
            raise FFNError(f"{shown_path(self.csv)} must end in .csv", "as in results/mine.csv")

    @property
    def rounds(self) -> Path:
        """The rounds file, which has every block."""
        return self.csv.with_suffix(".rounds.csv")

    @property
    def journal(self) -> Path:
        """The file with the request and the finished units; it exists only until the run is complete."""
        return self.csv.with_suffix(".partial.jsonl")

    @property
    def grid(self) -> Path:
        """The file with the whole grid, if this is the result of a part of a grid; otherwise it does not exist."""
        return self.csv.with_suffix(".grid.json")

    @property
    def lock(self) -> Path:
        """The lock file, which exists while a process is writing."""
        return self.csv.with_suffix(".csv.lock")


@dataclass(frozen=True)
class RunName:
    """The identity of a run: the columns of the results that distinguish it from other runs."""

    run_id: str
    started_utc: str
    commit: str = ""  # older versions wrote none


@dataclass(frozen=True)
class _RequestLine:
    """The first line of a journal. `request` is checked by `from_json`."""

    journal: int
    run: RunName
    software: Mapping[str, str]
    request: Any


@dataclass(frozen=True)
class _UnitLine:
    """Any other line of a journal: a finished unit without its blocks, and the offset in the rounds file at which its
    blocks end."""

    unit: TimedUnit
    rounds_end: Count
    died: bool


@dataclass(frozen=True)
class _Kept:
    """A finished unit without its blocks, the range of bytes that its blocks occupy in the rounds file, and their
    sha256, which is kept in memory: a kernel in a later process may write to files."""

    unit: TimedUnit
    start: int
    end: int
    sha256: str


@dataclass
class Journal:
    """An open run: its request and its finished units. `run` holds `run_id`, `started_utc` and `commit`.

    `died` has the keys of the cases that killed a worker: they count as finished and are not run again.
    """

    files: ResultFiles
    request: BenchRequest
    run: Mapping[str, str]
    software: Mapping[str, str]
    summarise: Summarise
    units: dict[str, dict[int, _Kept]] = field(default_factory=dict)
    died: set[str] = field(default_factory=set)
    rows: list[ResultRow] = field(default_factory=list)
    fresh: bool = False  # the CSV and the rounds file do not exist yet: they are created with the first unit
    grid_before: bytes | None = None  # contents of the grid file that this run replaced
    _cases: dict[str, Case] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cases = {case.key: case for case in self.request.cases}

    def done(self, process: int, case: str) -> bool:
        """Return whether a case is finished in a process."""
        return case in self.died or process in self.units.get(case, ())

    @property
    def count(self) -> int:
        """The number of finished units."""
        return sum(len(kept) for kept in self.units.values())

    @property
    def finished_units(self) -> Iterator[TimedUnit]:
        """The finished units, without their blocks."""
        return (kept.unit for by_process in self.units.values() for kept in by_process.values())

    @property
    def spent(self) -> dict[str, float]:
        """The seconds spent on each purpose, summed over all units."""
        total: dict[str, float] = {}
        for unit in self.finished_units:
            for name, seconds in unit.spent.items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def add(self, unit: TimedUnit, died: bool = False) -> None:
        """Store a finished unit; if its case is now complete, store the case's rows, too.

        Raises FFNError (exit 3) if a file cannot be written; earlier units are unchanged.
        """
        if self.done(unit.process, unit.case) or unit.case not in self._cases:
            return
        self._create()
        blocks = block_lines(self.run["run_id"], unit.blocks)
        start, end = append(self.files.rounds, blocks)
        line = asdict(_UnitLine(replace(unit, blocks=()), end, died))
        append(self.files.journal, json.dumps(line, allow_nan=False) + "\n")
        digest = hashlib.sha256(blocks.encode()).hexdigest()
        if rows := self._take(_Kept(replace(unit, blocks=()), start, end, digest), died):
            append(self.files.csv, row_lines(rows))

    def _create(self) -> None:
        """Create the CSV and the rounds file with their headers, unless they already exist."""
        if self.fresh:
            with written_together(self.files.csv, self.files.rounds) as (result, rounds):
                result.write(HEADER.encode())
                rounds.write(ROUNDS_HEADER.encode())
            self.fresh = False

    def _take(self, kept: _Kept, died: bool) -> tuple[ResultRow, ...]:
        """Store the unit; if its case is now complete, return its rows, computed from the rounds file."""
        case = kept.unit.case
        mine = self.units.setdefault(case, {})
        mine[kept.unit.process] = kept
        if died:
            self.died.add(case)
        elif len(mine) < self.request.method.processes:
            return ()
        request, units = self.request, [self._whole(mine[p]) for p in sorted(mine)]
        rows = tuple(
            replace(row, suite=request.suite, certificate=request.certificate_of(row.kernel, self._cases[case]))
            for row in self.summarise(self._cases[case], units, request.method, self.run)
        )
        self.rows.extend(rows)
        return rows

    def _whole(self, kept: _Kept) -> TimedUnit:
        """Return the unit with its blocks from the rounds file. Raises FFNError if these belong to another unit."""
        where, unit = shown_path(self.files.rounds), kept.unit
        raw = _part(self.files.rounds, kept.start, kept.end)
        if hashlib.sha256(raw).hexdigest() != kept.sha256:
            raise FFNError(f"{where} was changed during the run, by a kernel or another program", _ANEW)
        blocks = parse_rounds(raw, where)
        whose = (clean(self.run["run_id"]), unit.process, clean(unit.case))  # cleaned, as in the file
        if any((run_id, block.process, block.case) != whose for run_id, block in blocks):
            raise FFNError(f"{where} is damaged: it has one unit's blocks in another unit's place", _ANEW)
        return replace(unit, blocks=tuple(block for _, block in blocks))

    def units_of(self, case: str) -> tuple[tuple[TimedUnit, bool], ...]:
        """Return (unit with its blocks, True if it ended a worker) for each unit of a case, in process order."""
        mine = self.units.get(case, {})
        last = max(mine, default=None)
        return tuple((self._whole(mine[p]), case in self.died and p == last) for p in sorted(mine))

    def complete(self, case: str) -> bool:
        """Return whether all processes of a case are finished."""
        return case in self.died or len(self.units.get(case, ())) == self.request.method.processes

    def finish(self) -> None:
        """Delete the journal of a complete run. Raises FFNError (exit 3) if the CSV no longer exists."""
        if not self.request.cases:  # a part of a grid may have no cases
            self._create()
        if not self.files.csv.exists():
            why = f"{shown_path(self.files.csv)} was removed during the run"
            raise FFNError(why, "start again: ffn bench --save FILE.csv", ExitCode.ENVIRONMENT)
        self.files.journal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the files of a run that has finished nothing, except files that --force would replace."""
        for path in (self.files.journal, *(() if self.fresh else (self.files.rounds, self.files.csv))):
            path.unlink(missing_ok=True)
        _write_or_remove(self.files.grid, self.grid_before)


# --- starting and resuming --------------------------------------------------------------------------------------------


def begin(
    path: Path,
    request: BenchRequest,
    run: Mapping[str, str],
    software: Mapping[str, str],
    summarise: Summarise,
    force: bool,
    grid: bytes | None = None,
) -> Journal:
    """Begin a new run that writes to `path`. `grid` is the contents of the grid file if the run is a part of a grid.

    Raises FFNError for files that already exist (unless `force` is set) or cannot be written.
    """
    files = ResultFiles(path)
    if files.journal.exists() and not force:
        raise unfinished(files)
    for one in (files.csv, files.rounds, *(() if grid is None else (files.grid,))):
        check_writable(str(one), force, "--save")
    before = files.grid.read_bytes() if files.grid.is_file() else None
    head = {"journal": _VERSION, "run": dict(run), "software": dict(software), "request": to_json(request)}
    contents = {files.journal: (json.dumps(head, allow_nan=False) + "\n").encode()}
    contents |= {} if grid is None else {files.grid: grid}
    with written_together(*contents) as opened:
        for file, whole in zip(opened, contents.values(), strict=True):
            file.write(whole)
    if grid is None:
        files.grid.unlink(missing_ok=True)
    return Journal(files, request, run, software, summarise, fresh=True, grid_before=before)


def _write_or_remove(path: Path, contents: bytes | None) -> None:
    """Write a file with these contents, or remove it if `contents` is None."""
    if contents is None:
        path.unlink(missing_ok=True)
        return
    with written_whole(path) as file:
        file.write(contents)


def unfinished_run(files: ResultFiles) -> tuple[str, BenchRequest] | None:
    """Return (run_id, request) of an unfinished run, which may still be in progress; None if there is no such run.

    Raises FFNError for a journal that cannot be read.
    """
    name = f"{shown_path(files.journal)}, line 1"
    try:
        with open_to_read(files.journal) as file:
            first = file.readline(_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"cannot read {shown_path(files.journal)}: {error.strerror}"
        raise FFNError(why, code=ExitCode.ENVIRONMENT) from None
    head, request = _head(name, first)
    return head.run.run_id, request


def resume(path: Path, summarise: Summarise) -> Journal:
    """Open the unfinished run of `path` and repair its files. Raises FFNError if it is missing or damaged."""
    files = ResultFiles(path)
    name = shown_path(files.journal)
    try:
        raw = read_whole(files.journal, _MOST_BYTES)
    except FileNotFoundError:
        hint = f"{shown_path(path)} is complete" if path.exists() else "start a new run: ffn bench --save FILE.csv"
        raise FFNError(f"nothing to resume: there is no {name}", hint) from None
    except OSError as error:
        raise FFNError(f"cannot read {name}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
    lines = raw.split(b"\n")[:-1]  # bytes after the last line end are an incomplete line
    if not lines:
        raise FFNError(f"{name} has no request", _ANEW)
    head, request = _head(f"{name}, line 1", lines[0])
    journal = Journal(files, request, asdict(head.run), head.software, summarise)
    kept, size = len(lines[0]) + 1, len(ROUNDS_HEADER.encode())
    if first_bytes(files.rounds, size) != ROUNDS_HEADER.encode():
        with written_whole(files.rounds) as file:
            file.write(ROUNDS_HEADER.encode())
    there = files.rounds.stat().st_size
    last, before = "", (kept, size)  # the case of the last line, and the offsets of its first line and first block
    for number, one in enumerate(lines[1:], 2):
        line = _line_read(journal, f"{name}, line {number}", one, size)
        if line.rounds_end > there:  # the unit's blocks are incomplete, so the unit is not finished
            break
        if line.unit.case != last:
            last, before = line.unit.case, (kept, size)
        digest = hashlib.sha256(_part(files.rounds, size, line.rounds_end)).hexdigest()
        journal._take(_Kept(line.unit, size, line.rounds_end, digest), line.died)
        kept, size = kept + len(one) + 1, line.rounds_end
    if journal.request.cluster is not None and last and not journal.complete(last):
        # The case is measured again from its first unit, since its remaining units may run on another machine.
        del journal.units[last]
        kept, size = before
    cut(files.journal, kept)
    cut(files.rounds, size)
    contents = (HEADER + row_lines(journal.rows)).encode()
    if first_bytes(files.csv, len(contents) + 1) != contents:
        with written_whole(files.csv) as file:
            file.write(contents)
    return journal


def _head(where: str, first: bytes) -> tuple[_RequestLine, BenchRequest]:
    """Parse the first line of a journal; returns the line and its request."""
    entry = _entry(where, first)
    if entry.get("journal") != _VERSION:
        raise FFNError(
            f"{where}: not a request written by this version of ffn", "resume with the version that began the run"
        )
    head: _RequestLine = record_of(_RequestLine, entry, where, _ANEW)
    return head, from_json(head.request, f"{where}: request")


def _line_read(journal: Journal, where: str, raw: bytes, start: int) -> _UnitLine:
    """Parse the line of a finished unit; its blocks begin at byte `start` of the rounds file. Raises FFNError if it
    does not fit the run."""
    line: _UnitLine = record_of(_UnitLine, _entry(where, raw), where, _ANEW)
    require_unit_of(journal.request, journal._cases.get(line.unit.case), line.unit, where, _ANEW)
    wrong = {
        "it is duplicated": journal.done(line.unit.process, line.unit.case),
        "it holds blocks, which belong in the rounds file": bool(line.unit.blocks),
        "its blocks end before they begin": line.rounds_end < start,
    }
    if why := next((words for words, is_so in wrong.items() if is_so), ""):
        raise FFNError(f"{where} is damaged: {why}", _ANEW)
    return line


def _entry(where: str, raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raises FFNError for anything else."""
    try:
        return parse_object(raw, where)
    except FFNError as error:
        raise FFNError(error.message, _ANEW) from None


def unfinished(files: ResultFiles) -> FFNError:
    """Return the error for a result whose run has not ended."""
    name = shown_path(files.csv)
    return FFNError(f"{name} is unfinished", f"continue with `ffn bench --resume {name}`, or start again with --force")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Ensure that only one process writes a result. Raises FFNError if another process is writing it."""
    from filelock import FileLock, Timeout

    files = ResultFiles(path)
    # This is checked before the lock is taken, because taking the lock would create directories.
    for one in (files.csv, files.rounds, files.journal, files.grid, files.lock):
        check_writable(str(one), True, "--save")
        if one.exists() and not one.is_file():
            raise FFNError(f"cannot write {shown_path(one)}: it is not a file", code=ExitCode.ENVIRONMENT)
    lock = FileLock(files.lock, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        if not files.lock.exists():  # it could not be created either
            why = f"cannot write {shown_path(path)}: its folder takes no new files"
            raise FFNError(why, "choose another folder", ExitCode.ENVIRONMENT) from None
        raise FFNError(
            f"another ffn bench is writing {shown_path(path)}", "wait for it, or --save elsewhere", ExitCode.ENVIRONMENT
        ) from None
    except OSError as error:
        why = f"cannot write {shown_path(path)}: {error.strerror}"
        raise FFNError(why, "choose another folder", ExitCode.ENVIRONMENT) from None
    try:
        yield
    finally:
        # Removed before the lock is released: after that, the file could be another process's lock.
        files.lock.unlink(missing_ok=True)
        lock.release()


# --- files that only grow: append, read, cut back after a crash -------------------------------------------------------


def _part(rounds: Path, start: int, end: int) -> bytes:
    """Return these bytes of a rounds file. Raises FFNError if they are too many for the blocks of one unit."""
    if end - start > _MOST_UNIT_BYTES:
        why = f"{shown_path(rounds)}: the blocks of one unit are too large ({end - start:,} bytes)"
        raise FFNError(why, _ANEW)
    with open_to_read(rounds) as file:
        file.seek(start)
        return file.read(end - start)


def append(path: Path, text: str) -> tuple[int, int]:
    """Append the text to the file and flush the file to disk; return the file's sizes before and after.

    Raises FFNError (exit 3) if not all of the text could be written; the file is then unchanged.
    """
    data = text.encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            before = os.fstat(handle).st_size
            try:
                left = memoryview(data)
                while left:  # a few kilobytes need one write, unless the disk is full
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, before)
                raise
            return before, before + len(data)
        finally:
            os.close(handle)
    except OSError as error:
        raise FFNError(f"cannot write {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None


def first_bytes(path: Path, most: int) -> bytes:
    """Return at most the first `most` bytes of the file; empty if the file cannot be read."""
    try:
        with open_to_read(path) as file:
            return file.read(most)
    except OSError:
        return b""


def cut(path: Path, size: int) -> None:
    """Cut the file to `size` bytes."""
    try:
        if path.stat().st_size > size:
            with path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
    except OSError as error:
        raise FFNError(f"cannot write {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None


# --- whether a unit from a file or from another machine fits a run ----------------------------------------------------


def require_unit_of(request: BenchRequest, case: Case | None, unit: TimedUnit, where: str, hint: str = "") -> None:
    """Raise FFNError for a unit that does not fit the run. `case` is the run's case with the unit's key; the error
    contains `where`, the origin of the unit."""
    kernels = [outcome.kernel for outcome in unit.outcomes]
    named = {*kernels} == {*request.names} or request.method.by_step
    experts = case.spec.moe.experts if case and case.spec.moe else 0
    wrong = {
        "its case does not belong to the run": case is None or case.key != unit.case,
        "its process does not belong to the run": unit.process >= request.method.processes,
        "its baseline differs from the run's baseline": unit.baseline != request.baseline,
        "its kernels differ from the run's kernels": not named or len({*kernels}) != len(kernels),
        "its blocks belong to another unit": any(
            (block.process, block.case) != (unit.process, unit.case) for block in unit.blocks
        ),
        "its tokens per expert do not match its number of experts": len(unit.tokens_per_expert) not in (0, experts),
    }
    if why := next((words for words, is_so in wrong.items() if is_so), ""):
        raise FFNError(f"{where} is damaged: {why}", hint)


# --- the machine and versions of a run, which must not change until it ends -------------------------------------------
# --------------------------------------------


def software() -> dict[str, str]:
    """Return the machine and the versions that are known without importing torch."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"ffncli": __version__, "python": platform.python_version(), "host": platform.node(), "cpu": cpu_name()}
    for name in ("torch", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


def sha256(path: Path) -> str:
    """Return the file's SHA-256; "" if the file cannot be read."""
    try:
        return sha256_of(path)
    except (OSError, ValueError):
        return ""


def require_same(when: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise FFNError if the machine or a version has changed, since a run must have a single environment."""
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise changed(f"{name} is {shown(now[name])}, {when} {shown(before[name])}")


def changed(text: str) -> FFNError:
    """Return the error for a run whose environment has changed."""
    return FFNError(f"cannot continue: {text}", "start again: ffn bench --save FILE.csv", ExitCode.ENVIRONMENT)
