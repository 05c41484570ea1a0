"""`ffn trace` as a user asks it."""

from __future__ import annotations

import csv
import io
import json

import pytest


def steps(call, *arguments: str) -> dict[str, dict]:
    code, out, err = call("trace", *arguments, "--format", "json")
    assert (code, err) == (0, "")
    return {step["name"]: step for step in json.loads(out)["steps"]}


def test_without_arguments_it_prints_the_notebooks_numbers(call):
    code, out, err = call("trace")
    assert (code, err) == (0, "")
    assert "0,0  -2.2255  -0.1673   1.5966  -1.5649  -0.1716   0.4000   0.1738  -0.5781" in out
    assert "0.4444" in out
    assert "15 negative, 0 zero" in out
    assert "0 negative, 15 zero" in out
    assert "0 negative, 21 zero" in out
    assert "dropped 6 of 33 live values (18 %)" in out
    assert "min -2.1799  max 8.1412" in out


def test_the_notebook_may_be_changed(call):
    assert steps(call, "--eval")["dropout"]["zeros"] == 15
    assert steps(call, "--activation", "gelu")["act"]["formula"] == "gelu(up)"
    assert steps(call, "--dropout", "0.5", "--seed", "1")["dropout"]["zeros"] > 25
    assert "dropout" not in steps(call, "--dropout", "0")
    assert steps(call, "--input", "ones", "--tokens", "1")["x"]["shape"] == [1, 4]
    assert set(steps(call, "--activation", "swiglu", "--norm", "rmsnorm", "--residual")) >= {"norm", "gate", "out"}


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (["512x64:gelu"], [4, 512]),
        (["512x64:gelu", "--tokens", "2"], [2, 512]),
        (["512x64:gelu", "--batch", "2", "--seq-len", "3"], [2, 3, 512]),
        (["512x64:gelu", "--seq-len", "3"], [1, 3, 512]),
        (["--d-model", "8", "--d-ff", "4x", "--activation", "relu", "--bias", "--batch", "3"], [3, 1, 8]),
    ],
)
def test_shapes(call, arguments, shape):
    assert steps(call, *arguments)["x"]["shape"] == shape


def test_show_and_digits(call):
    assert steps(call, "64x64:relu", "--show", "2")["up"]["values_index"] == [[0, 3], [0, 63]]
    everything = steps(call, "64x64:relu", "--show", "all")["up"]
    assert [len(row) for row in everything["values"]] == [64] * 4
    assert "-2.23  -0.17" in call("trace", "--digits", "2")[1]


def test_threads_do_not_change_the_answer(call):
    assert call("trace", "64x64:relu", "--threads", "1", "--json") == call("trace", "64x64:relu", "--json")


def test_parallel_blocks_say_that_attention_is_drawn(call):
    code, out, err = call("trace", "palm-540b", "--d-model", "8", "--d-ff", "16")
    assert code == 0
    assert "attention" in out
    assert err == "note: the input 'attention' is drawn at random, as x may be\n"


def test_csv_has_a_row_per_step(call):
    code, out, _ = call("trace", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["name"] for row in rows] == ["x", "up", "act", "dropout", "down"]
    assert (rows[1]["negatives"], rows[3]["zeros"], rows[1]["shape"]) == ("15", "21", "2;3;8")


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
def test_every_format_of_a_moe(call, style):
    code, out, err = call("trace", "8x16:swiglu", "--experts", "4", "--expert", "all", "--format", style)
    assert (code, err) == (0, "")
    assert "experts" in out
    assert "\x1b" not in out


def test_not_a_number_is_null(call):
    found = steps(call, "4x8:relu", "--input", "nan,inf,1,2")
    assert found["x"]["values"] == [[None, None, 1.0, 2.0]]
    assert (found["x"]["nan"], found["x"]["inf"], found["up"]["nan"]) == (1, 1, 8)
    assert found["up"]["mean"] is None
    assert "NaN" in call("trace", "4x8:relu", "--input", "nan,inf,1,2")[1]
