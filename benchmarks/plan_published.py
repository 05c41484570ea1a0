"""How well does `ffn plan` predict what others measured? Its defaults compared with published times and rates.

What: `plan_published.toml` has the published figures, the rule by which they were chosen before any was predicted, the
figures from which the defaults come, and the figures that were left out, with the reason. Each figure is compared as a
time. For an FFN or a mixture, this is the time that `ffn plan` predicts for the block on one device; for a single
matrix product, the time from the same roofline; for an all-reduce, the time of the plan's ring. The error is predicted
÷ measured − 1. Work that is bound by memory and fits in the device's last-level cache is listed, but not counted.

Limits: the figures are only as good as their sources; most are the fastest of several kernels that ran in a loop.

    python -m benchmarks.plan_published [--save FILE]
    python -m benchmarks.plan_published --products FILE.csv --mixtures FILE.csv

The second form judges the plan by measured products and mixtures, in CSVs (gz too) with the columns of the public
repository ai-dynamo/aiconfigurator: median errors and what share of times is in its 80 % interval, by device, class of
formats and bound. The exit code is 1 if the median absolute error is above 20 %, or a target of the second form is
missed.
"""

import argparse
import csv
import io
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks import script
from benchmarks.script import Mark, cell
from ffncli.block.dtypes import activation_dtype, storage
from ffncli.block.shard import Ranks
from ffncli.block.traffic import Traffic
from ffncli.errors import FFNError
from ffncli.models.counting.cluster import Accelerators, Assumptions, assumed, cluster_of
from ffncli.models.counting.plan import Planner
from ffncli.models.counting.times.fit import MeasuredKernels
from ffncli.models.counting.times.fitted import Fitted, fitted, skew_exponent
from ffncli.models.counting.times.kernels import Chip, Loads, PlannedKernel, chip_of, kernel_time
from ffncli.models.counting.times.published import PublishedTimes, read_csv
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
    bound = "memory" if row.bound == "launch" else str(row.bound)
    return Prediction(figure, row.time_s, bound, bound == "memory" and moved <= device.llc_bytes)


def all_predictions() -> tuple[Prediction, ...]:
    """Predict every figure."""
    return tuple(predicted(figure) for figure in figures())


def _product(figure: Figure, device: Device, cluster: Accelerators) -> Prediction:
    tokens, (k, n) = figure.tokens, figure.shape
    work = figure.work
    kernel = PlannedKernel(work.matmul_flops, work.weight_bytes_read, 0, int(k), int(n), Loads.of([(tokens, 1)]))
    timed = cluster.speeds.timed(storage(figure.dtype), [kernel])
    assert timed is not None, f"{figure.device} has no rate in {figure.dtype}"
    bound = "compute" if work.flops_per_byte(fused=True) > timed.rates.ridge else "memory"
    cached = bound == "memory" and work.moved(fused=True) <= device.llc_bytes
    return Prediction(figure, timed.kernels[0].seconds, bound, cached)


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


# --- measured products and mixtures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A measured time and its prediction: `error` is log(predicted ÷ measured); `low` and `high` are the ends of the
    interval ÷ measured. `what` is `product`, or how tokens fall on a mixture's experts."""

    device: str
    kind: str
    what: str
    bound: str
    error: float
    low: float
    high: float

    @classmethod
    def of(cls, row: MeasuredKernels, cell: tuple[str, str], by: Fitted, chip: Chip, skew: float) -> "Judged":
        """Predict a row."""
        times = [(kernel_time(one, chip, by.constants, skew), one.routed) for one in row.kernels]
        ends = [[time.seconds * end for end in by.ends(routed, time.bound)] for time, routed in times]
        low, high = (sum(values) / row.seconds for values in zip(*ends, strict=True))
        error = log(sum(time.seconds for time, _ in times) / row.seconds)
        return cls(*cell, row.distribution or "product", row.bound(chip, by.constants), error, low, high)

    @property
    def mixture(self) -> bool:
        """Whether it is a mixture."""
        return self.what != "product"

    @property
    def work(self) -> str:
        """What it is, in the plural."""
        return "mixtures" if self.mixture else "products"

    @property
    def inside(self) -> bool:
        """Whether the measured time is in the interval."""
        return self.low <= 1 <= self.high


def figures_of(rows: Sequence[Judged]) -> tuple[float, float, float, float]:
    """Return the median error, its median with its sign, the share in the interval, and the interval's mean width over
    the predicted time."""
    errors = [exp(one.error) - 1 for one in rows]
    inside = sum(one.inside for one in rows) / len(rows)
    width = statistics.mean((one.high - one.low) / exp(one.error) for one in rows)
    return statistics.median(map(abs, errors)), statistics.median(errors), inside, width


