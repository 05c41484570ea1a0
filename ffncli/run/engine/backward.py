"""The backward pass: the gradient of every step and of every weight, last step first, as a formula and as values.

`step_gradients` has a branch per op, as `apply` in `execute.py` does. Every formula is written out, without autograd,
which the tests compare it with. At a kink the slope is torch's; a value that is NaN has the gradient NaN.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from ffncli.block import steps as ops
from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.block.steps import Step, block_inputs
from ffncli.block.symbols import weight_symbol
from ffncli.block.value import clipped, unlimited
from ffncli.block.value import slope as limited_slope
from ffncli.run.engine.execute import (
    EVAL,
    NAMESPACE,
    Mode,
    execute,
    experts_of,
    learned_scale,
    one_by_one,
    received,
    scores_of,
    slope,
)

Share: TypeAlias = tuple[str, Tensor]  # a summand of a gradient: its formula and its values


@dataclass(frozen=True)
class ForwardPass:
    """A finished forward pass: its weights, every tensor and dropout mask by printed name, and the flat indices of each
    expert's tokens by the expert's printed name (`experts.3`)."""

    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor]


@dataclass(frozen=True)
class Gradient:
    """The gradient of the loss with respect to one tensor: a step's output, an input, or a weight (in torch's layout).

    `symbol` is the left-hand side of the printed formula: `d up` or `dW1`. `tokens` are the flat indices of the tokens
    of an expert, one per row.
    """

    name: str
    symbol: str
    formula: str
    tensor: Tensor
    weight: bool = False
    tokens: Tensor | None = None


@dataclass(frozen=True)
class StepGradients:
    """What a step passes back: a share of each input's gradient (None: no gradient), and its parameters' gradients."""

    inputs: tuple[Share | None, ...]
    parameters: Mapping[str, Share]


def forward(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], mode: Mode = EVAL
) -> ForwardPass:
    """Run the steps and keep all that a backward pass needs."""
    drawn: list[Tensor] = []
    tensors, masks, tokens = dict(inputs), dict[str, Tensor](), dict[str, Tensor]()
    with torch.no_grad():
        for event in execute(steps, weights, inputs, replace(mode, kept_masks=drawn)):
            tensors[event.name] = event.tensor
            if isinstance(event.step.op, ops.Dropout) and mode.train:
                masks[event.name] = drawn.pop()
            if event.tokens is not None:
                tokens[event.name.rpartition(".")[0]] = event.tokens
    return ForwardPass(weights, tensors, masks, tokens)


def backward(steps: Sequence[Step], ran: ForwardPass, upstream: Mapping[str, Share]) -> Iterator[Gradient]:
    """Yield the gradient of each tensor that the loss depends on: steps from last to first, each followed by its
    weights, then the block's inputs. A step inside an expert comes after the Experts step.

    `upstream` has the loss's own gradient with respect to the steps that the loss reads.
    """
    with torch.no_grad():
        shares = {name: [share] for name, share in upstream.items()}
        yield from _walk(steps, ran, ran.weights, ran.tensors, shares)
        for name in block_inputs(steps):
            if name in shares:
                yield Gradient(name, f"d {name}", *_total(shares[name]))


def _walk(
    steps: Sequence[Step], ran: ForwardPass, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor],
    shares: dict[str, list[Share]], prefix: str = "", tokens: Tensor | None = None,
) -> Iterator[Gradient]:  # fmt: skip
    """Go through a program backwards, adding to `shares`, the summands of each gradient by name in the program."""
    for step in reversed(steps):
        if step.output not in shares:  # the loss does not depend on it
            continue
        formula, dy = _total(shares[step.output])
        yield Gradient(prefix + step.output, f"d {step.output}", formula, dy, tokens=tokens)
        if isinstance(step.op, ops.Experts):
            passed = yield from _experts(step, step.op, ran, weights, dy)
        else:
            params = {name.rpartition(".")[2]: weights[name] for name in (*step.parameters(), *step.tables())}
            x = [tensors[name] for name in step.inputs]
            symbols = {name: weight_symbol(step.output, name, steps) for name in params}
            passed = step_gradients(step, symbols, params, x, dy, ran.masks.get(prefix + step.output))
        for name, share in zip(step.inputs, passed.inputs, strict=True):
            if share is not None:
                shares.setdefault(name, []).append(share)
        program = step.op.program if isinstance(step.op, ops.Experts) else steps
        for name, (text, tensor) in passed.parameters.items():
            full = step.prefix + name
            owner, _, kind = full.rpartition(".")
            yield Gradient(prefix + full, "d" + weight_symbol(owner, kind, program), text, tensor, True, tokens)


def _total(shares: Sequence[Share]) -> Share:
    """Add the summands of a gradient, in the order of the forward pass."""
    total = shares[-1][1]
    for _, share in reversed(shares[:-1]):
        total = total + share
    return " + ".join(text for text, _ in reversed(shares)), total


def step_gradients(
    step: Step, symbols: Mapping[str, str], params: Mapping[str, Tensor], x: Sequence[Tensor], dy: Tensor,
    mask: Tensor | None = None,
) -> StepGradients:  # fmt: skip
    """Return what a step other than Experts passes back, given its parameters, its inputs and its output's gradient."""
    op, d = step.op, f"d {step.output}"
    match op:
        case ops.Linear():
            bias = {"bias": (f"Σ {d}", _over_tokens(dy))} if op.bias else {}
            weight = (dy.flatten(0, -2).mT @ x[0].flatten(0, -2)).add_(0.0)  # turns -0 into 0
            return StepGradients(
                ((f"{d} · {symbols['weight']}ᵀ", dy @ params["weight"]),),
                {"weight": (f"{step.inputs[0]}ᵀ · {d}", weight), **bias},
            )
        case ops.Activation():
            return _activation(step, op, symbols, params, x[0], dy)
        case ops.Multiply():
            return _multiply(step, op, symbols, params, x, dy)
        case ops.Add():
            scaled = (d, dy) if op.scale == 1 else (f"{op.scale:g} · {d}", dy * op.scale)
            bias = {"bias": (f"Σ {d}", _over_tokens(dy))} if op.bias else {}
            return StepGradients((*[(d, dy)] * (len(x) - 1), scaled), bias)
        case ops.Norm():
            return _norm(step, op, symbols, params, x[0], dy)
        case ops.Dropout():
            if mask is None:
                return StepGradients(((d, dy),), {})
            kept = torch.where(mask, dy, torch.zeros((), dtype=dy.dtype, device=dy.device)) / (1 - op.p)
            return StepGradients(((f"{d} / (1 - {op.p:g}) where kept, else 0", kept),), {})
        case ops.Route():
            return _route(step, op, symbols, params, x, dy)
        case ops.AllReduce():
            return StepGradients(((d, dy),), {})
        case _:
            raise AssertionError(f"backward has no branch for {type(op).__name__}")


