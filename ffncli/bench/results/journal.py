"""The files of a run in progress: three files that only grow, and their repair after a crash.

`NAME.partial.jsonl` begins with the request, then has a line per finished unit; the other two files begin with the
first unit. A unit's blocks are written to `NAME.rounds.csv` first, its line second: a unit without a line was not
finished, and its blocks are cut off. `NAME.csv` gets the rows of a case when its last process has finished; a resumed
run writes it again from the units. The journal is deleted at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ffncli.bench.records import Case, Method, Outcome, Roof, TimedUnit
from ffncli.bench.request.grid import BenchRequest, from_json, to_json
from ffncli.bench.results.csv_file import HEADER, ROUNDS_HEADER, block_lines, parse_rounds, row_lines
from ffncli.bench.results.row import ResultRow
from ffncli.errors import ExitCode, FFNError, shown_path
from ffncli.system.files import check_writable, written_whole

_VERSION = 1
Summarise = Callable[[Case, Sequence[TimedUnit], Method, Mapping[str, str]], tuple[ResultRow, ...]]


@dataclass(frozen=True)
class ResultFiles:
    """The files of one result, by the name of its CSV. Raises FFNError for a name that does not end in .csv."""

    csv: Path

    def __post_init__(self) -> None:
        if self.csv.suffix != ".csv" or self.csv.name.endswith(".rounds.csv"):
            raise FFNError(f"{shown_path(self.csv)} must end in .csv", "as in --save results/mine.csv")

    @property
    def rounds(self) -> Path:
        """Every block."""
        return self.csv.with_suffix(".rounds.csv")

    @property
    def journal(self) -> Path:
        """The request and the finished units; it exists only until the run is complete."""
        return self.csv.with_suffix(".partial.jsonl")

    @property
    def lock(self) -> Path:
        """The lock of the writing process."""
        return self.csv.with_suffix(".csv.lock")


@dataclass(frozen=True)
class _Kept:
    """A finished unit without its blocks, and their bytes in the rounds file."""

    unit: TimedUnit
    start: int
    end: int


@dataclass
class Journal:
    """An open run: its request, its finished units, and the place of the next one. `run` has run_id, started_utc.

    `died` names the cases that killed a worker: they are finished, and not run again.
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
    _cases: dict[str, Case] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cases = {case.key: case for case in self.request.cases}

    def done(self, process: int, case: str) -> bool:
        """Whether a case in a process needs no more work."""
        return case in self.died or process in self.units.get(case, ())

    @property
    def count(self) -> int:
        """How many units are finished."""
        return sum(len(kept) for kept in self.units.values())

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of all units together, by purpose."""
        total: dict[str, float] = {}
        for kept in (kept for mine in self.units.values() for kept in mine.values()):
            for name, seconds in kept.unit.spent.items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def add(self, unit: TimedUnit, died: bool = False) -> None:
        """Store a finished unit, and the rows of its case where it was the last one.

        Raises FFNError (exit 3) where the system refuses; earlier units are unchanged.
        """
        if self.done(unit.process, unit.case) or unit.case not in self._cases:
            return
        if self.fresh:
            for one, header in ((self.files.rounds, ROUNDS_HEADER), (self.files.csv, HEADER)):
                with written_whole(one) as file:
                    file.write(header.encode())
            self.fresh = False
        start, end = _append(self.files.rounds, block_lines(self.run["run_id"], unit.blocks))
        _append(self.files.journal, json.dumps(_unit_json(unit, end, died), allow_nan=False) + "\n")
        if rows := self._take(_Kept(replace(unit, blocks=()), start, end), died):
            _append(self.files.csv, row_lines(rows))

    def _take(self, kept: _Kept, died: bool) -> tuple[ResultRow, ...]:
        """Store the unit in memory; returns the rows of its case, from the files, where that is now complete."""
        case = kept.unit.case
        mine = self.units.setdefault(case, {})
        mine[kept.unit.process] = kept
        if died:
            self.died.add(case)
        elif len(mine) < self.request.method.processes:
            return ()
        rows = self.summarise(
            self._cases[case], [self._whole(mine[p]) for p in sorted(mine)], self.request.method, self.run
        )
        rows = tuple(
            replace(row, certificate=self.request.certificate_of(row.kernel, self._cases[case])) for row in rows
        )
        self.rows.extend(rows)
        return rows

    def _whole(self, kept: _Kept) -> TimedUnit:
        with self.files.rounds.open("rb") as file:
            file.seek(kept.start)
            raw = file.read(kept.end - kept.start)
        blocks = tuple(block for _, block in parse_rounds(raw, shown_path(self.files.rounds)))
        return replace(kept.unit, blocks=blocks)

    def finish(self) -> None:
        """The run is complete: delete the journal."""
        self.files.journal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Nothing was finished: delete our files, but keep those that --force would have replaced."""
        for path in (self.files.journal, *(() if self.fresh else (self.files.rounds, self.files.csv))):
            path.unlink(missing_ok=True)


# --- beginning and going on -------------------------------------------------------------------------------------------


