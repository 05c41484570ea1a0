"""doctor: a row for every measuring tool of this machine, with advice on what is missing. Starts without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ffncli.bench.records import Method
from ffncli.bench.timing.modes import auto_choice
from ffncli.errors import shown_path
from ffncli.show.text import percent, plural
from ffncli.system import hardware, host
from ffncli.system.cgroup import ROOT, text
from ffncli.system.files import results_folder
from ffncli.system.gpu import GpuState, gpu_state, has_driver, problem_of
from ffncli.system.packages import REQUIRED, extra_command, install_command, installed, reinstall_command
from ffncli.version import __version__

if TYPE_CHECKING:
    from ffncli.bench.doctor.noise import Noise


_GIB = 1 << 30
_BUSY = 0.25  # cores; a higher load means that other work is running
_STOLEN = 0.01
_MARGIN = Method().margin

EXTRAS = {
    "models": {"transformers": "5", "huggingface_hub": "1", "gguf": "0.17", "accelerate": "1"},
    "plots": {"matplotlib": "3.9"},
    "onnx": {"onnx": "1.18"},
    "parquet": {"pyarrow": "17"},
    "gpu": {"triton": "3.6", "nvidia-ml-py": "12"},
    "slurm": {"submitit": "1.5"},
    "ray": {"ray": "2.40"},
}
_FOR = {
    "models": "traces of real models, hf:// and GGUF files",
    "plots": "plots into files",
    "onnx": "ffn export --as onnx",
    "parquet": "ffn trace --prompts FILE --save units.parquet",
    "gpu": "Triton kernels; clocks and power of the GPU",
    "slurm": "ffn bench --launcher slurm",
    "ray": "ffn bench --launcher ray",
}
CheckStatus = Literal["ok", "note", "missing", "bad"]


@dataclass(frozen=True)
class DoctorCheck:
    """One checked item. `advice` says what to do, empty if there is nothing to do.

    The values of `status` besides `ok`: `missing`, the item is not installed but can be; `bad`, it is installed but
    does not work; `note`, there is something worth knowing.
    """

    name: str
    value: str
    status: CheckStatus = "ok"
    advice: str = ""


def checks() -> Iterator[DoctorCheck]:
    """Yield every row, in the order of the page."""
    yield from _software()
    yield from _processor(ROOT)
    yield from _memory(ROOT)
    yield from _libraries()
    yield from gpu_checks()
    yield from (_extra(name) for name in EXTRAS)
    yield from _quiet(ROOT)
    yield _results(Path.cwd())
    count = len(auto_choice.choices())
    yield DoctorCheck("auto", f"{count} {plural('choice', count)} in {shown_path(auto_choice.folder())}")


# --- software ---------------------------------------------------------------------------------------------------------


def _software() -> Iterator[DoctorCheck]:
    yield DoctorCheck("ffn", __version__)
    yield DoctorCheck("python", ".".join(map(str, sys.version_info[:3])))
    for name, least in REQUIRED.items():
        check = _package(name, least)
        if name in ("torch", "numpy") or check.status != "ok":  # other packages get a row only if there is a problem
            yield check


def lacking(rows: Iterable[DoctorCheck]) -> list[DoctorCheck]:
    """Return the rows of required packages that are missing or do not work."""
    return [check for check in rows if check.name in REQUIRED and check.status in ("missing", "bad")]


def _package(name: str, least: str) -> DoctorCheck:
    """Check a required package: its version must be `least` or later; torch and numpy must also load."""
    current = installed(name)
    if current is None:
        return DoctorCheck(name, "missing", "missing", install_command(name))
    if name in ("torch", "numpy") and (error := _import_error(name)):
        return DoctorCheck(name, f"{current}, does not load: {error}", "bad", reinstall_command(name))
    if older(current, least):
        return DoctorCheck(name, current, "bad", f"older than {least}: {install_command(name)}")
    return DoctorCheck(name, current)


def older(current: str, least: str) -> bool:
    """Return True if one version is older than another, by the leading numbers of the versions."""

    def numbers(text: str) -> tuple[int, ...]:
        parts = text.partition("+")[0].split(".")
        return tuple(int(part) for part in parts[:3] if part.isdigit())

    return numbers(current) < numbers(least)


def _import_error(name: str) -> str:
    from importlib import import_module

    try:
        import_module(name)
    except Exception as error:  # a broken installation can raise anything
        return f"{type(error).__name__}: {str(error)[:80]}"
    return ""


def _extra(name: str) -> DoctorCheck:
    """Return the row of an extra: the installed versions, or how to install what is missing."""
    wanted = EXTRAS[name]
    versions = {package: installed(package) for package in wanted}
    missing = [package for package, have in versions.items() if have is None]
    old = [package for package, have in versions.items() if have is not None and older(have, wanted[package])]
    install = f"{extra_command(name)}  ({_FOR[name]})"
    if name == "gpu" and missing and not has_driver():
        return DoctorCheck(f"extra {name}", "no GPU to use it on", "ok")
    if missing:
        return DoctorCheck(f"extra {name}", f"{', '.join(missing)} missing", "missing", install)
    shown = ", ".join(f"{package} {have}" for package, have in versions.items())
    advice = f"{', '.join(old)} old: {install}" if old else ""
    return DoctorCheck(f"extra {name}", shown, "note" if old else "ok", advice)


# --- the processor ----------------------------------------------------------------------------------------------------


def _processor(root: Path) -> Iterator[DoctorCheck]:
    virtual = "hypervisor" in text(root / "proc/cpuinfo")
    name = host.cpu_name(root) + (", virtual machine" if virtual else "")
    yield DoctorCheck("cpu", name)
    instructions = host.isa(root)
    fast = {"avx512_bf16", "amx_bf16", "bf16"} & set(instructions)
    slow = "bf16 is computed through float32 on this CPU: slower than fp32"
    words = " ".join(instructions) or "unknown"
    if "amx_tile" in instructions and bf16_product_ending() == -signal.SIGILL:
        broken = "a bf16 matmul kills the process (illegal instruction): the virtual machine probably announces AMX"
        yield DoctorCheck("instructions", words, "bad", f"{broken} without describing it: {WITHOUT_AMX}")
    else:
        yield DoctorCheck("instructions", words, "ok" if fast else "note", "" if fast else slow)
    yield _cores(host.cores(root))
    caches = host.caches(root)
    yield DoctorCheck("caches", cache_text(caches) or "unknown", "ok" if caches else "note", host.cpu_llc(root)[1])
    nodes = host.numa_nodes(root)
    if nodes is not None and nodes > 1:
        advice = "use only one node: numactl --cpunodebind=0 --membind=0 ffn bench ..."
        yield DoctorCheck("memory nodes", f"{nodes} (NUMA)", "note", advice)


WITHOUT_AMX = "export ONEDNN_MAX_CPU_ISA=AVX10_1_512"


def bf16_product_ending() -> int:
    """Return the exit code of a process that multiplies in bfloat16; negative for a signal. Takes two seconds."""
    product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    return subprocess.run([sys.executable, "-c", product], capture_output=True, check=False).returncode


def _cores(cores: host.Cores) -> DoctorCheck:
    quota = "no quota" if cores.quota is None else f"a quota of {cores.quota:.3g}"
    allowed = f"{cores.affinity} {plural('CPU', cores.affinity)} allowed"
    value = f"{cores.threads}, of {allowed}, {cores.physical} {plural('core', cores.physical)}, {quota}"
    if cores.quota is not None and cores.quota < cores.affinity:
        return DoctorCheck("threads", value, "note", "all threads stop when the quota is used up: expect noise")
    return DoctorCheck("threads", value)


def cache_text(caches: tuple[host.ProcessorCache, ...]) -> str:
    """List the data and unified caches, as in `L1d 32 KiB x2, L3 35.8 MiB`; `x2` stands for two equal caches."""
    kinds: dict[tuple[int, str, int], int] = {}
    for cache in caches:
        if cache.kind != "Instruction":
            key = (cache.level, "d" if cache.kind == "Data" else "", cache.bytes)
            kinds[key] = kinds.get(key, 0) + 1
    return ", ".join(
        f"L{level}{kind} {size_text(size)}" + (f" x{count}" if count > 1 else "")
        for (level, kind, size), count in kinds.items()
    )


def _memory(root: Path) -> Iterator[DoctorCheck]:
    free, total = host.available_memory(root), host.memory_total(root)
    if free is None:
        yield DoctorCheck("memory", "unknown", "note")
        return
    value = f"{size_text(free)} free" + (f" of {size_text(total)}" if total else "")
    advice = "cold-weights needs free memory of 3 times the cache's size" if free < 2 * _GIB else ""
    yield DoctorCheck("memory", value, "note" if advice else "ok", advice)


# --- libraries, compiler ----------------------------------------------------------------------------------------------


def _libraries() -> Iterator[DoctorCheck]:
    try:
        from ffncli.bench.machine import machine

        runtimes, blas = machine.openmp_runtimes(), machine.blas()
    except Exception:  # torch, numpy or threadpoolctl does not load, which another row reports
        return
    several = "several OpenMP runtimes in one process compete for cores" if len(runtimes) > 1 else ""
    yield DoctorCheck("openmp", ", ".join(runtimes) or "none", "note" if several else "ok", several)
    yield from (DoctorCheck(f"blas of {part.partition(': ')[0]}", part.partition(": ")[2]) for part in blas.split("; "))
    yield _compiler()


def _compiler() -> DoctorCheck:
    from ffncli.kernels.kernel import cxx

    compiler = cxx()
    if compiler is None:
        advice = "install g++ (or name one in CXX); kernel `compiled` is skipped on CPU without it"
        return DoctorCheck("c++ compiler", "none", "missing", advice)
    banner = host.program_output(compiler, "--version").partition("\n")[0]
    if not banner:
        return DoctorCheck("c++ compiler", f"{compiler} does not run", "bad", "try another one in CXX")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        advice = "torch.compile may need it: install python3-dev"
        return DoctorCheck("c++ compiler", f"{banner}, no Python.h", "note", advice)
    return DoctorCheck("c++ compiler", banner)


# --- how quiet the machine is -----------------------------------------------------------------------------------------


def _quiet(root: Path, load: Callable[[], float | None] = host.load) -> Iterator[DoctorCheck]:
    now = load()
    if now is not None:
        busy = now > _BUSY
        advice = "other work is running: intervals will be wide" if busy else ""
        yield DoctorCheck("load", f"{now:.2f} in the last minute", "note" if busy else "ok", advice)
    if (stolen := host.steal(root)) is not None:
        much = stolen > _STOLEN
        advice = "the hypervisor takes CPU time: expect noise; try fewer threads, or another host" if much else ""
        yield DoctorCheck("steal", f"{100 * stolen:.2g} % since boot", "note" if much else "ok", advice)
    if governor := host.governor(root):
        steady = governor == "performance"
        advice = "the clock changes with the load; for a steady one: sudo cpupower frequency-set -g performance"
        yield DoctorCheck("governor", governor, "ok" if steady else "note", "" if steady else advice)


def _results(here: Path) -> DoctorCheck:
    """Check whether `ffn bench` can write to its default folder for results."""
    wanted = results_folder(here)
    nearest = next(path for path in (wanted, *wanted.absolute().parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        made = "" if nearest == wanted else ", created when needed"
        return DoctorCheck("results", f"{shown_path(wanted)}{made}")
    return DoctorCheck("results", f"{shown_path(wanted)} cannot be written", "note", "ffn bench --save FILE.csv")


def noise_check(noise: Noise | None) -> DoctorCheck:
    """Return the noise test as a row."""
    if noise is None:
        advice = "its processes failed; to see why: python -m ffncli.bench.doctor.noise 0 1 0"
        return DoctorCheck("noise", "not measured", "bad", advice)
    value = f"can resolve differences of {percent(noise.resolvable_difference, 2)} or more"
    if noise.resolvable_difference <= _MARGIN:
        return DoctorCheck("noise", value)
    advice = f"ffn bench decides at {percent(_MARGIN, 2)}: expect `inconclusive`"
    if noise.is_troubled:
        advice += "; stop other work" + (", or try --threads 1" if noise.threads > 1 else "")
    else:
        advice += "; use more processes or a larger --max-time"
    return DoctorCheck("noise", value, "note", advice)


# --- the GPUs ---------------------------------------------------------------------------------------------------------


def gpu_checks() -> Iterator[DoctorCheck]:
    """Yield rows for every GPU that torch counts; one row if there is no GPU, or no usable one."""
    try:
        import torch
    except Exception:  # the torch row reports it
        return
    count = torch.cuda.device_count()
    if not count:
        problem = problem_of(0, torch) if has_driver() else None
        built: CheckStatus = "bad" if torch.version.cuda or getattr(torch.version, "hip", None) else "missing"
        yield DoctorCheck("gpu", problem.message, built, problem.hint) if problem else DoctorCheck("gpu", "none")
        return
    from ffncli.bench.machine import machine

    for index in range(count):
        yield from _of_gpu(index, torch)
    yield DoctorCheck("driver", machine.driver("cuda:0") or "unknown")


def _of_gpu(index: int, torch: Any) -> Iterator[DoctorCheck]:
    from ffncli.bench.machine import machine
    from ffncli.bench.machine.devices import gpu_handles

    device = f"cuda:{index}"
    properties = torch.cuda.get_device_properties(index)
    handles, why = gpu_handles(device)
    state = gpu_state(handles) if handles else None  # read before this process uses any of the GPU's memory
    named = f"{properties.name}, {size_text(properties.total_memory)}, L2 {size_text(machine.llc_bytes(device))}"
    if problem := problem_of(index, torch):
        yield DoctorCheck(f"gpu {index}", f"{named}: {problem.message}", "bad", problem.hint)
    else:
        yield DoctorCheck(f"gpu {index}", named)
    if state is None:
        yield DoctorCheck(f"gpu {index} state", why, "note")
    else:
        yield from state_checks(index, state)
    row = hardware.find(properties.name)
    sheet = "not in the built-in table: results have fractions of the measured roof only"
    if row:
        sheet = f"{row.tflops.get('bf16') or row.tflops['fp16']:g} TFLOP/s dense, {row.gbytes_per_s:g} GB/s"
    yield DoctorCheck(f"data sheet {index}", sheet, "ok" if row else "note")


def state_checks(index: int, state: GpuState) -> Iterator[DoctorCheck]:
    """Yield rows on a GPU's state: its memory and the processes that share it, its clock, power limit and modes."""
    if state.memory_free is not None and state.memory_total is not None:
        value = f"{size_text(state.memory_free)} free of {size_text(state.memory_total)}"
        value += f", {state.neighbours}" if state.neighbours else ", no other process"
        advice = "times include other processes' work: stop it, or use another GPU" if state.neighbours else ""
        yield DoctorCheck(f"gpu {index} memory", value, "note" if advice else "ok", advice)
    clocks = [f"{state.sm_mhz} MHz now"] if state.sm_mhz is not None else []
    clocks += [f"up to {state.rated_mhz} MHz"] if state.rated_mhz is not None else []
    clocks += [f"power limit {state.power_limit_w:.0f} W"] if state.power_limit_w is not None else []
    if clocks:
        lowered = f"the power limit was lowered from {state.power_default_w:.0f} W" if state.power_lowered else ""
        advice = f"{lowered}: compare only with the same limit; nvidia-smi -pl changes it" if lowered else ""
        yield DoctorCheck(f"gpu {index} clocks", ", ".join(clocks), "note" if lowered else "ok", advice)
    yield from _modes(index, state)


def _modes(index: int, state: GpuState) -> Iterator[DoctorCheck]:
    """Yield a row on persistence, compute mode and MIG, if the driver reports any of them."""
    modes, advice = [], []
    if state.persistence is not None:
        modes.append(f"persistence mode {'on' if state.persistence else 'off'}")
        if not state.persistence:
            advice.append("to keep the driver loaded, so that processes start sooner: sudo nvidia-smi -pm 1")
    if state.compute_mode is not None:
        modes.append(f"compute mode {state.compute_mode}")
        if state.compute_mode == "prohibited":
            advice.append("to allow computing: sudo nvidia-smi -c 0")
    if state.mig:
        modes.append("a MIG instance: clocks and power are the whole card's")
    if modes:
        yield DoctorCheck(f"gpu {index} modes", ", ".join(modes), "note" if advice else "ok", "; ".join(advice))


def size_text(count: int) -> str:
    """Return a size such as `35.8 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
