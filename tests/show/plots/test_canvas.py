"""Curves of dots, decoded back to coordinates and held to the function that was drawn."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.show.plots.canvas import dots, letters, place_of

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
