"""`ffn params` and `ffn models` as a user asks them."""

import csv
import io
import json
import re
import subprocess
import sys

import pytest
import torch

from ffncli.cli.params.command import answer_for
from ffncli.models import catalog
from ffncli.models.counting.figures import FigureQuestion
from ffncli.show.parts import Table
from ffncli.system import hardware
from tests.oracles.checkpoints import LLAMA, expect_refusal, folder, tensors
from tests.oracles.counts import DENSE, MOE, RECENT


def rows(call, *arguments: str) -> list[dict]:
    code, out, err = call("params", *arguments, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)["rows"]


def test_three_models(call):
    llama, gpt2, mixtral = rows(call, "llama-2-7b", "gpt2", "mixtral-8x7b")
    assert (llama["ffn_params_per_layer"], gpt2["ffn_params_per_layer"]) == (135_266_304, 4_722_432)
    assert (mixtral["ffn_params_total"], mixtral["ffn_params_active"]) == (45_098_205_184, 11_275_337_728)


def test_a_block_from_dimensions_shows_each_matrix(stdout_of):
    out = stdout_of("params", "--d-model", "768", "--d-ff", "3072", "--activation", "gelu", "--bias")
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


def test_models_lists_all(call, csv_of):
    found = {row["name"]: row for row in csv_of("models")}
    assert set(found) == {*DENSE, *MOE, *RECENT}
    assert all(int(found[name]["ffn_params_total"]) == total for name, (_, total) in DENSE.items())
    assert "mixtral-8x22b" in call("models", "mixtral")[1]
    assert "gpt2" not in call("models", "mixtral")[1]


def test_the_files_suffix_chooses_the_format(call, tmp_path):
    path = tmp_path / "gpt2.json"
    assert call("params", "gpt2", "-o", str(path))[0] == 0
    assert json.loads(path.read_text())["command"] == "params"


def test_an_inline_block_is_dimensions_that_options_override(call):
    (row,) = rows(call, "64x128:gelu", "--gated")
    assert (row["gated"], row["bias"], row["ffn_params_per_layer"]) == (True, False, 3 * 64 * 128)
    err = expect_refusal(call("params", "64x128:swiglu", "--plain"))
    assert err == "error: --activation swiglu is gated and contradicts --plain; for a plain block: --activation silu\n"
    assert call("params", "0x8:relu")[2].startswith("error: 0x8:relu: d_model must be a whole number from 1 to")


def test_a_gated_unit_in_a_plain_family_is_refused(call, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "activation_function": "swiglu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expect_refusal(call("params", str(tmp_path)), "activation_function 'swiglu' is a gated unit")


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
    assert found[-2].startswith("published as: 671B, all parameters; 37B active, without the input embedding")
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


def test_ridge_list_shows_every_accelerator_by_a_name_that_ridge_takes(call, json_of):
    listed = json_of("params", "--ridge", "list")["devices"]
    assert [one["name"] for one in listed] == [device.name for device in hardware.devices()]
    assert all(hardware.named(one["device"], "--ridge").name == one["name"] for one in listed)
    page = call("params", "--ridge", "list")[1]
    assert re.search(r"^h100 +989\.4 +3,350 +80 +295 +SXM5", page, re.M)  # the published ridge
    assert re.search(r"^v100 +125 +900 +16/32 +139 +SXM2$", page, re.M)
    assert max(map(len, page.splitlines())) <= 80
    header, first = call("params", "--ridge", "list", "--csv")[1].splitlines()[:2]
    assert dict(zip(header.split(","), first.split(","), strict=True))["fp16_tflops"] == "125"
    assert "--ridge list shows all" in call("params", "gpt2", "--ridge", "zzz")[2]


def test_the_source_of_a_row_is_evidence_and_not_what_was_not_counted(call):
    lines = call("params", "transformer-base")[1].splitlines()
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(text))
        for text in ("evidence", "  source: ", "not counted")
    ]
    assert places == sorted(places)


# --- what else can be asked -------------------------------------------------------------------------------------------


LLAMA_2_7B = 4096, 11008, 32  # d_model, d_ff, layers of Llama-2-7B


