from __future__ import annotations

import pytest

from ffncli.show.bars import bars
from ffncli.show.text import encodable


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ([8, 7, 6, 5, 4, 3, 2, 1], "█▇▆▅▄▃▂▁"),
        ([800, 1, 0, 400, 401, 0, 0, 800], "█▁ ▄▅  █"),  # something is never nothing
        ([3] * 8, "████████"),
        ([3] * 7 + [2], ""),  # too few to have a form
        ([1] * 32, "████████"),  # 32 values: neighbours together, 4 per bar
        ([2] * 32, "█" * 16),
        ([3] * 32, "█" * 32),
        ([], ""),
    ],
)
def test_as_high_as_the_counts(counts, line):
    assert bars(counts) == line


def test_ascii_keeps_the_heights_apart():
    line = encodable(bars([8, 7, 6, 5, 4, 3, 2, 1]), "ascii")
    assert line.isascii()
    assert (len(line), len(set(line)), "?" in line) == (8, 8, False)
