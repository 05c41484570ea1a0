"""Measured times of matrix products and mixtures as the public repository ai-dynamo/aiconfigurator stores them, as
parquet files in folders or as a CSV of the same columns.

A product is x [tokens, k] times weights [k, n]; `fp8`, `fp8_block` and `nvfp4` include quantizing x where the measured
operator does. A mixture is its experts on one device, without the router; its `distribution` says how tokens fall on
experts. Of several times of the same work, the shortest counts.
"""

import csv
import gzip
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, floor, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from ffncli.block.dtypes import activation_dtype, storage
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.traffic import launches
from ffncli.errors import FFNError, shown
from ffncli.models import catalog
from ffncli.models.counting.times.fit import (
    LEAST,
    MeasuredKernels,
    ends,
    ends_of,
    errors_of_mixtures,
    errors_of_products,
    experts_factor,
    fitted_constants,
    part_of,
)
from ffncli.models.counting.times.fitted import Fitted, fitted, skew_exponent
from ffncli.models.counting.times.kernels import CLASSES, Loads, PlannedKernel, chip_of
from ffncli.system.files import open_to_read
from ffncli.system.hardware import Device, find, named
from ffncli.system.packages import require_extra

PRODUCTS, MIXTURES = "gemm_perf.parquet", "moe_perf.parquet"
_MOST_BYTES, _LARGEST, _MOST_EXPERTS = 1 << 28, 1 << 28, 8192
_MOST_TURNS = 64
_MOST_ROWS, _LEAST_SHAPES = 1000, 8  # of a device and class, for a fit
_CLASS = {
    "bfloat16": "bf16", "float16": "bf16", "int8_wo": "int8_weights", "int4_wo": "int4_weights", "sq": "int8",
    "w4a16_mxfp4": "mxfp4_weights", "w4a8_mxfp4_mxfp8": "mxfp4_mxfp8",
    **{name: name for name in ("fp8", "fp8_block", "fp8_static", "nvfp4")},
}  # fmt: skip
_SYSTEMS = {
    "a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300",
    "a100_pcie": "a100-80gb-pcie", "h100_pcie": "h100-pcie", "rtx_pro_6000_server": "rtx-pro-6000-blackwell-server",
}  # fmt: skip
_RENAMED = {"gemm_dtype": "dtype", "moe_dtype": "dtype", "m": "tokens", "num_tokens": "tokens", "latency": "ms"}
_NUMBERS = {
    "product": ("tokens", "n", "k"), "mixture": ("tokens", "hidden_size", "inter_size", "topk", "num_experts"),
}  # fmt: skip


@dataclass(frozen=True)
class PublishedTime:
    """One measurement: `work` is (tokens, n, k) of a product, or (tokens, d_model, d_ff, top_k, experts) of a mixture
    with its `distribution`."""

    device: Device
    kind: str
    work: tuple[int, ...]
    distribution: str
    seconds: float
    gated: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """What is left out together: all token counts of a shape."""
        return self.work[1:]

    @property
    def measured(self) -> MeasuredKernels:
        """The kernels with their time."""
        build = _product if len(self.work) == 3 else _mixture
        return MeasuredKernels(self.shape, build(self), self.seconds, self.distribution)


@dataclass
class PublishedTimes:
    """The usable measurements of some files, and how many rows were left out for each reason."""

    products: list[PublishedTime] = field(default_factory=list)
    mixtures: list[PublishedTime] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def cells(self) -> dict[tuple[str, str], tuple[list[PublishedTime], list[PublishedTime]]]:
        """Return (products, mixtures) by device and class."""
        out: dict[tuple[str, str], tuple[list[PublishedTime], list[PublishedTime]]] = {}
        for number, rows in enumerate((self.products, self.mixtures)):
            for row in rows:
                out.setdefault((row.device.name, row.kind), ([], []))[number].append(row)
        return out


