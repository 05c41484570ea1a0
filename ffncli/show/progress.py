"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, what: str, quiet: bool = False, color: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how much of `total` has been done since; it is gone when the work ends.

    Nothing is shown in a pipe, in a terminal that cannot go back in a line, or where `quiet`.
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", None):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, no_color=True if not color else None)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
