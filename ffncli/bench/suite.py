"""The parent of a benchmark: K processes one after another, in each a worker per number of threads; stores results.

Nothing here imports torch: the workers do.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from ffncli.bench.launch import WORKER, Worker, worker
from ffncli.bench.records import Case, Doing, Job, Outcome, Stage, Status, TimedUnit
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results import journal as journals
from ffncli.bench.results.journal import Journal, locked
from ffncli.bench.results.row import ResultRow
from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.show.text import seconds_text
from ffncli.system.child import KILLED, ending
from ffncli.system.files import results_folder, sha256_of
from ffncli.version import __version__

_TICK = 1.0  # seconds
_DIED = "the worker "  # the start of a note about a worker's death
Gone = dict[tuple[str, str], Outcome]  # (case, kernel) → the outcome of a kernel that ended its worker there
Tell = Callable[[int, Case], None]  # (process, case): one more unit is finished
Watch = Callable[[Stage, float], None]  # a worker's stage and its seconds; called each second and on changes


@dataclass(frozen=True)
class Result:
    """A complete run: its rows, and where they are."""

    rows: tuple[ResultRow, ...]
    request: BenchRequest
    csv: Path
    rounds: Path


def default_path() -> Path:
    """`benchmarks/results/20261122T060338Z-host.csv` in a checkout that has this folder, else in the user's state
    folder, which is created. Raises FFNError if that fails."""
    import platform
    import re

    folder = results_folder(Path.cwd())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot create {shown_path(folder)}: {error.strerror}"
        raise FFNError(why, "name a file: --save FILE.csv", ExitCode.ENVIRONMENT) from None
    host = re.sub(r"[^\w-]+", "-", platform.node())[:40].strip("-") or "host"
    return folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{host}.csv"


@contextmanager
def begun(path: Path, request: BenchRequest, force: bool = False) -> Iterator[Journal]:
    """A new run into `path`, locked. Raises FFNError, before anything is measured, if it cannot be written."""
    import secrets

    from ffncli.bench.judge.summary import summarise

    now = datetime.now(UTC)
    run = {"run_id": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}", "started_utc": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
    with locked(path):
        opened = journals.begin(path, request, run, software(), summarise, force)
        try:
            yield opened
        finally:
            if not opened.count:
                opened.discard()


@contextmanager
def resumed(path: Path) -> Iterator[Journal]:
    """The unfinished run of `path`, locked. Raises FFNError if there is none, or if the conditions have changed."""
    from ffncli.bench.judge.summary import summarise

    with locked(path):
        opened = journals.resume(path, summarise)
        _require_same("its run began with", opened.software, software())
        for name, digest in opened.request.files.items():
            if sha256(Path(name)) != digest:
                raise _changed(f"{shown_path(Path(name))} has changed since its run began")
        yield opened


def run(
    journal: Journal,
    tell: Tell = lambda process, case: None,
    command: Sequence[str] = WORKER,
    *,
    watch: Watch = lambda stage, seconds: None,
    now: Callable[[], float] = time.monotonic,
) -> Result:
    """Run everything unfinished, processes outermost; the journal is deleted when all is finished.

    Raises FFNError (exit 3) if the disk is full or a worker cannot start; finished units are kept.
    """
    request = journal.request
    running = _Running(journal, _environments(journal), _gone(journal), tell, watch, now, command)
    for process in range(request.method.processes):
        for (_, threads), group in _places(request.cases):
            while todo := tuple(case for case in group if not journal.done(process, case.key)):
                _work(running, process, threads, todo)
    journal.finish()
    return Result(tuple(journal.rows), request, journal.files.csv, journal.files.rounds)


@dataclass(frozen=True)
class _Running:
    """The shared state of a run's workers: the environment so far, the kernels that ended one, and the callbacks."""

    journal: Journal
    before: Mapping[tuple[str, int], Mapping[str, str]]
    gone: Gone
    tell: Tell
    watch: Watch
    now: Callable[[], float]
    command: Sequence[str]

    def overdue(self, stage: Stage, seconds: float) -> bool:
        """Whether a user's file takes too long to load; then no case is measured with that kernel."""
        limit = self.journal.request.method.load_time
        if stage.doing != "loading" or seconds <= limit:
            return False
        note = f"{_DIED}did not load its file within {seconds_text(limit)} (--load-time allows more)"
        for case in self.journal.request.cases:
            self.gone[case.key, stage.kernel] = Outcome(stage.kernel, "failed", note)
        return True


def _places(cases: Sequence[Case]) -> list[tuple[tuple[str, int], list[Case]]]:
    """The cases that one process can run: OpenMP's settings are fixed when it starts."""
    places: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        places.setdefault((case.device, case.threads), []).append(case)
    return list(places.items())


