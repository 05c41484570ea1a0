"""Part device: does `ffn` see this GPU as it is, alone or busy, and does what surrounds the timing cost little?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.gpu_first.on_gpu import keep_busy, small_kernel
from benchmarks.gpu_first.probe import Answer, Figures, Probe, micro
from benchmarks.script import ROOT, command, environment

_LEFT = 1 << 30  # bytes that stay free where memory is short
_LAUNCHES = 2000
_READING_S = 20e-6  # before and after a block of 1 ms, 4 % of it
_REFERENCE_S = 10.0
_HOLDS = """
import sys, torch
left, held, size = int(sys.argv[1]), [torch.zeros(1, device="cuda")], 1 << 30
while (size := min(size, torch.cuda.mem_get_info()[0] - left)) >= 1 << 20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("ready", flush=True)
sys.stdin.read()
"""
_LAUNCHER = "from benchmarks.gpu_first import device; device.launch_from_here()"


@contextmanager
def neighbour(left: int) -> Iterator[None]:
    """Another process on the GPU, which takes its memory until `left` bytes are free."""
    words = [sys.executable, "-c", _HOLDS, str(left)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env=environment(), **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


# --- what is seen -----------------------------------------------------------------------------------------------------


def measure_neighbours() -> Figures:
    """What `ffn bench` says of another process on the GPU."""
    from ffncli.bench.machine.devices import neighbours

    with neighbour(_LEFT):
        return {"text": neighbours("cuda")}


def judge_neighbours(figures: Figures) -> Answer:
    return Answer(bool(figures["text"]), figures["text"] or "no other process is seen")


def measure_clocks() -> Figures:
    """NVML's clocks of torch's GPU when it is busy, and what `ffn bench` would say of a block then."""
    from ffncli.bench.machine.devices import clock_flags, gpu_handles, gpu_probe

    probe, why = gpu_probe("cuda")
    if probe is None:
        return {"why": why}
    keep_busy(2.0)
    sample = probe.fresh()
    handles, _ = gpu_handles("cuda")
    part = handles is not None and handles.part is not handles.whole
    flags, reasons = list(clock_flags(sample, sample)), list(sample.why)
    return {"why": "", "mhz": sample.sm_mhz, "rated_mhz": sample.rated_mhz, "mig": part, "why_low": reasons,
            "flags": flags}  # fmt: skip


def judge_clocks(figures: Figures) -> Answer:
    if figures["why"] or figures["mhz"] is None:
        return Answer(False, figures["why"] or "this GPU gives no clock")
    accused = [flag for flag in figures["flags"] if flag.startswith(("clock=", "gpu-throttled"))]
    text = f"{figures['mhz']} of {figures['rated_mhz']} MHz ({', '.join(figures['why_low']) or 'no reason given'})"
    return Answer(not accused, f"{text}{', a part of a card' if figures['mig'] else ''}; flags {figures['flags']}")


def measure_table() -> Figures:
    """The GPU's L2 cache and memory by torch and by the table of devices."""
    import torch

    from ffncli.system.hardware import find

    about = torch.cuda.get_device_properties(0)
    known = find(about.name)
    table = {"l2": known.llc_bytes, "memory": max(known.memory_gb, default=0) * 1e9} if known else None
    return {"name": about.name, "l2": about.L2_cache_size, "memory": about.total_memory, "table": table}


def judge_table(figures: Figures) -> Answer:
    l2, table = f"{figures['l2'] / 2**20:.0f} MiB of L2", figures["table"]
    if table is None:
        return Answer(False, f"{figures['name']} is not in the table; torch reports {l2}")
    return Answer(
        abs(table["l2"] / figures["l2"] - 1) < 0.05, f"torch reports {l2}, the table {table['l2'] / 2**20:.0f}"
    )


def measure_current() -> Figures:
    """Which GPU is torch's current one once `ffn` uses the last."""
    import torch

    from ffncli.system.gpu import use_device

    last = torch.cuda.device_count() - 1
    use_device(f"cuda:{last}", torch)
    return {"last": last, "current": torch.cuda.current_device()}


def judge_current(figures: Figures) -> Answer:
    text = f"current is cuda:{figures['current']} for cuda:{figures['last']}"
    return Answer(figures["current"] == figures["last"], text)


# --- what cannot be used ----------------------------------------------------------------------------------------------


