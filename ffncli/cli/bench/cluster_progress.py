"""The progress of a grid over machines: which machine measures what, in a bar or in lines."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field

from ffncli.bench.launchers.deal import Dealt
from ffncli.bench.records import Case
from ffncli.bench.request.grid import BenchRequest
from ffncli.dataclass import dataclass
from ffncli.show.output import Output, print_error
from ffncli.show.progress import Advance, progress, shows_bar
from ffncli.show.text import plural

_MOST_LINES = 60  # of finished cases
_LEAST_COLUMNS, _BAR_COLUMNS = 30, 50  # of the text next to the bar, and of the rest of its line


@dataclass
class ClusterProgress:
    """The callback of a run: a bar in a terminal (then `line` prints only news), else a line for finished cases."""

    advance: Advance
    line: Callable[[str], None]
    news: Callable[[str], None]
    width: int | None = None
    finished: int | None = field(init=False, default=None)

    def __call__(self, dealt: Dealt) -> None:
        """Show how far the run is."""
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
    """`3 of 60 · node7, slot 1: 512x2048:swiglu, 32 tokens · node8, slot 2: ...`."""
    running = [f"{place}: {_named(case)}" for place, case in sorted(dealt.running.items())]
    waiting = [] if running or dealt.finished == dealt.cases else ["waiting for a machine"]
    return " · ".join([f"{dealt.finished} of {dealt.cases}", *running, *waiting])


def _named(case: Case) -> str:
    return f"{case.label}, {case.tokens} {plural('token', case.tokens)}"


@contextmanager
def cluster_progress(request: BenchRequest, output: Output) -> Iterator[ClusterProgress]:
    """Shows the progress of a run on the machines of a launcher."""
    bar = shows_bar(output.quiet)
    silent = output.quiet
    width = max(_LEAST_COLUMNS, shutil.get_terminal_size().columns - _BAR_COLUMNS) if bar else None

    def nothing(text: str) -> None:
        pass

    with progress(len(request.cases), "measuring", output.quiet, output.color) as advance:
        yield ClusterProgress(
            advance, nothing if bar or silent else print_error, nothing if silent else print_error, width
        )
