"""What torchao, compressed-tensors, transformers and gguf-py write for a tensor: codes and scales, each as one tensor.

Codes have the tensor's shape: bytes of FP8, codes of FP4, integers. Scales have an axis for each axis of the tensor.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffncli.block.formats import Format


class Written(NamedTuple):
    """Codes and scales; zeros, minimums and the tensor's scale, if the format has them."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    tensor_scale: Tensor | None = None


def blocks_of(form: Format, shape: torch.Size) -> list[int]:
    """Return how many values of each axis of a matrix share a scale."""
    rows, columns = shape
    tile = int(form.shared.removeprefix("block")) if form.shared.startswith("block") else 0
    return {"tensor": [rows, columns], "channel": [1, columns]}.get(form.shared, [tile or 1, tile or form.group])


def by_torchao(x: Tensor, form: Format) -> Written:
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.quantization import quant_primitives

    x = x if x.dtype == torch.bfloat16 else x.float()
    if form.name == "nvfp4":
        whole = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().amax())
        scales, packed = nvfp4_tensor.nvfp4_quantize(x, 16, whole)
        return Written(_halves(packed), scales, tensor_scale=whole.reshape(1))
    if form.name.startswith("mx"):
        element = torch.float4_e2m1fn_x2 if form.name == "mxfp4" else torch.float8_e4m3fn
        scales, values = mx_tensor.to_mx(x, element, 32, mx_tensor.ScaleCalculationMode(form.rule))
        return Written(_halves(values) if form.name == "mxfp4" else values.view(torch.uint8), scales)
    dtype = torch.float8_e5m2 if form.name == "fp8_e5m2" else torch.float8_e4m3fn
    scale_dtype = torch.float8_e8m0fnu if form.pow2 else torch.float32
    scales = quant_primitives._choose_scale_float8(x, blocks_of(form, x.shape), dtype, scale_dtype)
    return Written(quant_primitives._quantize_affine_float8(x, scales, dtype).view(torch.uint8), scales)


def _halves(packed: Tensor) -> Tensor:
    """Return two codes for each byte, the low half first."""
    raw = packed.view(torch.uint8)
    return torch.stack([raw & 15, raw >> 4], -1).flatten(-2)


def by_compressed_tensors(x: Tensor, form: Format) -> Written:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    kind = "int" if form.element == "int" else "float"
    scale_dtype = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}.get(form.scale)
    tile = blocks_of(form, x.shape)
    strategy = "tensor_group" if form.name == "nvfp4" else "group" if form.group else form.shared
    strategy = "block" if strategy.startswith("block") else strategy
    args = QuantizationArgs(
        num_bits=int(form.bits), type=kind, symmetric=not form.asymmetric, strategy=strategy,
        group_size=form.group or None, block_structure=tile if strategy == "block" else None,
        scale_dtype=scale_dtype, zp_dtype=scale_dtype or torch.int8,
    )  # fmt: skip
    parts = x.unflatten(0, (-1, tile[0])).unflatten(2, (-1, tile[1]))  # [rows, tile, columns, tile]
    low, high = parts.amin((1, 3)), parts.amax((1, 3))
    whole = generate_gparam(low.amin(), high.amax()) if form.name == "nvfp4" else None
    scales, zeros = calculate_qparams(low, high, args, whole)
    values = quantize(x, scales, zeros if form.asymmetric else None, args, global_scale=whole)
    if form.element == "int":
        codes = values.to(torch.int8)
    elif form.element == "e4m3":
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = torch.searchsorted(table, values.float().abs()).to(torch.uint8) | (values.signbit().to(torch.uint8) * 8)
    if form.scale == "e8m0":
        scales = (127 + torch.floor(torch.log2(scales))).to(torch.uint8)  # as its MX compressors store them
    scales = scales.to(torch.float8_e4m3fn) if form.name == "nvfp4" else scales
    return Written(codes, scales, zeros if form.asymmetric else None, tensor_scale=whole)


def by_transformers(x: Tensor, form: Format) -> Written:
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    size = blocks_of(form, x.shape)
    config = SimpleNamespace(weight_block_size=size, scale_fmt="ue8m0" if form.pow2 else "float")
    out = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": x})
    return Written(out["a.weight"].view(torch.uint8), out["a.weight_scale_inv"])


def by_gguf(x: Tensor, form: Format) -> Written:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    kind = GGMLQuantizationType[form.name.upper()]
    with np.errstate(all="ignore"):
        raw = quantize(x.float().numpy(), kind)
    each, size = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, size)
    if form.name == "mxfp4":
        codes, scales, rest = _nibbles(blocks[:, 1:]), blocks[:, :1], None
    elif form.name.startswith("tq"):
        scales, rest = blocks[:, -2:].copy().view(np.float16), None
        codes = _trits(blocks[:, :-2], form.name)
    else:
        scales, blocks = blocks[:, :2].copy().view(np.float16), blocks[:, 2:]
        rest = blocks[:, :2].copy().view(np.float16) if form.name.endswith("_1") else None
        blocks = blocks if rest is None else blocks[:, 2:]
        codes = blocks.view(np.int8) if form.name == "q8_0" else _nibbles(blocks[:, -16:])
        if form.name.startswith("q5"):
            codes = codes | (np.unpackbits(blocks[:, :4], axis=-1, bitorder="little") << 4)
    grid = (*x.shape[:-1], x.shape[-1] // each)
    minimums = None if rest is None else torch.from_numpy(rest).reshape(grid)
    return Written(
        torch.from_numpy(np.ascontiguousarray(codes)).reshape(x.shape), torch.from_numpy(scales.copy()).reshape(grid),
        minimums=minimums,
    )  # fmt: skip


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Return the codes of blocks whose low halves are the first values, the high halves the others."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _trits(raw: np.ndarray, name: str) -> np.ndarray:
    """Return the codes 0, 1, 2 of ternary blocks: four of 2 bits in a byte, or five digits of base 3."""
    if name == "tq2_0":
        return (
            (raw.reshape(len(raw), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & np.uint8(3)
        ).reshape(len(raw), 256)
    parts = []
    for part, digits in ((raw[:, :32], 5), (raw[:, 32:48], 5), (raw[:, 48:], 4)):
        powers = np.array([3**n for n in range(digits)]).reshape(-1, 1)
        parts.append((((part[:, None] * powers) % 256 * 3) >> 8).reshape(len(raw), -1))
    return np.concatenate(parts, axis=-1).astype(np.uint8)


WRITERS = {
    "compressed-tensors": by_compressed_tensors, "transformers": by_transformers, "gguf": by_gguf,
    **dict.fromkeys(("torchao", "floor", "even", "rceil", "ceil"), by_torchao),
}  # fmt: skip