def _over_tokens(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2).sum(0)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in at least float32, in which torch computes slopes and norms of 16-bit values."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _activation(
    step: Step, op: ops.Activation, symbols: Mapping[str, str], params: Mapping[str, Tensor], x: Tensor, dy: Tensor
) -> StepGradients:
    """d x = d y ⊙ f'(x), with a slope of 0 beyond a limit; a learned parameter's gradient is a sum over all values."""
    d, name = f"d {step.output}", step.inputs[0]
    wide, upstream = _wide(x, dy)
    m = with_learned(NAMESPACE, {n: _wide(p)[0].reshape(()) for n, p in params.items()}) if params else NAMESPACE
    text = d if op.function == "identity" else f"{d} ⊙ {op.function}'({name})"
    if not replace(op, plus=0.0).unlimited:
        text = f"{d} ⊙ f'({name}), f({name}) = {replace(op, plus=0.0).formula((name,), str)}"
    share = text, (upstream * limited_slope(op, wide, m) + 0.0).to(x.dtype)  # turns -0 into 0
    inside = clipped(op, wide, m)
    counts = 1.0 if op.most is None else (unlimited(op, inside, m) <= op.most)
    of_parameters = {
        n: (f"Σ {d} ⊙ ∂f/∂{symbols[n]}", (upstream * counts * by(inside, m)).double().sum().reshape(params[n].shape))
        for n, by in TABLE[op.function].learned_slopes.items()
    }
    return StepGradients((share,), {n: (text, g.to(params[n].dtype)) for n, (text, g) in of_parameters.items()})


