"""Accelerators of one type in a plan: their compute and memory rates, memory size, and links."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from math import log2
from typing import Annotated, Protocol

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.traffic import Traffic, launches, time_floor
from ffncli.errors import option
from ffncli.models.counting.parallel import ring_all_reduce_bytes
from ffncli.models.counting.traffic import rate_format
from ffncli.options.accept import RANKS, SHARE
from ffncli.options.opt import Opt, Options
from ffncli.system.hardware import Device, Link, link_named, links, planning_defaults, protocols

CPU = "cpu"  # a device without a data sheet: its rates are measured
_assume = partial(Opt, group="Assumptions")
USABLE_MEMORY = 0.90  # vLLM's default for gpu_memory_utilization was 0.90 for years; the runtime uses the other 10 %


@dataclass(frozen=True)
class Rates:
    """The rates expected for some work: FLOP/s in `format`, and B/s of memory."""

    format: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """Return the FLOPs per byte at which arithmetic takes as long as memory traffic."""
        return self.flops_per_s / self.bytes_per_s


class Speeds(Protocol):
    """A source of rates: a data sheet with typical efficiencies, or measurements."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the formats whose rates are known."""

    def rates(self, weights: DType, work: Traffic, mixture: bool = False) -> Rates | None:
        """Return the rates for the matmuls of a block (or of a `mixture`) with these weights; None if unknown."""


@dataclass(frozen=True)
class SheetSpeeds:
    """Rates from a data sheet, scaled by efficiencies."""

    device: Device
    gemm_efficiency: float
    memory_efficiency: float

    @property
    def formats(self) -> tuple[str, ...]:
        """List the formats on the data sheet."""
        return tuple(self.device.tflops)

    def rates(self, weights: DType, work: Traffic, mixture: bool = False) -> Rates | None:
        """Return the same rates for any work."""
        name = rate_format(self.device, weights)
        peak = self.device.flops_per_s(name or "")
        if name is None or peak is None:
            return None
        return Rates(name, peak * self.gemm_efficiency, self.device.bytes_per_s * self.memory_efficiency)


@dataclass(frozen=True)
class Accelerators:
    """Accelerators of one type, in any number. `memory_bytes` is the space for weights on one accelerator."""

    device: str
    speeds: Speeds
    memory_bytes: int | None
    wires: "Wires"


