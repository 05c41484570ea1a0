"""A plot as text: axes, curves of dots, and what stands where, in Braille and in ASCII, in a pipe and in a terminal."""

import math
import re
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ffncli.errors import clean
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Table
from ffncli.show.plots.braille import dots, drawn, letters, place_of
from ffncli.show.plots.plot import Plot, Series, axis
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


@pytest.mark.parametrize("lines", [[], [Series("none", [])], [Series("lost", [(0.0, math.nan), (math.inf, 1.0)])]])
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


COLUMNS, ROWS = 70, 16
# The dots of a Braille character by their numbers in the Unicode standard, bit n-1 for dot n: 1-3 and 7 are the left
# column from the top, 4-6 and 8 the right one.
NUMBERED = {1: (0, 0), 2: (0, 1), 3: (0, 2), 7: (0, 3), 4: (1, 0), 5: (1, 1), 6: (1, 2), 8: (1, 3)}


def decoded(found: dict[tuple[int, int], int]) -> set[tuple[int, int]]:
    """Dots as (from the left, from the top)."""
    return {
        (2 * column + dx, 4 * row + dy)
        for (column, row), bits in found.items()
        for number, (dx, dy) in NUMBERED.items()
        if bits >> (number - 1) & 1
    }


CURVES = {
    "line": lambda t: t,
    "wave": lambda t: 0.5 + 0.4 * math.sin(9 * t),
    "steep": lambda t: 0.5 + 0.5 * math.tanh(60 * (t - 0.4)),
    "flat": lambda t: 0.25,
    "parabola": lambda t: (2 * t - 1) ** 2,
}


@pytest.mark.parametrize("name", CURVES)
def test_every_dot_is_on_the_curve_and_no_column_is_left_out(name):
    f = CURVES[name]
    found = decoded(dots([(i / 2000, f(i / 2000)) for i in range(2001)], COLUMNS, ROWS))
    wide, high = 2 * COLUMNS - 1, 4 * ROWS - 1
    assert {x for x, _ in found} == set(range(2 * COLUMNS))
    for x, y in found:
        # Somewhere within a dot to the left and to the right the curve passes within a dot of this one.
        near = [(1 - f(min(max((x + d / 20) / wide, 0), 1))) * high for d in range(-20, 21)]
        assert min(near) - 1 <= y <= max(near) + 1, (x, y)


@pytest.mark.parametrize("name", CURVES)
def test_neighbouring_dots_touch(name):
    f = CURVES[name]
    found = decoded(dots([(i / 50, f(i / 50)) for i in range(51)], COLUMNS, ROWS))
    seen, left = set(), [min(found)]
    while left:
        x, y = left.pop()
        if (x, y) in found and (x, y) not in seen:
            seen.add((x, y))
            left += [(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
    assert seen == found


def test_a_point_that_is_not_finite_breaks_the_curve():
    found = decoded(dots([(0, 0.5), (0.4, 0.5), (0.5, math.nan), (0.6, 0.5), (1, 0.5)], COLUMNS, ROWS))
    shares = {x / (2 * COLUMNS - 1) for x, _ in found}
    assert not [x for x in shares if 0.41 < x < 0.59]
    assert min(shares) == 0
    assert max(shares) == 1


def test_what_leaves_the_frame_is_cut_where_it_leaves():
    found = decoded(dots([(0, -1), (1, 2)], COLUMNS, ROWS))  # inside between 1/3 and 2/3
    xs = [x / (2 * COLUMNS - 1) for x, _ in found]
    assert min(xs) == pytest.approx(1 / 3, abs=0.01)
    assert max(xs) == pytest.approx(2 / 3, abs=0.01)
    assert not dots([(0, 1.5), (1, 2)], COLUMNS, ROWS)
    assert not dots([(-3, 0.5), (-1, 0.5)], COLUMNS, ROWS)


def test_a_single_point_is_a_dot():
    assert decoded(dots([(0.0, 1.0)], COLUMNS, ROWS)) == {(0, 0)}
    assert decoded(dots([(0.0, math.nan), (1.0, 0.0), (1.0, math.nan)], COLUMNS, ROWS)) == {
        (2 * COLUMNS - 1, 4 * ROWS - 1)
    }
    assert not dots([], COLUMNS, ROWS)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=12))
def test_any_points_stay_in_the_frame(points):
    found = dots(points, 20, 5)
    assert all(0 <= column < 20 and 0 <= row < 5 and 0 < bits < 256 for (column, row), bits in found.items())
    for point in points:
        place = place_of(point, 20, 5)
        assert place is None or place in found  # every point that lies inside is drawn


def test_letters_lie_on_their_curve_and_off_the_others():
    curves = [dots([(i / 100, f(i / 100)) for i in range(101)], COLUMNS, ROWS) for f in CURVES.values()]
    found = letters(curves, COLUMNS)
    assert set(found.values()) == set(range(len(curves)))
    for place, at in found.items():
        assert place in curves[at]
        assert not [other for other, curve in enumerate(curves) if other != at and place in curve]


