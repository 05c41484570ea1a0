"""The parent of a benchmark: K processes one after another, in each a worker per number of threads; stores results.

Nothing here imports torch: the workers do.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any, cast, get_args

from ffncli.bench.judge.limits import Excess, WorkerLimits, ended_worker, memory_limit
from ffncli.bench.judge.summary import agreed
from ffncli.bench.launch import WORKER, Worker, worker
from ffncli.bench.rank_launches import RankLaunches
from ffncli.bench.records import Case, Doing, Job, Outcome, Stage, Status, TimedUnit, not_captured
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.journal import Journal, require_same
from ffncli.bench.results.row import ResultRow
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError, clean, shown, shown_path
from ffncli.system.child import KILLED, ending
from ffncli.system.child_output import PrintedBytes

# Seconds between looks at a silent worker. A look takes a core for a moment, so there are few while blocks are timed;
# before, memory may grow by a gigabyte a second.
_TICK, _TICK_UNTIMED, _TICK_HURRIED = 1.0, 0.2, 0.02
# What reading a message raises when the line ends, or when a copy of the worker, forked by a kernel, writes to it too.
_LINE_OVER = (
    *(EOFError, OSError, pickle.UnpicklingError, AttributeError, ImportError, LookupError, MemoryError),
    *(TypeError, ValueError),
)
_ITSELF = ": a kernel's code ended its process"  # a worker ends with exit code 0 when all is finished, else never
_LONGEST_NOTE = 300  # characters that a worker may add to a note
Gone = dict[tuple[str, str], Outcome]  # (case, kernel) → the outcome of a kernel that ended its worker there


class RunProgress:
    """Hears how far a run is; this one passes it on to nobody."""

    def finished(self, process: int, case: Case) -> None:
        """One more unit is finished."""

    def at(self, stage: Stage, seconds: float) -> None:
        """A worker has been at this stage for so long: each second at least, and as it changes."""


_NOBODY = RunProgress()


@dataclass(frozen=True)
class Result:
    """A complete run: its rows, and where they are."""

    rows: tuple[ResultRow, ...]
    request: BenchRequest
    csv: Path
    rounds: Path


def run(
    journal: Journal,
    progress: RunProgress = _NOBODY,
    command: Sequence[str] = WORKER,
    *,
    now: Callable[[], float] = time.monotonic,
    launches: RankLaunches | None = None,
) -> Result:
    """Run everything unfinished, processes outermost; the journal is deleted when all is finished.

    `launches` start the workers of the other ranks, if the blocks are split over any. Raises FFNError (exit 3) if the
    disk is full, a worker cannot start or a rank is lost; finished units are kept.
    """
    request = journal.request
    most = memory_limit(request.method)
    running = _Running(journal, _environments(journal), _gone(journal), {}, progress, now, command, most, launches)
    for process in range(request.method.processes):
        for (_, threads), group in _places(request.cases):
            while todo := tuple(case for case in group if not journal.done(process, case.key)):
                _work(running, process, threads, todo)
    journal.finish()
    return Result(tuple(journal.rows), request, journal.files.csv, journal.files.rounds)


@dataclass(frozen=True)
class _Running:
    """The shared state of a run's workers: the environment so far, the kernels that ended one, and who hears of it."""

    journal: Journal
    before: Mapping[tuple[str, int], Mapping[str, str]]
    gone: Gone
    plain: dict[str, str]  # case → why it cannot be replayed from CUDA graphs
    progress: RunProgress
    now: Callable[[], float]
    command: Sequence[str]
    most_memory: int | None
    launches: RankLaunches | None
    printed: PrintedBytes = field(default_factory=PrintedBytes)

    def lost(self, process: int, stage: Stage, excess: Excess) -> None:
        """A kernel has ended its worker: it is not run again in these cases. If none is to blame, the case is over."""
        kernel = excess.kernel
        if self.launches is not None:
            raise _rank_lost(stage, excess)
        if not kernel or (stage.case.key, kernel) in self.gone:
            unit = _dead(self.journal, process, stage.case, kernel or None, excess.outcome)
            self.journal.add(unit, died=True)
            self.progress.finished(process, stage.case)
            return
        for case in excess.cases:
            self.gone[case.key, kernel] = excess.outcome

    def spoiled(self, case: Case, arm: str, why: str) -> None:
        """A capture failed, and the next worker has the case again: with plain calls, or without that arm if graphs
        were requested."""
        request, text = self.journal.request, not_captured(why)
        if request.method.launch != "graphs":
            self.plain[case.key] = f"{arm} {text}"
            return
        for name in (arm,) if arm in request.names else request.names:
            self.gone[case.key, name] = Outcome(name, "skipped", text)


def _places(cases: Sequence[Case]) -> list[tuple[tuple[str, int], list[Case]]]:
    """The cases that one process can run: OpenMP's settings are fixed when it starts."""
    places: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        places.setdefault((case.device, case.threads), []).append(case)
    return list(places.items())


