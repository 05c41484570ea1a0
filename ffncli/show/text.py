"""Makes text safe (no control characters from other people's strings) and aligns it in terminal columns. Also draws
histograms and intervals as one line of characters, which `encodable` can replace by ASCII."""

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
    """Escape characters in JSON text that are safe in JSON but not in terminals, as `\\u....`."""
    return UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else json.dumps(match[0])[1:-1], text)


def encodable(text: str, encoding: str) -> str:
    """Return `text` for an output that may lack our symbols: these become ASCII, other characters question marks."""
    try:
        text.encode(encoding)
        return text
    except (UnicodeEncodeError, LookupError):
        return text.replace("⁻ˣ", "^-x").translate(_ASCII).encode("ascii", "replace").decode("ascii")


def width(text: str) -> int:
    """Return the number of terminal columns that `text` takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, columns: int, right: bool = False) -> str:
    """Pad `text` with spaces to `columns`; `right` aligns it to the right."""
    space = " " * max(0, columns - width(text))
    return space + text if right else text + space


def folded(text: str, columns: int) -> str:
    """Break `text` at spaces into lines of at most `columns` columns; a longer word stays whole."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and width(f"{lines[-1]} {word}") > columns:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return "\n".join(lines)


def percent(share: float, digits: int = 3) -> str:
    """Return a share of 1 as text such as `12.3 %`, with `digits` digits, or more if the integer part has more."""
    value = 100 * share
    return f"{value:.{digits}g} %" if value < 10**digits - 0.5 else f"{value:.0f} %"


def in_percent(share: float | None) -> float | None:
    """Return a share of 1 as a percentage rounded to two decimals, for a column in %."""
    return None if share is None else round(100 * share, 2)


def rounded(value: float | None, digits: int) -> float | None:
    """Round a figure for a column to `digits` significant digits; None stays None."""
    return None if value is None else float(f"{value:.{digits}g}")


def plural(noun: str, count: int) -> str:
    """Return `token` for a count of 1, otherwise `tokens`."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Return text such as `1 token` or `17 tokens`."""
    return f"{count} {plural(noun, count)}"


def finite(value: float) -> float | None:
    """Return a figure for a column or JSON; None if it is infinite or NaN."""
    return value if isfinite(value) else None


def bytes_text(size: int) -> str:
    """Return text such as `112.7 GB`, with four digits and a decimal unit, or `768 B` below 1000 bytes."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= 0.99995 * one:  # so that a value that rounds up to one unit is shown in it
            return f"{size / one:#.4g} {unit}"
    return f"{size} B"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time is written, and the unit's length in seconds: `("ms", 1e-3)`."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    return next(((u, s) for u, s in units if seconds >= 0.9995 * s), ("ns", 1e-9))  # 0.9996 ms is 1.00 ms


def time_text(seconds: float | None) -> str | None:
    """Return text such as `12.3 ms`, with three digits and a unit from s to ns."""
    if seconds is None:
        return None
    unit, size = time_unit(seconds)
    return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"


def seconds_text(seconds: float) -> str:
    """Return a duration in words: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def aligned(rows: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """Join rows of cells to lines with columns of these widths, two spaces apart; `right` right-aligns them."""
    columns = list(zip(widths, right, strict=True))
    return ["  ".join(pad(cell, *column) for cell, column in zip(row, columns, strict=True)).rstrip() for row in rows]


def interval(low: str | None, high: str | None, closed: tuple[bool, bool]) -> str:
    """Return text such as `[-0.1700, ∞)`: None means no bound, and a square bracket marks a bound that is reached."""
    left = "(-∞" if low is None else f"{'[' if closed[0] else '('}{low}"
    return f"{left}, ∞)" if high is None else f"{left}, {high}{']' if closed[1] else ')'}"


_BLOCKS = "▁▂▃▄▅▆▇█"
_FEWEST = 6


def bars(counts: Sequence[int]) -> str:
    """Return text such as `▁▃▆█▅▂▁`: the fullest bin is a full block, an empty bin is a space.

    Neighbouring bins are merged while there are fewer than three values per bar on average; "" if even 6 bars would
    have fewer.
    """
    while len(counts) > _FEWEST and sum(counts) < 3 * len(counts):
        counts = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)]
    if not counts or sum(counts) < 3 * len(counts):
        return ""
    most = max(counts)
    return "".join(_BLOCKS[-(-len(_BLOCKS) * n // most) - 1] if n else " " for n in counts)


def interval_bar(low: float | None, value: float, high: float | None, mark: float, columns: int) -> str:
    """Return text such as ` ├──●──┤ │ `: an interval, its value and a mark, all given as fractions of the line."""
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
