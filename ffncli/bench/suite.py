"""The parent of a benchmark: runs K processes one after another, each with one worker per thread count, and stores the
results.

Nothing here imports torch; only the workers do. `new_run` and `resumed` lock the files that receive the results.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from ffncli.bench.judge.limits import Excess, WorkerLimits, ended_worker, memory_limit
from ffncli.bench.judge.summary import agreed, certain
from ffncli.bench.launch import WORKER, Worker, WorkerPool, worker
from ffncli.bench.rank_launches import RankLaunches
from ffncli.bench.records import Case, Doing, Job, Outcome, Stage, Status, TimedUnit, not_captured
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.request.machines import GridPart
from ffncli.bench.results import journal as journals
from ffncli.bench.results.grid_file import grid_bytes, whole_grid
from ffncli.bench.results.journal import Journal, changed, locked, require_same, sha256, software
from ffncli.bench.results.row import ResultRow
from ffncli.errors import ExitCode, FFNError, clean, shown, shown_path
from ffncli.system.child import KILLED, PrintedBytes, ending
from ffncli.system.files import head_commit, results_folder
from ffncli.system.isolation import isolation
from ffncli.version import __version__

# Seconds between checks of a silent worker. A check occupies a core for a moment, so checks are rare while blocks are
# timed; before that, they are frequent, as memory may grow by a gigabyte per second.
_TICK, _TICK_UNTIMED, _TICK_HURRIED = 1.0, 0.2, 0.02
# Exceptions raised if the connection ends in the middle of a message, or if a copy of the worker that a kernel forked
# also writes to the connection.
_LINE_OVER = (
    *(EOFError, OSError, pickle.UnpicklingError, AttributeError, ImportError, LookupError, MemoryError),
    *(TypeError, ValueError),
)
_ITSELF = ": a kernel's code ended its process"  # a worker ends with exit code 0 only when all is finished
_LONGEST_NOTE = 300  # characters that a worker may add to a note


class RunProgress:
    """Receives the progress of a run. This base class ignores it."""

    def finished(self, process: int, case: Case) -> None:
        """Report that one more unit is finished."""

    def at(self, stage: Stage, seconds: float) -> None:
        """Report how long a worker has been at this stage: at least every second, and whenever the stage changes."""


_NOBODY = RunProgress()


@dataclass(frozen=True)
class Result:
    """A complete run: its rows, and the files that hold them."""

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
    """Run everything unfinished, with processes as the outermost loop; delete the journal when all is finished.

    If the blocks are split over ranks, `launches` starts the workers of the other ranks. Raises FFNError (exit 3) if
    the disk is full, a worker cannot start or a rank is lost; finished units are kept.
    """
    request, going = journal.request, _Run(journal, progress, command, now, launches)
    places: dict[tuple[str, int], list[Case]] = {}  # OpenMP's settings are fixed when a process starts
    for case in request.cases:
        places.setdefault((case.device, case.threads), []).append(case)
    with closing(going.pool):
        for process in range(request.method.processes):
            for (_, threads), group in places.items():
                while todo := tuple(case for case in group if not journal.done(process, case.key)):
                    going.work(process, threads, todo)
    journal.finish()
    return Result(tuple(journal.rows), request, journal.files.csv, journal.files.rounds)


class _Run:
    """A run in progress: what its workers have reported, and the current worker with its stage."""

    busy: Worker
    limits: WorkerLimits

    def __init__(
        self, journal: Journal, progress: RunProgress, command: Sequence[str], now: Callable[[], float],
        launches: RankLaunches | None,
    ) -> None:  # fmt: skip
        self.journal, self.progress, self.command, self.now, self.launches = journal, progress, command, now, launches
        self.request = journal.request
        self.before = _environments(journal)
        # (case, kernel) → the outcome of a kernel that ended its worker there
        self.gone = {(u.case, o.kernel): o for u in journal.finished_units for o in u.outcomes if o.ended_worker}
        self.certain: dict[str, dict[str, Outcome]] = {}  # case → the slow kernels whose verdict is certain
        self.plain: dict[str, str] = {}  # case → why it cannot be replayed from CUDA graphs
        self.most_memory = memory_limit(self.request.method)
        self.isolated = isolation() if self.request.method.isolate else ""
        self.printed = PrintedBytes()
        self.pool = WorkerPool(self.request.method.processes, command, self.request.directory, self.printed)
        # of the current worker
        self.process, self.since, self.finished = 0, 0.0, 0
        self.stage: Stage | None = None
        self.known: Mapping[str, Case] = {}

    def work(self, process: int, threads: int, todo: tuple[Case, ...]) -> None:
        """Run one worker for these cases. If a kernel crashes its worker, or if the worker is killed because a
        kernel exceeds a limit, the next worker leaves out that kernel.

        If the kernel is unknown, the current case counts as finished, and the next worker gets the remaining cases.
        """
        request = self.request
        gone = [(case, outcome) for (case, _), outcome in self.gone.items()]
        gone += [(case, outcome) for case, outcomes in self.certain.items() for outcome in outcomes.values()]
        earlier = {unit.case: unit.plain_because for unit in self.journal.finished_units if unit.plain_because}
        self.plain = {**earlier, **self.plain}  # all processes launch the case's calls in the same way
        chosen = tuple((case, name, kernel) for (case, name), kernel in _chosen(self.journal).items())
        plain = tuple(self.plain.items())
        job = Job(process, todo, request.kernels, request.baseline, request.method, tuple(gone), plain, chosen)
        with self._started(job, threads) as self.busy:
            self.process, self.known, self.stage, self.finished = process, {case.key: case for case in todo}, None, 0
            self.since = self.now()
            self.limits = WorkerLimits(request.method, request.cases, self.most_memory, self.since)
            for message in self._messages():
                if self._hear(message):
                    return
                if self.stage is None:
                    self._require_others()
                elif excess := self._excess(look=message is None):
                    self._leave_out(self.stage, excess)
                    return
            code, running = self.busy.ended(), self.busy.activity.read().kernel
        if self.stage is not None:
            culprit, status = self.stage.kernel or running, "oom" if code == KILLED else "failed"
            outcome = ended_worker(culprit, cast(Status, status), f"{ending(code)}{_ITSELF if code == 0 else ''}")
            self._leave_out(self.stage, Excess(culprit, outcome, (self.stage.case,)))
        elif not self.finished:
            raise _failed(f"a worker could not start ({ending(code)})")

    @contextmanager
    def _started(self, job: Job, threads: int) -> Iterator[Worker]:
        """Start a worker in the directory where the run began. Raises FFNError (exit 3) if it no longer exists."""
        directory, launches = self.request.directory, self.launches
        if directory is not None and not Path(directory).is_dir():
            why = f"the run began in {shown_path(Path(directory))}, which no longer exists"
            raise FFNError(why, "start again: ffn bench --save FILE.csv", ExitCode.ENVIRONMENT)
        if launches is None:
            with self.pool.worker(job, threads) as busy:
                yield busy
            return
        more = launches.begin(job, threads)
        try:
            with worker(job, threads, self.command, directory, self.printed, more) as busy:
                yield busy
        finally:
            launches.end_launch()

    def _messages(self) -> Iterator[tuple[Any, ...] | None]:
        """Yield the worker's messages until it closes the connection or corrupts it; None after each silence."""
        while True:
            untimed = _TICK if self._timing else min(_TICK, _TICK_UNTIMED)
            try:
                message = self.busy.receive(min(_TICK, _TICK_HURRIED) if self.limits.hurried else untimed)
            except _LINE_OVER:
                return
            yield message

    @property
    def _timing(self) -> bool:
        return self.stage is not None and self.stage.doing == "timing"

    def _hear(self, message: tuple[Any, ...] | None) -> bool:
        """Handle a message; return True if the worker has finished. Raises FFNError if it cannot work here."""
        match message:
            case None | ("ready",):
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
                self._leave_out(self.stage, Excess(kernel, outcome, (self.stage.case,)))
                return True
            case ("spoiled", str(arm), str(why)) if self.stage is not None and self.stage.case.key not in self.plain:
                self._spoiled(self.stage.case, arm, clean(why)[:_LONGEST_NOTE])
                return True
            case ("broke", str(kernel), str(why)) if self.stage is not None:
                self._broke(kernel, why)
                return True
            case ("refused", str(text), str(hint), int(code)):
                if self.launches is not None:
                    return self._heard_from_others(self.launches, FFNError(text, hint, ExitCode(code)))
                raise FFNError(text, hint, ExitCode(code))
            case ("finished",):
                if self.finished < len(self.known):
                    raise _failed(f"a worker finished {self.finished} of its {len(self.known)} cases")
                return True
            case _:
                raise _failed(f"unexpected message from a worker: {shown(message)}")
        return False

    def _enter(self, stage: Stage | None) -> None:
        self.stage, self.since = stage, self.now()
        kernel = "the timed kernels" if self._timing else stage.kernel if stage is not None else ""
        self.busy.printed.source = kernel or "the worker"

    def _finish(self, unit: TimedUnit) -> None:
        case = self.known[unit.case]
        if self.request.method.refereed_apart(case):
            left_out = self.certain.get(case.key, {})
            unit = replace(agreed(unit, self.busy.report(case.key), left_out), referee="process")
        else:
            unit = replace(unit, referee="worker")  # whatever the worker claims
        unit = replace(unit, isolated=self.isolated)
        require_same("its run began with", self.before.get((case.device, case.threads), {}), unit.environment)
        self.journal.add(unit)
        if not self.journal.complete(case.key):
            units = [one for one, _ in self.journal.units_of(case.key)]
            self.certain[case.key] = certain(case, units, self.request.method)
        self._enter(None)
        self.finished += 1
        self.progress.finished(self.process, case)

    def _excess(self, look: bool) -> Excess | None:
        """Return the limit that the worker exceeds, or None. Memory is measured on every call before timing begins, and
        afterwards only if `look` is set."""
        assert self.stage is not None
        now = self.now()
        memory = self.busy.memory() if look or not self._timing else None
        # Counting shared memory only once is slow, so this is only done if the worker seems to exceed the limit.
        if memory is not None and memory > (self.limits.most_memory or memory):
            memory = self.busy.memory(shared_once=True)
        excess = self.limits.excess(self.stage, now, self.since, self.busy.activity.read(), memory)
        if excess is None:
            self.progress.at(self.stage, now - self.since)
        return excess

    def _leave_out(self, stage: Stage, excess: Excess) -> None:
        """Leave out a kernel that has ended the worker; the case is finished if no kernel is to blame."""
        kernel = excess.kernel
        if self.launches is not None:  # over ranks, the faulty kernel is unknown: no kernel is blamed, and the run ends
            what = f"{stage.doing} {kernel}".strip()
            raise FFNError(f"{excess.outcome.note}, on rank 0 while {what}", code=ExitCode.ENVIRONMENT)
        if not kernel or (stage.case.key, kernel) in self.gone:
            unit = _dead(self.journal, self.process, stage.case, kernel or None, excess.outcome)
            self.journal.add(replace(unit, isolated=self.isolated), died=True)
            self.progress.finished(self.process, stage.case)
            return
        for case in excess.cases:
            self.gone[case.key, kernel] = excess.outcome

    def _spoiled(self, case: Case, arm: str, why: str) -> None:
        """Handle a failed capture: the next worker runs the case again, with plain calls or, if graphs were requested,
        without that arm."""
        text = not_captured(why)
        if self.request.method.launch != "graphs":
            self.plain[case.key] = f"{arm} {text}"
            return
        for name in (arm,) if arm in self.request.names else self.request.names:
            self.gone[case.key, name] = Outcome(name, "skipped", text)

    # --- several ranks ------------------------------------------------------------------------------------------------

    def _broke(self, kernel: str, why: str) -> None:
        """Handle a kernel that raised on one rank while all were timing it: it is not run on this case again."""
        assert self.stage is not None
        outcome = ended_worker(kernel, "failed", clean(why)[:_LONGEST_NOTE])
        self.gone[self.stage.case.key, kernel] = outcome

    def _heard_from_others(self, launches: RankLaunches, error: FFNError) -> bool:
        """Handle the end of rank 0's worker after another rank's worker ended: return True if a kernel raised there;
        otherwise raise the error, with the other ranks' reports as a hint."""
        words = launches.endings(wait=True)
        for rank, (kernel, why) in words.items():
            if self.stage is not None and kernel in self.request.names:
                self._broke(kernel, f"it raised on rank {rank}: {why}")
                return True
        more = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in words.items() if why)
        raise FFNError(error.message, "; ".join(filter(None, (error.hint, more))), error.code)

    def _require_others(self) -> None:
        """Raise FFNError if another rank's worker ended before all ranks had joined: rank 0 would wait forever."""
        for rank, (_, why) in self.launches.endings().items() if self.launches else ():
            if why:
                raise FFNError(f"rank {rank}: {why}", code=ExitCode.ENVIRONMENT)


