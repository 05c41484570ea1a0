"""Packed matrices: parameters are those of the Linear that was packed, bytes those that the file takes for it."""

from __future__ import annotations

import json
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ffncli.errors import FFNError
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.quantized import Logical, logical
from tests.oracles.packed import (
    AWQ,
    BNB,
    FP8,
    GPTQ,
    UP,
    check_packed,
    counted,
    info,
    integers,
    words,
)

# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def gptq(linear: torch.nn.Linear, bits: int = 4, group: int = 32) -> dict[str, Tensor]:
    outputs, inputs = linear.weight.shape
    groups = ceil(inputs / group)
    return {
        f"{UP}.qweight": words(integers(outputs, inputs, bits=bits), bits).T,
        f"{UP}.qzeros": words(integers(groups, outputs, bits=bits), bits),
        f"{UP}.scales": torch.ones(groups, outputs, dtype=torch.float16),
        f"{UP}.g_idx": torch.arange(inputs, dtype=torch.int32) // group,
    }


def awq(linear: torch.nn.Linear, bits: int = 4, group: int = 32) -> dict[str, Tensor]:
    outputs, inputs = linear.weight.shape
    return {
        f"{UP}.qweight": words(integers(inputs, outputs, bits=bits), bits),
        f"{UP}.qzeros": words(integers(inputs // group, outputs, bits=bits), bits),
        f"{UP}.scales": torch.ones(inputs // group, outputs, dtype=torch.float16),
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (64, 64)])
@pytest.mark.parametrize(
    "left_out", ["nothing", "g_idx", "qzeros", "bits", "g_idx bits", "qzeros bits", "scales g_idx"]
)
def test_gptq(bits: int, shape: tuple[int, int], left_out: str, tmp_path: Path):
    linear = torch.nn.Linear(*shape)
    tensors = {name: t for name, t in gptq(linear, bits).items() if name.rpartition(".")[2] not in left_out.split()}
    config = {**GPTQ, "bits": bits}
    config = {key: value for key, value in config.items() if key not in left_out.split()}
    check_packed(tmp_path, tensors, config, f"gptq-{bits}bit", linear)


def test_gptq_without_anything_that_says_how_wide(tmp_path: Path):
    tensors = gptq(torch.nn.Linear(64, 96))
    with pytest.raises(FFNError, match=rf"'{UP}\.qweight' .* how wide"):
        counted(tmp_path, {f"{UP}.qweight": tensors[f"{UP}.qweight"]}, None)


def test_gptq_with_one_group_a_row_and_with_a_short_last_group(tmp_path: Path):
    linear = torch.nn.Linear(96, 64)
    check_packed(tmp_path, gptq(linear, group=96), {**GPTQ, "group_size": -1}, "gptq-4bit", linear)
    check_packed(tmp_path, gptq(linear, group=64), {**GPTQ, "group_size": 64}, "gptq-4bit", linear)


@pytest.mark.parametrize("own", ["dynamic", "extra_config"])
def test_gptq_bits_of_a_module_of_its_own(own: str, tmp_path: Path):
    linear = torch.nn.Linear(64, 96)
    check_packed(tmp_path, gptq(linear, 8), {**GPTQ, own: {"+:.*up_proj": {"bits": 8}}}, "gptq-8bit", linear)
    with pytest.raises(FFNError, match="8-bit values, quantization_config says bits 4"):
        counted(tmp_path, gptq(linear, 8), GPTQ)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_awq(bits: int, tmp_path: Path):
    linear = torch.nn.Linear(64, 96)
    check_packed(tmp_path, awq(linear, bits), {**AWQ, "bits": bits}, f"awq-{bits}bit", linear)
    check_packed(tmp_path, awq(linear, bits), None, f"awq-{bits}bit", linear)
    alone = {f"{UP}.qweight": awq(linear, bits)[f"{UP}.qweight"]}
    check_packed(tmp_path, alone, {"quant_method": "awq", "w_bit": bits}, f"awq-{bits}bit", linear)


def test_gptq_of_llama_2_7b_takes_the_published_bits(tmp_path: Path):
    """One layer's up_proj at group size 128: 4 bits, and for each group a scale of 16 and a zero of 4 (4.15625)."""
    tensors = {
        f"{UP}.qweight": info("I32", 4096 // 8, 11008), f"{UP}.qzeros": info("I32", 32, 11008 // 8),
        f"{UP}.scales": info("F16", 32, 11008),
    }  # fmt: skip
    (entry,) = logical(tensors, {**GPTQ, "group_size": 128}, "x").values()
    assert entry.params == 45_088_768
    assert entry.bytes * 8 / entry.params == 4.15625


@pytest.mark.parametrize(
    ("words", "scales", "shape"),
    [((1, 96), (1, 96), (96, 8)), ((8, 1), (2, 1), (1, 64)), ((3, 8, 96), (3, 2, 96), (3, 96, 64))],
)
def test_gptq_of_one_word_of_one_output_and_of_experts_together(words: Any, scales: Any, shape: Any):
    tensors = {
        f"{UP}.qweight": info("I32", *words),
        f"{UP}.scales": info("F16", *scales),
        f"{UP}.g_idx": info("I32", 0),
    }
    (entry,) = logical(tensors, GPTQ, "x").values()
    assert entry == Logical(shape, prod(shape), 4 * prod(words) + 2 * prod(scales), "gptq-4bit")


def test_gptq_zeros_that_are_cut_to_whole_words_say_nothing_of_bits():
    tensors = {f"{UP}.qweight": info("I32", 8, 100), f"{UP}.qzeros": info("I32", 2, 100 // 32 * 4)}
    assert logical(tensors, GPTQ, "x")[f"{UP}.weight"].shape == (100, 64)
    with pytest.raises(FFNError, match="how wide"):
        logical(tensors, None, "x")


def test_a_bias_beside_packed_values_is_a_parameter_and_order_is_kept(tmp_path: Path):
    linear = torch.nn.Linear(64, 96)
    out = counted(
        tmp_path,
        {
            "a.weight": torch.zeros(3, dtype=torch.bfloat16), f"{UP}.bias": torch.zeros(96, dtype=torch.float16),
            **gptq(linear), "z.weight": torch.zeros(2, 5),
        },
        GPTQ,
    )  # fmt: skip
    assert out["a.weight"] == Logical((3,), 3, 6, "BF16")
    assert out[f"{UP}.bias"] == Logical((96,), 96, 192, "F16")
    assert out["z.weight"] == Logical((2, 5), 10, 40, "F32")
    packed = {"z.weight": info("F32", 1), f"{UP}.g_idx": info("I32", 64), f"{UP}.qweight": info("I32", 8, 96)}
    assert list(logical({**packed, "a.weight": info("F32", 1)}, GPTQ, "x")) == ["z.weight", f"{UP}.weight", "a.weight"]


# --- 8 bits -----------------------------------------------------------------------------------------------------------


def fp8(linear: torch.nn.Linear, block: int = 128) -> dict[str, Tensor]:
    """Cast block by block, as DeepSeek-V3's checkpoint is."""
    weight = linear.weight.detach()
    scales = torch.stack([torch.stack([c.abs().max() for c in r.split(block, 1)]) for r in weight.split(block, 0)])
    spread = scales.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)[:, : weight.shape[1]]
    return {f"{UP}.weight": (weight / spread).to(torch.float8_e4m3fn), f"{UP}.weight_scale_inv": scales}


@pytest.mark.parametrize("shape", [(256, 384), (200, 576), (128, 128), (384, 128), (100, 300)])
@pytest.mark.parametrize("scale", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_with_a_scale_for_each_block(shape: tuple[int, int], scale: torch.dtype, tmp_path: Path):
    linear = torch.nn.Linear(*shape)
    tensors = fp8(linear)
    tensors[f"{UP}.weight_scale_inv"] = tensors[f"{UP}.weight_scale_inv"].to(scale)
    one = len(tensors[f"{UP}.weight_scale_inv"].flatten()) == 1 or shape[0] <= 128
    check_packed(tmp_path, tensors, FP8, "fp8" if one else "fp8-block128", linear)
    tensors = {name.replace("weight_scale_inv", "scale"): tensor for name, tensor in tensors.items()}
    check_packed(tmp_path, tensors, FP8, "fp8" if one else "fp8-block128", linear)


def test_fp8_blocks_that_the_config_does_not_name(tmp_path: Path):
    linear = torch.nn.Linear(256, 384)
    check_packed(tmp_path, fp8(linear), None, "fp8-block", linear)
    check_packed(tmp_path, fp8(linear, 64), {"weight_block_size": [64, 64]}, "fp8-block64", linear)


@pytest.mark.parametrize("scale", [(), (1,), (1, 1), (384,), (384, 1)])
def test_fp8_with_a_scale_for_the_tensor_or_for_each_channel(scale: tuple[int, ...], tmp_path: Path):
    linear = torch.nn.Linear(256, 384)
    tensors = {
        f"{UP}.weight": linear.weight.detach().to(torch.float8_e4m3fn), f"{UP}.weight_scale": torch.ones(scale),
        f"{UP}.input_scale": torch.ones(()), f"{UP}.k_scale": torch.ones(()),
    }  # fmt: skip
    for config in (None, {"quant_method": "compressed-tensors"}, FP8):  # blocks are named for other modules too
        check_packed(tmp_path, tensors, config, "fp8", linear)


def test_fp8_experts_in_one_parameter():
    stem = "model.layers.0.mlp.experts."
    tensors = {
        stem + "gate_up_proj": info("F8_E4M3", 4, 512, 256), stem + "gate_up_proj_scale_inv": info("F32", 4, 4, 2),
        stem + "down_proj": info("F8_E4M3", 4, 256, 256), stem + "down_proj_scale": info("F32", 4, 1, 256),
    }  # fmt: skip
    assert logical(tensors, None, "x") == {
        stem + "gate_up_proj": Logical((4, 512, 256), 4 * 512 * 256, 4 * 512 * 256 + 4 * 8 * 4, "fp8-block"),
        stem + "down_proj": Logical((4, 256, 256), 4 * 256 * 256, 4 * 256 * 256 + 4 * 256 * 4, "fp8"),
    }


def test_expert_numbers_may_be_a_sign():
    """DeepSeek-V3: a routed expert has 3 × 7168 × 2048 parameters, one scale for each 16,384 of them."""
    tensors = {}
    for name, shape in (("gate_proj", (2048, 7168)), ("up_proj", (2048, 7168)), ("down_proj", (7168, 2048))):
        stem = f"model.layers.#.mlp.experts.#.{name}.weight"
        tensors |= {stem: info("F8_E4M3", *shape), stem + "_scale_inv": info("F32", *(size // 128 for size in shape))}
    out = logical(tensors, FP8, "x")
    assert [entry.format for entry in out.values()] == ["fp8-block128"] * 3
    assert sum(entry.params for entry in out.values()) == 44_040_192
    assert sum(entry.bytes for entry in out.values()) == 44_040_192 + 4 * 44_040_192 // 16_384


def test_scales_beside_weights_that_are_not_quantized_stay_plain():
    tensors = {
        f"{UP}.weight": info("BF16", 8, 4),
        f"{UP}.weight_scale": info("F32", 8),
        f"{UP}.input_scale": info("F32"),
    }
    out = logical(tensors, FP8, "x")
    assert {name: (entry.format, entry.params) for name, entry in out.items()} == {
        f"{UP}.weight": ("BF16", 32), f"{UP}.weight_scale": ("F32", 8), f"{UP}.input_scale": ("F32", 1),
    }  # fmt: skip


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def gpt_oss(layers: int, experts: int, d: int = 2880, d_ff: int = 2880) -> dict[str, TensorInfo]:
    """The MLP tensors of gpt-oss by their published shapes."""
    out = {}
    for stem in (f"model.layers.{i}.mlp." for i in range(layers)):
        out[stem + "router.weight"], out[stem + "router.bias"] = info("BF16", experts, d), info("BF16", experts)
        for name, rows, columns in (("gate_up_proj", 2 * d_ff, d), ("down_proj", d, d_ff)):
            out[stem + f"experts.{name}_blocks"] = info("U8", experts, rows, columns // 32, 16)
            out[stem + f"experts.{name}_scales"] = info("U8", experts, rows, columns // 32)
            out[stem + f"experts.{name}_bias"] = info("BF16", experts, rows)
    return out


@pytest.mark.parametrize(
    ("layers", "experts", "mlp", "total", "gib"),
    [(24, 32, 19_119_145_728, 20_914_757_184, 12.8), (36, 128, 114_714_874_368, 116_829_156_672, 60.8)],
)
def test_gpt_oss_has_its_published_size(layers: int, experts: int, mlp: int, total: int, gib: float):
    """Model card (arXiv 2508.10925, table 1): MLP 19.12B and 114.71B of 20.91B and 116.83B, 4.25 bits a weight, GiB."""
    out = logical(gpt_oss(layers, experts), {"quant_method": "mxfp4"}, "x")
    packed = [entry for entry in out.values() if entry.format == "mxfp4"]
    assert len(packed) == 2 * layers
    assert all(entry.bytes * 8 == 4.25 * entry.params for entry in packed)
    assert sum(entry.params for entry in out.values()) == mlp
    whole = sum(entry.bytes for entry in out.values()) + 2 * (total - mlp)
    assert round(whole / 2**30, 1) == gib


@pytest.mark.parametrize("names", ["_blocks _scales", ".blocks .scales"])
def test_mxfp4_has_as_many_values_as_transformers_unpacks(names: str, tmp_path: Path):
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8)
    scales = torch.full((3, 64, 4), 127, dtype=torch.uint8)
    tensors = {"mlp.experts.up_proj" + end: t for end, t in zip(names.split(), (blocks, scales), strict=True)}
    values = convert_moe_packed_tensors(blocks, scales)
    (entry,) = counted(tmp_path, tensors, {"quant_method": "mxfp4"}).values()
    assert entry == Logical((3, 64, 128), values.numel(), blocks.numel() + scales.numel(), "mxfp4")
    assert sorted(values.shape) == sorted((3, 64, 128))


def test_deepseek_v4_experts_are_pairs_of_fp4_in_int8(tmp_path: Path):
    linear = torch.nn.Linear(128, 96)
    scales = torch.ones(96, 128 // 32).to(torch.float8_e8m0fnu)
    tensors = {f"{UP}.weight": torch.zeros(96, 64, dtype=torch.int8), f"{UP}.scale": scales}
    check_packed(tmp_path, tensors, FP8, "mxfp4", linear)


# --- bitsandbytes, torchao, BitNet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4bit(form: str, storage: torch.dtype, nested: bool, tmp_path: Path):
    linear = torch.nn.Linear(64, 96)
    nibbles = integers(linear.weight.numel()).astype(np.uint8)
    packed = torch.from_numpy(nibbles[::2] << 4 | nibbles[1::2])
    state = json.dumps({"quant_type": form, "blocksize": 64, "shape": list(linear.weight.shape)}).encode()
    tensors = {
        f"{UP}.weight": packed.view(storage).reshape(-1, 1),
        f"{UP}.weight.absmax": torch.zeros(len(nibbles) // 64, dtype=torch.uint8 if nested else torch.float32),
        f"{UP}.weight.quant_map": torch.zeros(16),
        f"{UP}.weight.quant_state.bitsandbytes__{form}": torch.tensor(list(state), dtype=torch.uint8),
    }
    if nested:
        tensors |= {f"{UP}.weight.nested_absmax": torch.zeros(1), f"{UP}.weight.nested_quant_map": torch.zeros(256)}
    stored = sum(tensor.nbytes for tensor in tensors.values())
    bias = {f"{UP}.bias": torch.zeros(96, dtype=torch.bfloat16)}
    assert counted(tmp_path, tensors | bias, BNB) == {
        f"{UP}.weight": Logical(None, linear.weight.numel(), stored, f"bnb-{form}"),
        f"{UP}.bias": Logical((96,), 96, 192, "BF16"),
    }


def test_bitsandbytes_8bit(tmp_path: Path):
    linear = torch.nn.Linear(64, 96)
    tensors = {
        f"{UP}.weight": torch.zeros(96, 64, dtype=torch.int8), f"{UP}.SCB": torch.ones(96),
        f"{UP}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip
    check_packed(tmp_path, tensors, {"quant_method": "bitsandbytes"}, "bnb-int8", linear)


@pytest.mark.parametrize(
    ("dtype", "shape", "label"),
    [(torch.int8, (96, 64), "torchao-int8"), (torch.float8_e4m3fn, (96, 64), "torchao-fp8")],
)
def test_torchao_in_place(dtype: torch.dtype, shape: Any, label: str, tmp_path: Path):
    tensors = {f"{UP}._weight_qdata": torch.zeros(shape).to(dtype), f"{UP}._weight_scale": torch.ones(96, 1)}
    check_packed(tmp_path, tensors, {"quant_method": "torchao"}, label, torch.nn.Linear(64, 96))


def test_torchao_4bit_has_a_number_and_no_shape(tmp_path: Path):
    linear = torch.nn.Linear(64, 96)
    packed = words(integers(96, 64), 4)
    tensors = {f"{UP}._weight_qdata": packed, f"{UP}._weight_scale_and_zero": torch.ones(2, 96, 2)}
    (entry,) = counted(tmp_path, tensors, {"quant_method": "torchao"}).values()
    assert entry == Logical(None, linear.weight.numel(), packed.nbytes + 2 * 96 * 2 * 4, "torchao-int4")


def test_bitnet_has_four_rows_to_a_byte(tmp_path: Path):
    tensors = {f"{UP}.weight": torch.zeros(96 // 4, 64, dtype=torch.uint8), f"{UP}.weight_scale": torch.ones(1)}
    check_packed(tmp_path, tensors, {"quant_method": "bitnet"}, "bitnet", torch.nn.Linear(64, 96))
