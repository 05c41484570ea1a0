"""Routing as prescribed by --routing. It only changes x, so kernels need not know about the prescription.

A router's logits are x Rᵀ + b, so x' = x + (l - x Rᵀ - b) · pinv(R)ᵀ is the nearest x with the logits l, if d_model is
at least the number of experts (otherwise the logits of x' are as near to l as possible). l is x's own logits, permuted
among the experts so that their distribution is kept: the wanted experts get the largest logits, plus a small lift, so
that rounding does not decide. The experts that the router then chooses are counted, never assumed.
"""

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

_LIFT = 0.05  # times (1 + the range of a token's logits)
Draw = Callable[[int, torch.Generator], Tensor]  # (tokens, generator) → booleans [tokens, experts]


class PrescribedRouting:
    """The experts of a case's tokens, and the x that makes its router choose them."""

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
        """Draw the experts for this number of tokens, booleans [tokens, experts]; every call draws again."""
        return self._draw(tokens, generator).to(self._router.device)

    def new_load(self) -> "ExpertLoad":
        """Return a new count, all zero, for the experts of this case that have weights."""
        return ExpertLoad(*self._sizes)

    def counted(self, x: Tensor) -> "ExpertLoad":
        """Return the count of tokens per expert for one x."""
        load = self.new_load()
        load.add(self.chosen(x))
        return load

    @torch.no_grad()
    def entered(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Return x [tokens, d_model] in its dtype, changed just enough to send its tokens to the wanted experts."""
        wide = x.to(self._router.dtype)
        logits = functional.linear(wide, self._router, self._bias)
        moved = (_wanted_logits(self._op, logits, wanted) - logits) @ self._inverse
        return (wide + moved).to(x.dtype)

    @torch.no_grad()
    def chosen(self, x: Tensor) -> Tensor:
        """Return the experts that the router itself chooses, booleans [tokens, experts]."""
        chosen = output_and_experts(self._steps, self._weights, {self._entry: x})[1]
        assert chosen is not None
        return chosen[:, : self._choosable]


class ExpertLoad:
    """The number of tokens that each expert received, over many calls. Sums stay on the device until they are read."""

    def __init__(self, experts: int = 0, d_model: int = 0) -> None:
        self._experts, self._d_model = experts, d_model  # only experts that have weights
        self._calls = 0
        self._received: Tensor | None = None  # [experts + 2]; the last two: touched experts, tokens gone elsewhere
        self._tokens = 0

    def add(self, chosen: Tensor, wanted: Tensor | None = None) -> None:
        """Add one call's chosen experts and wanted experts, both as booleans [tokens, experts]."""
        received = chosen[:, : self._experts].sum(0)
        touched = (received > 0).sum()
        elsewhere = torch.zeros_like(touched) if wanted is None else (chosen != wanted).any(1).sum()
        sums = torch.cat([received, touched[None], elsewhere[None]])
        self._received = sums if self._received is None else self._received + sums
        self._calls, self._tokens = self._calls + 1, self._tokens + len(chosen)

    @property
    def tokens_per_expert(self) -> tuple[float, ...]:
        """The mean number of tokens per call that each expert received; empty before the first call."""
        return self._means[:-2]

    @property
    def touched(self) -> float | None:
        """The mean number of experts per call that received at least one token."""
        return self._means[-2] if self._means else None

    @property
    def elsewhere(self) -> float:
        """The fraction of the tokens that went to experts other than the wanted experts."""
        return self._means[-1] * self._calls / self._tokens if self._tokens else 0.0

    @property
    def note(self) -> str:
        """A note for the user if tokens went to the wrong experts; otherwise empty."""
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
    """Return pinv(R)ᵀ [experts, d_model] in float64, computed from the small matrix R Rᵀ."""
    wide = router.double()
    inverse: Tensor = torch.linalg.pinv(wide @ wide.T, hermitian=True) @ wide
    return inverse


# --- logits -----------------------------------------------------------------------------------------------------------


def _wanted_logits(op: Route, logits: Tensor, wanted: Tensor) -> Tensor:
    """Permute each token's logits among the experts so that exactly the wanted experts are chosen.

    Each score increases with its logit, and the router's correction bias is 0 in random weights. If experts may only be
    chosen from some groups, the groups of the wanted experts are first lifted above the others.
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
    """Reorder the groups of logits [tokens, groups, experts]: the used groups get the logits of the best groups."""
    softmax = op.score == "softmax"
    scores = logits.flatten(-2).softmax(-1).reshape(logits.shape) if softmax else function(op.score)(logits)
    best = scores.topk(min(op.group_best, scores.shape[-1]), -1).values.sum(-1)
    places, falling = (order[..., None].expand_as(logits) for order in (_order(best, used), best.argsort(-1, True)))
    return torch.empty_like(logits).scatter(-2, places, logits.gather(-2, falling))


def _exchanged(values: Tensor, first: Tensor) -> Tensor:
    """Reorder values [..., n]: the positions in `first` get the largest values, in the same order."""
    largest = values.sort(-1, descending=True).values
    return torch.empty_like(values).scatter(-1, _order(values, first), largest)


def _order(values: Tensor, first: Tensor) -> Tensor:
    """Return the indices in order of descending value, but with the indices in `first` before all others."""
    # More than the range of the values, so that each value in `first` comes before all others.
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
            """Return all routes if there are as many routes as tokens, otherwise a random selection."""
            return rows if tokens == len(rows) else rows[torch.randint(len(rows), (tokens,), generator=generator)]

        return draw
    ranks = list(range(1, op.experts.size + 1))
    Random(f"popularity {case.label} {case.routing}").shuffle(ranks)  # the same in every process
    popularity = -exponent * torch.tensor(ranks, dtype=torch.float64).log()
    return lambda tokens, generator: popular(op, popularity, tokens, generator)


def balanced(op: Route, tokens: int, generator: torch.Generator) -> Tensor:
    """Send tokens · top_k / experts tokens to each expert, or one more: every token gets the next top_k experts of a
    shuffled cycle.

    If experts may only be chosen from some groups, the experts of a group are adjacent in the cycle.
    """
    experts, groups = op.experts.size, op.groups if op.top_groups < op.groups else 1
    group = torch.randperm(groups, generator=generator).repeat_interleave(experts // groups)
    within = torch.rand(groups, experts // groups, generator=generator).argsort(-1).flatten()
    cycle = group * (experts // groups) + within
    places = torch.arange(tokens * op.top_k).reshape(tokens, op.top_k) % experts
    return _marked(cycle[places[torch.randperm(tokens, generator=generator)]], experts)


def popular(op: Route, popularity: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """Draw top_k distinct experts for each token, one after the other, with probabilities proportional to
    exp(popularity).

    The top_k largest values of popularity + Gumbel noise are such a draw (Yellott 1977).
    """
    noise = torch.empty(tokens, op.experts.size, dtype=torch.float64).exponential_(generator=generator)
    return _best(op, popularity - noise.log())  # -log of an exponential variable is Gumbel noise


def _best(op: Route, keys: Tensor) -> Tensor:
    """Return the top_k experts with the largest keys [tokens, experts]; with groups, only experts of the best
    groups."""
    tokens = len(keys)
    if op.top_groups < op.groups:
        grouped = keys.reshape(tokens, op.groups, -1)
        kept = _marked(grouped.amax(-1).topk(op.top_groups, -1).indices, op.groups)
        keys = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    return _marked(keys.topk(op.top_k, -1).indices, op.experts.size)


def _marked(indices: Tensor, size: int) -> Tensor:
    """Return booleans [tokens, size], true at the indices [tokens, k]."""
    return torch.zeros(len(indices), size, dtype=torch.bool).scatter(-1, indices, True)


# --- --routing text ---------------------------------------------------------------------------------------------------
# The words of a text choose the experts, so that some experts are popular, as some words are. The text is Lincoln's
# Gettysburg Address (1863), in lower case. Each word is a token. A hash assigns top_k experts to every different word,
# and each occurrence of the word goes to these experts. So the routes are not those of a trained model, but the
# frequency and the order of the words are real. The same words, experts and top_k give the same routes on every
# machine.


_BYTES = 6  # bytes of a hash that a float64 holds without rounding


@cache
def words() -> tuple[str, ...]:
    """Return the words of the text in order, in lower case."""
    text = files("ffncli.bench.referee").joinpath("gettysburg.txt").read_text("utf-8")
    return tuple(re.findall(r"[a-z]+", text.lower()))


def word_keys(experts: int) -> Tensor:
    """Return keys, float64 [words, experts]: a word goes to the experts with the largest keys in its row."""

    def key(word: str, expert: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{word} {expert}".encode()).digest()[:_BYTES])

    rows = {word: [key(word, expert) for expert in range(experts)] for word in dict.fromkeys(words())}
    return torch.tensor([rows[word] for word in words()], dtype=torch.float64)
