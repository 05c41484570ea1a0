"""compressed-tensors' formats, packed by its own writer: parameters are those of the Linear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from ffncli.errors import FFNError
from tests.oracles.packed import (
    UP,
    check_packed,
    config_groups,
    counted,
)


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
