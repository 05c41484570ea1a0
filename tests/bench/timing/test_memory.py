"""How much memory a case takes: on a simulated device that counts every tensor, against whole copies of the weights."""

import random

import pytest
import torch

from ffncli.bench.machine import machine
from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Job, Method, Roof
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing import measure_case as measuring
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel, shared_weights, shuffle_buffers
from ffncli.bench.timing.placement import sharing
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels import built_in
from ffncli.kernels.choice import choices
from ffncli.kernels.kernel import Kernel
from tests.bench.fake_memory import FakeMemory
from tests.bench.timing.test_measure_case import Clock, Counters

MIXTURE = FFNSpec(128, 256, "swiglu", moe=MoE(20, 2, shared_experts=1))  # DeepSeek-V3's layer, scaled down
WEIGHTS = 4 * (21 * 3 * 128 * 256 + 128 * 20)  # bytes in fp32: experts, the shared one, the router
DENSE = FFNSpec(64, 256, "swiglu")


def measured(monkeypatch, total, kernels=("eager",), spec=MIXTURE, **fields):
    """A case on a device of so many bytes; (the unit, the peak)."""
    monkeypatch.setattr(measuring, "_roof", lambda *_: Roof())
    case = Case("s", "s", spec, **{"tokens": 4, **fields})
    method = Method(processes=2, block=1e-3, max_time=1.0, placements=2, rounds=2)
    with FakeMemory(total) as memory:
        monkeypatch.setattr(machine, "available_memory", lambda: total - memory.allocated)
        monkeypatch.setattr(machine, "freed_memory", lambda: 0)
        unit = measuring.measure_case(case, Job(0, (case,), choices(kernels), None, method), Clock(), Counters())
    return unit, memory.peak


@pytest.mark.parametrize("cache", ["warm", "cold-weights"])
def test_a_mixture_fits_where_its_weights_fit_twice(monkeypatch, cache):
    """Its largest parts beside them: an expert in float64, the numbers for x, activations of 4 tokens."""
    monkeypatch.setattr(machine, "llc_bytes", lambda device: 100_000)
    unit, peak = measured(monkeypatch, 2 * WEIGHTS, cache=cache)
    assert [(o.status, o.note) for o in unit.outcomes] == [("ok", "")]
    assert {b.kernel for b in unit.blocks} == {"eager", TWIN, GEMM, ANCHOR}
    assert unit.cache == ("shared" if cache == "warm" else cache)  # the experts of four tokens replace the caches
    assert any(note.startswith("the package's kernels share one copy of the weights") for note in unit.notes)
    assert WEIGHTS < peak < 1.5 * WEIGHTS


def test_with_enough_memory_every_arm_has_its_copy(monkeypatch):
    unit, peak = measured(monkeypatch, 20 * WEIGHTS)
    assert [o.status for o in unit.outcomes] == ["ok"]
    assert not any("share one copy" in note for note in unit.notes)
    assert 4 * WEIGHTS < peak < 5 * WEIGHTS  # the drawn weights, eager, its twin, the products


def test_shared_weights_have_their_gradients(monkeypatch):
    names = ("eager", "module", "packed")
    monkeypatch.setattr(machine, "room", lambda *_: 0)
    unit, _ = measured(monkeypatch, 1 << 40, names, FFNSpec(64, 1024, "swiglu"), passes="forward+backward")
    assert [(o.kernel, o.status) for o in unit.outcomes] == [(name, "ok") for name in names]
    assert any("share one copy of the weights" in note for note in unit.notes)


def test_what_a_case_needed_is_in_the_note(monkeypatch):
    unit, _ = measured(monkeypatch, 1_100_000, ("eager",), DENSE, tokens=4096)
    (outcome,) = unit.outcomes
    assert outcome.status == "oom"
    assert "s with 4,096 tokens needs at least" in outcome.note
    assert "; 1.100 MB was free; --tokens" in outcome.note
    assert outcome.note.endswith("would fit")


def problem_of(spec=DENSE, **fields):
    return Problem.of(Case("s", "s", spec, **{"tokens": 4, **fields}), 5)


