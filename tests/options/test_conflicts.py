"""Rules between options: each breaks for the options that it names, and for no others."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from ffncli.errors import FFNError
from ffncli.options.accept import COUNTS, TEXTS
from ffncli.options.conflicts import Conflict, check, given, table
from ffncli.options.opt import Opt, Options, as_typed, options_of


@dataclass(frozen=True, kw_only=True)
class _Cake(Options):
    """Options of a test."""

    layers: Annotated[int | tuple[int, ...] | None, Opt("--layers", help="Layers.", accepts=COUNTS)] = None
    icing: Annotated[str | tuple[str, ...] | None, Opt("--cake-icing", help="Icing.", accepts=TEXTS)] = None
    vegan: Annotated[bool | None, Opt("--vegan/--dairy", help="Without milk.")] = None
    plain_cake: Annotated[bool, Opt("--plain-cake", help="Nothing else.")] = False


RULES = (
    Conflict("plain_cake", contradicts="layers!=1 icing", why="it is plain"),
    Conflict("icing=cream", contradicts="vegan", why="cream is milk"),
    Conflict("layers=9", needs="icing=glue vegan", why="it would fall over"),
)
SEVERAL = (Conflict("layers icing", contradicts="vegan", unless="plain_cake", why="so be it"),)


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        ({"plain_cake": True, "layers": 2}, "plain_cake contradicts layers=2", "it is plain"),
        ({"plain_cake": True, "layers": [1, 3]}, "plain_cake contradicts layers=3", "it is plain"),
        ({"plain_cake": True, "icing": "cream"}, "plain_cake contradicts icing", "it is plain"),
        ({"icing": ["glue", "cream"], "vegan": True}, "icing='cream' contradicts vegan", "cream is milk"),
        ({"layers": 9}, "layers=9 needs icing='glue' or vegan", "it would fall over"),
    ],
)
def test_a_broken_rule(options: dict[str, object], error: str, hint: str) -> None:
    with pytest.raises(FFNError) as raised:
        check(RULES, given(_Cake(**options)))  # type: ignore[arg-type]
    assert (raised.value.message, raised.value.hint) == (error, hint)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plain_cake": True, "layers": 1},
        {"plain_cake": True, "vegan": True},
        {"icing": "glue", "vegan": True},
        {"icing": "cream"},
        {"layers": 9, "icing": "glue"},
        {"layers": 9, "vegan": True},
    ],
)
def test_options_that_go_together(options: dict[str, object]) -> None:
    check(RULES, given(_Cake(**options)))  # type: ignore[arg-type]


def test_what_a_rule_allows() -> None:
    alone = (Conflict("plain_cake", allows="vegan", why="it is plain"),)
    check(alone, {"plain_cake": True, "vegan": True, "layers": ()})
    with pytest.raises(FFNError, match="plain_cake contradicts layers"):
        check(alone, {"plain_cake": True, "vegan": True, "layers": (1,)})


def test_errors_as_typed() -> None:
    options_of(_Cake)
    with pytest.raises(FFNError) as raised:
        check(RULES, {"plain_cake": True, "icing": ("cream",)})
    assert raised.value.in_words(as_typed) == "--plain-cake contradicts --cake-icing; it is plain"


def test_the_table_of_the_manual() -> None:
    options_of(_Cake)
    rules = (
        RULES[0],
        RULES[2],
        Conflict("vegan", contradicts="icing=cream layers plain_cake", why="of milk"),
        Conflict("plain_cake", allows="vegan layers", why="it is plain"),
        Conflict("plain_cake", why="nothing"),
    )
    assert table(rules, {"the others": "layers plain_cake"}).splitlines()[2:] == [
        "| `--plain-cake` | contradicts `--layers` other than `1` and `--cake-icing` | it is plain |",
        "| `--layers 9` | needs `--cake-icing glue` or `--vegan` | it would fall over |",
        "| `--vegan` | contradicts `--cake-icing cream` and the others | of milk |",
        "| `--plain-cake` | contradicts all options but `--vegan` and `--layers` | it is plain |",
        "| `--plain-cake` | stands alone | nothing |",
    ]


def test_a_rule_of_several_options_holds_for_each_unless_another_is_given():
    for options, name in (({"layers": 0}, "layers"), ({"icing": "glue"}, "icing")):
        with pytest.raises(FFNError, match=f"{name} contradicts vegan; so be it"):
            check(SEVERAL, {**options, "vegan": True})
        check(SEVERAL, {**options, "vegan": True, "plain_cake": True})
    with pytest.raises(FFNError, match="icing contradicts vegan=False"):
        check(SEVERAL, _Cake(icing="glue", vegan=False))  # of a record, a flag that is off is given
    check(SEVERAL, {"icing": "glue", "vegan": False})
    assert table(SEVERAL).splitlines()[-1] == (
        "| `--layers` or `--cake-icing` | contradicts `--vegan`, unless `--plain-cake` is given | so be it |"
    )


def test_an_array_is_given_without_a_comparison():
    import numpy

    assert [*given(_Cake(layers=numpy.array([1, 2])))] == ["layers"]
