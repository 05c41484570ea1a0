"""A progress bar on stderr, if that is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ffncli.dataclass import dataclass
from ffncli.show.color import ColorChoice, is_colored

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(frozen=True)
class Advance:
    """Called with the progress since the last call. `doing` names the current work; without a bar both do nothing."""

    bar: Progress | None = None
    task: TaskID | None = None

    def __call__(self, done: int) -> None:
        """Add this much progress."""
        if self.bar is not None and self.task is not None:
            self.bar.advance(self.task, done)

    def doing(self, what: str) -> None:
        """Set the text next to the bar."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=what)


@contextmanager
def progress(total: int, what: str, quiet: bool = False, color: ColorChoice = "auto") -> Iterator[Advance]:
    """Yields a function to call with each further part of `total`; the bar disappears when the work ends.

    Nothing is shown in a pipe, in a terminal that cannot move the cursor back, or if `quiet`.
    """
    if not shows_bar(quiet):
        yield Advance()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, no_color=not is_colored(sys.stderr, color))
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield Advance(bar, bar.add_task(what, total=total))


def shows_bar(quiet: bool = False) -> bool:
    """Whether `progress` shows anything here."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", None)
