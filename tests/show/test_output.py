"""The sink: one answer in every format, in a pipe, in a terminal, in a file."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line
from ffncli.show.tables import Short, Table, cell_text, csv_text
from ffncli.show.tensors import Excerpt, edges
from ffncli.show.text import clean, encodable, json_safe, width

ROWS = Table(("name", "count", "share", "ok", "list", "unknown"), [("a", 1234567, 0.1 + 0.2, True, (1, 2), None)])
ANSWER = Answer(
    "demo",
    {"rows": [{"name": "a\x1b[31m", "share": 0.1 + 0.2, "nan": float("nan"), "shape": [1, 2, 3], "text": "[ 1 ]"}]},
    ROWS,
    [Heading("Title", "remark"), Line("a · line"), ROWS, Excerpt((1, 9), ((0,), (0, 8)), [[-1.5, 2.25]])],
    {"flops": "convention"},
)


def shown(capsys, **options) -> str:
    Output(**options).show(ANSWER)
    return capsys.readouterr().out


def test_json(capsys):
    text = shown(capsys, format="json")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert found["schema_version"] == 1
    assert (found["command"], found["conventions"]) == ("demo", {"flops": "convention"})
    row = found["rows"][0]
    assert row["name"] == "a\x1b[31m"  # the value is kept, but escaped in the text
    assert "\x1b" not in text
    assert (row["share"], row["nan"], row["text"]) == (0.1 + 0.2, None, "[ 1 ]")
    assert "[1, 2, 3]" in text


def test_csv_keeps_full_precision(capsys):
    rows = list(csv.DictReader(io.StringIO(shown(capsys, format="csv"))))
    assert rows == [
        {"name": "a", "count": "1234567", "share": repr(0.1 + 0.2), "ok": "true", "list": "1;2", "unknown": ""}
    ]


def test_plain_text_is_aligned_and_without_escapes(capsys):
    text = shown(capsys)
    assert "\x1b" not in text
    header, row = [line for line in text.splitlines() if "1,234,567" in line or line.startswith("name")]
    assert header.index("count") + len("count") == row.index("1,234,567") + len("1,234,567")
    assert "0  -1.5000  …   2.2500" in text


def test_markdown(capsys):
    text = shown(capsys, format="md")
    assert "| name | count | share | ok | list | unknown |\n| --- | ---: | ---: | --- | --- | --- |\n" in text
    assert "| a | 1,234,567 | 0.3 | yes | 1, 2 | - |" in text
    assert "### Title" in text
    assert "```text" in text


def test_wide_tables_are_never_cut_in_a_pipe(capsys):
    wide = Table(tuple(f"column{i}" for i in range(40)), [tuple("x" * 30 for _ in range(40))])
    Output().show(Answer("demo", {}, wide, [wide]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].count("x" * 30) == 40


def in_terminal(columns: int, *arguments: str, **env: str) -> str:
    """What a terminal of that width receives from the real command."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ffncli", *arguments], stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", **env},
    )  # fmt: skip
    os.close(follower)
    chunks = []
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(leader)
    assert process.wait(60) == 0
    return b"".join(chunks).decode().replace("\r\n", "\n")


ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_terminal_tables_fit_or_turn_vertical():
    names = ["llama-2-7b", "gpt2", "mixtral-8x7b", "deepseek-v3", "qwen3-235b-a22b"]
    wide = ESCAPE.sub("", in_terminal(200, "params", *names))
    narrow = ESCAPE.sub("", in_terminal(60, "params", *names))
    for text, columns in ((wide, 200), (narrow, 60)):
        assert max(width(line) for line in text.splitlines()) <= columns
        for number in ("135,266,304", "4,722,432", "45,098,205,184", "657,758,632,448", "227,145,678,848"):
            assert number in text
        assert "…" not in text
    assert len(narrow.splitlines()) > 2 * len(wide.splitlines())


def test_terminal_colours_by_sign_unless_told_not_to():
    assert "\x1b[31m" in in_terminal(100, "trace")
    assert "\x1b" not in in_terminal(100, "trace", "--no-color")
    assert "\x1b" not in in_terminal(100, "trace", NO_COLOR="1")
    assert "\x1b" not in in_terminal(100, "trace", TERM="dumb")


