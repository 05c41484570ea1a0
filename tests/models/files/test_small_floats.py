"""Floats of 4, 6 and 8 bits, and int8: what is read is what compressed-tensors and transformers make of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.models.files.packing import LogicalTensor
from tests.oracles.packed import FP8, UP, by_library, config_groups, counted, unpacked

pytestmark = pytest.mark.usefixtures("block")
W = f"{UP}.weight"
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4 = {**FP4, "strategy": "tensor_group", "group_size": 16}
OCP = {"strategy": "group", "group_size": 32, "symmetric": True, "type": "float", "scale_dtype": torch.uint8}
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


def amounts(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16) + 0.05


def nvfp4(weight: Tensor, whole: float = 37.0) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' file of a weight, and the bfloat16 that it makes of it."""
    scale = (weight.float().unflatten(1, (-1, 16)).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn).bfloat16()
    more = {"weight_global_scale": torch.tensor([whole])}
    return by_library("nvfp4-pack-quantized", weight, scale, NVFP4, **more)


def as_modelopt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same file under ModelOpt's names, whose scale of the tensor multiplies."""
    return {
        W: tensors[f"{W}_packed"], f"{W}_scale": tensors[f"{W}_scale"],
        f"{W}_scale_2": tensors[f"{W}_global_scale"].reciprocal().squeeze(), f"{UP}.input_scale": torch.ones(()),
    }  # fmt: skip


def test_nvfp4_is_what_the_library_decompresses(tmp_path: Path):
    """Bit for bit in bfloat16, to which it rounds the float32 product."""
    tensors, theirs = nvfp4(some(48, 64))
    found = unpacked(tmp_path, tensors, quantization=config_groups(NVFP4))
    assert (found.dtype, theirs.dtype) == (torch.float32, torch.bfloat16)
    assert theirs.unique().numel() > 100
    assert torch.equal(found.bfloat16(), theirs)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    counted_ = counted(tmp_path, as_modelopt(tensors), config)
    assert counted_ == {W: LogicalTensor((48, 64), 48 * 64, 48 * 36 + 8, "nvfp4")}


def test_modelopts_nvfp4_is_its_converted_file(tmp_path: Path):
    """compressed-tensors converts ModelOpt's files: its scale of the tensor is one over theirs."""
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    tensors, theirs = nvfp4(some(48, 64), 64.0)  # a power of two: one over it is exact
    renamed = as_modelopt(tensors)
    assert torch.equal(unpacked(tmp_path, renamed, quantization={"quant_method": "modelopt"}).bfloat16(), theirs)
    converted = ModelOptNvfp4Converter(targets=["re:.*up_proj"]).process(dict(renamed))
    assert torch.equal(unpacked(tmp_path, converted).bfloat16(), theirs)


def test_stacked_nvfp4_experts(tmp_path: Path):
    """Experts in one parameter, each with its scale or all with one; ModelOpt's Llama-4 has them transposed."""
    made = [nvfp4(some(48, 64).roll(turn, 0), whole) for turn, whole in ((0, 64.0), (5, 32.0))]
    wanted = torch.stack([theirs for _, theirs in made])
    packed, scale = (torch.stack([one[f"{W}_{n}"] for one, _ in made]) for n in ("packed", "scale"))
    whole = torch.tensor([1 / 64, 1 / 32])
    rows = {EXPERTS: packed, f"{EXPERTS}_scale": scale, f"{EXPERTS}_scale_2": whole}
    assert torch.equal(unpacked(tmp_path, rows, EXPERTS).bfloat16(), wanted)
    upright = {EXPERTS: packed.mT, f"{EXPERTS}_weight_scale": scale.view(torch.uint8).mT.contiguous()}
    upright[f"{EXPERTS}_weight_scale"] = upright[f"{EXPERTS}_weight_scale"].view(torch.float8_e4m3fn)
    upright[f"{EXPERTS}_weight_scale_2"] = whole
    assert torch.equal(unpacked(tmp_path, upright, EXPERTS).bfloat16(), wanted.mT)
    assert counted(tmp_path, upright, None)[EXPERTS].shape == (2, 64, 48)
    upright[f"{EXPERTS}_weight_scale_2"] = whole[:1].squeeze()
    one = unpacked(tmp_path, upright, EXPERTS).bfloat16()
    assert torch.equal(one[0], wanted[0].mT)
    assert torch.equal(one[1], (wanted[1].float() / 2).bfloat16().mT)


