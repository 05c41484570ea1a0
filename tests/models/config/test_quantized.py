"""The bytes of quantised models from their config alone, against the tensors that the formats' libraries write and
arithmetic by hand: every kind of quantization_config in use."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import quantized_kinds
from benchmarks.quantized_kinds import row
from benchmarks.script import read
from ffncli.errors import FFNError
from ffncli.models.config.packed_model import packed_model
from ffncli.models.config.quantized import Packing, Scheme
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.source import load
from tests.models.files.test_packing import awq, gpt_oss, gptq
from tests.oracles.packed import by_library

ROOT = Path(__file__).parents[3]
D, F, LAYERS = 128, 384, 3
LLAMA = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS, "hidden_act": "silu",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
PARAMS = 3 * D * F  # of a layer: gate and up [F, D], down [D, F]


def counted(quantization: dict[str, Any] | None, config: dict[str, Any] = LLAMA, **more: Any):
    values = {**config, **more} | ({} if quantization is None else {"quantization_config": quantization})
    return count(from_config(values, "model", "config.json"))


def groups(size: int) -> int:
    """The groups of `size` inputs in a layer's three matrices."""
    return 2 * F * ceil(D / size) + D * ceil(F / size)


def tiles(size: int) -> int:
    return 2 * ceil(F / size) * ceil(D / size) + ceil(D / size) * ceil(F / size)


ROWS = 2 * F + D
INPUTS = 2 * D + F


