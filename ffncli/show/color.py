"""Whether to use colour; the few styles of all output, as escape codes; a progress bar on a terminal's stderr."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from ffncli.errors import FFNError, shown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


Paint = Callable[[str, str], str]  # (text, style) → the styled text
COLORS = ("auto", "always", "never")
ColorChoice = Literal["auto", "always", "never"]
_CODES = {
    "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36,
    "bright_black": 90,
}  # fmt: skip
# Visible on black and on white; "" is the default text colour.
_CURVES = ("cyan", "magenta", "green", "red", "yellow", "blue", "", "bright_black")


def color_choice(text: str) -> ColorChoice:
    """Parse a value of --color. Raises FFNError for any other string."""
    for choice in COLORS:
        if text == choice:
            return choice  # type: ignore[return-value]
    raise FFNError(f"--color: unknown value {shown(text)}", f"use {', '.join(COLORS[:-1])} or {COLORS[-1]}")


def is_colored(stream: TextIO | None, choice: ColorChoice = "auto") -> bool:
    """Return True if text for `stream` is coloured. This is decided by --color, then NO_COLOR (no-color.org), then
    FORCE_COLOR and CLICOLOR_FORCE (bixense.com/clicolors), then by whether the stream is a terminal that supports
    colour.

    An empty variable counts as unset; 0 forces nothing.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str) -> str:
    """Wrap `text` in the escape codes of a style ("" for none); trailing spaces stay outside."""
    bare = text.rstrip()
    return f"\x1b[{_CODES[style]}m{bare}\x1b[0m{text[len(bare) :]}" if style and bare else text


def unpainted(text: str, style: str) -> str:
    """Return `text` unchanged: the paint function for output without colour."""
    return text


def sign_style(value: float) -> str:
    """Return a number's style: red below 0, green above, dim for 0 and NaN."""
    if math.isnan(value):
        return "dim"
    return "red" if value < 0 else "dim" if value == 0 else "green"


def curve_style(style: int | str) -> str:
    """Return the name of a style in a plot; an integer stands for the colour of the curve with this index."""
    return _CURVES[style % len(_CURVES)] if isinstance(style, int) else style


@dataclass(frozen=True)
class Advance:
    """A function to call with the progress since its last call; `doing` says what is being done, if there is a bar."""

    bar: Progress | None = None
    task: TaskID | None = None

    def __call__(self, done: int) -> None:
        """Add this much progress."""
        if self.bar is not None and self.task is not None:
            self.bar.advance(self.task, done)

    def doing(self, what: str) -> None:
        """Set the description in front of the bar."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=what)


@contextmanager
def progress(total: int, what: str, quiet: bool = False, color: ColorChoice = "auto") -> Iterator[Advance]:
    """Yield a function to call with each additional part of `total`; the bar disappears when the work ends.

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
    """Return True if `progress` shows anything here."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", None)
