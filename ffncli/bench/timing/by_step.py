"""Where does the time go: every step of a block alone, and the whole block, which calls the same steps in turn.

Activations are torch's own calls where it has them, as in the kernel eager; the rest is what engine.execute computes.

The steps' shares of the block's time need not add to 1. Alone and again and again, a step finds its inputs and weights
in another cache state than behind its neighbours; and the block's own time holds what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ffncli.bench.records import BLOCK
from ffncli.block.cost import step_costs
from ffncli.block.steps import Activation, Experts, Step, block_inputs
from ffncli.kernels.activations import activation
from ffncli.run.engine.execute import Received, apply, execute, received, run

Weights = Mapping[str, Tensor]
Own = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StepArm:
    """One step that can be called again and again: `gate`, `experts[e].gate` (of all experts together), or the block.

    `op` is the op's class in lower case. `bytes` are those of what the call reads (inputs, weights) and writes, each
    once; of experts, the weights of those alone that any token goes to.
    """

    name: str
    op: str
    call: Callable[[], object]
    flops: int
    bytes: int


def step_arms(steps: Sequence[Step], weights: Weights, x: Tensor, own: Own = torch.clone) -> tuple[StepArm, ...]:
    """The whole block, the baseline, first; then its steps in order, those inside experts behind the experts.

    `steps` are kernel steps, `weights` canonical, x [tokens, d_model] what enters. No arm changes what it is given, so
    every call of one gives the same. `own` copies a tensor to where an arm shall have it: every arm has its own
    buffers, two or three times the block's weights in all. Forward only; raises FFNError as `execute` does.
    """
    with torch.no_grad():
        return tuple(_arms(steps, weights, x, own))


def _arms(steps: Sequence[Step], weights: Weights, x: Tensor, own: Own) -> Iterator[StepArm]:
    (entry,) = block_inputs(steps)
    known = {entry: x} | {e.name: e.tensor for e in execute(steps, weights, {entry: x}) if e.expert is None}
    costs = step_costs(steps, {entry: tuple(x.shape)})
    read = sum(_weight_bytes(step, weights, known) for step in steps)
    held = {name: own(weights[name]) for step in steps for name in step.parameters()}
    moved = x.nbytes + read + known[steps[-1].output].nbytes
    flops = sum(cost.flops for cost in costs.values())
    yield StepArm(BLOCK, BLOCK, _in_turn(steps, held, entry, own(x)), flops, moved)
    for step in steps:
        given = {name: own(known[name]) for name in step.inputs}
        held = {name: own(weights[name]) for name in step.parameters()}
        moved = sum(known[name].nbytes for name in (*given, step.output)) + _weight_bytes(step, weights, known)
        if isinstance(step.op, Experts):
            call: Callable[[], object] = partial(run, (step,), held, given)
        else:
            last = {name.rpartition(".")[2]: tensor for name, tensor in held.items()}
            call = partial(_function(step), last, [given[name] for name in step.inputs])
        yield StepArm(step.output, _word(step), call, costs[step.output].flops, moved)
        if isinstance(step.op, Experts):
            yield from _inside(step, step.op, weights, known, own)


def _inside(step: Step, op: Experts, weights: Weights, known: Weights, own: Own) -> Iterator[StepArm]:
    """One step of the program, of every expert that any token goes to, one expert after the other."""
    parts = list(_received(step, op, weights, known))
    if not parts:
        return
    (entry,) = block_inputs(op.program)
    made = [{entry: p.x} | {e.name: e.tensor for e in execute(op.program, p.weights, {entry: p.x})} for p in parts]
    costs = step_costs(op.program, {entry: (sum(len(p.x) for p in parts), parts[0].x.shape[-1])})
    for inner in op.program:
        calls: list[Callable[[], Tensor]] = []
        moved = 0
        for part, there in zip(parts, made, strict=True):
            held = {name.rpartition(".")[2]: own(part.weights[name]) for name in inner.parameters()}
            given = [own(there[name]) for name in inner.inputs]
            calls.append(partial(_function(inner), held, given))
            moved += sum(t.nbytes for t in (*held.values(), *given, there[inner.output]))
        name = f"{step.output}[e].{inner.output}"
        yield StepArm(name, _word(inner), partial(_every, calls), costs[inner.output].flops, moved)


def _function(step: Step) -> Callable[[Weights, Sequence[Tensor]], Tensor]:
    """What one step that is no Experts makes of (its parameters by their last names, its inputs)."""
    op = step.op
    if isinstance(op, Activation):
        call = activation(op)
        return lambda own, x: call(x[0], own)
    return lambda own, x: apply(step, own, x)


def _in_turn(steps: Sequence[Step], held: Weights, entry: str, x: Tensor) -> Callable[[], Tensor]:
    """The whole block: step after step on what those before it gave, freed after its last use."""
    parts: list[tuple[Step, Callable[[Weights, Sequence[Tensor]], Tensor], Weights]] = []
    for step in steps:
        full = {name: held[name] for name in step.parameters()}
        if isinstance(step.op, Experts):
            parts.append((step, partial(_experts, step), full))
        else:
            own = {name.rpartition(".")[2]: tensor for name, tensor in full.items()}
            parts.append((step, _function(step), own))
    last_use = {name: step.output for step in steps for name in step.inputs}

    def call() -> Tensor:
        known = {entry: x}
        for step, function, own in parts:
            known[step.output] = function(own, [known[name] for name in step.inputs])
            for name in step.inputs:
                if last_use[name] == step.output:
                    known.pop(name, None)
        return known[steps[-1].output]

    return call


def _experts(step: Step, own: Weights, x: Sequence[Tensor]) -> Tensor:
    return run((step,), own, dict(zip(step.inputs, x, strict=True)))


def _every(calls: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Call all; the last one's output, the others' freed, as they are in the block."""
    out = calls[0]()
    for call in calls[1:]:
        out = call()
    return out


def _received(step: Step, op: Experts, weights: Weights, known: Weights) -> Iterator[Received]:
    x, route = step.inputs
    return received(op, known[x], known[route], weights)


def _weight_bytes(step: Step, weights: Weights, known: Weights) -> int:
    """Bytes of the weights that a step reads on these inputs."""
    if isinstance(step.op, Experts):
        parts = _received(step, step.op, weights, known)
        return sum(t.nbytes for part in parts for t in part.weights.values())
    return sum(weights[name].nbytes for name in step.parameters())


def _word(step: Step) -> str:
    return type(step.op).__name__.lower()
