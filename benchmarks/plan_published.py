"""How well does `ffn plan` predict what others measured? Its defaults compared with published times and rates.

What: `plan_published.toml` has the published figures, the rule by which they were chosen before any was predicted, the
figures from which the defaults come, and the figures that were left out, with the reason. Each figure is compared as a
time. For an FFN or a mixture, this is the time that `ffn plan` predicts for the block on one device; for a single
matrix product, the time from the same roofline; for an all-reduce, the time of the plan's ring. The error is predicted
÷ measured − 1. Work that is bound by memory and fits in the device's last-level cache is listed, but not counted.

Limits: the figures are only as good as their sources; most are the fastest of several kernels that ran in a loop.

    python -m benchmarks.plan_published [--save FILE]

The exit code is 1 if the median absolute error is above 20 %.
"""

import csv
import io
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import script
from benchmarks.script import Mark, cell
from ffncli.block.dtypes import activation_dtype, storage
from ffncli.block.shard import Ranks
from ffncli.block.traffic import Traffic, time_floor
from ffncli.models.counting.cluster import Accelerators, Assumptions, assumed, cluster_of
from ffncli.models.counting.plan import Planner
from ffncli.models.counting.traffic import model_traffic
from ffncli.models.dimensions import Dimensions
from ffncli.models.source import load
from ffncli.system.hardware import Device, devices

