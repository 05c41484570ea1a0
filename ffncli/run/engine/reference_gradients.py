"""The reference's gradients in float64, with one expert's weights widened at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ffncli.block.steps import Experts, Step, block_inputs
from ffncli.run.engine.execute import mix, received, run, unmixed
from ffncli.run.engine.reference import Weights, in_float64, output_and_experts


def gradients_in_float64(
    steps: Sequence[Step], weights: Weights, inputs: Weights, upstream: Tensor, of_weights: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the output, the gradients of the inputs and of the weights by name), in float64 from the same rounded numbers.

    `upstream` is the gradient of the output; tables of integers and token ids have none. All experts of a mixture in
    float64 are four times their bf16, besides as much for their gradients; `of_weights` False leaves the latter out.
    """
    entering = _leaves(inputs)
    mixtures = {name for step in steps if isinstance(step.op, Experts) for name in step.parameters()}
    dense = _leaves({name: tensor for name, tensor in weights.items() if name not in mixtures}, of_weights)
    gradients = {
        name: torch.zeros(weights[name].shape, dtype=torch.float64, device=weights[name].device)
        for name in mixtures
        if of_weights
    }
    tensors = dict(entering)
    with torch.enable_grad():
        for step in steps:
            arguments = {name: tensors[name] for name in step.inputs}
            if isinstance(step.op, Experts):
                tensors[step.output] = _MixtureGradient.apply(  # type: ignore[no-untyped-call]
                    *arguments.values(), step, weights, gradients
                )
            else:
                params = {name: dense[name] for name in (*step.parameters(), *step.tables())}
                tensors[step.output], _ = output_and_experts([step], params, arguments)
        out = tensors[steps[-1].output]
        every = entering | (dense if of_weights else {})
        leaves = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
        gradients_of_leaves = torch.autograd.grad(out, list(leaves.values()), upstream.double(), allow_unused=True)
    gradients |= {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients_of_leaves, strict=True)
    }
    return out.detach(), gradients


def _leaves(tensors: Weights, differentiable: bool = True) -> dict[str, Tensor]:
    return {
        name: tensor.detach().double().requires_grad_(differentiable) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


class _MixtureGradient(torch.autograd.Function):
    """An Experts step. Its backward pass computes every expert again, and adds to `gradients` those of its weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, chosen: Tensor, step: Step, weights: Weights, gradients: Mapping[str, Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, chosen)
        ctx.about = step, weights, gradients
        return in_float64([step], weights, dict(zip(step.inputs, (x, chosen), strict=True)))[0]

    @staticmethod
    @torch.enable_grad()
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        step, weights, gradients = ctx.about
        x, chosen = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        flat, share = x.flatten(0, -2), chosen.flatten(0, -2)
        totals = [torch.zeros_like(x), torch.zeros_like(chosen)]

        def add(out: Tensor, leaves: Sequence[Tensor] = ()) -> Sequence[Tensor | None]:
            """Add the gradients of x and of the choice; returns those of the leaves."""
            up = upstream.reshape(out.shape)
            of_x, of_chosen, *more = torch.autograd.grad(out, (x, chosen, *leaves), up, allow_unused=True)
            for total, part in zip(totals, (of_x, of_chosen), strict=True):
                if part is not None:
                    total += part
            return more

        if (rest := unmixed(step.op, flat, share)).requires_grad:
            add(rest)
        (entry,) = block_inputs(step.op.program)
        places = received(step, step.op, flat, share, gradients) if gradients else None
        for one in received(step, step.op, flat, share, weights):
            leaves = _leaves(one.weights, bool(gradients))
            out = torch.zeros_like(rest)
            mix(out, one, run(step.op.program, leaves, {entry: one.x}))
            of_leaves = add(out, list(leaves.values()) if gradients else [])
            if places is not None:
                for place, gradient in zip(next(places).weights.values(), of_leaves, strict=True):
                    if gradient is not None:
                        place += gradient  # a view of the whole
        return totals[0], totals[1], None, None, None
