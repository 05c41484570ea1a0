"""Plan a model for accelerators, splits, formats and token counts, and find the cheapest split that fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Literal

from ffncli.block.dtypes import storage
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError, option
from ffncli.frames import Tabular
from ffncli.models.counting.cluster import CPU, NO_WIRES, Accelerators, Assumed, Assumptions, assumed, cluster_of
from ffncli.models.counting.count import ModelCount, count, storage_of
from ffncli.models.counting.expert_load import UNIFORM, skew_text
from ffncli.models.counting.plan import Planner, PlanRow
from ffncli.models.counting.speeds import Speeds
from ffncli.models.dimensions import token_counts
from ffncli.models.model import Resolved
from ffncli.options.accept import COUNTS, FORMATS, NAMES, choice, listed
from ffncli.options.conflicts import Conflict, check, given
from ffncli.options.opt import COMPUTE, Opt
from ffncli.options.shared import Batch, Counts, SeqLen, TokenList
from ffncli.system.hardware import Device, named

_MOST_DEVICES = 1024
_OF_THE_SHEET = tuple(
    Conflict(name, contradicts="measured", why="measured rates replace the data sheet's rates")
    for name in ("gemm_efficiency", "memory_efficiency")
)
_DEPLOYED = (Conflict("nodes", contradicts="per_node", why="both say how many devices are in a node"),)
_OF_MIXTURES = ("dispatch", "rows_per", "overlap_shared")
_DEVICES = replace(NAMES, words="one or more names such as 'h100'")
_cluster = partial(Opt, group="Accelerators")


@dataclass(frozen=True)
class Crossing:
    """The number of tokens from which the FFNs are bound by compute with this device, format and split; None if they
    are for one token, or for no number up to a million."""

    device: str
    dtype: str
    tp: int
    ep: int
    tokens: int | None


@dataclass(frozen=True)
class ClusterPlan(Tabular):
    """A plan: `rows` has one row per device, format, split and token count; `assumed` has one record per device.

    `cheapest` has one row for each device on which the model fits: the split with the fewest devices among the splits
    that fit at every token count, and the fastest of these if several have equally few devices. The row is for the
    first token count. If no requested split fits a device, `would_fit` has the cheapest split among powers of two, up
    to 1,024 devices. `whole`: the whole model must fit, not only its FFNs. `crossings` has one record per device and
    format if several token counts are planned: of the cheapest split, or of the first.
    """

    name: str
    skew: str
    whole: bool
    rows: tuple[PlanRow, ...]
    cheapest: tuple[PlanRow, ...]
    would_fit: tuple[PlanRow, ...]
    assumed: tuple[Assumed, ...]
    crossings: tuple[Crossing, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanQuestion(Assumptions):
    """The model to plan (`source`, which the caller loads) and the accelerators (default: H100), with every split,
    token count and format of the weights to plan (default: as stored)."""

    source: Any = field(default=None, kw_only=False)
    device: Annotated[
        str | Sequence[str] | None,
        _cluster(
            "--device", metavar="NAME,...", accepts=_DEVICES, repeat=True, completes="devices", daily=True,
            help="Accelerators such as h100,mi300x; list shows all known ones. [default: h100]",
        ),
    ] = field(default=None, kw_only=False)  # fmt: skip
    tp: Annotated[
        Counts,
        _cluster(
            "--tp", "--tensor-parallel", metavar="N,...", accepts=COUNTS, repeat=True, daily=True,
            help="Split every d_ff over N devices. [default: 1,2,4,8]",
        ),
    ] = field(default=(1, 2, 4, 8), kw_only=False)  # fmt: skip
    ep: Annotated[
        Counts,
        _cluster(
            "--ep", "--expert-parallel", metavar="N,...", accepts=COUNTS, repeat=True, daily=True,
            help="Split experts and tokens over N groups of devices. [default: 1]",
        ),
    ] = field(default=(1,), kw_only=False)  # fmt: skip
    tokens: TokenList = field(default=None, kw_only=False)
    dtype: Annotated[
        str | Sequence[str] | None,
        Opt(
            "--dtype", metavar="NAME,...", accepts=FORMATS, repeat=True, group=COMPUTE, daily=True,
            completes="dtypes stored",
            help="Format of the weights: bf16, fp8, q4_0, ... [default: as released or stored]",
        ),
    ] = field(default=None, kw_only=False)  # fmt: skip
    skew: Annotated[
        str,
        _cluster(
            "--skew", metavar="NAME", completes="skews",
            help="Popularity of a mixture's experts: uniform, or zipf:1.2.",
        ),
    ] = field(default=UNIFORM, kw_only=False)  # fmt: skip
    dispatch: Annotated[
        str | None,
        _cluster(
            "--dispatch", metavar="fp8|bf16", accepts=choice("fp8", "bf16"),
            help="Format in which tokens are sent to experts. [default: fp8 if these compute in fp8 or fp4]",
        ),
    ] = field(default=None, kw_only=False)  # fmt: skip
    rows_per: Annotated[
        Literal["rank", "choice"],
        _cluster(
            "--rows-per", metavar="rank|choice", accepts=choice("rank", "choice"),
            help="Send a token once to each rank that holds some of its experts, or once for each of its experts.",
        ),
    ] = field(default="rank", kw_only=False)  # fmt: skip
    overlap_shared: Annotated[
        bool,
        _cluster("--overlap-shared", help="Run shared experts during the all-to-alls."),
    ] = field(default=False, kw_only=False)  # fmt: skip
    batch: Batch = None
    seq_len: SeqLen = None

    def __post_init__(self) -> None:
        """Convert the options, and check devices, formats and tokens before any model is loaded."""
        super().__post_init__()
        check(_DEPLOYED, self)
        _ = self.devices, self.formats, self.token_counts

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the accelerators without duplicates."""
        names = listed(self.device)
        words = [name for name in names if name.lower() != CPU] if names != ("list",) else []
        return tuple({one.name: one for one in (named(word, option("device")) for word in words)}.values())

    @property
    def cpu(self) -> bool:
        """Return whether the measured CPU is among the devices."""
        return any(name.lower() == CPU for name in listed(self.device))

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Return the token counts without duplicates."""
        return tuple(dict.fromkeys(token_counts(self.tokens, self.batch, self.seq_len) or (1, 4096)))

    @property
    def formats(self) -> tuple[str | None, ...]:
        """Return the names of the formats without duplicates; None means the stored format."""
        names = dict.fromkeys(storage(name, option("dtype")).name for name in listed(self.dtype))
        return tuple(names) or (None,)

    @property
    def splits(self) -> tuple[Ranks, ...]:
        """Combine every tp with every ep; splits with fewer devices come first."""
        grid = {Ranks(tp, ep) for tp in listed(self.tp) for ep in listed(self.ep)}
        return tuple(sorted(grid, key=lambda ranks: (ranks.world_size, ranks.ep)))

    def planners(self, resolved: Resolved) -> list[Planner]:
        """Build a planner for each format. Raises FFNError if a format does not fit the weights' rows."""
        if "top_k" in resolved.model.unknown:
            raise FFNError(
                f"{resolved.model.name} does not specify its top_k, so its work is unknown",
                f"pass {option('top_k', 2)}",
            )
        skew = skew_text(option("skew"), self.skew)
        asked = [name for name in _OF_MIXTURES if name in given(self)] if skew == UNIFORM else ["skew"]
        if asked and not any(group.spec.moe for group in resolved.model.groups):
            raise FFNError(f"{option(asked[0])} needs a mixture of experts, but {resolved.model.name} is not one")
        planners = []
        for name in self.formats:
            weights = storage_of(resolved, name)
            others = other_bytes(count(resolved, name))
            how = (self.dispatch, self.rows_per, self.overlap_shared, self.nodes, self.price)
            planners.append(Planner(resolved.model, weights, others, skew, *how))
        return planners


