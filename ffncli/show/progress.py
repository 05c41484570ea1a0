"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ffncli.show.color import ColorChoice, is_colored


@contextmanager
def progress(
    total: int, what: str, quiet: bool = False, color: ColorChoice = "auto"
) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how much of `total` has been done since; it is gone when the work ends.

    Nothing is shown in a pipe, in a terminal that cannot go back in a line, or where `quiet`.
    """
    if not shows_bar(quiet):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, no_color=not is_colored(sys.stderr, color))
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def shows_bar(quiet: bool = False) -> bool:
    """Whether `progress` shows anything here."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", None)


def seconds_text(seconds: float) -> str:
    """A span as one says it: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
