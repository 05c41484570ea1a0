"""The paths of a real GPU; skipped where there is none. Their first run on a new machine tells whether they hold."""

import json
import os
import subprocess
import sys
import time
from itertools import cycle
from statistics import median

import pytest
import torch

from ffncli.bench.machine.devices import GpuProbe, gpu_probe
from ffncli.bench.machine.machine import KernelMemory, llc_bytes, set_math_mode
from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Job, Method
from ffncli.bench.timing.clock import CpuClock
from ffncli.bench.timing.gpu.cuda_clock import CudaClock, GpuCounters, clock_for
from ffncli.bench.timing.gpu.cuda_graphs import NotCaptured, captured
from ffncli.bench.timing.measure_case import measure_case
from ffncli.bench.timing.modes.sustained import sustained
from ffncli.bench.timing.rounds import Arm
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels.choice import choices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def clock():
    set_math_mode("highest", "cuda")
    made = clock_for("cuda")
    assert isinstance(made, CudaClock)
    yield made
    torch.cuda.synchronize()


def product(n=2048, dtype=torch.float16):
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def timed(clock, call, inner, before=None):
    for _ in range(4):
        clock.time(call, 1, before)
    return clock.time(call, inner, before) / inner


def test_a_product_takes_as_long_as_the_host_sees_it_take(clock):
    """Long enough (8192³, 1.1 TFLOP) that launching is nothing: both clocks must agree within 10 %."""
    call = product(8192)
    times = []
    for _ in range(10):  # a block is launch-bound where the host stalls: one of ten is enough
        seconds = timed(clock, call, 5)
        times += [] if clock.launch_bound else [seconds]
    gpu = min(times)
    assert 1.1e12 / 5e15 < gpu < 1.1e12 / 1e12  # between 1 TFLOP/s and 5 PFLOP/s

    def finished():
        call()
        torch.cuda.synchronize()

    host = min(CpuClock().time(finished, 5) / 5 for _ in range(3))
    assert gpu == pytest.approx(host, rel=0.1)


def test_time_is_proportional_to_work(clock):
    call = product(4096)
    one = min(timed(clock, call, 8) for _ in range(5))
    twice = min(timed(clock, lambda: (call(), call()), 8) for _ in range(5))
    assert twice / one == pytest.approx(2, rel=0.1)


def test_a_tiny_kernel_is_not_timed_as_its_launch(clock):
    x = torch.ones(16, device="cuda")

    def call():
        for _ in range(20):
            x.add_(1)

    gpu = min(timed(clock, call, 50) for _ in range(5))
    host = CpuClock().time(call, 500) / 500  # launches alone, or the GPU where it is slower
    torch.cuda.synchronize()
    assert 20 * 0.3e-6 < gpu <= 1.2 * host


def test_the_cycles_of_the_waiting_kernel_are_known(clock):
    """It waits about as long as it is told to; a clock that changes may double it."""
    seconds = min(clock.time(lambda: torch.cuda._sleep(int(2e-3 * clock.cycles_per_s)), 1) for _ in range(3))
    assert 1e-3 < seconds < 8e-3


def test_a_call_that_waits_is_said(clock):
    x = torch.ones(16, device="cuda")
    timed(clock, lambda: x.sum().item(), 10)
    assert clock.launch_bound


def test_a_host_that_stalls_inside_a_block_is_said(clock):
    """50 calls of a product that takes the GPU some 20 µs; before the 25th the host sleeps for 3 ms."""
    call = product(1024)
    timed(clock, call, 50)
    assert not clock.launch_bound
    numbers = iter(range(10**6))

    def stalls():
        if next(numbers) == 4 + 25:
            time.sleep(3e-3)
        call()

    timed(clock, stalls, 50)
    assert clock.launch_bound


def test_the_sm_clock_is_what_nvml_says(clock):
    """After a second of products: cycles of the waiting kernel over the seconds that it took."""
    probe, why = gpu_probe("cuda")
    if probe is None or probe.fresh().sm_mhz is None:
        pytest.skip(why or "this GPU does not give its clock")
    call = product(4096)
    until = clock.now() + 1.0
    while clock.now() < until:
        timed(clock, call, 8)
    pairs = []
    for _ in range(10):
        timed(clock, call, 8)
        sample = probe.fresh()
        clock.time(lambda: call(), 1)  # a new call: its wait is long enough to be read, unless the host stalls
        pairs += [] if clock.sm_hz is None else [clock.sm_hz / 1e6 / sample.sm_mhz]
    assert 0.9 < median(pairs) < 1.1, pairs


