"""A benchmark's progress, here and on other machines: a bar in a terminal, otherwise a line now and then."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ffncli.bench.launchers.deal import Dealt
from ffncli.bench.records import Case, Stage
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.suite import RunProgress
from ffncli.show.color import Advance, progress, shows_bar
from ffncli.show.output import Output, print_error
from ffncli.show.text import plural, seconds_text

_START = 5.0  # seconds that a worker takes to load torch
_PATIENCE = 10.0  # seconds after which a line names a slow step; doubled after each such line


@dataclass
class UnitProgress(RunProgress):
    """Displays the progress of a run.

    If there is no bar, `line` prints a line after every tenth of the units, and whenever a step takes long.
    """

    request: BenchRequest
    done: int
    advance: Advance
    line: Callable[[str], None]
    now: Callable[[], float] = monotonic
    count: int = field(init=False)
    start: float = field(init=False)
    patience: float = field(init=False, default=_PATIENCE)
    stage: Stage | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.count, self.start = self.done, self.now()

    def finished(self, process: int, case: Case) -> None:
        """Count one more finished unit."""
        units = self.request.units
        self.count += 1
        self.advance(1)
        if self.count % max(1, units // 10) == 0 or self.count == units:
            left = (self.now() - self.start) / (self.count - self.done) * (units - self.count)
            self.line(
                f"process {process + 1} of {self.request.method.processes}, {self.count} of {units} units done"
                + (f", about {seconds_text(left)} left" if self.count < units else "")
            )

    def at(self, stage: Stage, seconds: float) -> None:
        """Show a worker's current stage and how long it has been running."""
        if stage != self.stage:
            self.stage, self.patience = stage, _PATIENCE
        text = f"{self._case(stage.case)}: {stage.doing}" + (f" {stage.kernel}" if stage.kernel else "")
        took = f" ({seconds_text(seconds)})" if seconds >= 1 else ""
        self.advance.doing(text + took)
        if seconds >= self.patience:
            self.line(text + took)
            while seconds >= self.patience:
                self.patience *= 2

    def _case(self, case: Case) -> str:
        """Return text such as `case 1/3, 1 token`."""
        cases = self.request.cases
        return f"case {cases.index(case) + 1}/{len(cases)}, {case.tokens} {plural('token', case.tokens)}"


@contextmanager
def unit_progress(request: BenchRequest, done: int, output: Output) -> Iterator[UnitProgress]:
    """Display the progress of a run with `done` units already finished, after a note on the expected time."""
    method, count = request.method, len(request.cases)
    if left := request.units - done:
        expected = left / request.units * (count * method.max_time + method.processes * _START)
        most = f"about {seconds_text(expected)}; less if --precision is reached, more if kernels compile"
        processes = "1 process" if method.processes == 1 else f"{method.processes} processes"
        output.note(f"{count} {plural('case', count)} in {processes}: {most}")
    bar = shows_bar(output.quiet)
    with progress(request.units, "measuring", output.quiet, output.color) as advance:
        advance(done)
        silent = bar or output.quiet
        yield UnitProgress(request, done, advance, (lambda text: None) if silent else print_error)


_MOST_LINES = 60  # maximum number of lines for finished cases
_LEAST_COLUMNS, _BAR_COLUMNS = 30, 50  # minimum width of the text next to the bar; width of the rest of its line


@dataclass
class ClusterProgress:
    """Progress of a run on other machines: a bar in a terminal, otherwise one line per finished case."""

    advance: Advance
    line: Callable[[str], None]
    news: Callable[[str], None]
    width: int | None = None
    finished: int | None = field(init=False, default=None)

    def __call__(self, dealt: Dealt) -> None:
        """Display the current progress."""
        if dealt.news:
            self.news(dealt.news)
        text = who_does_what(dealt)
        self.advance.doing(text if self.width is None or len(text) <= self.width else text[: self.width - 1] + "…")
        if self.finished is None:
            self.finished = dealt.finished
            self.advance(dealt.finished)
            return
        step = max(1, dealt.cases // _MOST_LINES)
        if dealt.finished > self.finished:
            self.advance(dealt.finished - self.finished)
            self.finished = dealt.finished
            if dealt.finished % step == 0 or dealt.finished == dealt.cases:
                self.line(text)


def who_does_what(dealt: Dealt) -> str:
    """Return text such as `3 of 60 · node7, slot 1: 512x2048:swiglu, 32 tokens · node8, slot 2: ...`."""
    running = [f"{place}: {_named(case)}" for place, case in sorted(dealt.running.items())]
    waiting = [] if running or dealt.finished == dealt.cases else ["waiting for a machine"]
    return " · ".join([f"{dealt.finished} of {dealt.cases}", *running, *waiting])


def _named(case: Case) -> str:
    return f"{case.label}, {case.tokens} {plural('token', case.tokens)}"


@contextmanager
def cluster_progress(request: BenchRequest, output: Output) -> Iterator[ClusterProgress]:
    """Display the progress of a run on the machines of a launcher."""
    bar = shows_bar(output.quiet)
    silent = output.quiet
    width = max(_LEAST_COLUMNS, shutil.get_terminal_size().columns - _BAR_COLUMNS) if bar else None

    def nothing(text: str) -> None:
        pass

    with progress(len(request.cases), "measuring", output.quiet, output.color) as advance:
        yield ClusterProgress(
            advance, nothing if bar or silent else print_error, nothing if silent else print_error, width
        )
