"""Model → what each rank sends when its experts are split over n ranks (`block/shard.py`): two all-to-alls a layer.

Every rank enters its own tokens. A row goes to the rank of each expert that its token chose (dispatch), the results
come back (combine). Bytes are expected where every expert is equally likely; a choice of the rank's own experts sends
nothing. What each rank stores is in `tensor_parallel.Split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.shard import divisors, nearest
from ffncli.block.steps import Experts, Step, experts_per_token, input_shapes, shapes
from ffncli.errors import FFNError, option
from ffncli.models.model import Group, Model


@dataclass(frozen=True)
class GroupExchange:
    """Layers with equal steps. `experts` are one rank's; the bytes are sent by one rank per token that it enters."""

    stack: str
    layers: tuple[int, ...]
    experts: int
    top_k: int
    dispatch_bytes: float
    combine_bytes: float


@dataclass(frozen=True)
class ExpertExchange:
    """A model's mixtures over `ranks` expert-parallel ranks, each of which enters `tokens` tokens.

    `experts`, `top_k` and the bytes `*_per_token` are of one layer with experts, of the commonest kind; `layers` counts
    such layers of any kind. `tokens_per_expert` is the mean. Bytes are sent by one rank, `*_total` in all layers for
    all tokens, in `activation_dtype`. `all_to_alls` are those of one layer.
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
    """What is sent between the ranks of the model's experts.

    Raises FFNError as `check` does, and where nothing says how many experts a token chooses.
    """
    check(model, ranks)
    if "top_k" in model.unknown:
        raise FFNError(f"{model.name} does not say its top_k, so its all-to-alls are not known", "pass --top-k 2")
    mixed = [group for group in model.groups if group.spec.moe]
    groups = [_group(group, ranks, activation_dtype(weights)) for group in mixed]
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
    """Every number of ranks that divides the experts of all mixtures, ascending; 1 alone without any."""
    return divisors(gcd(*(group.spec.moe.experts for group in model.groups if group.spec.moe)) or 1)


def check(model: Model, ranks: int) -> None:
    """Raises FFNError for an impossible split of the experts, with the nearest numbers of ranks that would do."""
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
    """(values that a token sends to its experts, values that it gets back), wherever those are."""
    known, taken = shapes(steps, input_shapes(steps, (1,))), experts_per_token(steps)
    routed = [step for step in steps if isinstance(step.op, Experts) and not step.op.always]
    sent = sum(taken[step.output] * known[step.inputs[0]][-1] for step in routed)
    return sent, sum(taken[step.output] * known[step.output][-1] for step in routed)


def all_to_all_bytes(size: int, ranks: int) -> float:
    """The bytes that a rank sends of `size` bytes of rows, each equally likely for any rank: (n - 1) / n × size."""
    sent, part = divmod((ranks - 1) * size, ranks)
    return sent + part / ranks if part else sent  # whole bytes print as such


def _group(group: Group, ranks: int, activations: DType) -> GroupExchange:
    assert group.spec.moe is not None
    dispatch, combine = (all_to_all_bytes(n * activations.block_bytes, ranks) for n in exchanged(group.steps))
    moe = group.spec.moe
    return GroupExchange(group.stack, group.layers, moe.experts // ranks, moe.top_k, dispatch, combine)
