"""Kernels that cheat on a GPU, on the simulated one: the clock, the inputs and the rulings are a worker's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ffncli.bench.records import OTHER_STREAM, TimedBlock
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.cheating.probes import other_streams, require_joined_streams
from ffncli.bench.timing.fresh_inputs import FreshInputs, Reservoir
from ffncli.bench.timing.gpu.cuda_clock import CudaClock
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.bench.verdict import WrongResult
from ffncli.kernels.choice import parse
from ffncli.run.user.kernels import kernel_of
from tests.bench.fake_gpu import gpu
from tests.cheats.harness import HERE, case_of, header

CHEATS = sorted(path for path in (HERE / "gpu").glob("*.py") if header(path).codes)
HONEST = sorted((HERE / "gpu" / "honest").glob("*.py"))
NOT_CAUGHT = "not caught"
_BLOCKS, _CALLS = 12, 20


def note_of(path: Path) -> str:
    """What a worker says of the kernel in that file; empty where it is right."""
    case = case_of({})
    problem = refereed(Problem.of(case, 3), "eager")
    kernel = kernel_of(parse(f"mine={path}:mlp"), problem.steps, case.spec)
    placed = PlacedKernel("mine", build_kernel(kernel, problem), problem, random.Random(0))
    placed.place(1)
    try:
        with torch.inference_mode():
            launched = placed.call
            placed.call = lambda: (launched(), gpu.synchronize())  # a check that reads late finds all streams done
            correct.before(placed, problem)
            placed.call = launched
            return timed(placed, problem)
    except WrongResult as wrong:
        return wrong.ruling.note


def timed(placed: PlacedKernel, problem: Problem) -> str:
    clock, fresh, blocks = CudaClock(gpu, gpu.now), FreshInputs(placed, problem, Reservoir(problem)), []
    for number in range(_BLOCKS):
        for _ in range(4):
            clock.time(placed.call, 1)
        fresh.before_block(_CALLS, every_call=False)
        seconds = clock.time(placed.call, _CALLS)
        fresh.after_block()
        flags = (OTHER_STREAM,) if clock.other_stream else ()
        blocks.append(TimedBlock(0, problem.case.key, 0, number, 0, "mine", _CALLS, seconds, flags))
    if fresh.ruling.wrong:
        return fresh.ruling.note
    ruling = problem.rules.timed()["mine"]
    if elsewhere := other_streams(["mine"], blocks):
        return elsewhere["mine"].note
    require_joined_streams(placed, clock, problem.backward)
    return ruling.note


@pytest.mark.parametrize("path", CHEATS, ids=lambda path: path.stem)
def test_a_cheat_on_a_gpu_is_caught_or_the_manual_says_that_it_is_not(path):
    (code,), note = header(path).codes, note_of(path)
    if code == NOT_CAUGHT:
        assert note == ""
        manual = " ".join((HERE.parent.parent / "docs" / "method.md").read_text("utf-8").split())
        assert "repeats its answer in the block's other calls." in manual
    elif code == "none":
        assert note == "returns a tensor on meta, expected cpu"
    else:
        assert note.partition(": ")[0] == code, note


@pytest.mark.parametrize("path", HONEST, ids=lambda path: path.stem)
def test_an_honest_kernel_on_a_gpu_is_not_accused(path):
    assert note_of(path) == ""


def test_there_are_such_kernels():
    assert len(CHEATS) >= 8
    assert len(HONEST) >= 2
