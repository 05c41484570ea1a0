"""Routing as --routing prescribes it, through x alone: kernels need not know of it.

A router's logits are x Rᵀ + b, so x' = x + (l - x Rᵀ - b) · pinv(R)ᵀ is the nearest x with the logits l, if d_model is
at least the number of experts (else its logits are the nearest to l). l are the logits that x had anyway, exchanged
among the experts, so that their distribution stays: the wanted experts get the largest, and a small lift, so that no
rounding decides. What the router then chooses is counted, never assumed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.bench.records import Case
from ffncli.bench.request.data import TEXT, traced_routes
from ffncli.block.steps import Axis, Route, Step
from ffncli.errors import FFNError
from ffncli.models.counting.expert_load import UNIFORM, zipf_exponent
from ffncli.run.engine.execute import function
from ffncli.run.engine.reference import output_and_experts, routing_steps
from ffncli.show.text import percent

_LIFT = 0.05  # of the range of a token's logits, and at least that
Draw = Callable[[int, torch.Generator], Tensor]  # (tokens, generator) → the experts of each, booleans [tokens, experts]


class PrescribedRouting:
    """Where the tokens of a case go, and the x that makes its router send them there. Weights are canonical."""

    def __init__(self, case: Case, steps: Sequence[Step], weights: Mapping[str, Tensor]) -> None:
        self._steps = routing_steps(steps)
        self._weights = {name: weights[name] for step in self._steps for name in step.parameters()}
        step = self._steps[-1]
        assert isinstance(step.op, Route)
        if step.op.lookup:
            raise FFNError("--routing: a table of token ids chooses the experts of this layer", "time another layer")
        self._choosable = step.op.experts.size - step.op.always
        self._op = replace(step.op, experts=Axis("experts", self._choosable), always=0)
        (self._entry, *_) = self._steps[0].inputs
        weight, bias = (self._weights.get(f"router.{name}") for name in ("weight", "bias"))
        assert weight is not None
        weight, bias = weight[: self._choosable], bias if bias is None else bias[: self._choosable]
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._router, self._bias = weight.to(wide), None if bias is None else bias.to(wide)
        self._inverse = _inverse(weight).to(wide)
        self._draw = _draw_of(case, self._op)
        self._sizes = case.spec.moe.experts if case.spec.moe else 0, case.spec.d_model

    def draw(self, tokens: int, generator: torch.Generator) -> Tensor:
        """The experts that so many tokens are to go to, booleans [tokens, experts]; others at every call."""
        return self._draw(tokens, generator).to(self._router.device)

    def new_load(self) -> ExpertLoad:
        """A count for this case, of the experts that have weights."""
        return ExpertLoad(*self._sizes)

    def counted(self, x: Tensor) -> ExpertLoad:
        """Where the tokens of one x go."""
        load = self.new_load()
        load.add(self.chosen(x))
        return load

    @torch.no_grad()
    def entered(self, x: Tensor, wanted: Tensor) -> Tensor:
        """x [tokens, d_model], moved as little as sends its tokens to the wanted experts, in its dtype."""
        wide = x.to(self._router.dtype)
        logits = functional.linear(wide, self._router, self._bias)
        moved = (_wanted_logits(self._op, logits, wanted) - logits) @ self._inverse
        return (wide + moved).to(x.dtype)

    @torch.no_grad()
    def chosen(self, x: Tensor) -> Tensor:
        """The experts that the router itself chooses, booleans [tokens, experts]."""
        chosen = output_and_experts(self._steps, self._weights, {self._entry: x})[1]
        assert chosen is not None
        return chosen[:, : self._choosable]


class ExpertLoad:
    """How many tokens the experts received, over many calls. Sums stay on the device until they are read."""

    def __init__(self, experts: int = 0, d_model: int = 0) -> None:
        self._experts, self._d_model = experts, d_model  # experts that have weights: any others return the token
        self._calls = 0
        self._received: Tensor | None = None  # [experts + 2]: then the experts touched, the tokens that went elsewhere
        self._tokens = 0

    def add(self, chosen: Tensor, wanted: Tensor | None = None) -> None:
        """One call's experts and those that were wanted, booleans [tokens, experts]."""
        received = chosen[:, : self._experts].sum(0)
        touched = (received > 0).sum()
        elsewhere = torch.zeros_like(touched) if wanted is None else (chosen != wanted).any(1).sum()
        sums = torch.cat([received, touched[None], elsewhere[None]])
        self._received = sums if self._received is None else self._received + sums
        self._calls, self._tokens = self._calls + 1, self._tokens + len(chosen)

    @property
    def tokens_per_expert(self) -> tuple[float, ...]:
        """The mean of a call; empty before the first."""
        return self._means[:-2]

    @property
    def touched(self) -> float | None:
        """How many experts received any token, the mean of a call."""
        return self._means[-2] if self._means else None

    @property
    def elsewhere(self) -> float:
        """The share of the tokens that went to other experts than were wanted."""
        return self._means[-1] * self._calls / self._tokens if self._tokens else 0.0

    @property
    def note(self) -> str:
        """What a user should know where tokens did not go where they should; else empty."""
        if not self.elsewhere:
            return ""
        small = self._d_model < self._experts
        why = f": d_model {self._d_model} is too small for {self._experts} experts" if small else ""
        return f"{percent(self.elsewhere, 2)} of the tokens went to other experts than --routing prescribes{why}"

    @property
    def _means(self) -> tuple[float, ...]:
        totals: list[int] = [] if self._received is None else self._received.tolist()
        return tuple(total / self._calls for total in totals)