def _failed(text: str) -> FFNError:
    return FFNError(text, "its output is above; try one case alone", ExitCode.ENVIRONMENT)


# --- a worker's death -------------------------------------------------------------------------------------------------


def _chosen(journal: Journal) -> dict[tuple[str, str], str]:
    """Map each (case, label of a kernel `auto`) to the kernel chosen for all processes of the run."""
    return {(u.case, o.kernel): o.chosen for u in journal.finished_units for o in u.outcomes if o.chosen}


def _dead(journal: Journal, process: int, case: Case, kernel: str | None, outcome: Outcome) -> TimedUnit:
    """Build the unit of a case that ended its worker: all kernels get this outcome and, if `kernel` is known, the
    notes of the other kernels name that kernel."""
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
    """Return the environments of the finished units, by device and threads."""
    cases = {case.key: case for case in journal.request.cases}
    units = [unit for unit in journal.finished_units if unit.environment]
    return {(cases[unit.case].device, cases[unit.case].threads): unit.environment for unit in units}


# --- where results go -------------------------------------------------------------------------------------------------


def default_path(part: GridPart | None = None) -> Path:
    """Return a path such as `benchmarks/results/20261122T060338Z-host.csv` in a checkout with this folder, otherwise in
    the user's state folder, which is created; with `part`, the name ends in `-3of8.csv`. Raises FFNError if the folder
    cannot be created."""
    import platform
    import re

    folder = results_folder(Path.cwd())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot create {shown_path(folder)}: {error.strerror}"
        raise FFNError(why, "name a file: --save FILE.csv", ExitCode.ENVIRONMENT) from None
    host = re.sub(r"[^\w-]+", "-", platform.node())[:40].strip("-") or "host"
    which = "" if part is None else f"-{part.index}of{part.count}"
    return folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{host}{which}.csv"


