"""An interval as a bar of text: its ends and its value lie where their shares say."""

from __future__ import annotations

import pytest

from ffncli.show.bars import interval_bar


@pytest.mark.parametrize(
    ("shares", "mark", "bar"),
    [
        ((0.0, 0.5, 1.0), 0.25, "├────●────┤"),
        ((0.2, 0.3, 0.4), 0.8, "  ├●┤   │  "),
        ((None, 0.5, None), 0.0, "│    ●     "),
        ((0.5, 0.5, 0.5), 1.0, "     ●    │"),
    ],
)
def test_an_interval_bar(shares: tuple[float | None, float, float | None], mark: float, bar: str) -> None:
    assert interval_bar(*shares, mark, 11) == bar
