"""The fitted constants of a device and a class of formats, from `system/times.toml`, and how far predictions with them
are from measured times of shapes that were not fitted."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from ffncli.block.dtypes import storage
from ffncli.models.counting.times.kernels import CLASSES, Chip, TimeConstants, chip_of
from ffncli.system.hardware import Device, fitted_rows, planning_defaults

Ends = tuple[float, float]
BOUNDS = ("memory", "compute")
_SHORT = 0.3  # of the rows at which arithmetic takes as long as reading weights; 0.28 to 0.41 are fitted


@dataclass(frozen=True)
class Fitted:
    """Constants, and the ends of the 80 % interval of measured ÷ predicted by what bounds a kernel, for products and
    for experts. `of` is the device whose times were fitted, "" for the median of all devices; `rows` counts them."""

    constants: TimeConstants
    products: Mapping[str, Ends]
    experts: Mapping[str, Ends]
    of: str
    rows: int

    def ends(self, routed: bool, bound: str) -> Ends:
        """Return the ends for a kernel; starting one is memory traffic's neighbour: few rows."""
        return (self.experts if routed else self.products)["compute" if bound == "compute" else "memory"]


def fitted(device: Device, name: str) -> Fitted:
    """Return the constants of a device and a class.

    A device without times in this class takes those of the same architecture, else the medians of the class, with the
    share of the peak in proportion to the device's planning default, and few rows in short tiles if arithmetic would
    take long; the interval is that of leaving a device out.
    """
    known, general = _of(device.name, name)
    if known is not None:
        return known if known.of == device.name else replace(known, products=general.products, experts=general.experts)
    chip, one = chip_of(device, name) or chip_of(device, name, "fp16"), general.constants
    peak = one.peak * device.gemm_efficiency / planning_defaults().gemm_efficiency
    one = replace(one, peak=min(peak, 1.2))
    size = storage(CLASSES[name].weights).bytes
    return replace(general, constants=one if chip is None else with_short_rows(one, chip, size))


def with_short_rows(one: TimeConstants, chip: Chip, weight_bytes: float) -> TimeConstants:
    """Lower `short_rows` for a chip or format of which it was not measured, if so many rows would take longer than
    reading the weights: few rows are not computed in tiles then."""
    ridge = chip.flops_per_s / chip.bytes_per_s * weight_bytes / 2  # in rows
    return replace(one, short_rows=max(1.0, min(one.short_rows, _SHORT * ridge)))


@cache
def _of(device: str, name: str) -> tuple[Fitted | None, Fitted]:
    """Return what is stored for a device, or for one of its architecture, and for the class."""
    head, rows = fitted_rows()
    row = tomllib.loads(rows[device]) if device in rows else {}
    return _fitted(row[name], row["device"]) if name in row else None, _fitted(head["classes"][name], "")


def skew_exponent() -> float:
    """Return the exponent with which the spread of experts' rows costs compute time."""
    return float(fitted_rows()[0]["skew"])


def link_ends() -> Ends:
    """Return the ends of the 80 % interval of collectives: measured ÷ predicted."""
    low, high = fitted_rows()[0]["links"]
    return low, high


def source() -> str:
    """Return where the constants come from."""
    return str(fitted_rows()[0]["source"])


def _fitted(row: Mapping[str, Any], of: str) -> Fitted:
    names = [field.name for field in fields(TimeConstants)]
    constants = TimeConstants(**dict(zip(names, row["constants"], strict=True)))
    return Fitted(constants, _ends(row["products"]), _ends(row["experts"]), of, row["rows"])


def _ends(numbers: Sequence[float]) -> Mapping[str, Ends]:
    return {bound: (numbers[2 * n], numbers[2 * n + 1]) for n, bound in enumerate(BOUNDS)}