def _inverse(router: Tensor) -> Tensor:
    """pinv(R)ᵀ [experts, d_model] in float64, by the small matrix R Rᵀ."""
    wide = router.double()
    inverse: Tensor = torch.linalg.pinv(wide @ wide.T, hermitian=True) @ wide
    return inverse


# --- logits -----------------------------------------------------------------------------------------------------------


def _wanted_logits(op: Route, logits: Tensor, wanted: Tensor) -> Tensor:
    """A token's logits exchanged among the experts, so that exactly the wanted ones are chosen.

    Scores grow with their logit, and a correction of the choice is 0 in random weights. If only the experts of some
    groups may be chosen, the groups of the wanted ones are lifted above the others first.
    """
    outside = torch.zeros_like(wanted)
    if op.top_groups < op.groups:
        logits_of, wanted_of = (tensor.reshape(len(tensor), op.groups, -1) for tensor in (logits, wanted))
        used = wanted_of.any(-1)
        values = _exchanged(_groups_exchanged(op, logits_of, used), wanted_of).flatten(-2)
        outside = (~used)[..., None].expand_as(wanted_of).flatten(-2)
    else:
        values = _exchanged(logits, wanted)
    lowest = values.masked_fill(~wanted, math.inf).amin(-1, keepdim=True)
    highest = values.masked_fill(wanted, -math.inf).amax(-1, keepdim=True)
    lift = _LIFT * (1 + values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True))
    return values + wanted * ((highest - lowest).clamp(min=0) + lift) - outside * lift


def _groups_exchanged(op: Route, logits: Tensor, used: Tensor) -> Tensor:
    """Logits [tokens, groups, experts] with the groups in another order: the best ones are at those that are used."""
    softmax = op.score == "softmax"
    scores = logits.flatten(-2).softmax(-1).reshape(logits.shape) if softmax else function(op.score)(logits)
    best = scores.topk(min(op.group_best, scores.shape[-1]), -1).values.sum(-1)
    places, falling = (order[..., None].expand_as(logits) for order in (_order(best, used), best.argsort(-1, True)))
    return torch.empty_like(logits).scatter(-2, places, logits.gather(-2, falling))


def _exchanged(values: Tensor, first: Tensor) -> Tensor:
    """The values [..., n] in another order: the largest are at those that are `first`, which keep their order."""
    largest = values.sort(-1, descending=True).values
    return torch.empty_like(values).scatter(-1, _order(values, first), largest)


def _order(values: Tensor, first: Tensor) -> Tensor:
    """Indices by falling value, those that are `first` before the others."""
    spread = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True) + 1
    return (values + first * spread).argsort(-1, descending=True)