def test_files_are_refused_unless_forced(tmp_path):
    path = tmp_path / "out.json"
    Output("json", str(path)).show(ANSWER)
    assert json.loads(path.read_text())["command"] == "demo"
    with pytest.raises(FFNError, match="exists already"):
        Output("json", str(path))
    Output("csv", str(path), force=True).show(ANSWER)
    assert path.read_text().startswith("name,")
    assert os.listdir(tmp_path) == ["out.json"]


def test_devices_are_written_and_not_replaced():
    Output("json", os.devnull).show(ANSWER)
    assert not os.path.isfile(os.devnull)


@given(st.text())
def test_clean_text_controls_nothing(text):
    found = clean(text)
    assert all(c.isprintable() or c == "\xa0" or not re.match(r"[\x00-\x1f\x7f-\x9f]", c) for c in found)
    assert clean(found) == found
    json.loads(json_safe(json.dumps(text, ensure_ascii=False)))


def test_json_safe_means_the_same():
    text = "a\x1b\x9b‮\u2028é"
    assert json.loads(json_safe(json.dumps(text, ensure_ascii=False))) == text


def test_old_encodings_get_ascii():
    assert encodable("x · W1 ⊙ …", "ascii") == "x * W1 * ..."
    assert encodable("π", "latin-1") == "?"
    assert encodable("x · y", "utf-8") == "x · y"


@pytest.mark.parametrize(
    ("value", "text", "cell"),
    [
        (1234, "1,234", "1234"),
        (0.30000000000000004, "0.3", "0.30000000000000004"),
        (True, "yes", "true"),
        (None, "-", ""),
        ((1, 2), "1, 2", "1;2"),
        ("=cmd|x", "=cmd|x", "'=cmd|x"),
        (-2, "-2", "-2"),
        (-2.5, "-2.5", "-2.5"),
        ("a\nb", "a\\x0ab", "a\\x0ab"),
    ],
)
def test_cells(value, text, cell):
    assert (cell_text(value), csv_text(value)) == (text, cell)


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.000 K"), (999_949, "999.9 K"), (999_999, "1.000 M"), (999_999_999, "1.000 B"),
     (4_328_521_728, "4.329 B"), (29_003_612_160, "29.00 B"), (1_500_000_000_000, "1.500 T"), (0, "0")],
)  # fmt: skip
def test_short_counts(count, text):
    assert (cell_text(Short(count)), csv_text(Short(count))) == (text, str(count))


def test_wide_characters_count_twice():
    assert (width("abc"), width("日本"), width("e\u0301")) == (3, 4, 1)


@given(size=st.integers(1, 50), most=st.integers(1, 60))
def test_edges(size, most):
    found = edges(size, most)
    assert len(found) == min(size, most)
    assert list(found) == sorted(set(found))
    assert found[0] == 0
    assert most < 2 or found[-1] == size - 1


def lines(shape, index, values, digits=4) -> list[str]:
    return ["  ".join(t for t, _ in line) for line in Excerpt(shape, index, values, digits).lines()]


def test_excerpts():
    assert lines((2,), ((0, 1),), [1.0, -2.5]) == [" 1.0000  -2.5000"]
    assert lines((3, 9), ((0, 2), (0, 1, 8)), [[1, 2, 3], [4, 5, 6]], 1) == [
        "0  1.0  2.0  …  3.0",
        "…",
        "2  4.0  5.0  …  6.0",
    ]
    assert lines((1, 2), ((0,), (0, 1)), [[1e-9, 2e7]], 3) == ["0  1.00e-09  2.00e+07"]
    assert lines((1, 3), ((0,), (0, 1, 2)), [[float("nan"), float("inf"), float("-inf")]]) == ["0   NaN   Inf  -Inf"]


HOSTILE = "a\x1b[31mb\u202ec|d"


def test_names_of_columns_are_clean_too(capsys, tmp_path):
    table = Table(("quantity", HOSTILE), [("x", 1)], side_by_side=True)
    for style in ("table", "md"):
        Output(style).show(Answer("demo", {}, table, [table, Heading(HOSTILE, HOSTILE), Line(HOSTILE)]))
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert r"\x1b" in out


def test_a_terminal_is_safe_from_a_directorys_name(tmp_path):
    folders = []
    for name in (HOSTILE, "plain"):
        (tmp_path / name).mkdir()
        config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        folders.append(str(tmp_path / name / "config.json"))
    for columns in (40, 200):
        out = in_terminal(columns, "params", *folders, "--no-color")
        assert "\x1b" not in out
        assert r"\x1b" in out.replace("\n", "")
