"""Accelerators of one kind as a plan sees them: how fast they compute and read, what they hold, what connects them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Protocol

from ffncli.block.dtypes import DType
from ffncli.block.traffic import Traffic
from ffncli.errors import option
from ffncli.models.counting.device_floor import rate_format
from ffncli.models.counting.wires import Wires
from ffncli.options.accept import RANKS, SHARE
from ffncli.options.opt import Opt, Options
from ffncli.system.hardware import Device, link_named, links, planning_defaults

CPU = "cpu"  # a device without a data sheet: what is known of it was measured
_assume = partial(Opt, group="Assumptions")
USABLE_MEMORY = 0.90  # vLLM's gpu_memory_utilization was 0.90 by default for years; the rest is the runtime's


@dataclass(frozen=True)
class Rates:
    """What some work may expect: FLOP/s in `format`, and B/s of memory."""

    format: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which arithmetic and memory take the same time."""
        return self.flops_per_s / self.bytes_per_s


class Speeds(Protocol):
    """Where rates come from: a data sheet and what is usually reached of it, or a measurement."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats in which a rate is known."""

    def rates(self, weights: DType, work: Traffic, mixture: bool = False) -> Rates | None:
        """The rates of one block's products with these weights, of experts in a mixture; None where none is known."""


@dataclass(frozen=True)
class SheetSpeeds:
    """Shares of the rates on a data sheet."""

    device: Device
    gemm_efficiency: float
    memory_efficiency: float

    @property
    def formats(self) -> tuple[str, ...]:
        """Those of the data sheet."""
        return tuple(self.device.tflops)

    def rates(self, weights: DType, work: Traffic, mixture: bool = False) -> Rates | None:
        """The same shares for any work."""
        name = rate_format(self.device, weights)
        peak = self.device.flops_per_s(name or "")
        if name is None or peak is None:
            return None
        return Rates(name, peak * self.gemm_efficiency, self.device.bytes_per_s * self.memory_efficiency)


@dataclass(frozen=True)
class Accelerators:
    """As many of one kind as are needed. `memory_bytes` is what the weights of one may take."""

    device: str
    speeds: Speeds
    memory_bytes: int | None
    wires: Wires


@dataclass(frozen=True, kw_only=True)
class Assumptions(Options):
    """What a plan takes for granted in place of a device's defaults; None: the default. Links by name."""

    gemm_efficiency: Annotated[
        float | None,
        _assume(
            "--gemm-efficiency", metavar="X", accepts=SHARE,
            help="Share of the peak that products reach. [default: 0.80, or the device's own]",
        ),
    ] = None  # fmt: skip
    memory_efficiency: Annotated[
        float | None,
        _assume(
            "--memory-efficiency", metavar="X", accepts=SHARE,
            help="Share of the memory bandwidth that is reached. [default: 0.90]",
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
            help="Link inside a node, as in nvlink4 or pcie5. [default: the device's]",
        ),
    ] = None  # fmt: skip
    network: Annotated[
        str | None,
        _assume(
            "--network", metavar="NAME", completes="links",
            help="Network between nodes, a port for each device, as in ndr. [default: by device]",
        ),
    ] = None  # fmt: skip
    per_node: Annotated[
        int | None,
        _assume(
            "--per-node", metavar="N", accepts=RANKS,
            help="Devices that the link joins. [default: 8, or the device's own]",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """What a plan took for granted of one device. Shares of peak, bandwidth, link and memory; links by name.

    The first two are None where measured rates are in their place.
    `source` is that of the defaults; `changed` names the values that were given.
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
    """The device's defaults with what was given in their place. Raises FFNError for an unknown link."""
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
    """The device's cluster under these assumptions, at measured speeds if they are given."""
    known = {link.name: link for link in links()}
    largest = max(device.memory_gb, default=None)
    return Accelerators(
        device=device.name,
        speeds=measured or SheetSpeeds(device, given.gemm_efficiency or 1.0, given.memory_efficiency or 1.0),
        memory_bytes=None if largest is None else round(largest * 1e9 * given.usable_memory),
        wires=Wires(
            known.get(given.link or ""),
            known.get(given.network or ""),
            given.per_node,
            given.link_efficiency,
        ),
    )
