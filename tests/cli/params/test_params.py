"""`ffn params` and `ffn models` as a user asks them."""

import csv
import io
import json
import re

import pytest
import torch

from ffncli.cli.params.command import answer_for
from ffncli.models import catalog
from ffncli.models.counting.figures import FigureQuestion
from ffncli.show.parts import Table
from ffncli.system import hardware
from tests.oracles.checkpoints import LLAMA, folder, tensors
from tests.oracles.counts import DENSE, MOE, RECENT


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
    assert err == "note: assuming d_ff = 4x, activation relu, biases\n"
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
    assert set(found) == {*DENSE, *MOE, *RECENT}
    assert all(int(found[name]["ffn_params_total"]) == total for name, (_, total) in DENSE.items())
    assert "mixtral-8x22b" in call("models", "mixtral")[1]
    assert "gpt2" not in call("models", "mixtral")[1]


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
@pytest.mark.parametrize("arguments", [["params", "gpt2", "mixtral-8x7b"], ["params", "deepseek-v3"], ["models"]])
def test_every_format(call, arguments, style, tmp_path):
    code, out, err = call(*arguments, "--format", style)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    path = tmp_path / f"out.{style.replace('table', 'txt')}"
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
    assert call("params", "0x8:relu")[2].startswith("error: 0x8:relu: d_model must be a whole number from 1 to")