FIGURES = Path(__file__).with_suffix(".toml")
RESULTS = script.RESULTS / "plan_published.csv"
MARK = 0.20
CLASSES = ("product", "FFN", "mixture", "all-reduce")
COLUMNS = (
    "source", "device", "what", "shape", "tokens", "dtype", "ranks", "reported", "unit", "measured_us", "predicted_us",
    "error", "bound", "counted", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A published figure. For an all-reduce, `tokens` is its bytes; a matrix product's `shape` is (d_in, d_out)."""

    source: str
    device: str
    what: str
    shape: tuple[int, int] | str
    tokens: int
    dtype: str
    reported: float
    unit: str
    note: str = ""
    ranks: int = 1
    experts: int | None = None
    top_k: int | None = None

    @property
    def work(self) -> Traffic:
        """The FLOPs and bytes of a single matrix product."""
        assert isinstance(self.shape, tuple)
        weights, (k, n) = storage(self.dtype), self.shape
        ends = self.tokens * (k + n) * activation_dtype(weights).block_bytes
        return Traffic(weights.matrix_bytes((n, k)), ends, ends, 2 * self.tokens * n * k)

    @property
    def planner(self) -> Planner:
        """The planner of the block."""
        options = Dimensions(experts=self.experts, top_k=self.top_k)
        return Planner(load(str(self.shape), options).model, storage(self.dtype))

    @property
    def measured_s(self) -> float:
        """The figure as a time in seconds."""
        match self.unit:
            case "us":
                return self.reported * 1e-6
            case "ms":
                return self.reported * 1e-3
            case "tflops":
                return self.work.matmul_flops / (self.reported * 1e12)
        return 2 * (self.ranks - 1) / self.ranks * self.tokens / (self.reported * 1e9)  # as nccl-tests defines busbw


@dataclass(frozen=True)
class Prediction:
    """The plan's prediction of a figure; `cached`: bound by memory, and all bytes fit in the last-level cache."""

    figure: Figure
    seconds: float
    bound: str
    cached: bool = False

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1."""
        return self.seconds / self.figure.measured_s - 1


def figures(path: Path = FIGURES) -> Iterator[Figure]:
    """Yield every figure in the file."""
    for part in tomllib.loads(path.read_text("utf-8"))["figures"]:
        for series in part["series"]:
            for tokens, reported in series["values"].items():
                yield _figure(part, series, int(tokens), float(reported))


def _figure(part: Mapping[str, Any], series: Mapping[str, Any], tokens: int, reported: float) -> Figure:
    what = {"gemm": "product", "square": "product", "ffn": "FFN"}.get(series["what"], series["what"])
    if what == "product":
        shape: tuple[int, int] | str = (series.get("k", tokens), series.get("n", tokens))
    else:
        shape = series.get("block", "")
    return Figure(
        source=part["source"], device=part["device"], what=what, shape=shape, tokens=tokens,
        dtype=series.get("dtype", ""), reported=reported, unit=part["unit"], note=part.get("note", ""),
        ranks=series.get("ranks", 1), experts=series.get("experts"), top_k=series.get("top_k"),
    )  # fmt: skip


def predicted(figure: Figure) -> Prediction:
    """Predict a figure with the plan's defaults."""
    device = next(one for one in devices() if one.name == figure.device)
    cluster = cluster_of(device, assumed(device, Assumptions()))
    if figure.what == "all-reduce":
        seconds = cluster.wires.all_reduce_s(figure.tokens, figure.ranks)
        assert seconds is not None
        return Prediction(figure, seconds, "link")
    if figure.what == "product":
        return _product(figure, device, cluster)
    row = figure.planner.row(cluster, Ranks(), figure.tokens)
    assert row.time_s is not None, row.refused
    moved = model_traffic(figure.planner.model, figure.planner.weights, figure.tokens).moved(fused=True)
    return Prediction(figure, row.time_s, str(row.bound), row.bound == "memory" and moved <= device.llc_bytes)


def all_predictions() -> tuple[Prediction, ...]:
    """Predict every figure."""
    return tuple(predicted(figure) for figure in figures())


def _product(figure: Figure, device: Device, cluster: Accelerators) -> Prediction:
    rates = cluster.speeds.rates(storage(figure.dtype), figure.work)
    assert rates is not None, f"{figure.device} has no rate in {figure.dtype}"
    moved = figure.work.moved(fused=True)
    floor = time_floor(figure.work.matmul_flops, moved, rates.flops_per_s, rates.bytes_per_s)
    return Prediction(figure, floor.seconds, floor.bound, floor.bound == "memory" and moved <= device.llc_bytes)


def row(prediction: Prediction) -> dict[str, str]:
    """Return the CSV row of a prediction."""
    figure = prediction.figure
    shape = "x".join(map(str, figure.shape)) if isinstance(figure.shape, tuple) else figure.shape
    experts = f" {figure.experts} experts, {figure.top_k} a token" if figure.experts else ""
    values = {
        "source": figure.source, "device": figure.device, "what": figure.what, "shape": shape + experts,
        "tokens": figure.tokens, "dtype": figure.dtype, "ranks": figure.ranks, "reported": figure.reported,
        "unit": figure.unit, "measured_us": 1e6 * figure.measured_s, "predicted_us": 1e6 * prediction.seconds,
        "error": prediction.error, "bound": prediction.bound, "counted": not prediction.cached, "note": figure.note,
    }  # fmt: skip
    return {name: f"{v:.4g}" if isinstance(v := values[name], float) else cell(v) for name in COLUMNS}


def csv_of(predictions: Sequence[Prediction]) -> str:
    """Return the results as CSV."""
    text = io.StringIO()
    out = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    out.writeheader()
    out.writerows(row(one) for one in predictions)
    return text.getvalue()


def median_error(predictions: Sequence[Prediction]) -> float:
    """Return the median absolute error of the counted predictions."""
    return statistics.median(abs(one.error) for one in predictions if not one.cached)


def median_of_sources(predictions: Sequence[Prediction]) -> float:
    """Return the median of the median absolute errors of each source and device, so that each counts once."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one in predictions:
        if not one.cached:
            groups.setdefault((one.figure.source, one.figure.device), []).append(abs(one.error))
    return statistics.median(statistics.median(errors) for errors in groups.values())


def summary(predictions: Sequence[Prediction]) -> str:
    """Return the target, then the median and worst errors by class."""
    counted = [one for one in predictions if not one.cached]
    whole, by_source = median_error(predictions), median_of_sources(predictions)
    figure = f"{100 * whole:.1f} % of {len(counted)}"
    lines: list[Mark] = [
        ("median absolute error", figure, f"{100 * MARK:.0f} %", whole <= MARK),
        ("median of the medians by source", f"{100 * by_source:.1f} %", "", True),
    ]
    for name, bound in product(CLASSES, ("memory", "compute", "link")):
        group = [one for one in counted if (one.figure.what, one.bound) == (name, bound)]
        if group:
            worst = max(group, key=lambda one: abs(one.error))
            at = f"{worst.figure.device}, {worst.figure.tokens}"
            figure = f"{100 * median_error(group):.1f} % of {len(group)}, worst {100 * worst.error:+.0f} % ({at})"
            lines.append((f"{'matrix ' * (name == 'product')}{name}, bound by {bound}", figure, "", True))
    return script.marks(lines)


def main() -> int:
    """Predict every figure, print the summary, and write the rows to --save FILE."""
    options, predictions = script.options_of(__doc__), all_predictions()
    if options.save:
        Path(options.save).write_text(csv_of(predictions), "utf-8")
    print(summary(predictions))
    return int(median_error(predictions) > MARK)


if __name__ == "__main__":
    sys.exit(main())
