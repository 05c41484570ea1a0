"""Accelerators of one type in a plan: what their times are computed from, memory size, and links."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated

from ffncli.errors import option
from ffncli.models.counting.parallel import ring_all_reduce_bytes
from ffncli.models.counting.speeds import FittedSpeeds, Speeds
from ffncli.models.counting.times.fitted import source
from ffncli.options.accept import ABOVE_ZERO, RANKS, SHARE
from ffncli.options.opt import Opt, Options
from ffncli.system.hardware import Device, Link, link_named, links, planning_defaults, protocols

CPU = "cpu"  # a device without a data sheet: its rates are measured
_assume = partial(Opt, group="Assumptions")
USABLE_MEMORY = 0.90  # vLLM's default for gpu_memory_utilization was 0.90 for years; the runtime uses the other 10 %


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
            help="Share of the peak that matrix products reach. [default: fitted]",
        ),
    ] = None  # fmt: skip
    memory_efficiency: Annotated[
        float | None,
        _assume(
            "--memory-efficiency", metavar="X", accepts=SHARE,
            help="Share of the memory bandwidth that kernels reach. [default: fitted]",
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
    nodes: Annotated[
        int | None,
        _assume(
            "--nodes", metavar="N", accepts=RANKS,
            help="Nodes over which the devices of every split are spread evenly; instead of --per-node.",
        ),
    ] = None  # fmt: skip
    price: Annotated[
        float | None,
        _assume(
            "--price", metavar="X", accepts=ABOVE_ZERO, daily=True,
            help="Dollars per hour and device: adds the cost of the FFNs per million tokens.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """The assumptions behind a plan for one device: the usable shares of links and memory; links are given by name.

    `gemm_efficiency` and `memory_efficiency` are None unless the user set them: the shares of peak and bandwidth are
    fitted or measured. `source` cites the defaults; `changed` lists the values that the user set.
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
    """Combine the given assumptions with the device's defaults; `measured`: its times are the user's."""
    defaults = planning_defaults()
    known = {link.name: link for link in links()}
    link = known.get(device.link) if given.link is None else link_named(given.link, option("link"))
    network = known.get(device.network) if given.network is None else link_named(given.network, option("network"))
    return Assumed(
        device=device.name,
        gemm_efficiency=None if measured else given.gemm_efficiency,
        memory_efficiency=None if measured else given.memory_efficiency,
        link_efficiency=defaults.link_efficiency if given.link_efficiency is None else given.link_efficiency,
        usable_memory=USABLE_MEMORY if given.usable_memory is None else given.usable_memory,
        link=link.name if link else None,
        link_gbytes_per_s=link.gbytes_per_s if link else None,
        network=network.name if network else None,
        network_gbytes_per_s=network.gbytes_per_s if network else None,
        per_node=given.per_node or device.per_node,
        source=defaults.source if measured else f"times: {source()}; {defaults.source}",
        changed=tuple(one.name for one in fields(Assumptions) if getattr(given, one.name) is not None),
    )


def cluster_of(device: Device, given: Assumed, measured: Speeds | None = None) -> Accelerators:
    """Build the device's cluster under these assumptions, with measured rates if given."""
    known = {link.name: link for link in links()}
    memory = device.memory_bytes
    return Accelerators(
        device=device.name,
        speeds=measured or FittedSpeeds(device, given.gemm_efficiency, given.memory_efficiency),
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

    def used_bytes_per_s(self, ranks: int) -> float | None:
        """Return the B/s at which each of `ranks` adjacent devices of a node sends; fewer wires of a mesh join few."""
        here = min(ranks, self.per_node)
        return self.efficiency * self.link.bytes_per_s(here) if self.link and here > 1 else None

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

    def ranks_here(self, ranks: int, apart: int = 1) -> int:
        """Return how many of the ranks, which are `apart` devices apart, share a node."""
        return min(ranks, max(1, self.per_node // apart))

    def all_to_all_s(self, size: float, ranks: int, apart: int = 1, crossing: float = 1.0) -> float | None:
        """Return the seconds until each rank has sent `size` bytes in equal parts to all ranks, including itself.

        Neighbouring ranks are `apart` devices apart and all send simultaneously. Link and network work in parallel, so
        only the step latency of the slower of the two is added. Of what goes to other nodes, the part `crossing` is
        sent over the network, and copied there.
        """
        if ranks == 1 or not size:
            return 0.0
        here = self.ranks_here(ranks, apart)
        times, used = [], []
        for link, others, part in ((self.link, here - 1, 1.0), (self.network, ranks - here, crossing)):
            if others:
                if link is None:
                    return None
                times.append(part * others / ranks * size / link.bytes_per_s(here))
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
