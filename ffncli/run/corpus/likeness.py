"""Which units of a layer are alike by their weights, and which experts by their weights and by their outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps
from ffncli.models.model import Layer
from ffncli.run.engine.trace import UnitEvents

_MOST_PAIRS = 100
_ROWS = 2048  # compared with all others at a time


@dataclass(frozen=True)
class SimilarPair:
    """Two units of one layer (and expert) that read the same, so that they are active together: `cosine_in` is the
    least cosine of their rows of gate and up (for up, either sign), `cosine_out` that of the vectors they write."""

    part: str
    expert: int | None
    first: int
    second: int
    cosine_in: float
    cosine_out: float


@dataclass(frozen=True)
class SimilarExperts:
    """Two experts: the cosine of all their `weights`, unit by unit, and the mean cosine of their `outputs` over the
    `tokens` that are routed to both (None if there are none)."""

    first: int
    second: int
    weights: float
    outputs: float | None
    tokens: int


def similar_units(layer: Layer, weights: Mapping[str, Tensor], least: float) -> tuple[SimilarPair, ...]:
    """Return the pairs of units with a `cosine_in` of at least `least`, the most similar first; at most 100."""
    unit_events, out = UnitEvents(ffn_steps(steps(layer.spec))), list[SimilarPair]()
    for group in unit_events.groups:
        rows = [functional.normalize(one.float(), dim=-1) for one in unit_events.rows(group, weights)]
        written = functional.normalize(unit_events.columns(group, weights).float().T, dim=-1)
        for start in range(0, len(written), _ROWS):
            piece = slice(start, start + _ROWS)
            cosine = rows[0][piece] @ rows[0].T
            for other in rows[1:]:
                cosine = torch.minimum(cosine, (other[piece] @ other.T).abs())
            cosine = torch.triu(cosine, start + 1)
            values, order = cosine.flatten().topk(min(_MOST_PAIRS, cosine.numel()))
            for value, at in zip(values.tolist(), order.tolist(), strict=True):
                first, second = divmod(at, len(written))
                if value >= least:
                    writes = float(written[start + first] @ written[second])
                    expert = group.expert if group.experts > 1 else None
                    out.append(SimilarPair(group.part, expert, start + first, second, value, writes))
    return tuple(sorted(out, key=lambda one: -one.cosine_in)[:_MOST_PAIRS])


def add_cosines(sums: Tensor, outputs: Sequence[tuple[int, Tensor, Tensor]], tokens: int) -> None:
    """Add to `sums` [experts, experts] the cosines of the outputs of two experts for the same token.

    `outputs` are triples (expert, its tokens among the batch's `tokens`, its outputs [tokens, d_model] of length 1).
    """
    taken = torch.zeros(tokens, dtype=torch.int64)
    for _, rows, _ in outputs:
        taken[rows.cpu()] += 1
    most, width = int(taken.max()), outputs[0][2].shape[-1]
    every, who = torch.zeros(tokens, most, width, dtype=torch.float64), torch.zeros(tokens, most, dtype=torch.int64)
    taken.zero_()
    for expert, rows, values in outputs:
        at = rows.cpu()
        every[at, taken[at]], who[at, taken[at]] = values.cpu(), expert
        taken[at] += 1
    cosines = every @ every.transpose(1, 2)  # rows of zeros, where a token has fewer experts, add nothing
    pairs = who[:, :, None] * len(sums) + who[:, None, :]
    sums.view(-1).index_add_(0, pairs.flatten(), cosines.flatten())


def similar_experts(
    layer: Layer, weights: Mapping[str, Tensor], cosines: Tensor, together: Tensor, least: float
) -> tuple[SimilarExperts, ...]:
    """Return the pairs of experts whose weights or outputs have at least this cosine, the most similar first.

    `cosines` and `together` [experts, experts] are the sums of the cosines, and the tokens that chose both.
    """
    unit_events = UnitEvents(ffn_steps(steps(layer.spec)))
    groups = [group for group in unit_events.groups if group.experts > 1]
    flat = [
        torch.cat([one.flatten().float() for one in (*unit_events.rows(group, weights),
                                                     unit_events.columns(group, weights))])
        for group in groups
    ]  # fmt: skip
    rows = functional.normalize(torch.stack(flat), dim=-1)
    alike = (rows @ rows.T).double().cpu()
    out = []
    for first in range(len(rows)):
        for second in range(first + 1, len(rows)):
            tokens = int(together[first, second])
            outputs = float(cosines[first, second]) / tokens if tokens else None
            if max(float(alike[first, second]), outputs or -1.0) >= least:
                out.append(SimilarExperts(first, second, float(alike[first, second]), outputs, tokens))
    return tuple(sorted(out, key=lambda one: -max(one.weights, one.outputs or -1.0))[:_MOST_PAIRS])