def other_bytes(counted: ModelCount) -> int | None:
    """Return the bytes of a model's weights outside its FFNs, as `ffn params` counts them; None if unknown."""
    if counted.model_weight_bytes is None or counted.weight_bytes is None:
        return None
    return counted.model_weight_bytes - counted.weight_bytes


def plan_model(resolved: Resolved, question: PlanQuestion, speeds: Mapping[str, Speeds] | None = None) -> ClusterPlan:
    """Plan one model; `speeds` are measured rates by device, which replace the data sheet's rates.

    A CPU requires measured rates, and at least one device with measured rates must be planned. If no combination can be
    planned, the error gives the first reason.
    """
    planners, speeds = question.planners(resolved), speeds or {}
    if question.device is None:
        question = replace(question, device=tuple(speeds) or "h100")
    names = [*(device.name for device in question.devices), *([CPU] if question.cpu else [])]
    if question.cpu and CPU not in speeds:
        what = f"{option('device', CPU)} needs {option('measured', 'FILE')}"
        raise FFNError(what, "a file of times measured on that CPU with ffn bench --save FILE")
    if speeds and not set(speeds) & set(names):
        what = f"{option('measured')} has no times for {', '.join(names)}"
        raise FFNError(what, f"it has times for {', '.join(speeds)}")
    if set(names) <= set(speeds):
        check(_OF_THE_SHEET, given(question) | {"measured": True})
    taken = tuple(assumed(device, question, device.name in speeds) for device in question.devices)
    clusters = [
        cluster_of(device, one, speeds.get(device.name)) for device, one in zip(question.devices, taken, strict=True)
    ]
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
    """Plan on these clusters."""
    tokens = question.token_counts
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
    crossings = [
        crossing
        for cluster in clusters for planner in planners if len(tokens) > 1
        for crossing in [_crossing(planner, cluster, rows, best)] if crossing
    ]  # fmt: skip
    others = (would_fit(planners, cluster, tokens) for cluster, row in zip(clusters, best, strict=True) if row is None)
    return ClusterPlan(
        resolved.model.name,
        question.skew,
        whole=any(planner.other_bytes is not None for planner in planners),
        rows=rows,
        cheapest=tuple(filter(None, best)),
        would_fit=tuple(filter(None, others)),
        assumed=taken,
        crossings=tuple(crossings),
    )


