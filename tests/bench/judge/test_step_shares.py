"""Shares of steps: what they sum to, and when nothing can be said."""

from __future__ import annotations

from ffncli.bench.judge.step_shares import step_shares, together
from ffncli.bench.records import BLOCK, Case
from ffncli.bench.results.row import ResultRow
from ffncli.block.recipe import FFNSpec, MoE


def timed(name: str, share: float | None) -> ResultRow:
    return ResultRow(kernel=name, baseline=BLOCK, status="ok", time_s=share and share * 1e-3, ratio=share)


def test_shares_of_time_and_of_flops():
    case = Case("8x16", "8x16", FFNSpec(8, 16, "relu", bias=False), 2)
    up, act, down = 2 * 2 * 8 * 16, 2 * 16, 2 * 2 * 16 * 8
    found = step_shares(case, [timed(BLOCK, 1.0), timed("step up", 0.5), timed("step act", 0.125)])
    assert [one.flops_share for one in found] == [1.0, up / (up + act + down), act / (up + act + down)]
    assert found[1].flops_per_s == up / 0.5e-3
    assert together(found) == 0.625
    assert together(step_shares(case, [timed(BLOCK, 1.0), timed("step up", None), timed("step act", 0.1)])) is None
    assert together(found[:1]) is None


def test_what_is_inside_experts_is_no_further_share():
    case = Case("moe", "moe", FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)), 5)
    found = step_shares(case, [timed(BLOCK, 1.0), timed("step experts", 0.7), timed("step experts[e].gate", 0.2)])
    assert [one.inside for one in found] == [False, False, True]
    assert found[2].flops_share * (found[0].flops_per_s * 1e-3) == 2 * 5 * 2 * 8 * 24
    assert together(found) == 0.7
