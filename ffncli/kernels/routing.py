"""Mixtures of experts in plain torch: the router chooses, each chosen expert computes its tokens, a weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Add, Experts, Route, Step
from ffncli.kernels.between import Weights
from ffncli.kernels.kernel import Steps
from ffncli.kernels.pattern import Dense, dense

Body = Callable[[Tensor, Weights], Tensor]
_COMPUTED = ("router", "route", "experts", "shared_gate", "shared_score", "shared", "moe")


def refuses_unknown_routing(steps: Steps) -> str | None:
    """Why `mixture` cannot compute these steps; None for a dense block too, which has no experts."""
    experts = next((step.op for step in steps if isinstance(step.op, Experts)), None)
    if experts is None:
        return None if dense(steps) else "cannot compute this block"
    if experts.identity:
        return "cannot compute identity experts"
    if any(step.output not in _COMPUTED and not step.output.startswith("shared.") for step in steps):
        return "cannot compute experts in a narrower space"
    return None if dense(experts.program) else "cannot compute these experts"


def mixture(steps: Steps, body: Callable[[Dense], Body]) -> Body:
    """Σ over the chosen experts, each built by `body`, plus the shared experts."""
    by: dict[str, Step] = {step.output: step for step in steps}
    route, experts = by["route"].op, by["experts"].op
    assert isinstance(route, Route)
    assert isinstance(experts, Experts)
    shape, shared_shape = dense(experts.program), dense(steps, "shared.")
    assert shape is not None
    expert, shared = body(shape), body(shared_shape) if shared_shape else None
    names = list(experts.parameters())
    mix = by["moe"].op if "moe" in by else Add()
    assert isinstance(mix, Add)

    def ffn(x: Tensor, w: Weights) -> Tensor:
        logits = functional.linear(x, w["router.weight"], w.get("router.bias"))
        chosen, share = choose(route, logits, w.get("route.correction"))
        out = torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
        for e in sorted({*chosen.flatten().tolist()}):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            weight = share[token, slot, None]
            weights = {name: w[name][e] for name in names}
            received = x[token] * weight if experts.weigh == "input" else x[token]
            made = expert(received, weights)
            out.index_add_(0, token, made * weight if experts.weigh == "output" else made)
        if shared is None:
            return out
        extra = shared(x, w)
        if "shared_gate" in by:
            extra = torch.sigmoid(functional.linear(x, w["shared_gate.weight"])) * extra
        return out + (extra if mix.scale == 1 else extra * mix.scale)

    return ffn


def choose(op: Route, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """(experts chosen per token, their weights), both [tokens, top_k]."""
    work = logits if op.score_dtype == "input" else logits.float()
    score: Callable[[Tensor], Tensor] = torch.sigmoid if op.score == "sigmoid" else lambda t: torch.softmax(t, -1)
    first = op.order == "score_first"
    scores = score(work) if first else work
    judged = scores if correction is None else scores + correction.to(scores.dtype)
    if first and 1 <= op.top_groups < op.groups:
        groups = judged.reshape(*judged.shape[:-1], op.groups, -1)
        best = groups.sort(-1, descending=True).values[..., : op.group_best].sum(-1)
        worst_kept = best.sort(-1, descending=True).values[..., op.top_groups - 1, None]
        judged = torch.where((best >= worst_kept)[..., None], groups, -torch.inf).flatten(-2)
    chosen = judged.topk(op.top_k, -1).indices
    share = scores.gather(-1, chosen)
    if not first:
        share = score(share)
    elif op.renormalise:
        share = share / (share.sum(-1, keepdim=True) + op.eps)
    return chosen, (share * op.scale).to(logits.dtype)