def test_a_gated_unit_in_a_plain_family_is_refused(call, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "activation_function": "swiglu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = call("params", str(tmp_path))
    assert code == 2
    assert "activation_function 'swiglu' is a gated unit" in err


def test_help_of_the_command_is_named(call):
    assert call("params", "--dtype")[2].rstrip().endswith("see `ffn params --help`")
    assert call("params", "--nope")[2].rstrip().endswith("see `ffn params --help`")


def test_tokens_multiply_the_flops_of_all_layers(call):
    (one,), (six,) = rows(call, "gpt2"), rows(call, "gpt2", "--batch", "2", "--seq-len", "3")
    assert (one["tokens"], six["tokens"]) == (1, 6)
    assert one["matmul_flops_total"] == 12 * one["matmul_flops_per_token"]
    for kind in ("matmul", "elementwise"):
        assert six[f"{kind}_flops_total"] == 6 * one[f"{kind}_flops_total"]


def page(call, *arguments: str) -> list[str]:
    return [line.strip() for line in call("params", *arguments, "-q")[1].splitlines()]


def test_a_page_of_dense_and_moe_layers(call):
    found = page(call, "deepseek-v3")
    assert found[:2] == ["deepseek-v3", "d_model 7168, d_ff 18432 and 2048, silu, gated, no bias, 61 layers"]
    assert {"dense, decoder layers 0-2", "MoE, 256 experts, top 8, decoder layers 3-60", "evidence"} <= set(found)
    values = {name.strip(): value.strip() for line in found if "  " in line for name, value in [line.rsplit("  ", 1)]}
    assert values["parameters, all layers"] == "657,758,632,448"
    assert {"active, all layers", "matmul FLOPs, all layers, 1 token", "norm parameters per MoE layer"} <= set(values)
    assert found[-1].startswith("source: [")
    assert any(line.endswith("shared with attention") for line in page(call, "falcon-7b"))
    assert any(line.endswith("norm, separate") for line in page(call, "gpt2"))


def test_a_row_that_is_marked_shows_the_difference(call, tmp_path):
    """One of 100,000 rows of numbers in fp64: hardly more bits per weight."""
    stored = {**tensors("llama"), "model.embed_tokens.weight": torch.zeros(100_000, 4)}
    one = folder(tmp_path / "one", LLAMA, {**stored, "model.norm.weight": torch.zeros(4)})
    two = folder(tmp_path / "two", LLAMA, {**stored, "model.norm.weight": torch.zeros(4, dtype=torch.float64)})
    line = next(line for line in call("params", one, two)[1].splitlines() if "bits per weight" in line)
    exact = 8 * (4 * (100_000 * 4 + 2 * (3 * 4 * 6 + 4)) + 8 * 4) / (100_000 * 4 + 2 * (3 * 4 * 6 + 4) + 4)
    assert line.split() == ["≠", "bits", "per", "weight", "as", "stored", "32", f"{exact:.6g}"]
    assert f"{exact:.4g}" == "32"


def test_a_packed_format_says_what_it_takes_and_the_files_what_they_do(call, tmp_path):
    """Asked for in q8_0 (32 weights and a scale in 34 bytes), stored in fp32."""
    assert re.search(
        r"^weight bytes \(q8_0, 8\.5 bits per weight\) ", call("params", "gpt2", "--dtype", "q8_0")[1], re.M
    )
    text = call("params", folder(tmp_path / "one", LLAMA, tensors("llama")), "--dtype", "int4")[1]
    assert re.search(r"^weight bytes \(int4, 4 bits per weight\) ", text, re.MULTILINE)
    assert re.search(r"^FFN bits per weight as stored +32$", text, re.MULTILINE)
    assert re.search(r"^bits per weight as stored, all tensors +32$", text, re.MULTILINE)
    for name in ("bits per weight", "bits per weight as stored", "FFN bits per weight"):
        assert call("params", str(tmp_path / "one"), "--assert", f"{name} == 32", "-q")[0] == 0


def test_sizes_stand_beside_their_digits(call):
    text = call("params", "mixtral-8x7b")[1]
    assert re.search(r"^weight bytes \(bf16\) +90,196,410,368 +90\.20 GB$", text, re.MULTILINE)
    assert re.search(r"^whole model, weight bytes \(bf16\) +93,405,585,408 +93\.41 GB$", text, re.MULTILINE)
    rows = [line.split() for line in call("params", "mixtral-8x7b", "gpt2")[1].splitlines() if "rounded" in line]
    assert [row[2:] for row in rows] == [["90.20", "GB", "226.7", "MB"], ["93.41", "GB", "497.8", "MB"]]


def test_a_row_of_a_layer_says_of_which_kind(call):
    mixed = call("params", "deepseek-v3")[1]
    assert re.search(r"^parameters per MoE layer +11,320,164,608$", mixed, re.MULTILINE)
    assert "elementwise FLOPs per token and MoE layer" in mixed
    assert re.search(r"^parameters per layer +1,409,318,912$", call("params", "mixtral-8x7b")[1], re.MULTILINE)
    assert "≠ kind of layer" in call("params", "gpt2", "deepseek-v3")[1]
    assert "kind of layer" not in call("params", "gpt2", "mixtral-8x7b")[1]


def test_a_page_of_a_bare_block(call):
    found = page(call, "4x8:relu", "--no-bias")
    assert found[:2] == ["4x8:relu", "d_model 4, d_ff 8, relu, plain, no bias"]
    assert "dense" in found
    assert not any("all layers" in line or "1 token" in line for line in found)
    assert any(line.startswith("matmul FLOPs, 2 tokens ") for line in page(call, "4x8:relu", "--tokens", "2"))


def test_layers_are_given_as_ranges(call, tmp_path):
    config = {"model_type": "qwen3_moe", "hidden_size": 4, "intermediate_size": 6, "moe_intermediate_size": 2}
    config |= {"num_hidden_layers": 6, "num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": [0, 1, 2, 4]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_sparse_step": 1}))
    found = page(call, str(tmp_path / "config.json"))
    assert "dense, decoder layers 0-2, 4" in found
    assert "MoE, 2 experts, top 1, decoder layers 3, 5" in found


def test_several_sources_side_by_side(call, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "same").mkdir(parents=True)
        config = {"model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2}
        (tmp_path / name / "same" / "config.json").write_text(json.dumps(config))
    same = [str(tmp_path / name / "same") for name in ("a", "b")]
    code, out, err = call("params", *same)
    assert code == 0
    assert out.splitlines()[0].split() == ["quantity", *same]
    assert not any(line[2:].startswith(("experts", "active")) for line in out.splitlines())
    assert not any(line.startswith("≠") for line in out.splitlines())
    assert [line.split(": ")[1] for line in err.splitlines()] == ["same", "same"]
    found = page(call, "gpt2", "mixtral-8x7b", "--d-model", "768")
    assert any(line.startswith("≠ active/layer") for line in found)
    assert any(line.split() == ["d_model", "768", "768"] for line in found)


def test_what_a_terminal_is_told_of_tables():
    gpt2, mixtral = (catalog.find(name) for name in ("gpt2", "mixtral-8x7b"))
    tensors = next(part for part in answer_for([gpt2], FigureQuestion())[0].parts if isinstance(part, Table))
    assert tensors.emphasis == {len(tensors.rows) - 1}
    (table,) = answer_for([gpt2, mixtral], FigureQuestion())[0].parts
    assert table.side_by_side


def test_a_wrong_dtype_is_said_before_anything_is_read(call):
    assert call("params", "./nowhere", "--dtype", "f23")[2].startswith("error: --dtype: unknown dtype 'f23'")


def test_ridge_list_shows_every_accelerator_by_a_name_that_ridge_takes(call):
    code, out, err = call("params", "--ridge", "list", "--json")
    assert (code, err) == (0, "")
    listed = json.loads(out)["devices"]
    assert [one["name"] for one in listed] == [device.name for device in hardware.devices()]
    assert all(hardware.named(one["device"], "--ridge").name == one["name"] for one in listed)
    page = call("params", "--ridge", "list")[1]
    assert re.search(r"^h100 +989\.4 +3,350 +80 +295$", page, re.M)  # the published ridge
    assert re.search(r"^v100 +125 +900 +16/32 +139$", page, re.M)
    assert max(map(len, page.splitlines())) <= 80
    header, first = call("params", "--ridge", "list", "--csv")[1].splitlines()[:2]
    assert dict(zip(header.split(","), first.split(","), strict=True))["fp16_tflops"] == "125"
    assert "--ridge list shows all" in call("params", "gpt2", "--ridge", "zzz")[2]


def test_the_source_of_a_row_is_evidence_and_not_what_was_not_counted(call):
    lines = call("params", "qwen3.8")[1].splitlines()
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(text))
        for text in ("evidence", "  source: ", "not counted")
    ]
    assert places == sorted(places)