def table(text: str) -> list[list[str]]:
    """The cells of a printed table: at least two spaces apart."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]


# --- --all ------------------------------------------------------------------------------------------------------------


def test_all_is_every_known_model(call, csv_of):
    found = {row["name"]: row for row in rows(call, "--all", "-q")}
    assert set(found) == {*DENSE, *MOE, *RECENT}
    assert {name: found[name]["ffn_params_total"] for name in DENSE} == {
        name: total for name, (_, total) in DENSE.items()
    }
    assert [row["name"] for row in csv_of("params", "--all", notes=True)] == list(found)
    assert [row["name"] for row in json.loads(call("models", "--json")[1])["rows"]] == list(found)


def test_options_change_all_of_them(call):
    assert {row["dtype"] for row in rows(call, "--all", "-q", "--dtype", "bf16")} == {"bf16"}
    assert {row["tokens"] for row in rows(call, "--all", "-q", "--tokens", "7")} == {7}


# --- --sweep ----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_a_row_for_each_combination(call, csv_of):
    words = ["params", "64x256:gelu", "--no-bias", "--sweep", "d_ff=1x,2x,3x", "--sweep", "gated=yes,no"]
    code, out, err = call(*words, "--json")
    found = json.loads(out)["rows"]
    assert (code, err, len(found)) == (0, "", 6)
    for row, (times, gated) in zip(found, [(t, g) for t in (1, 2, 3) for g in (True, False)], strict=True):
        assert row["sweep"] == {"d_ff": f"{times}x", "gated": "yes" if gated else "no"}
        assert (row["d_ff"], row["gated"]) == (64 * times, gated)
        assert row["ffn_params_total"] == (3 if gated else 2) * 64 * 64 * times
    listed = csv_of(*words)
    assert [(row["sweep_d_ff"], row["sweep_gated"]) for row in listed] == [
        (f"{t}x", g) for t in (1, 2, 3) for g in ("yes", "no")
    ]
    assert [int(row["ffn_params_total"]) for row in listed] == [row["ffn_params_total"] for row in found]
    head, *lines = table(call(*words)[1])
    assert head[:2] == ["d_ff", "gated"]
    assert [line[:2] for line in lines] == [[f"{t}x", g] for t in (1, 2, 3) for g in ("yes", "no")]


def test_a_sweep_over_tokens_shows_what_they_change(call):
    head, *lines = table(call("params", "64x256", "--sweep", "tokens=1,8")[1])
    flops = head.index("matmul FLOPs")
    assert [line[flops] for line in lines] == [f"{2 * 2 * 64 * 256 * tokens:,}" for tokens in (1, 8)]


def test_a_sweep_of_a_known_model(call):
    found = rows(call, "llama-2-7b", "--sweep", "d_ff=11008,2x")
    assert [row["ffn_params_total"] for row in found] == [32 * 3 * 4096 * d_ff for d_ff in (11008, 8192)]


# --- --iso-params -----------------------------------------------------------------------------------------------------


def test_iso_params_puts_its_twin_beside_it(call):
    plain, gated = rows(call, "64x256:gelu", "--no-bias", "--iso-params")
    assert (plain["gated"], gated["gated"], gated["d_ff"]) == (False, True, round(256 * 2 / 3))
    assert gated["name"] == "64x256:gelu (gated)"
    (_, rounded) = rows(call, "64x256:gelu", "--iso-params", "--multiple-of", "16")
    assert rounded["d_ff"] == 176
    gated, plain = rows(call, "llama-2-7b", "--iso-params")
    assert plain["ffn_params_per_layer"] == gated["ffn_params_per_layer"] == 3 * 4096 * 11008
    assert [row["gated"] for row in rows(call, "llama-2-7b", "gpt2", "--iso-params")] == [True, False, False, True]


# --- --tp -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_over_ranks(ranks: int, call):
    (row,) = rows(call, "llama-2-7b", "--tp", str(ranks), "--dtype", "bf16")
    found, (d, f, layers) = row["tensor_parallel"], LLAMA_2_7B
    assert found["ranks"] == ranks
    assert found["rank_0_params_total"] == found["other_rank_params_total"] == layers * 3 * d * f // ranks
    (group,) = found["groups"]
    slices = {part["name"]: (part["rank_shape"], part["place"]) for part in group["slices"]}
    assert slices["up.weight"] == ([f // ranks, d], "column")
    assert slices["down.weight"] == ([d, f // ranks], "row")
    assert found["ring_all_reduce_bytes_per_token"] == 2 * (ranks - 1) / ranks * d * 2
    (cost,) = row["costs"]
    assert (cost["ranks"], cost["matmul_flops"]) == (ranks, layers * 3 * 2 * d * f // ranks)
    text = call("params", "llama-2-7b", "--tp", str(ranks))[1]
    assert [f"11008 × 4096  {f // ranks} × 4096" in text, f"over {ranks} ranks" in text] == [True, True]


# --- --ep ---------------------------------------------------------------------------------------------------------


def test_experts_over_ranks(call, csv_of):
    (row,) = rows(call, "mixtral-8x7b", "--ep", "4", "--tokens", "32")
    stored, sent = row["tensor_parallel"], row["expert_parallel"]
    assert (stored["ranks"], stored["expert_ranks"]) == (1, 4)
    assert stored["rank_0_params_total"] == 32 * (2 * 3 * 4096 * 14336 + 8 * 4096)
    assert (sent["ranks"], sent["experts"], sent["layers"], sent["tokens_per_expert"]) == (4, 2, 32, 32 * 4 * 2 / 8)
    assert sent["dispatch_bytes_per_token"] == sent["combine_bytes_per_token"] == 2 * 4096 * 2 * 3 / 4
    (cost,) = row["costs"]
    assert (cost["ranks"], round(cost["experts_touched"], 9)) == (4, 2)
    text = call("params", "mixtral-8x7b", "--ep", "4")[1]
    assert "8 × 14336 × 4096  2 × 14336 × 4096  experts" in text
    assert "two all-to-alls between 4 ranks of 2 experts" in text
    (line,) = csv_of("params", "mixtral-8x7b", "--ep", "4")
    assert (line["expert_ranks"], line["experts_per_rank"], line["dispatch_bytes_per_token"]) == ("4", "2", "12288")


def test_experts_and_their_width_over_ranks(call):
    (row,) = rows(call, "deepseek-v3", "--ep", "8", "--tp", "2")
    assert (row["costs"][0]["ranks"], row["tensor_parallel"]["groups"][1]["d_ff"]) == (16, 1024)
    assert row["expert_parallel"]["layers"] == 58
    assert "over 16 ranks (tp 2, ep 8), decoder layers 3-60" in call("params", "deepseek-v3", "--ep=8", "--tp=2")[1]


# --- --tokens and --ridge ---------------------------------------------------------------------------------------------


def test_tokens_as_a_list_are_costs_for_each(call):
    (row,) = rows(call, "llama-2-7b", "--tokens", "1,32,512", "--dtype", "bf16")
    d, f, layers = LLAMA_2_7B
    assert [cost["tokens"] for cost in row["costs"]] == [1, 32, 512]
    assert row["tokens"] == 1
    for cost in row["costs"]:
        assert cost["matmul_flops"] == cost["tokens"] * layers * 2 * 3 * d * f
        assert cost["weight_bytes_read"] == layers * 3 * d * f * 2  # norms apart, as everywhere
        assert cost["activation_bytes_fused"] == layers * 2 * cost["tokens"] * d * 2
        moved = cost["weight_bytes_read"] + cost["activation_bytes"]
        assert cost["flops_per_byte"] == pytest.approx(cost["matmul_flops"] / moved)
    text = call("params", "llama-2-7b", "--tokens", "1,32,512")[1]
    assert "memory traffic, weights fp16, activations fp16, all layers" in text


def test_the_ridge_is_the_first_number_of_tokens_that_reaches_it(call):
    (row,) = rows(call, "llama-2-7b", "--ridge", "100", "--dtype", "bf16")
    first = row["ridge_tokens"]
    (around,) = rows(call, "llama-2-7b", "--dtype", "bf16", "--tokens", f"{first - 1},{first}")
    below, above = (cost["flops_per_byte"] for cost in around["costs"])
    assert below < 100 <= above
    assert (
        f"100 FLOPs per byte from {first:,} tokens on"
        in call("params", "llama-2-7b", "--ridge", "100", "--dtype", "bf16")[1]
    )
    (never,) = rows(call, "llama-2-7b", "--ridge", "1e9")
    assert never["ridge_tokens"] is None
    assert "never reached" in call("params", "llama-2-7b", "--ridge", "1e9")[1]


def test_the_floor_of_a_device_is_its_data_sheet(call, csv_of):
    words = ["llama-2-7b", "--ridge", "h100,b200", "--tokens", "1,4096", "--dtype", "bf16"]
    (row,) = rows(call, *words)
    d, f, layers = LLAMA_2_7B
    weights, flops = layers * 3 * d * f * 2, layers * 2 * 3 * d * f
    expected = []
    for device, peak, bandwidth in (("H100 SXM5", 989.4e12, 3350e9), ("B200", 2250e12, 8000e9)):
        for tokens in (1, 4096):
            memory, compute = (weights + layers * 2 * tokens * d * 2) / bandwidth, tokens * flops / peak
            expected.append((device, tokens, "memory" if tokens == 1 else "compute", max(memory, compute)))
    found = row["floors"]
    assert [(one["device"], one["tokens"], one["bound"]) for one in found] == [one[:3] for one in expected]
    assert [one["floor_s"] for one in found] == pytest.approx([one[3] for one in expected])
    assert [one["fits"] for one in found] == [True] * 4  # 13.5 GB
    first = found[0]["ridge_tokens_fused"]
    (around,) = rows(call, *words[:3], "--tokens", f"{first - 1},{first}", "--dtype", "bf16")
    assert [one["bound"] for one in around["floors"]][:2] == ["memory", "compute"]
    listed = csv_of("params", *words)
    assert [(one["device"], int(one["tokens"]), one["bound"]) for one in listed] == [one[:3] for one in expected]
    text = call("params", *words)[1]
    rates = "989.4 TFLOP/s in bf16, 3,350 GB/s (NVIDIA H100 datasheet)"
    assert f"H100 SXM5: {rates}; compute bound from {first} tokens on" in text
    assert "time floor of the forward pass of all FFNs, weights bf16" in text


def test_floors_can_be_asserted(call):
    assert call("params", "llama-3-70b", "--ridge", "h100", "--assert", "fits == false", "-q")[0] == 0
    failed = call("params", "llama-3-70b", "--ridge", "h100,b200", "--assert", "floor_s < 0.02", "-q")
    assert (failed[0], "in 'llama-3.1-70b device=H100 SXM5'" in failed[2]) == (1, True)
    expect_refusal(call("params", "gpt2", "--assert", "bound == memory"), "--ridge DEVICE")
    expect_refusal(call("params", "gpt2", "--ridge", "9", "--assert", "bound == memory"), "--ridge DEVICE")


# --- --dtype ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("fp32", 32), ("bf16", 16), ("fp8", 8), ("int8", 8), ("int4", 4), ("q4_0", 4.5), ("q8_0", 8.5), ("mxfp4", 4.25),
     ("nvfp4", 4.5), ("nf4", 4.5), ("q4_k", 4.5), ("q6_k", 6.5625)],
)  # fmt: skip
def test_weight_bytes_in_a_format(dtype: str, bits: float, call):
    d, f, layers = LLAMA_2_7B
    (row,) = rows(call, "llama-2-7b", "--dtype", dtype)
    assert (row["dtype"], row["weight_bytes"]) == (dtype, layers * 3 * d * f * bits / 8)


def test_what_is_packed_are_the_matrices_alone(call):
    (row,) = rows(call, "64x256:gelu", "--dtype", "int8")
    half = torch.empty(256 + 64, dtype=torch.float16).nbytes  # biases
    assert row["weight_bytes"] == 2 * 64 * 256 + half


# --- formats and pipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
@pytest.mark.parametrize(
    "words",
    ["models", "params gpt2 --sweep d_ff=1x,2x", "params deepseek-v3 --tp 4", "params llama-2-7b gpt2 --tokens 1,8",
     "params gpt2 --iso-params --ridge 50", "params --all", "params gpt2 mixtral-8x7b", "params deepseek-v3"],
)  # fmt: skip
def test_every_format(words: str, style: str, call, tmp_path):
    arguments = (*words.split(), "-q", "--format", style)
    code, out, err = call(*arguments)
    assert (code, err, "\x1b" in out) == (0, "", False)
    if style == "json":
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if style == "csv":
        head, *lines = csv.reader(io.StringIO(out))
        assert len(head) == len(set(head))
        assert {len(line) for line in lines} == {len(head)}
    path = tmp_path / f"out.{style.replace('table', 'txt')}"
    assert call(*arguments, "-o", str(path)) == (0, "", "")  # -q
    assert path.read_text("utf-8") == out


def test_csv_columns_are_the_rows_keys_in_order(call):
    head, line = csv.reader(io.StringIO(call("params", "gpt2", "--csv")[1]))
    row = dict(rows(call, "gpt2")[0])
    added = {"model_weight_bytes": row.pop("model_weight_bytes")}
    cost = (
        "experts_touched weight_bytes_read activation_bytes activation_bytes_fused flops_per_byte flops_per_byte_fused"
    )
    plain = [key for key in row if key not in ("groups", "costs", "not_counted", "published_as")]
    assert head == [*plain, *cost.split(), *added, "published_as"]
    values = dict(zip(head, line, strict=True))
    assert (values["gated"], values["bias"], values["stored_bytes"], values["differences"]) == ("false", "true", "", "")
    assert values["evidence"].split(";")[0] == row["evidence"][0]
    assert float(values["ffn_share_of_layer"]) == row["ffn_share_of_layer"]


@pytest.mark.parametrize("words", ["--all", "deepseek-v3 --tp 8", "gpt2 --sweep d_ff=1x,2x --csv"])
def test_a_reader_that_has_had_enough(words: str):
    line = f'"{sys.executable}" -m ffncli params -q {words} | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)


@pytest.mark.parametrize("command", ["params", "plan"])
@pytest.mark.parametrize(
    ("source", "code"),
    [("gpt2", 0), ("64x256:gelu", 0), ("transformer-base", 4)],  # its paper gives no vocabulary
)
def test_strict_is_exit_4_where_totals_are_unknown(call, command: str, source: str, code: int) -> None:
    shown = call(command, source, "--dtype", "bf16")
    strict = call(command, source, "--dtype", "bf16", "--strict")
    assert (shown[0], strict[:2]) == (0, (code, shown[1]))  # what is known is shown all the same
    assert ("the totals of the whole model are unknown" in strict[2]) == (code == 4)
