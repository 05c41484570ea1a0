"""A page with a line per check: PASS, FAIL or SKIP, its name, and why."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.show.parts import Line, Part
from ffncli.show.text import pad

ShortLine = tuple[str, str, str]  # PASS, FAIL or SKIP; the check or the kernel; why


def short_lines(lines: Sequence[ShortLine]) -> list[Part]:
    """The lines, their names in one column."""
    width = max((len(name) for _, name, _ in lines), default=0)
    return [Line(f"{word}  {pad(name, width)}  {text}".rstrip(), quiet=word == "SKIP") for word, name, text in lines]
