"""Ratios of the lower quartiles of a block's calls, on a simulated neighbour that slows some calls: the truth is known,
and the ratio of the blocks' means is beside it."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from ffncli.bench.judge.ratios import paired
from ffncli.bench.records import TimedBlock

CALL = 2.5e-4  # s of the baseline's call


def run_of(
    ratio: float, draw: random.Random, *, rounds: int = 16, long_calls: float = 0.0, neighbour: float = 1e-3
) -> list[TimedBlock]:
    """Blocks of `base` and of `mine`, whose calls take `ratio` times as long. A neighbour slows what it meets by 40 %,
    for half a millisecond after each `neighbour` seconds, on average. Every eighth call of `mine` takes `long_calls`
    longer."""
    blocks = []
    for process in range(5):
        slow, left = False, 0.0
        for at in range(rounds):
            order = [("base", 1.0), ("mine", ratio)]
            draw.shuffle(order)
            for position, (kernel, factor) in enumerate(order):
                calls = []
                for number in range(16):
                    work, took = CALL * factor * (1 + long_calls * (kernel == "mine" and number % 8 == 0)), 0.0
                    while work > 0:
                        if left <= 0:
                            slow = not slow
                            left = draw.expovariate(1 / (5e-4 if slow else neighbour))
                        pace = 1.4 if slow else 1.0
                        step = min(left, work * pace)
                        work, left, took = work - step / pace, left - step, took + step
                    calls.append(took * math.exp(draw.gauss(0, 0.01)))
                quartile = float(np.quantile(calls, 0.25, method="weibull"))
                flags = (f"quartile={quartile:.9g}",)
                blocks.append(TimedBlock(process, "c", at // 8, at % 8, position, kernel, 16, sum(calls), flags))
    return blocks


def means_of(blocks: list[TimedBlock]):
    return paired([replace(block, flags=()) for block in blocks], "mine", "base")


@pytest.mark.parametrize("ratio", [1.0, 1.05, 1.1])
def test_intervals_are_half_as_wide_and_hold_the_truth(ratio):
    draw, held, widths = random.Random(f"{ratio}"), 0, []
    for _ in range(40):
        blocks = run_of(ratio, draw)
        found, plain = paired(blocks, "mine", "base").interval, means_of(blocks).interval
        held += found.low <= math.log(ratio) <= found.high
        widths.append(found.half_width / plain.half_width)
    assert held >= 35
    assert sorted(widths)[20] < 0.6


def test_a_kernel_that_takes_long_in_some_calls_has_the_ratio_of_the_means():
    draw = random.Random(1)
    for _ in range(8):
        blocks = run_of(1.0, draw, rounds=40, long_calls=0.8)
        found = paired(blocks, "mine", "base")
        assert found == means_of(blocks)
        assert found.interval.low <= math.log(1.1) <= found.interval.high


def test_calls_of_unlike_durations_have_the_ratio_of_the_means():
    """A call of twice the length is half as often free of the neighbour: the quartiles' ratio would be too high."""
    draw = random.Random(2)
    for _ in range(8):
        blocks = run_of(2.0, draw, neighbour=4e-4)
        quartiles = {
            kernel: np.median([b.figure("quartile") for b in blocks if b.kernel == kernel])
            for kernel in ("base", "mine")
        }
        assert quartiles["mine"] / quartiles["base"] > 2.05
        assert paired(blocks, "mine", "base") == means_of(blocks)


def test_a_block_without_its_quartile_leaves_the_ratio_of_the_means():
    blocks = run_of(1.0, random.Random(3))
    assert paired(blocks, "mine", "base") != means_of(blocks)
    blocks[7] = replace(blocks[7], flags=())
    assert paired(blocks, "mine", "base") == means_of(blocks)
