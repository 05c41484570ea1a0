"""The sink: one answer in every format, in a pipe, in a terminal, in a file."""

import csv
import io
import json
import math
import os
import pty
import re
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.errors import FFNError, clean
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Short, Table, apart, cell_text, csv_text
from ffncli.show.tensors import Excerpt, edges, number_text
from ffncli.show.text import bytes_text, encodable, finite, folded, json_safe, percent, plural, time_text, width
from tests.oracles.checkpoints import harmful

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


def plain(capsys, *parts, **options) -> str:
    Output(**options).show(Answer("demo", {}, ROWS, parts))
    return capsys.readouterr().out


TABLE = Table(("name", "value"), [("a", 1), ("b|c", 22)], "Title")
UNNAMED = Table(("", ""), [("a", 1)])


def test_parts_of_a_page_are_apart(capsys):
    page = plain(capsys, Heading("One", "first"), Line("text"), TABLE, Heading("Two"), TABLE, UNNAMED)
    block = "Title\nname  value\na         1\nb|c      22\n"
    assert page == f"One  first\n  text\n\n{block}\nTwo\n\n{block}\na  1\n"


def test_markdown_of_every_part(capsys):
    page = plain(capsys, Heading("a_b", "by <c>"), Line("x * y"), TABLE, TABLE, format="md")
    table = "**Title**\n\n| name | value |\n| --- | ---: |\n| a | 1 |\n| b\\|c | 22 |\n"
    assert page == f"### a\\_b\n\nby \\<c\\>\n\nx \\* y\n\n{table}\n{table}"


@pytest.mark.parametrize("style", ["table", "csv", "md"])
def test_no_part_acts_on_a_terminal(capsys, style):
    evil = "\x1b[31m\u202e"
    rows = Table(("name",), [(evil,), ([evil],)], evil)
    Output(style).show(Answer("demo", {}, rows, [Heading(evil, evil), Line(evil), rows]))
    assert harmful(capsys.readouterr().out) == []


def test_json_escapes_what_json_leaves_alone(capsys):
    Output("json").show(Answer("demo", {"name": "\x7f\x9b\u202e\u2028", "values": [None, 1, 2.5]}, ROWS, []))
    text = capsys.readouterr().out
    assert harmful(text) == []
    assert json.loads(text)["name"] == "\x7f\x9b\u202e\u2028"
    assert '"values": [null, 1, 2.5]' in text


@pytest.mark.parametrize(("style", "found"), [("table", b"x * y"), ("md", b"x * y"), ("csv", "x · y".encode())])
def test_data_is_utf_8_and_pages_fit_the_locale(monkeypatch, style, found):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    Output(style).show(Answer("demo", {}, Table(("name",), [("x · y",)]), [Table(("name",), [("x · y",)])]))
    assert found in out.buffer.getvalue().replace(b"\\", b"")


def test_notes_go_to_stderr_safely(capsys, monkeypatch):
    Output(quiet=True).note("unheard")
    Output().note("a\x1bb")
    assert capsys.readouterr() == ("", "note: a\\x1bb\n")
    err = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stderr", err)
    Output().note("x · y")
    assert err.buffer.getvalue() == b"note: x * y\n"
    err.close()
    Output().note("nobody hears this")
    monkeypatch.setattr(sys, "stderr", None)
    Output().note("nor this")


def in_terminal(columns: int, *arguments: str, code: int = 0, **env: str) -> str:
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
    assert process.wait(60) == code
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


class Screen(io.StringIO):
    """A terminal of `columns`, as far as rich looks."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def screen(monkeypatch, columns: int, *parts, color: bool = True, **env: str) -> str:
    """What a terminal shows: with the colours it chooses, or with none."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen())
    Output(color="auto" if color else "never").show(Answer("demo", {}, ROWS, parts))
    return sys.stdout.getvalue()


