"""Plots as files: the same bytes each time, whole XML that names its axes, and curves where their numbers are."""

import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from ffncli.errors import ExitCode, FFNError
from ffncli.show.plots.image import drawn, write
from ffncli.show.plots.plot import IntervalPlot, IntervalRow, Plot, Series

CURVE = Plot("Waves", "angle", "height", [Series("sine", [(x / 10, math.sin(x / 10)) for x in range(-30, 31)])])
ERRORS = Plot(
    "Errors",
    "width d_ff",
    "error",
    [Series(f"c{k}", [(w, w**-k) for w in (1, 4, 16)]) for k in (1, 2)],
    True,
    True,
    True,
)
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_plots_are_the_same_bytes(kind):
    first = drawn([CURVE, ERRORS], kind)
    assert first == drawn([CURVE, ERRORS], kind)
    assert not re.search(rb"dc:date|CreationDate|[mM]atplotlib (v|version|pdf)", first)


def test_svg_is_xml_whose_text_is_text():
    found = texts(drawn([CURVE, ERRORS], "svg"))
    assert {"Waves", "angle", "height", "sine", "Errors", "width d_ff", "error", "c1", "c2"} <= set(found)
    assert {"1", "4", "16", "0.01"} <= set(found)  # widths where they were measured; plain powers of ten
    assert not [text for text in found if "$" in text]


def test_a_curve_is_where_its_numbers_are():
    """The path of the sine against its numbers: one linear map takes all points of either axis to it."""
    tree = ElementTree.fromstring(drawn([CURVE], "svg"))
    paths = [p.get("d") or "" for p in tree.iter(f"{SVG}path")]
    path = max(paths, key=len)
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)]
    (x0, y0), (x1, y1) = points[0], points[-1]
    assert len(points) > 20  # matplotlib leaves out what is straight
    for px, py in points:
        x = -3 + 6 * (px - x0) / (x1 - x0)
        y = math.sin(-3) + (math.sin(3) - math.sin(-3)) * (py - y0) / (y1 - y0)
        assert y == pytest.approx(math.sin(x), abs=0.01)


def test_png_and_pdf_are_what_they_are_called():
    png = drawn([CURVE], "png")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(png[16:20]) >= 800
    assert drawn([CURVE], "pdf").startswith(b"%PDF-")


def test_curves_differ_in_their_lines_as_in_colour():
    many = Plot("", "x", "y", [Series(str(k), [(0, k), (1, 2 * k)]) for k in range(8)])
    styles = re.findall(r'<path d="M [^"]*" clip-path[^>]*style="([^"]*)"', drawn([many], "svg").decode())
    lines = [s for s in styles if "stroke-width: 1.5" in s]
    assert len(lines) == 8
    assert len({re.sub(r"stroke: #\w+", "", s) for s in lines}) == 8


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [Series("none", [])],
        [Series("one", [(1.0, 1.0)])],
        [Series("lost", [(math.nan, 1.0), (1.0, math.inf)])],
        [Series("huge", [(-1e300, 1e300), (1.7e308, -1.7e308)]), Series("flat", [(0.0, 0.0), (1.0, 0.0)])],
        [Series("$x^2$ <&> \x1b[31m 激活", [(0.0, 1.0), (1.0, 2.0)])],
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_anything_can_be_drawn(lines, log):
    svg = drawn([Plot("a $ < title", "x", "y", lines, log, log, marks=log)], "svg")
    assert "a $ < title" in texts(svg)


def test_without_matplotlib_one_line(monkeypatch, tmp_path):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FFNError) as error:
        write(tmp_path / "a.svg", [CURVE])
    assert error.value.code == ExitCode.ENVIRONMENT
    assert ".[plots]" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_intervals_are_strokes_from_end_to_end_and_an_unknown_end_has_none():
    points = [(1.0, 1.0), (2.0, 1.5), (4.0, 1.2)]
    plain = Plot("", "x", "y", [Series("a", points)], marks=True, frame=(0.0, 3.0))
    ends = [(0.9, 1.1), (1.0, 2.0), (1.1, math.nan)]
    whole = Plot("", "x", "y", [Series("a", points, ends)], marks=True, frame=(0.0, 3.0))

    def strokes(plot: Plot) -> list[float]:
        """Heights of the vertical lines that are neither ticks nor grid."""
        paths = [p.get("d") or "" for p in ElementTree.fromstring(drawn([plot], "svg")).iter(f"{SVG}path")]
        found = []
        for path in paths:
            numbers = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)]
            if len(numbers) == 2 and numbers[0][0] == numbers[1][0]:
                found.append(abs(numbers[0][1] - numbers[1][1]))
        return found

    short, tall = sorted(set(strokes(whole)) - set(strokes(plain)))
    assert tall / short == pytest.approx(1.0 / 0.2, rel=1e-3)


def test_interval_charts_are_where_their_numbers_are():
    """The ends of the strokes, read from the SVG, lie on the log axis as the ticks do."""
    rows = [IntervalRow("packed", 0.8, 0.7, 0.9), IntervalRow("mine", 2.0, 1, 4), IntervalRow("open", 1.0, None, 2.0)]
    plot = IntervalPlot("512x2048", "time over eager's", rows)
    assert drawn([plot], "png") == drawn([plot], "png")
    svg = drawn([plot], "svg").decode()
    assert all(text in svg for text in ("packed", "mine", "open", "512x2048", "time over eager"))
    strokes = [
        [float(n) for n in re.findall(r"[ML] ([\d.]+) [\d.]+", path)]
        for path in re.findall(r'<path d="([^"]+)"[^>]*style="fill: none; stroke: #0072b2', svg)
    ]
    (a, b), (c, d) = [x for x in strokes if len(x) == 2]
    assert (d - c) / (b - a) == pytest.approx(math.log(4) / math.log(9 / 7), rel=1e-4)
    assert (c - a) / (b - a) == pytest.approx(math.log(1 / 0.7) / math.log(9 / 7), rel=1e-4)
