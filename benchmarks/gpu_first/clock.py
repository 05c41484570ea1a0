"""Part clock: what a call's time contains besides its work."""

from __future__ import annotations

import time
from itertools import cycle
from statistics import median

from benchmarks.gpu_first.on_gpu import (
    cache_bytes,
    each_timed,
    gated_block,
    graph_of,
    keep_busy,
    nvml,
    product,
    small_kernel,
    timed,
    typical,
    wait,
)
from benchmarks.gpu_first.probe import Answer, Figures, Probe, micro, percent

SIZES = ((512, 2048, 1), (4096, 11008, 1), (4096, 11008, 16), (4096, 11008, 512), (4096, 11008, 4096))
_ENOUGH_CALLS = 2048  # of a block whose calls should all be launched ahead


# --- launches ---------------------------------------------------------------------------------------------------------


def measure_events() -> Figures:
    """Seconds between two events with nothing, one kernel, and 500 kernels between them; the last per kernel."""
    call = small_kernel()
    nothing, one = (typical(lambda n=n: timed(call, n)) for n in (0, 1))
    return {"pair_s": nothing, "one_s": one, "each_s": typical(lambda: timed(call, 500)) / 500}


def judge_events(figures: Figures) -> Answer:
    extra = figures["one_s"] - figures["each_s"]
    text = f"{micro(extra)} more for a call between two events; nothing between them: {micro(figures['pair_s'])}"
    return Answer(extra > 1e-6, f"{text}, a kernel in a row: {micro(figures['each_s'])}")


def measure_graph_launch() -> Figures:
    """Seconds per node of one graph with 500 nodes, of graphs with 5, and of graphs with 1, several in turn."""
    call = small_kernel()
    figures = {}
    for nodes in (500, 5, 1):
        turns = cycle([graph_of([call] * nodes) for _ in range(8)])
        launches = 500 // nodes
        next_graph = lambda turns=turns: next(turns)()  # noqa: E731
        figures[f"nodes_{nodes}_s"] = typical(lambda n=launches, f=next_graph: timed(f, n, 20e-3)) / 500
    return figures


def judge_graph_launch(figures: Figures) -> Answer:
    """Does a graph of one call take more than 0.5 µs longer than a node among many: 5 % of a call of 10 µs?"""
    extra = figures["nodes_1_s"] - figures["nodes_500_s"]
    of_five = 5 * (figures["nodes_5_s"] - figures["nodes_500_s"])
    text = f"{micro(extra)} more for a graph of one node, {micro(of_five)} for one of 5"
    return Answer(extra > 0.5e-6, f"{text}; a node among 500: {micro(figures['nodes_500_s'])}")


def measure_first_replay() -> Figures:
    """Seconds of the first and the second replay of graphs of 10 nodes."""
    call = small_kernel()
    graphs = [graph_of([call] * 10) for _ in range(20)]
    first, second = ([timed(replay) for replay in graphs] for _ in range(2))
    return {"first_s": median(first), "second_s": median(second)}


def judge_first_replay(figures: Figures) -> Answer:
    extra = figures["first_s"] - figures["second_s"]
    return Answer(extra > 2e-6, f"first {micro(figures['first_s'])}, second {micro(figures['second_s'])}")


def measure_queue() -> Figures:
    """How many launches the queue takes while the GPU waits, plain and by graphs."""
    import torch

    call = small_kernel()
    figures = {}
    for name, launch in (("plain", call), ("graphs", graph_of([call]))):
        torch.cuda.synchronize()
        wait(0.3)
        launched, until = 0, time.perf_counter() + 0.15
        while time.perf_counter() < until:
            began = time.perf_counter()
            launch()
            launched += 1
            if time.perf_counter() - began > 10e-3:
                break
        figures[name] = launched
        torch.cuda.synchronize()
    return figures


def judge_queue(figures: Figures) -> Answer:
    text = f"{figures['plain']} plain launches, {figures['graphs']} graphs before one waits"
    return Answer(min(figures["plain"], figures["graphs"]) >= _ENOUGH_CALLS, text)


def measure_side_stream() -> Figures:
    """A kernel of some milliseconds on a stream of its own, not joined: seconds by events and by the host."""
    import torch

    side = torch.cuda.Stream()

    def call() -> None:
        with torch.cuda.stream(side):
            wait(5e-3)

    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return {"events_s": float(start.elapsed_time(end)) * 1e-3, "host_s": time.perf_counter() - began}


def judge_side_stream(figures: Figures) -> Answer:
    text = f"events {micro(figures['events_s'])}, until all is done {micro(figures['host_s'])}"
    return Answer(figures["events_s"] < 0.5 * figures["host_s"], text)


# --- kernels and caches -----------------------------------------------------------------------------------------------


