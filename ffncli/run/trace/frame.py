"""The values of a step as a pandas DataFrame, a row for each value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffncli.run.engine.prepare import Token
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


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