def _crossing(
    planner: Planner, cluster: Accelerators, rows: Sequence[PlanRow], best: Sequence[PlanRow | None]
) -> Crossing | None:
    """Return where a device and format become bound by compute; None if every split was refused."""
    planned_rows = [
        row for row in rows if (row.device, row.dtype) == (cluster.device, planner.weights.name) and not row.refused
    ]
    row = next(
        (one for one in best if one is not None and one in planned_rows), planned_rows[0] if planned_rows else None
    )
    if row is None:
        return None
    turn = planner.compute_bound_from(cluster, Ranks(row.tp, row.ep))
    return Crossing(row.device, row.dtype, row.tp, row.ep, turn)


def cheapest(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the cheapest split among one device's rows; None if no split is known to fit."""
    splits: dict[tuple[str, int, int], list[PlanRow]] = {}
    for row in rows:
        splits.setdefault((row.dtype, row.tp, row.ep), []).append(row)
    fitting = [alike[0] for alike in splits.values() if all(row.fits for row in alike)]
    return min(fitting, key=lambda row: (row.devices, row.time_s or 0.0), default=None)


def would_fit(planners: Sequence[Planner], cluster: Accelerators, tokens: Sequence[int]) -> PlanRow | None:
    """Find the cheapest split among powers of two, up to 1,024 devices; None if no split is known to fit."""
    if cluster.memory_bytes is None:
        return None
    splits = {ranks for planner in planners for ranks in planner.splits() if ranks.world_size <= _MOST_DEVICES}
    devices = attrgetter("world_size")
    for _, alike in groupby(sorted(splits, key=devices), key=devices):
        rows = [planner.row(cluster, ranks, n) for ranks in alike for planner in planners for n in tokens]
        if best := cheapest(rows):
            return best
    return None