def read_csv(path: Path | str, kind: str, times: PublishedTimes) -> None:
    """Add the rows of a CSV (`product` or `mixture`), which may be compressed with gzip."""
    with open_to_read(Path(path)) as file:
        raw = file.read(_MOST_BYTES)
    try:
        packed = raw[:2] == b"\x1f\x8b"
        text = (gzip.GzipFile(fileobj=io.BytesIO(raw)).read(_MOST_BYTES) if packed else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise FFNError(f"{shown(str(path))} is not a CSV in UTF-8: {error}") from None
    rows = csv.DictReader(io.StringIO(text))
    try:
        _add(rows, rows.fieldnames or (), kind, str(path), times)
    except csv.Error as error:
        raise FFNError(f"{shown(str(path))} is not a CSV: {error}") from None
    _finish(times)


def read_folder(folder: Path | str, times: PublishedTimes) -> None:
    """Add all `gemm_perf.parquet` and `moe_perf.parquet` below a folder. Raises FFNError without pyarrow (exit code 3),
    if there is no such file, and if a file lacks a column."""
    paths = [(kind, path) for kind, name in (("product", PRODUCTS), ("mixture", MIXTURES))
             for path in sorted(Path(folder).rglob(name))]  # fmt: skip
    if not paths:
        raise FFNError(f"{shown(str(folder))} has no {PRODUCTS} and no {MIXTURES}", "give the folder of a device")
    require_extra("pyarrow", "parquet")
    from pyarrow import parquet  # type: ignore[import-untyped]

    for kind, path in paths:
        try:
            table = parquet.read_table(path, partitioning=None)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors or OSErrors
            raise FFNError(f"{shown(str(path))} is not a parquet file: {str(error).splitlines()[0]}") from None
        _add(table.to_pylist(), table.column_names, kind, str(path), times)
    _finish(times)


def _add(rows: Iterable[Mapping[str, Any]], names: Sequence[str], kind: str, path: str, times: PublishedTimes) -> None:
    columns = {_RENAMED.get(name, name) for name in names}
    needed = {*_NUMBERS[kind], "dtype", "ms", "device"} | ({"distribution"} if kind == "mixture" else set())
    if missing := sorted(needed - columns):
        raise FFNError(f"{shown(path)}: a file of {kind}s needs the columns {', '.join(missing)}")
    for raw in rows:
        row = {_RENAMED.get(name, name): value for name, value in raw.items()}
        why = _unusable(row, kind)
        device = None if why else find(str(row["device"])) or _system(str(row["device"]))
        name = _CLASS.get(str(row["dtype"]), "")
        if not why and device is None:
            why = f"device {shown(str(row['device']))} is not in the table"
        elif not why and not name:
            why = f"dtype {shown(str(row['dtype']))} is not known"
        elif device is not None and chip_of(device, name) is None:
            why = f"{device.name} has no rate for {name}"
        if why or device is None:
            times.left_out[why] += 1
            continue
        timed = PublishedTime(
            device, name, tuple(int(row[column]) for column in _NUMBERS[kind]), str(row.get("distribution") or ""),
            float(row["ms"]) / 1e3, gated="nongated" not in str(row.get("kernel_source")),
        )  # fmt: skip
        (times.products if kind == "product" else times.mixtures).append(timed)


def _unusable(row: Mapping[str, Any], kind: str) -> str:
    """Return why a row cannot be used; "" if it can."""
    try:
        numbers = [int(row[name]) for name in _NUMBERS[kind]]
        seconds = float(row["ms"])
        split = any(int(row.get(name) or 1) > 1 for name in ("moe_tp_size", "moe_ep_size"))
    except (TypeError, ValueError, OverflowError):
        return "a number is missing or wrong"
    if not (all(0 < number < _LARGEST for number in numbers) and isfinite(seconds) and seconds > 0):
        return "a number is not positive, or too large"
    if kind == "mixture":
        if numbers[3] > numbers[4]:
            return "top_k is larger than the number of experts"
        if numbers[4] > _MOST_EXPERTS:
            return f"more than {_MOST_EXPERTS:,} experts"
        if _exponent(str(row["distribution"])) is None:
            return f"distribution {shown(str(row['distribution']))} is not known"
    return "split over devices" if split else ""


def _system(name: str) -> Device | None:
    try:
        return named(_SYSTEMS.get(name, name), "device") if name else None
    except FFNError:
        return None


def _finish(times: PublishedTimes) -> None:
    """Keep the shortest time of the same work, and find out which mixtures are not gated.

    The files do not always say it: a shape is not gated if it is that of a known model without gates, or if reading
    three matrices an expert would take more than the data sheet's bandwidth, in the median over devices and classes.
    """
    for name in ("products", "mixtures"):
        best: dict[tuple[object, ...], PublishedTime] = {}
        for row in getattr(times, name):
            key = (row.device.name, row.kind, row.work, row.distribution, row.gated)
            if key not in best or row.seconds < best[key].seconds:
                best[key] = row
        setattr(times, name, list(best.values()))
    used: dict[tuple[int, ...], dict[tuple[str, str], float]] = {}
    for row in times.mixtures:
        tokens, d_model, d_ff, top_k, experts = row.work
        if row.gated and row.distribution == "balanced" and tokens * top_k >= experts:
            size = 3 * d_model * d_ff * experts * storage(CLASSES[row.kind].weights).bytes
            best_of, cell = used.setdefault(row.shape, {}), (row.device.name, row.kind)
            best_of[cell] = max(best_of.get(cell, 0.0), size / row.seconds / row.device.bytes_per_s)
    plain = {shape for shape, shares in used.items() if median(shares.values()) > 1}
    plain |= _known_plain() if used else set()
    times.mixtures = [replace(row, gated=row.gated and row.shape not in plain) for row in times.mixtures]


@cache
def _known_plain() -> set[tuple[int, ...]]:
    """Return the shapes of mixtures without gates in the catalog: (width, d_ff, top_k, experts), the width that of the
    model or of the latent space of its experts."""
    models = (resolved.model for name in catalog.names() if (resolved := catalog.find(name)))
    groups = [group for model in models for group in model.groups]
    return {
        (width, spec.d_ff, spec.moe.top_k, spec.moe.experts)
        for spec in (group.spec for group in groups) if spec.moe and not spec.gated
        for width in (spec.d_model, spec.moe.latent) if width
    }  # fmt: skip


# --- fitting what the user measured -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOutRow:
    """How well measurements predict those that were held out: the errors of products, or mixtures, of one device and
    class, each shape predicted from other shapes. `low` and `high` are the ends of measured ÷ predicted."""

    device: str
    format: str
    work: str
    shapes: int
    rows: int
    median_error: float
    low: float
    high: float


@dataclass
class UserFits:
    """The constants of one device, fitted to these measurements when a class is first requested."""

    device: Device
    cells: Mapping[str, tuple[list[PublishedTime], list[PublishedTime]]]
    checks: list[HeldOutRow] = field(default_factory=list)
    times: dict[str, Fitted] = field(default_factory=dict)

    def of(self, name: str) -> Fitted | None:
        """Return the constants and intervals of a class; None if it was not measured."""
        if name in self.cells and name not in self.times:
            self.times[name] = self._fitted(name)
        return self.times.get(name)

    def _fitted(self, name: str) -> Fitted:
        known, chip, skew = fitted(self.device, name), chip_of(self.device, name), skew_exponent()
        assert chip is not None  # rows without a rate were left out
        products, mixtures = ([row.measured for row in _some(rows)] for rows in self.cells[name])
        constants, quantizes = known.constants, CLASSES[name].x_bytes < 2
        enough = len({row.shape for row in products}) >= _LEAST_SHAPES
        if enough:
            constants = fitted_constants(products, chip, quantizes=quantizes)
        constants = replace(constants, experts=experts_factor(mixtures, chip, constants, skew))
        both = [
            errors_of_products(products, chip, quantizes) if enough else [],
            errors_of_mixtures(mixtures, chip, constants, skew),
        ]
        widths = [ends_of(errors, chip, constants) if len(errors) >= LEAST else of_class
                  for errors, of_class in zip(both, (known.products, known.experts), strict=True)]  # fmt: skip
        for work, errors in zip(("products", "mixtures"), both, strict=True):
            if errors:
                sizes = [abs(exp(error) - 1) for _, error in errors]
                low, high = ends([-error for _, error in errors])
                shapes = len({row.shape for row, _ in errors})
                self.checks.append(
                    HeldOutRow(self.device.name, name, work, shapes, len(errors), median(sizes), low, high)
                )
        return Fitted(constants, widths[0], widths[1], self.device.name, len(products) + len(mixtures))


def user_fits(folder: Path | str) -> dict[str, UserFits]:
    """Read a folder; return the measurements of each device in it. Raises FFNError if none can be used."""
    times = PublishedTimes()
    read_folder(folder, times)
    cells: dict[str, dict[str, tuple[list[PublishedTime], list[PublishedTime]]]] = {}
    for (device, name), parts in times.cells.items():
        cells.setdefault(device, {})[name] = parts
    if not cells:
        why = next(iter(times.left_out), "the files have no rows")
        raise FFNError(f"{shown(str(folder))} has no usable times", f"such as: {why}")
    known = {row.device.name: row.device for row in (*times.products, *times.mixtures)}
    return {name: UserFits(known[name], user) for name, user in cells.items()}


def _some(rows: Sequence[PublishedTime]) -> Sequence[PublishedTime]:
    """Return all rows, or the rows of some shapes, drawn by a hash, if there are so many that a fit would take long."""
    parts = -(-len(rows) // _MOST_ROWS)
    return [row for row in rows if part_of(row.shape, parts) == 0] if parts > 1 else rows


# --- work -------------------------------------------------------------------------------------------------------------


def _product(row: PublishedTime) -> tuple[PlannedKernel, ...]:
    tokens, n, k = row.work
    weights = n * k * storage(CLASSES[row.kind].weights).bytes
    return (PlannedKernel(2.0 * tokens * n * k, weights, 0.0, k, n, Loads.of([(tokens, 1)])),)


def _mixture(row: PublishedTime) -> tuple[PlannedKernel, ...]:
    """Return the kernels of the experts, as in a plan."""
    tokens, d_model, d_ff, top_k, experts = row.work
    weights = storage(CLASSES[row.kind].weights)
    spec = FFNSpec(d_model, d_ff, "silu" if row.gated else "relu", gated=row.gated, bias=False, moe=MoE(experts, top_k))
    loads = Loads.of(Counter(_rows(row.distribution, tokens, top_k, experts)).items(), experts)
    times = launches(steps(spec), weights, activation_dtype(weights), tokens, loads.products)
    return tuple(
        PlannedKernel(
            one.work.matmul_flops, one.work.weight_bytes_read, one.work.moved(), one.k, one.n, loads if one.k else None,
            routed=True,
        )
        for one in times if one.routed
    )  # fmt: skip


def _exponent(distribution: str) -> float | None:
    """Return the exponent of a power law, 0 for `balanced` and `uniform`; None if it is another distribution."""
    kind, _, text = distribution.rpartition("_")
    if distribution in ("balanced", "uniform"):
        return 0.0
    try:
        exponent = float(text)
    except ValueError:
        return None
    return exponent if kind == "power_law" and 0 < exponent <= 20 and exponent != 1 else None


def _rows(distribution: str, tokens: int, top_k: int, experts: int) -> Iterator[int]:
    """Return the rows of every expert. Of a power law, these are the quantiles of a density x^-a between 1 and 0.8 of
    the tokens (0.01 and 2 if there are fewer choices than experts), scaled to sum to the choices, at most one a token.
    """
    choices, power = tokens * top_k, 1 - (_exponent(distribution) or 0.0)
    if power == 1:
        yield from (choices // experts + (n < choices % experts) for n in range(experts))
        return
    low, high = (1.0, max(0.8 * tokens, 1.001)) if choices > experts else (0.01, 2.0)
    ends = low**power, high**power
    drawn = [(ends[0] + (ends[1] - ends[0]) * (n + 0.5) / experts) ** (1 / power) for n in range(experts)]
    share, full = choices / sum(drawn), 0
    for _ in range(_MOST_TURNS):  # experts that every token chooses leave the others their rest
        now = sum(value * share >= tokens for value in drawn)
        rest = sum(sorted(drawn)[: experts - now])
        if now == full or not rest:
            break
        full, share = now, (choices - now * tokens) / rest
    exact = [min(value * share, float(tokens)) for value in drawn]
    rows = [floor(value) for value in exact]
    for n in sorted(range(experts), key=lambda n: rows[n] - exact[n])[: max(choices - sum(rows), 0)]:
        rows[n] += 1
    yield from rows
