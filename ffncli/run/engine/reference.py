"""The reference in float64: a block and its gradients, computed from the same rounded values, with one expert widened
at a time; and detection of tokens that rounding sends to other experts, or across a kink."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ffncli.block.analysis.gated import factor
from ffncli.block.steps import Activation, Experts, Route, Step, block_inputs, walk
from ffncli.run.engine.execute import EVAL, Event, Mode, execute, mix, received, run, unmixed

Weights = Mapping[str, Tensor]


def output_and_experts(
    steps: Sequence[Step], weights: Weights, inputs: Weights, mode: Mode = EVAL
) -> tuple[Tensor, Tensor | None]:
    """Return (the output, booleans [..., experts] that mark each token's experts, or None in a dense block)."""
    experts, tensor = None, None
    for event in execute(steps, weights, inputs, mode):
        tensor = event.tensor
        if isinstance(event.step.op, Route):
            experts = event.tensor != 0
    assert tensor is not None
    return tensor, experts


def in_float64(steps: Sequence[Step], weights: Weights, inputs: Weights) -> tuple[Tensor, Tensor | None]:
    """Run the block in float64; return the same pair as `output_and_experts`.

    To limit memory, the weights of only one step or one expert are widened at a time.
    """
    experts, tensor = None, None
    for event in events_in_float64(steps, weights, inputs):
        tensor = event.tensor
        if isinstance(event.step.op, Route):
            experts = event.tensor != 0
    assert tensor is not None
    return tensor, experts


def events_in_float64(steps: Sequence[Step], weights: Weights, inputs: Weights) -> Iterator[Event]:
    """Yield the intermediates of `in_float64`, in the order of `execute`."""
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
    """Widen tensors to float64; token ids and integer tables stay unchanged."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _expert_by_expert(step: Step, op: Experts, x: Tensor, chosen: Tensor, weights: Weights) -> Iterator[Event]:
    """Yield the intermediates and the mixed output in float64, in the order of `execute`, so the results are
    bit-identical to running `execute` in float64."""
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
    """Return (a mask of the tokens that went to the same experts in two runs, a remark on tokens that did not).

    If two experts have nearly the same score, rounding decides which expert is chosen, and then the whole output
    differs.
    """
    if a is None or b is None:
        return torch.ones(tokens, dtype=torch.bool), ""
    same = (a == b).all(-1).cpu()
    apart = int((~same).sum())
    return same, f"{apart} of {tokens} tokens left out: rounding sent them to other experts" if apart else ""


def routing_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps up to the choice of experts; empty in a dense block."""
    at = next((n for n, step in enumerate(steps) if isinstance(step.op, Route)), -1)
    return tuple(steps[: at + 1])


def steady_tokens(steps: Sequence[Step], weights: Weights, inputs: Weights, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return (a mask of the tokens that go to the same experts regardless of rounding, a remark on tokens that do not).

    The router runs in `dtype`, in float64, and in float64 with every value perturbed by a few rounding errors.
    """
    before, (first, *_) = routing_steps(steps), inputs.values()
    same, remark = torch.ones(first.shape[0], dtype=torch.bool), ""
    if before:
        _, here = output_and_experts(before, weights, inputs)
        generator, off = torch.Generator(first.device).manual_seed(0), 4 * torch.finfo(dtype).eps
        params = {name: weights[name] for step in before for name in (*step.parameters(), *step.tables())}
        # A token is steady only if neither exact float64 nor any of 16 random perturbations changes its experts.
        for scale in (0.0, *(off,) * 16):
            noisy = {n: perturbed(t, scale, generator) for n, t in inputs.items()}
            _, there = in_float64(before, {n: perturbed(t, scale, generator) for n, t in params.items()}, noisy)
            same &= same_experts(here, there, len(same))[0]
        apart = int((~same).sum())
        remark = f"{apart} of {len(same)} tokens left out: rounding decides which experts they go to" if apart else ""
    return same, remark


def perturbed(tensor: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Widen a tensor and perturb each value by a random relative error of about `scale`; integers stay unchanged."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=generator, device=generator.device).to(tensor.device)
    return tensor.double() * (1 + scale * noise)


def near_kinks(steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield, for every activation with kinks, the indices of the tokens that rounding may carry across a kink.

    A sum of n products is accurate to eps · √n of the largest sum. For 16-bit dtypes too, eps is float32's, since
    rounding the finished sum keeps its sign; for float64, eps is float64's.
    """
    if not any(_kinks(step.op) for _, step in walk(steps) if isinstance(step.op, Activation)):
        return
    (entering,) = inputs.values()
    eps = torch.finfo(torch.promote_types(entering.dtype, torch.float32)).eps
    tensors: dict[str, Tensor] = {}
    expert: int | None = None
    for event in events_in_float64(steps, weights, inputs):
        if event.expert != expert:  # an activation's input must come from the same expert
            tensors, expert = {}, event.expert
        tensors[event.name] = event.tensor
        if isinstance(event.step.op, Activation):
            z = tensors[event.name.removesuffix(event.step.output) + event.step.inputs[0]]
            margin = eps * math.sqrt(entering.shape[-1]) * z.abs().max()
            near = torch.zeros(len(z), dtype=torch.bool, device=z.device)
            for kink in _kinks(event.step.op):
                near |= ((z - kink).abs() <= margin).any(-1)
            yield near.nonzero().flatten() if event.tokens is None else event.tokens[near]


def _kinks(op: Activation) -> tuple[float, ...]:
    """Return the inputs at which the slope jumps."""
    return tuple(x for x, order in factor(op).row.kinks if order == 1)


def gradients_in_float64(
    steps: Sequence[Step], weights: Weights, inputs: Weights, upstream: Tensor, of_weights: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (the output, the gradients of inputs and weights by name), computed in float64 from the same values.

    `upstream` is the gradient of the output; integer tables and token ids have no gradients. `of_weights=False` skips
    the weight gradients; for a mixture in float64, they take four times the memory of bf16 weights.
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
    """An Experts step whose backward pass runs every expert again and adds to `gradients`."""

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
            """Add the gradients of x and `chosen` to the totals; return the gradients of the leaves."""
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
                        place += gradient  # a view into `gradients`
        return totals[0], totals[1], None, None, None