@contextmanager
def new_run(path: Path, request: BenchRequest, force: bool = False, part: GridPart | None = None) -> Iterator[Journal]:
    """Open a new run that writes to `path`, locked. Raises FFNError if `path` cannot be written."""
    import secrets

    from ffncli.bench.judge.summary import summarise

    now = datetime.now(UTC)
    run = {
        "run_id": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}",
        "started_utc": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": head_commit(Path.cwd()),
    }
    grid = None if part is None else whole_grid(request, part.count)
    mine = request if grid is None or part is None else grid.request_of(part)
    with locked(path):
        same = software() if mine.cluster is None else {"ffncli": __version__}  # other machines measure
        stored = None if grid is None else grid_bytes(grid)
        opened = journals.begin(path, mine, run, same, summarise, force, stored)
        try:
            yield opened
        finally:
            if not opened.count and mine.cases:
                opened.discard()


@contextmanager
def resumed(path: Path) -> Iterator[Journal]:
    """Open the unfinished run of `path`, locked. Raises FFNError if there is none, or if conditions have changed."""
    from ffncli.bench.judge.summary import summarise

    with locked(path):
        opened = journals.resume(path, summarise)
        require_same("its run began with", opened.software, software())
        for name, digest in opened.request.files.items():
            if sha256(Path(name)) != digest:
                raise changed(f"{shown_path(Path(name))} has changed since its run began")
        yield opened
