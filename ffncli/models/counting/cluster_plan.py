"""A model over kinds of accelerators, splits, formats and numbers of tokens, and the cheapest split that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import groupby

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.ranks import Ranks
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.models.counting.cluster import CPU, Accelerators, Assumed, Assumptions, Speeds, assumed, cluster_of
from ffncli.models.counting.count import ModelCount, count
from ffncli.models.counting.expert_load import UNIFORM, skew_text
from ffncli.models.counting.plan import Planner, PlanRow
from ffncli.models.counting.weight_format import storage_of
from ffncli.models.counting.wires import NO_WIRES
from ffncli.models.model import Resolved
from ffncli.system.hardware import Device

_MOST_DEVICES = 1024
_OF_THE_SHEET = ("gemm_efficiency", "memory_efficiency")  # assumptions about its rates


@dataclass(frozen=True)
class ClusterPlan:
    """`rows` by device, format, split and tokens; `assumed` has one record a device.

    `cheapest` has a row for each device on which the model fits: of the splits that fit with every number of tokens,
    that on fewest devices, of these the fastest, with the first number of tokens. `would_fit` has the same of all
    splits in powers of two, up to 1,024 devices, for each device on which no requested split fits. `whole`: what
    fits is the whole model, not its FFNs alone.
    """

    name: str
    skew: str
    whole: bool
    rows: tuple[PlanRow, ...]
    cheapest: tuple[PlanRow, ...]
    would_fit: tuple[PlanRow, ...]
    assumed: tuple[Assumed, ...]


@dataclass(frozen=True)
class PlanQuestion:
    """What to plan: lists of devices, splits, numbers of tokens, and formats (None: the stored one).

    `cpu`: the CPU of the measurements too.
    """

    devices: tuple[Device, ...]
    tp: tuple[int, ...] = (1, 2, 4, 8)
    ep: tuple[int, ...] = (1,)
    tokens: tuple[int, ...] = (1, 4096)
    formats: tuple[str | None, ...] = (None,)
    skew: str = UNIFORM
    assumptions: Assumptions = field(default_factory=Assumptions)
    cpu: bool = False

    @property
    def splits(self) -> tuple[Ranks, ...]:
        """Every tp with every ep, fewest devices first."""
        grid = {Ranks(tp, ep) for tp in self.tp for ep in self.ep}
        return tuple(sorted(grid, key=lambda ranks: (ranks.world_size, ranks.ep)))

    def planners(self, resolved: Resolved) -> list[Planner]:
        """One for each format. Raises FFNError for a format that is unknown or does not fit the weights' rows, and for
        a skew of a model without experts.
        """
        if "top_k" in resolved.model.unknown:
            raise FFNError(f"{resolved.model.name} does not say its top_k, so its work is not known", "pass --top-k 2")
        skew = skew_text("--skew", self.skew)
        if skew != UNIFORM and not any(group.spec.moe for group in resolved.model.groups):
            raise FFNError(f"--skew needs a mixture of experts, and {resolved.model.name} is not one")
        planners = []
        for name in dict.fromkeys(self.formats):
            weights = storage_of(resolved, name)
            planners.append(Planner(resolved.model, weights, other_bytes(count(resolved, name), weights), skew))
        return planners


def other_bytes(counted: ModelCount, weights: DType) -> int | None:
    """The bytes of a model's weights outside its FFNs; None where their number is not known.

    Where a packed format leaves open how they are stored: in the activations' format, more than they can take.
    """
    if counted.model_weight_bytes is not None:
        return counted.model_weight_bytes - counted.weight_bytes
    if counted.model_params_total is None:
        return None
    return round((counted.model_params_total - counted.ffn_params_total) * activation_dtype(weights).bytes)


def plan_model(resolved: Resolved, question: PlanQuestion, speeds: Mapping[str, Speeds] | None = None) -> ClusterPlan:
    """The plan of one model; `speeds` are measured ones by device, in place of a data sheet's.

    Raises FFNError for an unknown format, skew or link, for a CPU without measured speeds or measured speeds of no such
    device, and if no combination has figures, with the first reason.
    """
    planners, speeds = question.planners(resolved), speeds or {}
    devices = list({device.name: device for device in question.devices}.values())
    names = [*(device.name for device in devices), *([CPU] if question.cpu else [])]
    if question.cpu and CPU not in speeds:
        raise FFNError("--device cpu needs --measured FILE", "times of that CPU, by ffn bench --save FILE")
    if speeds and not set(speeds) & set(names):
        raise FFNError(f"--measured has no times of {', '.join(names)}", f"it has those of {', '.join(speeds)}")
    given = [name for name in _OF_THE_SHEET if getattr(question.assumptions, name) is not None]
    if given and set(names) <= set(speeds):
        option = f"--{given[0].replace('_', '-')}"
        raise FFNError(f"{option} contradicts --measured", "measured rates take the place of the data sheet's")
    taken = tuple(assumed(device, question.assumptions, device.name in speeds) for device in devices)
    clusters = [cluster_of(device, one, speeds.get(device.name)) for device, one in zip(devices, taken, strict=True)]
    if question.cpu:
        clusters.append(Accelerators(CPU, speeds[CPU], None, NO_WIRES))
    return planned(resolved, planners, clusters, question, taken)


def planned(
    resolved: Resolved,
    planners: Sequence[Planner],
    clusters: Sequence[Accelerators],
    question: PlanQuestion,
    taken: tuple[Assumed, ...] = (),
) -> ClusterPlan:
    """The plan on these clusters."""
    tokens = tuple(dict.fromkeys(question.tokens))
    rows = tuple(
        planner.row(cluster, ranks, number)
        for cluster in clusters
        for planner in planners
        for ranks in question.splits
        for number in tokens
    )
    if all(row.refused for row in rows):
        raise FFNError(rows[0].refused)
    best = [cheapest([row for row in rows if row.device == cluster.device]) for cluster in clusters]
    others = (would_fit(planners, cluster, tokens) for cluster, row in zip(clusters, best, strict=True) if row is None)
    return ClusterPlan(
        resolved.model.name,
        question.skew,
        whole=any(planner.other_bytes is not None for planner in planners),
        rows=rows,
        cheapest=tuple(filter(None, best)),
        would_fit=tuple(filter(None, others)),
        assumed=taken,
    )


def cheapest(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Of one device's rows; None where nothing fits or it is not known what does."""
    splits: dict[tuple[str, int, int], list[PlanRow]] = {}
    for row in rows:
        splits.setdefault((row.dtype, row.tp, row.ep), []).append(row)
    fitting = [alike[0] for alike in splits.values() if all(row.fits for row in alike)]
    return min(fitting, key=lambda row: (row.devices, row.time_s or 0.0), default=None)


def would_fit(planners: Sequence[Planner], cluster: Accelerators, tokens: Sequence[int]) -> PlanRow | None:
    """The cheapest split in powers of two, up to 1,024 devices; None where none fits or the memory is not known."""
    if cluster.memory_bytes is None:
        return None
    splits = {ranks for planner in planners for ranks in planner.splits() if ranks.world_size <= _MOST_DEVICES}
    for _, alike in groupby(sorted(splits, key=_devices), key=_devices):
        rows = [planner.row(cluster, ranks, n) for ranks in alike for planner in planners for n in tokens]
        if best := cheapest(rows):
            return best
    return None


def _devices(ranks: Ranks) -> int:
    return ranks.world_size