@dataclass(frozen=True, kw_only=True)
class Assumptions(Options):
    """Assumptions that replace a device's defaults; None keeps the default. Links are given by name."""

    gemm_efficiency: Annotated[
        float | None,
        _assume(
            "--gemm-efficiency", metavar="X", accepts=SHARE,
            help="Share of the peak that matrix products reach. [default: 0.80, or the device's own]",
        ),
    ] = None  # fmt: skip
    memory_efficiency: Annotated[
        float | None,
        _assume(
            "--memory-efficiency", metavar="X", accepts=SHARE,
            help="Share of the memory bandwidth that kernels reach. [default: 0.90]",
        ),
    ] = None  # fmt: skip
    link_efficiency: Annotated[
        float | None,
        _assume(
            "--link-efficiency", metavar="X", accepts=SHARE,
            help="Share of a link's bandwidth that a collective reaches. [default: 0.80]",
        ),
    ] = None  # fmt: skip
    usable_memory: Annotated[
        float | None,
        _assume(
            "--usable-memory", metavar="X", accepts=SHARE,
            help="Share of the memory that weights and activations may take. [default: 0.90]",
        ),
    ] = None  # fmt: skip
    link: Annotated[
        str | None,
        _assume(
            "--link", metavar="NAME", completes="links",
            help="Link within a node, such as nvlink4 or pcie5. [default: the device's]",
        ),
    ] = None  # fmt: skip
    network: Annotated[
        str | None,
        _assume(
            "--network", metavar="NAME", completes="links",
            help="Network between nodes, one port per device, such as ndr. [default: by device]",
        ),
    ] = None  # fmt: skip
    per_node: Annotated[
        int | None,
        _assume(
            "--per-node", metavar="N", accepts=RANKS,
            help="Devices per node. [default: 8, or the device's own]",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """The assumptions behind a plan for one device: the usable shares of peak, bandwidth, links and memory; links are
    given by name.

    With measured rates, `gemm_efficiency` and `memory_efficiency` are None. `source` cites the defaults; `changed`
    lists the values that the user set.
    """

    device: str
    gemm_efficiency: float | None
    memory_efficiency: float | None
    link_efficiency: float
    usable_memory: float
    link: str | None
    link_gbytes_per_s: float | None
    network: str | None
    network_gbytes_per_s: float | None
    per_node: int
    source: str
    changed: tuple[str, ...]


def assumed(device: Device, given: Assumptions, measured: bool = False) -> Assumed:
    """Combine the given assumptions with the device's defaults."""
    gemm = device.gemm_efficiency if given.gemm_efficiency is None else given.gemm_efficiency
    memory = device.memory_efficiency if given.memory_efficiency is None else given.memory_efficiency
    defaults = planning_defaults()
    known = {link.name: link for link in links()}
    link = known.get(device.link) if given.link is None else link_named(given.link, option("link"))
    network = known.get(device.network) if given.network is None else link_named(given.network, option("network"))
    return Assumed(
        device=device.name,
        gemm_efficiency=None if measured else gemm,
        memory_efficiency=None if measured else memory,
        link_efficiency=defaults.link_efficiency if given.link_efficiency is None else given.link_efficiency,
        usable_memory=USABLE_MEMORY if given.usable_memory is None else given.usable_memory,
        link=link.name if link else None,
        link_gbytes_per_s=link.gbytes_per_s if link else None,
        network=network.name if network else None,
        network_gbytes_per_s=network.gbytes_per_s if network else None,
        per_node=given.per_node or device.per_node,
        source=defaults.source,
        changed=tuple(one.name for one in fields(Assumptions) if getattr(given, one.name) is not None),
    )


def cluster_of(device: Device, given: Assumed, measured: Speeds | None = None) -> Accelerators:
    """Build the device's cluster under these assumptions, with measured rates if given."""
    known = {link.name: link for link in links()}
    memory = device.memory_bytes
    return Accelerators(
        device=device.name,
        speeds=measured or SheetSpeeds(device, given.gemm_efficiency or 1.0, given.memory_efficiency or 1.0),
        memory_bytes=None if memory is None else round(memory * given.usable_memory),
        wires=Wires(known.get(given.link or ""), known.get(given.network or ""), given.per_node, given.link_efficiency),
    )


@dataclass(frozen=True)
class Wires:
    """The links of a cluster: `link` joins the `per_node` accelerators of a node; `network` joins the nodes, with one
    port per accelerator.

    `efficiency` is the share of the bandwidth that large collectives reach.
    """

    link: Link | None
    network: Link | None
    per_node: int
    efficiency: float

    def nodes(self, devices: int) -> int:
        """Return the number of nodes needed for `devices` accelerators."""
        return -(-devices // self.per_node)

    def names(self, devices: int) -> tuple[str, ...] | None:
        """Return the names of the links that `devices` ranks use; None if one of the links is unknown."""
        used = ([self.link] if self.per_node > 1 and devices > 1 else []) + (
            [self.network] if self.nodes(devices) > 1 else []
        )
        known = [link.name for link in used if link is not None]
        return tuple(known) if len(known) == len(used) else None

    def all_reduce_s(self, size: float, ranks: int) -> float | None:
        """Return the seconds needed to sum `size` bytes over adjacent ranks; None if no link is known.

        A ring takes 2 (n - 1) steps; in each step, every rank passes on one n-th part (Patarasuk and Yuan 2009).
        """
        if ranks == 1 or not size:
            return 0.0
        here, nodes = min(ranks, self.per_node), self.nodes(ranks)
        # traffic between nodes uses the network ports of all ranks in a node, so the ring runs at the rate of the link
        # or at the combined rate of these ports, whichever is lower
        crossing = 0 if nodes == 1 else min(2 * nodes, 2 * (ranks - 1))
        used = [
            (link, steps, ports)
            for link, steps, ports in ((self.link, 2 * (ranks - 1) - crossing, 1), (self.network, crossing, here))
            if steps
        ]
        sent = ring_all_reduce_bytes(1, ranks) * size
        rates = [ports * link.bytes_per_s(here) for link, _, ports in used if link is not None]
        return self._fastest([(link, steps) for link, steps, _ in used], sent / min(rates)) if rates else None

    def all_to_all_s(self, size: float, ranks: int, apart: int = 1) -> float | None:
        """Return the seconds until each rank has sent `size` bytes in equal parts to all ranks, including itself.

        Neighbouring ranks are `apart` devices apart and all send simultaneously. Link and network work in parallel, so
        only the step latency of the slower of the two is added.
        """
        if ranks == 1 or not size:
            return 0.0
        here = min(ranks, max(1, self.per_node // apart))
        times, used = [], []
        for link, others in ((self.link, here - 1), (self.network, ranks - here)):
            if others:
                if link is None:
                    return None
                times.append(others / ranks * size / link.bytes_per_s(here))
                used.append((link, 1))
        return self._fastest(used[-1:], max(times))

    def _fastest(self, steps: Sequence[tuple[Link | None, int]], bytes_s: float) -> float | None:
        """Return the seconds with the fastest protocol; `bytes_s` is the transfer time at full bandwidth.

        NCCL's protocols trade latency for bandwidth, and NCCL chooses between them with the same model
        (src/graph/tuning.cc).
        """
        times = []
        for protocol in protocols():
            waits = [protocol.step_us.get(link.kind) if link else None for link, _ in steps]
            if None not in waits:
                us = protocol.collective_us + sum(n * us for us, (_, n) in zip(waits, steps, strict=True) if us)
                times.append(us * 1e-6 + bytes_s / (self.efficiency * protocol.bandwidth))
        return min(times, default=None)


NO_WIRES = Wires(None, None, per_node=1, efficiency=1.0)
_CLOSE = 0.5  # in octaves: limits the extra weight of blocks with nearly equal sizes


@dataclass(frozen=True)
class MeasuredBlock:
    """One measurement: a forward pass of a block with its fastest kernel."""

    label: str
    spec: FFNSpec
    weights: DType
    tokens: int
    kernel: str
    time_s: float

    @cached_property
    def kernels(self) -> tuple[Traffic, ...]:
        """Return the work of each of its kernels, counted as in a plan."""
        kind = self.weights
        return tuple(one.work for one in launches(steps(self.spec), kind, activation_dtype(kind), self.tokens))

    @property
    def work(self) -> Traffic:
        """Return the total work of its kernels."""
        return sum(self.kernels, Traffic())


@dataclass(frozen=True)
class ShareAt:
    """A measurement in octaves (base-2 logarithms): FLOPs per weight byte, weight bytes, and share of the roofline."""

    reuse: float
    size: float
    share: float


@dataclass(frozen=True)
class MeasuredSpeeds:
    """The rates of one device, derived from measurements as shares of a roofline; the roofline's peaks are the highest
    measured rates of arithmetic and traffic.

    Mixtures are compared only with measured mixtures, since experts run one after another; dense blocks are compared
    only with dense blocks.
    """

    blocks: tuple[MeasuredBlock, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """List the measured formats."""
        return tuple(dict.fromkeys(block.weights.name for block in self.blocks))

    def rates(self, weights: DType, work: Traffic, mixture: bool = False) -> Rates | None:
        """Return the roofline's rates times the share that the most similar blocks reached in this format."""
        fitting = [block for block in self.blocks if block.weights == weights]
        if not fitting:
            return None
        flops, moved = _roofs(fitting)
        alike = [block for block in fitting if (block.spec.moe is not None) == mixture] or fitting
        curves = [
            sorted((_point(one, flops, moved) for one in alike if one.label == label), key=lambda point: point.reuse)
            for label in dict.fromkeys(block.label for block in alike)
        ]
        share = _expected(curves, *_place(work))
        return Rates(weights.name, flops * share, moved * share)

    def without(self, left_out: MeasuredBlock) -> "MeasuredSpeeds":
        """Return the measurements of all other blocks, which predict the time of the block `left_out`."""
        return MeasuredSpeeds(tuple(block for block in self.blocks if block.label != left_out.label))


@dataclass(frozen=True)
class PredictedRow:
    """A measured block, and its time as predicted from the other blocks (None if there are no other blocks)."""

    device: str
    block: str
    dtype: str
    tokens: int
    kernel: str
    measured_s: float
    predicted_s: float | None
    error: float | None


def predictions(speeds: Mapping[str, MeasuredSpeeds]) -> Iterator[PredictedRow]:
    """Predict the time of every measured block from the times of the blocks with other dimensions."""
    for device, one in speeds.items():
        for block in one.blocks:
            predicted = predicted_s(one.without(block), block)
            error = None if predicted is None else predicted / block.time_s - 1
            yield PredictedRow(
                device, block.label, block.weights.name, block.tokens, block.kernel, block.time_s, predicted, error
            )


def predicted_s(speeds: MeasuredSpeeds, block: MeasuredBlock) -> float | None:
    """Predict the block's time at these rates; None if its format was not measured."""
    rates = speeds.rates(block.weights, block.work, block.spec.moe is not None)
    if rates is None:
        return None
    return _floor_s(block.kernels, rates.flops_per_s, rates.bytes_per_s)


def _floor_s(kernels: Iterable[Traffic], flops_per_s: float, bytes_per_s: float) -> float:
    return sum(time_floor(one.matmul_flops, one.moved(), flops_per_s, bytes_per_s).seconds for one in kernels)


def _roofs(blocks: Sequence[MeasuredBlock]) -> tuple[float, float]:
    """Return the maximum FLOP/s and the maximum B/s that the blocks reached."""
    return (
        max(block.work.matmul_flops / block.time_s for block in blocks),
        max(block.work.moved() / block.time_s for block in blocks),
    )


def _point(block: MeasuredBlock, flops_per_s: float, bytes_per_s: float) -> ShareAt:
    share = _floor_s(block.kernels, flops_per_s, bytes_per_s) / block.time_s
    return ShareAt(*_place(block.work), log2(share))


def _place(work: Traffic) -> tuple[float, float]:
    return log2(work.matmul_flops / work.weight_bytes_read), log2(work.weight_bytes_read)


def _expected(curves: Sequence[Sequence[ShareAt]], reuse: float, size: float) -> float:
    """Return the expected share of the roofline at this `reuse` (FLOPs per byte of weights): the mean over curves, in
    which similar weight sizes count more, since a cache's effect depends on size."""
    points = [_between(curve, reuse) for curve in curves]
    near = [1 / ((point.size - size) ** 2 + _CLOSE**2) for point in points]
    mean = sum(weight * point.share for weight, point in zip(near, points, strict=True)) / sum(near)
    return float(2**mean)  # shares are ratios, so their logarithms are averaged


def _between(curve: Sequence[ShareAt], reuse: float) -> ShareAt:
    """Interpolate a curve at this reuse, linearly in octaves; beyond its ends, return the end point."""
    after = next((n for n, point in enumerate(curve) if point.reuse >= reuse), len(curve))
    low, high = curve[max(after - 1, 0)], curve[min(after, len(curve) - 1)]
    part = (reuse - low.reuse) / (high.reuse - low.reuse) if high.reuse > low.reuse else 0.0
    return ShareAt(reuse, low.size + part * (high.size - low.size), low.share + part * (high.share - low.share))