def measure_unusable() -> Figures:
    """How commands end on a GPU without free memory, and on one that a variable hides."""
    found = {}
    with neighbour(0):
        for name, words in _COMMANDS.items():
            found[f"full: {name}"] = _ended(words, {})
    for name, words in _COMMANDS.items():
        found[f"hidden: {name}"] = _ended(words, {"CUDA_VISIBLE_DEVICES": ""})
    return {"ended": found}


_COMMANDS = {"trace": ("trace", "8x16"), "bench": ("bench", "8x16", "--processes", "1", "--max-time", "1s", "-q")}


def _ended(words: tuple[str, ...], variables: Mapping[str, str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        more = ("--save", str(Path(folder, "a.csv"))) if words[0] == "bench" else ()
        line = command(*words, "--device", "cuda", *more)
        done = subprocess.run(
            line, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, check=False
        )
    return {"code": done.returncode, "lines": done.stderr.strip().splitlines()}


def judge_unusable(figures: Figures) -> Answer:
    wrong = [
        f"{name}: exit {one['code']}, {len(one['lines'])} lines, {(one['lines'] or [''])[-1][:60]}"
        for name, one in figures["ended"].items()
        if one["code"] != 3 or len(one["lines"]) != 1 or not one["lines"][0].startswith("error: --device cuda")
    ]
    lines = dict.fromkeys(one["lines"][0] for one in figures["ended"].values() if one["lines"])
    return Answer(not wrong, "; ".join(wrong) or " | ".join(lines))


def measure_roof() -> Figures:
    """The roof of a case with little memory left for it."""
    from ffncli.bench.timing.roof import guarded, measured_roof

    with neighbour(_LEFT):
        roof, note = guarded(lambda: measured_roof("cuda", "bf16", 1))
    return {"flops": roof.flops_per_s, "bytes": roof.bytes_per_s, "note": note}


def judge_roof(figures: Figures) -> Answer:
    """Is it measured, or its absence a note? Anything else would have ended the case."""
    rates = f"{(figures['flops'] or 0) / 1e12:.0f} TFLOP/s, {(figures['bytes'] or 0) / 1e9:.0f} GB/s"
    return Answer(bool(figures["note"] or figures["flops"]), figures["note"] or rates)


# --- what surrounds the timing ----------------------------------------------------------------------------------------


def launch_from_here() -> None:
    """Print how many cores this process may use, and the host's seconds of a launch."""
    import torch

    call = small_kernel()
    seconds = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_LAUNCHES):
            call()
        seconds.append((time.perf_counter() - began) / _LAUNCHES)
    print(len(os.sched_getaffinity(0)), median(seconds))


def measure_cores() -> Figures:
    """Cores and seconds of a launch, in the environment of a worker for a GPU and of one for the CPU."""
    from ffncli.bench.launch import environment as of_worker

    figures = {"cores": len(os.sched_getaffinity(0))}
    for name, gpu in (("gpu", True), ("cpu", False)):
        variables = of_worker(figures["cores"], "fixed", environment(), gpu)
        words = [sys.executable, "-c", _LAUNCHER]
        done = subprocess.run(words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
        cores, seconds = done.stdout.split()[-2:]
        figures |= {f"{name}_cores": int(cores), f"{name}_s": float(seconds)}
    return figures


def judge_cores(figures: Figures) -> Answer:
    free = figures["gpu_cores"] == figures["cores"] and figures["gpu_s"] <= 1.1 * figures["cpu_s"]
    texts = (f"{figures[f'{name}_cores']} cores, {micro(figures[f'{name}_s'])} a launch" for name in ("gpu", "cpu"))
    return Answer(free, f"{' for a GPU; bound '.join(texts)}; {figures['cores']} here")


def measure_cudnn() -> Figures:
    """How often `ffn verify` of convolutions calls cuDNN, by cuDNN's log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "cudnn.log")
        variables = {"CUDNN_LOGLEVEL_DBG": "3", "CUDNN_LOGINFO_DBG": "1", "CUDNN_LOGDEST_DBG": str(log)}
        line = command("verify", "512x2048:swiglu", "--kernel", "conv1x1", "--device", "cuda")
        done = subprocess.run(line, cwd=ROOT, env=environment() | variables, stdout=sys.stderr, check=False)
        text = log.read_text(errors="replace") if log.exists() else ""
    return {"code": done.returncode, "calls": len(re.findall(r"cudnn(?:Convolution\w*Forward|BackendExecute)\b", text))}


def judge_cudnn(figures: Figures) -> Answer:
    text = f"exit {figures['code']}; {figures['calls']} calls of cuDNN"
    return Answer(figures["code"] == 0 and figures["calls"] > 0, text)


def measure_counters() -> Figures:
    """The host's seconds of one reading of its counters, in a process with all of torch's threads."""
    import torch

    from ffncli.bench.machine.counters import SystemCounters

    x = torch.ones(1000, 1000)
    (x @ x).sum().item()
    figures: dict[str, float] = {"threads": len(os.listdir("/proc/self/task"))}
    for name, counters in (("launching", SystemCounters(launching=True)), ("all", SystemCounters())):
        seconds = []
        for _ in range(300):
            began = time.perf_counter()
            counters.read()
            seconds.append(time.perf_counter() - began)
        figures[f"{name}_s"] = median(seconds)
    return figures


def judge_counters(figures: Figures) -> Answer:
    text = f"{micro(figures['launching_s'])} for the launching threads, {micro(figures['all_s'])} for all"
    return Answer(figures["launching_s"] < _READING_S, f"{text} {figures['threads']:.0f}")


def measure_reference() -> Figures:
    """Seconds of the references in float64 of 2048 tokens through 4096x11008, forward and backward."""
    import torch

    from ffncli.bench.records import Case
    from ffncli.bench.referee.problem import Problem
    from ffncli.block.recipe import FFNSpec

    figures = {}
    for passes in ("forward", "forward+backward"):
        spec = FFNSpec(4096, 11008, "silu", gated=True)
        problem = Problem.of(Case("llama", "llama", spec, 2048, "bf16", passes, device="cuda"), 1)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        began = time.perf_counter()
        _ = problem.first
        torch.cuda.synchronize()
        figures[passes] = time.perf_counter() - began
        del problem, _
        torch.cuda.empty_cache()
    return figures | {"peak": torch.cuda.max_memory_allocated()}


def judge_reference(figures: Figures) -> Answer:
    """Do they take less than 10 s? Twice a process, and fp64 is slow on consumers' cards."""
    backward = figures["forward+backward"]
    text = f"forward {figures['forward']:.2g} s, with backward {backward:.2g} s"
    return Answer(backward < _REFERENCE_S, f"{text}, at most {figures['peak'] / 1e9:.1f} GB")


PROBES = (
    Probe("neighbours", "C4", "Is another process on this GPU seen?", 60, measure_neighbours, judge_neighbours, True,
          "ffncli/system/gpu.py; a container may hide other processes"),
    Probe("clocks", "C2", "Are this GPU's clocks read, and is an honest load not called slow?", 45, measure_clocks,
          judge_clocks, True, "ffncli/system/gpu.py for a part of a card; ffncli/bench/machine/devices.py"),
    Probe("table", "C5", "Is this GPU in the table of devices, with its L2 cache?", 20, measure_table, judge_table,
          True, "the table of devices, in ffncli/system"),
    Probe("current-gpu", "C4", "Is the GPU that ffn uses torch's current one?", 20, measure_current, judge_current,
          True, "ffncli/system/gpu.py"),
    Probe("unusable", "B9", "Do commands end with one line on a full or hidden GPU?", 120, measure_unusable,
          judge_unusable, True, "what torch raises there, in ffncli/system/gpu.py"),
    Probe("roof", "B5", "With 1 GB left, does the roof spare the finished blocks?", 60, measure_roof, judge_roof, True,
          "ffncli/bench/timing/roof.py"),
    Probe("cores", "B10", "Does a GPU's worker launch from any core, as fast as from one?", 60, measure_cores,
          judge_cores, True, "the binding of threads, in ffncli/bench/launch.py"),
    Probe("cudnn", "C1", "Does ffn verify run convolutions by cuDNN?", 90, measure_cudnn, judge_cudnn, True,
          "the flags of cuDNN, in ffncli/run/verify/verify.py"),
    Probe("counters", "C7", "Does a reading of the host's counters take less than 20 µs?", 30, measure_counters,
          judge_counters, True, "which threads are asked, in ffncli/bench/machine/counters.py"),
    Probe("reference", "C7", "Do the references of a large block take less than 10 s?", 75, measure_reference,
          judge_reference, None, "the tokens of a backward case; fp64 is slow on consumers' cards"),
)  # fmt: skip
