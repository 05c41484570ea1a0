"""Tokens that reach every expert: an expert without tokens does not affect any output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ffncli.block.steps import Experts, parameters
from ffncli.run.engine.execute import run
from ffncli.run.engine.reference import output_and_experts, routing_steps
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow, Judge

_ROUNDS, _AT_ONCE, _SHOWN, _FEW = 32, 256, 8, 4


def reached(case: CheckedBlock, x: Tensor) -> Tensor | None:
    """Which experts at least one of the tokens `x` [tokens, d_model] goes to, as booleans; None in a dense block."""
    before = routing_steps(case.ffn)
    choices = output_and_experts(before, case.ffn_weights, {case.entry: x})[1] if before else None
    return None if choices is None else choices.any(0)


def reaching(case: CheckedBlock) -> Tensor:
    """The case's tokens and, after them, random ones for the experts that receive none of those."""
    x, before = case.x, routing_steps(case.ffn)
    covered = reached(case, x)
    if covered is None:
        return x
    generator, extra = case.generator(), []
    for _ in range(_ROUNDS):
        if covered.all():
            break
        tokens = torch.randn(_AT_ONCE, x.shape[-1], generator=generator).to(x)
        choices = output_and_experts(before, case.ffn_weights, {case.entry: tokens})[1]
        assert choices is not None
        for expert in (choices.any(0) & ~covered).nonzero().flatten().tolist():
            if not covered[expert]:
                token = int(choices[:, expert].nonzero()[0])
                extra.append(tokens[token])
                covered = covered | choices[token]
    return torch.cat([x, torch.stack(extra)]) if extra else x


def unreached(case: CheckedBlock, judge: Judge, x: Tensor, label: str, theirs: Mapping[str, Tensor]) -> CheckRow | None:
    """A row for the experts that no token of `x` goes to, each compared with `theirs`; None if there are none."""
    covered = reached(case, x)
    step = next((step for step in case.ffn if isinstance(step.op, Experts)), None)
    if covered is None or step is None or not isinstance(step.op, Experts):
        return None
    left = (~covered[: step.op.experts.size]).nonzero().flatten().tolist()
    if not left:
        return None
    weights = {name: case.ffn_weights[name] for name in step.op.parameters()}
    if any(name not in theirs or theirs[name].shape != weight.shape for name, weight in weights.items()):
        return judge.skips(f"{_experts(left)} = {label}", "no token goes there, and their shapes differ")
    width = parameters(step.op.program)["up.weight"][1].size
    inputs = {"x": torch.randn(_FEW, width, generator=case.generator()).to(x)}
    made = {e: [run(step.op.program, step.op.of_one(one, e), inputs) for one in (weights, theirs)] for e in left}
    differ = [e for e, (ours, other) in made.items() if not judge.equal("", ours, other).passed]
    ours, other = (torch.stack([made[e][n] for e in differ or left]) for n in (0, 1))
    return judge.equal(f"{_experts(differ or left)} = {label}", ours, other, "no token goes there: run separately")


def _experts(several: list[int]) -> str:
    more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
    return f"experts {', '.join(map(str, several[:_SHOWN]))}{more}"
