"""Where experts should live: on which ranks by their load, and in which cache slots by the order of their use.

The placement is that of deepseek-ai/EPLB: groups of experts are packed onto nodes, each node copies its busiest experts
until its replicas are used up, and the replicas are packed onto the node's ranks. Loads are float32, as there.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.errors import FFNError, option
from ffncli.run.corpus.question import ExpertsQuestion

Ranks = tuple[tuple[int, ...], ...]  # the experts on each rank


@dataclass(frozen=True)
class ExpertParallelism:
    """The split of experts over `ranks` on `nodes`, with `redundant` copies; a group of experts stays on one node."""

    ranks: int
    redundant: int = 0
    groups: int = 1
    nodes: int = 1


def spread_of(question: ExpertsQuestion, experts: int, groups: int) -> ExpertParallelism | None:
    """Return the split that a question asks for, for a layer of this many experts in so many groups of its router; None
    without `ep`. Raises FFNError if the replicas do not fill the ranks evenly."""
    if question.ep is None:
        return None
    ranks, nodes = question.ep, question.nodes
    split = ExpertParallelism(ranks, question.redundant, question.groups or groups, nodes)
    replicas = experts + split.redundant
    if replicas % ranks:
        short = -replicas % ranks
        hint = f"add {option('redundant', split.redundant + short)}"
        raise FFNError(f"{experts} experts and {split.redundant} copies do not fill {ranks} ranks evenly", hint)
    if ranks % nodes:
        raise FFNError(f"{option('nodes', nodes)} does not divide the {ranks} ranks of {option('ep')}")
    if experts % split.groups:
        raise FFNError(f"{option('groups', split.groups)} does not divide {experts} experts")
    return split


def place(load: Tensor, split: ExpertParallelism) -> Ranks:
    """Return the experts on each rank, for a load [experts]. Where nodes do not divide the groups, experts may go to
    any node."""
    load, nodes, groups = load.float(), split.nodes, split.groups
    if groups % nodes:
        nodes = groups = 1
    members = torch.arange(len(load)).view(groups, -1)
    ranks: list[tuple[int, ...]] = []
    for chosen in _packed(load.view(groups, -1).sum(-1), nodes):
        experts = members[chosen].flatten()
        replicas, share = _copied(load[experts], split.redundant // nodes)
        packs = _packed(share[replicas], split.ranks // nodes)
        ranks += [tuple(experts[replicas[pack]].tolist()) for pack in packs]
    return tuple(ranks)


def _copied(load: Tensor, more: int) -> tuple[Tensor, Tensor]:
    """Return (the expert of each replica, the load of one replica of each expert): a further copy always goes to the
    expert whose replicas have the largest load."""
    copies, replicas = torch.ones_like(load), [*range(len(load))]
    for _ in range(more):
        busiest = int((load / copies).argmax())
        copies[busiest] += 1
        replicas.append(busiest)
    return torch.tensor(replicas), load / copies


def _packed(weights: Tensor, packs: int) -> list[list[int]]:
    """Distribute items evenly: the heaviest that is left goes into the lightest pack with room, the first of equals."""
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    values, out, total = weights.tolist(), [list[int]() for _ in range(packs)], [0.0] * packs
    for item in weights.sort(descending=True).indices.tolist():  # EPLB leaves the order of equals to torch, too
        pack = min((at for at in range(packs) if len(out[at]) < room), key=total.__getitem__)
        out[pack].append(item)
        total[pack] += values[item]
    return out


def in_order(experts: int, ranks: int) -> Ranks:
    """Return the placement without a plan: experts in order, the first ranks with one more if they do not divide."""
    return tuple(tuple(part.tolist()) for part in torch.arange(experts).tensor_split(ranks))


def busiest(load: Tensor, ranks: Ranks) -> float:
    """Return the number of choices [experts] that the busiest rank computes; copies share an expert's load evenly."""
    copies = Counter(expert for rank in ranks for expert in rank)
    values: list[float] = load.tolist()
    return max(sum(values[expert] / copies[expert] for expert in rank) for rank in ranks)


def imbalance(load: Tensor, ranks: Ranks) -> float | None:
    """Return the busiest rank's load divided by the mean; None without a load."""
    total = float(load.sum())
    return busiest(load, ranks) * len(ranks) / total if total else None


@dataclass(frozen=True)
class LayerPlacement:
    """A layer's placement by its load on all texts, and what it does to the load of the busiest rank over the mean.

    `imbalance_in_order` is that of experts in order without copies, `imbalance` that of the placement, both over all
    texts. `second_half` and `second_half_placed` cover only the second half of the texts: in order, and with the
    placement by the first half; None if there is only one text.
    """

    imbalance_in_order: float | None
    imbalance: float | None
    second_half: float | None
    second_half_placed: float | None
    ranks: Ranks


