"""Bars, intervals, heat maps in text, and colour: who decides about it, and that a page is the same page in it."""

import io
import itertools
import math

import pytest

from ffncli.show.color import COLORS, is_colored, painted
from ffncli.show.output import Output, markdown
from ffncli.show.parts import Answer, Heading, Line, Table
from ffncli.show.tensors import Excerpt, HeatMap
from ffncli.show.terminal import Terminal
from ffncli.show.text import bars, encodable, interval_bar
from tests.show.test_output import ESCAPE


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "env", "in_pipe", "in_terminal"),
    [
        ("auto", {}, False, True),
        ("auto", {"TERM": "dumb"}, False, False),
        ("auto", {"NO_COLOR": "1"}, False, False),
        ("auto", {"NO_COLOR": ""}, False, True),
        ("auto", {"FORCE_COLOR": "1"}, True, True),
        ("auto", {"CLICOLOR_FORCE": "1"}, True, True),
        ("auto", {"FORCE_COLOR": "", "CLICOLOR_FORCE": ""}, False, True),
        ("auto", {"FORCE_COLOR": "0", "CLICOLOR_FORCE": "0"}, False, True),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}, False, False),
        ("auto", {"GITHUB_ACTIONS": "true"}, False, True),
        ("always", {"NO_COLOR": "1"}, True, True),
        ("always", {"TERM": "dumb"}, True, True),
        ("never", {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}, False, False),
    ],
)
def test_the_option_then_no_color_then_force_then_the_terminal(choice, env, in_pipe, in_terminal, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **env}.items():
        monkeypatch.setenv(name, value)
    assert (is_colored(io.StringIO(), choice), is_colored(Tty(), choice)) == (in_pipe, in_terminal)
    assert is_colored(None, choice) == in_pipe


def test_paint_ends_with_the_text():
    assert painted("ab  ", "bold") == "\x1b[1mab\x1b[0m  "
    assert painted("ab", "") == "ab"
    assert painted("  ", "red") == "  "


@pytest.mark.parametrize(
    "command",
    ["trace", "trace notthere", "params gpt2 mixtral-8x7b", "activations gelu silu --plot", "trace --help", "-h",
     "trace --explain up[0,3]", "compare -h", "models llama"],
)  # fmt: skip
def test_a_page_in_a_pipe_is_the_same_page_in_colour(call, command, monkeypatch):
    plain = call(*command.split())
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = call(*command.split())
    assert (code, ESCAPE.sub("", out), err) == plain
    assert ("\x1b[" in out) == (plain[1] != "")
    assert "\x1b" not in err
    monkeypatch.setenv("NO_COLOR", "1")
    assert call(*command.split()) == plain


def test_which_parts_of_a_page_have_which_style(capsys):
    """Names of columns and rows that stand out are bold, remarks and quiet lines dim, numbers by their sign."""
    table = Table(("name", "n"), [("a", 1), ("sum", 22), ("b", 3)], "Title", frozenset({1}))
    values = Excerpt((4,), ((0, 1, 2, 3),), [-1.0, 0.0, 2.0, float("nan")])
    parts = (Heading("Head", "remark"), Line("loud"), Line("quiet", True), values, table)
    Output(color="always").show(Answer("demo", {}, table, parts))
    assert capsys.readouterr().out.splitlines() == [
        "\x1b[1mHead\x1b[0m  \x1b[2mremark\x1b[0m", "  loud", "  \x1b[2mquiet\x1b[0m",
        "  \x1b[31m-1.0000\x1b[0m  \x1b[2m 0.0000\x1b[0m  \x1b[32m 2.0000\x1b[0m  \x1b[2m    NaN\x1b[0m",
        "", "\x1b[1mTitle\x1b[0m", "\x1b[1mname   n\x1b[0m", "a      1", "\x1b[1msum   22\x1b[0m", "b      3",
    ]  # fmt: skip


def test_the_option_in_a_pipe(call):
    out = call("trace", "4x8:relu", "--color", "always")[1]
    assert ESCAPE.sub("", out) == call("trace", "4x8:relu")[1]
    for code in ("\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m"):
        assert code in out
    assert call("trace", "--color", "always", "-h")[1].startswith("\x1b[1mUsage:\x1b[0m")
    assert call("trace", "--no-color", "-h")[1].startswith("Usage:")


@pytest.mark.parametrize(("style", "choice"), [*itertools.product(("json", "csv", "md"), COLORS)])
def test_data_and_files_have_no_colour(call, style, choice, tmp_path):
    assert "\x1b" not in call("trace", "4x8:relu", "--format", style, "--color", choice)[1]
    path = tmp_path / f"{choice}.txt"
    assert call("trace", "4x8:relu", "-o", str(path), "--color", choice)[0] == 0
    assert "\x1b" not in path.read_text("utf-8")


def test_a_wrong_value(call):
    assert call("trace", "--color", "purple")[::2] == (
        2,
        "error: --color: unknown value 'purple'; use auto, always or never\n",
    )
    assert call("trace", "--color", "purple", "-h")[0] == 2


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ([8, 7, 6, 5, 4, 3, 2, 1], "█▇▆▅▄▃▂▁"),
        ([800, 1, 0, 400, 401, 0, 0, 800], "█▁ ▄▅  █"),  # something is never nothing
        ([3] * 6, "██████"),
        ([3] * 5 + [2], ""),  # too few to have a form
        ([1] * 24, "██████"),  # 24 values: neighbours together, 4 per bar
        ([2] * 24, "█" * 12),
        ([3] * 24, "█" * 24),
        ([], ""),
    ],
)
def test_as_high_as_the_counts(counts, line):
    assert bars(counts) == line


def test_ascii_keeps_the_heights_apart():
    line = encodable(bars([8, 7, 6, 5, 4, 3, 2, 1]), "ascii")
    assert line.isascii()
    assert (len(line), len(set(line)), "?" in line) == (8, 8, False)


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