def _work(running: _Running, process: int, threads: int, todo: tuple[Case, ...]) -> None:
    """One worker for these cases. If it dies of a kernel, or is killed for one that is beyond its limits, the next one
    leaves that kernel out.

    If the kernel is unknown, the current case counts as finished, and the next worker has the rest.
    """
    request = running.journal.request
    out = tuple((case, outcome) for (case, _), outcome in running.gone.items())
    plain = tuple({**_plain(running.journal), **running.plain}.items())
    chosen = tuple((case, name, kernel) for (case, name), kernel in _chosen(running.journal).items())
    job = Job(process, todo, request.kernels, request.baseline, request.method, out, plain, chosen)
    with _started(running, job, threads, request.directory) as busy:
        served = _Served(running, process, busy, {case.key: case for case in todo}, dict(plain), running.now())
        for message in _messages(busy, served):
            if served.hear(message):
                return
            if served.stage is None:
                served.require_others()
            elif excess := served.excess(look=message is None):
                running.lost(process, served.stage, excess)
                return
        code, culprit = busy.ended(), served.culprit
    if served.stage is not None:
        outcome = ended_worker(culprit, _status(code), f"{ending(code)}{_ITSELF if code == 0 else ''}")
        running.lost(process, served.stage, Excess(culprit, outcome, (served.stage.case,)))
    elif not served.finished:
        raise _failed(f"a worker could not start ({ending(code)})")


@dataclass
class _Served:
    """One worker and what it has said: the stage that it is at, since when, and how many cases it has finished."""

    running: _Running
    process: int
    busy: Worker
    known: Mapping[str, Case]
    plain: Mapping[str, str]
    since: float
    stage: Stage | None = None
    finished: int = 0
    limits: WorkerLimits = field(init=False)

    def __post_init__(self) -> None:
        running = self.running
        request = running.journal.request
        self.limits = WorkerLimits(request.method, request.cases, running.most_memory, self.since)

    @property
    def tick(self) -> float:
        """Seconds until the next look at it."""
        if self.limits.hurried:
            return min(_TICK, _TICK_HURRIED)
        return _TICK if self._timing else min(_TICK, _TICK_UNTIMED)

    @property
    def _timing(self) -> bool:
        return self.stage is not None and self.stage.doing == "timing"

    @property
    def culprit(self) -> str:
        """The kernel that is being worked on; empty if that is none, or nobody knows."""
        return self.stage.kernel or self.busy.running().kernel if self.stage is not None else ""

    def hear(self, message: tuple[Any, ...] | None) -> bool:
        """Take in a message; True if the worker's work is over. Raises FFNError if it cannot work here."""
        match message:
            case None:
                pass
            case ("began", str(key)):
                self._enter(Stage(self.process, self.known[key]) if key in self.known else None)
                self.limits.begin_case()
            case ("stage", str(doing), str(name)) if self.stage is not None and doing in get_args(Doing):
                self._enter(replace(self.stage, doing=cast(Doing, doing), kernel=name))
            case ("unit", TimedUnit() as unit) if unit.case in self.known:
                self._finish(unit)
            case ("lost", str(kernel), str(why)) if self.stage is not None:
                outcome = ended_worker(kernel, "failed", f"lost its GPU: {clean(why)[:_LONGEST_NOTE]}")
                self.running.lost(self.process, self.stage, Excess(kernel, outcome, (self.stage.case,)))
                return True
            case ("spoiled", str(arm), str(why)) if self.stage is not None and self.stage.case.key not in self.plain:
                self.running.spoiled(self.stage.case, arm, clean(why)[:_LONGEST_NOTE])
                return True
            case ("broke", str(kernel), str(why)) if self.stage is not None:
                self._broke(kernel, why)
                return True
            case ("refused", str(text), str(hint), int(code)):
                if self.running.launches is not None:
                    return self._heard_from_others(FFNError(text, hint, ExitCode(code)))
                raise FFNError(text, hint, ExitCode(code))
            case ("finished",):
                if self.finished < len(self.known):
                    raise _failed(f"a worker finished {self.finished} of its {len(self.known)} cases")
                return True
            case _:
                raise _failed(f"unexpected message from a worker: {shown(message)}")
        return False

    def _broke(self, kernel: str, why: str) -> None:
        """A kernel raised on one rank while all were timing it: it is not run again in this case."""
        assert self.stage is not None
        outcome = ended_worker(kernel, "failed", clean(why)[:_LONGEST_NOTE])
        self.running.gone[self.stage.case.key, kernel] = outcome

    def _heard_from_others(self, error: FFNError) -> bool:
        """Rank 0's worker ended because of another: True if a kernel broke there. Raises the error, and what that rank
        says of it."""
        words = self.running.launches.words() if self.running.launches else {}
        for rank, (kernel, why) in words.items():
            if self.stage is not None and kernel in self.running.journal.request.names:
                self._broke(kernel, f"saw it raise on rank {rank}: {why}")
                return True
        more = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in words.items() if why)
        raise FFNError(error.message, "; ".join(filter(None, (error.hint, more))), error.code)

    def require_others(self) -> None:
        """Raises FFNError if a worker of another rank has ended before all have met: this one waits for it in vain."""
        launches = self.running.launches
        for rank, (_, why) in launches.words_now().items() if launches else ():
            if why:
                raise FFNError(f"rank {rank}: {why}", code=ExitCode.ENVIRONMENT)

    def excess(self, look: bool) -> Excess | None:
        """What it takes too much of, if anything. Its memory is read on a `look`, and at each stage before timing."""
        assert self.stage is not None
        now = self.running.now()
        memory = self.busy.memory() if look or not self._timing else None
        if memory is not None and memory > (self.limits.most_memory or memory):
            memory = self.busy.memory(shared_once=True)
        excess = self.limits.excess(self.stage, now, self.since, self.busy.running(), memory)
        if excess is None:
            self.running.progress.at(self.stage, now - self.since)
        return excess

    def _enter(self, stage: Stage | None) -> None:
        self.stage, self.since = stage, self.running.now()
        kernel = "the timed kernels" if self._timing else stage.kernel if stage is not None else ""
        self.busy.printed.source = kernel or "the worker"

    def _finish(self, unit: TimedUnit) -> None:
        case, running = self.known[unit.case], self.running
        if running.journal.request.method.refereed_apart(case):
            unit = replace(agreed(unit, self.busy.report(case.key)), referee="process")
        else:
            unit = replace(unit, referee="worker")  # a worker cannot say otherwise
        before = running.before.get((case.device, case.threads), {})
        require_same("its run began with", before, unit.environment)
        running.journal.add(unit)
        self._enter(None)
        self.finished += 1
        running.progress.finished(self.process, case)


