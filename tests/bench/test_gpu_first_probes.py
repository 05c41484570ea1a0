"""Every measurement of the part clock runs to its end and gives the figures that its judge reads, with a stand-in GPU.

Tensors are on torch's meta device, which computes nothing; every time between two events is 1 ms.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu_first import clock, device, facts, on_gpu
from benchmarks.gpu_first.probe import Answer
from ffncli.bench.machine import devices
from ffncli.bench.timing import roof
from tests.bench.fake_nvml import FakeNvml
from tests.system import fake_gpu

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


# --- part device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch):
    """How much memory the other process was to leave."""
    asked = []
    monkeypatch.setattr(device, "neighbour", lambda left: asked.append(left) or nullcontext())
    return asked


def test_another_process_is_there_while_it_is_asked_for(monkeypatch, beside):
    monkeypatch.setattr(devices, "neighbours", lambda name: f"{len(beside)} on {name}")
    assert device.measure_neighbours() == {"text": "1 on cuda"}


def test_clocks_are_those_of_a_busy_gpu(monkeypatch):
    card = FakeNvml()
    handles = SimpleNamespace(nvml=card, whole="handle", part="handle")
    handles.ask = lambda name, *more, part=False: getattr(card, name)("handle", *more) if hasattr(card, name) else None
    probe = devices.GpuProbe(handles)
    monkeypatch.setattr(devices, "gpu_probe", lambda name: (probe, ""))
    monkeypatch.setattr(devices, "gpu_handles", lambda name: (handles, ""))
    monkeypatch.setattr(device, "keep_busy", lambda seconds: setattr(card, "sm", 1300))
    card.bits = devices.POWER_CAP
    figures = device.measure_clocks()
    assert (figures["mhz"], figures["rated_mhz"], figures["mig"], figures["why_low"]) == (
        1300,
        1410,
        False,
        ["power cap"],
    )
    assert device.judge_clocks(figures).yes
    card.bits, card.sm = 0x40, 1000
    monkeypatch.setattr(device, "keep_busy", lambda seconds: None)
    assert device.judge_clocks(device.measure_clocks()).yes is False
    monkeypatch.setattr(devices, "gpu_probe", lambda name: (None, "not installed"))
    assert device.judge_clocks(device.measure_clocks()) == Answer(False, "not installed")


@pytest.mark.parametrize(
    ("name", "l2", "yes"), [("NVIDIA H200", 60, True), ("NVIDIA H200", 40, False), ("X1", 60, False)]
)
def test_the_table_is_compared_with_torch(monkeypatch, name, l2, yes):
    about = SimpleNamespace(name=name, L2_cache_size=l2 << 20, total_memory=150 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    assert device.judge_table(device.measure_table()).yes is yes


def test_the_last_gpu_becomes_the_current_one(monkeypatch):
    fake_gpu.install(monkeypatch, there := fake_gpu.FakeCudaTorch(count=3))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: there.current)
    assert device.measure_current() == {"last": 2, "current": 2}


def test_commands_are_asked_on_a_full_gpu_and_on_a_hidden_one(monkeypatch, beside):
    """Where there is none they end as they should there: exit code 3, one line."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the probe itself runs")
    monkeypatch.setattr(device, "_COMMANDS", {"trace": device._COMMANDS["trace"]})
    figures = device.measure_unusable()
    assert (list(figures["ended"]), beside) == (["full: trace", "hidden: trace"], [0])
    assert device.judge_unusable(figures).yes


def test_a_roof_without_memory_is_a_note(monkeypatch, beside):
    def fails(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(roof, "measured_roof", fails)
    answer = device.judge_roof(device.measure_roof())
    assert answer == Answer(True, "the machine's roof could not be measured: CUDA out of memory")
    assert beside == [1 << 30]


def test_launches_run_in_a_workers_environment(monkeypatch):
    printed = "import os; print(4, 1e-6 if 'OMP_PROC_BIND' in os.environ else 2e-6)"
    monkeypatch.setattr(device, "_LAUNCHER", printed)
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    figures = device.measure_cores()
    assert (figures["gpu_cores"], figures["gpu_s"], figures["cpu_s"]) == (4, 2e-6, 1e-6)


def test_calls_of_cudnn_are_counted_in_its_log(monkeypatch):
    lines = "I! CuDNN (v91000) function cudnnBackendExecute() called\nI! function cudnnCreate() called\n" * 3
    program = f"import os; open(os.environ['CUDNN_LOGDEST_DBG'], 'w').write({lines!r})"
    monkeypatch.setattr(device, "command", lambda *words: [sys.executable, "-c", program])
    assert device.measure_cudnn() == {"code": 0, "calls": 3}
    monkeypatch.setattr(device, "command", lambda *words: [sys.executable, "-c", ""])
    assert device.judge_cudnn(device.measure_cudnn()).yes is False


def test_counters_are_read_on_any_machine():
    figures = device.measure_counters()
    assert figures["threads"] >= 1
    assert 0 < figures["launching_s"] < 1
    assert device.judge_counters(figures).figure.endswith(f" for all {figures['threads']}")


def test_a_neighbour_takes_what_it_is_told(monkeypatch):
    """With a stand-in for torch: of 5.5 GiB that are free one is to stay, and no piece is larger than 1.5 GiB."""
    stand_in = """
import sys, types
state = {"free": 11 << 29}
class Full(Exception): pass
def empty(size, **more):
    if size > 3 << 29: raise Full
    state["free"] -= size
cuda = types.SimpleNamespace(mem_get_info=lambda: (state["free"], 8 << 30))
torch = sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, empty=empty, OutOfMemoryError=Full, uint8=0)
torch.zeros = lambda *_, **__: 0
"""
    program = stand_in + device._HOLDS.replace('print("ready"', "assert state['free'] == 1 << 30; print('ready'")
    monkeypatch.setattr(device, "_HOLDS", program)
    with device.neighbour(1 << 30):
        pass
    monkeypatch.setattr(device, "_HOLDS", "1 / 0")
    with pytest.raises(AssertionError), device.neighbour(0):
        pass