def _multiply(
    step: Step, op: ops.Multiply, symbols: Mapping[str, str], params: Mapping[str, Tensor], x: Sequence[Tensor],
    dy: Tensor,
) -> StepGradients:  # fmt: skip
    """d a = d y ⊙ b; the gradient of an input with one feature is summed over the features that it multiplies."""
    d, factor = f"d {step.output}", params.get("factor")
    shares: list[Share | None] = []
    for at, tensor in enumerate(x):
        names = [*([symbols["factor"]] if op.learned else []), *(n for i, n in enumerate(step.inputs) if i != at)]
        others = [*([] if factor is None else [factor]), *(t for i, t in enumerate(x) if i != at)]
        share = dy
        for other in others:
            share = share * other
        text = " ⊙ ".join([d, *names])
        if tensor.shape[-1] < dy.shape[-1]:
            text, share = f"Σ {text}, over features", share.sum(-1, keepdim=True)
        shares.append((text, share))
    if factor is None:
        return StepGradients(tuple(shares), {})
    product = dy
    for tensor in x:
        product = product * tensor
    by_feature = _over_tokens(product)
    total = by_feature.sum().reshape(1) if factor.numel() == 1 else by_feature
    return StepGradients(tuple(shares), {"factor": (f"Σ {' ⊙ '.join([d, *step.inputs])}", total)})


def _norm(
    step: Step, op: ops.Norm, symbols: Mapping[str, str], params: Mapping[str, Tensor], x: Tensor, dy: Tensor
) -> StepGradients:
    """d x = (g - n ⊙ mean(g ⊙ n)) / rms(x) for n = x / rms(x) and g = d y ⊙ weight; LayerNorm also subtracts mean(g).

    In the printed formula rms and std include eps.
    """
    d, name, weight = f"d {step.output}", step.inputs[0], params.get("weight")
    wide, upstream = _wide(x, dy)
    one = 1 if op.weight == "one_plus" else 0
    by = None if weight is None else one + _wide(weight)[0]
    first = by is not None and op.weigh == "input"
    entering = _wide((wide * by).to(x.dtype))[0] if first and by is not None else wide
    centred = entering - entering.mean(-1, keepdim=True) if op.kind == "layernorm" else entering
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + op.eps)
    n = centred * inverse
    g = upstream if by is None or first else upstream * by
    shift = g.mean(-1, keepdim=True) if op.kind == "layernorm" else 0.0
    back = inverse * (g - shift - n * (g * n).mean(-1, keepdim=True))
    symbol = symbols.get("weight", "")
    factor = f"(1 + {symbol})" if one else symbol
    read = f"{factor} ⊙ {name}" if first else name
    size = "std" if op.kind == "layernorm" else "rms"
    minus = " - mean(g)" if op.kind == "layernorm" else ""
    normed = f"({name} - mean({name})) / std({name})" if op.kind == "layernorm" else f"({read}) / rms({read})"
    normed = normed.replace(f"({name}) /", f"{name} /")
    text = f"(g{minus} - n ⊙ mean(g ⊙ n)) / {size}({read}), n = {normed}, g = {d}"
    text += f" ⊙ {factor}" if factor and not first else ""
    parameters: dict[str, Share] = {"bias": (f"Σ {d}", _over_tokens(dy))} if op.bias else {}
    if weight is not None and by is not None:
        if first:
            parameters["weight"] = (f"Σ d({read}) ⊙ {name}", _over_tokens(back * wide).to(weight.dtype))
            text, back = f"{factor} ⊙ {text}", back * by
        else:
            n_read = n if one else n.to(x.dtype)  # rounded before it is multiplied, except by 1 + weight
            parameters["weight"] = (f"Σ {d} ⊙ n, n = {normed}", _over_tokens(upstream * n_read).to(weight.dtype))
    return StepGradients(((text, back.to(x.dtype)),), {k: parameters[k] for k in op.parameters()})


