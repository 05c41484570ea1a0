"""Gated units in `ffn activations`: rows, tables, --up, --iso-params, what is refused."""

import math
import subprocess
import sys

import pytest

from ffncli.block.analysis.gated import UNITS

KEYS = """name formula gated values minimum minimum_at maximum maximum_at lipschitz std growth zero_share
    exact_zero_share mean variance gain linear_share product_share linear_share_of_gate_function operations used_by
    source""".split()


def test_every_unit_has_a_row(json_of):
    found = json_of("activations", *UNITS, "--at", "-2,0.5", "--up", "3,-1")["rows"]
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


def test_plain_and_gated_together(json_of):
    plain, gated = json_of("activations", "SwiGLU", "swish", "silu", "--std", "2")["rows"]
    assert (plain["name"], gated["name"]) == ("silu", "swiglu")
    assert "gated" not in plain or plain["gated"] is False
    assert (plain["std"], gated["std"]) == (2.0, 2.0)
    assert plain["gain"] > gated["gain"]


def test_without_up_and_at_the_defaults(json_of):
    (row,) = json_of("activations", "swiglu-oai")["rows"]
    assert {v["up"] for v in row["values"]} == {1.0}
    assert [v["x"] for v in row["values"]] == [-3, -2, -1, 0, 1, 2, 3]


def test_iso_params(json_of):
    found = json_of("activations", "swiglu", "geglu", "--iso-params")["rows"]
    assert [row["iso_params"]["gated_d_ff"] for row in found] == [1365, 1365]
    (row,) = json_of("activations", "swiglu", "--iso-params", "--d-model", "4096", "--multiple-of", "256")["rows"]
    iso = row["iso_params"]
    assert (iso["d_model"], iso["plain_d_ff"], iso["gated_d_ff"]) == (
        4096,
        16384,
        11008,
    )  # --d-ff: 4x where d_model is said
    assert (iso["plain_params"], iso["gated_params"]) == (2 * 4096 * 16384, 3 * 4096 * 11008)
    (row,) = json_of("activations", "swiglu", "--iso-params", "--d-ff", "2.5x")["rows"]
    assert row["iso_params"]["plain_d_ff"] == 1280
    assert "iso_params" not in json_of("activations", "swiglu")["rows"][0]


def test_what_people_read(stdout_of):
    out = stdout_of("activations", "swiglu", "swiglu_oai", "--iso-params", "--up", "1,-2")
    text = " ".join(out.split())
    assert "swiglu_oai quick_gelu(min(gate, 7)) ⊙ (clip(up, -7, 7) + 1)" in text
    assert "range (-∞, ∞) [-41.9997, 55.9996]" in text
    assert "linear % 12 43.14" in text
    assert "swiglu_oai 3 mul, 1 add, 3 compare, 3 select, 1 sigmoid" in text
    assert "Blocks of equal size, d_model 512, no biases" in text
    assert "plain 2,048 2,097,152 gated 1,365 2,096,640 -0.02 %" in text
    assert "swiglu_oai 2,048 4,095 10,240 15,015" in text
    assert [f"{title} at up = {up}" in text for title in ("Value", "∂/∂gate", "∂/∂up") for up in (1, -2)] == [True] * 6


def test_csv_has_both_kinds(csv_of):
    plain, gated = csv_of("activations", "silu", "swiglu", "--iso-params", "--at", "1,2")
    assert (plain["name"], plain["iso_gated_d_ff"]) == ("silu", "")
    assert (gated["gated"], gated["up"], gated["iso_gated_d_ff"], gated["operations"]) == (
        "true",
        "1.0;1.0",
        "1365",
        "3",
    )


def test_no_torch_and_no_numpy(ffn):
    code = "import sys; from ffncli.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code, "activations", "swiglu", "--iso-params"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_units_against_one_of_them(json_of):
    names = ("swiglu_oai", "swiglu-step", "situ", "deepseek_v4")
    found = json_of("activations", *names, "--against", "SwiGLU", "--at", "1,8", "--up", "12")["rows"]
    by_name = {row["name"]: row for row in found}
    assert [row["against"] for row in found] == ["swiglu"] * 4
    assert by_name["deepseek_v4"]["same_gate"] == [None, pytest.approx(10.0)]
    assert by_name["situ"]["same_up"] is None
    silu = 8 / (1 + math.exp(-8))
    found = [[value["difference"] for value in row["values"]] for row in found]
    assert found[1][1] == pytest.approx(7 * 7 - silu * 12, rel=1e-12)
    assert found[3][1] == pytest.approx(silu * 10 - silu * 12, rel=1e-12)


def test_the_page_of_units_against_one_of_them(call, csv_of):
    text = " ".join(call("activations", "deepseek_v4", "situ", "--against", "swiglu")[1].split())
    assert "deepseek_v4 gate ≤ 10 -10 ≤ up ≤ 10 0.0000 0 %" in text
    assert "situ no gate no up" in text
    assert "Difference at up = 12" in text
    (line,) = csv_of("activations", "situ", "--against", "swiglu", "--at", "1")
    assert float(line["rms_difference"]) == pytest.approx(0.0456, abs=1e-4)
    assert float(line["difference"].split(";")[0]) == pytest.approx(-0.0152, abs=1e-4)


def test_the_tolerance_of_units_is_held_to_the_shown_points(call):
    asked = ("activations", "swiglustep", "swiglu", "--against", "swiglu", "--up", "1", "--tolerance", "1.1")
    assert call(*asked, "--at=-5:8")[0] == 0
    code, _, err = call(*asked, "--at", "1,9")
    assert (code, err) == (1, "error: more than --tolerance 1.1 from swiglu: swiglustep by 2\n")
    assert call(*asked, "--dtype", "bf16")[0] == 2