@pytest.mark.parametrize("form", ["mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"])
def test_ocp_formats_are_what_the_library_decompresses(form: str, tmp_path: Path):
    weights = {**OCP, "num_bits": int(form[4])}
    weight = some(48, 128)
    scale = torch.exp2(torch.randint(-9, 3, (48, 4), generator=torch.Generator().manual_seed(0))).bfloat16()
    tensors, theirs = by_library(form, weight, scale, weights)
    found = unpacked(tmp_path, tensors, quantization=config_groups({**weights, "scale_dtype": "torch.uint8"}))
    assert theirs.unique().numel() > 20
    assert torch.equal(found.to(theirs.dtype), theirs)
    assert counted(tmp_path, tensors, None)[W].format == form[:5]


@pytest.mark.parametrize("shape", [(48, 128), (3, 48, 128)])
@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_is_what_transformers_makes_of_it(scale: torch.dtype, shape: tuple[int, ...], tmp_path: Path):
    """`quant_method` mxfp8: scales are bytes (Inkling-2), or have the dtype for them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = (8 * some(*shape)).to(torch.float8_e4m3fn)
    powers = torch.randint(100, 140, (*shape[:-1], 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, powers, torch.float32)
    tensors = {W: weight, f"{W}_scale_inv": powers.view(scale)}
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    assert torch.equal(unpacked(tmp_path, tensors, quantization=config), theirs)
    assert counted(tmp_path, tensors, config)[W].format == "mxfp8"


@pytest.mark.parametrize("name", [f"{UP}.qscale_weight", f"{UP}.scale"])
def test_fp8_scales_of_other_names(name: str, tmp_path: Path):
    """Mistral-Large-4's, DeepSeek-V4's: transformers renames them."""
    weight, scale = some(128, 256).to(torch.float8_e4m3fn), torch.tensor([[0.5, 3.0]])
    found = unpacked(tmp_path, {W: weight, name: scale, f"{UP}.qscale_act": torch.ones(())}, quantization=FP8)
    assert torch.equal(found, weight.float() * scale.repeat_interleave(128, 1))


@pytest.mark.parametrize(("strategy", "shape"), [("tensor", (1,)), ("channel", (48, 1)), ("group", (48, 4))])
@pytest.mark.parametrize("zeros", [True, False])
def test_int8_in_place_is_what_the_library_decompresses(strategy: str, shape: Any, zeros: bool, tmp_path: Path):
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": not zeros}
    weights |= {"group_size": 32} if strategy == "group" else {}
    more = {"weight_zero_point": torch.randint(-20, 20, shape, dtype=torch.int8)} if zeros else {}
    tensors, theirs = by_library("int-quantized", some(48, 128), amounts(*shape), weights, **more)
    found = unpacked(tmp_path, tensors, quantization=config_groups(weights))
    assert torch.equal(found.bfloat16(), theirs)


# --- what cannot be ---------------------------------------------------------------------------------------------------

E4M3 = torch.ones(48, 4).to(torch.float8_e4m3fn)
BYTES = torch.zeros(48, 32, dtype=torch.uint8)
WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scale of the tensor": ({W: BYTES, f"{W}_scale": E4M3}, "weight_scale_2' is missing"),
    "a scale for each row": (
        {W: BYTES, f"{W}_scale": E4M3, f"{W}_scale_2": torch.ones(48)}, r"is F32 \[48\]; NVFP4 requires one float",
    ),
    "whole scales": ({W: BYTES, f"{W}_scale": E4M3, f"{W}_scale_2": torch.ones(1).int()}, "is I32"),
    "NVFP4 scales that are bytes": (
        {W: BYTES, f"{W}_scale": E4M3.view(torch.uint8), f"{W}_scale_2": torch.ones(1)}, "as U8; NVFP4 stores them",
    ),
    "MXFP4 scales that are floats": ({W: BYTES, f"{W}_scale": torch.ones(48, 2)}, "scales as F32; MXFP4 stores them"),
    "scales of 12 values": ({W: torch.zeros(48, 30, dtype=torch.uint8), f"{W}_scale": E4M3}, "cannot go with"),
    "scales along columns": ({W: BYTES, f"{W}_scale": torch.ones(6, 32)}, "weight_scale_2' is missing"),
    "zeros of another shape": (
        {W: BYTES.to(torch.int8), f"{W}_scale": torch.ones(48, 1), f"{W}_zero_point": torch.zeros(48).to(torch.int8)},
        "in the shape of the scales",
    ),
    "zeros that are floats": (
        {W: BYTES.to(torch.int8), f"{W}_scale": torch.ones(48, 1), f"{W}_zero_point": torch.zeros(48, 1)}, "is F32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "says"), WRONG.values(), ids=WRONG)
def test_pieces_that_cannot_be_are_refused(tensors: dict[str, Tensor], says: str, tmp_path: Path):
    with pytest.raises(FFNError, match=says) as error:
        unpacked(tmp_path, tensors)
    assert "model.safetensors" in str(error.value)
