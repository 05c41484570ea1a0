"""Arguments of a call are bound and converted before it does anything; each wrong one is an FFNError that names it."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import ffncli
from ffncli.errors import FFNError, shown
from ffncli.options.accept import COUNT, PATHS, TEXT, converted, real
from ffncli.options.arguments import checked


class NoRepr:
    def __repr__(self) -> str:
        raise KeyError("repr")


@checked(name=TEXT, tokens=COUNT)
def said(name: str, tokens: int = 1) -> tuple[str, int]:
    """What was given."""
    return name, tokens


def test_a_checked_function_gets_converted_arguments_and_keeps_its_name():
    assert said("a", np.int64(3)) == said(name="a", tokens=" 3 ") == ("a", 3)
    assert (said.__name__, said.__doc__) == ("said", "What was given.")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "said: missing a required argument: 'name'"),
        (("a", 1, 2), {}, "said: too many positional arguments"),
        (("a",), {"name": "b"}, "said: multiple values for argument 'name'"),
        (("a",), {"token": 1}, "no argument 'token'; did you mean 'tokens'?"),
        ((0,), {}, "name must be a string, got 0"),
        ((NoRepr(),), {}, "name must be a string, got <NoRepr>"),
        (("a", True), {}, "tokens must be a whole number from 1, got True"),
        (("a", torch.tensor(True)), {}, "tokens must be a whole number from 1, got tensor(True)"),
        (("a", torch.ones((), device="meta")), {}, "tokens must be a whole number from 1"),
    ],
)
def test_a_wrong_argument_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], message: str):
    with pytest.raises(FFNError) as caught:
        said(*args, **kwargs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ffncli.explain(0), "topic must be a string, got 0"),
        (lambda: ffncli.cost("fp32"), "steps must be steps, as from ffncli.steps, got 'fp32'"),
        (lambda: ffncli.load(True), "source must be a string such as"),
        (lambda: ffncli.activation("gelu", at=torch.ones(2, 2)), "at must be numbers from -1e+09 to 1e+09"),
        (lambda: ffncli.activation("gelu", std=1e-300), "std must be from 1e-06 to 1e+06"),
        (lambda: ffncli.compare([1], "b.csv"), "base must be one or more paths, got [1]"),
        (lambda: ffncli.compare("a\0b", "b.csv"), "base: 'a\\x00b' is not a file name"),
        (lambda: ffncli.report("a" * 300), "does not exist"),
        (lambda: ffncli.trace("a" * 300 + ".py:f"), "does not exist"),
        (lambda: ffncli.report("a.csv", about=5), "about must be a string, got 5"),
        (lambda: ffncli.benchmark("4x8", ranks=2), "ranks must be a Ranks, got 2"),
        (lambda: ffncli.kernel("eager", (), {}), "these steps have no projection"),
        (lambda: ffncli.kernel("auto", ffncli.FFNSpec(4, 8), {"down.weight": 1}), "down.weight is not a tensor"),
        (lambda: ffncli.FFNSpec(4, 8, activation=5), "activation must be a string, got 5"),
        (lambda: ffncli.FFNSpec(4, 8, moe=2), "moe must be a MoE or None, got 2"),
        (lambda: ffncli.FFNSpec(4, 8, residual=1), "residual must be True or False, got 1"),
        (lambda: ffncli.FFNSpec(4, 8, dropout=True), "dropout must be a number, got True"),
        (lambda: ffncli.FFNSpec(4), "FFNSpec: missing a required argument: 'd_ff'"),
        (lambda: ffncli.MoE("4", 2), "experts must be a whole number"),
    ],
)
def test_a_call_refuses_another_type_by_name(call: Any, message: str):
    with pytest.raises(FFNError) as caught:
        call()
    assert message in str(caught.value)


def test_arrays_are_lists_of_numbers():
    right = ffncli.activation("gelu", at=[-1.0, 0.5]).values
    assert ffncli.activation("gelu", at=torch.tensor([-1.0, 0.5])).values == right
    assert ffncli.activation("gelu", at=np.array([-1.0, 0.5])).values == right


def test_a_list_without_an_end_a_mapping_and_bytes_are_refused():
    for value in (itertools.repeat("a.csv"), {"a.csv": 1}, b"a.csv"):
        with pytest.raises(FFNError, match=r"paths|values"):
            converted("paths", value, PATHS)
    for value in (b"1.5", np.True_):
        with pytest.raises(FFNError, match="x must be a number"):
            converted("x", value, real("a number", lambda x: True))


def test_what_cannot_be_printed_is_named_by_its_class():
    assert shown(NoRepr()) == "<NoRepr>"