# --- routing ----------------------------------------------------------------------------------------------------------


def _route(
    step: Step, op: ops.Route, symbols: Mapping[str, str], params: Mapping[str, Tensor], x: Sequence[Tensor], dy: Tensor
) -> StepGradients:
    """Pass the gradient of the weights to the logits: through scale, renormalisation and scores of the chosen experts.
    The choice (groups, corrections, a table) passes no gradient."""
    logits, d = x[0], f"d {step.output}"
    work = logits if op.score_dtype == "input" else logits.float()
    g, parameters = dy.to(work.dtype), dict[str, Share]()
    text = d if op.scale == 1 else f"{op.scale:g} · {d}"
    if not (op.chooses or op.renormalise):
        back = through_scores(op, work, g * op.scale)
        return StepGradients(((_score_text(op, step.inputs[0], text), back.to(logits.dtype)),), {})
    scores = scores_of(op, work) if op.order == "score_first" else work
    chosen = experts_of(op, params, scores, x[1] if len(x) > 1 else None)
    if op.order == "one_by_one":
        values = one_by_one(op, work)[1]
    else:
        values = scores.gather(-1, chosen) if op.order == "score_first" else scores_of(op, work.gather(-1, chosen))
    total = values.sum(-1, keepdim=True) + op.eps
    renormalised = op.renormalise and op.order == "score_first"
    weights = values / total if renormalised else values
    g = g.gather(-1, chosen)
    if op.learned_scale:
        each = g * weights * op.scale
        by_expert = _over_tokens(torch.zeros_like(work).scatter_add(-1, chosen, each))
        total_factor = by_expert if op.expert_scale else by_expert.sum().reshape(1)
        parameters["factor"] = (f"Σ {text} ⊙ w, w = the weights before the factor", total_factor)
        g = g * learned_scale(op, params, chosen).to(g.dtype)
        text = f"{symbols['factor']} · {text}"
    g = g * op.scale
    if renormalised:
        g = (g - (g * weights).sum(-1, keepdim=True)) / total
        text = f"({text} - Σ {text} ⊙ w) / Σ s, w = s / Σ s"
    if op.order == "one_by_one":
        back = _through_choices(op, work, g)
    elif op.order == "choose_first":
        inner = through_scores(op, work.gather(-1, chosen), g)
        back = torch.zeros_like(work).scatter_add(-1, chosen, inner)
    else:
        back = through_scores(op, work, torch.zeros_like(work).scatter_add(-1, chosen, g))
    if op.correction:
        parameters["correction"] = ("0: it only decides the choice", torch.zeros_like(params["correction"]))
    share = _score_text(op, step.inputs[0], f"{text} for the chosen"), back.to(logits.dtype)
    order = {n: parameters[n] for n in op.parameters()}
    return StepGradients(
        (share, *[None] * (len(x) - 1)), {n: (t, p.to(params[n].dtype)) for n, (t, p) in order.items()}
    )


def _score_text(op: ops.Route, logits: str, g: str) -> str:
    if op.score == "softmax":
        return f"s ⊙ (g - Σ g ⊙ s), s = softmax({logits}), g = {g}"
    return f"g ⊙ {op.score}'({logits}), s = {op.score}({logits}), g = {g}"


