"""`--assert`: conditions on the keys of a row, for CI. 0 where all hold, 1 where one does not, 2 where one is none."""

from __future__ import annotations

import json
import operator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.models.counting.assertions import check, parse
from tests.oracles.checkpoints import LLAMA, expect_difference, expect_refusal, folder, tensors

OPERATORS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
ROW = {"name": "a model", "d_ff": 3072, "share": 0.5, "gated": False, "layers": None, "activation": "gelu_tanh"}


def holds(text: str) -> bool:
    """Whether a condition holds for ROW."""
    try:
        check(parse([text], list(ROW)), [ROW])
    except FFNError as error:
        if error.code == 1:
            return False
        raise
    return True


@given(st.sampled_from(list(OPERATORS)), st.integers(3070, 3074), st.sampled_from(["", " ", "  "]))
def test_operators_on_numbers(sign: str, value: int, space: str):
    assert holds(f"d_ff{space}{sign}{space}{value}") == OPERATORS[sign](3072, value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d_ff == 3_072", True), ("d_ff == 3,072", True), ("d_ff == 3072.0", True), ("d_ff == 3.072e3", True),
        ("d_ff == +3072", True), ("d_ff > -1", True), ("share == .5", True), ("share == 0.5", True),
        ("share != 5e-1", False), (" d_ff==3072 ", True),
        ("gated == false", True), ("gated == no", True), ("gated == FALSE", True), ("gated == true", False),
        ("gated != yes", True), ("layers == null", True), ("layers == none", True), ("layers != 12", True),
        ("d_ff == null", False), ("d_ff != null", True), ("activation == gelu_tanh", True),
        ("activation == 'gelu_tanh'", True), ('activation == "gelu_tanh"', True), ("activation != gelu", True),
        ("activation == GELU_TANH", False), ("name == a model", True), ("name == 'a model'", True),
        ("name == \"a model'", False),
    ],
)  # fmt: skip
def test_values_of_every_kind(text: str, expected: bool):
    assert holds(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "d_ff", "==", "== 3072", "d_ff ==", "d_ff = 3072", "d_ff =! 3", "d_ff 3072", "3072 == d_ff"],
)
def test_what_is_no_condition(text: str, call):
    out = expect_refusal(call("params", "gpt2", "--assert", text), "--assert")
    assert "is no condition" in out or "no key '3072'" in out


@pytest.mark.parametrize(
    ("key", "hint"),
    [("ffn_params_totl", "did you mean 'ffn_params_total'"), ("d_fff", "did you mean 'd_ff'"),
     ("zzz", "any key of the row"), ("groups", "no key 'groups'"), ("evidence", "no key 'evidence'"),
     ("__class__", "no key '__class__'"), ("name.x", "no key 'name.x'")],
)  # fmt: skip
def test_a_key_that_no_row_has(key: str, hint: str, call):
    expect_refusal(call("params", "gpt2", "--assert", f"{key} == 1"), hint)


@pytest.mark.parametrize("text", ["d_ff < gelu", "d_ff < null", "d_ff > true", "d_ff <> 3", "layers >= '1'"])
def test_what_no_number_can_be_compared_by(text: str, call):
    expect_refusal(call("params", "./nowhere", "--assert", text), "is no number to compare by")


@pytest.mark.parametrize(
    "text",
    ["activation < 5", "activation == 5", "gated > 0", "gated == 0", "gated != 0", "gated == 'false'", "layers >= 1",
     "d_ff == true", "d_ff == 307_2", "d_ff != 3072x", "d_ff == '3072'", "d_ff == 4.3B"],
)  # fmt: skip
def test_two_kinds_cannot_be_compared(text: str):
    """A typo in a CI job must not pass as `!=` nor fail as if the model were wrong."""
    with pytest.raises(FFNError, match="--assert ") as error:
        holds(text)
    assert error.value.code == 2


def test_a_wrong_condition_is_said_before_anything_is_read(call):
    expect_refusal(call("params", "./nowhere", "--assert", "zzz == 1"), "no key 'zzz'")


def test_conditions_that_hold(call):
    words = ["params", "llama-2-7b", "--assert", "ffn_params_total == 4_328_521_728", "--assert", "gated == true"]
    code, out, err = call(*words, "--assert", "d_ff >= 11008", "--assert", "experts < 1")
    assert (code, err) == (0, "")
    assert (code, out, err) == call("params", "llama-2-7b")


def test_conditions_that_do_not_are_all_named_beside_the_whole_answer(call):
    wrong = ["--assert", "d_ff == 1", "--assert", "layers == 32", "--assert", "activation == gelu"]
    code, out, err = call("params", "llama-2-7b", *wrong, "--json")
    assert (code, err) == (1, "error: not so: d_ff == 1 (it is 11008); activation == gelu (it is 'silu')\n")
    assert json.loads(out)["rows"][0]["d_ff"] == 11008


def test_every_row_is_held_to_them(call):
    code, _, err = call("params", "gpt2", "llama-2-7b", "--assert", "gated == false")
    assert (code, err) == (1, "error: not so: gated == false (it is true in 'llama-2-7b')\n")
    assert call("params", "gpt2", "bert-base", "--assert", "gated == false")[0] == 0


def test_every_point_of_a_sweep_is_held_to_them(call):
    sweep = ["params", "64x256:gelu", "--sweep", "d_ff=1x,2x"]
    assert call(*sweep, "--assert", "d_ff <= 128")[0] == 0
    code, out, err = call(*sweep, "--assert", "d_ff <= 64")
    assert (code, bool(out)) == (1, True)
    assert err.startswith("error: not so: d_ff <= 64 (it is 128")


def test_beside_a_disagreement(call, tmp_path: Path):
    """A file that contradicts its config fails either way; a condition that does not hold is said first."""
    source = folder(tmp_path, {**LLAMA, "intermediate_size": 8}, tensors("llama"))
    expect_difference(call("params", source, "--assert", "d_ff == 8"), "intermediate_size: the config says 8")
    expect_difference(call("params", source, "--assert", "d_ff == 6"), "not so: d_ff == 6 (it is 8)")


@given(st.text(max_size=12))
def test_any_text_is_a_condition_or_refused(text: str):
    for attempt in (text, f"d_ff == {text}", f"{text} == 1"):
        said = ""
        try:
            parse([attempt], list(ROW))
        except FFNError as error:
            said = str(error)
        assert said.isprintable()
