"""A kernel's output against float64: for many numbers of tokens, at odd widths, on special values, next to NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import Experts, Route, Step
from ffncli.errors import FFNError
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.weights import random_weights
from ffncli.run.verify.checks.row import CheckRow
from ffncli.run.verify.checks.trial import KernelTrial, counted_tokens

_FEW = 5  # tokens of a special input
_ODD_WIDTHS = ((33, 70), (19, 101))  # d_model, d_ff
_SOME = 17  # tokens where their number does not matter


def shapes(trial: KernelTrial) -> Iterator[CheckRow]:
    """Its output for every number of tokens."""
    judge = trial.judge("shapes")
    for count in trial.token_counts:
        x = trial.draw(count)
        yield judge.equal(counted_tokens(count), trial.call(x), trial.reference(x))


def widths(trial: KernelTrial) -> Iterator[CheckRow]:
    """The same block at odd widths, with random weights. A kernel may refuse these when it is loaded."""
    for d_model, d_ff in _ODD_WIDTHS:
        subject, spec = f"{d_model}x{d_ff}", replace(trial.spec, d_model=d_model, d_ff=d_ff)
        ffn = kernel_steps(steps(spec))
        other = trial.with_block(ffn, random_weights(ffn, trial.generator, trial.block.dtype), spec)
        judge = other.judge("widths")
        try:
            refusal = other.load()
        except FFNError as error:
            refusal = error.message
        if refusal is not None:
            yield judge.skips(subject, refusal)
            continue
        for count in (3, _SOME):
            x = other.draw(count)
            yield judge.equal(f"{subject}, {counted_tokens(count)}", other.call(x), other.reference(x))


def special(trial: KernelTrial) -> Iterator[CheckRow]:
    """Inputs on which shortcuts go wrong. An error below the smallest normal number passes: some hardware flushes."""
    judge = trial.judge("special")
    numbers = torch.finfo(trial.block.dtype)
    for subject, x in _special_inputs(trial).items():
        reference = trial.reference(x)
        if not float(reference.abs().max()) <= numbers.max / 4:
            yield judge.skips(subject, "the output would be too large for the dtype")
            continue
        row = judge.equal(subject, trial.call(x), reference)
        if row.passed is False and row.max_error is not None and row.max_error <= 4 * numbers.tiny:
            row = replace(row, passed=True, note="off by less than the smallest normal number")
        yield row


def _special_inputs(trial: KernelTrial) -> Mapping[str, Tensor]:
    """By what they are, [few tokens, d_model]. Where a router chooses, no input has experts that score the same."""
    dtype, d_model = trial.block.dtype, trial.spec.d_model
    drawn, numbers = trial.draw(_FEW), torch.finfo(dtype)
    past_overflow = math.log(numbers.max)  # of exp: |x| is up to 4 times as much
    inputs = {
        "equal tokens": drawn[:1].repeat(_FEW, 1),
        "large numbers": trial.draw(_FEW, past_overflow),
    }
    if trial.routed:
        return inputs
    alone = torch.zeros(_FEW, d_model, dtype=dtype)
    alone[torch.arange(_FEW), torch.arange(_FEW) % d_model] = 1.0
    return inputs | {
        "one value per token": drawn[:, :1].repeat(1, d_model),
        "one number that is not 0": alone,
        "zeros": torch.zeros(_FEW, d_model, dtype=dtype),
        "-0": -torch.zeros(_FEW, d_model, dtype=dtype),
        "subnormal numbers": (drawn.double() * numbers.tiny / 8).to(dtype),
    }


def isolation(trial: KernelTrial) -> Iterator[CheckRow]:
    """NaN and infinities in one token of several, and the call after that."""
    judge, x = trial.judge("isolation"), trial.draw(_FEW)
    reference = trial.reference(x)
    at = _FEW // 2
    others = [token for token in range(_FEW) if token != at]
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = x.clone()
        spoiled[at, 0] = bad
        yield judge.equal(f"{bad:g} in another token", trial.call(spoiled)[others], reference[others])
    yield judge.equal("after NaN", trial.call(x), reference)


def experts(trial: KernelTrial) -> Iterator[CheckRow]:
    """The experts in another order, with their rows of the router: the same block."""
    judge = trial.judge("experts")
    ffn = trial.block.ffn
    route = next((step for step in ffn if isinstance(step.op, Route)), None)
    if route is None or not isinstance(route.op, Route):
        yield judge.skips("in another order", "the block has no experts")
        return
    if route.op.groups > 1:
        yield judge.skips("in another order", "its experts are in groups: their order has a meaning")
        return
    x = trial.draw(_SOME)
    reference = trial.reference(x)
    other = trial.with_block(ffn, _reordered(ffn, route, trial.block.ffn_weights, trial.generator))
    if (refusal := other.load()) is not None:
        yield judge.skips("in another order", refusal)
        return
    yield judge.equal("in another order", other.call(x), reference)


def _reordered(
    ffn: tuple[Step, ...], route: Step, weights: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """The weights with the experts in another order; experts that return their token as it is stay the last."""
    holder = next(step for step in ffn if isinstance(step.op, Experts) and not step.op.always)
    assert isinstance(holder.op, Experts)
    count = holder.op.experts.size
    order = torch.randperm(count, generator=generator)
    of_router = {"router.weight", "router.bias", *route.parameters()}
    of_experts = {name for name in holder.op.parameters() if not holder.op.is_common(name)}
    changed = dict(weights)
    for name, tensor in weights.items():
        if name in of_experts:
            changed[name] = tensor[order].contiguous()
        elif name in of_router:
            changed[name] = torch.cat([tensor[:count][order], tensor[count:]])
    return changed