def through_scores(op: ops.Route, logits: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of the logits, given the gradient g of their scores."""
    if op.score != "softmax":
        return g * slope(op.score)(logits)
    scores = logits.softmax(-1)
    return scores * (g - (g * scores).sum(-1, keepdim=True))


def _through_choices(op: ops.Route, logits: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of the logits if experts are chosen one by one: each score has a softmax of its own, over the
    remaining experts that are close to the best (see `execute.one_by_one`)."""
    total, left = torch.zeros_like(logits), logits
    for at in range(op.top_k):
        best, expert = left.max(-1, keepdim=True)
        close = best - left <= op.threshold * torch.maximum(logits.abs(), best)
        only = torch.zeros_like(logits).scatter(-1, expert, g[..., at : at + 1])
        back = through_scores(op, left.masked_fill(~close, -torch.inf), only)
        total = total + back.masked_fill(~close, 0.0)
        left = left.scatter(-1, expert, -torch.inf)
    return total


# --- experts ----------------------------------------------------------------------------------------------------------


def _experts(
    step: Step, op: ops.Experts, ran: ForwardPass, weights: Mapping[str, Tensor], dy: Tensor
) -> Generator[Gradient, None, StepGradients]:
    """Yield the gradients inside every expert with tokens; return those of x, of the route and of all experts' weights.

    An expert without tokens has the gradient 0.
    """
    (x_name, route_name), d = step.inputs, f"d {step.output}"
    x, route = (ran.tensors[name].flatten(0, -2) for name in step.inputs)
    flat, dx, d_route = dy.flatten(0, -2), torch.zeros_like(x), torch.zeros_like(route)
    names = [name for inner in reversed(op.program) for name in inner.parameters()]  # as in a walk: the last step first
    totals = {name: torch.zeros_like(weights[step.prefix + name]) for name in names}
    texts = dict.fromkeys(totals, "0: no token reaches an expert")
    if op.identity:
        dx += flat * route[:, -op.identity :].sum(-1, keepdim=True)
        d_route[:, -op.identity :] += (flat * x).sum(-1, keepdim=True)
    (entry,), last = block_inputs(op.program), op.program[-1].output
    columns = range(route.shape[-1])[op.entries]
    for one in received(step, op, x, route, weights):
        name, at = f"{step.output}.{one.expert}", one.expert - op.first
        inside = {s.output: ran.tensors[f"{name}.{s.output}"] for s in op.program} | {entry: one.x}
        g, share = flat[one.tokens], route[one.tokens, columns[at], None]
        text = d
        if op.weigh == "output":
            d_route[one.tokens, columns[at]] = (g * inside[last]).sum(-1)
            g, text = g * share, f"{route_name}[e] · {d}"
        shares = {last: [(text, g)]}
        for gradient in _walk(op.program, ran, one.weights, inside, shares, f"{name}.", one.tokens):
            if not gradient.weight:
                yield gradient
                continue
            parameter = gradient.name.removeprefix(f"{name}.")
            (totals[parameter] if op.is_common(parameter) else totals[parameter][at]).add_(gradient.tensor)
            texts[parameter] = gradient.formula + (", summed over experts" if op.is_common(parameter) else " of each e")
        if entry not in shares:
            continue
        _, g = _total(shares[entry])
        if op.weigh == "input":
            d_route[one.tokens, columns[at]] = (g * x[one.tokens]).sum(-1)
            g = g * share
        dx.index_add_(0, one.tokens, g)
    if op.weigh == "input":
        expert = f"expert_e'({route_name}[e] · {x_name})ᵀ · {d}"
        of_x, of_route = f"Σ {route_name}[e] · {expert}", f"{x_name} · {expert}"
    else:
        of_x = f"Σ {route_name}[e] · expert_e'({x_name})ᵀ · {d}"
        of_route = f"{d} · expert_e({x_name}) for each chosen e"
    shape = ran.tensors[x_name].shape
    assert prod(shape) == dx.numel()
    return StepGradients(
        ((of_x, dx.reshape(shape)), (of_route, d_route.reshape(ran.tensors[route_name].shape))),
        {name: (texts[name], total) for name, total in totals.items()},
    )
