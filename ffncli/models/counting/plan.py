"""For a model's FFNs split over accelerators, predict the time, the limiting resource, and whether they fit into
memory.

A layer runs as a sequence of kernels (`launches` in `block/traffic.py`), each of which takes the time of one rank's
part of the work (`times/kernels.py`). The time of collectives is added. Under expert parallelism (ep), tokens are also
split over the ep groups of ranks, and a layer waits for the rank with the most work. Tokens are sent to the ranks that
hold their experts in fp8 or bf16, and the results return in bf16.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ffncli.block.cost import cost
from ffncli.block.dtypes import DType, activation_dtype, weight_bytes
from ffncli.block.recipe import MoE
from ffncli.block.shard import Ranks
from ffncli.block.steps import Step
from ffncli.block.traffic import KernelTraffic, launches
from ffncli.errors import FFNError
from ffncli.models.counting.cluster import NO_WIRES, Accelerators
from ffncli.models.counting.expert_load import UNIFORM, ExpertSpread, expert_load, expert_rows, ranks_reached
from ffncli.models.counting.parallel import (
    check_ranks,
    exchanged,
    expert_rank_counts,
    rank_counts,
    reduced_bytes,
    ring_all_reduce_bytes,
)
from ffncli.models.counting.speeds import PredictedTimes
from ffncli.models.counting.times.fitted import link_ends
from ffncli.models.counting.times.kernels import Loads, PlannedKernel
from ffncli.models.counting.traffic import steps_of
from ffncli.models.model import Group, Model
from ffncli.show.text import plural

Resource = Literal["compute", "memory", "launch", "link"]
# DeepEP sends a scale in float32 with every 128 values in fp8.
_DISPATCHED = {"fp8": 1 + 4 / 128, "bf16": 2.0}
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class PlanRow:
    """A forward pass of all layers' FFNs (or of the single block of bare dimensions) on `tokens` tokens, over tp × ep
    devices.

    `compute_s`, `memory_s`, `launch_s`, `quantize_s` (of x) and `link_s` (collectives) are for one rank; `time_s` is
    the sum over kernels of both compute and memory time as far as they do not overlap, and of the others. `time_low_s`
    and `time_high_s` are the ends of its 80 % interval, and `unknown` says what it was not measured on.
    `balanced_time_s` assumes that the experts' tokens are spread evenly over ranks; `waiting_s` is the rest, the time
    that the mean rank waits for the busiest. `bound` is what takes the most time. `efficiency` is the speed-up over one
    device divided by the number of devices. `sent_bytes` and `received_bytes` are those of the busiest rank. Bytes are
    for the fullest rank: `needed_bytes` is this rank's weights (of the whole model if known; weights outside the FFNs
    are also split over tp) plus one layer's activations, with all intermediates kept; `memory_bytes` is the memory
    available for both. `experts_read` is the expected number of experts that a rank reads in a layer,
    `busiest_expert_tokens` the expected maximum number of tokens for one expert. `refused` is the reason why there are
    no figures; then all of them are None.
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
    time_low_s: float | None = None
    time_high_s: float | None = None
    launch_s: float | None = None
    quantize_s: float | None = None
    waiting_s: float | None = None
    received_bytes: float | None = None
    dispatch: str | None = None
    link_gbytes_per_s: float | None = None
    cost_per_million_tokens: float | None = None
    unknown: str = ""


@dataclass(frozen=True)
class Collectives:
    """A layer's collectives on one rank: their number, the bytes that enter them, and the bytes that rings send."""

    all_reduces: int
    all_reduce_bytes: int
    ring_all_reduce_bytes: float
    all_to_alls: int
    all_to_all_bytes: int


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of a layer on the busiest rank: the bytes that it sends and receives, with those for itself;
    the part `crossing` of those for other nodes goes over the network, once for each node."""

    sent: float
    received: float
    crossing: float = 1.0


@dataclass(frozen=True)
class Load:
    """One rank's part of a layer: its kernels, the bytes that it contributes to each all-reduce, its all-to-alls."""

    kernels: tuple[PlannedKernel, ...]
    reduced: tuple[int, ...]
    exchanged: tuple[Exchange, ...]

    def times(self, n: int) -> tuple[float, float]:
        """Return the FLOPs and the bytes of the kernels of `n` layers."""
        return n * sum(one.flops for one in self.kernels), n * sum(one.moved_bytes for one in self.kernels)