TARGETS = (  # what, the rows, the largest median error
    ("bf16 products", lambda one: (one.kind, one.mixture) == ("bf16", False), 0.07),
    *((f"{name} products", lambda one, name=name: (one.kind, one.mixture) == (name, False), most)
      for most, names in ((0.07, ("fp8", "fp8_block", "fp8_static", "nvfp4")),
                          (0.10, ("int4_weights", "int8_weights", "int8"))) for name in names),
    ("mixtures, balanced", lambda one: one.what == "balanced", 0.14),
    ("mixtures, power law 1.2", lambda one: one.what == "power_law_1.2", 0.16),
)  # fmt: skip
LEAST = 100  # rows of a device and class for which the interval is judged


def cells_of(rows: Sequence[Judged]) -> dict[tuple[str, str, bool], list[Judged]]:
    """Return the rows by device, class, and whether they are mixtures."""
    out: dict[tuple[str, str, bool], list[Judged]] = {}
    for one in rows:
        out.setdefault((one.device, one.kind, one.mixture), []).append(one)
    return out


def verdicts(rows: Sequence[Judged]) -> Iterator[tuple[str, str, bool]]:
    """Yield what is judged, its figure, and whether the target is reached."""
    for what, of, most in TARGETS:
        if some := [one for one in rows if of(one)]:
            middle = figures_of(some)[0]
            yield what, f"{100 * middle:.1f} % (at most {100 * most:.0f} %)", middle <= most
    inside = figures_of(rows)[2]
    yield "in the 80 % interval", f"{100 * inside:.1f} % (78 to 82 %)", 0.78 <= inside <= 0.82
    large = [some for some in cells_of(rows).values() if len(some) >= LEAST]
    held = sum(0.70 <= figures_of(some)[2] <= 0.90 for some in large)
    if large:
        yield "cells with 70 to 90 %", f"{held} of {len(large)} (at least 9 of 10)", held >= 0.9 * len(large)


def missed(rows: Sequence[Judged]) -> list[str]:
    """Return the targets that are missed."""
    return [what for what, _, good in verdicts(rows) if not good]


def judged_text(rows: Sequence[Judged]) -> str:
    """Return a line for each device, class and bound, and a last line with the figures of all."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for one in rows:
        groups.setdefault((one.device, one.kind, one.work, one.bound), []).append(one)
    names = ("device", "class", "work", "bound")
    lines = [(*key, len(some), *_percents(some)) for key, some in sorted(groups.items())]
    text = script.table((*names, "n", "median error", "signed median", "in the interval", "mean width"), lines)
    whole = "; ".join(f"{what} {figure}{'' if good else ' MISSED'}" for what, figure, good in verdicts(rows))
    return f"{text}\n\nall {len(rows):,}: median error {100 * figures_of(rows)[0]:.1f} %; {whole}"


def _percents(rows: Sequence[Judged]) -> tuple[str, ...]:
    middle, signed, inside, width = figures_of(rows)
    return (f"{100 * middle:.1f} %", f"{100 * signed:+.1f} %", f"{100 * inside:.0f} %", f"{100 * width:.0f} %")


def judged_files(products: str | None, mixtures: str | None) -> tuple[list[Judged], Mapping[str, int]]:
    """Judge the rows of the files by the plan's constants; also return how many were left out for each reason."""
    found = PublishedTimes()
    for path, kind in ((products, "product"), (mixtures, "mixture")):
        if path:
            read_csv(path, kind, found)
    out = []
    for (device, name), parts in found.cells.items():
        known = next(one for one in devices() if one.name == device)
        chip, by = chip_of(known, name), fitted(known, name)
        assert chip is not None
        out += [Judged.of(one.measured, (device, name), by, chip, skew_exponent()) for part in parts for one in part]
    return out, found.left_out


def main() -> int:
    """Predict every figure, print the summary, and write the rows to --save FILE; or judge --products, --mixtures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE")
    parser.add_argument("--products", metavar="FILE")
    parser.add_argument("--mixtures", metavar="FILE")
    options = parser.parse_args()
    if options.products or options.mixtures:
        try:
            judged, left_out = judged_files(options.products, options.mixtures)
        except (FFNError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        print(*(f"left out: {number} rows: {why}" for why, number in left_out.items()), sep="\n")
        print(judged_text(judged) if judged else "no row can be used")
        return int(not judged or bool(missed(judged)))
    predictions = all_predictions()
    if options.save:
        Path(options.save).write_text(csv_of(predictions), "utf-8")
    print(summary(predictions))
    return int(median_error(predictions) > MARK)


if __name__ == "__main__":
    sys.exit(main())
