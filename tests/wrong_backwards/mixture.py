"""Wrong backward passes of a mixture: the top 2 of 4 swiglu experts, softmax scores, renormalised."""

import torch
from torch.nn.functional import linear, silu


def mlp(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def route(x, router):
    scores, chosen = linear(x, router).softmax(-1).topk(2, -1)
    return scores / scores.sum(-1, keepdim=True), chosen


def mix(x, scores, chosen, expert):
    """Add up the experts' outputs; `expert(e, x, score)` is one expert's, with its score [tokens, 1]."""
    out = torch.zeros_like(x)
    for e in range(4):
        tokens, places = (chosen == e).nonzero(as_tuple=True)
        out = out.index_add(0, tokens, expert(e, x[tokens], scores[tokens, places, None]))
    return out


# router.weight
def scores_detached(x, router, gate, up, down):
    scores, chosen = route(x, router)
    return mix(x, scores.detach(), chosen, lambda e, t, s: s * mlp(t, gate[e], up[e], down[e]))


# router.weight
def sum_of_scores_detached(x, router, gate, up, down):
    scores, chosen = linear(x, router).softmax(-1).topk(2, -1)
    scores = scores / scores.sum(-1, keepdim=True).detach()
    return mix(x, scores, chosen, lambda e, t, s: s * mlp(t, gate[e], up[e], down[e]))


# x
def x_detached_before_the_router(x, router, gate, up, down):
    scores, chosen = route(x.detach(), router)
    return mix(x, scores, chosen, lambda e, t, s: s * mlp(t, gate[e], up[e], down[e]))


class UnscaledWeights(torch.autograd.Function):
    """s · y whose gradient of y is dy, without s."""

    @staticmethod
    def forward(ctx, y, s):
        ctx.save_for_backward(y)
        return s * y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return dy, (dy * y).sum(-1, keepdim=True)


# down.weight
def score_missing_in_the_experts(x, router, gate, up, down):
    scores, chosen = route(x, router)
    return mix(x, scores, chosen, lambda e, t, s: UnscaledWeights.apply(mlp(t, gate[e], up[e], down[e]), s))


class FirstTokens(torch.autograd.Function):
    """Pass tokens on, and only the gradients of those that a capacity of 4 tokens an expert would keep."""

    @staticmethod
    def forward(ctx, tokens):
        return tokens.clone()

    @staticmethod
    def backward(ctx, dy):
        kept = dy.clone()
        kept[4:] = 0
        return kept


# x
def gradient_of_tokens_beyond_a_capacity_dropped(x, router, gate, up, down):
    scores, chosen = route(x, router)
    return mix(x, scores, chosen, lambda e, t, s: s * mlp(FirstTokens.apply(t), gate[e], up[e], down[e]))


class WithoutOthers(torch.autograd.Function):
    """softmax whose gradient is that of every score alone: p (1 − p), without −p q."""

    @staticmethod
    def forward(ctx, logits):
        scores = logits.softmax(-1)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx, d_scores):
        (scores,) = ctx.saved_tensors
        return d_scores * scores * (1 - scores)


# router.weight
def softmax_without_the_other_experts(x, router, gate, up, down):
    scores, chosen = WithoutOthers.apply(linear(x, router)).topk(2, -1)
    scores = scores / scores.sum(-1, keepdim=True)
    return mix(x, scores, chosen, lambda e, t, s: s * mlp(t, gate[e], up[e], down[e]))


# gate.weight
def last_expert_not_trained(x, router, gate, up, down):
    scores, chosen = route(x, router)
    weights = [gate[e] if e < 3 else gate[e].detach() for e in range(4)]
    return mix(x, scores, chosen, lambda e, t, s: s * mlp(t, weights[e], up[e], down[e]))
