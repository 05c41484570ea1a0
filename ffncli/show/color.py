"""Whether to use colour, and the few styles of all output, as escape codes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Literal, TextIO

from ffncli.errors import FFNError, shown

Paint = Callable[[str, str], str]  # a text and its style → the text, styled
COLORS = ("auto", "always", "never")
ColorChoice = Literal["auto", "always", "never"]
_CODES = {
    "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36,
    "bright_black": 90,
}  # fmt: skip
# Visible on black and on white; "" is the colour of text.
_CURVES = ("cyan", "magenta", "green", "red", "yellow", "blue", "", "bright_black")


def color_choice(text: str) -> ColorChoice:
    """`text` as a value of --color. Raises FFNError for any other."""
    for choice in COLORS:
        if text == choice:
            return choice  # type: ignore[return-value]
    raise FFNError(f"--color: unknown value {shown(text)}", f"use {', '.join(COLORS[:-1])} or {COLORS[-1]}")


def is_colored(stream: TextIO | None, choice: ColorChoice = "auto") -> bool:
    """Whether text for `stream` has colours: --color decides, then NO_COLOR (no-color.org), then FORCE_COLOR and
    CLICOLOR_FORCE (bixense.com/clicolors), then whether it is a terminal that can show them.

    A variable that is empty counts as unset; 0 forces nothing.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str) -> str:
    """`text` between the escape codes of a style, "" for none; trailing spaces stay outside."""
    bare = text.rstrip()
    return f"\x1b[{_CODES[style]}m{bare}\x1b[0m{text[len(bare) :]}" if style and bare else text


def unpainted(text: str, style: str) -> str:
    """`text` unchanged: the paint function without colour."""
    return text


def sign_style(value: float) -> str:
    """A number's style: red below 0, green above, dim for 0 and NaN."""
    if math.isnan(value):
        return "dim"
    return "red" if value < 0 else "dim" if value == 0 else "green"


def curve_style(style: int | str) -> str:
    """A plot's style by name: a curve's number is its colour."""
    return _CURVES[style % len(_CURVES)] if isinstance(style, int) else style
