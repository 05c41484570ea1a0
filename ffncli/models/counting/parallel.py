"""Compute what each rank stores and sends when a model's FFN blocks are split over ranks (`block/shard.py`).

Tensor parallelism splits every d_ff: in dense blocks, in every expert, and in the shared experts. gate and up become
column-parallel (their outputs are split), down becomes row-parallel (its inputs are split). Every rank has a copy of
the router, the norms and an activation's learned parameters; the bias of down stays on rank 0.

Expert parallelism splits the experts over ranks, and each rank starts with its own tokens. Each layer has two
all-to-alls: dispatch sends a token's row to the rank of each chosen expert, and combine returns the results. Byte
counts are expected values with all experts equally likely; tokens for an expert on the same rank are not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from ffncli.block.cost import Cost, cost
from ffncli.block.dtypes import DType, activation_dtype, parameter_bytes, weight_bytes
from ffncli.block.shard import Ranks, divisors, nearest
from ffncli.block.steps import (
    AllReduce,
    Axis,
    Experts,
    Route,
    Step,
    experts_per_token,
    input_shapes,
    parameters,
    shapes,
    untied_parameters,
)
from ffncli.errors import FFNError, option
from ffncli.models.counting.traffic import steps_of
from ffncli.models.model import Group, Model
from ffncli.show.text import plural


@dataclass(frozen=True)
class Slice:
    """One parameter tensor and one rank's part of it, with torch's shapes.

    `place` is how the tensor is split: `column` (outputs), `row` (inputs), `copied` to every rank, `rank 0` (only on
    the first tensor-parallel rank), `experts` (each rank has whole experts) or `experts, column` (each rank has a part
    of some experts). `params` and `bytes` are for one rank that stores a part.
    """

    name: str
    shape: tuple[int, ...]
    rank_shape: tuple[int, ...]
    place: str
    params: int
    bytes: int


@dataclass(frozen=True)
class GroupSplit:
    """Layers with equal steps: parameters (without norms) and bytes of one layer, on rank 0 and on every other rank.

    `d_ff` and `shared_d_ff` are one rank's part. `all_reduces` counts the reductions in one layer; `reduced_bytes` is
    their size per token; `ring_all_reduce_bytes` and `all_gather_bytes` are what one rank sends.
    """

    stack: str
    layers: tuple[int, ...]
    d_ff: int
    shared_d_ff: int
    rank_0_params: int
    other_rank_params: int
    rank_0_weight_bytes: int
    other_rank_weight_bytes: int
    all_reduces: int
    reduced_bytes: int
    ring_all_reduce_bytes: float
    all_gather_bytes: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Split:
    """A model split over `ranks` tensor-parallel ranks times `expert_ranks` expert-parallel ranks.

    `*_per_token` is what one rank sends for one layer of the main group. `*_total` covers all layers: a rank's
    parameters and weight bytes, and what it sends for `tokens` tokens. `whole_params_total` is the total without a
    split.
    """

    name: str
    ranks: int
    dtype: str
    activation_dtype: str
    tokens: int
    layers: int | None
    d_ff: int
    whole_params_total: int
    rank_0_params_total: int
    other_rank_params_total: int
    rank_0_weight_bytes_total: int
    other_rank_weight_bytes_total: int
    ring_all_reduce_bytes_per_token: float
    all_gather_bytes_per_token: int
    ring_all_reduce_bytes_total: float
    all_gather_bytes_total: int
    groups: tuple[GroupSplit, ...]
    expert_ranks: int = 1


def split(model: Model, ranks: int, weights: DType, tokens: int = 1, ep: int = 1) -> Split:
    """Split the model over `ranks` tensor-parallel times `ep` expert-parallel ranks, with weights in this format.

    Raises FFNError if widths do not divide, if a norm spans d_ff, or if the format does not fit the unsplit tensors.
    """
    check_ranks(model, Ranks(ranks, ep), weights)
    groups = tuple(_group(group, Ranks(ranks, ep), weights) for group in model.groups)
    main = next(split for split, group in zip(groups, model.groups, strict=True) if group is model.main)
    times = [len(group.layers) for group in groups]

    def total(field: str) -> int:
        return sum(getattr(group, field) * n for group, n in zip(groups, times, strict=True))

    runs = [n * group.runs for n, group in zip(times, model.groups, strict=True)]
    sent = tokens * sum(one.reduced_bytes * n for one, n in zip(groups, runs, strict=True))
    return Split(
        name=model.name,
        ranks=ranks,
        dtype=weights.name,
        activation_dtype=activation_dtype(weights).name,
        tokens=tokens,
        layers=model.layer_count,
        d_ff=main.d_ff,
        whole_params_total=sum((cost(g.steps).times(len(g.layers)) for g in model.groups), Cost()).params,
        rank_0_params_total=total("rank_0_params"),
        other_rank_params_total=total("other_rank_params"),
        rank_0_weight_bytes_total=total("rank_0_weight_bytes"),
        other_rank_weight_bytes_total=total("other_rank_weight_bytes"),
        ring_all_reduce_bytes_per_token=main.ring_all_reduce_bytes,
        all_gather_bytes_per_token=main.all_gather_bytes,
        ring_all_reduce_bytes_total=ring_all_reduce_bytes(sent, ranks),
        all_gather_bytes_total=all_gather_bytes(sent, ranks),
        groups=groups,
        expert_ranks=ep,
    )


def rank_counts(model: Model, weights: DType) -> tuple[int, ...]:
    """Return every rank count over which all widths divide into whole blocks, in ascending order.

    A slice of down is cut along its rows, so each rank's part of d_ff must consist of whole blocks of the format. Empty
    if even the unsplit d_ff does not consist of whole blocks.
    """
    if any(group.spec.sub_norm for group in model.groups):
        return (1,)
    common = gcd(*(size for _, size in _widths(model)))
    return divisors(common // weights.block) if common % weights.block == 0 else ()


def check_ranks(model: Model, ranks: Ranks, weights: DType) -> None:
    """Raise FFNError for an impossible split; the hint names the nearest rank counts that are possible."""
    _check_widths(model, ranks.tp, weights)
    _check_experts(model, ranks.ep)


def _check_widths(model: Model, ranks: int, weights: DType) -> None:
    possible = rank_counts(model, weights)
    if ranks in possible:
        return
    hint = nearest(ranks, possible) or "choose another --dtype"
    for name, size in _widths(model):
        if size % ranks:
            raise FFNError(f"{name} = {size} does not divide over {ranks} ranks", hint)
        if size // ranks % weights.block:
            raise FFNError(
                f"{name} = {size} over {ranks} {plural('rank', ranks)} is {size // ranks} per rank, not a multiple"
                f" of {weights.name}'s block size {weights.block}",
                hint,
            )
    raise FFNError("a norm covers d_ff, so it cannot be split over ranks", hint)


def ring_all_reduce_bytes(size: int, ranks: int) -> float:
    """Count the bytes that each rank sends to sum `size` bytes over a ring, averaged over ranks: 2 (n - 1) / n × size.

    The ring does a reduce-scatter and an all-gather of n - 1 rounds each; in each round, every rank passes on one n-th
    part (Patarasuk and Yuan 2009).
    """
    return _each(2 * (ranks - 1) * size, ranks)


def _each(size: int, ranks: int) -> float:
    """Divide bytes among ranks; return an int if they divide evenly, so that the result prints as an integer."""
    sent, part = divmod(size, ranks)
    return sent + part / ranks if part else sent


def all_gather_bytes(size: int, ranks: int) -> int:
    """Count the bytes that each rank sends to copy its `size` bytes to every other rank: (n - 1) × size."""
    return (ranks - 1) * size


def _group(group: Group, grid: Ranks, weights: DType) -> GroupSplit:
    first, other = (steps_of(group, rank, grid) for rank in (0, grid.tp - 1))
    ranks = grid.tp
    reduced = reduced_bytes(first, activation_dtype(weights))
    return GroupSplit(
        stack=group.stack,
        layers=group.layers,
        d_ff=group.spec.d_ff // ranks,
        shared_d_ff=group.spec.shared_width // ranks,
        rank_0_params=cost(first).params,
        other_rank_params=cost(other).params,
        rank_0_weight_bytes=weight_bytes(first, weights),
        other_rank_weight_bytes=weight_bytes(other, weights),
        all_reduces=len(reduced),
        reduced_bytes=sum(reduced),
        ring_all_reduce_bytes=ring_all_reduce_bytes(sum(reduced), ranks),
        all_gather_bytes=all_gather_bytes(sum(reduced), ranks),
        slices=slices(group.steps, first, other, weights, grid),
    )


def slices(
    whole: Sequence[Step], first: Sequence[Step], other: Sequence[Step], dtype: DType, grid: Ranks
) -> tuple[Slice, ...]:
    """Return the slice of every parameter, from the steps of the first and the last tensor-parallel rank."""
    parts, elsewhere = parameters(first), parameters(other)
    out = []
    for name, axes in untied_parameters(whole).items():
        part = parts[name]
        place = _place(axes) if name in elsewhere else "rank 0"
        if grid.tp == 1 and grid.ep > 1:  # d_ff is not split
            place = "copied"
        if grid.ep > 1 and axes[0].size != part[0].size and axes[0].name == "experts":
            place = "experts" if place == "copied" else f"experts, {place}"
        shape, rank_shape = (tuple(axis.size for axis in several) for several in (axes, part))
        out.append(Slice(name, shape, rank_shape, place, prod(rank_shape), parameter_bytes(name, part, dtype)))
    return tuple(out)


def _place(axes: tuple[Axis, ...]) -> str:
    names = [axis.name for axis in axes]
    if "d_ff" not in names:
        return "copied"
    return "row" if names[-2:] in (["d_model", "d_ff"], ["latent", "d_ff"]) else "column"


def reduced_bytes(steps: tuple[Step, ...], activations: DType) -> list[int]:
    """Count the bytes of each tensor that is reduced over ranks for one token, summed over its chosen experts."""
    known = shapes(steps, input_shapes(steps, (1,)))
    top_k = {step.output: step.op.top_k for step in steps if isinstance(step.op, Route)}
    out = []
    for step in steps:
        if isinstance(step.op, AllReduce):
            out.append(prod(known[step.output]) * activations.block_bytes)
        elif isinstance(step.op, Experts):
            out += [top_k[step.inputs[1]] * size for size in reduced_bytes(step.op.program, activations)]
    return out


def _widths(model: Model) -> list[tuple[str, int]]:
    """Return the widths that a split divides, with their names in error messages."""
    specs = [group.spec for group in model.groups]
    return [("d_ff", spec.d_ff) for spec in specs] + [
        ("shared d_ff", spec.shared_width) for spec in specs if spec.shared_width
    ]


@dataclass(frozen=True)
class GroupExchange:
    """Layers with equal steps: `experts` per rank, and the bytes that a rank sends for each of its own tokens."""

    stack: str
    layers: tuple[int, ...]
    experts: int
    top_k: int
    dispatch_bytes: float
    combine_bytes: float


@dataclass(frozen=True)
class ExpertExchange:
    """A model's mixtures over `ranks` expert-parallel ranks, each of which starts with `tokens` tokens.

    `experts`, `top_k`, `all_to_alls` and `*_per_token` describe one layer of the most common kind with experts;
    `layers` counts all layers with experts. `tokens_per_expert` is a mean. `*_total` is what one rank sends in all
    layers for all its tokens. Bytes are in `activation_dtype`.
    """

    name: str
    ranks: int
    activation_dtype: str
    tokens: int
    layers: int
    experts: int
    top_k: int
    tokens_per_expert: float
    all_to_alls: int
    dispatch_bytes_per_token: float
    combine_bytes_per_token: float
    dispatch_bytes_total: float
    combine_bytes_total: float
    groups: tuple[GroupExchange, ...]


def exchange(model: Model, ranks: int, weights: DType, tokens: int = 1) -> ExpertExchange:
    """Count the bytes that expert-parallel ranks send to each other. Raises FFNError if top_k is unknown."""
    _check_experts(model, ranks)
    if "top_k" in model.unknown:
        what = f"{model.name} does not specify its top_k, so its all-to-alls are unknown"
        raise FFNError(what, f"pass {option('top_k', 2)}")
    mixed = [group for group in model.groups if group.spec.moe]
    groups = [_group_exchange(group, ranks, activation_dtype(weights)) for group in mixed]
    times = [len(group.layers) * group.runs for group in mixed]
    main = groups[times.index(max(times))]
    return ExpertExchange(
        name=model.name,
        ranks=ranks,
        activation_dtype=activation_dtype(weights).name,
        tokens=tokens,
        layers=sum(len(group.layers) for group in mixed),
        experts=main.experts,
        top_k=main.top_k,
        tokens_per_expert=tokens * main.top_k / main.experts,
        all_to_alls=2,
        dispatch_bytes_per_token=main.dispatch_bytes,
        combine_bytes_per_token=main.combine_bytes,
        dispatch_bytes_total=sum(one.dispatch_bytes * n * tokens for one, n in zip(groups, times, strict=True)),
        combine_bytes_total=sum(one.combine_bytes * n * tokens for one, n in zip(groups, times, strict=True)),
        groups=tuple(groups),
    )


def expert_rank_counts(model: Model) -> tuple[int, ...]:
    """Return every rank count that divides the experts of all mixtures; only 1 if there are no mixtures."""
    return divisors(gcd(*(group.spec.moe.experts for group in model.groups if group.spec.moe)) or 1)


def _check_experts(model: Model, ranks: int) -> None:
    if ranks == 1:
        return
    mixtures = [group.spec.moe for group in model.groups if group.spec.moe]
    if not mixtures:
        raise FFNError(f"{model.name} has no experts to split over {ranks} ranks", f"{option('tp')} splits its d_ff")
    for moe in mixtures:
        if moe.experts % ranks:
            what = f"experts = {moe.experts} does not divide over {ranks} ranks"
            raise FFNError(what, nearest(ranks, expert_rank_counts(model)))


def exchanged(steps: Sequence[Step]) -> tuple[int, int]:
    """Count the values of a token that are sent to its experts and the values that are returned, even if an expert is
    on the token's own rank."""
    known, taken = shapes(steps, input_shapes(steps, (1,))), experts_per_token(steps)
    routed = [step for step in steps if isinstance(step.op, Experts) and not step.op.always]
    sent = sum(taken[step.output] * known[step.inputs[0]][-1] for step in routed)
    return sent, sum(taken[step.output] * known[step.output][-1] for step in routed)


def all_to_all_bytes(size: int, ranks: int) -> float:
    """Count the bytes that a rank sends to other ranks out of `size` bytes of rows: (n - 1) / n × size, since every
    rank is an equally likely destination."""
    return _each((ranks - 1) * size, ranks)


def _group_exchange(group: Group, ranks: int, activations: DType) -> GroupExchange:
    moe = group.spec.moe
    assert moe is not None
    dispatch, combine = (all_to_all_bytes(n * activations.block_bytes, ranks) for n in exchanged(group.steps))
    return GroupExchange(group.stack, group.layers, moe.experts // ranks, moe.top_k, dispatch, combine)
