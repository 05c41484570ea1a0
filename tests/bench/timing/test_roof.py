"""The measured roof, on a fake clock that knows the machine."""

import pytest
import torch

from ffncli.bench.machine import machine
from ffncli.bench.timing.roof import _best_of, _numbers, _products, _reads, measured_roof
from ffncli.kernels import blas, onednn


class FakeClock:
    """A machine of 100 GFLOP/s and 10 GB/s; the time of a call is known by what it touches."""

    def __init__(self) -> None:
        self.seconds, self.calls, self.numbers, self.product = 0.0, 0, 0, 5e9

    def now(self) -> float:
        return self.seconds

    def time(self, call, inner, before=None) -> float:
        found = call()
        self.calls += inner
        if found.dim() == 2 and len(found) > 1:
            took = 2 * found.shape[0] ** 3 / 100e9
        elif 2 * found.numel() == self.numbers:  # a copy of one half to the other reads and writes
            took = 4 * self.numbers / 10e9
        else:  # a sum reads, and so does a product with one token, here more slowly
            took = 4 * self.numbers / (self.product if found.numel() > 1 else 5e9)
        self.seconds += took * inner
        return took * inner


class UnevenClock:
    """A clock on which blocks take as long as it is told, one after the other."""

    def __init__(self, *seconds_per_call: float) -> None:
        self.left, self.passed = list(seconds_per_call), 0.0

    def now(self) -> float:
        return self.passed

    def time(self, call, inner, before=None) -> float:
        took = self.left.pop(0) * inner
        self.passed += took
        return took


@pytest.mark.parametrize("times", [(3e-3, 1e-3, 2e-3), (3e-3, 2e-3, 1e-3), (1e-3, 3e-3, 2e-3)])
def test_the_roof_is_the_shortest_time(times):
    assert _best_of(lambda: None, UnevenClock(*times), 0.0) == 1e-3


def test_the_measured_roof_on_a_known_machine(monkeypatch):
    monkeypatch.setattr(machine, "llc_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 40)
    clock = FakeClock()
    clock.numbers = (16 << 20) // 4
    threads = torch.get_num_threads()
    roof = measured_roof("cpu", "fp32", 1, clock)
    assert roof.flops_per_s == pytest.approx(100e9)
    assert roof.bytes_per_s == pytest.approx(10e9)  # the copy's, both ways
    assert roof.llc_bytes == 1 << 20
    assert clock.seconds < 0.6
    assert torch.get_num_threads() == threads
    clock.product = 12e9
    assert measured_roof("cpu", "fp32", 1, clock).bytes_per_s == pytest.approx(12e9)  # a kernel of one token may, too


def test_numpy_multiplies_and_reads_too(monkeypatch):
    """Where no other way is as fast, a kernel that uses it must not be faster than the roof."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(blas, "numpy_matmul", lambda x, weight, out: shapes.append(tuple(x.shape)) or out)
    for ways in (_products(8, "cpu", torch.float32), _reads(torch.ones(3 * 4096), "cpu")):
        for way in ways:
            way()
    assert shapes == [(8, 8), (1, 3)]


@pytest.mark.parametrize("multiplied", [True, False])
def test_sixteen_bits_that_the_processor_does_not_multiply_are_widened(monkeypatch, multiplied):
    """Kernels do so; torch's own product of them, one number at a time, is no roof."""
    monkeypatch.setattr(onednn, "available", lambda device: True)
    monkeypatch.setattr(onednn, "multiplies", lambda dtype: multiplied or dtype == torch.float32)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, tokens: weight)
    monkeypatch.setattr(onednn, "linear", lambda x, weight, bias: x)
    made = {way().dtype for way in _products(8, "cpu", torch.bfloat16)}
    assert made == {torch.bfloat16 if multiplied else torch.float32}
    assert {way().dtype for way in _products(8, "cpu", torch.float64)} == {torch.float64}


def test_buffers_that_fit_into_the_cache_are_no_memory(monkeypatch):
    """Little memory is free: what a copy of an eighth of it reaches is the cache's rate, which no roof is made of."""
    monkeypatch.setattr(machine, "llc_bytes", lambda device: 64 << 20)
    clock = FakeClock()
    for free, measured in ((512 << 20, False), (640 << 20, True)):
        monkeypatch.setattr(machine, "available_memory", lambda free=free: free)
        clock.numbers = free // 8 // 4
        roof = measured_roof("cpu", "fp32", 1, clock)
        assert (roof.bytes_per_s is not None) == measured
        assert roof.flops_per_s == pytest.approx(100e9)


def test_a_gpu_copies_random_numbers(monkeypatch):
    """It draws less power on constants: 13 % more FLOP/s on zeros than on random numbers, measured on an H200."""
    draw, asked = torch.rand, []
    monkeypatch.setattr(torch, "rand", lambda count, device: asked.append(device) or draw(count))
    assert _numbers(1000, "cuda:1").std() > 0.2
    assert asked == ["cuda:1"]
    assert _numbers(10, "cpu").std() == 0
