"""The values of a step, or of all steps, as a pandas DataFrame with a row for each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.run.corpus.frame import save_table
from ffncli.run.engine.prepare import Token
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

    from ffncli.run.engine.trace import StepRecord

_MOST_VALUES = 20_000_000  # of a table


@package_errors()
def step_frame(tensor: Tensor, rows: Sequence[int] | None, tokens: Sequence[Token], layer: int) -> DataFrame:
    """`layer`, `token`, `unit` and `value` of a step's tensor [..., units].

    `rows` are the tokens of an expert, one per row of its tensor; `tokens` those of a prompt, whose positions are then
    the column's. Raises FFNError (exit 3) without pandas.
    """
    import pandas

    flat = tensor.detach().reshape(-1, tensor.shape[-1]).cpu()
    flat = flat.float() if flat.dtype == torch.bfloat16 else flat  # NumPy has no bfloat16
    numbers = range(flat.shape[0]) if rows is None else rows
    positions = torch.tensor([tokens[row].position if tokens else row for row in numbers], dtype=torch.int64)
    return pandas.DataFrame(
        {
            "layer": layer,
            "token": positions.repeat_interleave(flat.shape[1]).numpy(),
            "unit": torch.arange(flat.shape[1]).repeat(flat.shape[0]).numpy(),
            "value": flat.flatten().numpy(),
        }
    )


@package_errors()
def save_values(
    path: Path, records: Sequence[StepRecord], tensors: Mapping[str, Tensor], tokens: Sequence[Token], layer: int
) -> int:
    """Write the values of all steps as one table, `step` before the columns of `step_frame`, to a .csv or .parquet.

    Returns how many values there are. Raises FFNError for too many, and (exit 3) if the file cannot be written.
    """
    import pandas

    count = sum(tensors[record.name].numel() for record in records)
    if count > _MOST_VALUES:
        what = f"--save: {count:,} values are too many for a table (the limit is {_MOST_VALUES:,})"
        raise FFNError(what, "save as .safetensors, or give fewer tokens by --position")
    frames = [step_frame(tensors[record.name], record.tokens, tokens, layer) for record in records]
    named = [frame.assign(step=record.name) for frame, record in zip(frames, records, strict=True)]
    save_table(pandas.concat(named, ignore_index=True)[["step", *frames[0].columns]], path)
    return count
