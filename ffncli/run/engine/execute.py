"""The reference implementation: runs the steps in torch, one after the other, and yields every intermediate.

It is written for readability, not speed; kernels are compared with it. Each tensor is freed after its last use, or
overwritten by an elementwise step if the caller allows that, so at most two of the three wide intermediates are in
memory at once. `function` turns a row of the activation table into a torch function: the native call if the table names
one, otherwise the row's own formula.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block import steps as ops
from ffncli.block.activations import TABLE
from ffncli.block.formulas import SCALAR, with_learned
from ffncli.block.steps import Step, block_inputs, parameters, tables
from ffncli.block.value import unlimited
from ffncli.errors import ExitCode, FFNError, option


@dataclass(frozen=True)
class Mode:
    """The mode of a run, eval by default. In training, dropout keeps the values where `masks[name]` is True; if there
    is no mask, dropout draws a mask from `generator`. Every mask in use is appended to the list `kept_masks`, if given.

    `reduce` sums a tensor over ranks, for sharded steps. `linear` computes a Linear from its step, its input, its
    weight and its bias. `edits` maps the printed name of a step to a function that returns what later steps read in
    place of the step's output.
    """

    train: bool = False
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    generator: torch.Generator | None = None
    kept_masks: list[Tensor] | None = None
    reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor
    linear: Callable[[Step, Tensor, Tensor, Tensor | None], Tensor] = lambda step, *x: functional.linear(*x)
    edits: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


EVAL = Mode()
_ELEMENTWISE = (ops.Activation, ops.Multiply, ops.Add)
_CHUNK = 1 << 20  # values per chunk when a step overwrites its argument


@dataclass(frozen=True)
class Event:
    """One intermediate: its printed name (`experts.3.gate` inside an expert), its step, its tensor.

    For steps inside an expert, `expert` is the expert's index and `tokens` are the flat indices of the tokens routed to
    it, one per row.
    """

    name: str
    step: Step
    tensor: Tensor
    expert: int | None = None
    tokens: Tensor | None = None


def execute(
    steps: Sequence[Step],
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    mode: Mode = EVAL,
    keep: frozenset[str] | None = None,
) -> Iterator[Event]:
    """Yield every step's output in order; steps inside experts come before their Experts step.

    `inputs` maps each input of the block to a tensor [..., d_model]; `weights` are canonical, in the inputs' dtype.
    Inputs and the tensors of the steps named in `keep` (None: all steps) are never overwritten; other tensors may be
    overwritten once the next event is requested. Raises FFNError if a weight is missing or has another shape.
    """
    for name, axes in {**parameters(steps), **tables(steps)}.items():
        shape = tuple(weights[name].shape) if name in weights else None
        if shape != tuple(axis.size for axis in axes):
            raise FFNError(f"weight {name} has shape {shape}, but the block needs {[axis.size for axis in axes]}")
    last_use = {name: at for at, step in enumerate(steps) for name in step.inputs}
    tensors = dict(inputs)
    free: set[str] = set()  # names of tensors that nothing else refers to, so they may be overwritten
    for at, step in enumerate(steps):
        arguments = [tensors[name] for name in step.inputs]
        if isinstance(step.op, ops.Experts):
            result, fresh = (yield from _experts(step, step.op, arguments, weights, mode, keep)), True
        else:
            params = {name.rpartition(".")[2]: weights[name] for name in (*step.parameters(), *step.tables())}
            last = [tensors[name] for name in step.inputs if name in free and last_use[name] == at]
            with possible(step, arguments[0]):
                result, fresh = _result(step, params, arguments, mode, last)
            del last
        if (edit := mode.edits.get(step.output)) is not None:
            result, fresh = edit(result), True
        if not fresh:
            free -= set(step.inputs)
        elif keep is not None and step.output not in keep:
            free.add(step.output)
        tensors[step.output] = result
        # Drop every reference immediately, so that a tensor's memory is free after its last use.
        del arguments
        for name in {*step.inputs, step.output}:
            if last_use.get(name, at) == at:
                del tensors[name]
        yield Event(step.output, step, result)
        del result


def run(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], mode: Mode = EVAL
) -> Tensor:
    """Return only the block's output."""
    tensor = None
    for event in execute(steps, weights, inputs, mode):
        tensor = event.tensor
    assert tensor is not None
    return tensor


@contextmanager
def possible(step: Step, x: Tensor) -> Iterator[None]:
    """A context that raises FFNError if torch cannot compute the step in x's dtype on its device."""
    try:
        yield
    except NotImplementedError:  # torch: "…" not implemented for 'Half'
        dtype = str(x.dtype).removeprefix("torch.")
        message = f"step '{step.output}' cannot be computed in {dtype} on {x.device.type}: torch does not implement it"
        raise FFNError(message, f"use {option('dtype', 'fp32')}", ExitCode.ENVIRONMENT) from None


