"""Text that is safe (no control characters of somebody else's) and aligned (columns as a terminal counts them); a
histogram, or an interval, as one line of characters (`encodable` has ASCII for them).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from math import isfinite

from ffncli.errors import UNSAFE

_ASCII = str.maketrans({
    "·": "*", "⊙": "*", "×": "x", "…": "...", "ᵀ": "^T", "Σ": "sum", "−": "-", "→": "->", "│": "|", "√": "sqrt",
    "Φ": "Phi", "σ": "sigma", "α": "alpha", "²": "^2", "³": "^3", "─": "-", "≤": "<=", "▶": ">", "ε": "eps",
    "π": "pi", "∞": "inf", "∂": "d", "±": "+-", "≥": ">=", "≠": "!=", "₊": "+", "₋": "-", "ˣ": "^x", "⁻": "^-",
    "‖": "|", "▁": ".", "▂": ":", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "#", "█": "@", "µ": "u",
})  # fmt: skip


def json_safe(text: str) -> str:
    """JSON text in which characters that are safe in JSON but not in terminals are written as `\\u....`."""
    return UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else json.dumps(match[0])[1:-1], text)


def encodable(text: str, encoding: str) -> str:
    """`text` for an output that may not support our symbols: those become ASCII, other characters a question mark."""
    try:
        text.encode(encoding)
        return text
    except (UnicodeEncodeError, LookupError):
        return text.replace("⁻ˣ", "^-x").translate(_ASCII).encode("ascii", "replace").decode("ascii")


def width(text: str) -> int:
    """The terminal columns of `text`."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, columns: int, right: bool = False) -> str:
    """`text` padded with spaces to `columns`; `right` aligns it to the right."""
    space = " " * max(0, columns - width(text))
    return space + text if right else text + space


def folded(text: str, columns: int) -> str:
    """`text` in lines of at most this many columns, broken at spaces; a word that is longer stays whole."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and width(f"{lines[-1]} {word}") > columns:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return "\n".join(lines)


def percent(share: float, digits: int = 3) -> str:
    """`12.3 %` of a share of 1: this many digits, or as many as are before the decimal point."""
    value = 100 * share
    return f"{value:.{digits}g} %" if value < 10**digits - 0.5 else f"{value:.0f} %"


def in_percent(share: float | None) -> float | None:
    """A share of 1 as a cell of a column in %: two decimals."""
    return None if share is None else round(100 * share, 2)


def plural(noun: str, count: int) -> str:
    """`token` of one, else `tokens`."""
    return noun if count == 1 else f"{noun}s"


def finite(value: float) -> float | None:
    """A figure for a column or JSON: None if it is infinite or not a number."""
    return value if isfinite(value) else None


def bytes_text(size: int) -> str:
    """`112.7 GB`: four digits and the decimal unit; below 1000 bytes `768 B`."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= 0.99995 * one:  # a value that would round up to the unit uses it
            return f"{size / one:#.4g} {unit}"
    return f"{size} B"


def time_text(seconds: float | None) -> str | None:
    """`12.3 ms`: three digits and the unit, from s to ns."""
    if seconds is None:
        return None
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, size = next(((u, s) for u, s in units if seconds >= 0.9995 * s), ("ns", 1e-9))  # 0.9996 ms is 1.00 ms
    return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"


def seconds_text(seconds: float) -> str:
    """A duration in words: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def aligned(rows: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """Rows of cells as lines: columns of these widths, two spaces between them, those of numbers to the right."""
    columns = list(zip(widths, right, strict=True))
    return ["  ".join(pad(cell, *column) for cell, column in zip(row, columns, strict=True)).rstrip() for row in rows]


def interval(low: str | None, high: str | None, closed: tuple[bool, bool]) -> str:
    """`[-0.1700, ∞)`: None means no bound; a square bracket marks a bound that is reached."""
    left = "(-∞" if low is None else f"{'[' if closed[0] else '('}{low}"
    return f"{left}, ∞)" if high is None else f"{left}, {high}{']' if closed[1] else ')'}"


_BLOCKS = "▁▂▃▄▅▆▇█"
_FEWEST = 6


def bars(counts: Sequence[int]) -> str:
    """`▁▃▆█▅▂▁`, as high as the counts, the fullest bin a full block; an empty bin is a space.

    Neighbours are merged if there are fewer than three values per bar on average; empty if even 6 bars
    would have no more.
    """
    while len(counts) > _FEWEST and sum(counts) < 3 * len(counts):
        counts = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)]
    if not counts or sum(counts) < 3 * len(counts):
        return ""
    most = max(counts)
    return "".join(_BLOCKS[-(-len(_BLOCKS) * n // most) - 1] if n else " " for n in counts)


def interval_bar(low: float | None, value: float, high: float | None, mark: float, columns: int) -> str:
    """`  ├──●──┤  │  `: an interval and the value in it, with a mark, all as shares of the line's `columns`."""
    line = [" "] * columns

    def place(share: float) -> int:
        return min(columns - 1, max(0, round(share * (columns - 1))))

    line[place(mark)] = "│"
    if low is not None and high is not None:
        start, stop = place(low), place(high)
        line[start : stop + 1] = "─" * (stop + 1 - start)
        line[start], line[stop] = "├", "┤"
    line[place(value)] = "●"
    return "".join(line)