def test_work_on_another_stream_is_noticed_and_nobody_else_is_accused(clock):
    side, call = torch.cuda.Stream(), product(4096)

    def apart():
        with torch.cuda.stream(side):
            call()

    timed(clock, apart, 4)
    assert clock.other_stream
    torch.cuda.synchronize()
    accused = 0
    for _ in range(50):
        timed(clock, call, 4)
        accused += clock.other_stream

    def joined():
        side.wait_stream(torch.cuda.current_stream())
        apart()
        torch.cuda.current_stream().wait_stream(side)

    for _ in range(50):
        timed(clock, joined, 4)
        accused += clock.other_stream
    assert accused <= 50  # of 100: a late host causes the flag too, so the ruling needs it in most blocks


def test_the_markers_in_a_block_cost_little(clock):
    """A block of 1 ms in segments against the same calls between two events alone."""
    x = torch.ones(1 << 22, device="cuda")

    def call():
        x.add_(1)

    per_call = min(timed(clock, call, 100) for _ in range(5))
    inner = max(8, round(1e-3 / per_call))
    marked = min(timed(clock, call, inner) for _ in range(9))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    bare = []
    for _ in range(9):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(5e-3 * clock.cycles_per_s))
        start.record()
        for _ in range(inner):
            call()
        end.record()
        torch.cuda.synchronize()
        bare.append(start.elapsed_time(end) * 1e-3 / inner)
    assert min(bare) * 0.97 < marked < min(bare) * 1.03


def test_the_hosts_seconds_are_of_the_order_of_a_launch(clock):
    timed(clock, product(1024), 50)
    assert 50 * 1e-6 < clock.host_s < 50 * 1e-3


def test_the_flush_is_not_timed(clock):
    buffer = torch.empty(3 * llc_bytes("cuda"), dtype=torch.uint8, device="cuda")
    call = product(4096)
    plain = min(timed(clock, call, 8) for _ in range(5))
    flushed = min(timed(clock, call, 8, buffer.zero_) for _ in range(5))
    assert plain * 0.9 < flushed < 1.5 * plain


def test_replays_equal_plain_calls_bitwise(clock):
    x = torch.randn(32, 512, device="cuda")
    weights = [torch.randn(512, 512, device="cuda") for _ in range(3)]

    def call(w):
        return torch.nn.functional.silu(x @ w) @ w.T

    with torch.inference_mode():
        plain = [call(w) for w in weights]
        replays = captured(call, weights)
        for _ in range(2):
            assert all(torch.equal(replay(), out) for replay, out in zip(replays, plain, strict=True))
        x.mul_(2)  # the input is read where it was captured
        assert torch.equal(replays[1](), call(weights[1]))


def test_gradients_replay_too(clock):
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    w = torch.randn(64, 64, device="cuda", requires_grad=True)

    def call(own):
        y = torch.nn.functional.silu(x @ own)
        return torch.autograd.grad(y, (x, own), torch.ones_like(y))

    (replay,) = captured(call, [w])
    assert all(torch.equal(a, b) for a, b in zip(replay(), call(w), strict=True))


def test_what_waits_is_not_captured_and_leaves_torch_as_it_was(clock):
    x = torch.ones(16, device="cuda")
    with pytest.raises(NotCaptured):
        captured(lambda _: x.nonzero().tolist(), [0])
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.randn(4, device="cuda").isfinite().all()
    assert torch.equal(captured(lambda _: x + 1, [0])[0](), x + 1)


def test_a_graph_of_many_calls_takes_as_long_as_the_calls(clock):
    x, weights = torch.randn(32, 2048, device="cuda"), [torch.randn(2048, 2048, device="cuda") for _ in range(3)]
    outs = [x @ w for w in weights]
    (replay,) = captured(lambda w: torch.mm(x, w, out=outs[0]), weights, 48)
    assert torch.equal(replay(), x @ weights[2])
    one = min(timed(clock, replay, 2) for _ in range(5)) / 48
    turn = cycle(weights)
    plain = min(timed(clock, lambda: torch.mm(x, next(turn), out=outs[0]), 96) for _ in range(5))
    assert one == pytest.approx(plain, rel=0.15)


