"""JSON that nobody vouches for: what is refused, in which words, and that everything ordinary is read as it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.models.files.strict_json import parse_object, read_object

REFUSED = {
    "empty": (b"", "empty"),
    "white space": (b" \n\t", "empty"),
    "words": (b"not json", "not JSON"),
    "single quotes": (b"{'a': 1}", "not JSON"),
    "comma at the end": (b'{"a": 1,}', "not JSON"),
    "cut off": (b'{"a": [1', "not JSON"),
    "something after it": (b'{"a": 1} x', "not JSON"),
    "a NUL": (b"\0", "not JSON"),
    "a raw control character": (b'{"a": "\x1b[31m"}', "not JSON"),
    "a list": (b"[1]", "array"),
    "a string": (b'"x"', "string"),
    "a number": (b"1", "number"),
    "a float": (b"1.5", "number"),
    "true": (b"true", "boolean"),
    "null": (b"null", "null"),
    "a key twice": (b'{"a": 1, "a": 2}', "'a' appears twice"),
    "a key twice, once escaped": (b'{"a": 1, "\\u0061": 2}', "'a' appears twice"),
    "a key twice, deep inside": (b'{"b": [{"a": 1, "a": 1}]}', "'a' appears twice"),
    "a key with ESC twice": (b'{"\\u001b[2J": 1, "\\u001b[2J": 1}', r"\x1b[2J"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "Infinity": (b'{"a": Infinity}', "Infinity"),
    "-Infinity": (b'{"a": [-Infinity]}', "-Infinity"),
    "5000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
    "100,000 lists": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    "100,000 objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deep"),
    "Latin-1": (b'{"a": "\xe9"}', "UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "UTF-8"),
    "UTF-16 without a mark": ('{"a": 1}'.encode("utf-16-le"), "not"),
    "an encoded surrogate": (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
}


@pytest.mark.parametrize(("raw", "says"), REFUSED.values(), ids=REFUSED)
def test_refused(raw: bytes, says: str, tmp_path: Path):
    path = _file(tmp_path / "here.json", raw)
    for read in (lambda: parse_object(raw, "here.json"), lambda: read_object(path, 10**7)):
        with pytest.raises(FFNError) as error:
            read()
        assert "here.json" in error.value.message
        assert says in str(error.value)
        assert str(error.value).isprintable()


@pytest.mark.parametrize("size", [99, 100, 101])
def test_a_file_may_be_as_large_as_the_cap(size: int, tmp_path: Path):
    path = _file(tmp_path / "config.json", b"{}".ljust(size))
    if size <= 100:
        assert read_object(path, 100) == {}
    else:
        with pytest.raises(FFNError, match=r"config\.json is larger than 100 bytes"):
            read_object(path, 100)


def test_an_endless_file_is_not_read():
    with pytest.raises(FFNError, match="it is a device, not a file"):
        read_object(Path("/dev/zero"), 1000)


def test_what_is_no_file_is_named(tmp_path: Path):
    with pytest.raises(FFNError, match=r"cannot read .*: Is a directory"):
        read_object(tmp_path, 100)
    with pytest.raises(FFNError, match=r"cannot read .*none\.json: No such file"):
        read_object(tmp_path / "none.json", 100)


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda s: s.encode("utf-8", "surrogatepass")))
def test_any_bytes_give_an_object_or_a_refusal(raw: bytes):
    try:
        said: object = parse_object(raw, "f")
    except FFNError as error:
        said = str(error)
    assert isinstance(said, dict) or str(said).isprintable()


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_values = st.recursive(_scalars, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=9)


@given(st.dictionaries(st.text(), _values, max_size=5), st.booleans())
def test_ordinary_json_is_read_as_it_stands(value: dict[str, object], escaped: bool):
    assert parse_object(json.dumps(value, ensure_ascii=escaped).encode(), "f") == value


def _file(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path
