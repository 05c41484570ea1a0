"""A plot as text: what stands where, in Braille and in ASCII, in a pipe, in a terminal, in Markdown."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ffncli.errors import clean
from ffncli.show.output import Output
from ffncli.show.parts import Answer
from ffncli.show.plots.braille import drawn
from ffncli.show.plots.plot import Plot, Series
from ffncli.show.tables import Table
from ffncli.show.terminal import Terminal
from ffncli.show.text import width

XS = [-3 + 6 * i / 240 for i in range(241)]
SINES = Plot(
    "Waves",
    "angle",
    "height",
    [Series("sine", [(x, math.sin(x)) for x in XS]), Series("line", [(x, x / 3) for x in XS])],
)


def text(plot: Plot, columns: int = 80, encoding: str = "utf-8") -> list[str]:
    return ["".join(part for part, _ in line) for line in drawn(plot, columns, encoding)]


def inside(lines: list[str], edge: str = "│┤") -> list[str]:
    """The frame alone."""
    return [re.split(f"[{edge}]", line, maxsplit=1)[1] for line in lines if re.match(rf"^ *[-.0-9e]* ?[{edge}]", line)]


def test_a_plot_says_what_it_shows():
    lines = text(SINES)
    assert lines[0] == "Waves"
    assert lines[1].strip() == "height"
    assert lines[-2].strip() == "angle"
    assert lines[-1] == "  a sine   b line"
    assert lines[-3].split() == ["-3", "-2", "-1", "0", "1", "2", "3"]
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["1.0", "0.5", "0.0", "-0.5", "-1.0"]


def test_labels_stand_at_their_values():
    """-3 and 3 are the ends; every other label's tick is as far between them as its value."""
    lines = text(SINES)
    bottom, labels = lines[-4], lines[-3]
    ticks = [at for at, mark in enumerate(bottom) if mark == "┬"]
    first, last = ticks[0], ticks[-1]
    assert (first, last) == (bottom.index("└") + 1, 79)
    for at, value in zip(ticks, range(-3, 4), strict=True):
        assert abs(at - (first + (last - first) * (value + 3) / 6)) <= 1
        found = [m for m in re.finditer(r"-?\d", labels) if m[0] == str(value)]
        assert any(m.start() - 1 <= at <= m.end() for m in found)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_curves_are_where_they_are_in_numbers(encoding):
    """Letters are on their own curve; with ASCII, every character of a curve is one."""
    frame = inside(text(SINES, encoding=encoding), "│┤|+")[:16]  # then the lower edge
    assert len(frame) == 16
    found = {"a": [], "b": []}
    for row, line in enumerate(frame):
        for column, mark in enumerate(line.rstrip()):
            if mark in found:
                found[mark].append((-3 + 6 * (column + 0.5) / len(line), 1 - 2 * (row + 0.5) / 16))
    cell = 6 / 70
    for name, f in (("a", math.sin), ("b", lambda x: x / 3)):
        assert len(found[name]) >= (60 if encoding == "ascii" else 3)
        for x, y in found[name]:
            assert min(abs(f(x + d * cell) - y) for d in (-1, 0, 1)) <= 2 / 16


def test_zero_has_a_line_where_it_lies_inside():
    frame = inside(text(SINES))
    assert sum("·" in line for line in frame) >= 12
    assert any(line.count("·") > 10 for line in frame)
    away = Plot("", "x", "y", [Series("a", [(1.0, 5.0), (2.0, 6.0)])])
    assert not any("·" in line for line in text(away))


def test_a_log_axis_is_straight_for_a_power():
    widths = [2**i for i in range(7)]
    plot = Plot("", "width", "error", [Series("x", [(w, 0.1 * w**-2.0) for w in widths])], True, True, marks=True)
    lines = text(plot)
    assert lines[-3].split() == [str(w) for w in widths]
    marks = [(line.index("a"), row) for row, line in enumerate(lines[:-1]) if "a" in line]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(marks)]
    assert len(marks) == 7
    assert max(slopes) - min(slopes) < 0.09  # a character more or less, of 12 from mark to mark