def _result(
    step: Step, params: Mapping[str, Tensor], x: Sequence[Tensor], mode: Mode, last: Sequence[Tensor]
) -> tuple[Tensor, bool]:
    """Return (the step's output, whether it is a new tensor rather than an argument). The tensors in `last` are used
    for the last time and may be overwritten."""
    if isinstance(step.op, _ELEMENTWISE) and all(tensor.is_contiguous() for tensor in x):
        shape = step.op.shape(*(tuple(tensor.shape) for tensor in x))
        for over in last:
            if tuple(over.shape) == shape and all(tensor.dtype == over.dtype for tensor in x):
                return _overwrite(over, step, params, x, mode), True
    result = apply(step, params, x, mode)
    return result, not isinstance(step.op, ops.AllReduce) and all(result is not tensor for tensor in x)


def _overwrite(over: Tensor, step: Step, params: Mapping[str, Tensor], x: Sequence[Tensor], mode: Mode) -> Tensor:
    """Compute the step into the memory of its argument `over`, a chunk at a time, so that no tensor of that size is
    allocated.

    Chunks begin at multiples of the SIMD width; with other offsets, torch computes some functions with an error of one
    ulp.
    """
    alike = all(tensor.shape == over.shape for tensor in x) and not (isinstance(step.op, ops.Add) and step.op.bias)
    width = 1 if alike else over.shape[-1]  # whole rows if arguments must broadcast
    parts = [tensor.reshape(-1, width if tensor.shape == over.shape else 1) for tensor in x]
    out = over.view(-1, width)
    size = max(1, _CHUNK // max(1, width))
    for start in range(0, out.shape[0], size):
        part = slice(start, start + size)
        out[part] = apply(step, params, [tensor[part] for tensor in parts], mode)
    return over


def apply(step: Step, params: Mapping[str, Tensor], x: Sequence[Tensor], mode: Mode = EVAL) -> Tensor:
    """Return the output of a step other than Experts; the keys of `params` are the last parts of parameter names."""
    op: ops.Op = step.op
    match op:
        case ops.Linear():
            return mode.linear(step, x[0], params["weight"], params.get("bias"))
        case ops.Activation():
            return activation(op, params, x[0])
        case ops.Multiply():
            out = x[0]
            for factor in x[1:]:
                out = out * factor
            return out * params["factor"] if op.learned else out
        case ops.Add():
            terms = (*x[:-1], x[-1] if op.scale == 1 else x[-1] * op.scale)
            return reduce(torch.add, (*terms, params["bias"]) if op.bias else terms)
        case ops.Norm():
            return norm(op, params, x[0])
        case ops.Dropout():
            return _dropout(step.output, op, x[0], mode)
        case ops.Route():
            return route(op, params, *x)
        case ops.AllReduce():
            return mode.reduce(x[0])
        case _:
            raise AssertionError(f"execute has no branch for {type(op).__name__}")


def activation(op: ops.Activation, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return min(f(clip(x)), most) + plus; `params` contains the learned parameters of f."""
    if op.low is not None or op.high is not None:
        x = x.clamp(op.low, op.high)
    y: Tensor = function(op.function, params)(x) if op.soft_cap is None else unlimited(op, x, NAMESPACE)
    if op.most is not None:
        y = y.clamp(max=op.most)
    return y + op.plus if op.plus else y


def norm(op: ops.Norm, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Compute LayerNorm with torch, or RMSNorm x / √(mean(x²) + eps) (Zhang & Sennrich 2019) in at least float32."""
    weight = params.get("weight")
    if op.weigh == "input" and weight is not None:
        at_least = torch.promote_types(x.dtype, torch.float32)
        scaled = (x.to(at_least) * ((1 if op.weight == "one_plus" else 0) + weight.to(at_least))).to(x.dtype)
        bias = {"bias": params["bias"]} if "bias" in params else {}
        return norm(replace(op, weight="none", weigh="output"), bias, scaled)
    if op.kind == "layernorm":
        if op.weight == "one_plus" and weight is not None:
            weight = 1 + weight
        return functional.layer_norm(x, (x.shape[-1],), weight, params.get("bias"), op.eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + op.eps)
    if op.weight == "one_plus" and weight is not None:  # Gemma multiplies before rounding to x's dtype, Llama after
        normed = (wide * (1 + weight.to(wide.dtype))).to(x.dtype)
    else:
        normed = wide.to(x.dtype) if weight is None else wide.to(x.dtype) * weight
    return normed + params["bias"] if "bias" in params else normed


def _dropout(name: str, op: ops.Dropout, x: Tensor, mode: Mode) -> Tensor:
    if not mode.train:
        return x
    keep = mode.masks.get(name)
    if keep is None:
        draws = torch.rand(x.shape, generator=mode.generator, device=mode.generator.device if mode.generator else None)
        keep = (draws >= op.p).to(x.device)
    if mode.kept_masks is not None:
        mode.kept_masks.append(keep)
    return torch.where(keep, x / (1 - op.p), torch.zeros((), dtype=x.dtype, device=x.device))


def route(op: ops.Route, params: Mapping[str, Tensor], logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the routing weights [..., experts] for router logits [..., experts]; unchosen experts have weight 0.

    `params` contains the correction, the factor and the table, if the op has them; `ids` [..., 1] are the token ids.
    """
    work = logits if op.score_dtype == "input" else logits.float()
    if not (op.chooses or op.renormalise):  # a softmax over the whole axis, such as a vocabulary; nothing is chosen
        return (scores_of(op, work) * op.scale).to(logits.dtype)
    scores = scores_of(op, work) if op.order == "score_first" else work
    chosen = experts_of(op, params, scores, ids)
    if op.order == "one_by_one":
        values = one_by_one(op, work)[1]
    elif op.order == "choose_first":
        values = scores_of(op, work.gather(-1, chosen))
    else:
        values = scores.gather(-1, chosen)
        if op.renormalise:
            values = values / (values.sum(-1, keepdim=True) + op.eps)
    values = values if op.scale == 1 else values * op.scale
    values = values * learned_scale(op, params, chosen).to(values.dtype) if op.learned_scale else values
    # scatter_add, because a table may repeat an expert.
    return torch.zeros_like(work).scatter_add(-1, chosen, values).to(logits.dtype)


def experts_of(op: ops.Route, params: Mapping[str, Tensor], scores: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the indices [..., taken] of each token's experts, from the scores [..., experts], or from the logits if
    the choice comes first. No gradient passes through the choice."""
    if op.order == "one_by_one":
        return one_by_one(op, scores)[0]
    if ids is None:
        choosable, correction = scores[..., : op.experts.size - op.always], params.get("correction")
        choice = choosable if correction is None else choosable + correction.to(scores.dtype)
        choice = choice if op.order == "choose_first" else _within_groups(op, choice)
        chosen = choice.topk(op.top_k, -1).indices
    else:
        chosen = params["lookup"][ids.squeeze(-1)]
    if op.always:
        last = torch.arange(op.experts.size - op.always, op.experts.size, device=chosen.device)
        chosen = torch.cat([chosen, last.expand(*chosen.shape[:-1], -1)], -1)
    return chosen


def learned_scale(op: ops.Route, params: Mapping[str, Tensor], chosen: Tensor) -> Tensor:
    """Return the learned factor of the chosen experts' weights: one value, or one for each chosen expert."""
    return params["factor"][chosen] if op.expert_scale else params["factor"]


def scores_of(op: ops.Route, logits: Tensor) -> Tensor:
    """Return the scores [..., experts] of router logits."""
    return logits.softmax(-1) if op.score == "softmax" else function(op.score)(logits)


def one_by_one(op: ops.Route, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose experts one after the other; return (experts, scores). Each score is computed over the remaining experts
    whose logits are close to the chosen expert's logit."""
    chosen, values, left = [], [], logits
    for _ in range(op.top_k):
        best, expert = left.max(-1, keepdim=True)
        close = best - left <= op.threshold * torch.maximum(logits.abs(), best)
        values.append(scores_of(op, left.masked_fill(~close, -torch.inf)).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(chosen, -1), torch.cat(values, -1)


def _within_groups(op: ops.Route, choice: Tensor) -> Tensor:
    """Return the scores; experts outside the best `top_groups` groups get -inf, or 0 with `zero_outside`."""
    if op.groups == 1 or op.top_groups == op.groups:
        return choice
    grouped = choice.reshape(*choice.shape[:-1], op.groups, choice.shape[-1] // op.groups)
    best = grouped.topk(min(op.group_best, grouped.shape[-1]), -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(op.top_groups, -1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), 0.0 if op.zero_outside else -torch.inf).flatten(-2)


def _experts(
    step: Step,
    op: ops.Experts,
    arguments: Sequence[Tensor],
    weights: Mapping[str, Tensor],
    mode: Mode,
    keep: frozenset[str] | None,
) -> Generator[Event, None, Tensor]:
    """Yield the events of every chosen expert's program, run on the tokens routed to it; return the mixed output."""
    x, chosen = arguments
    flat, share = x.flatten(0, -2), chosen.flatten(0, -2)
    out = unmixed(op, flat, share)
    (entry,) = block_inputs(op.program)
    for one in received(step, op, flat, share, weights):
        result, prefix = one.x, f"{step.output}.{one.expert}."
        kept = None if keep is None else frozenset(n.removeprefix(prefix) for n in keep if n.startswith(prefix))
        inside = mode
        if mode.edits:
            edits = {n.removeprefix(prefix): edit for n, edit in mode.edits.items() if n.startswith(prefix)}
            inside = replace(mode, edits=edits)
        for event in execute(op.program, one.weights, {entry: one.x}, inside, kept):
            result = event.tensor
            yield Event(prefix + event.name, event.step, event.tensor, one.expert, one.tokens)
        mix(out, one, result)
    return out.reshape(*x.shape[:-1], out.shape[-1])


@dataclass(frozen=True)
class Received:
    """The work of one expert: the flat indices of its tokens, their rows `x`, and the expert's weights.

    `share` [rows, 1] is the router's weight, which multiplies the output; None if it has already multiplied the rows.
    """

    expert: int
    tokens: Tensor
    x: Tensor
    share: Tensor | None
    weights: Mapping[str, Tensor]


def received(
    step: Step, op: ops.Experts, x: Tensor, route: Tensor, weights: Mapping[str, Tensor]
) -> Iterator[Received]:
    """Yield, in order, the work of every expert with tokens among x [tokens, d]; route is [tokens, experts]."""
    route = route[:, op.entries]
    for e in route.any(0).nonzero().flatten().tolist():
        tokens = route[:, e].nonzero().flatten()
        share = route[tokens, e, None]
        params = op.of_one(weights, e, step.prefix)
        if op.weigh == "input":
            yield Received(op.first + e, tokens, x[tokens] * share, None, params)
        else:
            yield Received(op.first + e, tokens, x[tokens], share, params)


def unmixed(op: ops.Experts, x: Tensor, route: Tensor) -> Tensor:
    """Return the output [tokens, d] before any expert has run: zeros, plus the output of the identity experts."""
    out = torch.zeros(x.shape[0], op.shape(tuple(x.shape))[-1], dtype=x.dtype, device=x.device)
    if op.identity:
        out += x * route[:, -op.identity :].sum(-1, keepdim=True)
    return out


def mix(out: Tensor, one: Received, result: Tensor) -> None:
    """Add an expert's result to the output of its tokens."""
    out.index_add_(0, one.tokens, result if one.share is None else result * one.share)


# The counterparts of SCALAR's functions for tensors: torch has functions of the same names.
NAMESPACE = SimpleNamespace(**{name: getattr(torch, name) for name in vars(SCALAR)})


def function(name: str, learned: Mapping[str, Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """Return the activation f for tensors of any shape; `learned` has its learned parameters, one element each."""
    row = TABLE[name]
    if row.native is not None:
        call, options = row.native
        return partial(getattr(functional, call), **options)
    return partial(_call, row.f, with_learned(NAMESPACE, _numbers(learned)))


def slope(name: str, learned: Mapping[str, Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """Return df/dx for tensors, from the formula in the activation table."""
    return partial(_call, TABLE[name].slope, with_learned(NAMESPACE, _numbers(learned)))


def _call(f: Callable[[Any, Any], Any], m: Any, x: Tensor) -> Tensor:
    result: Tensor = f(x, m)
    return result


def _numbers(learned: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return one-element parameters as 0-dimensional tensors, which broadcast without adding an axis."""
    return {name: value.reshape(()) for name, value in (learned or {}).items()}


def halves_by_turns(first: Tensor, second: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Concatenate two tensors along `axis` and split them into even and odd rows: [0, 1], [2, 3] → [0, 2], [1, 3]."""
    rows = torch.cat([first, second], axis).movedim(axis, 0)
    return rows[::2].movedim(0, axis).contiguous(), rows[1::2].movedim(0, axis).contiguous()


def turns_as_halves(first: Tensor, second: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Interleave two tensors along `axis` and split the result in the middle: [0, 2], [1, 3] → [0, 1], [2, 3]."""
    rows = torch.stack([first.movedim(axis, 0), second.movedim(axis, 0)], 1).flatten(0, 1)
    half = len(first.movedim(axis, 0))
    return rows[:half].movedim(0, axis).contiguous(), rows[half:].movedim(0, axis).contiguous()
