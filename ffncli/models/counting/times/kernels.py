"""The time of a block's kernels on an accelerator, from its data sheet and eight fitted constants.

A kernel computes one matrix product (several, if they read the same tensor), the same product for each of several
experts, or elementwise steps. For rows [rows, k] times weights [k, n] it takes

    launch + quantizing x + (compute^p + memory^p)^(1/p)

where compute is the FLOPs at a share of the peak, for whole tiles of 128 rows (a shorter tile costs at least
`short_rows`) and partly for whole waves of tiles over the device's units, and memory is the bytes at a share of the
bandwidth. Experts add their tiles: an expert's last tile is not full, and one with few rows still reads its weights.
The constants are fitted to measured times (`fit.py`), stored in `system/times.toml`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.models.counting.traffic import rate_format
from ffncli.system.hardware import Device

TILE = 128  # rows and columns of the tiles in which a product is computed
K_RAMP = 30.0  # a product over k takes (1 + K_RAMP / k) times as long as its share of a longer one
Part = Literal["compute", "memory", "launch"]


@dataclass(frozen=True)
class Computed:
    """How a class of formats is computed: at the rate of which format, with how many bytes a value of x, and a format
    of the weights with the class's size."""

    rate: str
    x_bytes: float
    weights: str


# A weight-only format is unpacked to bf16. MXFP4 weights are multiplied by x in MXFP8, or unpacked.
CLASSES = {
    "bf16": Computed("bf16", 2, "bf16"),
    "fp8": Computed("fp8", 1, "fp8"),
    "fp8_block": Computed("fp8", 1, "fp8"),
    "fp8_static": Computed("fp8", 1, "fp8"),
    "nvfp4": Computed("fp4", 0.5625, "nvfp4"),
    "int8": Computed("int8", 1, "int8"),
    "int8_weights": Computed("bf16", 2, "int8"),
    "int4_weights": Computed("bf16", 2, "int4"),
    "mxfp4_weights": Computed("bf16", 2, "mxfp4"),
    "mxfp4_mxfp8": Computed("fp8", 33 / 32, "mxfp4"),
}
_OF_FORMAT = {"mxfp8": "fp8_block", "fp8_e5m2": "fp8", "mxfp4": "mxfp4_mxfp8"}


@dataclass(frozen=True)
class TimeConstants:
    """What is fitted for a device and a class of formats.

    `peak` and `bandwidth` are shares of the data sheet's figures; `launch_us` is the time from one kernel to the next;
    `wave` is the part of a last, incomplete wave of tiles that is lost; `short_rows` are the rows that a tile costs at
    least; with `overlap` 1 compute and memory time add up, with a large one only the longer counts; `quantize` is the
    traffic of quantizing x, in bytes a value; `experts` is the time of experts' products over that of the same work as
    one product.
    """

    peak: float
    bandwidth: float
    launch_us: float
    wave: float
    short_rows: float
    overlap: float
    quantize: float = 0.0
    experts: float = 1.0


@dataclass(frozen=True)
class Chip:
    """An accelerator's figures in one format: FLOP/s, B/s, units that compute tiles (0: unknown), bytes of x."""

    flops_per_s: float
    bytes_per_s: float
    units: int
    x_bytes: float


