"""Gated units in `ffn activations`: rows, tables, --up, --iso-params, what is refused."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from ffncli.block.analysis.gated import UNITS

KEYS = """name formula gated values minimum minimum_at maximum maximum_at lipschitz std growth zero_share
    exact_zero_share mean variance gain linear_share product_share linear_share_of_gate_function operations used_by
    source""".split()


def rows(call, *arguments):
    code, out, err = call("activations", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)["rows"]


def test_every_unit_has_a_row(call):
    found = rows(call, *UNITS, "--at", "-2,0.5", "--up", "3,-1")
    assert [row["name"] for row in found] == list(UNITS)
    for row in found:
        assert list(row) == KEYS
        assert row["gated"] is True
        assert [(v["x"], v["up"]) for v in row["values"]] == [(-2, 3), (0.5, 3), (-2, -1), (0.5, -1)]
        assert all(list(v) == ["x", "up", "value", "slope", "slope_up"] for v in row["values"])
        unit = UNITS[row["name"]]
        assert [v["value"] for v in row["values"]] == [unit.value(v["x"], v["up"]) for v in row["values"]]
        assert [(v["slope"], v["slope_up"]) for v in row["values"]] == [
            unit.slopes(v["x"], v["up"]) for v in row["values"]
        ]


def test_plain_and_gated_together(call):
    plain, gated = rows(call, "SwiGLU", "swish", "silu", "--std", "2")
    assert (plain["name"], gated["name"]) == ("silu", "swiglu")
    assert "gated" not in plain or plain["gated"] is False
    assert (plain["std"], gated["std"]) == (2.0, 2.0)
    assert plain["gain"] > gated["gain"]


def test_without_up_and_at_the_defaults(call):
    (row,) = rows(call, "swiglu-oai")
    assert {v["up"] for v in row["values"]} == {1.0}
    assert [v["x"] for v in row["values"]] == [-3, -2, -1, 0, 1, 2, 3]


def test_iso_params(call):
    found = rows(call, "swiglu", "geglu", "--iso-params")
    assert [row["iso_params"]["gated_d_ff"] for row in found] == [1365, 1365]
    (row,) = rows(call, "swiglu", "--iso-params", "--d-model", "4096", "--multiple-of", "256")
    iso = row["iso_params"]
    assert (iso["d_model"], iso["plain_d_ff"], iso["gated_d_ff"]) == (
        4096,
        16384,
        11008,
    )  # --d-ff: 4x where d_model is said
    assert (iso["plain_params"], iso["gated_params"]) == (2 * 4096 * 16384, 3 * 4096 * 11008)
    (row,) = rows(call, "swiglu", "--iso-params", "--d-ff", "2.5x")
    assert row["iso_params"]["plain_d_ff"] == 1280
    assert "iso_params" not in rows(call, "swiglu")[0]


def test_what_people_read(call):
    code, out, err = call("activations", "swiglu", "swiglu_oai", "--iso-params", "--up", "1,-2")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "swiglu_oai quick_gelu(min(gate, 7)) ⊙ (clip(up, -7, 7) + 1)" in text
    assert "range (-∞, ∞) [-41.9997, 55.9996]" in text
    assert "linear % 12 43.14" in text
    assert "swiglu_oai 3 mul, 1 add, 3 compare, 3 select, 1 sigmoid" in text
    assert "Blocks of equal size, d_model 512, no biases" in text
    assert "plain 2,048 2,097,152 gated 1,365 2,096,640 -0.02 %" in text
    assert "swiglu_oai 2,048 4,095 10,240 15,015" in text
    assert [f"{title} at up = {up}" in text for title in ("Value", "∂/∂gate", "∂/∂up") for up in (1, -2)] == [True] * 6


def test_csv_has_both_kinds(call):
    code, out, _ = call("activations", "silu", "swiglu", "--iso-params", "--csv", "--at", "1,2")
    plain, gated = csv.DictReader(io.StringIO(out))
    assert (code, plain["name"], plain["iso_gated_d_ff"]) == (0, "silu", "")
    assert (gated["gated"], gated["up"], gated["iso_gated_d_ff"], gated["operations"]) == (
        "true",
        "1.0;1.0",
        "1365",
        "3",
    )


def test_no_torch_and_no_numpy(ffn):
    code = "import sys; from ffncli.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    import subprocess

    found = subprocess.run(
        [sys.executable, "-c", code, "activations", "swiglu", "--iso-params"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swiglo"], ["NAME: unknown activation 'swiglo'", "did you mean 'swiglu'"]),
        (["silu", "--iso-params"], ["--iso-params needs a gated unit", "swiglu_oai"]),
        (["--iso-params"], ["--iso-params needs a gated unit"]),
        (["swiglu", "--d-ff", "4x"], ["--d-ff needs --iso-params"]),
        (["swiglu", "--d-model", "8"], ["--d-model needs --iso-params"]),
        (["swiglu", "--multiple-of", "8"], ["--multiple-of needs --iso-params"]),
        (["swiglu", "--iso-params", "--d-model", "0"], ["--d-model must be between"]),
        (["swiglu", "--iso-params", "--d-model", "x"], ["--d-model must be a whole number"]),
        (["swiglu", "--iso-params", "--d-ff", "1000000000000"], ["--d-ff must be between"]),
        (["swiglu", "--iso-params", "--multiple-of", "0"], ["--multiple-of"]),
        (["silu", "--up", "1"], ["--up needs a gated unit"]),
        (["swiglu", "--up", "nan"], ["--up: 'nan' is not a finite number"]),
        (["swiglu", "--up", ""], ["--up"]),
        (["swiglu", "--at", "0:10:0.01", "--up", "0:10:1"], ["--up: 1,001 points at 11 values of up", "10,000"]),
        (["swiglu", "--std", "1e7"], ["--std must be from"]),
        (["silu", "swiglu", "--expect", "1=2"], ["--expect is about functions of one number", "leave out swiglu"]),
    ],
)
def test_refusals(call, arguments, said):
    code, out, err = call("activations", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(text in err for text in said), err


@pytest.mark.parametrize(
    "command", [["trace", "4x8:swiglu_oai"], ["params", "--d-model", "4", "--activation", "swigluoai"]]
)
def test_other_commands_say_where_the_clamped_unit_is(call, command):
    code, _, err = call(*command)
    assert code == 2
    assert "also limits gate and up" in err
