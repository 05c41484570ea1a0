"""A histogram, or an interval, as one line of characters (`encodable` has ASCII for them)."""

from __future__ import annotations

from collections.abc import Sequence

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
