"""Training small blocks: every seed's copy at once, then the output layer by least squares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.block.steps import Activation, Linear, Multiply, Step, parameters
from ffncli.block.value import value
from ffncli.run.engine.execute import NAMESPACE, execute, function

Weights = dict[str, Tensor]
Advance = Callable[[int], None]
SPREAD = math.sqrt(3)  # half the width of a uniform variable of unit variance
SLOPES = (0.5, 3.0)
RCOND = 1e-14  # of the largest singular value: smaller ones are rounding error
_TICK = 50  # training steps between two progress reports


def drawn(steps: Sequence[Step], seed: int) -> Weights:
    """One seed's weights, for inputs spread evenly over [-√3, √3]: every hidden unit has its kink inside that range.

    A unit is v·(x - p) with a direction v of length 0.5 to 3 and a kink p in the domain; with one input the bends of a
    layer are stratified. Depends only on the steps and the seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    out: Weights = {}
    for step in steps:
        if not isinstance(step.op, Linear):
            initial = TABLE[step.op.function].learned if isinstance(step.op, Activation) else {}
            out |= {f"{step.output}.{name}": torch.full((1,), value).double() for name, value in initial.items()}
            continue
        wide, into = step.op.out.size, step.op.into.size
        if step is steps[-1]:
            weight = torch.randn(wide, into, generator=generator, dtype=torch.float64) / math.sqrt(into)
            bias = torch.zeros(wide, dtype=torch.float64)
        else:
            direction = torch.randn(wide, into, generator=generator, dtype=torch.float64)
            length = SLOPES[0] + (SLOPES[1] - SLOPES[0]) * uniform(wide, 1)
            weight = direction / direction.norm(dim=1, keepdim=True) * length
            place = uniform(wide, into)
            if into == 1:
                place = (torch.arange(wide, dtype=torch.float64).unsqueeze(1) + place) / wide
            bias = -(weight * (2 * place - 1) * SPREAD).sum(1)
        out |= {f"{step.output}.weight": weight, f"{step.output}.bias": bias}
    return out


def train(
    steps: Sequence[Step], start: Sequence[Weights], x: Tensor, y: Tensor, count: int, tick: Advance
) -> list[Weights]:
    """Each seed's weights after `count` steps of Adam on its own samples; the seeds are independent.

    x [seeds, samples, inputs] has about unit variance, y [seeds, samples, 1]. In float32: its rounding
    error is far below the training error. Where it overflows, that seed's weights end as NaN or Inf.
    """
    unit = y.std((1, 2), keepdim=True)
    unit = torch.where(unit == 0, torch.ones_like(unit), unit)  # a constant stays unchanged
    x, y = x.float(), (y / unit).float()
    weights = {
        name: torch.stack([seed_weights[name] for seed_weights in start]).float().requires_grad_() for name in start[0]
    }
    most = min(0.1, 0.2 / math.sqrt(weights[f"{steps[-1].output}.weight"].shape[-1]))  # by d_ff
    adam = torch.optim.Adam(list(weights.values()), lr=most, fused=True)
    for at in range(count):
        adam.param_groups[0]["lr"] = most * _rate(at, count)
        adam.zero_grad()
        error = _together(steps, weights, x) - y
        error.square().mean(1).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
        if (at + 1) % _TICK == 0 or at + 1 == count:
            tick(at % _TICK + 1)
    trained = {name: tensor.detach().double() for name, tensor in weights.items()}
    last = steps[-1].output  # back to the target's unit
    trained[f"{last}.weight"] *= unit
    trained[f"{last}.bias"] *= unit.squeeze(2)
    return [{name: tensor[i] for name, tensor in trained.items()} for i in range(len(start))]


def _rate(at: int, count: int) -> float:
    """The learning rate as a share of its largest: it rises over a twentieth of the steps, then falls as a cosine."""
    rise = max(1, count // 20)
    if at < rise:
        return (at + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (at - rise) / max(1, count - rise)))


def unscaled(steps: Sequence[Step], weights: Weights, middle: float, scale: float) -> Weights:
    """The weights of the block that reads x, from those of the block that reads (x - middle) / scale."""
    out = dict(weights)
    for step in steps:
        if isinstance(step.op, Linear) and step.inputs == ("x",):
            weight = weights[f"{step.output}.weight"] / scale
            out[f"{step.output}.weight"] = weight
            out[f"{step.output}.bias"] = weights[f"{step.output}.bias"] - middle * weight.sum(1)
    return out


def refitted(steps: Sequence[Step], weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """The weights, the last step's by least squares on x [samples, inputs] and y [samples, 1]."""
    last = steps[-1]
    tensors = {event.name: event.tensor for event in execute(steps[:-1], _weights_of(steps[:-1], weights), {"x": x})}
    hidden = tensors[last.inputs[0]]
    table = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
    size = table.norm(dim=0)  # equal norms, or small columns would be cut off as rounding error
    size = torch.where(size == 0, torch.ones_like(size), size)
    solution = torch.linalg.lstsq(table / size, y, rcond=RCOND, driver="gelsd").solution / size.unsqueeze(1)
    return weights | {f"{last.output}.weight": solution[:-1].T.contiguous(), f"{last.output}.bias": solution[-1]}


def _weights_of(steps: Sequence[Step], weights: Weights) -> Weights:
    return {name: weights[name] for name in parameters(steps)}


def finite(weights: Mapping[str, Tensor]) -> bool:
    """Whether no weight is NaN or Inf."""
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def _together(steps: Sequence[Step], weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The block on [seeds, samples, inputs], every weight with a leading axis of seeds.

    `execute` has no such axis, and under vmap it takes twice as long, which dominates in blocks this small.
    The trained block is measured through `execute`.
    """
    tensors = {"x": x}
    for step in steps:
        tensors[step.output] = _apply(step, weights, [tensors[name] for name in step.inputs])
    return tensors[steps[-1].output]


def _apply(step: Step, weights: Mapping[str, Tensor], x: Sequence[Tensor]) -> Tensor:
    op: Any = step.op
    match op:
        case Linear():
            weight = weights[f"{step.output}.weight"].transpose(1, 2)
            return torch.baddbmm(weights[f"{step.output}.bias"].unsqueeze(1), x[0], weight)
        case Activation():
            learned = {name: weights[f"{step.output}.{name}"].unsqueeze(-1) for name in op.parameters()}
            if not op.unlimited:  # of gated units, whose functions have no learned parameters
                limited: Tensor = value(op, x[0], NAMESPACE)
                return limited
            if not learned:
                return function(op.function)(x[0])
            result: Tensor = TABLE[op.function].f(x[0], with_learned(NAMESPACE, learned))
            return result
        case Multiply():
            return x[0] * x[1]
        case _:
            raise AssertionError(f"no trained block has a {type(op).__name__}")