def test_terminal_excerpts_have_the_colour_of_their_sign_and_go_on_under_their_values(monkeypatch):
    values = Excerpt((2, 5), ((0, 1), (0, 1, 2, 4)), [[-1.0, 0.0, 2.0, 3.0]] * 2)
    text = screen(monkeypatch, 80, values)
    assert "\x1b[31m  -1.0000\x1b[0m\x1b[2m   0.0000\x1b[0m\x1b[32m   2.0000\x1b[0m\x1b[2m  …\x1b[0m" in text
    narrow = ["  0  -1.0000   0.0000", "      2.0000  …", "      3.0000", "  1  -1.0000   0.0000"]
    assert [line.rstrip() for line in screen(monkeypatch, 21, values, color=False).splitlines()][:4] == narrow
    assert ESCAPE.search(screen(monkeypatch, 80, values, NO_COLOR=""))  # an empty one asks for nothing
    vector = Excerpt((3,), ((0, 1, 2),), [1.0, -2.0, 3.0])
    assert screen(monkeypatch, 12, vector, color=False).splitlines()[:2] == ["   1.0000", "  -2.0000"]


def test_terminal_tables(monkeypatch):
    table = Table(("name", "n"), [("a", 1), ("sum", 22)], "Title", frozenset({1}))
    lines = screen(monkeypatch, 40, table, UNNAMED).splitlines()
    assert lines[0] == "\x1b[1mTitle\x1b[0m"
    assert "name" in lines[1]
    assert [ESCAPE.sub("", line).rstrip() for line in lines[3:]] == ["a      1", "sum   22", "", "a  1"]
    assert [line.startswith("\x1b[1m") for line in lines[3:5]] == [False, True]
    lines = screen(monkeypatch, 40, Heading("One", "first"), Line("quiet", True)).splitlines()
    assert [line.rstrip() for line in lines] == ["\x1b[1mOne\x1b[0m\x1b[2m  first\x1b[0m", "  \x1b[2mquiet\x1b[0m"]


def test_somebody_elses_text_does_not_act_on_a_terminal(monkeypatch):
    evil = "\x1b[31m\u202e"
    parts = Heading(evil, evil), Line(evil), Table(("name",), [(evil,)], evil)
    assert harmful(screen(monkeypatch, 80, *parts, color=False)) == []


def test_data_is_data_in_a_terminal_too(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Screen())
    Output("json").show(ANSWER)
    assert json.loads(sys.stdout.getvalue())["command"] == "demo"


def test_a_record_per_row_where_columns_do_not_fit(monkeypatch):
    table = Table(("name", "count", "note"), [("aaaa", 1, ""), ("bbbb", 22, "x" * 9)])
    assert screen(monkeypatch, 22, table, color=False).splitlines()[0].split() == ["name", "count", "note"]
    records = screen(monkeypatch, 21, table, color=False)
    assert records == f"name   aaaa\ncount  1\n\nname   bbbb\ncount  22\nnote   {'x' * 9}\n"


def test_columns_side_by_side_become_several_tables(monkeypatch):
    names = ("quantity", "one", "two", "three", "four")
    table = Table(names, [("width", *[12345] * 4), ("total", *[6] * 4)], "T", frozenset({1}), side_by_side=True)
    text = screen(monkeypatch, 22, table)  # 8 + 2 + 6 + 2 + 6 = 24 is more
    heads = [ESCAPE.sub("", line).split() for line in text.splitlines() if "quantity" in line]
    assert heads == [["quantity", name] for name in names[1:]]
    assert len(re.findall(r"^\x1b\[1mtotal", text, re.M)) == 4
    heads = [line.split() for line in screen(monkeypatch, 24, table, color=False).splitlines() if "quantity" in line]
    assert heads == [["quantity", "one", "two"], ["quantity", "three", "four"]]
    titles = [line for line in screen(monkeypatch, 24, table, color=False).splitlines() if line == "T"]
    assert len(titles) == 2  # one each, and none before them
    assert table.narrowed([8, 6, 6, 6, 6], 24)[1].columns == ("quantity", "three", "four")


