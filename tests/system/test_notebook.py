"""Records in a notebook: their values and lists as tables, nothing of a name as markup."""

from dataclasses import dataclass

from ffncli.system.notebook import Shown, record_table
from tests.show.page.test_page import Tags


@dataclass(frozen=True)
class Part:
    name: str
    value: float | None
    inside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole(Shown):
    title: str
    count: int
    parts: tuple[Part, ...]
    other: object = None


def test_a_record_is_its_values_and_its_lists():
    text = Whole("<b>\x1b", 3, (Part("a", 1 / 3), Part("b", None)), object())._repr_html_()
    assert Tags(text).tags.count("table") == 2
    for cell in ("<td>&lt;b&gt;\\x1b</td>", "<td>3</td>", "<th>value</th>", "<td>0.3333</td>"):
        assert cell in text
    assert "<tr><td>b</td><td></td></tr>" in text
    assert "inside" not in text
    assert "other" not in text


def test_a_long_table_says_how_much_is_left_out():
    text = record_table("t", ("n",), [(n,) for n in range(105)])
    assert text.count("<tr>") == 102
    assert '<td colspan="1">… 5 more</td>' in text
