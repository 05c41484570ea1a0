"""Every measurement of the part clock runs to its end and gives the figures that its judge reads, with a stand-in GPU.

Tensors are on torch's meta device, which computes nothing; every time between two events is 1 ms.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu_first import clock, facts, on_gpu
from benchmarks.gpu_first.probe import Answer

MS = 1e-3


class NothingIsComputed(TorchFunctionMode):
    """Tensors that are made on `cuda` are made on `meta`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class HostTime:
    """20 ms pass at each look."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 0.02
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def gpu(monkeypatch):
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)
    properties = SimpleNamespace(L2_cache_size=50 << 20, uuid="GPU-1")
    stand_in = {
        "Event": lambda **options: event, "_sleep": lambda cycles: None, "synchronize": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "graph": lambda graph: nullcontext(),
        "Stream": lambda: None, "stream": lambda stream: nullcontext(), "empty_cache": lambda: None,
        "get_device_properties": lambda number: properties,
    }  # fmt: skip
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    host, energy = HostTime(), iter(range(0, 10**9, 1000))  # a joule at each look
    library = SimpleNamespace(
        NVML_CLOCK_SM=1, nvmlDeviceGetClockInfo=lambda handle, kind: 1000, nvmlDeviceGetPowerUsage=lambda handle: 5000,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(energy),
    )  # fmt: skip
    for module in (clock, on_gpu):
        monkeypatch.setattr(module, "time", host)
    monkeypatch.setattr(clock, "nvml", lambda: (library, None))
    with NothingIsComputed():
        yield


@pytest.mark.parametrize("probe", [p for p in clock.PROBES if p.name != "kernel-time"], ids=lambda probe: probe.name)
def test_a_measurement_gives_what_its_judge_reads(gpu, probe):
    answer = probe.judge(probe.measure())
    assert isinstance(answer, Answer)
    assert answer.figure


def test_figures_are_per_call(gpu):
    events = clock.measure_events()
    assert events == pytest.approx({"pair_s": MS, "one_s": MS, "each_s": MS / 500})
    assert set(clock.measure_graph_launch().values()) == {MS / 500}  # per node, whatever the graphs hold
    copies = clock.measure_copies()
    # 50 MiB over 3 · 512 · 2048 · 2 bytes is 8.3: 9 copies, then 17, 25, 42, all in one graph.
    assert list(copies.values()) == pytest.approx([MS / 9, MS / 17, MS / 25, MS / 42])
    assert clock.measure_flush() == pytest.approx({"write_s": MS, "read_s": MS})
    # A product is timed over 5 calls; 1,000,000 cycles in 1 ms are 1000 MHz.
    assert clock.measure_data()["product_random_s"] == pytest.approx(MS / 5)
    assert clock.measure_sm_clock()["busy_cycles_mhz"] == pytest.approx(1000)


def test_kernels_are_summed_per_call(gpu, monkeypatch):
    """A profile of 50 calls (5 of many tokens) with two kernels of 300 and 200 µs in all."""
    events = [SimpleNamespace(self_device_time_total=us) for us in (300, 200)]
    profile = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profile))
    monkeypatch.setattr(clock, "SIZES", [clock.SIZES[0], clock.SIZES[-1]])
    figures = clock.measure_kernel_time()
    assert len(figures) == 2
    assert figures["512x2048, 1"] == pytest.approx({"plain_s": MS / 50, "graph_s": MS / 50, "kernels_s": 500e-6 / 50})
    assert figures["4096x11008, 4096"]["kernels_s"] == pytest.approx(500e-6 / 5)
    assert clock.judge_kernel_time(figures).yes


def test_a_machine_without_its_tools_is_described(monkeypatch):
    monkeypatch.setenv("PATH", "")
    figures = facts.measure_machine()
    assert "nvidia-smi" in figures["smi"]
    assert facts.judge_machine(figures).yes is None
