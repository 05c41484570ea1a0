from __future__ import annotations

import re

import pytest

from ffncli.cli.common.options import OutputOptions, RunOptions, TokenOptions
from ffncli.cli.common.parsers import byte_count, natural, positive, probability
from ffncli.errors import FFNError


def test_numbers_at_their_limits():
    assert (positive("--x", 5)("5"), natural("--x", 5)("5"), natural("--x")("0")) == (5, 5, 0)
    assert (probability("--x")("0"), probability("--x")("0.999")) == (0.0, 0.999)
    with pytest.raises(FFNError, match="--x must be a whole number from 1 to 5, got 6"):
        positive("--x", 5)("6")
    with pytest.raises(FFNError, match="--x must be a whole number from 1 to 5, got 0"):
        positive("--x", 5)("0")
    with pytest.raises(FFNError, match="--x must be a whole number from 0 to 5, got '6'"):
        natural("--x", 5)("6")


@pytest.mark.parametrize(
    ("typed", "size"),
    [
        ("512MB", 512 * 10**6),
        ("4G", 4 * 10**9),
        ("2.5GiB", 5 << 29),
        ("1ki", 1024),
        ("0.5 kb", 500),
        ("7", 7),
        ("8B", 8),
    ],
)
def test_sizes(typed, size):
    assert byte_count("--x")(typed) == size


@pytest.mark.parametrize("typed", ["", "0", "0.1", "-1", "GB", "4 PB", "1e9", "9" * 19, "nan", "4GBs", "99999999999T"])
def test_what_is_no_size(typed):
    with pytest.raises(FFNError, match="--x must be a size, as in 512MB or 4GiB, got"):
        byte_count("--x")(typed)


def test_tokens():
    assert TokenOptions().leading() is None
    assert TokenOptions(tokens=4).leading() == (4,)
    assert TokenOptions(batch=2, seq_len=3).leading() == (2, 3)
    assert (TokenOptions(batch=2).leading(), TokenOptions(seq_len=3).leading()) == ((2, 1), (1, 3))
    for contradiction in (TokenOptions(1, batch=1), TokenOptions(1, seq_len=1)):
        with pytest.raises(FFNError, match="contradicts"):
            contradiction.leading()


@pytest.mark.parametrize(
    ("options", "style"),
    [
        ({}, "table"),
        ({"out": "x"}, "table"),
        ({"out": "x.md"}, "md"),
        ({"out": "x.csv"}, "csv"),
        ({"out": "x.txt"}, "table"),
        ({"out": "x.JSON"}, "json"),
        ({"out": "x.txt", "csv": True}, "csv"),
        ({"out": "x", "format": "md"}, "md"),
        ({"out": "v1.5/x"}, "table"),
        ({"out": "-", "json": True}, "json"),
        ({"out": "x.json", "format": "json"}, "json"),
        ({"json": True, "format": "json"}, "json"),
    ],
)
def test_the_format(options, style, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1.5").mkdir()
    assert OutputOptions(**options).output().format == style


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "x.npz"}, "-o 'x.npz': cannot write .npz files; use .json, .csv, .md, .txt or no suffix"),
        *(({"out": f"x{end}"}, f"cannot write {end} files") for end in (".svg", ".html", ".png", ".log")),
        ({"out": "x.npz", "format": "json"}, "cannot write .npz files"),
        ({"out": "x.json", "csv": True}, "-o 'x.json' contradicts --format csv; -o of .json is json"),
        ({"out": "x.md", "format": "table"}, "-o 'x.md' contradicts --format table"),
    ],
)
def test_a_file_that_would_not_hold_what_its_name_says(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FFNError, match=re.escape(says)) as error:
        OutputOptions(**options).output()
    assert error.value.code == 2
    assert not list(tmp_path.iterdir())


def test_the_sink_has_what_was_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = OutputOptions(out="~/x", force=True, no_color=True, quiet=True).output()
    assert (found.path, found.force, found.color, found.quiet) == (str(tmp_path / "x"), True, "never", True)
    assert RunOptions().device == "cpu"


def test_when_there_is_colour():
    assert OutputOptions().output().color == "auto"
    assert [OutputOptions(color=c).output().color for c in ("auto", "always", "never")] == ["auto", "always", "never"]
    assert OutputOptions(color="never", no_color=True).output().color == "never"
    with pytest.raises(FFNError, match="--no-color contradicts --color always; give one"):
        OutputOptions(color="always", no_color=True).output()
    with pytest.raises(FFNError, match="--color: unknown value 'purple'; use auto, always or never"):
        OutputOptions(color="purple").output()
