"""All units of a corpus as a pandas DataFrame, and as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffncli.models.model import Layer
from ffncli.run.corpus.layer import LayerSums
from ffncli.run.corpus.sums import UnitSums
from ffncli.system.files import written_whole
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


@package_errors()
def units_frame(sums: Mapping[Layer, LayerSums]) -> DataFrame:
    """A row for each unit of each layer: see `CorpusSurvey.frame`. Raises FFNError (exit 3) without pandas."""
    import pandas

    parts = [pandas.DataFrame(dict(_columns(layer, part, columns)))
             for layer, one in sums.items() for part, columns in one.parts.items()]  # fmt: skip
    return pandas.concat(parts, ignore_index=True) if parts else pandas.DataFrame()


def _columns(layer: Layer, part: str, columns: UnitSums) -> Iterator[tuple[str, Any]]:
    """The columns of a part of a layer; figures of units without a token are unknown."""
    from pandas.arrays import FloatingArray, IntegerArray  # type: ignore[import-untyped]

    size, tokens = columns.high.numel(), columns.tokens.repeat_interleave(columns.columns)
    unknown, counted = (tokens == 0).numpy(), tokens.clamp_min(1).double()
    group = torch.arange(columns.groups).repeat_interleave(columns.columns)

    def numbers(values: Tensor) -> IntegerArray:
        return IntegerArray(values.cpu().numpy().copy(), unknown.copy())

    def figures(values: Tensor) -> FloatingArray:
        return FloatingArray(values.cpu().numpy().copy(), unknown.copy())

    yield "stack", [layer.stack] * size
    yield "layer", layer.index
    yield "part", [part] * size
    expert = torch.full((size,), columns.groups == 1)
    yield "expert", IntegerArray(group.numpy().copy(), expert.numpy().copy())
    yield "unit", torch.arange(columns.columns).repeat(columns.groups).numpy()
    yield "tokens", tokens.numpy()
    yield "active_share", figures(columns.active.cpu() / counted)
    yield "mean", figures(columns.total.cpu() / counted)
    for name in ("low", "high"):
        value, at = getattr(columns, name), getattr(columns, f"{name}_at")
        column = {"low": "min", "high": "max"}[name]
        yield column, figures(value)
        yield f"{column}_text", numbers(at[:, 0])
        yield f"{column}_token", numbers(at[:, 1])
    if columns.top:
        there = (columns.largest > -torch.inf).cpu()
        every = (
            ("values", columns.largest),
            ("texts", columns.largest_at[..., 0]),
            ("tokens", columns.largest_at[..., 1]),
        )
        for name, largest in every:
            yield f"top_{name}", [row[kept].tolist() for row, kept in zip(largest.cpu(), there, strict=True)]


def save_table(frame: DataFrame, path: Path) -> None:
    """Write the table as CSV, lists joined by `;`, or as Parquet. Raises FFNError (exit 3) if that fails."""
    if path.suffix.lower() == ".parquet":
        with written_whole(path) as file:
            frame.to_parquet(file, index=False, engine="pyarrow")
        return
    joined = frame.copy()
    for name in (name for name in frame.columns if name.startswith("top_")):
        joined[name] = [";".join(map(repr, values)) for values in frame[name]]
    with written_whole(path) as file:
        file.write(joined.to_csv(index=False, lineterminator="\n").encode())
