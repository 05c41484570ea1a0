"""Who decides about colour, and that a pipe's page is the same page in colour."""

from __future__ import annotations

import io
import itertools

import pytest

from ffncli.show.color import COLORS, is_colored, painted
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line
from ffncli.show.tables import Table
from ffncli.show.tensors import Excerpt
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
