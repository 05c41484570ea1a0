"""Pages of ffn bench: the steps of --by-step with their shares, and the chart of ratios that --plot-file writes."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ffncli.bench.judge.curves import step_shares
from ffncli.bench.records import BLOCK, STEP, Case
from ffncli.bench.results.plots import ratio_plot
from ffncli.bench.results.row import ResultRow
from ffncli.bench.timing.modes.by_step import step_calls
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import walk
from ffncli.cli.bench.page import by_step_parts
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.weights import random_weights
from ffncli.show.parts import Heading, Line, Table

GATED = Case("512x2048:swiglu", "512x2048:swiglu", FFNSpec(512, 2048, "swiglu"), 32)
MOE = Case("moe", "moe", FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)), 5)


def row(name: str, share: float, **fields) -> ResultRow:
    return ResultRow(kernel=name, baseline=BLOCK, status="ok", time_s=share * 1e-3, ratio=share, **fields)


ROWS = [
    row(BLOCK, 1.0),
    row("step gate", 0.31, ratio_low=0.305, ratio_high=0.315),
    row("step up", 0.32),
    row("step act", 0.02),
    row("step hidden", 0.011),
    row("step down", 0.3),
]


def parts_of(case: Case, rows):
    parts = by_step_parts(case, "32 tokens, fp32, cpu, 2 threads", rows)
    (table,) = [part for part in parts if isinstance(part, Table)]
    return table, [part.text for part in parts if isinstance(part, Line)], parts


def test_shares_and_rates():
    table, lines, parts = parts_of(GATED, ROWS)
    assert parts[0] == Heading("where the time goes", "512x2048:swiglu, 32 tokens, fp32, cpu, 2 threads")
    assert table.columns == ("step", "op", "share of the time", "", "time", "FLOPs", "GFLOP/s")
    assert table.emphasis == {0}
    by = {line[0]: line for line in table.rows}
    matrix = 2 * 32 * 512 * 2048
    whole = 3 * matrix + 2 * 32 * 2048
    assert by["block"] == ("block", "block", "100 %", "", "1.00 ms", "100.0 %", f"{whole / 1e-3 / 1e9:.3g}")
    assert by["gate"] == (
        "gate", "linear", "31.0 % [30.5, 31.5]", "████", "310 µs", f"{100 * matrix / whole:.1f} %",
        f"{matrix / 0.31e-3 / 1e9:.3g}",
    )  # fmt: skip
    assert by["up"][2] == "32.0 %"
    assert by["hidden"][1:4] == ("multiply", "1.1 %", "█")
    assert lines == [
        "the steps together take 96.1 % of the block's time, not 100 %: alone, a step finds different data in the"
        " cache, and the block has extra work between steps"
    ]


@pytest.mark.parametrize("case", [GATED, MOE])
def test_flops_are_those_of_the_block_and_of_torch(case):
    """Every step's share of the FLOPs, against torch's own counter for the products."""
    block, generator = kernel_steps(steps(case.spec)), torch.Generator().manual_seed(0)
    weights = random_weights(block, generator)
    calls = step_calls(block, weights, torch.randn(case.tokens, case.spec.d_model, generator=generator))
    ops = {BLOCK: BLOCK} | {name: step.op.name for name, step in walk(block)}
    rows = [row(name if name == BLOCK else STEP + name, 1.0) for name in calls]
    table, _, _ = parts_of(case, rows)
    assert [(line[0].strip(), line[1]) for line in table.rows] == list(ops.items())
    flops = {BLOCK: cost(block, case.tokens).flops}
    for name, call in calls.items():
        if ops[name] == "linear":
            with FlopCounterMode(display=False) as counter:
                call()
            flops[name] = counter.get_total_flops()
    assert len(flops) > 3
    printed = {line[0].strip(): line[6] for line in table.rows}
    assert {name: printed[name] for name in flops} == {n: f"{count / 1e-3 / 1e9:.3g}" for n, count in flops.items()}
    shares = step_shares(case, rows)
    assert sum(one.flops_share for one in shares if not (one.whole or one.inside)) == pytest.approx(1.0)


def test_experts_steps_stand_under_them_and_are_not_added():
    rows = [row(BLOCK, 1.0), row("step router", 0.1), row("step route", 0.1), row("step experts", 0.7),
            row("step experts[e].gate", 0.2)]  # fmt: skip
    table, lines, _ = parts_of(MOE, rows)
    assert table.rows[-1][:2] == ("  experts[e].gate", "linear")
    assert lines[0].startswith("the steps together take 90.0 % ")
    assert lines[1] == "experts[e].gate: all experts that received tokens; part of experts"


def test_what_was_not_timed_says_so():
    broken = [ROWS[0], ResultRow(kernel="step gate", status="oom", note="out of memory"), *ROWS[2:]]
    table, lines, _ = parts_of(GATED, broken)
    assert table.rows[1] == ("gate", "linear", "oom", "", None, None, None)
    assert lines == ["step gate: out of memory"]  # no sum of shares where one is missing
    assert parts_of(GATED, [])[1] == []


def test_what_is_next_to_nothing_is_no_zero():
    small = [ROWS[0], row("step act", 0.0002, ratio_low=0.0001, ratio_high=0.0004)]
    table, _, _ = parts_of(GATED, small)
    assert table.rows[1][2:4] == ("< 0.1 %", "█")
    assert table.rows[1][5] == "< 0.1 %"  # of the FLOPs: 1 of 3 · 2 · 512


def test_it_needs_no_torch():
    code = "import sys, ffncli.cli.bench.page; print({'torch', 'numpy', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# --- the chart of ratios ----------------------------------------------------------------------------------------------


def rows(count: int, cases: int = 1) -> list[ResultRow]:
    """The baseline and `count` kernels, spread over cases."""
    fields = {"baseline": "eager", "status": "ok"}
    every = [ResultRow(kernel="eager", case="case 0", ratio=1.0, **fields)]
    return every + [
        ResultRow(kernel=f"k{at}", case=f"case {at % cases}", ratio=1 + at / 10, ratio_low=1.0, **fields)
        for at in range(count)
    ]


def test_a_row_for_each_kernel_but_the_baseline() -> None:
    (plot,) = ratio_plot(rows(2))
    assert (plot.title, [row.name for row in plot.rows]) == ("case 0", ["k0", "k1"])
    assert [(row.value, row.low, row.high) for row in plot.rows] == [(1.0, 1.0, None), (1.1, 1.0, None)]
    (plot,) = ratio_plot(rows(2, cases=2))
    assert (plot.title, [row.name for row in plot.rows]) == ("", ["case 0: k0", "case 1: k1"])
    assert ratio_plot(rows(0)) == []


@pytest.mark.parametrize(("count", "title"), [(300, "case 0"), (1301, "the first 300 of 1,301 rows")])
def test_a_chart_says_that_there_are_more(count: int, title: str) -> None:
    (plot,) = ratio_plot(rows(count))
    assert (plot.title, len(plot.rows)) == (title, 300)