def begin(
    path: Path,
    request: BenchRequest,
    run: Mapping[str, str],
    software: Mapping[str, str],
    summarise: Summarise,
    force: bool,
) -> Journal:
    """A new run into `path`. Raises FFNError for files that exist (without `force`) or cannot be written."""
    files = ResultFiles(path)
    if files.journal.exists() and not force:
        raise _unfinished(files)
    for one in (files.csv, files.rounds):
        check_writable(str(one), force, "--save")
    head = {"journal": _VERSION, "run": dict(run), "software": dict(software), "request": to_json(request)}
    with written_whole(files.journal) as file:  # it exists as a whole or not at all
        file.write((json.dumps(head, allow_nan=False) + "\n").encode())
    return Journal(files, request, run, software, summarise, fresh=True)


def resume(path: Path, summarise: Summarise) -> Journal:
    """The unfinished run of `path`, its files repaired. Raises FFNError where there is none, or it is damaged."""
    files = ResultFiles(path)
    name = shown_path(files.journal)
    try:
        raw = files.journal.read_bytes()
    except FileNotFoundError:
        hint = f"{shown_path(path)} is complete" if path.exists() else "start a new run: ffn bench --save FILE.csv"
        raise FFNError(f"nothing to resume: there is no {name}", hint) from None
    except OSError as error:
        raise FFNError(f"cannot read {name}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
    lines = raw.split(b"\n")[:-1]  # the rest after the last line end is incomplete
    if not lines:
        raise FFNError(f"{name} has no request", "start the run again with --force")
    journal = _opened(files, name, lines[0], summarise)
    kept, size = len(lines[0]) + 1, len(ROUNDS_HEADER.encode())
    if _bytes(files.rounds, size) != ROUNDS_HEADER.encode():
        with written_whole(files.rounds) as file:
            file.write(ROUNDS_HEADER.encode())
    there = files.rounds.stat().st_size
    for number, one in enumerate(lines[1:], 2):
        unit, end, died = _unit_read(f"{name}, line {number}", one)
        if end > there:  # its blocks are incomplete: it is not finished
            break
        journal._take(_Kept(unit, size, end), died)
        kept, size = kept + len(one) + 1, end
    _cut(files.journal, kept)
    _cut(files.rounds, size)
    whole = (HEADER + row_lines(journal.rows)).encode()
    if _bytes(files.csv) != whole:
        with written_whole(files.csv) as file:
            file.write(whole)
    return journal


def _opened(files: ResultFiles, name: str, first: bytes, summarise: Summarise) -> Journal:
    """A journal from its first line, nothing finished yet."""
    try:
        head = json.loads(first)
        if head["journal"] != _VERSION:
            raise FFNError(
                f"{name} was written by another version of ffn", "resume with the version that began the run"
            )
        request = from_json(head["request"])
        run = {key: str(head["run"][key]) for key in ("run_id", "started_utc")}
        software = {str(key): str(value) for key, value in head["software"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FFNError(f"{name}, line 1: not a request of `ffn bench`", "start the run again with --force") from None
    return Journal(files, request, run, software, summarise)


def _unfinished(files: ResultFiles) -> FFNError:
    name = shown_path(files.csv)
    return FFNError(f"{name} is unfinished", f"continue with `ffn bench --resume {name}`, or start again with --force")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One writer for each file. Raises FFNError where another has it."""
    from filelock import FileLock, Timeout

    files = ResultFiles(path)
    check_writable(str(path), True, "--save")  # the lock would make directories
    lock = FileLock(files.lock, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FFNError(f"another ffn bench is writing {shown_path(path)}", "wait for it, or --save elsewhere",
                       ExitCode.ENVIRONMENT) from None  # fmt: skip
    except OSError as error:
        why = f"cannot write {shown_path(path)}: {error.strerror}"
        raise FFNError(why, "choose another --save FILE.csv", ExitCode.ENVIRONMENT) from None
    try:
        yield
    finally:
        files.lock.unlink(missing_ok=True)  # while we have the lock, so that no one else can have taken it
        lock.release()


# --- bytes ------------------------------------------------------------------------------------------------------------


def _append(path: Path, text: str) -> tuple[int, int]:
    """Add the text at the end, to the disk, in one write; the sizes before and after it.

    Raises FFNError (exit 3) where not all of it could be written; the file is then unchanged.
    """
    data = text.encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            before = os.fstat(handle).st_size
            try:
                left = memoryview(data)
                while left:  # a write of a few kilobytes is one, unless the disk is full
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


def _bytes(path: Path, most: int = -1) -> bytes:
    """The file's first `most` bytes; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _cut(path: Path, size: int) -> None:
    """Cut the file to `size` bytes."""
    try:
        if path.stat().st_size > size:
            with path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
    except OSError as error:
        raise FFNError(f"cannot write {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None


def _unit_json(unit: TimedUnit, end: int, died: bool) -> dict[str, Any]:
    """A unit without its blocks, which end at that byte of the rounds file."""
    return {**asdict(replace(unit, blocks=())), "environment": dict(unit.environment), "rounds_end": end, "died": died}


def _unit_read(where: str, raw: bytes) -> tuple[TimedUnit, int, bool]:
    try:
        entry = json.loads(raw)
        end, died = entry.pop("rounds_end"), entry.pop("died")
        outcomes, roof = tuple(Outcome(**o) for o in entry["outcomes"]), Roof(**entry["roof"])
        unit = TimedUnit(**{**entry, "outcomes": outcomes, "roof": roof, "blocks": (), "notes": tuple(entry["notes"])})
        return unit, int(end), bool(died)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FFNError(f"{where} is damaged", "start the run again with --force") from None
