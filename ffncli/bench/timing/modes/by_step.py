"""Time every step of a block on its own, and the whole block, which calls the same steps one after another.

Activations are computed by torch's own functions if torch has them, as in the kernel eager; all other steps are
computed as in engine.execute.

The steps' fractions of the block's time need not add up to 1. A step that is called on its own, again and again, finds
its inputs and weights in a different cache state than in the block, and the block's time includes the gaps between
steps.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ffncli.bench.machine.counters import Counters
from ffncli.bench.records import BLOCK, STEP, Case, Job
from ffncli.bench.referee.prescribed_routing import ExpertLoad
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.arms import anchor_of
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.placed_kernel import touched
from ffncli.bench.timing.placement import Arena, Caching, caching, flusher
from ffncli.bench.timing.rounds import Arm, Measured, measure, plan_of
from ffncli.block.steps import Activation, Experts, Step, block_inputs
from ffncli.kernels.dense import activation
from ffncli.run.engine.execute import apply, execute, received, run

Weights = Mapping[str, Tensor]
CopyTensor = Callable[[Tensor], Tensor]
StepCall = Callable[[], object]


@torch.no_grad()
def step_calls(
    steps: Sequence[Step], weights: Weights, x: Tensor, copy: CopyTensor = torch.clone
) -> dict[str, StepCall]:
    """Return a mapping from names to calls: of the whole block, which is the baseline, and of each step, in order;
    `experts[e].gate` (the gates of all experts together) comes after the experts.

    `steps` are kernel steps, `weights` has canonical names, x [tokens, d_model] is the input. No call changes its
    inputs, so a call returns the same output every time. `copy` copies a tensor to new memory for one call; every call
    has its own buffers, and all buffers together need two or three times the memory of the block's weights. Only the
    forward pass is timed. Raises FFNError as `execute` does.
    """
    (entry,) = block_inputs(steps)
    tensors = {entry: x} | {e.name: e.tensor for e in execute(steps, weights, {entry: x}) if e.expert is None}
    params = {name: copy(weights[name]) for step in steps for name in step.parameters()}
    calls: dict[str, StepCall] = {BLOCK: _in_turn(steps, params, entry, copy(x))}
    for step in steps:
        inputs = {name: copy(tensors[name]) for name in step.inputs}
        params = {name: copy(weights[name]) for name in step.parameters()}
        if isinstance(step.op, Experts):
            calls[step.output] = partial(run, (step,), params, inputs)
            calls |= _inside(step, step.op, weights, tensors, copy)
        else:
            last = {name.rpartition(".")[2]: tensor for name, tensor in params.items()}
            calls[step.output] = partial(_function(step), last, [inputs[name] for name in step.inputs])
    return calls


def _inside(step: Step, op: Experts, weights: Weights, tensors: Weights, copy: CopyTensor) -> dict[str, StepCall]:
    """Return a call for each step of the experts' program; it runs that step for every expert that receives tokens, one
    after another."""
    x, route = (tensors[name] for name in step.inputs)
    parts = list(received(step, op, x, route, weights))
    if not parts:
        return {}
    (entry,) = block_inputs(op.program)
    made = [{entry: p.x} | {e.name: e.tensor for e in execute(op.program, p.weights, {entry: p.x})} for p in parts]
    out: dict[str, StepCall] = {}
    for inner in op.program:
        calls: list[Callable[[], Tensor]] = []
        for part, there in zip(parts, made, strict=True):
            params = {name.rpartition(".")[2]: copy(part.weights[name]) for name in inner.parameters()}
            calls.append(partial(_function(inner), params, [copy(there[name]) for name in inner.inputs]))
        out[f"{step.output}[e].{inner.output}"] = partial(_every, calls)
    return out


def _function(step: Step) -> Callable[[Weights, Sequence[Tensor]], Tensor]:
    """Return one step as a function of (its parameters, its inputs). The parameters' keys are the last parts of their
    names; for Experts, their full names."""
    op = step.op
    if isinstance(op, Experts):
        return lambda params, x: run((step,), params, dict(zip(step.inputs, x, strict=True)))
    if isinstance(op, Activation):
        call = activation(op)
        return lambda params, x: call(x[0], *params.values())
    return lambda params, x: apply(step, params, x)


def _in_turn(steps: Sequence[Step], weights: Weights, entry: str, x: Tensor) -> Callable[[], Tensor]:
    """Return a call of the whole block, step by step; each output is freed after its last use."""
    parts: list[tuple[Step, Callable[[Weights, Sequence[Tensor]], Tensor], Weights]] = []
    for step in steps:
        full = {name: weights[name] for name in step.parameters()}
        if isinstance(step.op, Experts):
            parts.append((step, _function(step), full))
        else:
            parts.append((step, _function(step), {name.rpartition(".")[2]: tensor for name, tensor in full.items()}))
    last_use = {name: step.output for step in steps for name in step.inputs}

    def call() -> Tensor:
        tensors = {entry: x}
        for step, function, params in parts:
            tensors[step.output] = function(params, [tensors[name] for name in step.inputs])
            for name in step.inputs:
                if last_use[name] == step.output:
                    tensors.pop(name, None)
        return tensors[steps[-1].output]

    return call


def _every(calls: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Make all calls; return the last output. The other outputs are freed, as in the block."""
    out = calls[0]()
    for call in calls[1:]:
        out = call()
    return out


