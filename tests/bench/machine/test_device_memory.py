"""A kernel's memory on a simulated device, against counts by hand; and what is free there."""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace

import pytest
import torch

from ffncli.bench.machine.machine import KernelMemory, free_memory, release
from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.correctness import computing
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.block.recipe import FFNSpec
from ffncli.kernels import built_in
from tests.bench.fake_cuda import FakeCuda
from tests.bench.fake_memory import FakeMemory

TOKENS, D_MODEL, D_FF = 6, 8, 64
FLOAT = 4  # bytes
WIDE, OUT = FLOAT * TOKENS * D_FF, FLOAT * TOKENS * D_MODEL
WEIGHTS = 3 * FLOAT * D_MODEL * D_FF  # gate, up and down; x's gradient is as large as the output


def peak_of(kernel: str, passes: str = "forward", tokens: int = TOKENS) -> int | None:
    """What `measure_case` measures of a kernel, on a device that counts the bytes of tensors."""
    case = Case("s", "s", FFNSpec(D_MODEL, D_FF, "swiglu"), tokens, passes=passes)  # type: ignore[arg-type]
    problem = Problem.of(case, 5)
    _ = problem.first
    with FakeMemory() as cuda:
        memory = KernelMemory("cuda", cuda)
        placed = PlacedKernel(kernel, build_kernel(built_in(kernel), problem, memory), problem, random.Random(0), 1.0)
        placed.place(1)
        with computing(problem.backward):
            with memory.keeping():
                placed.call()
                placed.forget()
            placed.call()  # its output is still there
            return memory.peak(placed.call, placed.forget)


def test_forward_is_counted_with_its_output():
    """gate and up; silu(gate), gate freed only at the end of the product; the product; then the output."""
    assert peak_of("eager") == 4 * WIDE
    assert peak_of("module") == 4 * WIDE


def test_what_a_kernel_keeps_counts():
    """inplace has gate, up and the output in buffers of its own, and makes nothing in a call."""
    assert peak_of("inplace") == 2 * WIDE + OUT


def test_backward_is_counted_with_all_gradients():
    """Of one token they are nearly all; beside them some of gate, up, silu(gate), the product and their gradients."""
    beside = peak_of("eager", "forward+backward", tokens=1) - WEIGHTS - 2 * OUT // TOKENS  # the output, x's gradient
    assert 0 <= beside <= 8 * WIDE // TOKENS < WEIGHTS / 2


def test_the_peak_is_beyond_what_was_there():
    cuda = FakeCuda()
    cuda.take(1000)  # weights
    cuda.peak = 50_000  # and a peak of the past
    first = []

    def call():
        if not first:
            first.append(cuda.take(300))  # a workspace, kept
        cuda.take(70)
        cuda.take(20)
        cuda.allocated -= 90

    assert KernelMemory("cuda", cuda).peak(call, lambda: None) == 90


def test_the_last_output_is_not_taken_for_weights():
    cuda, held = FakeCuda(), []

    def call():
        forget()  # as every call does: the last output is freed first
        cuda.take(1000)
        held.append(1000)

    def forget():
        cuda.allocated -= sum(held)
        held.clear()

    assert KernelMemory("cuda", cuda).peak(call, forget) == 1000


def test_nothing_is_measured_on_a_cpu():
    memory = KernelMemory("cpu", SimpleNamespace())
    with memory.keeping():
        pass
    assert memory.peak(lambda: 1 / 0, lambda: None) is None
    release("cpu", SimpleNamespace())


def test_what_torch_has_cached_is_free_to_the_next_case():
    with FakeMemory(total=1000, others=100) as cuda:
        kept = torch.empty(200, dtype=torch.uint8)
        freed = torch.empty(500, dtype=torch.uint8)
        del freed
        assert cuda.mem_get_info() == (200, 1000)
        assert free_memory("cuda", cuda) == 700
        release("cuda:0", cuda)
        assert cuda.mem_get_info()[0] == free_memory("cuda", cuda) == 700
        assert len(kept) == 200


def test_what_only_refers_to_itself_is_freed():
    class Cycle:
        def __init__(self):
            self.itself, self.tensor = self, torch.empty(1000)

    gone = weakref.ref(Cycle().tensor)
    release("cpu", SimpleNamespace())
    assert gone() is None


def test_a_broken_device_is_not_asked_twice():
    asked = []

    def broken():
        asked.append("empty_cache")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    release("cuda", SimpleNamespace(empty_cache=broken))
    assert asked == ["empty_cache"]


@pytest.mark.parametrize("cached", [0, 500])
def test_the_cache_mode_does_not_depend_on_what_ran_before(monkeypatch, cached):
    from ffncli.bench.machine import machine

    with FakeMemory(total=1000) as cuda:
        torch.empty(cached, dtype=torch.uint8)
        monkeypatch.setattr(machine, "free_memory", lambda device: free_memory(device, cuda))
        assert machine.room("cuda") == 600
