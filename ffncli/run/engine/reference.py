"""The reference: a block in float64 from the same rounded numbers, and tokens that rounding sends to other experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ffncli.block.steps import Experts, Route, Step, block_inputs
from ffncli.run.engine.execute import EVAL, Event, Mode, execute, mix, received, unmixed

Weights = Mapping[str, Tensor]


def output_and_experts(
    steps: Sequence[Step], weights: Weights, inputs: Weights, mode: Mode = EVAL
) -> tuple[Tensor, Tensor | None]:
    """(the output, which experts each token went to as booleans, or None in a dense block)."""
    experts, tensor = None, None
    for event in execute(steps, weights, inputs, mode):
        tensor = event.tensor
        if isinstance(event.step.op, Route):
            experts = event.tensor != 0
    assert tensor is not None
    return tensor, experts


def in_float64(steps: Sequence[Step], weights: Weights, inputs: Weights) -> tuple[Tensor, Tensor | None]:
    """The same block in float64: the reference.

    One step's weights are widened at a time, of experts one expert's, so that memory stays bounded.
    """
    experts, tensor = None, None
    for event in events_in_float64(steps, weights, inputs):
        tensor = event.tensor
        if isinstance(event.step.op, Route):
            experts = event.tensor != 0
    assert tensor is not None
    return tensor, experts


def events_in_float64(steps: Sequence[Step], weights: Weights, inputs: Weights) -> Iterator[Event]:
    """The intermediates of `in_float64`, in the order of `execute`."""
    tensors = _in_float64(inputs)
    for step in steps:
        params = {name: weights[name] for name in (*step.parameters(), *step.tables())}
        arguments = {name: tensors[name] for name in step.inputs}
        if isinstance(step.op, Experts):
            x, chosen = arguments.values()
            events = _expert_by_expert(step, step.op, x, chosen, params)
        else:
            events = execute([step], _in_float64(params), arguments)
        for event in events:
            if event.name == step.output:
                tensors[step.output] = event.tensor
            yield event


def _in_float64(tensors: Weights) -> dict[str, Tensor]:
    """Token ids and tables of integers stay what they are."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _expert_by_expert(step: Step, op: Experts, x: Tensor, chosen: Tensor, weights: Weights) -> Iterator[Event]:
    """The intermediates and the mixed output in float64, in the order and so with the bits of `execute`."""
    flat, share = x.flatten(0, -2), chosen.flatten(0, -2)
    out = unmixed(op, flat, share)
    (entry,) = block_inputs(op.program)
    for one in received(step, op, flat, share, weights):
        result = one.x
        for event in execute(op.program, _in_float64(one.weights), {entry: one.x}):
            result = event.tensor
            yield Event(f"{step.output}.{one.expert}.{event.name}", event.step, event.tensor, one.expert, one.tokens)
        mix(out, one, result)
    yield Event(step.output, step, out.reshape(*x.shape[:-1], out.shape[-1]))


def same_experts(a: Tensor | None, b: Tensor | None, tokens: int) -> tuple[Tensor, str]:
    """(which tokens went to the same experts in two runs, a remark if some did not).

    If two experts score nearly the same, rounding decides which is chosen, and then the whole output differs.
    """
    if a is None or b is None:
        return torch.ones(tokens, dtype=torch.bool), ""
    same = (a == b).all(-1).cpu()
    apart = int((~same).sum())
    return same, f"{apart} of {tokens} tokens left out: rounding sent them to other experts" if apart else ""


def routing_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps up to the choice of experts; none in a dense block."""
    at = next((n for n, step in enumerate(steps) if isinstance(step.op, Route)), -1)
    return tuple(steps[: at + 1])


def steady_tokens(steps: Sequence[Step], weights: Weights, inputs: Weights, dtype: torch.dtype) -> tuple[Tensor, str]:
    """(which tokens go to the same experts regardless of rounding, a remark if some do not).

    The router runs in the dtype, in float64, and in float64 with every number perturbed by a few roundings.
    """
    before, (first, *_) = routing_steps(steps), inputs.values()
    same, remark = torch.ones(first.shape[0], dtype=torch.bool), ""
    if before:
        _, here = output_and_experts(before, weights, inputs)
        generator, off = torch.Generator(first.device).manual_seed(0), 4 * torch.finfo(dtype).eps
        params = {name: weights[name] for step in before for name in (*step.parameters(), *step.tables())}
        for scale in (0.0, *(off,) * 16):
            noisy = {n: _off(t, scale, generator) for n, t in inputs.items()}
            _, there = in_float64(before, {n: _off(t, scale, generator) for n, t in params.items()}, noisy)
            same &= same_experts(here, there, len(same))[0]
        apart = int((~same).sum())
        remark = f"{apart} of {len(same)} tokens left out: rounding decides which experts they go to" if apart else ""
    return same, remark


def _off(tensor: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """In float64, every number perturbed by a random share of itself, about `scale`; integers as they are."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=generator, device=generator.device).to(tensor.device)
    return tensor.double() * (1 + scale * noise)
