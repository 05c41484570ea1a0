"""A record of options, and the call that is made of one."""

import inspect
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from ffncli.errors import ExitCode, FFNError, option
from ffncli.options.accept import COUNT, COUNTS, optional
from ffncli.options.opt import Opt, Options, as_typed, call, chosen, options_of


@dataclass(frozen=True, kw_only=True)
class Width(Options):
    """How wide."""

    d_test: Annotated[int | str | None, Opt("--d-test", help="Width.", accepts=COUNT)] = None


@dataclass(frozen=True, kw_only=True)
class Question(Width):
    """What to ask."""

    name: Annotated[str | None, Opt(metavar="NAME", help="Of what.")] = field(default=None, kw_only=False)
    ranks: Annotated[
        int | Sequence[int] | None, Opt("-r", "--rk", "--test-ranks", help="Ranks.", accepts=COUNTS, repeat=True)
    ] = None
    loud: Annotated[bool, Opt("--loud", help="Shout.")] = False
    kept: tuple[str, ...] = ()


ask = call(Question, lambda question: question, "ask")


def test_the_options_of_a_record_come_before_those_of_its_bases():
    assert list(options_of(Question)) == ["name", "ranks", "loud", "d_test"]
    assert list(inspect.signature(ask).parameters) == ["name", "ranks", "loud", "kept", "d_test"]
    assert (ask.__name__, ask.__doc__) == ("ask", "What to ask.")


def test_a_call_takes_what_a_shell_types_and_python_has():
    assert ask("x", ranks="1,2", d_test=" 4 ") == ask(name="x", ranks=[1, "2"], d_test=4)
    assert ask("x", ranks=3, kept=("a",)) == Question("x", ranks=(3,), kept=("a",))
    assert (chosen(ask()), chosen(ask(d_test=1, loud=True))) == ((), ("loud", "d_test"))
    assert ask(loud=None).loud is False


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_test": 0}, "d_test must be a whole number from 1, got 0"),
        ({"ranks": [2, True]}, "ranks must be one or more whole numbers from 1, got [2, True]"),
        ({"loud": "yes"}, "loud must be True or False, got 'yes'"),
        ({"rank": 1}, "no argument 'rank'; did you mean 'ranks'?"),
    ],
)
def test_a_wrong_argument_is_named(wrong, message):
    with pytest.raises(FFNError) as caught:
        ask(**wrong)
    assert str(caught.value) == message


def test_a_shell_reads_the_first_long_name():
    error = FFNError(f"{option('ranks', 3)} contradicts {option('loud')}", f"leave out {option('d_test')}")
    assert str(error) == "ranks=3 contradicts loud; leave out d_test"
    assert error.in_words(as_typed) == "--rk 3 contradicts --loud; leave out --d-test"


def test_none_is_the_default_unless_it_is_a_value():
    @dataclass(frozen=True, kw_only=True)
    class Rows(Options):
        rows: Annotated[int | None, Opt("--rows", help="Rows.", accepts=optional(COUNT, "N or all", "all"))] = 8
        tokens: Annotated[int | None, Opt("--tokens", help="Tokens.", accepts=COUNT)] = 4

    assert [Rows(rows=None).rows, Rows(rows="all").rows, Rows(rows="3").rows] == [None, None, 3]  # type: ignore[arg-type]
    assert Rows(tokens=None).tokens == 4


def test_an_error_keeps_both_spellings_on_its_way_through_a_process():
    error = FFNError(f"{option('norm', 'none')} contradicts {option('residual', False)}", code=ExitCode.FAILED)
    again = pickle.loads(pickle.dumps(error.within("here")))
    assert (str(again), again.code) == ("here: norm='none' contradicts residual=False", ExitCode.FAILED)
    assert again.in_words(as_typed) == "here: --norm none contradicts --no-residual"
