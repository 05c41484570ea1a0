"""Small quantized checkpoints: packed integers in real files, and what must be counted in them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ffncli.models.files.headers import TensorInfo, read_header
from ffncli.models.files.packing import LogicalTensor, logical
from ffncli.models.tensors.read_weights import values
from tests.oracles.checkpoints import checkpoint_in

UP = "model.layers.0.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def counted(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> dict[str, LogicalTensor]:
    """Write these tensors to a file, and return what is counted there."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    header = read_header(path / "model.safetensors")
    out = logical(header, config, "model.safetensors")
    assert sum(entry.bytes for entry in out.values()) == sum(info.bytes for info in header.values())
    return out


def unpacked(path: Path, stored: Mapping[str, Tensor], name: str = f"{UP}.weight", quantization: Any = None) -> Tensor:
    """Write tensors to a file, and return the unpacked weight that is read from it."""
    save_file({n: tensor.contiguous() for n, tensor in stored.items()}, path / "model.safetensors")
    return values(checkpoint_in(path), name, quantization)


def by_library(
    form: str, weight: Tensor, scale: Tensor, weights: Mapping[str, Any], **more: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that compressed-tensors writes for a weight, and the weight that it unpacks from them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=dict(weights), format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    written = compressor.compress({"weight": weight, "weight_scale": scale, **more}, scheme)
    written = {name: tensor for name, tensor in written.items() if tensor is not None}
    return {f"{UP}.{name}": tensor for name, tensor in written.items()}, compressor.decompress(written, scheme)[
        "weight"
    ]


def check_packed(path: Path, tensors: Mapping[str, Tensor], config: Any, form: str, linear: torch.nn.Linear) -> None:
    """Check that the tensors are counted as the packed weight of `linear` and nothing else."""
    stored = sum(tensor.nbytes for tensor in tensors.values())
    shape = tuple(linear.weight.shape)
    assert counted(path, tensors, config) == {f"{UP}.weight": LogicalTensor(shape, linear.weight.numel(), stored, form)}


def info(dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(dtype, shape, int(np.prod(shape, dtype=object)) * SIZES[dtype])


def words(values: np.ndarray, bits: int) -> Tensor:
    """Pack rows of unsigned integers as a stream of bits into int32 words."""
    stream = (values[..., None] >> np.arange(bits)) & 1
    raw = np.packbits(stream.reshape(len(values), -1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4))).view(np.int32))


def integers(*shape: int, bits: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**bits, shape)


def config_groups(*weights: Mapping[str, Any]) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": dict(w)} for i, w in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}
