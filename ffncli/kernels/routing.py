"""Mixtures of experts in plain torch: the router chooses experts, each chosen expert computes its tokens, and the
outputs are added with their weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Activation, Add, Experts, Norm, Route, Step, tables
from ffncli.kernels.dense import Dense, Weights, activation, dense, norm
from ffncli.kernels.kernel import Steps

Body = Callable[[Tensor, Weights], Tensor]
Summed: TypeAlias = Callable[[Tensor, Tensor, Tensor, Weights], Tensor]
_COMPUTED = (
    "router", "router_scaled", "route", "latent", "latent_norm", "experts", "mixed_norm", "widened", "biased",
    "shared_gate", "shared_score", "shared", "moe",
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
    after: Step | None
    weigh: Literal["output", "input"]
    sources: tuple[Step, ...]

    def normed(self, x: Tensor, w: Weights) -> Tensor:
        """Apply the norm after the experts to an expert's output [tokens, width]."""
        return _normed(self.after, x, w)


def routed_experts(steps: Steps) -> RoutedExperts:
    """Return the part of these steps that a kernel's own function computes in `mixture`; they must not be refused."""
    sources = tuple(step for step in steps if isinstance(step.op, Experts))
    op = sources[0].op
    assert isinstance(op, Experts)
    shape = dense(_body(op))
    assert shape is not None
    after = next((step for step in op.program if step.output == "expert_norm"), None)
    return RoutedExperts(shape, after, op.weigh, sources)


def mixture(steps: Steps, body: Callable[[Dense], Body], summed: Summed) -> Body:
    """Build the router's choice, the sum over the chosen experts, and the shared experts; `body` builds the shared
    experts.

    `summed(x, chosen, share, weights)` computes the sum; x is [tokens, width]; the chosen experts, `chosen`, and their
    routing weights, `share`, are [tokens, top_k].
    """
    by: dict[str, Step] = {step.output: step for step in steps}
    route, shared_shape = by["route"].op, dense(steps, "shared.")
    assert isinstance(route, Route)
    shared = body(shared_shape) if shared_shape else None
    mix, scaled = (by[name].op if name in by else Add() for name in ("moe", "router_scaled"))
    assert isinstance(mix, Add)
    assert isinstance(scaled, Add)
    scale = scaled.scale

    def ffn(x: Tensor, w: Weights) -> Tensor:
        logits = functional.linear(x, w["router.weight"], w.get("router.bias"))
        logits = logits if scale == 1 else logits * scale
        chosen, share = choose(route, logits, {n.removeprefix("route."): w[n] for n in by["route"].parameters()})
        inner = x
        if "latent" in by:
            inner = _normed(by.get("latent_norm"), functional.linear(x, w["latent.weight"], w.get("latent.bias")), w)
        out = summed(inner, chosen, share, w)
        if "widened" in by:
            out = functional.linear(_normed(by.get("mixed_norm"), out, w), w["widened.weight"], w.get("widened.bias"))
        out = out + w["biased.bias"] if "biased" in by else out
        if shared is None:
            return out
        extra = shared(x, w)
        if "shared_gate" in by:
            extra = torch.sigmoid(functional.linear(x, w["shared_gate.weight"])) * extra
        return out + (extra if mix.scale == 1 else extra * mix.scale)

    return ffn


def looped(steps: Steps, body: Callable[[Dense], Body]) -> Summed:
    """Compute the chosen experts in turn, each by `body`. Reading the choice makes a GPU wait for the host."""
    experts = routed_experts(steps)
    expert, sources = body(experts.shape), _sources(experts)

    def summed(x: Tensor, chosen: Tensor, share: Tensor, w: Weights) -> Tensor:
        out = torch.zeros_like(x)
        for e in sorted({*chosen.flatten().tolist()}):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            weight = share[token, slot, None]
            op, prefix, at = sources[e]
            weights = op.of_one(w, at, prefix)
            received = x[token] * weight if experts.weigh == "input" else x[token]
            made = experts.normed(expert(received, weights), weights)
            out.index_add_(0, token, made * weight if experts.weigh == "output" else made)
        return out

    return summed


def _normed(step: Step | None, x: Tensor, w: Weights) -> Tensor:
    """Apply a norm to x; return x unchanged if there is none."""
    if step is None:
        return x
    assert isinstance(step.op, Norm)
    return norm(step.op, step.output, x, w)


def _sources(experts: RoutedExperts) -> list[tuple[Experts, str, int]]:
    """Return route entry → (op with the expert, prefix of its weights' names, the expert's index in the weights)."""
    ops = [(step.op, step.prefix) for step in experts.sources if isinstance(step.op, Experts)]
    return [(op, prefix, e) for op, prefix in ops for e in range(op.experts.size)]


def choose(op: Route, logits: Tensor, params: Mapping[str, Tensor], ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (chosen experts, their weights), both [tokens, top_k + always]; `params` have the route's own names."""
    work = logits if op.score_dtype == "input" else logits.float()
    chosen, share = _one_by_one(op, work) if op.order == "one_by_one" else _together(op, work, params, ids)
    if op.learned_scale:
        share = share * params["factor"].to(share.dtype)
    return chosen, (share * op.scale).to(logits.dtype)


def _together(op: Route, work: Tensor, params: Mapping[str, Tensor], ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (experts, weights) for choices that do not depend on each other."""
    score = activation(Activation(op.score)) if op.score != "softmax" else lambda t, _: torch.softmax(t, -1)
    first, correction = op.order == "score_first", params.get("correction")
    every = score(work, {}) if first else work
    scores = every[..., : op.experts.size - op.always]
    judged = scores if correction is None else scores + correction.to(scores.dtype)
    if first and 1 <= op.top_groups < op.groups:
        groups = judged.reshape(*judged.shape[:-1], op.groups, -1)
        best = groups.sort(-1, descending=True).values[..., : op.group_best].sum(-1)
        worst_kept = best.sort(-1, descending=True).values[..., op.top_groups - 1, None]
        outside = 0.0 if op.zero_outside else -torch.inf
        judged = torch.where((best >= worst_kept)[..., None], groups, outside).flatten(-2)
    chosen = judged.topk(op.top_k, -1).indices if ids is None else params["lookup"][ids[..., 0]]
    for shared in range(scores.shape[-1], op.experts.size):
        chosen = torch.cat([chosen, torch.full_like(chosen[..., :1], shared)], -1)
    share = every.gather(-1, chosen)
    if not first:
        share = score(share, {})
    elif op.renormalise:
        share = share / (share.sum(-1, keepdim=True) + op.eps)
    return chosen, share


def _one_by_one(op: Route, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (experts, weights); each choice is made among the experts that no earlier choice took."""
    gone, picked, weights = torch.zeros_like(logits, dtype=torch.bool), [], []
    for _ in range(op.top_k):
        left = torch.where(gone, -torch.inf, logits)
        top = left.amax(-1, keepdim=True)
        # The scale is the larger of |logit| and the best logit, as in PhiMoE's sparsemixer.
        far = (top - logits) / torch.maximum(logits.abs(), top) > op.threshold
        weights.append(torch.where(gone | far, -torch.inf, logits).softmax(-1).amax(-1))
        picked.append(left.argmax(-1))
        gone = gone | torch.nn.functional.one_hot(picked[-1], op.experts.size).bool()
    return torch.stack(picked, -1), torch.stack(weights, -1)
