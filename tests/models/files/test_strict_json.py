"""JSON that nobody vouches for: what is refused, in which words; records of it, refused with the path of the field."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.bench.records import Case, Method, Outcome, Roof, TimedBlock, TimedUnit
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.models.files.json_records import Form, OneOf, Range, checker, record_of
from ffncli.models.files.strict_json import parse_object, read_object

REFUSED = {
    "empty": (b"", "empty"), "white space": (b" \n\t", "empty"), "words": (b"not json", "not JSON"),
    "single quotes": (b"{'a': 1}", "not JSON"), "comma at the end": (b'{"a": 1,}', "not JSON"),
    "cut off": (b'{"a": [1', "not JSON"), "something after it": (b'{"a": 1} x', "not JSON"),
    "a NUL": (b"\0", "not JSON"), "a raw control character": (b'{"a": "\x1b[31m"}', "not JSON"),
    "a list": (b"[1]", "array"), "a string": (b'"x"', "string"), "a number": (b"1", "number"),
    "a float": (b"1.5", "number"), "true": (b"true", "boolean"), "null": (b"null", "null"),
    "a key twice": (b'{"a": 1, "a": 2}', "'a' appears twice"),
    "a key twice, once escaped": (b'{"a": 1, "\\u0061": 2}', "'a' appears twice"),
    "a key twice, deep inside": (b'{"b": [{"a": 1, "a": 1}]}', "'a' appears twice"),
    "a key with ESC twice": (b'{"\\u001b[2J": 1, "\\u001b[2J": 1}', r"\x1b[2J"), "NaN": (b'{"a": NaN}', "NaN"),
    "Infinity": (b'{"a": Infinity}', "Infinity"), "-Infinity": (b'{"a": [-Infinity]}', "-Infinity"),
    "5000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
    "100,000 lists": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    "100,000 objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deep"), "Latin-1": (b'{"a": "\xe9"}', "UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "UTF-8"), "UTF-16 without a mark": ('{"a": 1}'.encode("utf-16-le"), "not"),
    "an encoded surrogate": (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
}  # fmt: skip


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


@dataclass(frozen=True)
class Part:
    name: str
    size: Annotated[int, Range(1, 10)] = 1


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    kind: Literal["a", "b"]
    share: Annotated[float, Range(0, above=True)] | None = None
    by_name: Mapping[str, float] = field(default_factory=dict)
    flag: bool = False
    word: Annotated[str, OneOf(("x", "y"))] = "x"
    digits: Annotated[str, Form("[0-9]+")] = "0"
    other: Any = None


GOOD: dict[str, Any] = {"parts": [{"name": "n", "size": 2}, {"name": "m"}], "kind": "b", "by_name": {"k": 1}}


def test_what_fits_becomes_the_record():
    made = record_of(Whole, GOOD | {"share": 0.5, "flag": True, "other": [1]}, "a file")
    assert made == Whole((Part("n", 2), Part("m")), "b", 0.5, {"k": 1.0}, True, other=[1])
    assert isinstance(made.by_name["k"], float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parts": 3}, "parts must be a list, got 3"),
        ({"parts": [3]}, "parts[0] must be an object, got 3"),
        ({"parts": [{"name": "n"}, {"name": 5}]}, "parts[1].name must be a string, got 5"),
        ({"parts": [{"name": "n", "size": 0}]}, "parts[0].size must be at least 1 and at most 10, got 0"),
        ({"parts": [{"name": "n", "size": 1.0}]}, "parts[0].size must be a whole number, got 1.0"),
        ({"parts": [{"name": "n", "size": True}]}, "parts[0].size must be a whole number, got True"),
        ({"parts": [{}]}, "parts[0] has no field name"),
        ({"parts": [{"name": "n", "nam": 1}]}, "parts[0] has the unknown field 'nam'"),
        ({"": 1}, "it has the unknown field ''"),
        ({"kind": "c"}, "kind must be one of a, b, got 'c'"),
        ({"kind": ["a"]}, "kind must be one of a, b, got ['a']"),
        ({"share": 0}, "share must be above 0, got 0"),
        ({"share": float("nan")}, "share must be a number, got nan"),
        ({"share": 10**400}, "share must be a number"),
        ({"by_name": {"k": "1"}}, "by_name['k'] must be a number, got '1'"),
        ({"by_name": []}, "by_name must be an object, got []"),
        ({"flag": 1}, "flag must be true or false, got 1"),
        ({"flag": None}, "flag must be true or false, got None"),
        ({"word": "z"}, "word must be one of x, y, got 'z'"),
        ({"digits": "1a"}, "digits does not have the required form"),
    ],
)
def test_anything_else_is_refused_by_its_path(change: dict[str, Any], words: str):
    with pytest.raises(FFNError) as error:
        record_of(Whole, GOOD | change, "f, line 3", "hint")
    assert error.value.message.startswith(f"f, line 3: {words}"), error.value.message
    assert error.value.hint == "hint"


def test_what_a_record_refuses_as_a_whole_has_its_path():
    spec = asdict(FFNSpec(4, 8, "swiglu", moe=MoE(4, 2)))
    assert record_of(FFNSpec, spec, "f") == FFNSpec(4, 8, "swiglu", moe=MoE(4, 2))
    case = asdict(Case("4x8", "4x8", FFNSpec(4, 8), 1))
    with pytest.raises(FFNError, match=r"f: spec is impossible: top_k \(9\) exceeds the number of experts \(4\)"):
        record_of(Case, case | {"spec": spec | {"moe": {"experts": 4, "top_k": 9}}}, "f")


@pytest.mark.parametrize("kind", [Method, Case, Outcome, Roof, TimedUnit, TimedBlock])
def test_every_field_of_a_benchmarks_records_is_checked(kind: type):
    """Whatever a field holds, one of these two values is none that it may have; a new field is no exception."""
    made = {
        Method: Method(), Case: Case("4x8", "4x8", FFNSpec(4, 8), 1), Outcome: Outcome("eager"), Roof: Roof(),
        TimedUnit: TimedUnit(0, "c", "eager", "warm", (), ()), TimedBlock: TimedBlock(0, "c", 0, 0, 0, "eager", 1, 1.0),
    }[kind]  # fmt: skip
    good = json.loads(json.dumps(asdict(made)))
    assert record_of(kind, good, "f") == made
    for name in good:
        refused = [wrong for wrong in ({"no": {}}, "no such word", -1.5) if not accepted(kind, good | {name: wrong})]
        assert len(refused) >= 2, name


def accepted(kind: type, value: dict[str, Any]) -> bool:
    try:
        record_of(kind, value, "f")
    except FFNError:
        return False
    return True


def test_an_annotation_without_a_check_is_an_error_of_ours():
    with pytest.raises(TypeError, match="no check for"):
        checker(list[int])
