"""Records from JSON: what fits a dataclass becomes it, anything else is refused with the path of the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import pytest

from ffncli.bench.records import Case, Method, Outcome, Roof, TimedBlock, TimedUnit
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.models.files.json_records import Form, OneOf, Range, checker, record_of


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
        ({"parts": [{"name": "n"}, {"name": 5}]}, "parts[1].name must be a text, got 5"),
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
        ({"digits": "1a"}, "digits is not of the form"),
    ],
)  # fmt: skip
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
