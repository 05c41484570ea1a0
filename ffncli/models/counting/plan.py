"""For a model's FFNs split over accelerators, predict the time, the limiting resource, and whether they fit into
memory.

A layer runs as a sequence of kernels (`launches` in `block/traffic.py`). By the roofline, the time of a kernel is the
time of its arithmetic or of its memory traffic, whichever is longer, for one rank's part of the work and at the
cluster's expected rates. The time of collectives is added. Under expert parallelism (ep), tokens are also split over
the ep groups of ranks, and a layer waits for the rank with the most work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ffncli.block.cost import cost
from ffncli.block.dtypes import DType, activation_dtype, weight_bytes
from ffncli.block.shard import Ranks
from ffncli.block.traffic import TimeFloor, Traffic, launches, time_floor
from ffncli.errors import FFNError
from ffncli.models.counting.cluster import NO_WIRES, Accelerators, Rates
from ffncli.models.counting.expert_load import UNIFORM, ExpertSpread, expert_load
from ffncli.models.counting.parallel import (
    all_to_all_bytes,
    check_ranks,
    exchanged,
    expert_rank_counts,
    rank_counts,
    reduced_bytes,
    ring_all_reduce_bytes,
)
from ffncli.models.counting.traffic import steps_of
from ffncli.models.model import Group, Model

Resource = Literal["compute", "memory", "link"]


@dataclass(frozen=True)
class PlanRow:
    """A forward pass of all layers' FFNs (or of the single block of bare dimensions) on `tokens` tokens, over tp × ep
    devices.

    `compute_s`, `memory_s` and `link_s` (collectives) are for one rank; `time_s` is the sum over kernels of the longer
    of compute and memory time, plus `link_s`. `balanced_time_s` assumes that the experts' tokens are spread evenly over
    ranks. `bound` is the resource that takes the most time. `efficiency` is the speed-up over one device divided by the
    number of devices. Bytes are for the fullest rank: `needed_bytes` is this rank's weights (of the whole model if
    known; weights outside the FFNs are also split over tp) plus one layer's activations, with all intermediates kept;
    `memory_bytes` is the memory available for both. `experts_read` is the expected number of experts that a rank reads
    in a layer, `busiest_expert_tokens` the expected maximum number of tokens for one expert. `refused` is the reason
    why there are no figures; then all of them are None.
    """

    device: str
    dtype: str
    tp: int
    ep: int
    devices: int
    tokens: int
    rate: str | None = None
    time_s: float | None = None
    balanced_time_s: float | None = None
    bound: Resource | None = None
    compute_s: float | None = None
    memory_s: float | None = None
    link_s: float | None = None
    flops_per_byte: float | None = None
    ridge_flops_per_byte: float | None = None
    efficiency: float | None = None
    tokens_per_s: float | None = None
    links: str | None = None
    all_reduces: int | None = None
    all_to_alls: int | None = None
    sent_bytes: float | None = None
    tokens_per_expert: float | None = None
    busiest_expert_tokens: float | None = None
    experts_read: float | None = None
    ffn_weight_bytes: int | None = None
    model_weight_bytes: int | None = None
    activation_bytes: int | None = None
    needed_bytes: int | None = None
    memory_bytes: int | None = None
    fits: bool | None = None
    refused: str = ""


@dataclass(frozen=True)
class Collectives:
    """A layer's collectives on one rank: their number, the bytes that enter them, and the bytes that rings send."""

    all_reduces: int
    all_reduce_bytes: int
    ring_all_reduce_bytes: float
    all_to_alls: int
    all_to_all_bytes: int


@dataclass(frozen=True)
class Load:
    """One rank's part of a layer: its kernels, and the bytes that it contributes to each all-reduce and all-to-all."""

    kernels: tuple[Traffic, ...]
    reduced: tuple[int, ...]
    exchanged: tuple[int, ...]
    mixture: bool

    @property
    def work(self) -> Traffic:
        """Return the total work of the kernels."""
        return sum(self.kernels, Traffic())


@dataclass(frozen=True)
class Times:
    """The times of one layer on one rank, in seconds: those of its kernels and those of its collectives."""

    kernels: tuple[TimeFloor, ...]
    link_s: float

    @property
    def compute_s(self) -> float:
        """Return the total time of arithmetic."""
        return sum(kernel.compute_s for kernel in self.kernels)

    @property
    def memory_s(self) -> float:
        """Return the total time of memory traffic."""
        return sum(kernel.memory_s for kernel in self.kernels)

    @property
    def seconds(self) -> float:
        """Return the layer's time."""
        return sum(kernel.seconds for kernel in self.kernels) + self.link_s