@contextmanager
def _started(running: _Running, job: Job, threads: int, directory: str | None) -> Iterator[Worker]:
    """A worker, in the directory where the run began. Raises FFNError (exit 3) if that is gone."""
    if directory is not None and not Path(directory).is_dir():
        why = f"the run began in {shown_path(Path(directory))}, which is gone"
        raise FFNError(why, "start again: ffn bench --save FILE.csv", ExitCode.ENVIRONMENT)
    more = running.launches.begin(job, threads) if running.launches else None
    try:
        with worker(job, threads, running.command, directory, running.printed, more) as busy:
            yield busy
    finally:
        if running.launches:
            running.launches.over()


def _messages(busy: Worker, served: _Served) -> Iterator[tuple[Any, ...] | None]:
    """A worker's messages, until it closes the line or a kernel has spoilt it; None after each silent tick."""
    while True:
        try:
            message = busy.receive(served.tick)
        except _LINE_OVER:
            return
        yield message


def _rank_lost(stage: Stage, excess: Excess) -> FFNError:
    """Where a worker of several ranks is lost, nobody knows whose fault it is: no kernel is blamed, the run ends."""
    what = f"{stage.doing} {excess.kernel}".strip()
    return FFNError(f"{excess.outcome.note}, on rank 0 while {what}", code=ExitCode.ENVIRONMENT)


def _failed(text: str) -> FFNError:
    return FFNError(text, "its output is above; try one case alone", ExitCode.ENVIRONMENT)


# --- a worker's death -------------------------------------------------------------------------------------------------


def _gone(journal: Journal) -> Gone:
    """Kernels that have ended a worker, according to the finished units."""
    units = (kept.unit for by_process in journal.units.values() for kept in by_process.values())
    return {(u.case, o.kernel): o for u in units for o in u.outcomes if o.ended_worker}


def _chosen(journal: Journal) -> dict[tuple[str, str], str]:
    """(case, name of a kernel that is auto) → the kernel that it stands for, in all processes of a run."""
    units = (kept.unit for by_process in journal.units.values() for kept in by_process.values())
    return {(u.case, outcome.kernel): outcome.chosen for u in units for outcome in u.outcomes if outcome.chosen}


def _plain(journal: Journal) -> dict[str, str]:
    """Cases that an earlier process could not replay, and why: all of a case's processes launch alike."""
    units = (kept.unit for by_process in journal.units.values() for kept in by_process.values())
    return {unit.case: unit.plain_because for unit in units if unit.plain_because}


def _status(code: int | None) -> Status:
    return "oom" if code == KILLED else "failed"


def _dead(journal: Journal, process: int, case: Case, kernel: str | None, outcome: Outcome) -> TimedUnit:
    """The unit of a case that ended its worker, at that kernel if it is known, with this outcome."""
    request = journal.request
    elsewhere = f"{outcome.note} at {kernel}"
    outcomes = tuple(
        replace(outcome, kernel=name, note=outcome.note if kernel in (None, name) else elsewhere)
        for name in request.names
    )
    place = (case.device, case.threads)
    environment = _environments(journal).get(place) or {**journal.software, "device": case.device}
    return TimedUnit(process, case.key, request.baseline, case.cache, outcomes, (), environment=environment)


def _environments(journal: Journal) -> dict[tuple[str, int], Mapping[str, str]]:
    """The environments of the finished units, by device and threads."""
    cases = {case.key: case for case in journal.request.cases}
    kept = itertools.chain.from_iterable(units.values() for units in journal.units.values())
    return {(c.device, c.threads): k.unit.environment for k in kept if (c := cases[k.unit.case]) and k.unit.environment}
