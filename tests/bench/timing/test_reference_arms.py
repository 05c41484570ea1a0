"""What a run measures of itself: the machine anchor, always the same work, and kernels slowed by a known factor."""

import random
import subprocess
import sys
from itertools import pairwise

import numpy
import pytest
import torch

from ffncli.bench.records import ANCHOR
from ffncli.bench.timing import reference_arms
from ffncli.bench.timing import reference_arms as module
from ffncli.bench.timing.gpu.cuda_clock import CudaClock
from ffncli.bench.timing.reference_arms import slowed, slowed_kernel, slowed_on_gpu
from ffncli.block.recipe import FFNSpec
from ffncli.block.recipe import steps as steps_of
from ffncli.errors import FFNError
from ffncli.kernels import built_in
from ffncli.kernels.kernel import kernel_steps
from ffncli.system import hardware
from tests.bench.fake_graphs import CostedGraphs


def arrays(arm) -> dict[str, numpy.ndarray]:
    return dict(zip(arm.call.__code__.co_freevars, (c.cell_contents for c in arm.call.__closure__), strict=True))


def test_it_multiplies_and_copies():
    arm = reference_arms.anchor(random.Random(0))
    own = arrays(arm)
    own["product"][...] = own["destination"][...] = 7
    out = arm.call()
    assert arm.name == ANCHOR
    exact = own["a"].astype(numpy.float64) @ own["b"].astype(numpy.float64)
    assert out.shape == (72, 64, 64)
    assert numpy.allclose(out, exact, atol=1e-4 * abs(exact).max())
    assert own["destination"].nbytes == 2 << 20
    assert numpy.array_equal(own["destination"], own["source"])
    assert all(
        0.9 < array.std() < 1.1 for name, array in own.items() if name != "product"
    )  # no constants: they are fast


def test_the_same_numbers_elsewhere_at_whole_lines():
    draw = random.Random(0)
    some = [arrays(reference_arms.anchor(draw)) for _ in range(6)]
    every = [array for own in some for array in own.values()]
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in every)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(a.ctypes.data % 64 == 0 for a in every)
    assert len({own["a"].ctypes.data % 4096 for own in some}) > 2
    for name in ("a", "b", "source"):
        assert all(numpy.array_equal(own[name], some[0][name]) for own in some)


def test_no_torch():
    code = "import sys, ffncli.bench.timing.reference_arms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_on_a_gpu_the_copy_is_far_larger_than_any_l2_and_random(monkeypatch):
    import torch

    largest_l2 = max(device.llc_bytes for device in hardware.devices() if device.name.startswith(("H", "B", "GB")))
    assert 8 * largest_l2 < 2 * reference_arms._GPU_COPIED
    monkeypatch.setattr(reference_arms, "_GPU_COPIED", 1 << 16)
    monkeypatch.setattr(reference_arms, "_GPU_SIDE", 32)
    run = reference_arms.gpu_anchor.__wrapped__("cpu")
    copied = dict(zip(run.__code__.co_freevars, (c.cell_contents for c in run.__closure__), strict=True))
    left, right, source = copied["left"], copied["right"], copied["source"]
    torch.testing.assert_close(run(), left @ right)
    assert torch.equal(copied["target"], source)
    assert 250 < len(source.unique()) <= 256
    assert left.std() > 0.9


# --- a slowed kernel --------------------------------------------------------------------------------------------------


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

    steps = Problem.of(Case("s", "s", FFNSpec(2, 4), 1), 0).steps
    kernel = slowed_kernel(built_in("eager"), 1.0)
    assert kernel.build(steps, "cpu", torch.float32).__module__ == "ffncli.kernels.dense"


@pytest.mark.parametrize(("factor", "seconds"), [(1.05, 60e-6), (1.05, 1e-3), (2.0, 10e-6)])
def test_on_a_gpu_too_though_no_kernel_is_shorter_than_2_microseconds(factor, seconds):
    """The kernel that waits takes 2 µs before it waits at all: without that, 5 % of 60 µs would be 8 %."""
    cuda = CostedGraphs(least=2e-6)
    clock = CudaClock(cuda, cuda.now)
    call = slowed_on_gpu(lambda: cuda.launch(seconds), factor, cuda, clock)
    call()  # it measures
    assert clock.time(call, 1) == pytest.approx(factor * seconds, rel=2e-3)


def test_what_is_too_short_to_be_slowed_on_a_gpu_is_refused():
    cuda = CostedGraphs(least=2e-6)
    with pytest.raises(FFNError) as caught:
        slowed_on_gpu(lambda: cuda.launch(30e-6), 1.05, cuda, CudaClock(cuda, cuda.now))()
    assert caught.value.message == "a call of 30.0 µs cannot be made 5 % longer: the fastest kernel takes 2.00 µs"


def test_the_shortest_of_five_blocks_counts_and_the_first_call_does_not():
    """Until its third block the call takes 1 ms more than it will: 5 % is of what it takes then."""
    cuda = CostedGraphs(least=2e-6)
    clock = CudaClock(cuda, cuda.now)
    calls = []

    def call():
        calls.append(1)
        cuda.launch(1e-3 + (1e-3 if len(calls) < 50 else 0.0))

    slow = slowed_on_gpu(call, 1.5, cuda, clock)
    slow()
    assert len(calls) == 1 + 5 * 20 + 1  # one that may compile, the blocks, and the call itself
    assert clock.time(slow, 1) == pytest.approx(1.5e-3, rel=2e-3)


def test_a_wait_as_long_as_the_shortest_kernel_is_possible():
    cuda = CostedGraphs(least=2.0**-19)
    clock = CudaClock(cuda, cuda.now)
    call = slowed_on_gpu(lambda: cuda.launch(2.0**-13), 1.03125, cuda, clock)  # 2^-18 more: twice the shortest
    call()
    assert clock.time(call, 1) == pytest.approx(1.03125 * 2.0**-13, rel=1e-2)


def test_on_a_gpu_the_kernel_is_slowed_by_the_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "slowed_on_gpu", lambda call, factor: asked.append((call, factor)) or call)
    kernel, steps = slowed_kernel(built_in("eager"), 1.05), kernel_steps(steps_of(FFNSpec(2, 4)))
    plain = built_in("eager").build(steps, "cpu", torch.float32)
    assert kernel.build(steps, "cuda:1", torch.float32).__code__ is plain.__code__
    ((call, factor),) = asked
    assert (call.__code__, factor) == (plain.__code__, 1.05)
    kernel.build(steps, "cpu", torch.float32)
    assert len(asked) == 1
