"""Packed matrices: parameters are those of the Linear that was packed, bytes those that the file takes for it."""

import json
import random
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ffncli.errors import FFNError
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.packing import LogicalTensor, logical
from tests.oracles.checkpoints import harmful
from tests.oracles.packed import (
    AWQ,
    BNB,
    FP8,
    GPTQ,
    SIZES,
    UP,
    check_packed,
    config_groups,
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
    with pytest.raises(FFNError, match="8-bit values, but quantization_config says bits 4"):
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
    assert entry == LogicalTensor(shape, prod(shape), 4 * prod(words) + 2 * prod(scales), "gptq-4bit")


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
    assert out["a.weight"] == LogicalTensor((3,), 3, 6, "BF16")
    assert out[f"{UP}.bias"] == LogicalTensor((96,), 96, 192, "F16")
    assert out["z.weight"] == LogicalTensor((2, 5), 10, 40, "F32")
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
        stem + "gate_up_proj": LogicalTensor((4, 512, 256), 4 * 512 * 256, 4 * 512 * 256 + 4 * 8 * 4, "fp8-block"),
        stem + "down_proj": LogicalTensor((4, 256, 256), 4 * 256 * 256, 4 * 256 * 256 + 4 * 256 * 4, "fp8"),
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
    assert entry == LogicalTensor((3, 64, 128), values.numel(), blocks.numel() + scales.numel(), "mxfp4")
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
        f"{UP}.weight": LogicalTensor(None, linear.weight.numel(), stored, f"bnb-{form}"),
        f"{UP}.bias": LogicalTensor((96,), 96, 192, "BF16"),
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
    assert entry == LogicalTensor(None, linear.weight.numel(), packed.nbytes + 2 * 96 * 2 * 4, "torchao-int4")


def test_bitnet_has_four_rows_to_a_byte(tmp_path: Path):
    tensors = {f"{UP}.weight": torch.zeros(96 // 4, 64, dtype=torch.uint8), f"{UP}.weight_scale": torch.ones(1)}
    check_packed(tmp_path, tensors, {"quant_method": "bitnet"}, "bitnet", torch.nn.Linear(64, 96))


def compressed(
    form: str, linear: torch.nn.Linear, weights: dict[str, Any], scale: Any, **more: Tensor
) -> dict[str, Tensor]:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    state = {"weight": linear.weight.detach(), "weight_scale": torch.full(scale, 0.1), **more}
    written = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    return {f"{UP}.{name}": tensor for name, tensor in written.items() if tensor is not None}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("inputs", [64, 96, 4096])
def test_compressed_integers_in_groups(bits: int, inputs: int, tmp_path: Path):
    linear = torch.nn.Linear(inputs, 48)
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    tensors = compressed("pack-quantized", linear, weights, (48, inputs // 32))
    assert f"{UP}.weight_packed" in tensors
    check_packed(tmp_path, tensors, config_groups(weights), f"compressed-int{bits}", linear)


def test_compressed_integers_with_zero_points(tmp_path: Path):
    linear = torch.nn.Linear(64, 48)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    zeros = torch.zeros(48, 2, dtype=torch.int8)
    tensors = compressed("pack-quantized", linear, weights, (48, 2), weight_zero_point=zeros)
    assert tensors[f"{UP}.weight_zero_point"].shape == (6, 2)
    check_packed(tmp_path, tensors, config_groups(weights), "compressed-int4", linear)


def test_compressed_integers_with_a_scale_for_each_channel(tmp_path: Path):
    linear = torch.nn.Linear(64, 48)
    weights = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
    tensors = compressed("pack-quantized", linear, weights, (48, 1))
    check_packed(tmp_path, tensors, config_groups(weights), "compressed-int4", linear)


def test_compressed_integers_of_several_widths(tmp_path: Path):
    linear = torch.nn.Linear(128, 48)
    four, eight = ({"num_bits": n, "type": "int", "strategy": "group", "group_size": 32} for n in (4, 8))
    for bits, weights in ((4, four), (8, eight)):
        tensors = compressed("pack-quantized", linear, weights, (48, 4))
        check_packed(tmp_path, tensors, config_groups(eight, four), f"compressed-int{bits}", linear)
    with pytest.raises(FFNError, match="fit several widths"):
        counted(tmp_path, tensors, config_groups(eight, {**four, "group_size": 64}))


@pytest.mark.parametrize(
    ("form", "weights", "scale", "more", "label"),
    [
        ("nvfp4-pack-quantized", {"num_bits": 4, "group_size": 16, "strategy": "tensor_group"}, (48, 8), True, "nvfp4"),
        ("mxfp4-pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"}, (48, 4), False, "mxfp4"),
        ("mxfp6-pack-quantized", {"num_bits": 6, "group_size": 32, "strategy": "group"}, (48, 4), False, "mxfp6"),
    ],
)
def test_compressed_small_floats(
    form: str, weights: dict[str, Any], scale: Any, more: bool, label: str, tmp_path: Path
):
    linear = torch.nn.Linear(128, 48)
    weights = {**weights, "type": "float", "symmetric": True}
    if label != "nvfp4":
        weights["scale_dtype"] = "torch.uint8"
    extra = {"weight_global_scale": torch.ones(1)} if more else {}
    tensors = compressed(form, linear, weights, scale, **extra)
    check_packed(tmp_path, tensors, config_groups(weights), label, linear)


@pytest.mark.parametrize(("kind", "label"), [("int", "compressed-int8"), ("float", "fp8")])
@pytest.mark.parametrize("scale", [(1,), (48, 1)])
def test_compressed_in_place(kind: str, label: str, scale: Any, tmp_path: Path):
    linear = torch.nn.Linear(128, 48)
    weights = {"num_bits": 8, "type": kind, "strategy": "tensor" if scale == (1,) else "channel", "symmetric": True}
    tensors = compressed("naive-quantized", linear, weights, scale)
    check_packed(tmp_path, tensors, config_groups(weights), label, linear)


def test_modelopt_nvfp4_names_its_weight_weight(tmp_path: Path):
    linear = torch.nn.Linear(128, 48)
    tensors = {
        f"{UP}.weight": torch.zeros(48, 64, dtype=torch.uint8), f"{UP}.input_scale": torch.ones(()),
        f"{UP}.weight_scale": torch.ones(48, 8).to(torch.float8_e4m3fn), f"{UP}.weight_scale_2": torch.ones(()),
    }  # fmt: skip
    check_packed(tmp_path, tensors, {"quant_method": "modelopt"}, "nvfp4", linear)


def test_a_plain_checkpoint_is_as_it_is_stored():
    tensors = {
        "embed.weight": info("BF16", 10, 4), "embeddings.position_ids": info("I64", 1, 512),
        "a.bias": info("U8", 1, 1, 8, 8), "b.weight": info("F8_E4M3", 4, 4), "d": info("F32"),
        "c.experts.gate_up_proj": info("F32", 2, 3, 4), "table": info("I32", 3, 3), "block_scales": info("F32", 3),
    }  # fmt: skip
    expected = {n: LogicalTensor(i.shape, i.bytes // SIZES[i.dtype], i.bytes, i.dtype) for n, i in tensors.items()}
    assert logical(tensors, None, "x") == expected
    assert list(logical(tensors, None, "x")) == list(tensors)
    assert logical({}, None, "x") == {}


Q, S, G, W = (f"{UP}.{name}" for name in ("qweight", "scales", "g_idx", "weight"))
SC, INV, PACKED = (W + end for end in ("_scale", "_scale_inv", "_packed"))
FP8_4, FP8_384 = info("F8_E4M3", 4, 4), info("F8_E4M3", 384, 256)
FOURS = info("F32", 2, 2)
PACK4 = config_groups({"num_bits": 4, "group_size": 32})
WRONG: dict[str, tuple[dict[str, TensorInfo], Any, str]] = {
    "GPTQ words of no whole width": (
        {Q: info("I32", 7, 96), S: info("F16", 2, 96), G: info("I32", 64)}, GPTQ, "64 values in 7",
    ),
    "GPTQ words for no input": ({Q: info("I32", 0, 96)}, GPTQ, "not a matrix"),
    "GPTQ words in a row": ({Q: info("I32", 96)}, GPTQ, "not a matrix"),
    "GPTQ words of 8 bits": ({Q: info("U8", 8, 96), S: info("F16", 2, 96)}, GPTQ, "int32"),
    "GPTQ with more groups than inputs": ({Q: info("I32", 8, 96), S: info("F16", 65, 96)}, GPTQ, "65 groups"),
    "GPTQ with groups of no equal size": ({Q: info("I32", 8, 96), S: info("F16", 60, 96)}, GPTQ, "60 groups"),
    "GPTQ with empty scales": ({Q: info("I32", 8, 96), S: info("F16", 0, 96)}, GPTQ, S),
    "GPTQ with scales in a row": ({Q: info("I32", 8, 96), S: info("F16", 96)}, GPTQ, S),
    "GPTQ with bits against the config": ({Q: info("I32", 8, 96), G: info("I32", 32)}, GPTQ, "8-bit"),
    "bits that are no number": ({Q: info("I32", 8, 96)}, {"bits": "4"}, "bits must be a whole number"),
    "bits that are true": ({Q: info("I32", 8, 96)}, {"bits": True}, "bits must be a whole number"),
    "16 bits": ({Q: info("I32", 8, 96)}, {"bits": 16}, "how wide"),
    "3 bits in 8 words": ({Q: info("I32", 8, 96)}, {"bits": 3}, "whole 3-bit"),
    "AWQ of no whole width": ({Q: info("I32", 64, 12), S: info("F16", 2, 100)}, AWQ, "100 values in 12"),
    "a method that is a number": ({Q: info("I32", 64, 12)}, {"quant_method": 4}, "quant_method must be a string"),
    "FP8 scales of another matrix": ({W: FP8_384, INV: info("F32", 3, 3)}, FP8, INV),
    "FP8 scales of more axes": ({W: FP8_384, SC: info("F32", 1, 3, 2)}, None, SC),
    "FP8 scales of none": ({W: FP8_384, SC: info("F32", 0, 2)}, None, SC),
    "FP8 scales for more rows": ({W: FP8_384, SC: info("F32", 385)}, None, SC),
    "FP8 values of none": ({W: info("F8_E4M3", 0, 256), SC: info("F32", 3, 2)}, None, SC),
    "FP8 blocks of no size": ({W: FP8_4, SC: FOURS}, {"weight_block_size": [0, 2]}, "[0, 2]"),
    "FP8 blocks that are a number": ({W: FP8_4, SC: FOURS}, {"weight_block_size": 2}, "whole numbers, got 2"),
    "FP8 blocks of three": ({W: FP8_4, SC: FOURS}, {"weight_block_size": [1, 2, 2]}, "[1, 2, 2]"),
    "MXFP4 scales of another matrix": (
        {"e_blocks": info("U8", 2, 8, 4, 16), "e_scales": info("U8", 2, 8, 3)}, {}, "e_blocks",
    ),
    "MXFP4 blocks of 8 bytes": (
        {"e_blocks": info("U8", 2, 8, 4, 8), "e_scales": info("U8", 2, 8, 4)}, None, "16 bytes",
    ),
    "MXFP4 of one row": ({"e_blocks": info("U8", 4, 16), "e_scales": info("U8", 4)}, None, "16 bytes"),
    "MXFP4 without scales": ({"e_blocks": info("U8", 2, 8, 4, 16)}, {"quant_method": "mxfp4"}, "'e_scales' is missing"),
    "NVFP4 scales of another matrix": ({PACKED: info("U8", 48, 64), SC: info("F8_E4M3", 47, 8)}, None, SC),
    "bytes in groups of 12": ({PACKED: info("U8", 48, 96), SC: info("F8_E4M3", 48, 8)}, None, SC),
    "packed bytes without scales": ({PACKED: info("U8", 48, 64)}, None, "no scales"),
    "packed words without a config": ({PACKED: info("I32", 48, 8), SC: info("F16", 48, 2)}, None, "config_groups"),
    "packed words of another group size": (
        {PACKED: info("I32", 48, 8), SC: info("F16", 48, 4)}, PACK4, "config_groups",
    ),
    "groups that are a list": ({PACKED: info("I32", 48, 8)}, {"config_groups": [4]}, "config_groups must be"),
    "zero bits": ({PACKED: info("I32", 48, 8)}, config_groups({"num_bits": 0}), "num_bits must be"),
    "packed floats": ({PACKED: info("I8", 48, 8)}, PACK4, "int32 words or bytes"),
    "2:4 sparse": ({PACKED: info("I32", 8, 96), f"{UP}.meta": info("I32", 8, 8)}, PACK4, "marlin-24"),
    "absmax of another matrix": ({W: info("U8", 3072, 1), f"{W}.absmax": info("F32", 97)}, BNB, "97 blocks"),
    "SCB of another matrix": ({W: info("I8", 96, 64), f"{UP}.SCB": info("F32", 95)}, BNB, f"{UP}.SCB"),
    "packed and plain": ({Q: info("I32", 8, 96), W: info("F16", 96, 64)}, GPTQ, "is duplicated"),
    "a piece of two": (
        {W: info("F8_E4M3", 4, 16), SC: info("F32", 4, 1), PACKED: info("U8", 4, 8)}, None, "belongs to both",
    ),
    "an unknown packing": ({f"{UP}.W_q": info("U8", 8, 96)}, {"quant_method": "hqq"}, "'hqq'"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "says"), WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(tensors: dict[str, TensorInfo], config: Any, says: str):
    with pytest.raises(FFNError) as error:
        logical(tensors, config, "m.safetensors")
    assert "m.safetensors: " in str(error.value)
    assert says in str(error.value)


def test_hostile_names_and_shapes_are_shown_harmlessly():
    name = "\x1b[2J\n" + "x" * 10_000 + ".qweight"
    with pytest.raises(FFNError) as error:
        logical({name: TensorInfo("I32", (0,) * 10_000, 0)}, GPTQ, "x")
    assert not harmful(str(error.value))
    assert len(str(error.value)) < 600


ENDINGS = (
    ".qweight .qzeros .scales .g_idx .weight .weight_scale .weight_scale_inv .scale .weight_packed .weight_shape .meta "
    ".weight.absmax .SCB ._weight_qdata ._weight_scale _blocks _scales .bias .weight_zero_point .weight_scale_2"
).split()
CONFIGS: tuple[Any, ...] = (
    None, {}, GPTQ, AWQ, FP8, PACK4, {"bits": -1}, {"quant_method": []}, {"weight_block_size": [10**40, 1]},
    {"config_groups": {"a": None, "b": {"weights": {"num_bits": 4, "group_size": -1}}}}, {"dynamic": 1, "bits": 3},
)  # fmt: skip


def test_nothing_but_a_refusal_comes_of_tensors_at_random():
    """Whatever is counted has at most 8 values for each stored byte, and every stored byte once."""
    rng = random.Random(0)
    refused = 0
    for _ in range(5000):
        names = [rng.choice("ab") + ending for ending in rng.sample(ENDINGS, rng.randrange(1, 5))]
        tensors = {name: info(rng.choice(list(SIZES)), *_some_shape(rng)) for name in names}
        try:
            out = logical(tensors, rng.choice(CONFIGS), "x")
        except FFNError:
            refused += 1
            continue
        assert sum(entry.bytes for entry in out.values()) == sum(tensor.bytes for tensor in tensors.values())
        assert all(0 <= entry.params <= 8 * entry.bytes for entry in out.values())
    assert 500 < refused < 4500


def _some_shape(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, 1, 2, 8, 16, 32, 64, 2**40)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 4)))]
