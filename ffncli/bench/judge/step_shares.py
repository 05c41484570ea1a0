"""Where a block's time goes: the rows of --by-step as shares of the block's time and of its FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ffncli.bench.records import BLOCK, STEP, Case
from ffncli.bench.results.row import ResultRow
from ffncli.block.cost import step_costs
from ffncli.block.recipe import steps
from ffncli.block.steps import Experts, Shape, Step, experts_per_token, input_shapes
from ffncli.dataclass import dataclass
from ffncli.kernels.kernel import kernel_steps

_INSIDE = "[e]."


@dataclass(frozen=True)
class StepShare:
    """One step of a case, or the `whole` block. `inside` experts it covers all that received a token.

    `share` of the block's time, with its interval; `flops_share` of its FLOPs. None: not known, or not timed.
    """

    name: str
    op: str
    whole: bool
    inside: bool
    status: str
    share: float | None
    low: float | None
    high: float | None
    time_s: float | None
    flops_share: float | None
    flops_per_s: float | None


def step_shares(case: Case, rows: Sequence[ResultRow]) -> tuple[StepShare, ...]:
    """A record for each of the case's rows, whose ratio to the block is the share of its time."""
    costs = _costs(case)
    return tuple(_share(row, *costs.get(row.kernel.removeprefix(STEP), ("", 0)), costs[BLOCK][1]) for row in rows)


def together(shares: Sequence[StepShare]) -> float | None:
    """The shares of all steps, those inside experts left out; None if there are none, or one is not known."""
    parts = [one.share for one in shares if not (one.whole or one.inside)]
    known = [share for share in parts if share is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _share(row: ResultRow, op: str, flops: int, whole: int) -> StepShare:
    name = row.kernel.removeprefix(STEP)
    return StepShare(
        name, op, row.kernel == BLOCK, _INSIDE in name, row.status, row.ratio, row.ratio_low, row.ratio_high,
        row.time_s, flops / whole if whole else None, flops / row.time_s if row.time_s else None,
    )  # fmt: skip


def _costs(case: Case) -> dict[str, tuple[str, int]]:
    """Step → (its op, its FLOPs on the case's tokens), including the block and the steps inside experts."""
    block = kernel_steps(steps(case.spec))
    inputs = input_shapes(block, (case.tokens,))
    costs = _of(block, inputs)
    for step in block:
        if isinstance(step.op, Experts):
            chosen = case.tokens * experts_per_token(block)[step.output]
            inner = _of(step.op.program, input_shapes(step.op.program, (chosen,)))
            costs |= {f"{step.output}{_INSIDE}{name}": value for name, value in inner.items()}
    return costs | {BLOCK: (BLOCK, sum(flops for name, (_, flops) in costs.items() if _INSIDE not in name))}


def _of(block: Sequence[Step], inputs: Mapping[str, Shape]) -> dict[str, tuple[str, int]]:
    costs = step_costs(block, inputs)
    return {step.output: (step.op.name, costs[step.output].flops) for step in block}