def measure_kernel_time() -> Figures:
    """Seconds of a call by events, plain and as a graph, and the sum of its kernels by torch.profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    figures: dict[str, object] = {}
    for d_model, d_ff, tokens in SIZES:
        (call,) = gated_block(d_model, d_ff, tokens)
        repeats = 50 if tokens < 512 else 5
        plain = typical(lambda f=call, n=repeats: timed(f, n)) / repeats
        replay = graph_of([call] * repeats)
        by_graph = typical(lambda f=replay: timed(f)) / repeats
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
        kernels = sum(event.self_device_time_total for event in trace.key_averages()) * 1e-6 / repeats
        figures[f"{d_model}x{d_ff}, {tokens}"] = {"plain_s": plain, "graph_s": by_graph, "kernels_s": kernels}
        del call, replay
        torch.cuda.empty_cache()
    return figures


def judge_kernel_time(figures: Figures) -> Answer:
    gaps = {name: 1 - times["kernels_s"] / times["graph_s"] for name, times in figures.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    texts = (f"{name}: {percent(gap)}" for name, gap in gaps.items())
    return Answer(gaps[worst] > 0.05, f"not in a kernel, at {'; '.join(texts)}")


def measure_flush() -> Figures:
    """Seconds of a small block's call after the cache was filled by writes, and by reads."""
    import torch

    (call,) = gated_block(512, 2048, 1)
    size = 3 * cache_bytes() // 4
    written, read = (torch.zeros(size, device="cuda") for _ in range(2))
    total = torch.zeros((), device="cuda")
    call()
    ways = {"write_s": written.zero_, "read_s": lambda: torch.sum(read, dim=0, out=total)}
    return {name: median(each_timed(call, before) for _ in range(3)) for name, before in ways.items()}


def judge_flush(figures: Figures) -> Answer:
    more = figures["write_s"] / figures["read_s"] - 1
    text = f"{micro(figures['write_s'])} after writes, {micro(figures['read_s'])} after reads: {percent(more)}"
    return Answer(more > 0.03, text)


def measure_copies() -> Figures:
    """Seconds per call over copies of the weights that total 1, 2, 3 and 5 times the cache, in one graph."""
    import torch

    bytes_each = 3 * 512 * 2048 * 2
    figures = {}
    for factor in (1, 2, 3, 5):
        copies = -(-factor * cache_bytes() // bytes_each)
        replay = graph_of(gated_block(512, 2048, 1, copies))
        figures[f"times_{factor}_s"] = typical(lambda f=replay, n=copies: timed(f) / n)
        del replay
        torch.cuda.empty_cache()
    return figures


def judge_copies(figures: Figures) -> Answer:
    share = figures["times_3_s"] / figures["times_5_s"]
    text = ", ".join(f"x {factor}: {micro(figures[f'times_{factor}_s'])}" for factor in (1, 2, 3, 5))
    return Answer(share > 0.98, text)


def measure_data() -> Figures:
    """Seconds of a product and of a copy of 512 MiB, on zeros, ones and random numbers."""
    import torch

    figures: dict[str, float] = {}
    fills = {"zeros": torch.zeros_like, "ones": torch.ones_like, "random": torch.randn_like}
    for name, fill in fills.items():
        a, b, out = (torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        a, b = fill(a), fill(b)
        keep_busy(0.5)
        figures[f"product_{name}_s"] = typical(lambda a=a, b=b, o=out: timed(lambda: torch.mm(a, b, out=o), 5)) / 5
        del a, b, out
        source = fill(torch.empty(1 << 28, device="cuda", dtype=torch.bfloat16))
        target = torch.empty_like(source)
        figures[f"copy_{name}_s"] = typical(lambda s=source, t=target: timed(lambda: t.copy_(s), 5)) / 5
        del source, target
        torch.cuda.empty_cache()
    return figures


def judge_data(figures: Figures) -> Answer:
    apart = {
        f"{what} of {fill}": figures[f"{what}_{fill}_s"] / figures[f"{what}_random_s"] - 1
        for what in ("product", "copy")
        for fill in ("zeros", "ones")
    }
    text = "; ".join(f"{name} {percent(share)}" for name, share in apart.items())
    return Answer(max(map(abs, apart.values())) > 0.02, f"time against random: {text}")


# --- clocks and power -------------------------------------------------------------------------------------------------


def _spend(seconds: float, state: str) -> None:
    """So many seconds at `rest`, or `busy`."""
    if state == "rest":
        time.sleep(seconds)
    else:
        keep_busy(seconds)


def _mhz_by_cycles() -> float:
    """The SM clock: cycles that a waiting kernel counts, over its time."""
    import torch

    cycles = 1_000_000
    return cycles / timed(lambda: torch.cuda._sleep(cycles), ahead=1e-4) * 1e-6


def measure_sm_clock() -> Figures:
    """MHz by a waiting kernel's cycles and by NVML, after a rest and after some products; seconds per reading."""
    library, handle = nvml()
    figures: dict[str, float] = {}
    for state in ("rest", "busy"):
        _spend(2.0 if state == "rest" else 1.0, state)
        figures[f"{state}_cycles_mhz"] = _mhz_by_cycles()
        figures[f"{state}_nvml_mhz"] = library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)
    began = time.perf_counter()
    for _ in range(20):
        library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)
    figures["reading_s"] = (time.perf_counter() - began) / 20
    return figures


