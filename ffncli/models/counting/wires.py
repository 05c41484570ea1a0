"""What connects accelerators, and how long a collective takes over it.

An all-reduce runs around a ring: 2 (n - 1) steps, each rank passing on one n-th part in each (Patarasuk and Yuan 2009),
so that it takes 2 (n - 1) / n × bytes / bandwidth, plus what the steps and the call cost besides their bytes: the least
of NCCL's protocols, of which some wait less and others send more (`hardware.protocols`), as NCCL chooses by the same
model (src/graph/tuning.cc). A ring over several nodes crosses from node to node at as many places
as it has ranks in a node (each uses its own network port), so that it runs at the slower of the link and those ports
together. In an all-to-all every rank sends to all others at the same time. Of a link without a switch, ranks use the
wires among them: of two, one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.dataclass import dataclass
from ffncli.models.counting.tensor_parallel import ring_all_reduce_bytes
from ffncli.system.hardware import Link, protocols


@dataclass(frozen=True)
class Wires:
    """`link` joins the `per_node` accelerators of a node, `network` the nodes, a port for each accelerator; None: none.

    `efficiency` is the share of their bandwidth that a collective of many bytes reaches.
    """

    link: Link | None
    network: Link | None
    per_node: int
    efficiency: float

    def nodes(self, devices: int) -> int:
        """How many nodes that many accelerators fill."""
        return -(-devices // self.per_node)

    def names(self, devices: int) -> tuple[str, ...] | None:
        """The links that so many ranks use; None if one of them is not known."""
        used = ([self.link] if self.per_node > 1 and devices > 1 else []) + (
            [self.network] if self.nodes(devices) > 1 else []
        )
        known = [link.name for link in used if link is not None]
        return tuple(known) if len(known) == len(used) else None

    def all_reduce_s(self, size: float, ranks: int) -> float | None:
        """Seconds to sum `size` bytes over ranks that stand next to each other; None without a known link."""
        if ranks == 1 or not size:
            return 0.0
        here, nodes = min(ranks, self.per_node), self.nodes(ranks)
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
        """Seconds until each rank has sent `size` bytes in equal parts to all ranks, itself included, `apart` apart.

        Link and network work at the same time; a step of the slower one is added.
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
        """Seconds by the fastest protocol; `bytes_s` is what the bytes take at full bandwidth."""
        times = []
        for protocol in protocols():
            waits = [protocol.step_us.get(link.kind) if link else None for link, _ in steps]
            if None not in waits:
                us = protocol.collective_us + sum(n * us for us, (_, n) in zip(waits, steps, strict=True) if us)
                times.append(us * 1e-6 + bytes_s / (self.efficiency * protocol.bandwidth))
        return min(times, default=None)


NO_WIRES = Wires(None, None, per_node=1, efficiency=1.0)