# --- the wanted experts -----------------------------------------------------------------------------------------------


def _draw_of(case: Case, op: Route) -> Draw:
    exponent = zipf_exponent(case.routing)
    if case.routing == UNIFORM:
        return lambda tokens, generator: balanced(op, tokens, generator)
    if exponent is None:
        is_text, experts = case.routing == TEXT, op.experts.size
        rows = _best(op, word_keys(experts)) if is_text else traced_routes(case.routing, experts, op.top_k)

        def draw(tokens: int, generator: torch.Generator) -> Tensor:
            """Return the routes themselves for as many tokens, else some of them."""
            return rows if tokens == len(rows) else rows[torch.randint(len(rows), (tokens,), generator=generator)]

        return draw
    ranks = list(range(1, op.experts.size + 1))
    Random(f"popularity {case.label} {case.routing}").shuffle(ranks)  # the same in every process: rows can be averaged
    popularity = -exponent * torch.tensor(ranks, dtype=torch.float64).log()
    return lambda tokens, generator: popular(op, popularity, tokens, generator)


def balanced(op: Route, tokens: int, generator: torch.Generator) -> Tensor:
    """tokens · top_k / experts to each expert, or one more: every token takes the next top_k of a shuffled cycle.

    In the cycle, the experts of a group follow each other, if only those of some groups may be chosen.
    """
    experts, groups = op.experts.size, op.groups if op.top_groups < op.groups else 1
    group = torch.randperm(groups, generator=generator).repeat_interleave(experts // groups)
    within = torch.rand(groups, experts // groups, generator=generator).argsort(-1).flatten()
    cycle = group * (experts // groups) + within
    places = torch.arange(tokens * op.top_k).reshape(tokens, op.top_k) % experts
    return _marked(cycle[places[torch.randperm(tokens, generator=generator)]], experts)


def popular(op: Route, popularity: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """top_k distinct experts for each token, drawn one after the other with chances in proportion to exp(popularity).

    The largest of popularity + Gumbel noise are such a draw (Yellott 1977).
    """
    noise = torch.empty(tokens, op.experts.size, dtype=torch.float64).exponential_(generator=generator)
    return _best(op, popularity - noise.log())


def _best(op: Route, keys: Tensor) -> Tensor:
    """The top_k experts with the largest keys [tokens, experts]; with groups, of the best groups."""
    tokens = len(keys)
    if op.top_groups < op.groups:
        grouped = keys.reshape(tokens, op.groups, -1)
        kept = _marked(grouped.amax(-1).topk(op.top_groups, -1).indices, op.groups)
        keys = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    return _marked(keys.topk(op.top_k, -1).indices, op.experts.size)


def _marked(indices: Tensor, size: int) -> Tensor:
    """Booleans [tokens, size], true at the indices [tokens, k]."""
    return torch.zeros(len(indices), size, dtype=torch.bool).scatter(-1, indices, True)


# --- --routing text ---------------------------------------------------------------------------------------------------
# Tokens go to experts by the words of a text, so that some experts are popular as some words are.
#
# The text is Lincoln's Gettysburg Address (1863), in capitals or not the same word. It is a text, and not the routes of
# a trained model: every different word has top_k experts by a hash, each occurrence goes to them, and what is real is
# how often words come, and in which order. The same words, experts and top_k give the same routes on every machine.


_BYTES = 6  # of a hash: as many as a float64 holds without rounding


@cache
def words() -> tuple[str, ...]:
    """The words of the text in their order, in small letters."""
    text = files("ffncli.bench.referee").joinpath("gettysburg.txt").read_text("utf-8")
    return tuple(re.findall(r"[a-z]+", text.lower()))


def word_keys(experts: int) -> Tensor:
    """A number for each word of the text and each expert, float64 [words, experts]: the experts with the largest are
    the word's."""

    def key(word: str, expert: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{word} {expert}".encode()).digest()[:_BYTES])

    rows = {word: [key(word, expert) for expert in range(experts)] for word in dict.fromkeys(words())}
    return torch.tensor([rows[word] for word in words()], dtype=torch.float64)
