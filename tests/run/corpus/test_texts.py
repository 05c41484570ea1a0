"""A corpus's texts: from text files, .jsonl, standard input and lists; what is no text is refused with its line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from ffncli.errors import FFNError
from ffncli.run.corpus.texts import opened


def texts(source: Any) -> list[tuple[int, str]]:
    with opened(source) as corpus:
        first, again = ([(one.number, one.text) for one in corpus] for _ in range(2))
        assert first == again
        ends = [one.end for one in corpus]
        assert ends == sorted(ends)
        assert not ends or ends[-1] <= corpus.size
        numbers = [number for number, _ in first[::2]]
        assert corpus.texts(numbers) == dict(first[::2])
        return first


def test_a_line_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes("eins\n\n  \nzwei  \r\n日本\nlast".encode())
    assert texts(str(path)) == [(0, "eins"), (1, "zwei  "), (2, "日本"), (3, "last")]
    assert texts(path) == texts(str(path))


def test_jsonl_has_strings_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = ["one\nline", {"text": "two", "id": 3}, {"prompt": "three"}, {"content": "four"}, {"text": ""}]
    path.write_text("\n\n".join(map(json.dumps, lines)), "utf-8")
    assert [text for _, text in texts(path)] == ["one\nline", "two", "three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'"fine"\n{"id": 1}\n', ":2: no text"),
        ("a.jsonl", b'"fine"\n\n{oops\n', ":3: not JSON"),
        ("a.jsonl", b"[1]", ":1: no text"),
        ("a.jsonl", b"[" * 100_000, ":1: not JSON"),
        ("a.txt", b"a\n\xff\n", ":2: not UTF-8"),
    ],
)
def test_the_line_that_is_no_text_is_named(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FFNError, match=name + line):
        texts(path)


def test_a_long_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"short\n" + b"x" * 10_000_001)
    with pytest.raises(FFNError, match=r"corpus.txt:2: a text of more than 10,000,000 bytes"):
        texts(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "nothing", "/dev/zero"):
        with pytest.raises(FFNError, match="prompts: cannot read"):
            texts(name)


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert texts("-") == [(0, "a"), (1, "b")]
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(FFNError, match="standard input: it is closed"):
        texts("-")


def test_given_texts_may_have_lines() -> None:
    assert texts(["a\nb", " ", "c"]) == [(0, "a\nb"), (1, "c")]