def addresses(tensors):
    return {tensor.data_ptr() for tensor in tensors}


def test_the_package_s_kernels_take_the_weights_as_they_are():
    problem = problem_of()
    weights = addresses(problem.weights.values())
    for name in ("eager", "module", "inplace", "conv1x1"):
        assert addresses(build_kernel(built_in(name), problem).params) == weights
    packed, *rest = build_kernel(built_in("packed"), problem).params
    assert packed.data_ptr() not in weights
    assert addresses(rest) < weights


def test_a_user_s_prepare_gets_a_copy():
    problem, given = problem_of(), []

    def prepare(steps, weights):
        given.extend(weights.values())
        return tuple(weights.values())

    kernel = Kernel("mine", lambda *_: lambda x, params: x, prepare, origin="mine.py")
    build_kernel(kernel, problem)
    assert not addresses(given) & addresses(problem.weights.values())


def test_trading_memory_allocates_nothing():
    """Kernels whose weights are of unlike sizes."""
    problem, draw = problem_of(), random.Random(0)
    _ = problem.first
    first = Kernel("first", lambda *_: lambda x, params: x, lambda steps, weights: (weights["up.weight"],))
    built = [build_kernel(kernel, problem) for kernel in (built_in("eager"), built_in("packed"), first)]
    kernels = [PlacedKernel(one.kernel.name, one, problem, draw) for one in built]
    with FakeMemory() as memory:
        seen = set()
        for _ in range(8):
            shuffle_buffers(kernels, draw, [3] * 3)
            for placed in kernels:
                placed.place(3)
            seen.add((memory.allocated, *sorted(arena._memory.data_ptr() for p in kernels for arena in p.arenas)))
    assert len(seen) == 1


def test_sharing_begins_where_a_copy_for_each_does_not_fit():
    problem = problem_of()
    size = 4 * 3 * 64 * 256
    kernels = [built_in("eager"), built_in("module"), ValueError("could not be loaded")]
    assert shared_weights(problem, kernels, 1 << 20, 4 * size) is None  # two kernels, the twin, the products
    assert shared_weights(problem, kernels, 1 << 20, None) is None
    assert shared_weights(problem, kernels, 1 << 20, 4 * size - 1).shared
    users = [*kernels, Kernel("mine", lambda *_: None, origin="mine.py")]
    assert shared_weights(problem, users, 1 << 20, 6 * size) is None  # and what its prepare was given
    assert shared_weights(problem, users, 1 << 20, 6 * size - 1).shared
    packing = [*kernels, built_in("mkl"), built_in("numpy")]  # what numpy was built with, its own, and what it makes
    assert shared_weights(problem, packing, 1 << 20, (4 + 2 + 3) * size) is None
    assert shared_weights(problem, packing, 1 << 20, (4 + 2 + 3) * size - 1).shared


def test_shared_weights_are_cold_where_one_call_empties_the_caches():
    assert sharing("cold-weights", 1000, 300, 100, 9_000, 3_000).mode == "cold-weights"
    few = sharing("cold-weights", 1000, 299, 100, 9_000_000_000, 3_000_000_000)
    assert (few.mode, few.copies, few.shared) == ("shared", 1, True)
    assert few.note.endswith("a copy for each would need 9.0 GB of memory, but only 3.0 GB may be used")
    assert sharing("flush", 1000, 10, 100, 1, 0).mode == "flush"


def test_shared_weights_stay_as_they_are():
    problem = problem_of(passes="forward+backward")
    placed = PlacedKernel("eager", build_kernel(built_in("eager"), problem), problem, random.Random(0), True)
    placed.place(1)
    placed.call()
    assert addresses(placed.copies[0]) == addresses(problem.weights.values())
    assert not any(tensor.requires_grad for tensor in problem.weights.values())
    assert placed.gradients(problem)["up.weight"].shape == problem.weights["up.weight"].shape
    assert not placed.changed()
    with torch.no_grad():
        problem.weights["up.weight"].mul_(2)
    assert placed.changed()