def judge_sm_clock(figures: Figures) -> Answer:
    share = figures["busy_cycles_mhz"] / figures["busy_nvml_mhz"] - 1
    texts = [
        f"{state}: {figures[f'{state}_cycles_mhz']:.0f} MHz by cycles, {figures[f'{state}_nvml_mhz']:.0f} by NVML"
        for state in ("busy", "rest")
    ]
    return Answer(abs(share) < 0.03, f"{'; '.join(texts)}; {1e3 * figures['reading_s']:.2g} ms a reading")


def measure_power() -> Figures:
    """Watts over turns of 0.3 s, busy and at rest in turn, by NVML's reading and by its energy counter."""
    library, handle = nvml()
    found: dict[str, list[float]] = {f"{state}_{way}_w": [] for state in ("busy", "rest") for way in ("read", "energy")}
    call = product()
    timed(call, 20)
    for turn in range(8):
        state = "rest" if turn % 2 else "busy"
        began, energy = time.perf_counter(), library.nvmlDeviceGetTotalEnergyConsumption(handle)
        _spend(0.3, state)
        spent = (library.nvmlDeviceGetTotalEnergyConsumption(handle) - energy) * 1e-3
        found[f"{state}_energy_w"].append(spent / (time.perf_counter() - began))
        found[f"{state}_read_w"].append(library.nvmlDeviceGetPowerUsage(handle) * 1e-3)
    return {name: median(values) for name, values in found.items()}


def judge_power(figures: Figures) -> Answer:
    by_reading, by_energy = (figures[f"busy_{way}_w"] - figures[f"rest_{way}_w"] for way in ("read", "energy"))
    text = f"busy less rest: {by_reading:.0f} W by readings, {by_energy:.0f} W by energy"
    return Answer(by_reading < 0.8 * by_energy, text)


CUDA_CLOCK = "ffncli/bench/timing/gpu/cuda_clock.py"
PROBES = (
    Probe("events", "A6", "Do two events add more than 1 µs to a lone call?", 30, measure_events, judge_events, None,
          "the mode flush has two events per call: subtract, or say so"),
    Probe("graph-launch", "A6", "Does a graph of one call add more than 0.5 µs to each?", 45, measure_graph_launch,
          judge_graph_launch, False, "small cases must be graphs of many calls (ffn bench --launch graphs)"),
    Probe("first-replay", "B6", "Does a graph's first replay take longer?", 30, measure_first_replay,
          judge_first_replay, None, "every graph must be replayed once before a block"),
    Probe("queue", "C6", "Does the queue take a block of 2048 calls?", 30, measure_queue, judge_queue, True,
          f"the most calls of a block, in {CUDA_CLOCK}"),
    Probe("queue-4x", "C6", "Does it with CUDA_SCALE_LAUNCH_QUEUES=4x?", 30, measure_queue, judge_queue, True,
          "if only this one does, workers need the variable", {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}),
    Probe("side-stream", "A5", "Do events miss work on another stream?", 20, measure_side_stream, judge_side_stream,
          True, "the check that compares events with a full wait must refuse such a kernel"),
    Probe("kernel-time", "-", "Is more than 5 % of a replayed call not in a kernel?", 90, measure_kernel_time,
          judge_kernel_time, None, "what lies between kernels is in time_s, and in roof_fraction"),
    Probe("flush", "A8", "Does a flush by writing bill its write-back to the call?", 60, measure_flush, judge_flush,
          False, "--cache flush with FFN_FLUSH=read; which must become the default"),
    Probe("copies", "A8", "Are weights of 3 times the L2 cold?", 45, measure_copies, judge_copies, True,
          "the factor of cold-weights, in ffncli/bench/timing/placement.py"),
    Probe("data", "A11", "Do zeros or ones take another time than random numbers?", 60, measure_data, judge_data, None,
          "the anchor and the roof must use random numbers"),
    Probe("sm-clock", "A10", "Are a waiting kernel's cycles the SM clock?", 40, measure_sm_clock, judge_sm_clock, True,
          "the clock column must stay NVML's"),
    Probe("power", "A9", "Does a power reading mix turns of 0.3 s?", 60, measure_power, judge_power, None,
          "--sustained must use the energy counter"),
)  # fmt: skip