@dataclass(frozen=True)
class Times:
    """The times of one layer on one rank, in seconds: those of its kernels, of its all-reduces and of its all-to-alls,
    which may overlap with the kernels of shared experts (`shared`: which kernels)."""

    timed: PredictedTimes
    reduce_s: float
    exchange_s: float
    shared: tuple[bool, ...]

    def parts(self) -> dict[Resource, float]:
        """Return what each resource takes; a kernel's time belongs to its longest part."""
        shares: dict[Resource, float] = {"compute": 0.0, "memory": 0.0, "launch": 0.0, "link": self.link_s}
        for kernel in self.timed.kernels:
            shares[kernel.bound] += kernel.seconds
        return shares

    @property
    def link_s(self) -> float:
        """Return the time of all collectives."""
        return self.reduce_s + self.exchange_s

    @property
    def seconds(self) -> float:
        """Return the layer's time."""
        return self.at()

    def at(self, end: Literal["low", "high"] | None = None) -> float:
        """Return the layer's time, or an end of its interval; the errors of kernels are alike, so their ends add up."""
        times = [one.seconds * (getattr(one, end) if end else 1.0) for one in self.timed.kernels]
        link = link_ends()[end == "high"] if end else 1.0
        hidden = sum(time for time, shared in zip(times, self.shared, strict=True) if shared)
        together = max(self.exchange_s * link, hidden)
        return sum(times) - hidden + together + self.reduce_s * link