def test_equal_curves_have_a_letter_each():
    same = dots([(0, 0.5), (1, 0.5)], COLUMNS, ROWS)
    found = letters([same] * 5, COLUMNS)
    assert sorted(found.values()) == [0, 1, 2, 3, 4]
    assert set(found) <= set(same)


def test_marks_are_where_the_points_are():
    curves = [dots([(0, y), (1, y)], COLUMNS, ROWS) for y in (0.2, 0.8)]
    marks = [[place_of((x, y), COLUMNS, ROWS) for x in (0.0, 0.5, 1.0)] for y in (0.2, 0.8)]
    assert letters(curves, COLUMNS, marks) == {place: at for at, some in enumerate(marks) for place in some}


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE, FINITE, st.integers(2, 12))
def test_ticks_stand_where_they_say(one, other, most):
    place = axis([one, other])
    ticks = place.ticks(most)
    assert len(ticks) <= most
    for share, text in ticks:
        assert -1e-9 <= share <= 1 + 1e-9
        assert share == pytest.approx(place.share(float(text)), abs=1e-9)
    # Round: one digit of 1, 2 or 5 times a power of ten apart, and no gap that another tick would fill.
    values = [Decimal(text) for _, text in ticks]
    steps = {b - a for a, b in pairwise(values)}
    assert len(steps) <= 1
    for step in steps:
        assert step.normalize().as_tuple().digits in ((1,), (2,), (5,))
        assert len(ticks) > most / 2.5 - 1


@pytest.mark.parametrize(
    ("low", "high", "most", "labels"),
    [
        (-3, 3, 8, "-3 -2 -1 0 1 2 3"),
        (-0.17, 3, 5, "0 1 2 3"),
        (0, 1.13, 4, "0.0 0.5 1.0"),
        (-2e-4, 4.7e-4, 5, "-0.0002 0.0000 0.0002 0.0004"),
        (0, 3e-5, 4, "0 1e-5 2e-5 3e-5"),
        (0, 2.5e6, 4, "0 1e6 2e6"),
        (0, 150000, 4, "0 50000 100000 150000"),
    ],
)
def test_labels(low, high, most, labels):
    assert " ".join(text for _, text in axis([low, high]).ticks(most)) == labels


@pytest.mark.parametrize(
    ("low", "high", "most", "labels"),
    [
        (1, 64, 6, "1 2 5 10 20 50"),
        (1e-6, 0.5, 6, "1e-6 1e-5 0.0001 0.001 0.01 0.1"),
        (1e-300, 1e300, 7, "1e-300 1e-200 1e-100 1 1e100 1e200 1e300"),
        (0.02099, 0.02141, 6, "0.021 0.0211 0.0212 0.0213 0.0214"),
    ],
)
def test_labels_of_a_log_axis(low, high, most, labels):
    found = axis([low, high], log=True)
    assert " ".join(text for _, text in found.ticks(most)) == labels
    for share, text in found.ticks(most):
        truth = (math.log10(float(text)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        assert share == pytest.approx(truth, abs=1e-9)


@example(1.7e308, 1.7e308, 2)
@example(1.7e308, 1.6e308, 2)
@given(st.floats(5e-324, 1.7e308), st.floats(5e-324, 1.7e308), st.integers(2, 12))
def test_a_log_axis_never_fails(one, other, most):
    assert all(-1e-6 <= share <= 1 + 1e-6 for share, _ in axis([one, other], log=True).ticks(most))


@example([-1.7e308, 1.7e308], False)
@given(st.lists(st.floats(), min_size=1), st.booleans())
def test_all_values_lie_inside(values, log):
    placed = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    found = axis(values, log)
    assert (found is None) == (not placed)
    assume(found is not None)
    assert found.low < found.high
    assert all(-1e-9 <= found.share(v) <= 1 + 1e-9 for v in placed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_place(value):
    assert math.isnan(axis([0, 1]).share(value))
    assert math.isnan(axis([1, 2], log=True).share(value))


def test_what_is_not_above_zero_has_no_place_on_a_log_axis():
    assert axis([0.0, -1.0], log=True) is None
    assert math.isnan(axis([1, 2], log=True).share(0.0))


@pytest.mark.parametrize(("high", "labels"), [(1, "0 1"), (3, "0 1 2 3"), (47, "0 10 20 30 40")])
def test_what_is_counted_has_ticks_at_whole_numbers(high, labels):
    scale = axis([0, high])
    assert [text for _, text in scale.ticks(8, whole=True)] == labels.split()
    assert all(share == pytest.approx(scale.share(float(text))) for share, text in scale.ticks(8, whole=True))
