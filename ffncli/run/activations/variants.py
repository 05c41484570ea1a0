"""A block run once for several activations: everything that does not depend on the activation is computed once.

A callback receives the input and the outputs of each activation. Experts are run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.block.activations import SOFT_CAPPED, TABLE
from ffncli.block.steps import Activation, Experts, Step, block_inputs
from ffncli.run.engine.execute import activation, apply, mix, possible, received, unmixed

# (the step's whole name, the step, the expert or None, its input [rows, d_ff], each activation's output for that)
Watch = Callable[[str, Step, int | None, Tensor, Sequence[Tensor]], None]


def is_act(step: Step) -> bool:
    """Whether a step is the block's own activation, not a clip of up or a score of the router or the mix."""
    return isinstance(step.op, Activation) and step.output.rpartition(".")[2] == "act"


def run_variants(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], names: Sequence[str],
    watch: Watch, place: tuple[str, int | None] = ("", None),
) -> list[Tensor]:  # fmt: skip
    """The last step's output with each activation of `names` in place of the block's own, in eval mode.

    `inputs` are flat, [tokens, d_model]. The block's own activation keeps its learned parameters, others have their
    initial values. `watch` is called for every activation as it runs; `place` is the prefix of its name, and its
    expert.
    """
    tensors = {name: [tensor] for name, tensor in inputs.items()}
    last_use = {name: at for at, step in enumerate(steps) for name in step.inputs}
    for at, step in enumerate(steps):
        x = [tensors[name] for name in step.inputs]
        if isinstance(step.op, Experts):
            out = _experts(step, step.op, x[0][0], x[1][0], weights, names, watch)
        else:
            params = {name.rpartition(".")[2]: weights[name] for name in step.parameters()}
            with possible(step, x[0][0]):
                if isinstance(step.op, Activation) and is_act(step):
                    out = [_instead(step.op, name, params, x[0][0]) for name in names]
                    watch(place[0] + step.output, step, place[1], x[0][0], out)
                else:
                    several = max(len(versions) for versions in x)
                    out = [apply(step, params, [v[min(i, len(v) - 1)] for v in x]) for i in range(several)]
        tensors[step.output] = out
        for name in {*step.inputs}:
            if last_use[name] == at:
                del tensors[name]
        del x, out
    return tensors[steps[-1].output]


def _instead(op: Activation, name: str, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The output for x of the activation of that name in place of `op`, with its limits and its plus.

    A soft cap is left out with a function that has no linear factor.
    """
    if name == op.function:
        return activation(op, params, x)
    learned = {key: torch.tensor(value, dtype=x.dtype, device=x.device) for key, value in TABLE[name].learned.items()}
    soft_cap = op.soft_cap if name in SOFT_CAPPED else None
    return activation(replace(op, function=name, soft_cap=soft_cap), learned, x)


def _experts(
    step: Step,
    op: Experts,
    x: Tensor,
    route: Tensor,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
    watch: Watch,
) -> list[Tensor]:
    outs = [unmixed(op, x, route) for _ in names]
    (entry,) = block_inputs(op.program)
    for one in received(step, op, x, route, weights):
        place = (f"{step.output}.", one.expert)
        results = run_variants(op.program, one.weights, {entry: one.x}, names, watch, place)
        for out, result in zip(outs, results, strict=True):
            mix(out, one, result)
    return outs