@dataclass(frozen=True)
class PlacementWorth:
    """What a placement saves of the MoE time, if each layer takes as long as its busiest rank has rows to compute.

    `saved` is the share that a placement by the load on the second half of the texts saves there; `kept` is what the
    placement by the first half saves on the second. With one text, `saved` is of that text and `kept` is None.
    """

    ranks: int
    redundant: int
    groups: int
    nodes: int
    saved: float
    kept: float | None


def layer_placement(halves: Tensor, split: ExpertParallelism) -> LayerPlacement:
    """Place a layer's experts by their choices [2, experts] in the two halves of the texts."""
    load, (first, second) = halves.sum(0), halves
    plain, ranks = in_order(len(load), split.ranks), place(load, split)
    both = bool(first.any()) and bool(second.any())
    return LayerPlacement(
        imbalance(load, plain), imbalance(load, ranks), imbalance(second, plain) if both else None,
        imbalance(second, place(first, split)) if both else None, ranks,
    )  # fmt: skip


def worth(layers: Sequence[Tensor], split: ExpertParallelism) -> PlacementWorth:
    """Add up what the placements of all layers save, each layer given as its choices [2, experts] in two halves."""
    both = all(bool(half.any()) for halves in layers for half in halves)
    before, same, other = 0.0, 0.0, 0.0
    for halves in layers:
        load = halves[1] if both else halves.sum(0)
        before += busiest(load, in_order(len(load), split.ranks))
        same += busiest(load, place(load, split))
        other += busiest(load, place(halves[0], split)) if both else 0.0
    saved, kept = (1 - after / before if before else 0.0 for after in (same, other))
    return PlacementWorth(split.ranks, split.redundant, split.groups, split.nodes, saved, kept if both else None)


# --- caches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheHits:
    """The `hit_rate` of a cache of `slots` experts per layer: the share of the choices that find their expert there."""

    policy: str
    slots: int
    hit_rate: float | None


def spare_slots(slots: Sequence[int], experts: int) -> tuple[str, ...]:
    """Return a note about the caches that have room for all experts of a layer, of which there are at most so many."""
    spare = [str(size) for size in slots if size > experts]
    if not spare:
        return ()
    return (f"{option('slots')} {','.join(spare)}: a layer has at most {experts} experts, and all of them fit",)


def cache_hits(choices: Sequence[int], policies: Sequence[str], slots: Sequence[int]) -> tuple[CacheHits, ...]:
    """Replay a layer's choices, expert by expert, through an empty cache for each policy and size."""
    count = len(choices)
    return tuple(
        CacheHits(policy, size, _HITS[policy](choices, size) / count if count else None)
        for policy in policies for size in slots
    )  # fmt: skip


def _lru(choices: Sequence[int], slots: int) -> int:
    """Evict the expert whose last use is longest ago."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in choices:
        if expert in cached:
            hits += 1
            cached.move_to_end(expert)
            continue
        if len(cached) == slots:
            cached.popitem(last=False)
        cached[expert] = None
    return hits


def _lfu(choices: Sequence[int], slots: int) -> int:
    """Evict the expert used least often since the start; of equals, the one whose last use is longest ago."""
    used: Counter[int] = Counter()
    cached: dict[int, int] = {}  # expert → its last use
    hits = 0
    for at, expert in enumerate(choices):
        if expert in cached:
            hits += 1
        elif len(cached) == slots:
            del cached[min(cached, key=lambda one: (used[one], cached[one]))]
        used[expert] += 1
        cached[expert] = at
    return hits


def _pin(choices: Sequence[int], slots: int) -> int:
    """Hold only the experts used most often in the whole replay; each is loaded at its first use."""
    return sum(uses - 1 for _, uses in Counter(choices).most_common(slots))


def _best(choices: Sequence[int], slots: int) -> int:
    """Belady's bound: keep the experts whose next use is soonest; one that is needed later than all of them is not
    kept."""
    following, seen = [0] * len(choices), dict[int, int]()
    for at in range(len(choices) - 1, -1, -1):
        following[at] = seen.get(choices[at], len(choices))
        seen[choices[at]] = at
    cached: dict[int, int] = {}  # expert → its next use
    hits = 0
    for expert, after in zip(choices, following, strict=True):
        hits += expert in cached
        cached[expert] = after
        if len(cached) > slots:
            del cached[max(cached, key=cached.__getitem__)]
    return hits


_HITS = {"lru": _lru, "lfu": _lfu, "pin": _pin, "best": _best}