def test_what_cannot_be_shown_on_a_log_axis_is_left_out():
    plot = Plot("", "x", "y", [Series("a", [(1, 0.0), (2, 1e-3), (3, 1e-2)]), Series("never", [(1, -1.0)])], log_y=True)
    assert any("0.001" in line for line in text(plot))
    assert text(plot)[-1] == "  a a   b never"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [Series("none", [])],
        [Series("lost", [(0.0, math.nan), (math.inf, 1.0)])],
    ],
)
def test_a_plot_of_nothing_says_so(lines):
    assert text(Plot("Title", "x", "y", lines)) == ["Title", "  no points to draw"]


@pytest.mark.parametrize("y", [0.0, 1.0, -5e-324, 1.7e308, -1.7e308, 1e-300])
def test_a_flat_curve_is_a_flat_line(y):
    frame = inside(text(Plot("", "x", "y", [Series("flat", [(0.0, y), (1.0, y)])])))
    # The rows that hold a curve: one.
    assert sum(bool(re.search("[a⠁-⣿]", line)) for line in frame) == 1


def test_many_curves_have_a_legend_in_several_lines():
    lines = text(Plot("", "x", "y", [Series(f"function{i}", [(0, i), (1, i)]) for i in range(30)]))
    legend = " ".join(lines[-6:])
    assert all(f"function{i}" in legend for i in range(30))
    assert all(len(line) <= 80 for line in lines)


def test_a_frame_cuts_off_what_leaves_it():
    steep = Plot("", "x", "y", [Series("steep", [(x, 100 * x) for x in XS])], frame=(-1.0, 1.0))
    labels = [line.split("┤")[0].strip() for line in text(steep) if "┤" in line]
    assert (labels[0], labels[-1]) == ("1.0", "-1.0")


LONG = Plot("t" * 200, "x" * 200, "激活" * 100, [Series("n" * 200, [(-1e-300, 1.0), (1e300, 123456.7)])] * 3)
NAMES = st.text(max_size=200)
POINTS = st.lists(st.tuples(st.floats(), st.floats()), max_size=8)


@example(LONG, 40, "utf-8")
@example(LONG, 81, "ascii")
@given(
    st.builds(
        Plot, title=NAMES, x=NAMES, y=NAMES, lines=st.lists(st.builds(Series, NAMES, POINTS), max_size=4),
        log_x=st.booleans(), log_y=st.booleans(), marks=st.booleans(),
    ),
    st.integers(40, 140),
    st.sampled_from(["utf-8", "ascii", "latin-1"]),
)  # fmt: skip
def test_anything_is_drawn_within_its_width_and_encoding(plot, columns, encoding):
    for line in text(plot, columns, encoding):
        assert width(line) <= columns
        assert clean(line) == line
        line.encode(encoding)


# --- in the formats ---------------------------------------------------------------------------------------------------

PAGE = Answer("demo", {}, Table(("a",), [(1,)]), [Table(("a",), [(1,)]), SINES])


def test_a_pipe_gets_the_picture_without_escapes(capsys):
    Output().show(PAGE)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines()[-1] == "  a sine   b line"
    assert [line.rstrip() for line in text(SINES)] == out.splitlines()[-len(text(SINES)) :]


def test_markdown_keeps_it_in_a_block(capsys):
    Output(format="md").show(PAGE)
    before, block, after = capsys.readouterr().out.split("```")
    assert block.startswith("text\nWaves\n")
    assert block.endswith("b line\n")
    assert "Waves" not in before + after


@pytest.mark.parametrize("format", ["json", "csv"])
def test_machines_get_no_picture(capsys, format):
    Output(format=format).show(PAGE)
    assert "Waves" not in capsys.readouterr().out


def test_a_terminal_gets_colour_where_it_may(capsys, monkeypatch):
    """A colour per curve; without colours the same characters."""
    import sys

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    Terminal(sys.stdout, color=True).show([SINES])
    coloured = capsys.readouterr().out
    assert "\x1b[36ma sine" in coloured
    assert "\x1b[35mb line" in coloured
    Terminal(sys.stdout, color=False).show([SINES])
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == capsys.readouterr().out


def test_the_console_of_linux_has_no_braille(capsys, monkeypatch):
    import sys

    monkeypatch.setenv("TERM", "linux")
    Terminal(sys.stdout, color=True).show([SINES])
    assert capsys.readouterr().out.isascii()
