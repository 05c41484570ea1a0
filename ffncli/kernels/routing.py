"""Mixtures of experts in plain torch: the router chooses experts, each chosen expert computes its tokens, and the
outputs are added with their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Activation, Add, Experts, Op, Route, Step, tables
from ffncli.kernels.dense import Body, Dense, Part, Place, Weights, activation, dense, layer, norm, places, plus
from ffncli.kernels.kernel import Computes, Params, Steps

Summed: TypeAlias = Callable[[Tensor, Tensor, Tensor, Weights], Tensor]
Chosen: TypeAlias = tuple[Tensor, Tensor]  # experts, their weights
_COMPUTED = (
    "router", "router_scaled", "route", "latent", "latent_norm", "experts", "mixed_norm", "widened", "biased",
    "shared_gate", "shared_score", "shared", "moe", "post_norm",
)  # fmt: skip


def refuses_unknown_routing(steps: Steps) -> str | None:
    """Return why `mixture` cannot compute these steps, or None; a dense block, which has no experts, is not refused."""
    experts = next((step.op for step in steps if isinstance(step.op, Experts)), None)
    if experts is None:
        return None if dense(steps) else "cannot compute this block"
    if experts.identity:
        return "cannot compute identity experts"
    if tables(steps):
        return "cannot compute experts chosen by token ids"
    if any(step.output not in _COMPUTED and not step.output.startswith("shared.") for step in steps):
        return "cannot compute this routing"
    return None if dense(_body(experts)) else "cannot compute these experts"


def _body(experts: Experts) -> Steps:
    """Return an expert's program without the norm on its output."""
    return tuple(step for step in experts.program if step.output != "expert_norm")


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a mixture: each expert applies `shape` to its tokens, then the norm `after`, if there is one.

    `weigh`: whether the route's weight multiplies an expert's output or its input. `sources` are the steps that hold
    the weights, in the order of the route's entries.
    """

    shape: Dense
    after: Op | None
    weigh: Literal["output", "input"]
    sources: tuple[Step, ...]


def routed_experts(steps: Steps) -> RoutedExperts:
    """Return the part of these steps that a kernel's own function computes in `mixture`; they must not be refused."""
    sources = tuple(step for step in steps if isinstance(step.op, Experts))
    op = sources[0].op
    assert isinstance(op, Experts)
    shape = dense(_body(op))
    assert shape is not None
    after = next((step.op for step in op.program if step.output == "expert_norm"), None)
    return RoutedExperts(shape, after, op.weigh, sources)


