"""Part facts: what machine this is, whether `ffn` sees it, and whether the tests that need a GPU pass."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu_first.probe import Answer, Figures, Probe
from benchmarks.script import ROOT, command, environment

TESTS = "tests/bench/timing/test_cuda_real*.py"


def measure_nodes() -> Figures:
    """The device files, what torch sees, and whether `ffn` finds a GPU for --device cuda."""
    import torch

    nodes = sorted(glob.glob("/dev/nvidia*"))
    words = command("trace", "8x16", "--device", "cuda")
    trace = subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=False)
    return {
        "nodes": nodes, "proc": os.path.exists("/proc/driver/nvidia/version"), "torch": torch.cuda.device_count(),
        "trace_code": trace.returncode,
    }  # fmt: skip


def judge_nodes(figures: Figures) -> Answer:
    names = ", ".join(node.removeprefix("/dev/") for node in figures["nodes"][:6]) or "no device files"
    proc = "" if figures["proc"] else "; no /proc/driver/nvidia"
    return Answer(figures["trace_code"] == 0, f"ffn trace: exit {figures['trace_code']}; {names}{proc}")


def measure_machine() -> Figures:
    """What makes two GPUs of one model two machines. The log has all that nvidia-smi says."""
    import torch

    query = "name,driver_version,power.limit,clocks.max.sm,ecc.mode.current,mig.mode.current,persistence_mode"
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE,COMPUTE"], check=False, timeout=15)
        line = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, timeout=15).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        line = str(error)
    packages = {name: _version(name) for name in ("triton", "nvidia-ml-py")}
    return {"smi": line, "cuda": str(torch.version.cuda), "cudnn": torch.backends.cudnn.version(), **packages}


def judge_machine(figures: Figures) -> Answer:
    """No question: the line is the answer."""
    texts = (f"{name} {figures[name]}" for name in ("cuda", "cudnn", "triton", "nvidia-ml-py"))
    return Answer(None, "; ".join([" ".join(figures["smi"].split("\n")[0].split()), *texts]))


def measure_doctor() -> Figures:
    """`ffn doctor`, whose page is in the log."""
    words = command("doctor")
    return {"code": subprocess.run(words, cwd=ROOT, env=environment(), check=False).returncode}


def judge_doctor(figures: Figures) -> Answer:
    return Answer(figures["code"] == 0, f"exit {figures['code']}")


def measure_tests() -> Figures:
    """The tests of real paths."""
    words = [sys.executable, "-m", "pytest", "--tb=short", "--durations=10", *sorted(glob.glob(TESTS, root_dir=ROOT))]
    done = subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return counted(done.stdout) | {"code": done.returncode}


def counted(output: str) -> dict[str, int]:
    """How many tests passed, failed, were skipped and had errors, by pytest's last lines."""
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", output[-400:]):
        counts[word] = int(number)
    return counts


def judge_tests(figures: Figures) -> Answer:
    text = ", ".join(f"{figures[word]} {word}" for word in ("passed", "failed", "skipped", "error") if figures[word])
    return Answer(figures["code"] == 0 and figures["passed"] > 0, text or f"pytest ended with exit {figures['code']}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


PROBES = (
    Probe("nodes", "B8", "Does ffn use the GPU that torch sees?", 60, measure_nodes, judge_nodes, True,
          "how the device is found, in ffncli/system and ffncli/cli"),
    Probe("machine", "A12", "Which GPU, driver, limits and libraries?", 60, measure_machine, judge_machine, None,
          "every column that two machines may differ in"),
    Probe("doctor", "-", "Does ffn doctor end with exit code 0?", 60, measure_doctor, judge_doctor, True,
          "its page, in the log"),
    Probe("real-tests", "-", "Do all tests of real GPU paths pass?", 400, measure_tests, judge_tests, True,
          "the failures, in the log"),
)  # fmt: skip
