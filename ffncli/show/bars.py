"""A histogram as one line of block characters (`encodable` has ASCII for them)."""

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