def described(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


# name → (quantization_config, bytes of a layer's FFN)
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, PARAMS / 2 + groups(32) * 2.5 + 4 * INPUTS),
    "gptq 3": ({"quant_method": "gptq", "bits": 3}, PARAMS * 3 / 8 + groups(128) * 2.375 + 4 * INPUTS),
    "gptq 8, a group per row": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, PARAMS + ROWS * 3 + 4 * INPUTS),
    "gptq 2": ({"quant_method": "gptq", "bits": 2, "group_size": 64}, PARAMS / 4 + groups(64) * 2.25 + 4 * INPUTS),
    "gptq in marlin's layout": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        PARAMS / 2 + groups(128) * 2,
    ),
    "awq in marlin's layout": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}, PARAMS / 2 + groups(128) * 2
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, PARAMS / 2 + groups(128) * 2.5),
    "awq, its own names": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, PARAMS / 2 + groups(64) * 2.5),
    "auto-round as gptq": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"},
        PARAMS / 2 + groups(128) * 2.5,
    ),
    "auto-round for GPTQModel": (
        {"quant_method": "auto-round", "bits": 2, "group_size": 64, "packing_format": "auto_round:gptqmodel"},
        PARAMS / 4 + groups(64) * 2.25 + 4 * INPUTS,
    ),
    "auto-round as awq": (
        {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
        PARAMS / 2 + groups(32) * 2.5,
    ),
    "int4 in groups": (described(num_bits=4, type="int", strategy="group", group_size=32), PARAMS / 2 + groups(32) * 2),
    "int4 with zeros": (
        described(num_bits=4, type="int", strategy="group", group_size=64, symmetric=False),
        PARAMS / 2 + groups(64) * 2.5,
    ),
    "int8 by channel": (described(num_bits=8, type="int", strategy="channel"), PARAMS + ROWS * 2),
    "int4 in bytes": (described(num_bits=4, type="int", strategy="channel") | {"format": "int-quantized"},
                      PARAMS + ROWS * 2),
    "blocks as a text": (
        described(num_bits=8, type="float", strategy="block", block_structure="128x128"), PARAMS + tiles(128) * 2
    ),
    "fp8 by tensor": (described(num_bits=8, type="float", strategy="tensor"), PARAMS),
    "fp8 by channel": (described(num_bits=8, type="float", strategy="channel"), PARAMS + ROWS * 2),
    "fp8 by block": (
        described(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), PARAMS + tiles(128) * 2
    ),
    "nvfp4": (described(num_bits=4, type="float", strategy="tensor_group", group_size=16), PARAMS * 9 / 16),
    "mxfp4": (described(num_bits=4, type="float", strategy="group", group_size=32), PARAMS * 17 / 32),
    "ModelOpt's NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, PARAMS * 9 / 16),
    "ModelOpt without a method": ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, PARAMS),
    "ModelOpt by blocks": ({"quant_algo": "FP8_PB_WO", "quant_method": "modelopt"}, PARAMS + tiles(128) * 4),
    "ModelOpt's int4": ({"quant_algo": "W4A16_AWQ", "group_size": 128}, PARAMS / 2 + groups(128) * 2),
    "DeepSeek-V3's fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, PARAMS + tiles(128) * 4),
    "fp8 with a scale for a tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, PARAMS),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, PARAMS + ROWS * 4),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        PARAMS / 2 + PARAMS / 64 * 4,
    ),
    "nf4 without a method": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, PARAMS / 2 + PARAMS / 64 * 4),
    "nf4 with double quantization": (
        {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        PARAMS / 2 + PARAMS / 64 + 3 * 4 * (D * F / 64 / 256),
    ),
    "LLM.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, PARAMS + ROWS * 4),
    "torchao int4": (
        {"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 64}},
        PARAMS / 2 + groups(64) * 4,
    ),
    "torchao int8, as an object": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
        PARAMS + ROWS * 5,  # a float32 scale and an int8 zero for a row, as torchao 0.18 writes them
    ),
    "torchao int8 in groups": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {
            "group_size": None, "granularity": {"_type": "PerGroup", "_data": {"group_size": 64}}}}}},
        PARAMS + groups(64) * 5,
    ),
    "torchao fp8": ({"quant_method": "torchao", "quant_type": "float8_weight_only"}, PARAMS + ROWS * 4),
    "torchao fp8, activations too": (
        {"quant_method": "torchao", "quant_type": "float8_dynamic_activation_float8_weight"}, PARAMS
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_bytes_by_hand(name: str) -> None:
    quantization, layer = KINDS[name]
    read = counted(quantization)
    assert read.weight_bytes == LAYERS * ceil(layer)
    # attention is packed alike; embeddings, norms and the head stay in bf16
    attention = D * (D + 2 * 64) + D * D
    plain = 2 * 512 * D + (2 * LAYERS + 1) * D
    assert read.model_weight_bytes is not None
    low, high = (LAYERS * part + 2 * plain for part in (attention / 8, attention * 1.3 + 16 * D))
    assert low < read.model_weight_bytes - read.weight_bytes < high


@pytest.mark.parametrize(("bits", "group", "inputs"), [(4, 128, D), (4, 32, 96), (8, 64, D), (3, 32, 96)])
def test_int_packings_are_those_of_compressed_tensors(bits: int, group: int, inputs: int) -> None:
    """Against what its compressor writes for a matrix, without the two numbers of its shape."""
    weight, scale = torch.randn(F, inputs).bfloat16(), torch.rand(F, inputs // group).bfloat16() + 0.1
    description = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    written, _ = by_library("pack-quantized", weight, scale, description)
    theirs = sum(t.nbytes for name, t in written.items() if not name.endswith("weight_shape"))
    packing = packed_of(described(**description))
    assert packing.matrix_bytes(F, inputs) == theirs


@pytest.mark.parametrize("kind", ["int", "float"])
def test_values_in_place_are_those_of_compressed_tensors(kind: str) -> None:
    weight, scale = torch.randn(F, D).bfloat16(), torch.rand(F, 1).bfloat16() + 0.1
    description = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    form = "int-quantized" if kind == "int" else "float-quantized"
    written, _ = by_library(form, weight, scale, description)
    assert packed_of(described(**description)).matrix_bytes(F, D) == sum(t.nbytes for t in written.values())


def packed_of(quantization: dict[str, Any]):
    from ffncli.models.config.quantized import scheme_of

    packing = scheme_of(quantization, "c").of(["model.layers.0.mlp.up_proj"])
    assert packing is not None
    return packing


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptqs_and_awqs_tensors_have_these_bytes(bits: int) -> None:
    """Against tensors in the writers' layout (which `ffn params` counts as such files)."""
    linear = torch.nn.Linear(96, F, bias=False)
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    stored = gptq(linear, bits, 32)
    assert any(name.endswith("g_idx") for name in stored)
    assert packed_of(quantization).matrix_bytes(F, 96) == sum(t.nbytes for t in stored.values())
    if bits != 3:
        stored = awq(linear, bits, 32)
        theirs = {"quant_method": "awq", "bits": bits, "group_size": 32}
        assert packed_of(theirs).matrix_bytes(F, 96) == sum(t.nbytes for t in stored.values())


def test_gpt_oss_has_its_published_experts_bytes() -> None:
    """gpt-oss-20b's tensors, whose sum is the published size: the experts in MXFP4, their biases in bf16."""
    tensors = gpt_oss(24, 32)
    config = {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_local_experts": 32, "num_experts_per_tok": 4, "torch_dtype": "bfloat16",
    }  # fmt: skip
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    read = counted({"quant_method": "mxfp4", "modules_to_not_convert": kept}, config)
    theirs = sum(info.bytes for name, info in tensors.items() if ".mlp." in name)
    assert read.weight_bytes == theirs
    assert read.dtype == "mxfp4"


def test_what_is_left_out_stays_in_16_bits() -> None:
    """Names, wildcards and regular expressions of modules; a router's name is no part of gate_proj's."""
    fp8 = {"quant_method": "fp8"}
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "a layer": ({"modules_to_not_convert": ["model.layers.1.mlp", "lm_head"]}, 2 * PARAMS + 2 * PARAMS),
        "a projection": ({"modules_to_not_convert": ["down_proj"]}, LAYERS * (2 * D * F + 2 * D * F)),
        "a wildcard": ({"exclude_modules": ["*.layers.0.*"]}, 2 * PARAMS + 2 * PARAMS),
        "a router": ({"ignore": ["re:.*mlp.gate$", "mlp.gate", "lm_head"]}, LAYERS * PARAMS),
        "attention": ({"modules_to_not_convert": ["self_attn"]}, LAYERS * PARAMS),
    }
    for name, (left_out, expected) in cases.items():
        assert counted({**fp8, **left_out}).weight_bytes == expected, name
    whole, without = counted(fp8), counted({**fp8, "modules_to_not_convert": ["self_attn", "lm_head"]})
    attention = LAYERS * (D * (D + 2 * 64) + D * D)
    assert without.model_weight_bytes - whole.model_weight_bytes == attention


def test_single_modules_may_have_other_bits() -> None:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    eight = counted({**base, "dynamic": {"+:.*down_proj": {"bits": 8}, "-:.*layers\\.0\\..*": {}}})
    four = PARAMS * 2 / 3 / 2 + 2 * F * 2.5 + 4 * 2 * D
    down = D * F + 3 * D * 3 + 4 * F
    assert eight.weight_bytes == PARAMS * 2 + 2 * (four + down)
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}, "model.layers.1.mlp.*": {"quant_algo": "NVFP4"},
    }}  # fmt: skip
    assert counted(mixed).weight_bytes == D * F + 2 * 2 * D * F + PARAMS * 9 / 16 + 2 * PARAMS


MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": D, "moe_intermediate_size": 64, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_experts_are_packed_and_their_router_is_not() -> None:
    read = counted({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "mlp.gate"]}, MIXTURE)
    assert read.weight_bytes == 2 * (8 * 3 * D * 64 + 2 * 8 * D)
    v4 = counted({"quant_method": "fp8", "weight_block_size": [128, 128]}, {**MIXTURE, "expert_dtype": "fp4"})
    assert v4.weight_bytes == 2 * (8 * 3 * D * 64 * 17 / 32 + 2 * 8 * D)
    assert counted({"quant_method": "fp8", "modules_to_not_convert": ["experts"]}, MIXTURE).weight_bytes == 2 * 2 * (
        8 * 3 * D * 64 + 8 * D
    )


def test_a_rule_for_every_expert_is_looked_up_and_too_many_patterns_are_refused() -> None:
    """Lists of 100,000 names take no time for each layer; a hostile list of patterns is refused."""
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(60) for e in range(1700)]
    config = {**LLAMA, "num_hidden_layers": 60}
    assert (
        counted({"quant_method": "fp8", "ignore": [*names, "model.layers.7.mlp"]}, config).weight_bytes == 61 * PARAMS
    )
    many = counted({"quant_method": "fp8", "ignore": [f"re:.*{n}$" for n in range(5000)]}, config)
    assert many.weight_bytes is None


ATTENTION = LAYERS * (D * (D + 2 * 64) + D * D)  # of all layers: queries and output [D, D], keys and values [64, D]