def mixture(steps: Steps, place: Place, dtype: torch.dtype, summed: Summed) -> Computes:
    """Build the router's choice, the sum over the chosen experts, and the shared experts.

    `summed(x, chosen, share, weights)` computes the sum; x is [tokens, width]; the chosen experts, `chosen`, and their
    routing weights, `share`, are [tokens, top_k].
    """
    ops = {step.output: step.op for step in steps}
    route, mix, scaled = (ops.get(name, Add()) for name in ("route", "moe", "router_scaled"))
    assert isinstance(route, Route)
    assert isinstance(mix, Add)
    assert isinstance(scaled, Add)
    choose = choice(route, lambda name: place(f"route.{name}"), dtype)
    shared_shape, linear, scale, shared_scale = dense(steps, "shared."), functional.linear, scaled.scale, mix.scale
    shared = Body(shared_shape, place).nested(linear) if shared_shape else None
    (router, router_bias), (latent, latent_bias), (widened, widened_bias), (_, bias), (shared_gate, _) = (
        layer(name, place) for name in ("router", "latent", "widened", "biased", "shared_gate")
    )
    latent_norm, mixed_norm, post_norm = (
        norm(ops.get(name), name, place) for name in ("latent_norm", "mixed_norm", "post_norm")
    )

    def ffn(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        logits = linear(x, p[router], p[router_bias])
        chosen, share = choose(logits if scale == 1 else logits * scale, p)
        inner = x if p[latent] is None else latent_norm(linear(x, p[latent], p[latent_bias]), p)
        out = summed(inner, chosen, share, p)
        if p[widened] is not None:
            out = linear(mixed_norm(out, p), p[widened], p[widened_bias])
        out = plus(out, p[bias])
        if shared is None:
            return post_norm(out, p)
        extra = shared(x, p)
        if p[shared_gate] is not None:
            extra = torch.sigmoid(linear(x, p[shared_gate])) * extra
        return post_norm(out + (extra if shared_scale == 1 else extra * shared_scale), p)

    return ffn


def looped(steps: Steps, place: Place) -> Summed:
    """Compute the chosen experts one after the other. Reading the choice makes a GPU wait for the host."""
    experts = routed_experts(steps)
    names = list(experts.sources[0].op.parameters())
    inner, weigh_input = places(names), experts.weigh == "input"
    alone, normed = Body(experts.shape, inner).nested(functional.linear), norm(experts.after, "expert_norm", inner)
    expert: Part = (lambda x, p: normed(alone(x, p), p)) if experts.after else alone
    entries = [
        (e, [(place(step.prefix + name), step.op.is_common(name)) for name in names])
        for step in experts.sources
        if isinstance(step.op, Experts)
        for e in range(step.op.experts.size)
    ]

    def summed(x: Tensor, chosen: Tensor, share: Tensor, p: Weights) -> Tensor:
        out = torch.zeros_like(x)
        for entry in sorted({*chosen.flatten().tolist()}):
            token, slot = (chosen == entry).nonzero(as_tuple=True)
            weight = share[token, slot, None]
            e, parameters = entries[entry]
            weights = (*[p[at] if common else p[at][e] for at, common in parameters], None)
            made = expert(x[token] * weight if weigh_input else x[token], weights)
            out.index_add_(0, token, made if weigh_input else made * weight)
        return out

    return summed


def choice(op: Route, place: Place, dtype: torch.dtype) -> Callable[..., Chosen]:
    """Return f(logits, weights, ids=None) → (chosen experts, their weights), both [tokens, top_k + always]; logits and
    weights have this dtype, and `place` gets the route's own names (`correction`)."""
    # cast only if the dtype changes: each operation costs a microsecond, even one that returns its argument
    wide = op.score_dtype != "input" and dtype != torch.float32
    made = partial(_one_by_one, op) if op.order == "one_by_one" else _together(op, place, wide)
    factor = place("factor")

    def choose(logits: Tensor, p: Weights, ids: Tensor | None = None) -> Chosen:
        chosen, share = made(logits.float() if wide else logits, p, ids)
        if op.learned_scale:
            share = share * (p[factor].float() if wide else p[factor])
        if op.scale != 1:
            share = share * op.scale
        return chosen, share.to(dtype) if wide else share

    return choose


def _together(op: Route, place: Place, wide: bool) -> Callable[..., Chosen]:
    """Return the function for choices that do not depend on each other."""
    score = partial(torch.softmax, dim=-1) if op.score == "softmax" else activation(Activation(op.score))
    first, choosable = op.order == "score_first", op.experts.size - op.always
    correction, lookup, in_groups = place("correction"), place("lookup"), first and 1 <= op.top_groups < op.groups
    by_score = not (op.correction or op.always or op.lookup or in_groups)

    def judged(scores: Tensor, p: Weights) -> Tensor:
        if op.correction:
            scores = scores + (p[correction].float() if wide else p[correction])
        if not in_groups:
            return scores
        groups = scores.reshape(*scores.shape[:-1], op.groups, -1)
        best = groups.sort(-1, descending=True).values[..., : op.group_best].sum(-1)
        worst_kept = best.sort(-1, descending=True).values[..., op.top_groups - 1, None]
        outside = 0.0 if op.zero_outside else -torch.inf
        return torch.where((best >= worst_kept)[..., None], groups, outside).flatten(-2)

    def choose(work: Tensor, p: Weights, ids: Tensor | None) -> Chosen:
        every = score(work) if first else work
        if by_score:
            share, chosen = every.topk(op.top_k, -1)
        else:
            scores = every[..., :choosable] if op.always else every
            chosen = judged(scores, p).topk(op.top_k, -1).indices if ids is None else p[lookup][ids[..., 0]]
            for shared in range(choosable, op.experts.size):
                chosen = torch.cat([chosen, torch.full_like(chosen[..., :1], shared)], -1)
            share = every.gather(-1, chosen)
        if not first:
            share = score(share)
        elif op.renormalise:
            total = share.sum(-1, keepdim=True)
            share = share / (total + op.eps if op.eps else total)
        return chosen, share

    return choose


def _one_by_one(op: Route, logits: Tensor, p: Weights, ids: Tensor | None) -> Chosen:
    """Make each choice among the experts that no earlier choice took."""
    gone, picked, weights = torch.zeros_like(logits, dtype=torch.bool), [], []
    for _ in range(op.top_k):
        left = torch.where(gone, -torch.inf, logits)
        top = left.amax(-1, keepdim=True)
        # The scale is the larger of |logit| and the best logit, as in PhiMoE's sparsemixer.
        far = (top - logits) / torch.maximum(logits.abs(), top) > op.threshold
        weights.append(torch.where(gone | far, -torch.inf, logits).softmax(-1).amax(-1))
        picked.append(left.argmax(-1))
        gone = gone | functional.one_hot(picked[-1], op.experts.size).bool()
    return torch.stack(picked, -1), torch.stack(weights, -1)
