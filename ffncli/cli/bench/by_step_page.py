"""The rows of `ffn bench --by-step` as a page: where does the time go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ffncli.bench.records import BLOCK, STEP, Case
from ffncli.bench.results.row import ResultRow
from ffncli.block.cost import step_costs
from ffncli.block.recipe import steps
from ffncli.block.steps import Experts, Route, Shape, Step, input_shapes
from ffncli.kernels.kernel import kernel_steps
from ffncli.show.parts import Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import time_text

_LEAST = 0.0005  # a share that rounds to 0.1 %
_BAR = 12  # columns of the bar of a step that takes as long as the block
_WHY = "alone, a step finds its numbers in another cache state, and the block has more to do between them"
_INSIDE = "[e]."


def by_step_parts(case: Case, where: str, rows: Sequence[ResultRow]) -> list[Part]:
    """One case, measured `where`: a table with the steps in their order, and what the shares do and do not say.

    `rows` are the block's and the steps' (`step gate`), whose ratio to the block is the share of its time.
    """
    costs = _costs(case)
    lines = [_line(row, costs) for row in rows]
    table = Table(("step", "op", "share of the time", "", "time", "FLOPs", "GFLOP/s"), lines, emphasis=_blocks(rows))
    parts: list[Part] = [Heading("where does the time go", f"{case.label}, {where}"), table]
    whole = [row.ratio for row in rows if _is_step(row) and _INSIDE not in row.kernel]
    if whole and None not in whole:
        total = sum(share for share in whole if share is not None)
        parts.append(
            Line(f"the steps take {_share(total)} of the block's time together, not 100 %: {_WHY}", quiet=True)
        )
    if any(_INSIDE in row.kernel for row in rows):
        parts.append(Line("experts[e].gate: of all experts that got a token; it is part of experts", quiet=True))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        who = [row.kernel for row in rows if row.note == note]
        parts.append(Line((f"{', '.join(who)}: " if len(who) < len(rows) else "") + note, quiet=True))
    return parts


def _line(row: ResultRow, costs: Mapping[str, tuple[str, int]]) -> tuple[str | None, ...]:
    """One step; one that was not timed has its status where its share would be."""
    name = row.kernel.removeprefix(STEP)
    op, flops = costs.get(name, ("", 0))
    label = f"  {name}" if _INSIDE in name else name
    if row.status not in ("ok", ""):
        return (label, op, row.status, "", None, None, None)
    share, bar = ("100 %", "") if row.kernel == BLOCK else (_interval(row), _bar(row.ratio))
    whole = costs[BLOCK][1]
    rate = f"{flops / row.time_s / 1e9:.3g}" if row.time_s else None
    return (label, op, share, bar, time_text(row.time_s), _share(flops / whole) if whole else None, rate)


def _interval(row: ResultRow) -> str | None:
    """`38.2 % [37.9, 38.5]`."""
    if row.ratio is None:
        return None
    if row.ratio_low is None or row.ratio_high is None or row.ratio_high < _LEAST:
        return _share(row.ratio)
    return f"{_share(row.ratio)} [{100 * row.ratio_low:.1f}, {100 * row.ratio_high:.1f}]"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= _LEAST or not share else "< 0.1 %"


def _bar(share: float | None) -> str:
    """As long as the share; one that is not nothing has at least a mark."""
    return "" if not share else "█" * min(_BAR, max(1, round(_BAR * share)))


def _blocks(rows: Sequence[ResultRow]) -> frozenset[int]:
    return frozenset(at for at, row in enumerate(rows) if row.kernel == BLOCK)


def _is_step(row: ResultRow) -> bool:
    return row.kernel.startswith(STEP)


def _costs(case: Case) -> dict[str, tuple[str, int]]:
    """Step → (its op, its FLOPs on the case's tokens), the block's and those inside experts with them."""
    block = kernel_steps(steps(case.spec))
    inputs = input_shapes(block, (case.tokens,))
    found = _of(block, inputs)
    for step in block:
        if isinstance(step.op, Experts):
            top_k = next(s.op.top_k for s in block if s.output == step.inputs[1] and isinstance(s.op, Route))
            inner = _of(step.op.program, input_shapes(step.op.program, (case.tokens * top_k,)))
            found |= {f"{step.output}{_INSIDE}{name}": value for name, value in inner.items()}
    return found | {BLOCK: (BLOCK, sum(flops for name, (_, flops) in found.items() if _INSIDE not in name))}


def _of(block: Sequence[Step], inputs: Mapping[str, Shape]) -> dict[str, tuple[str, int]]:
    costs = step_costs(block, inputs)
    return {step.output: (type(step.op).__name__.lower(), costs[step.output].flops) for step in block}