@dataclass(frozen=True)
class Loads:
    """The rows of the products that a kernel computes: one product, or one for each expert that has rows.

    `rows` and `products` are their numbers; `padded` are the rows of products of more than a tile, rounded up to tiles;
    `short_rows` those of the `short` other products. `spread` is the mean square of a product's rows over the square of
    its mean: 1 if all have as many.
    """

    rows: float
    products: float
    padded: float
    short_rows: float
    short: float
    tiles: float
    spread: float

    @classmethod
    def of(cls, loads: Iterable[tuple[float, float]], experts: float | None = None) -> "Loads":
        """Sum up (rows, number of products with so many rows); `experts` counts those without rows too."""
        pairs = [(rows, number) for rows, number in loads if rows > 0 and number > 0]
        total, number = sum(r * n for r, n in pairs), sum(n for _, n in pairs)
        long = [(ceil(rows / TILE - 1e-9), n) for rows, n in pairs if rows > TILE]
        short = [(rows, n) for rows, n in pairs if rows <= TILE]
        return cls(
            rows=total,
            products=number,
            padded=TILE * sum(tiles * n for tiles, n in long),
            short_rows=sum(rows * n for rows, n in short),
            short=sum(n for _, n in short),
            tiles=sum(tiles * n for tiles, n in long) + sum(n for _, n in short),
            spread=sum(r * r * n for r, n in pairs) * (experts or number) / total**2 if total else 1.0,
        )


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel's work: its bytes of weights and, for a product, k, n and its rows; for elementwise steps, its bytes.

    `routed` marks experts that tokens are routed to, `shared` the shared experts.
    """

    flops: float
    weight_bytes: float
    moved_bytes: float
    k: int = 0
    n: int = 0
    loads: Loads | None = None
    routed: bool = False
    shared: bool = False


@dataclass(frozen=True)
class KernelTime:
    """The parts of a kernel's time in seconds, and its 80 % interval."""

    compute_s: float
    memory_s: float
    launch_s: float = 0.0
    quantize_s: float = 0.0
    overlap: float = inf
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0

    @property
    def seconds(self) -> float:
        """The expected time."""
        low, high = sorted((self.compute_s, self.memory_s))
        both = (
            high if self.overlap == inf or not high else high * (1 + (low / high) ** self.overlap) ** (1 / self.overlap)
        )
        return self.factor * both + self.launch_s + self.quantize_s

    @property
    def bound(self) -> Part:
        """The longest part; quantizing x is memory traffic."""
        memory = self.memory_s * self.factor + self.quantize_s
        parts: dict[Part, float] = {"compute": self.compute_s * self.factor, "memory": memory, "launch": self.launch_s}
        return max(parts, key=lambda name: parts[name])


def kernel_time(kernel: PlannedKernel, chip: Chip, fitted: TimeConstants, skew: float = 0.0) -> KernelTime:
    """Return the time of a kernel; `skew` is the exponent with which the spread of experts' rows costs compute time."""
    launch, bandwidth = fitted.launch_us * 1e-6, chip.bytes_per_s * fitted.bandwidth
    loads, factor = kernel.loads, fitted.experts if kernel.routed else 1.0
    if loads is None:
        return KernelTime(0.0, kernel.moved_bytes / bandwidth, launch)
    tiles = loads.tiles * ceil(kernel.n / TILE) / chip.units if chip.units else 1.0
    waves = 1 + fitted.wave * (ceil(tiles - 1e-9) / tiles - 1) if tiles else 1.0
    rows = loads.padded + max(loads.short_rows, fitted.short_rows * loads.short)
    work = 2 * rows * kernel.k * kernel.n * (1 + K_RAMP / kernel.k) * waves * loads.spread**skew
    moved = kernel.weight_bytes + loads.rows * (kernel.k * chip.x_bytes + 2 * kernel.n)
    return KernelTime(
        compute_s=work / (chip.flops_per_s * fitted.peak),
        memory_s=moved / bandwidth,
        launch_s=launch,
        quantize_s=loads.rows * kernel.k * fitted.quantize / chip.bytes_per_s,
        overlap=fitted.overlap,
        factor=factor,
    )


def class_of(device: Device, weights: DType) -> str:
    """Return the class of formats in which this device computes with these weights."""
    rate, (name, _, kind) = rate_format(device, weights), weights.name.partition("-")
    if weights.computable:
        return "bf16"
    if rate == activation_dtype(weights).name:  # weights only: they are unpacked to the activations' format
        return "int8_weights" if weights.bytes > 0.8 else "mxfp4_weights" if name == "mxfp4" else "int4_weights"
    return "fp8_block" if name == "fp8" and kind.startswith("block") else _OF_FORMAT.get(name, name)


def computed_in(device: Device, weights: DType) -> str | None:
    """Return the format whose rate applies to these weights on this device; None if no rate is known."""
    known = rate_format(device, weights)
    return known if known is None or weights.computable else CLASSES[class_of(device, weights)].rate


def chip_of(device: Device, name: str, rate: str | None = None) -> Chip | None:
    """Return the device's figures for a class, at the class's rate or that of the format `rate`; None if unknown."""
    computed = CLASSES[name]
    flops = device.flops_per_s(rate or computed.rate)
    return None if flops is None else Chip(flops, device.bytes_per_s, device.units, computed.x_bytes)