def test_the_peak_of_a_known_allocation(clock):
    size = 64 << 20

    def call():
        first = torch.empty(size, dtype=torch.uint8, device="cuda")
        del first
        return torch.empty(size // 2, dtype=torch.uint8, device="cuda")

    assert KernelMemory("cuda").peak(call, lambda: None) == size


def test_clocks_and_power_or_why_not(clock):
    probe, why = gpu_probe("cuda")
    assert isinstance(probe, GpuProbe) is (why == "")
    if probe is not None:
        clock.time(product(4096), 20)
        sample = probe.fresh()
        assert sample.sm_mhz is None or 100 < sample.sm_mhz < 5000
        assert sample.power_w is None or 1 < sample.power_w < 3000
        assert probe.driver


def test_long_turns(clock):
    arms = (Arm("large", product(4096)), Arm("small", product(2048)))
    kernel, baseline = sustained(*arms, clock, gpu_probe("cuda")[0])
    assert 3 < kernel.time_s / baseline.time_s < 20  # eight times the work


SPEC = FFNSpec(256, 512, "silu", gated=True)


@pytest.mark.parametrize(
    ("passes", "cache", "tokens"),
    [
        ("forward", "warm", 16),
        ("forward", "cold-weights", 4),
        ("forward", "flush", 16),
        ("forward+backward", "warm", 16),
    ],
)
def test_a_case_from_end_to_end(passes, cache, tokens):
    case = Case("256x512:swiglu", "256x512:swiglu", SPEC, tokens, "bf16", passes, cache, "cuda")
    method = Method(processes=1, max_time=3.0, placements=2, rounds=2, sustained=cache == "warm")
    unit = measure_case(case, Job(0, (case,), choices(["eager,packed"]), "eager", method))
    assert {o.kernel: (o.status, o.note) for o in unit.outcomes if o.status != "ok"} == {}
    assert {b.kernel for b in unit.blocks} == {"eager", "packed", TWIN, ANCHOR, GEMM}
    assert all(b.seconds > 0 for b in unit.blocks)
    assert all(o.peak_memory_bytes is not None and o.peak_memory_bytes > 0 for o in unit.outcomes)
    assert unit.launch == "graphs"


def test_a_mixture_is_timed_without_graphs():
    spec = FFNSpec(64, 128, "silu", gated=True, moe=MoE(4, 2))
    case = Case("moe", "moe", spec, 8, "fp32", device="cuda")
    method = Method(processes=1, max_time=2.0, placements=2, rounds=2)
    unit = measure_case(case, Job(0, (case,), choices(["eager"]), "eager", method))
    assert [o.status for o in unit.outcomes] == ["ok"]
    assert unit.launch == "plain"
    assert any("no CUDA graphs, as eager cannot be captured" in note for note in unit.notes)
    assert any("launch-bound" in b.flags for b in unit.blocks if b.kernel == "eager")


def test_the_command_from_end_to_end(tmp_path):
    command = [sys.executable, "-m", "ffncli", "bench", "256x512:swiglu", "--device", "cuda", "--tokens", "16"]
    command += ["--kernel", "eager,packed", "--quick", "--json", "--save", str(tmp_path / "gpu.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["kernel"], row["status"], row["device"]) for row in rows] == [
        ("eager", "ok", "cuda"),
        ("packed", "ok", "cuda"),
    ]
    assert all(row["time_s"] > 0 and row["device_name"] for row in rows)
    assert all(row["launch_s"] > 0 and row["launch_queues"] == "4x" for row in rows)


WAITS = """
import torch

def mlp(x, gate, up, down):
    torch.cuda.set_sync_debug_mode(0)  # a wait that torch does not see
    x.sum().item()
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
"""


@pytest.mark.parametrize(("launch", "statuses"), [("auto", ("ok", "ok")), ("graphs", ("ok", "skipped"))])
def test_a_spoiled_capture_costs_the_others_nothing(tmp_path, launch, statuses):
    (tmp_path / "mine.py").write_text(WAITS)
    command = [sys.executable, "-m", "ffncli", "bench", "256x512:swiglu", "--device", "cuda", "--tokens", "16"]
    command += ["--kernel", f"eager,mine={tmp_path / 'mine.py'}:mlp", "--launch", launch, "--quick", "--json"]
    command += ["--save", str(tmp_path / "gpu.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    rows = json.loads(done.stdout)["rows"]
    assert tuple(row["status"] for row in rows) == statuses, done.stderr
    assert rows[0]["launch"] == ("plain" if launch == "auto" else "graphs")
    assert "cannot be captured" in rows[1]["note"]


def test_flags_of_real_blocks(clock):
    probe, _ = gpu_probe("cuda")
    counters = GpuCounters(clock, probe)

    def flags():
        before = counters.read()
        return counters.flags(before, counters.read(), clock.time(product(4096), 50), 0)

    # A host that lost its core at the head of a block gives it no reading of the clock.
    assert probe is None or any(flag.startswith("sm=") for _ in range(5) for flag in flags())