def test_columns_that_say_the_same_leave_before_a_table_falls_apart(monkeypatch):
    names = ("d_ff", "tokens", "d_model", "activation", "parameters", "note")
    rows = [(d_ff, tokens, 4096, "silu", d_ff * tokens, "") for d_ff in (1000, 2000) for tokens in (1, 32)]

    def lines(columns: int, labels: int = 0) -> list[str]:
        text = screen(monkeypatch, columns, Table(names, rows, labels=labels), color=False)
        return [line.split() for line in text.splitlines() if line and "─" not in line]

    assert lines(80)[0] == [*names]  # all of it fits
    assert lines(44)[0] == "in every row: d_model 4,096".split()  # as many as it takes
    assert lines(44)[1] == ["d_ff", "tokens", "activation", "parameters", "note"]
    words = [word for line in lines(25) for word in line]
    assert words[:7] == "in every row: d_model 4,096, activation silu".split()  # nothing to say of an empty column
    assert words[7:13] == ["d_ff", "tokens", "parameters", "1,000", "1", "1,000"]
    assert lines(20)[0] == ["d_ff", "1,000"]  # a record per row: not even those three fit
    split = lines(17, labels=1)
    assert [line for line in split if line[0] == "d_ff"] == [["d_ff", "tokens"], ["d_ff", "parameters"]]
    assert sum(line[0] == "in" for line in split) == 1
    assert lines(80)[1][2:4] == ["4,096", "silu"]
    words = [word for line in lines(30, labels=3)[:2] for word in line]
    assert words == "in every row: activation silu, d_model 4,096".split()  # labels come last
    assert screen(monkeypatch, 24, Table(names, rows[:1]), color=False).splitlines()[2].split() == ["d_model", "4,096"]


def test_terminal_colours_by_sign_unless_told_not_to():
    assert "\x1b[31m" in in_terminal(100, "trace")
    command = ("activations", "gelu")
    assert "\x1b" in in_terminal(100, *command)
    assert "\x1b" not in in_terminal(100, *command, "--no-color")
    assert "\x1b" not in in_terminal(100, *command, NO_COLOR="1")
    assert "\x1b" not in in_terminal(100, *command, TERM="dumb")
    assert "\x1b" not in in_terminal(100, *command, "--color", "never", FORCE_COLOR="1")
    assert "\x1b[1m" in in_terminal(100, *command, "--color=always", NO_COLOR="1")
    assert "\x1b[1m" in in_terminal(100, *command, "--color=always", TERM="dumb")


