"""A record of options, and the call that is made of one; every converter takes shell text and Python values alike."""

import inspect
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import pytest

from ffncli.errors import ExitCode, FFNError, option
from ffncli.options import accept
from ffncli.options.accept import COUNT, COUNTS, Accepts, optional
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


TAKEN = [
    (accept.COUNT, "4", 4), (accept.COUNT, 4, 4), (accept.COUNT, np.int64(4), 4), (accept.COUNT, " 7 ", 7),
    (accept.NATURAL, "0", 0), (accept.THREADS, 4096, 4096), (accept.RANKS, "65536", 65536),
    (accept.PROBABILITY, "0.1", 0.1), (accept.PROBABILITY, 0, 0.0), (accept.SHARE, 1, 1.0),
    (accept.FROM_ZERO, "0", 0.0),
    (accept.ABOVE_ZERO, "1e-9", 1e-9),
    (accept.percentage(), "3%", 0.03), (accept.percentage(), "0.03", 0.03), (accept.percentage(zero=True), "0%", 0.0),
    (accept.percentage(0.5), 0.5, 0.5),
    (accept.SECONDS, "500ms", 0.5), (accept.SECONDS, "2m", 120.0), (accept.SECONDS, 20, 20.0),
    (accept.SECONDS, "1.5h", 5400.0),
    (accept.BYTES, "512MB", 512_000_000), (accept.BYTES, "4GiB", 4 << 30), (accept.BYTES, 1000, 1000),
    (accept.BYTES, "4G", 4 * 10**9), (accept.BYTES, "2.5GiB", 5 << 29), (accept.BYTES, "1ki", 1024),
    (accept.BYTES, "0.5 kb", 500), (accept.BYTES, "7", 7), (accept.BYTES, "8B", 8),
    (accept.TEXT, "a", "a"), (accept.PATH, Path("a/b"), "a/b"), (accept.FLAG, False, False),
    (accept.number_or_text("N"), 3, "3"), (accept.number_or_text("N"), "decoder.3", "decoder.3"),
    (accept.COUNTS, "1,32", (1, 32)), (accept.COUNTS, ["1,2", "3"], (1, 2, 3)), (accept.COUNTS, [1, 2], (1, 2)),
    (accept.COUNTS, np.array([1, 2]), (1, 2)), (accept.COUNTS, np.array(5), (5,)), (accept.COUNTS, 5, (5,)),
    (accept.TEXTS, "a,b", ("a,b",)), (accept.TEXTS, ["a", "b"], ("a", "b")), (accept.TEXTS, (), ()),
    (accept.joined("N"), [0, 3], "0,3"), (accept.joined("N"), "2:5", "2:5"), (accept.joined("N"), ["0", "3"], "0,3"),
    (accept.optional(accept.COUNT, "N or all", "all"), "all", None),
    (accept.optional(accept.COUNT, "N or all", "all"), None, None),
    (accept.optional(accept.COUNT, "N or all", "all"), "8", 8),
]  # fmt: skip

REFUSED = [
    (accept.COUNT, 0), (accept.COUNT, "0"), (accept.COUNT, True), (accept.COUNT, 1.0), (accept.COUNT, "1.0"),
    (accept.COUNT, accept.MAX_SIZE + 1), (accept.COUNT, "٣"), (accept.COUNT, None), (accept.COUNT, "9" * 5000),
    (accept.THREADS, 4097), (accept.PROBABILITY, 1), (accept.PROBABILITY, "nan"), (accept.SHARE, 0),
    (accept.SHARE, True),
    (accept.ABOVE_ZERO, "inf"), (accept.FROM_ZERO, -1e-9),
    (accept.percentage(), 3), (accept.percentage(), "0"), (accept.percentage(0.5), "51%"), (accept.percentage(), "x"),
    (accept.SECONDS, "0s"), (accept.SECONDS, 86_401), (accept.SECONDS, "1d"), (accept.SECONDS, True),
    (accept.BYTES, "0"), (accept.BYTES, "4XB"),
    *((accept.BYTES, size) for size in ("", "0.1", "-1", "GB", "4 PB", "1e9", "nan", "4GBs", "9" * 19, "9" * 11 + "T")),
    (accept.TEXT, 3), (accept.TEXT, None), (accept.FLAG, 1),
    (accept.FLAG, "yes"),
    (accept.COUNTS, []), (accept.COUNTS, "1,,2"), (accept.COUNTS, "1,0"), (accept.TEXTS, [1]),
    (accept.number_or_text("N"), 1.5), (accept.joined("N"), [1.5]),
]  # fmt: skip


@pytest.mark.parametrize(("accepts", "value", "meant"), TAKEN)
def test_what_is_taken(accepts: Accepts, value: object, meant: object):
    converted = accepts.convert(value)
    assert (converted, type(converted)) == (meant, type(meant))


@pytest.mark.parametrize(("accepts", "value"), REFUSED)
def test_what_is_refused(accepts: Accepts, value: object):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        accepts.convert(value)


def test_a_bare_number_that_is_likely_a_percentage_gets_a_hint():
    assert accept.percentage().hint("3") == "that would be 300%: write 3%"
    assert accept.percentage().hint("3%") == accept.percentage().hint("x") == ""


def test_words_say_the_limits():
    assert [accept.COUNT.words, accept.THREADS.words] == ["a whole number from 1", "a whole number from 1 to 4096"]


def test_commas_in_brackets_do_not_split():
    draw = Random(0)
    for _ in range(3000):
        text = "".join(draw.choices(",,[]a", k=draw.randrange(12)))
        assert accept.outside_brackets(text) == re.split(r",(?![^\[]*\])", text)
    assert len(accept.outside_brackets("," * 100_000)) == 100_001
    assert accept.outside_brackets("a[" + "," * 100_000 + "]") == ["a[" + "," * 100_000 + "]"]