@pytest.mark.parametrize(
    ("pattern", "experts", "attention"),
    [
        ("re:.*lm_head", False, False),
        ("re:.*mlp\\.gate$", False, False),
        ("re:.*self_attn.*", False, True),
        ("re:.*\\.(q|k|v|o)_proj$", False, True),
        ("re:model\\.layers\\.(0|1|2)\\..*", True, True),
        ("re:(?:model\\.)?layers\\.[0-9]+\\.mlp\\.experts\\.\\d+\\..*", True, False),
    ],
)
def test_the_patterns_of_published_configs_are_read(pattern: str, experts: bool, attention: bool) -> None:
    """What a pattern names takes two bytes for each parameter instead of one."""
    config = {**LLAMA, **MIXTURE, "num_hidden_layers": LAYERS}
    all_packed, read = (
        counted({"quant_method": "fp8", "ignore": ignored}, config) for ignored in (["lm_head"], ["lm_head", pattern])
    )
    ffns, routers = LAYERS * 8 * 3 * D * 64, LAYERS * 8 * D
    assert read.weight_bytes == ffns * (2 if experts else 1) + 2 * routers
    others = read.model_weight_bytes - read.weight_bytes - (all_packed.model_weight_bytes - all_packed.weight_bytes)
    assert others == (ATTENTION if attention else 0)


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", "re:(model|layers)*x", "re:((.*)y){9}", "re:(?:.*a){20}", "re:.*.*.*.*.*.*.*x", "re:(*"]
)
def test_patterns_that_could_match_for_ever_are_refused(pattern: str) -> None:
    """`(a+)+$` takes 2^n steps for n letters. The bytes are unknown, and the message says which field is at fault."""
    quantization = {"quant_method": "fp8", "ignore": [pattern]}
    resolved = from_config({**LLAMA, "quantization_config": quantization}, "model", "config.json")
    with pytest.raises(FFNError, match="model: quantization_config: a pattern is not read"):
        packed_model(resolved)
    assert count(resolved).weight_bytes is None


