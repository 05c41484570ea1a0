"""The number formats a weight or an activation can have, by every name that is in use for them."""

from __future__ import annotations

from dataclasses import dataclass

from ffncli.errors import FFNError, did_you_mean, shown


@dataclass(frozen=True)
class DType:
    """One format: our name, its size, torch's attribute, the code in a safetensors header."""

    name: str
    bytes: float
    torch: str
    safetensors: str
    aliases: tuple[str, ...] = ()


TABLE = (
    DType("fp64", 8, "float64", "F64", ("double", "f64")),
    DType("fp32", 4, "float32", "F32", ("float", "single", "f32")),
    DType("bf16", 2, "bfloat16", "BF16"),
    DType("fp16", 2, "float16", "F16", ("half", "f16")),
)
_BY_NAME = {alias: row for row in TABLE for alias in (row.name, row.torch, row.safetensors.lower(), *row.aliases)}


def dtype(text: str, field: str = "--dtype") -> DType:
    """The row for any usual spelling (`bf16`, `bfloat16`, `torch.bfloat16`). Raises FFNError for an unknown one."""
    row = find(text)
    if row is None:
        names = ", ".join(row.name for row in TABLE)
        raise FFNError(
            f"{field}: unknown dtype {shown(text)}", did_you_mean(text, list(_BY_NAME), f"use one of {names}")
        )
    return row


def find(text: object) -> DType | None:
    """The row, or None where the name is not one of ours (int8 codes, packed formats)."""
    return _BY_NAME.get(text.strip().lower().removeprefix("torch.")) if isinstance(text, str) else None
