"""`ffn params` and `ffn models` as a user asks them."""

from __future__ import annotations

import csv
import io
import json

import pytest

from tests.oracles.counts import DENSE, MOE


def rows(call, *arguments: str) -> list[dict]:
    code, out, err = call("params", *arguments, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)["rows"]


def test_three_models(call):
    llama, gpt2, mixtral = rows(call, "llama-2-7b", "gpt2", "mixtral-8x7b")
    assert (llama["ffn_params_per_layer"], gpt2["ffn_params_per_layer"]) == (135_266_304, 4_722_432)
    assert (mixtral["ffn_params_total"], mixtral["ffn_params_active"]) == (45_098_205_184, 11_275_337_728)


def test_a_block_from_dimensions_shows_each_matrix(call):
    code, out, err = call("params", "--d-model", "768", "--d-ff", "3072", "--activation", "gelu", "--bias")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["up.weight", "3072", "×", "768", "2,359,296"] in lines
    assert ["down.weight", "768", "×", "3072", "2,359,296"] in lines
    assert ["total", "4,722,432"] in lines


def test_defaults_are_said(call):
    code, out, err = call("params", "--d-model", "64")
    assert code == 0
    assert err == "note: not said, so taken: d_ff = 4x, activation relu, biases\n"
    assert "d_ff 256" in out
    assert call("params", "--d-model", "64", "-q")[2] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--d-ff", "2.6875x"], {"d_ff": 11008}),
        (["--activation", "swiglu"], {"activation": "silu", "gated": True, "bias": False}),
        (["--activation", "gelu_new", "--gated"], {"activation": "gelu_tanh", "gated": True}),
        (["--activation", "swiglu", "--bias"], {"bias": True}),
        (["--no-bias"], {"bias": False, "ffn_params_per_layer": 2 * 4096 * 16384}),
        (["--norm", "layernorm"], {"norm_params_per_layer": 8192}),
        (["--norm", "rmsnorm", "--norm-position", "pre+branch"], {"norm_params_per_layer": 8192}),
        (["--experts", "8"], {"experts": 8, "top_k": 2}),
        (["--experts", "8", "--top-k", "3", "--shared-experts", "1"], {"top_k": 3, "shared_experts": 1}),
        (["--dtype", "bfloat16"], {"dtype": "bf16", "weight_bytes": 2 * (2 * 4096 * 16384 + 4096 + 16384)}),
    ],
)
def test_dimension_options(call, arguments, expected):
    (row,) = rows(call, "--d-model", "4096", "-q", *arguments)
    assert {key: row[key] for key in expected} == expected


def test_options_override_every_source(call):
    first, second = rows(call, "llama-2-7b", "mistral-7b", "--d-ff", "1x")
    assert [first["d_ff"], second["d_ff"]] == [4096, 4096]
    (gated,) = rows(call, "gpt2", "--gated")
    assert gated["ffn_params_per_layer"] == 3 * 768 * 3072 + 2 * 3072 + 768


def test_inline_blocks(call):
    (row,) = rows(call, "4096x2.6875x:swiglu")
    assert (row["d_ff"], row["ffn_params_per_layer"]) == (11008, DENSE["llama-2-7b"][0])


def test_weight_bytes_are_the_stored_ones_unless_told(call, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 8,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "dtype": "bfloat16",
            }
        )
    )
    assert [r["weight_bytes"] for r in rows(call, str(tmp_path / "config.json"))] == [2 * 2 * 3 * 8 * 24]
    assert [r["weight_bytes"] for r in rows(call, str(tmp_path / "config.json"), "--dtype", "fp64")] == [
        8 * 2 * 3 * 8 * 24
    ]


def test_models_lists_all(call):
    code, out, _ = call("models", "--csv")
    found = {row["name"]: row for row in csv.DictReader(io.StringIO(out))}
    assert code == 0
    assert set(found) == {*DENSE, *MOE}
    assert all(int(found[name]["ffn_params_total"]) == total for name, (_, total) in DENSE.items())
    assert "mixtral-8x22b" in call("models", "mixtral")[1]
    assert "gpt2" not in call("models", "mixtral")[1]


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
@pytest.mark.parametrize("arguments", [["params", "gpt2", "mixtral-8x7b"], ["params", "deepseek-v3"], ["models"]])
def test_every_format(call, arguments, style, tmp_path):
    code, out, err = call(*arguments, "--format", style)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    path = tmp_path / f"out.{style}"
    assert call(*arguments, "--format", style, "-o", str(path)) == (0, "", "")
    assert path.read_text("utf-8") == out


def test_the_files_suffix_chooses_the_format(call, tmp_path):
    path = tmp_path / "gpt2.json"
    assert call("params", "gpt2", "-o", str(path))[0] == 0
    assert json.loads(path.read_text())["command"] == "params"


def test_an_inline_block_is_dimensions_that_options_override(call):
    (row,) = rows(call, "64x128:gelu", "--gated")
    assert (row["gated"], row["bias"], row["ffn_params_per_layer"]) == (True, False, 3 * 64 * 128)
    code, _, err = call("params", "64x128:swiglu", "--plain")
    assert code == 2
    assert err == "error: --activation swiglu is gated and contradicts --plain; for a plain block: --activation silu\n"
    assert call("params", "0x8:relu")[2].startswith("error: 0x8:relu: d_model must be between 1 and")


def test_a_gated_unit_in_a_plain_family_is_refused(call, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "activation_function": "swiglu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = call("params", str(tmp_path))
    assert code == 2
    assert "activation_function 'swiglu' is a gated unit" in err


def test_help_of_the_command_is_named(call):
    assert call("params", "--dtype")[2].rstrip().endswith("see `ffn params --help`")
    assert call("params", "--nope")[2].rstrip().endswith("see `ffn params --help`")
