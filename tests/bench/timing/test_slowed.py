"""A kernel slower by a known factor, on a clock of the test's."""

from __future__ import annotations

import pytest
import torch

from ffncli.bench.timing import slowed as module
from ffncli.bench.timing.slowed import slowed, slowed_kernel
from ffncli.kernels import built_in


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


def test_a_call_lasts_its_factor(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    def call(x):
        clock.now += 10
        return x + 1

    assert slowed(call, 1.05)(1) == 2
    assert clock.now == pytest.approx(10.5, abs=0.01)


def test_factor_1_is_the_code_itself():
    from ffncli.bench.records import Case
    from ffncli.bench.referee.problem import Problem
    from ffncli.block.recipe import FFNSpec

    steps = Problem.of(Case("s", "s", FFNSpec(2, 4), 1), 0).steps
    kernel = slowed_kernel(built_in("eager"), 1.0)
    assert kernel.build(steps, "cpu", torch.float32).__module__ == "ffncli.kernels.eager"