class StepArms:
    """The arms of --by-step: the whole block and its steps, computed as in `engine.execute`, and the machine anchor.

    The caches are warm, or emptied before every call.
    """

    def __init__(self, problem: Problem, caching: Caching, llc: int) -> None:
        self._problem, self._draw = problem, random.Random(problem.seed)
        self._flush = flusher(llc, problem.case.device) if caching.mode == "flush" else None

    def place(self, number: int) -> list[Arm]:
        """Place all arms in new buffers."""
        calls = step_calls(self._problem.steps, self._problem.weights, self._problem.first.x, self._placed_copy)
        named = {name if name == BLOCK else STEP + name: call for name, call in calls.items()}
        return [
            *(Arm(name, call, self._flush, flushes=self._flush is not None) for name, call in named.items()),
            anchor_of(self._problem.case.device, self._draw),
        ]

    @property
    def load(self) -> ExpertLoad:
        """The experts that the tokens of the one input go to, if a routing is prescribed."""
        routing = self._problem.routing
        return ExpertLoad() if routing is None else routing.counted(self._problem.first.x)

    def _placed_copy(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            ((copy,),) = Arena(self._problem.case.device, self._draw).place([(tensor,)])
        return copy


@dataclass(frozen=True)
class TimedSteps:
    """The timing of a case's steps: the arms' names, the blocks, and the error that ended the timing, if any."""

    mode: Caching
    names: tuple[str, ...] = ()
    load: ExpertLoad = field(default_factory=ExpertLoad)
    measured: Measured | None = None
    error: Exception | None = None


def time_steps(
    case: Case, job: Job, problem: Problem, clock: Clock, counters: Counters, llc: int, room: int | None
) -> TimedSteps:
    """Time the block's steps one by one. The steps are themselves the reference, so the only check is that they run."""
    size = touched(problem) + problem.first.x.nbytes  # one copy for the whole block, one for the single steps
    mode = caching("flush" if case.cache == "flush" else "warm", [(2 * size, size)], llc, room)
    arms, done = StepArms(problem, mode, llc), TimedSteps(mode)
    try:
        done = replace(done, names=tuple(arm.name for arm in arms.place(0)[:-1]), load=arms.load)
        plan = plan_of(job.method, BLOCK, done.names, case.device, case.threads)
        with torch.inference_mode():
            return replace(done, measured=measure(job.process, case.key, arms.place, clock, counters, plan))
    except Exception as error:
        return replace(done, error=error)