@dataclass(frozen=True)
class Planner:
    """Plans for one model in one weight format; `other_bytes` is the size of all weights outside the FFNs."""

    model: Model
    weights: DType
    other_bytes: int | None = None
    skew: str = UNIFORM

    def splits(self) -> list[Ranks]:
        """Return the possible splits whose tp and ep are powers of two, which usually also divide the heads and the
        devices of a node."""
        tp, ep = rank_counts(self.model, self.weights), expert_rank_counts(self.model)
        return [Ranks(t, e) for t in tp for e in ep if t.bit_count() == e.bit_count() == 1]

    def row(self, cluster: Accelerators, ranks: Ranks, tokens: int) -> PlanRow:
        """Plan one split; the row has no figures if the model cannot be split this way or no rate is known."""
        row = PlanRow(cluster.device, self.weights.name, ranks.tp, ranks.ep, ranks.world_size, tokens)
        try:
            check_ranks(self.model, ranks, self.weights)
            row = self._filled(row, cluster, ranks)
        except FFNError as error:
            return replace(row, refused=str(error))
        time_s = row.time_s or 0.0
        alone_s = time_s if ranks.world_size == 1 else self._time_s(cluster, Ranks(), tokens)
        share = alone_s / (time_s * ranks.world_size)
        return self._with_memory(self._with_experts(replace(row, efficiency=share), ranks), cluster, ranks)

    def _filled(self, row: PlanRow, cluster: Accelerators, ranks: Ranks) -> PlanRow:
        loads = [(self._load(group, ranks, row.tokens), len(group.layers) * group.runs) for group in self.model.groups]
        times = [(self._times(cluster, load, ranks), n) for load, n in loads]
        time_s = sum(one.seconds * n for one, n in times)
        work = sum((load.work.times(n) for load, n in loads), Traffic())
        rates = self._rates(cluster, work, any(load.mixture for load, _ in loads))
        return replace(
            row,
            rate=rates.format,
            time_s=time_s,
            balanced_time_s=time_s if ranks.ep == 1 else self._time_s(cluster, ranks, row.tokens, even=True),
            bound=_bound(times),
            compute_s=sum(one.compute_s * n for one, n in times),
            memory_s=sum(one.memory_s * n for one, n in times),
            link_s=sum(one.link_s * n for one, n in times),
            flops_per_byte=work.flops_per_byte(fused=True),
            ridge_flops_per_byte=rates.ridge,
            tokens_per_s=row.tokens / time_s,
            links=" + ".join(cluster.wires.names(ranks.world_size) or ()),
            all_reduces=sum(len(load.reduced) * n for load, n in loads),
            all_to_alls=sum(len(load.exchanged) * n for load, n in loads),
            sent_bytes=sum(_sent(load, ranks) * n for load, n in loads),
        )

    def _time_s(self, cluster: Accelerators, ranks: Ranks, tokens: int, even: bool = False) -> float:
        loads = ((self._load(g, ranks, tokens, even), len(g.layers) * g.runs) for g in self.model.groups)
        return sum(self._times(cluster, load, ranks).seconds * n for load, n in loads)

    def _with_experts(self, row: PlanRow, ranks: Ranks) -> PlanRow:
        """Add the load of the most common mixture."""
        mixtures = sorted((g for g in self.model.groups if g.spec.moe), key=lambda group: -len(group.layers))
        spread = self._spread(mixtures[0], ranks, row.tokens) if mixtures else None
        if spread is None:
            return row
        return replace(
            row,
            tokens_per_expert=spread.per_expert,
            busiest_expert_tokens=spread.busiest,
            experts_read=spread.touched_rank,
        )

    def _with_memory(self, row: PlanRow, cluster: Accelerators, ranks: Ranks) -> PlanRow:
        tokens, width = -(-row.tokens // ranks.ep), activation_dtype(self.weights).bytes
        parts = [(steps_of(g, 0, ranks), len(g.layers)) for g in self.model.groups]
        ffn = sum(weight_bytes(steps, self.weights) * n for steps, n in parts)
        whole = None if self.other_bytes is None else ffn + -(-self.other_bytes // ranks.tp)
        activations = max(cost(steps, tokens).activation_bytes(width) for steps, _ in parts)
        needed = (ffn if whole is None else whole) + activations
        return replace(
            row,
            ffn_weight_bytes=ffn,
            model_weight_bytes=whole,
            activation_bytes=activations,
            needed_bytes=needed,
            memory_bytes=cluster.memory_bytes,
            fits=None if cluster.memory_bytes is None else needed <= cluster.memory_bytes,
        )

    def _load(self, group: Group, ranks: Ranks, tokens: int, even: bool = False) -> Load:
        """Return the busiest rank's part of a layer; `even` assumes that the experts of all ranks get equal work."""
        steps, entered = steps_of(group, 0, ranks), -(-tokens // ranks.ep)
        activations, spread = activation_dtype(self.weights), self._spread(group, ranks, tokens)
        touched, share = None, 1.0  # the rank's expert work, relative to the expert work of the tokens it starts with
        if spread:
            touched = spread.touched / ranks.ep if even else spread.touched_rank
            share = tokens / (ranks.ep * entered) * (1.0 if even else spread.imbalance)
        kernels = launches(steps, self.weights, activations, entered, touched)
        crossing = exchanged(steps) if spread and ranks.ep > 1 else ()
        rows = round(max(share, 1.0) * entered)  # rows that the rank sends or receives, whichever are more
        return Load(
            kernels=tuple(_of_share(kernel.work, share) if kernel.routed else kernel.work for kernel in kernels),
            reduced=tuple(entered * size for size in reduced_bytes(steps, activations)),
            exchanged=tuple(rows * values * activations.block_bytes for values in crossing),
            mixture=spread is not None,
        )

    def collectives(self, group: Group, ranks: Ranks, tokens: int) -> Collectives:
        """Count the collectives of one layer, with the experts' tokens spread evenly."""
        load = self._load(group, ranks, tokens, even=True)
        rings = sum(ring_all_reduce_bytes(size, ranks.tp) for size in load.reduced)
        return Collectives(len(load.reduced), sum(load.reduced), rings, len(load.exchanged), sum(load.exchanged))

    def _spread(self, group: Group, ranks: Ranks, tokens: int) -> ExpertSpread | None:
        moe = group.spec.moe
        return expert_load(moe.experts, moe.top_k, tokens, ranks.ep, self.skew) if moe else None

    def _times(self, cluster: Accelerators, load: Load, ranks: Ranks) -> Times:
        rates = self._rates(cluster, load.work, load.mixture)
        wires = cluster.wires
        link_s = [wires.all_reduce_s(size, ranks.tp) for size in load.reduced]
        link_s += [wires.all_to_all_s(size, ranks.ep, ranks.tp) for size in load.exchanged]
        if None in link_s:
            hint = "" if wires == NO_WIRES else "name one with --link and --network"
            raise FFNError(f"no link of {cluster.device} is known", hint)
        return Times(
            tuple(
                time_floor(one.matmul_flops, one.moved(), rates.flops_per_s, rates.bytes_per_s) for one in load.kernels
            ),
            sum(filter(None, link_s)),
        )

    def _rates(self, cluster: Accelerators, work: Traffic, mixture: bool) -> Rates:
        rates = cluster.speeds.rates(self.weights, work, mixture)
        if rates is None:
            why = f"no rate of {cluster.device} is known in {activation_dtype(self.weights).name}"
            raise FFNError(why, f"known: {', '.join(cluster.speeds.formats)}")
        return rates


def _bound(layers: Sequence[tuple[Times, int]]) -> Resource:
    """Return the resource that takes the most time; a kernel's time belongs to the slower of compute and memory."""
    shares: dict[Resource, float] = {"compute": 0.0, "memory": 0.0, "link": 0.0}
    for times, n in layers:
        for kernel in times.kernels:
            shares[kernel.bound] += kernel.seconds * n
        shares["link"] += times.link_s * n
    return max(shares, key=lambda name: shares[name])


def _sent(load: Load, ranks: Ranks) -> float:
    """Return the bytes that a rank sends in one layer."""
    rings = sum(ring_all_reduce_bytes(size, ranks.tp) for size in load.reduced)
    return rings + sum(all_to_all_bytes(size, ranks.ep) for size in load.exchanged)


def _of_share(work: Traffic, share: float) -> Traffic:
    """Scale an expert kernel to a share of its rows; it still reads the same weights."""
    moved = round(share * work.activation_bytes)
    return Traffic(work.weight_bytes_read, moved, moved, round(share * work.matmul_flops))