@dataclass(frozen=True)
class Planner:
    """Plans for one model in one weight format; `other_bytes` is the size of all weights outside the FFNs.

    `dispatch` is the format in which tokens are sent to their experts (None: fp8 if the experts compute in fp8 or fp4,
    else that of the activations); a token is sent once to each rank that holds some of its experts, or once for each of
    its experts (`rows_per`). `overlap`: shared experts run during the all-to-alls. `price`: dollars per hour and
    device.
    """

    model: Model
    weights: DType
    other_bytes: int | None = None
    skew: str = UNIFORM
    dispatch: str | None = None
    rows_per: Literal["rank", "choice"] = "rank"
    overlap: bool = False
    nodes: int | None = None
    price: float | None = None

    @cached_property
    def _steps(self) -> dict[tuple[int, Ranks], tuple[Step, ...]]:
        """The steps of rank 0, by the group's identity and the split: splitting takes as long as the rest of a row."""
        return {}

    def _steps_of(self, group: Group, ranks: Ranks) -> tuple[Step, ...]:
        key = (id(group), ranks)
        if key not in self._steps:
            self._steps[key] = steps_of(group, 0, ranks)
        return self._steps[key]

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
            row = self._filled(row, self._over_nodes(cluster, ranks), ranks)
        except FFNError as error:
            return replace(row, refused=str(error))
        time_s = row.time_s or 0.0
        alone_s = time_s if ranks.world_size == 1 else self._time_s(cluster, Ranks(), tokens)
        share = alone_s / (time_s * ranks.world_size)
        return self._with_memory(self._with_experts(replace(row, efficiency=share), ranks), cluster, ranks)

    def compute_bound_from(self, cluster: Accelerators, ranks: Ranks) -> int | None:
        """Return the number of tokens from which arithmetic takes the largest part of the time, to 1 %; None if it
        does for one token already or for no number up to a million."""
        cluster = self._over_nodes(cluster, ranks)

        def compute(tokens: int) -> bool:
            return _bound(self._layers(cluster, ranks, tokens)) == "compute"

        low, high = 1, 4
        while not compute(high):
            low, high = high, 4 * high
            if high > _MOST_TOKENS:
                return None
        if low == 1 and compute(1):
            return None
        while high - low > max(1, high // 100):
            middle = (low + high) // 2
            low, high = (low, middle) if compute(middle) else (middle, high)
        return high

    def _over_nodes(self, cluster: Accelerators, ranks: Ranks) -> Accelerators:
        """Spread the split's devices over the number of nodes, if it is given."""
        if self.nodes is None:
            return cluster
        if ranks.world_size % self.nodes:
            number = ranks.world_size
            raise FFNError(f"{number} {plural('device', number)} do not divide over {self.nodes} nodes")
        return replace(cluster, wires=replace(cluster.wires, per_node=ranks.world_size // self.nodes))

    def _layers(
        self, cluster: Accelerators, ranks: Ranks, tokens: int, even: bool = False
    ) -> list[tuple[Load, Times, int]]:
        """Return the load and times of each kind of layer, and the number of its layers."""
        out = []
        for group in self.model.groups:
            load = self._load(group, cluster, ranks, tokens, even)
            out.append((load, self._times(cluster, load, ranks), len(group.layers) * group.runs))
        return out

    def _filled(self, row: PlanRow, cluster: Accelerators, ranks: Ranks) -> PlanRow:
        layers = self._layers(cluster, ranks, row.tokens)
        times = [(one, n) for _, one, n in layers]
        time_s = sum(one.seconds * n for one, n in times)
        balanced = time_s if ranks.ep == 1 else self._time_s(cluster, ranks, row.tokens, even=True)
        flops, moved = (sum(values) for values in zip(*(load.times(n) for load, _, n in layers), strict=True))
        rates = self._timed(cluster, [kernel for load, _, _ in layers for kernel in load.kernels]).rates
        kernels = [(kernel, n) for one, n in times for kernel in one.timed.kernels]
        wire = cluster.wires.used_bytes_per_s(ranks.tp if ranks.tp > 1 else ranks.ep)
        price = self.price and self.price / 3600 * ranks.world_size * time_s / row.tokens * 1e6
        return replace(
            row,
            rate=rates.format,
            time_s=time_s,
            time_low_s=sum(one.at("low") * n for one, n in times),
            time_high_s=sum(one.at("high") * n for one, n in times),
            balanced_time_s=balanced,
            waiting_s=max(time_s - balanced, 0.0),
            bound=_bound(layers),
            compute_s=sum(one.compute_s * one.factor * n for one, n in kernels),
            memory_s=sum(one.memory_s * one.factor * n for one, n in kernels),
            launch_s=sum(one.launch_s * n for one, n in kernels),
            quantize_s=sum(one.quantize_s * n for one, n in kernels),
            link_s=sum(one.link_s * n for one, n in times),
            flops_per_byte=flops / moved,
            ridge_flops_per_byte=rates.ridge,
            tokens_per_s=row.tokens / time_s,
            links=" + ".join(cluster.wires.names(ranks.world_size) or ()),
            link_gbytes_per_s=None if wire is None else wire / 1e9,
            all_reduces=sum(len(load.reduced) * n for load, _, n in layers),
            all_to_alls=sum(len(load.exchanged) * n for load, _, n in layers),
            sent_bytes=sum(_crossing(load, ranks, "sent") * n for load, _, n in layers),
            received_bytes=sum(_crossing(load, ranks, "received") * n for load, _, n in layers),
            dispatch=self._dispatch(cluster) if ranks.ep > 1 else None,
            cost_per_million_tokens=price,
            unknown="; ".join(dict.fromkeys(one.timed.unknown for one, _ in times if one.timed.unknown)),
        )

    def _time_s(self, cluster: Accelerators, ranks: Ranks, tokens: int, even: bool = False) -> float:
        return sum(one.seconds * n for _, one, n in self._layers(cluster, ranks, tokens, even))

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
        parts = [(self._steps_of(g, ranks), len(g.layers)) for g in self.model.groups]
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

    def _load(self, group: Group, cluster: Accelerators, ranks: Ranks, tokens: int, even: bool = False) -> Load:
        """Return the busiest rank's part of a layer; `even` assumes that the experts of all ranks get equal work."""
        steps, entered = self._steps_of(group, ranks), -(-tokens // ranks.ep)
        activations, moe = activation_dtype(self.weights), group.spec.moe
        touched, loads, share = (
            None,
            None,
            1.0,
        )  # the rank's expert rows, relative to those of the tokens it starts with
        spread = self._spread(group, ranks, tokens)
        if spread and moe:
            touched = spread.touched / ranks.ep if even else spread.touched_rank
            share = tokens / (ranks.ep * entered) * (1.0 if even else spread.imbalance)
            rows = expert_rows(moe.experts, moe.top_k, tokens, ranks.ep, self.skew, even)
            loads = Loads.of(rows, moe.experts // ranks.ep)
        exchanges: tuple[Exchange, ...] = ()
        if moe and ranks.ep > 1:
            part = tokens / (ranks.ep * entered)
            rows_each = moe.top_k if self.rows_per == "choice" else ranks_reached(
                moe.experts, moe.top_k, ranks.ep, moe.groups, moe.top_groups
            )  # fmt: skip
            widths = (_DISPATCHED.get(self._dispatch(cluster), activations.bytes), min(activations.bytes, 2.0))
            one, back = (
                entered * part * rows_each / moe.top_k * values * width
                for values, width in zip(exchanged(steps), widths, strict=True)
            )
            crossing = self._crossing(moe, cluster, ranks, rows_each)
            exchanges = (
                Exchange(one, one / part * share, crossing), Exchange(back / part * share, back, crossing),
            )  # fmt: skip
        return Load(
            kernels=tuple(
                _kernel(kernel, entered, loads, share)
                for kernel in launches(steps, self.weights, activations, entered, touched)
            ),
            reduced=tuple(entered * size for size in reduced_bytes(steps, activations)),
            exchanged=exchanges,
        )

    def _crossing(self, moe: MoE, cluster: Accelerators, ranks: Ranks, rows_each: float) -> float:
        """Return the rows that a token sends to other nodes over those that it sends to their ranks: a row per node,
        which is copied there."""
        here = cluster.wires.ranks_here(ranks.ep, ranks.tp)
        nodes = -(-ranks.ep // here)
        if self.rows_per == "choice" or nodes == 1 or moe.experts % nodes:
            return 1.0
        rows = ranks_reached(moe.experts, moe.top_k, nodes, moe.groups, moe.top_groups)
        return rows * (nodes - 1) / nodes / (rows_each * (ranks.ep - here) / ranks.ep)

    def _dispatch(self, cluster: Accelerators) -> str:
        """Return the format in which tokens are sent to their experts."""
        if self.dispatch is not None:
            return self.dispatch
        fine = cluster.speeds.rate(self.weights) in ("fp8", "fp4")
        return "fp8" if fine else activation_dtype(self.weights).name

    def collectives(self, group: Group, ranks: Ranks, tokens: int) -> Collectives:
        """Count the collectives of one layer in the activations' format, with the experts' tokens spread evenly and a
        row for each choice, as torch's collectives send them."""
        steps, entered = steps_of(group, 0, ranks), -(-tokens // ranks.ep)
        activations = activation_dtype(self.weights)
        reduced = [entered * size for size in reduced_bytes(steps, activations)]
        crossing = exchanged(steps) if group.spec.moe and ranks.ep > 1 else ()
        rings = sum(ring_all_reduce_bytes(size, ranks.tp) for size in reduced)
        rows = entered * activations.block_bytes
        return Collectives(len(reduced), sum(reduced), rings, len(crossing), rows * sum(crossing))

    def _spread(self, group: Group, ranks: Ranks, tokens: int) -> ExpertSpread | None:
        moe = group.spec.moe
        return expert_load(moe.experts, moe.top_k, tokens, ranks.ep, self.skew) if moe else None

    def _times(self, cluster: Accelerators, load: Load, ranks: Ranks) -> Times:
        wires = cluster.wires
        reduces = [wires.all_reduce_s(size, ranks.tp) for size in load.reduced]
        exchanges = [
            wires.all_to_all_s(max(one.sent, one.received), ranks.ep, ranks.tp, one.crossing) for one in load.exchanged
        ]  # fmt: skip
        if None in reduces or None in exchanges:
            hint = "" if wires == NO_WIRES else "name one with --link and --network"
            raise FFNError(f"no link of {cluster.device} is known", hint)
        shared = tuple(self.overlap and kernel.shared for kernel in load.kernels)
        return Times(
            self._timed(cluster, load.kernels), sum(filter(None, reduces)), sum(filter(None, exchanges)), shared
        )

    def _timed(self, cluster: Accelerators, kernels: Sequence[PlannedKernel]) -> PredictedTimes:
        timed = cluster.speeds.timed(self.weights, kernels)
        if timed is None:
            why = f"no rate of {cluster.device} is known in {activation_dtype(self.weights).name}"
            raise FFNError(why, f"known: {', '.join(cluster.speeds.formats)}")
        return timed


def _bound(layers: Sequence[tuple[Load, Times, int]]) -> Resource:
    """Return what takes the most time."""
    shares: dict[Resource, float] = {}
    for _, times, n in layers:
        for name, seconds in times.parts().items():
            shares[name] = shares.get(name, 0.0) + seconds * n
    return max(shares, key=lambda name: shares[name])


def _crossing(load: Load, ranks: Ranks, way: Literal["sent", "received"]) -> float:
    """Return the bytes that the busiest rank sends, or receives, in one layer."""
    rings = sum(ring_all_reduce_bytes(size, ranks.tp) for size in load.reduced)
    sizes = (one.sent if way == "sent" else one.received for one in load.exchanged)
    return rings + (ranks.ep - 1) / ranks.ep * sum(sizes)


def _kernel(kernel: KernelTraffic, rows: int, loads: Loads | None, share: float) -> PlannedKernel:
    """Return a kernel's work; that of experts on their share of the rows, with the same weights read."""
    work, part = kernel.work, share if kernel.routed else 1.0
    product_rows = None if not kernel.k else loads if kernel.routed else Loads.of([(rows, 1)])
    moved = work.weight_bytes_read + part * work.activation_bytes
    return PlannedKernel(
        part * work.matmul_flops,
        work.weight_bytes_read,
        moved,
        kernel.k,
        kernel.n,
        product_rows,
        kernel.routed,
        kernel.shared,
    )
