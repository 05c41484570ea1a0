"""--measured: the rows of a CSV of `ffn bench` as measured blocks, and what is predicted of each from the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from statistics import median

from ffncli.bench.records import STEP
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.results.row import ResultRow
from ffncli.block import dtypes
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.models.counting.measured import MeasuredBlock, MeasuredSpeeds, predicted_s
from ffncli.show.parts import Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import percent, time_text
from ffncli.system import hardware

CPU = "cpu"


@dataclass(frozen=True)
class PredictedRow:
    """A measured block, and its time as predicted from the other blocks of the file; None if there are no others."""

    device: str
    block: str
    dtype: str
    tokens: int
    kernel: str
    measured_s: float
    predicted_s: float | None
    error: float | None


def measured_speeds(paths: str) -> dict[str, MeasuredSpeeds]:
    """By device, `cpu` or an accelerator's name, the fastest kernel of each forward case of CSVs of `ffn bench`.

    Raises FFNError if it cannot be read, and if nothing in it was measured.
    """
    best: dict[tuple[str, str, int, str], tuple[str, MeasuredBlock]] = {}
    for row in (row for path in filter(None, paths.split(",")) for row in read_rows(os.path.expanduser(path))):
        block = _block(row)
        if block is None:
            continue
        device = _device(row)
        key = (device, block.label, block.tokens, block.weights.name)
        if key not in best or block.time_s < best[key][1].time_s:
            best[key] = (device, block)
    if not best:
        raise FFNError(
            f"--measured {shown(paths)}: no forward time of a block on one device", "use a CSV of ffn bench --save"
        )
    names = dict.fromkeys(device for device, _ in best.values())
    return {name: MeasuredSpeeds(tuple(block for device, block in best.values() if device == name)) for name in names}


def _device(row: ResultRow) -> str:
    known = None if row.device == CPU else hardware.find(row.device_name)
    return known.name if known else row.device


def _block(row: ResultRow) -> MeasuredBlock | None:
    """The row's block; None for a backward pass, a row without a time, one step of a block, a block over ranks, and
    shared experts, whose width it lacks."""
    if row.status != "ok" or row.passes != "forward" or not row.time_s or row.shared_experts:
        return None
    if row.kernel.startswith(STEP) or (row.world_size or 1) > 1:
        return None
    if not (row.d_model and row.d_ff and row.tokens):
        return None
    moe = MoE(row.experts, row.top_k) if row.experts and row.top_k else None
    spec = FFNSpec(row.d_model, row.d_ff, row.activation, gated=row.gated, bias=row.bias, moe=moe)
    return MeasuredBlock(row.case.partition(",")[0], spec, dtypes.dtype(row.dtype), row.tokens, row.kernel, row.time_s)


def predictions(speeds: dict[str, MeasuredSpeeds]) -> Iterator[PredictedRow]:
    """Every measured block, predicted from the blocks that have other dimensions."""
    for device, one in speeds.items():
        for block in one.blocks:
            predicted = predicted_s(one.without(block), block)
            error = None if predicted is None else predicted / block.time_s - 1
            yield PredictedRow(
                device, block.label, block.weights.name, block.tokens, block.kernel, block.time_s, predicted, error
            )


def measured_parts(rows: Sequence[PredictedRow]) -> list[Part]:
    """What was predicted next to what was measured, the error, and the median of its size."""
    cells = [
        (row.device, row.block, row.dtype, row.tokens, row.kernel, time_text(row.measured_s),
         time_text(row.predicted_s), None if row.error is None else f"{100 * row.error:+.1f} %")
        for row in rows
    ]  # fmt: skip
    columns = ("device", "block", "dtype", "tokens", "kernel", "measured", "predicted", "error")
    parts: list[Part] = [Table(columns, cells, "measured, and predicted from the other blocks", labels=4)]
    errors = [abs(row.error) for row in rows if row.error is not None]
    if errors:
        parts.append(Line(f"error, either sign: median {percent(median(errors), 2)}, worst {percent(max(errors), 2)}"))
    return parts
