"""ffncli.dataclass against the standard library's decorator: the same classes, quicker to define."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from ffncli import dataclass as ours

NAN = float("nan")
ROOT = Path(__file__).parents[1]
DECORATORS = {"ours": ours.dataclass, "library": dataclasses.dataclass}


def defined(decorator: Any) -> dict[str, Any]:
    """The same classes by either decorator."""

    @decorator(frozen=True)
    class Point:
        """Of a plane."""

        x: int
        y: int = 2
        note: str = dataclasses.field(default="", compare=False, repr=False)
        names: list[str] = dataclasses.field(default_factory=list, hash=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "cached", self.x + self.y)

    @decorator(frozen=True, kw_only=True)
    class Solid(Point):
        z: int = 3

    @decorator
    class Open:
        x: int
        inner: Any = None

    @decorator(frozen=True)
    class Empty:
        pass

    @decorator(frozen=True, eq=False)
    class Identity:
        x: int

    @decorator(frozen=True)
    class Own:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "mine"

    @decorator(frozen=True, repr=False)
    class Hashed:
        x: int

        def __hash__(self) -> int:
            return 7

    class Child(Point):
        pass

    @decorator(frozen=True)
    class Single:
        x: Any

    return {"decorator": decorator, **{name: made for name, made in vars().items() if isinstance(made, type)}}


def attempt(action: Any) -> Any:
    """What it returns, or the class and text of what it raises."""
    try:
        return action()
    except Exception as error:
        return type(error), str(error)


QUESTIONS: dict[str, Any] = {
    "repr": lambda c: (repr(c["Point"](1)), repr(c["Solid"](1, z=4)), repr(c["Own"](1)), repr(c["Empty"]())),
    "repr of a ring": lambda c: repr(ring(c["Open"](1))),
    "equal": lambda c: (
        c["Point"](1) == c["Point"](1, note="other"),
        c["Point"](1) == c["Point"](2),
        c["Point"](1) == c["Child"](1),
        c["Point"](1) == (1, 2),
        c["Identity"](1) == c["Identity"](1),
        c["Own"](1) == 5,
        c["Empty"]() == c["Empty"](),
        c["Open"](1) != c["Open"](1),
    ),
    "equal without asking its only value": lambda c: c["Single"](NAN) == c["Single"](NAN),
    "a library's class that inherits": lambda c: repr(dataclasses.dataclass(frozen=True)(subclass(c["Point"]))(1, w=2)),
    "a library's class that opens a frozen one": lambda c: dataclasses.dataclass(subclass(c["Point"])),
    "a class that freezes an open one": lambda c: c["decorator"](frozen=True)(subclass(c["Open"])),
    "a class that opens a frozen one": lambda c: c["decorator"](subclass(c["Point"])),
    "same class alone": lambda c: c["Point"](1).__eq__(3),
    "hash by value": lambda c: len({c["Point"](1, note="a"), c["Point"](1, names=["b"]), c["Point"](3), c["Child"](1)}),
    "hashes differ": lambda c: hash(c["Point"](1)) != hash(c["Point"](3)),
    "own hash": lambda c: (hash(c["Hashed"](1)), hash(c["Own"](1)) == hash(c["Own"](1))),
    "no hash": lambda c: hash(c["Open"](1)),
    "assign": lambda c: setattr(c["Point"](1), "x", 5),
    "assign in a child": lambda c: setattr(c["Child"](1), "x", 5),
    "assign a new name": lambda c: setattr(c["Point"](1), "typo", 5),
    "assign a new name in a child": lambda c: setattr(c["Child"](1), "more", 5),
    "assign where open": lambda c: setattr(c["Open"](1), "x", 5),
    "delete": lambda c: delattr(c["Point"](1), "x"),
    "delete in a child": lambda c: delattr(c["Child"](1), "x"),
    "delete where open": lambda c: delattr(c["Open"](1), "x"),
    "replace": lambda c: repr(dataclasses.replace(c["Solid"](1), y=9)),
    "asdict": lambda c: dataclasses.asdict(c["Solid"](1, names=["a"])),
    "fields": lambda c: [field.name for field in dataclasses.fields(c["Solid"])],
    "match": lambda c: (c["Point"].__match_args__, c["Solid"].__match_args__),
    "copy": lambda c: repr(copy.deepcopy(c["Point"](4))) + repr(copy.copy(c["Point"](4))),
    "too few": lambda c: c["Point"](),
    "by position": lambda c: c["Solid"](1, 2, "", [], 4),
    "documented": lambda c: (c["Point"].__doc__, c["Point"].__name__, c["Point"](1).cached),
}


def subclass(base: type) -> type:
    """A class with one more field."""
    return type("Sub", (base,), {"__annotations__": {"w": int}, "w": 0, "__module__": __name__})


def ring(instance: Any) -> Any:
    """An instance that contains itself."""
    instance.inner = instance
    return instance


@pytest.mark.parametrize("question", QUESTIONS)
def test_classes_behave_as_the_librarys(question: str) -> None:
    answers = {name: attempt(lambda: QUESTIONS[question](defined(d))) for name, d in DECORATORS.items()}  # noqa: B023
    assert str(answers["ours"]) == str(answers["library"])


@ours.dataclass(frozen=True)
class Stored:
    """Importable, for pickle."""

    x: int


def test_pickle_restores_a_frozen_class() -> None:
    assert pickle.loads(pickle.dumps(Stored(3))) == Stored(3)


def test_every_class_of_the_package_uses_it() -> None:
    found = [
        path.name
        for path in (ROOT / "ffncli").rglob("*.py")
        if path.name != "dataclass.py"
        and re.search(r"^from dataclasses import .*\bdataclass\b", path.read_text(), re.M)
    ]
    assert not found
