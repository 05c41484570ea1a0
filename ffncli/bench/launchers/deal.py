"""The parent process of a grid over machines. It gives each slot (a place on a machine that measures one
case at a time) its next case, and stores the answers.

A case is the smallest unit of distribution: all its kernels and processes run in one slot, so that every ratio comes
from one machine. Answers are stored in the journal; a case that is lost with its machine is queued again.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ffncli.bench.launchers.slot import SlotEvent, Slots, task_of, units_of
from ffncli.bench.records import Case, Outcome, TimedUnit
from ffncli.bench.request.machines import LauncherChoice, SlotSize, slot_size
from ffncli.bench.results.journal import Journal, require_unit_of
from ffncli.bench.suite import Result
from ffncli.errors import ExitCode, FFNError, clean

MOST_TRIES = 3  # for a case that is lost with its machine
_PATIENCE = 1.0  # s to wait for events of the slots
_LONGEST_REASON = 200  # maximum characters of a launcher's message
_START = 30.0  # s per process, for a busy machine to load torch and verify the kernels


@dataclass(frozen=True)
class Dealt:
    """The progress of a run: finished cases, the slots of the running cases, and `news` if one is lost or refused."""

    finished: int
    cases: int
    running: Mapping[str, Case]
    news: str = ""


def run_on_cluster(journal: Journal, tell: Callable[[Dealt], None] = lambda dealt: None) -> Result:
    """Measure every unfinished case in the slots of the request's cluster; the journal is deleted at the end.

    Raises FFNError if the cluster cannot be used; finished cases are kept.
    """
    request = journal.request
    assert request.cluster is not None
    if all(journal.complete(case.key) for case in request.cases):
        return _finished(journal)
    logs = journal.files.csv.with_suffix(f".{request.cluster.launcher}")
    # Three times the expected time of a case, as a first call may compile.
    seconds = 3 * (request.method.max_time + request.method.processes * _START)
    with open_slots(request.cluster, slot_size(request.cases), seconds, logs) as slots:
        return run_in_slots(journal, slots, tell)


def open_slots(cluster: LauncherChoice, size: SlotSize, seconds: float, logs: Path) -> AbstractContextManager[Slots]:
    """Open the slots of the cluster; a case takes about `seconds`, and `logs` is a folder for a launcher that writes
    files.

    Raises FFNError (exit 3) if the launcher's package is missing, or if the cluster cannot be reached.
    """
    if cluster.launcher == "ray":
        from ffncli.bench.launchers.ray_slots import ray_slots

        return ray_slots(cluster, size)
    from ffncli.bench.launchers.slurm_slots import slurm_slots

    return slurm_slots(cluster, size, seconds, logs)


def run_in_slots(journal: Journal, slots: Slots, tell: Callable[[Dealt], None] = lambda dealt: None) -> Result:
    """Measure every unfinished case in the slots; the rows are in the order of the cases.

    A machine that refuses a case ends the run (FFNError), once the cases that are running elsewhere are finished.
    """
    todo = deque(case for case in journal.request.cases if not journal.complete(case.key))
    dealing = _Dealing(journal, tell, {case.key: case for case in todo}, todo)
    dealing.report()
    # After a refusal, wait only for the cases that are already running.
    while dealing.places if dealing.refusal is not None else dealing.todo or dealing.submitted:
        while dealing.todo and slots.free and dealing.refusal is None:
            case = dealing.todo.popleft()
            dealing.submitted.add(case.key)
            slots.submit(case.key, task_of(journal.request, case))
        events = slots.events(_PATIENCE)
        for event in events:
            dealing.take(event)
        if events and not (dealing.todo and slots.free):  # free slots first get their next case
            dealing.report()
    if dealing.refusal is not None:
        raise dealing.refusal
    return _finished(journal)


def _finished(journal: Journal) -> Result:
    journal.finish()
    order = {case.key: at for at, case in enumerate(journal.request.cases)}
    rows = sorted(journal.rows, key=lambda row: order[row.case])
    return Result(tuple(rows), journal.request, journal.files.csv, journal.files.rounds)


@dataclass
class _Dealing:
    """A run in progress: the queued cases, the cases submitted to slots, and how often each case was lost."""

    journal: Journal
    tell: Callable[[Dealt], None]
    cases: Mapping[str, Case]
    todo: deque[Case]
    submitted: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)  # case → where it runs
    losses: Counter[str] = field(default_factory=Counter)
    refusal: FFNError | None = None

    def take(self, event: SlotEvent) -> None:
        """Handle an event; ignore an event of a case that is no longer in a slot."""
        if event.case not in self.submitted:
            return
        if event.kind == "started":
            self.places[event.case] = event.place
            return
        self.submitted.discard(event.case)
        self.places.pop(event.case, None)
        if event.kind == "answered":
            self._answered(event.case, event.place, event.text)
        elif event.kind == "lost":
            self._lost(event.case, event.place, _shortened(event.text))
        else:
            self._refused(FFNError(f"{clean(event.place)}: {_shortened(event.text)}", code=ExitCode.ENVIRONMENT))

    def report(self, news: str = "") -> None:
        cases = self.journal.request.cases
        finished = sum(self.journal.complete(case.key) for case in cases)
        running = {place: self.cases[key] for key, place in self.places.items()}
        self.tell(Dealt(finished, len(cases), running, news))

    def _answered(self, key: str, place: str, answer: str) -> None:
        """Store the units of a case; end the run if the answer is a refusal or does not belong to the case."""
        case, request, where = self.cases[key], self.journal.request, f"the answer of {clean(place)}"
        try:
            units = units_of(answer, place)
            for unit, _ in units:
                require_unit_of(request, case, unit, where)
            processes = [unit.process for unit, _ in units]
            died = [at for at, (_, one) in enumerate(units) if one]
            if processes != [*range(len(units))] or died not in ([], [len(units) - 1]):
                raise FFNError(f"{where} is damaged: its processes are not in order")
            if not died and len(units) != request.method.processes:
                raise FFNError(f"{where} is damaged: it has {len(units)} of {request.method.processes} processes")
        except FFNError as error:
            self._refused(error)
            return
        for unit, died_there in units:
            self.journal.add(unit, died_there)

    def _lost(self, key: str, place: str, why: str) -> None:
        """Queue the case again or, after too many losses, store failed rows with the reason."""
        self.losses[key] += 1
        news = f"{clean(place)} was lost with {key}: {why}"
        if self.losses[key] < MOST_TRIES:
            self.todo.append(self.cases[key])
            self.report(f"{news}; it will be run again")
            return
        case, request = self.cases[key], self.journal.request
        note = f"lost {self.losses[key]} times with its machine; the last: {why}"
        outcomes = tuple(Outcome(name, "failed", note) for name in request.names)
        environment = {**self.journal.software, "device": case.device}  # without the lost machines
        unit = TimedUnit(0, key, request.baseline, case.cache, outcomes, (), environment=environment)
        self.journal.add(unit, died=True)
        self.report(f"{news}; it will not be run again")

    def _refused(self, error: FFNError) -> None:
        self.refusal = self.refusal or error
        self.report(f"{error.message}; no more cases are started")


def _shortened(text: str) -> str:
    """Return a launcher's message as one line, shortened."""
    line = " ".join(clean(text.replace("\n", " ")).split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"