BESIDE: dict[str, tuple[dict[str, Any], float]] = {
    "hf_quant_config.json": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        PARAMS * 9 / 16,
    ),
    "quantize_config.json": (
        {"bits": 4, "group_size": 128, "desc_act": False}, PARAMS / 2 + groups(128) * 2.5 + 4 * INPUTS
    ),
    "quant_config.json": ({"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, KINDS["awq"][1]),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_beside_the_config_describes_the_quantization(name: str, tmp_path: Path) -> None:
    """As older versions of ModelOpt, AutoGPTQ and AutoAWQ wrote it; the config's own description comes first."""
    values, layer = BESIDE[name]
    (tmp_path / name).write_text(json.dumps(values), "utf-8")
    for config, expected in ((LLAMA, layer), ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, PARAMS)):
        (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
        assert count(load(str(tmp_path))).weight_bytes == LAYERS * ceil(expected)


def test_torchao_packs_embeddings_and_head_if_the_config_says_so() -> None:
    """A float32 scale and an int8 zero for each row of the two tables."""
    int8 = {"quant_method": "torchao", "quant_type": "int8_weight_only"}
    alone, with_tables = counted(int8), counted({**int8, "include_input_output_embeddings": True})
    assert alone.model_weight_bytes - with_tables.model_weight_bytes == 2 * 512 * (D - 5)


def test_mlx_packs_embeddings_and_router_too() -> None:
    values = {**LLAMA, "quantization": {"group_size": 64, "bits": 4}}
    read = count(from_config(values, "model", "config.json"))
    assert (read.weight_bytes, read.dtype) == (LAYERS * PARAMS * 4.5 / 8, "mlx-4bit")
    attention = LAYERS * (D * (D + 2 * 64) + D * D)
    norms = (2 * LAYERS + 1) * D
    assert read.model_weight_bytes == read.weight_bytes + (attention + 2 * 512 * D) * 4.5 / 8 + 2 * norms
    moe = {**MIXTURE, "quantization": {"group_size": 64, "bits": 4, "model.layers.0.mlp.switch_mlp.up_proj": False}}
    router = 8 * D
    assert count(from_config(moe, "m", "config.json")).weight_bytes == 2 * (8 * 3 * D * 64 + router) * 4.5 / 8
    assert count(from_config({**LLAMA, "quantization": {"mode": "mxfp4", "bits": 4, "group_size": 32}}, "m", "c")
                 ).weight_bytes == LAYERS * PARAMS * 17 / 32  # fmt: skip


UNKNOWN: dict[str, dict[str, Any]] = {
    "quant_method 'aqlm'": {"quant_method": "aqlm", "nbits_per_codebook": 16},
    "quant_method 'exl2'": {"quant_method": "exl2", "bits": 4.25},
    "quant_algo 'W9'": {"quant_method": "modelopt", "quant_algo": "W9"},
    "weights of 9 bits": {"quant_method": "gptq", "bits": 9},
    "weights of None bits": {"quant_method": "awq"},
    "groups of 'x'": {"quant_method": "gptq", "bits": 4, "group_size": "x"},
    "blocks of [128]": {"quant_method": "fp8", "weight_block_size": [128]},
    "weights without config_groups": {"quant_method": "compressed-tensors"},
    "the sparsity 'sparse-24-bitmask'": described(num_bits=8, type="float", strategy="channel")
    | {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
    "weights in the format 'dense'": described(num_bits=8, type="int", strategy="channel") | {"format": "dense"},
    "weights in neither 4 nor 8 bits": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False},
    "quant_type 'uintx'": {"quant_method": "torchao", "quant_type": "uintx"},
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_a_config_does_not_determine_is_named(what: str, tmp_path: Path, call) -> None:
    """Null and a note, never bf16 in silence; with --dtype the question is another one."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": UNKNOWN[what]}), "utf-8")
    code, out, err = call("params", str(tmp_path), "--json")
    row = json.loads(out)["rows"][0]
    assert (code, row["weight_bytes"], row["model_weight_bytes"]) == (0, None, None)
    assert (row["ffn_params_total"], row["matmul_flops_total"]) == (LAYERS * PARAMS, 2 * LAYERS * PARAMS)
    assert f"the bytes of {what} are not known, so weight bytes are not counted" in err
    assert call("params", str(tmp_path))[0] == 0
    code, out, err = call("params", str(tmp_path), "--strict", "--json")  # the counts all the same
    assert (code, json.loads(out)["rows"][0]["ffn_params_total"]) == (4, LAYERS * PARAMS)
    assert err.splitlines()[-1].startswith("error: ")
    assert call("params", str(tmp_path), "--strict", "--dtype", "fp8")[0] == 0
    for strict, expected in (((), 2), (("--strict",), 4)):
        code, out, err = call("plan", str(tmp_path), "--device", "h100", *strict)
        assert (code, out, f"the bytes of {what} are not known" in err) == (expected, "", True)
    assert call("plan", str(tmp_path), "--device", "h100", "--strict", "--dtype", "fp8")[0] == 0
    code, out, _ = call("params", str(tmp_path), "--dtype", "bf16", "--json")
    assert json.loads(out)["rows"][0]["weight_bytes"] == 2 * LAYERS * PARAMS


def test_a_plain_config_is_as_before() -> None:
    assert packed_model(from_config(LLAMA, "model", "config.json")) is None
    read = counted(None)
    assert (read.weight_bytes, read.dtype) == (2 * LAYERS * PARAMS, "bf16")


def test_the_kept_table_of_kinds_agrees_and_names_its_oracles() -> None:
    """Bytes by each format's library, written once in an environment of its own; compressed-tensors writes here too."""
    kept = {row["kind"]: row for row in read(ROOT / "benchmarks/results/quantized_kinds.csv")}
    told = [row(*one) for one in quantized_kinds.kinds() if one[1] in ("compressed-tensors", "mlx")]
    assert [one["agrees"] for one in told if one["library"] == "compressed-tensors"] == [True] * 4
    assert all(str(one["from_config"]) == kept[str(one["kind"])]["written"] for one in told)
    assert [one["agrees"] for one in kept.values()].count("true") == 27
    assert all(one["oracle"].startswith("by hand") for one in kept.values() if one["agrees"] != "true")


@pytest.mark.parametrize(
    "rules",
    [
        [],
        ["re:.*\\bexperts\\b", "lm_head"],
        ["re:model\\.layers\\.\\d\\..*"],  # layers 0 to 9
        ["model.layers.?.mlp.*", "re:.*layers[.].[5-8].*down"],
        ["model.layers.3.mlp", "re:.*\\.1\\d\\.mlp\\.up_proj"],
        ["layers.1", "gate_proj"],
    ],
)
def test_layers_that_no_rule_tells_apart_are_matched_once(rules):
    """Against matching every name of every layer."""
    packings = [Packing(f"format {n}", 4) for n in range(len(rules))]
    scheme = Scheme(None, tuple(zip(rules, packings, strict=True)))
    for name in ("mlp.up_proj", "mlp.experts.0.down_proj", "mlp.gate_proj", "ffn.w1"):
        for layer in (0, 3, 9, 10, 15, 31, 100):
            names = [f"{at}.{layer}.{name}" for at in ("model.layers", "layers", "backbone.layers")]
            assert scheme.in_layer(layer, [name]) == scheme.of(names)
