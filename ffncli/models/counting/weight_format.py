"""The format that a model's weights count in: the requested one, else that of its files, else fp32."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ffncli.block import dtypes
from ffncli.block.dtypes import DType
from ffncli.errors import option
from ffncli.models.model import Resolved


def storage_of(resolved: Resolved, dtype: str | None = None) -> DType:
    """The format of a model's weights: `dtype` if given, else as stored, packed formats by the mean of their file.

    Raises FFNError for an unknown `dtype`.
    """
    if dtype is not None:
        return dtypes.storage(dtype, option("dtype"))
    if resolved.model.dtype is None:
        return dtypes.dtype("fp32")
    known = dtypes.find_storage(resolved.model.dtype)
    if resolved.stored is None or (known is not None and known.computable):
        return known or _nearest_dtype(resolved.model.dtype)
    mean = Fraction(resolved.stored.bytes, resolved.stored.params)
    name = known.name if known else resolved.model.dtype
    return DType(name, 0, block=_block(resolved), other_bytes=2, flat=True, mean=mean)


def _nearest_dtype(name: str) -> DType:
    """The plain format behind a file's packed one (fp8-block128, gptq-4bit); bf16 if there is none."""
    return dtypes.find_storage(name.partition("-")[0]) or dtypes.dtype("bf16")


def _block(resolved: Resolved) -> int:
    """How many weights of a row share a scale, so that a slice of d_ff has to be a whole number of them."""
    known = dtypes.find_storage(resolved.model.dtype or "")
    if known is not None and known.block > 1:
        return known.block
    sizes = [
        *_numbers(resolved.quantization or {}, "group_size"),
        *_numbers(resolved.quantization or {}, "weight_block_size"),
    ]
    return max([1, *sizes])


def _numbers(values: Any, name: str) -> list[int]:
    """Every whole number under the key `name`, at any depth of a quantization_config."""
    if not isinstance(values, Mapping):
        return []
    entry = values.get(name)
    numbers = [v for v in (entry if isinstance(entry, list) else [entry]) if type(v) is int and v > 0]
    return numbers + [number for inner in values.values() for number in _numbers(inner, name)]
