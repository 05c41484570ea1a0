"""A heat map in text: every cell by its value, in characters and in colours."""

from __future__ import annotations

import io
import math

import pytest

from ffncli.show.heat import HeatMap
from ffncli.show.output import markdown
from ffncli.show.terminal import Terminal

CELLS = [[9.0, -9.0, 0.0, 1.0], [0.4, -4.6, math.nan, -math.inf], [2.0, 3.0, -1.0, 8.6]]


def test_characters_are_nine_steps_each_way() -> None:
    heat = HeatMap(CELLS)
    assert heat.most == 9.0
    assert heat.characters() == ["9i.1", ".e!!", "23a9"]
    assert heat.scale(False) == "a cell: one value; 9 is 9.0000, i is -9.0000, ! NaN or infinite"
    assert HeatMap([[0.0]], 12).characters() == ["."]
    assert HeatMap([[0.0, 1.0]], 12).scale(False).startswith("a cell: the largest of up to 12 values")


def test_colors_of_two_rows_share_a_line() -> None:
    lines = HeatMap(CELLS).colors()
    assert [len(line) for line in lines] == [4, 4]
    assert lines[0][0] == ((90, 160, 255), HeatMap(CELLS).colors()[0][0][1])
    assert lines[0][1][0] == (245, 150, 80)
    assert lines[0][2] == ((70, 70, 70), (255, 60, 200))
    assert [down for _, down in lines[1]] == [None] * 4


@pytest.mark.parametrize("color", [True, False])
def test_a_terminal_shows_half_blocks_where_it_has_colours(color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    terminal = Terminal(stream, color)
    if color:
        terminal.console._color_system = type(terminal.console)(color_system="truecolor")._color_system
    terminal.show([HeatMap(CELLS)])
    stream.seek(0)
    text = stream.read()
    assert text.count("▀") == (8 if color else 0)
    assert ("23a9" in text) is not color
    assert ("blue 9.0000" in text) is color


def test_markdown_has_characters() -> None:
    assert "9i.1\n.e!!\n23a9\n" in markdown([HeatMap(CELLS)])