def test_files_are_refused_unless_forced(tmp_path):
    path = tmp_path / "out.json"
    Output("json", str(path)).show(ANSWER)
    assert json.loads(path.read_text())["command"] == "demo"
    with pytest.raises(FFNError, match="exists already"):
        Output("json", str(path))
    Output("csv", str(path), force=True).show(ANSWER)
    assert path.read_text().startswith("name,")
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_mode_of_any_other(tmp_path, mask):
    before = os.umask(mask)
    try:
        Output("json", str(tmp_path / "out")).show(ANSWER)
        assert os.umask(mask) == mask
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_is_written_in_its_own_directory_and_nothing_stays_beside_it(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    moves = []
    monkeypatch.setattr(os, "replace", lambda old, new: moves.append((old, new)) or os.rename(old, new))
    Output("csv", str(tmp_path / "here" / "out")).show(Answer("demo", {}, Table(("n",), [("é · x",)]), []))
    assert [os.path.dirname(old) for old, _ in moves] == [str(tmp_path / "here")]
    assert (tmp_path / "here" / "out").read_bytes() == "n\né · x\n".encode()
    assert os.listdir(tmp_path / "here") == ["out"]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Output("csv", str(tmp_path / "new")).show(ANSWER)
    assert os.listdir(tmp_path) == ["here"]


def test_a_dash_is_standard_output(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").touch()
    assert shown(capsys, path="-") == shown(capsys)
    assert (tmp_path / "-").read_text() == ""


def test_a_pipe_is_written_without_force(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    Output("json", pipe).show(ANSWER)
    assert json.loads(os.read(reader, 65536))["command"] == "demo"
    os.close(reader)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)  # written, not replaced (a device would be lost for the whole machine)


def test_a_link_stays_a_link_and_a_file_keeps_its_permissions(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    Output("json", str(link), force=True).show(ANSWER)
    assert link.is_symlink()
    assert json.loads(target.read_text())["command"] == "demo"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


@given(st.text())
def test_clean_text_controls_nothing(text):
    found = clean(text)
    assert all(c.isprintable() or c == "\xa0" or not re.match(r"[\x00-\x1f\x7f-\x9f]", c) for c in found)
    assert clean(found) == found
    json.loads(json_safe(json.dumps(text, ensure_ascii=False)))


@pytest.mark.parametrize("mark", "\x7f \u061c \u200b \u2028 \u202e \u2060 \ufeff".split(" "))
def test_marks_that_hide_or_reorder_are_written_out(mark):
    assert clean(f"a{mark}b") == f"a{mark.encode('unicode_escape').decode()}b"


def test_json_safe_means_the_same():
    text = "a\x1b\x9b‮\u2028é\xad\U000e0041"
    assert json.loads(json_safe(json.dumps(text, ensure_ascii=False))) == text


def test_old_encodings_get_ascii():
    assert encodable("x · W1 ⊙ …", "ascii") == "x * W1 * ..."
    assert encodable("e⁻ˣ eˣ π", "latin-1") == "e^-x e^x pi"
    assert encodable("ψ", "latin-1") == "?"
    assert encodable("x · y", "utf-8") == "x · y"
    assert encodable("α ≤ √β", "no-such-encoding") == "alpha <= sqrt?"


@pytest.mark.parametrize(
    ("value", "text", "cell"),
    [
        (1234, "1,234", "1234"),
        (0.30000000000000004, "0.3", "0.30000000000000004"),
        (True, "yes", "true"),
        (None, "-", ""),
        ((1, 2), "1, 2", "1;2"),
        ("=cmd|x", "=cmd|x", "'=cmd|x"),
        ("@x", "@x", "'@x"),
        ("-x", "-x", "'-x"),
        ("+x", "+x", "'+x"),
        ((), "-", ""),
        ((True, None, 0.1), "yes, -, 0.1", "true;;0.1"),
        (1234.5678, "1235", "1234.5678"),
        (-2, "-2", "-2"),
        (-2.5, "-2.5", "-2.5"),
        ("a\nb", "a\\x0ab", "a\\x0ab"),
    ],
)
def test_cells(value, text, cell):
    assert (cell_text(value), csv_text(value)) == (text, cell)


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (lambda n: cell_text(Short(n)),
         {999: "999", 1000: "1.000 K", 999_949: "999.9 K", 999_999: "1.000 M", 999_999_999: "1.000 B", 0: "0",
          4_328_521_728: "4.329 B", 29_003_612_160: "29.00 B", 1_500_000_000_000: "1.500 T"}),
        (bytes_text,
         {768: "768 B", 1000: "1.000 KB", 112_742_891_520: "112.7 GB", 999_960_000: "1.000 GB", 0: "0 B",
          13_761_264_768: "13.76 GB", 2_161_425_899_520: "2.161 TB", 999_940: "999.9 KB"}),
        (time_text,
         {2.0: "2.00 s", 0.0123: "12.3 ms", 0.0009996: "1.00 ms", 1e-3: "1.00 ms", 310e-6: "310 µs",
          12.34e-6: "12.3 µs", 0.5e-6: "500 ns", None: None}),
        (lambda share: percent(share, 2),
         {0.0: "0 %", 0.00432: "0.43 %", 0.0996: "10 %", 0.105: "10 %", 0.994: "99 %", 1.43: "143 %",
          12.345: "1234 %", math.inf: "inf %"}),
        (percent,
         {0.0: "0 %", 0.00432: "0.432 %", 0.0996: "9.96 %", 0.105: "10.5 %", 0.994: "99.4 %", 1.43: "143 %",
          12.345: "1234 %", math.inf: "inf %"}),
        (lambda number: number_text(*number),
         {(99_999.5, 1): "99999.5", (100_000.0, 1): "1e+05", (0.001, 4): "0.0010", (0.0009, 4): "9.000e-04",
          (0.1, 1): "0.1", (0.09, 1): "9e-02", (1e-9, 0): "1e-09", (0.0, 2): "0.00", (-math.inf, 4): "-Inf"}),
        (lambda count: plural("row", count), {0: "rows", 1: "row", 2: "rows"}),
        (finite, {1.5: 1.5, math.inf: None, -math.inf: None, math.nan: None}),
        (width, {"abc": 3, "日本": 4, "e\u0301": 1, "ｆ": 2}),
    ],
)  # fmt: skip
def test_figures(write, texts):
    assert {value: write(value) for value in texts} == texts


def test_a_short_count_has_all_digits_in_csv():
    assert csv_text(Short(4_328_521_728)) == "4328521728"


def test_floats_that_differ_read_differently():
    assert apart([32.0007, 32.0]) == ["32.001", "32"]
    assert apart([32.0, 32.0, None, 7]) == ["32", "32", None, 7]
    assert apart([1.0, 1.0 + 2**-52]) == ["1", "1.0000000000000002"]
    shares = [0.66801, 0.66849, 0.5]
    assert apart(shares, lambda share, digits: f"{100 * share:.{digits}f} %") == ["66.80 %", "66.85 %", "50.00 %"]


@given(size=st.integers(1, 50), most=st.integers(1, 60))
def test_edges(size, most):
    found = edges(size, most)
    assert len(found) == min(size, most)
    assert list(found) == sorted(set(found))
    assert found[0] == 0
    assert most < 2 or found[-1] == size - 1


def test_edges_are_the_first_and_the_last():
    assert (edges(5, 5), edges(6, 5), edges(9, 4)) == ((0, 1, 2, 3, 4), (0, 1, 2, 4, 5), (0, 1, 7, 8))


def lines(shape, index, values, digits=4) -> list[str]:
    return ["  ".join(t for t, _ in line) for line in Excerpt(shape, index, values, digits).lines()]


def test_excerpts():
    assert lines((2,), ((0, 1),), [1.0, -2.5]) == [" 1.0000  -2.5000"]
    assert lines((3, 9), ((0, 2), (0, 1, 8)), [[1, 2, 3], [4, 5, 6]], 1) == [
        "0  1.0  2.0  …  3.0",
        "…",
        "2  4.0  5.0  …  6.0",
    ]
    assert lines((9,), ((0,),), [1.0], 1) == ["1.0  …"]
    assert lines((9, 1), ((0, 1), (0,)), [[1.0], [2.0]], 1) == ["0  1.0", "1  2.0", "…"]  # more rows follow
    assert lines((2, 2, 1), ((0, 1), (0, 1), (0,)), [[[1.0], [2.0]], [[3.0], [4.0]]], 1) == [
        "0,0  1.0", "0,1  2.0", "1,0  3.0", "1,1  4.0",
    ]  # fmt: skip
    assert lines((2, 4, 1), ((0, 1), (0, 3), (0,)), [[[1.0], [2.0]], [[3.0], [4.0]]], 1) == [
        "0,0  1.0", "…".rjust(3), "0,3  2.0", "1,0  3.0", "…".rjust(3), "1,3  4.0",
    ]  # fmt: skip
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


def test_numbers_align_right_where_a_column_has_any():
    table = Table(("a", "b", "c", "d"), [(1, None, True, "x"), (2, 3, False, "y")])
    assert table.right_aligned() == [True, True, False, False]


def test_names_behind_an_at_call_nobody_in_markdown():
    from ffncli.show.output import markdown

    text = markdown([Line("@org/team and a@b.c, ~~gone~~"), Table(("kernel",), [("@all",)])])
    assert "@<!-- -->org/team and a@b.c, \\~\\~gone" in text
    assert "| @<!-- -->all |" in text


def test_a_terminal_gets_an_error_folded_between_words(ffn):
    """A pipe gets one line; at the edge of a terminal no word is cut, a longer one stays whole."""
    text = ffn("trace", "4x8", "--layer", "x" * 50, "--experts", "2", "--top-k", "3").stderr
    assert text.count("\n") == 1
    lines = in_terminal(40, "trace", "4x8", "--experts", "2", "--top-k", "3", code=2).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join(lines) + "\n" == text
    assert folded("a bcd ef", 4) == "a\nbcd\nef"
    assert folded("a b " + "x" * 9, 4) == "a b\n" + "x" * 9
