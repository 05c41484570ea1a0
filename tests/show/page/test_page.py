"""Pages: texts and data cannot become markup, charts place what they are given, nothing is named outside."""

import html.parser
import json
import math
import re

import pytest

from ffncli.show.page.charts import ChartLine, CostBar, RatioBar, cost_bars, histogram, intervals, lines
from ffncli.show.page.document import PageParts, Section, document, element, written

HOSTILE = "</script><script>alert(1)</script><!--"


class Tags(html.parser.HTMLParser):
    """The tags of a page in order, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def test_texts_and_attributes_are_escaped() -> None:
    tree = element("p", HOSTILE, "\x1b[31m", element("a", "x", href='"><b>'), "after", class_="c", data_x=1, title=None)
    text = written(tree)
    assert text.startswith('<p class="c" data-x="1">&lt;/script&gt;&lt;script&gt;')
    assert "\x1b" not in text
    assert "\\x1b[31m" in text
    assert Tags(text).tags == ["p", "a"]
    assert text.endswith("</a>after</p>")


def test_data_stay_data() -> None:
    section = Section("s", HOSTILE, (element("p", HOSTILE),))
    page = document(HOSTILE, HOSTILE, [PageParts((section,), {"s": {"columns": [HOSTILE], "rows": [[None, 1.5]]}})])
    tags = Tags(page)
    assert tags.tags.count("script") == 2  # the data, and the script that every page has
    assert json.loads(tags.data) == {"s": {"columns": [HOSTILE], "rows": [[None, 1.5]]}}
    plain = document("t", "a", [PageParts((section,), {})])
    assert tags.tags == Tags(plain).tags


def test_nothing_is_loaded() -> None:
    page = document("t", "a", [PageParts((Section("s", "S", ()),), {}, frozenset(["uplot"]))])
    assert "default-src 'none'" in page
    outside = re.findall(r"(?:src|href)=[\"'](?!#)[^\"']*", page) + re.findall(r"(?:@import|url\()[^;]*", page)
    assert outside == []
    assert "uPlot" in page
    assert "uPlot=" not in document("t", "a", [PageParts((Section("s", "S", ()),), {})])
    with pytest.raises(ValueError, match="Out of range"):
        document("t", "a", [PageParts((), {"x": math.nan})])


def test_an_interval_is_drawn_where_its_values_are() -> None:
    """On a log axis: halves and doubles are as far from 1."""
    rows = [
        RatioBar("a", 1.0, 0.5, 2.0, "same"),
        RatioBar("b", 2.0, 1.0, 4.0, "slower", group="g"),
        RatioBar("c", 3, None, None),
    ]
    tree = intervals(rows, "ratio")
    bars = [bar for bar in tree.iter("line") if bar.get("class") == "bar"]
    (x1, x2), (y1, y2) = [(float(b.get("x1") or 0), float(b.get("x2") or 0)) for b in bars]
    mark = next(float(line.get("x1") or 0) for line in tree.iter("line") if line.get("class") == "mark")
    assert x2 - mark == pytest.approx(mark - x1)
    assert (y1, y2 - x2) == (pytest.approx(mark), pytest.approx(x2 - mark))
    assert [(bar.get("data-low"), bar.get("data-high")) for bar in bars] == [("0.5", "2.0"), ("1.0", "4.0")]
    assert [t.text for t in tree.iter("title")][1] == "a: 1 [0.5, 2]"
    assert [g.get("class") for g in tree.iter("g")] == ["interval same", "interval slower", "interval"]
    assert written(intervals([], "ratio")).count("circle") == 0


def test_lines_leave_out_what_has_no_place() -> None:
    series = [
        ChartLine("k", [(1, 1e-3), (10, 1e-2), (100, math.nan)], [(0.9e-3, 1.1e-3), None, None]),
        ChartLine("roof", [(1, 5e-4), (100, 5e-2)], dashed=True),
    ]
    tree = lines(series, "tokens", "seconds")
    circles = [(float(c.get("cx") or 0), float(c.get("cy") or 0)) for c in tree.iter("circle")]
    assert len(circles) == 2
    assert circles[0][0] < circles[1][0]
    assert circles[0][1] > circles[1][1]
    assert sum("whisker" in (line.get("class") or "") for line in tree.iter("line")) == 1
    assert [li.find("span").tail for li in tree.iter("li")] == ["k", "roof"]  # type: ignore[union-attr]
    assert lines([ChartLine("k", [(1, -1.0)])], "x", "y").tag == "p"


def test_a_bar_is_as_wide_as_its_cost() -> None:
    tree = cost_bars([CostBar("up", 200, "[1, 8]"), CostBar("act", 50, "[1, 8]"), CostBar("x", 0, "[1, 4]")])
    widths = [float(rect.get("width") or 0) for rect in tree.iter("rect")]
    assert widths[0] == pytest.approx(4 * widths[1], abs=0.2)
    assert widths[2] == 2


def test_a_histogram_counts_every_finite_value() -> None:
    tree = histogram([0.0] * 30 + [1.0] * 10 + [0.5, math.nan, math.inf])
    assert tree is not None
    titles = [title.text or "" for title in tree.iter("title")][1:]
    counts = [int(title.split()[0]) for title in titles]
    assert (sum(counts), counts[0], counts[-1], len(counts)) == (41, 30, 10, 3)  # none of the empty bins
    assert histogram([1.0, 1.0]) is None
    assert histogram([math.nan]) is None