def _work(running: _Running, process: int, threads: int, todo: tuple[Case, ...]) -> None:
    """One worker for these cases. If it dies of a kernel, the next worker leaves that kernel out.

    If the kernel is unknown, the current case counts as finished, and the next worker has the rest.
    """
    journal, gone, known = running.journal, running.gone, {case.key: case for case in todo}
    request, stage, since, finished = journal.request, None, running.now(), 0
    out = tuple((case, outcome) for (case, _), outcome in gone.items())
    job = Job(process, todo, request.kernels, request.baseline, request.method, out)
    with _started(job, threads, running.command, request.directory) as busy:
        for message in _messages(busy):
            match message:
                case None:
                    pass
                case ("began", str(key)):
                    stage, since = Stage(process, known[key]) if key in known else None, running.now()
                case ("stage", str(doing), str(name)) if stage is not None and doing in get_args(Doing):
                    stage, since = replace(stage, doing=cast(Doing, doing), kernel=name), running.now()
                case ("unit", TimedUnit() as unit) if unit.case in known:
                    case = known[unit.case]
                    before = running.before.get((case.device, case.threads), {})
                    _require_same("its run began with", before, unit.environment)
                    journal.add(unit)
                    stage, finished = None, finished + 1
                    running.tell(process, case)
                case ("refused", str(text), str(hint), int(code)):
                    raise FFNError(text, hint, ExitCode(code))
                case ("finished",):
                    if finished < len(todo):
                        raise _failed(f"a worker finished {finished} of its {len(todo)} cases")
                    return
                case _:
                    raise _failed(f"unexpected message from a worker: {shown(message)}")
            if stage is not None:
                if running.overdue(stage, seconds := running.now() - since):
                    return
                running.watch(stage, seconds)
        code = busy.ended()
    _died(running, process, stage, code, finished)


def _died(running: _Running, process: int, stage: Stage | None, code: int, finished: int) -> None:
    """Record the kernel that a worker died of, or the case if the kernel is unknown."""
    if stage is not None and stage.kernel and (stage.case.key, stage.kernel) not in running.gone:
        outcome = Outcome(stage.kernel, _status(code), f"{_DIED}{ending(code)}")
        running.gone[stage.case.key, stage.kernel] = outcome
    elif stage is not None:
        running.journal.add(_dead(running.journal, process, stage.case, stage.kernel or None, code), died=True)
        running.tell(process, stage.case)
    elif not finished:
        raise _failed(f"a worker could not start ({ending(code)})")


@contextmanager
def _started(job: Job, threads: int, command: Sequence[str], directory: str | None) -> Iterator[Worker]:
    """A worker, in the directory where the run began. Raises FFNError (exit 3) if that is gone."""
    if directory is not None and not Path(directory).is_dir():
        why = f"the run began in {shown_path(Path(directory))}, which is gone"
        raise FFNError(why, "start again: ffn bench --save FILE.csv", ExitCode.ENVIRONMENT)
    with worker(job, threads, command, directory) as busy:
        yield busy


def _messages(busy: Worker) -> Iterator[tuple[Any, ...] | None]:
    """A worker's messages, until it closes the line; None after each silent second."""
    while True:
        try:
            message = busy.receive(_TICK)
        except (EOFError, OSError, pickle.UnpicklingError):
            return
        yield message


def _failed(text: str) -> FFNError:
    return FFNError(text, "its output is above; try one case alone", ExitCode.ENVIRONMENT)


# --- a worker's death -------------------------------------------------------------------------------------------------


def _gone(journal: Journal) -> Gone:
    """Kernels that have ended a worker, according to the finished units."""
    units = (kept.unit for by_process in journal.units.values() for kept in by_process.values())
    return {(u.case, o.kernel): o for u in units for o in u.outcomes if o.note.startswith(_DIED)}


def _status(code: int) -> Status:
    return "oom" if code == KILLED else "failed"


def _dead(journal: Journal, process: int, case: Case, kernel: str | None, code: int) -> TimedUnit:
    """The unit of a case that ended its worker: oom if the system killed it, else failed."""
    request = journal.request
    status, why = _status(code), f"{_DIED}{ending(code)}"
    outcomes = tuple(
        Outcome(name, status, why) if kernel in (None, name) else Outcome(name, status, f"{why} at {kernel}")
        for name in request.names
    )
    place = (case.device, case.threads)
    environment = _environments(journal).get(place) or {**journal.software, "device": case.device}
    return TimedUnit(process, case.key, request.baseline, case.cache, outcomes, (), environment=environment)


# --- the same conditions ----------------------------------------------------------------------------------------------


def software() -> dict[str, str]:
    """The machine and the versions, as far as they are known without torch."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from ffncli.system.host import cpu_name

    versions = {"ffncli": __version__, "python": platform.python_version(), "host": platform.node(), "cpu": cpu_name()}
    for name in ("torch", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


def sha256(path: Path) -> str:
    """The file's SHA-256; empty if it cannot be read."""
    try:
        return sha256_of(path)
    except (OSError, ValueError):
        return ""


def _environments(journal: Journal) -> dict[tuple[str, int], Mapping[str, str]]:
    """The environments of the finished units, by device and threads."""
    cases = {case.key: case for case in journal.request.cases}
    kept = itertools.chain.from_iterable(units.values() for units in journal.units.values())
    return {(c.device, c.threads): k.unit.environment for k in kept if (c := cases[k.unit.case]) and k.unit.environment}


def _require_same(when: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises FFNError if the machine or a version has changed; one run has one environment."""
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise _changed(f"{name} is {shown(now[name])}, {when} {shown(before[name])}")


def _changed(text: str) -> FFNError:
    return FFNError(f"cannot continue: {text}", "start again: ffn bench --save FILE.csv", ExitCode.ENVIRONMENT)
