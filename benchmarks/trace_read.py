"""How much `ffn trace` reads of a large checkpoint to run one layer of it, and how long that takes.

What: `ffn trace DIR --layer 1` on sharded checkpoints that are written here with real, non-zero values (those of
`memory.py`): Llama-2-7B's widths in 4.3 GB, gate and up fused in one matrix (Phi-3's), one tensor per expert
(Mixtral's). Limits: 1.05 × the bytes of the layer's FFN, beyond headers and imports; 1.5 × the time of a process that
imports torch and reads the same bytes.

How: bytes are counted, not estimated: `rchar` of /proc/self/io at the end of the process, less that of the same command
whose reader of weights reads nothing; every byte that a process gets by read or pread counts, and a memory map would
show as less than 1. The yardstick imports torch, reads the FFN's tensors by pread into one buffer, and leaves without
the interpreter's clean-up, which takes a quarter of a second that `ffn` does not spend; `import torch` with it is shown
beside. Every round runs every command once, in random order. The ratio that the limit holds for is that of the shortest
wall times: other work on a machine only adds to them. The median over rounds of the ratios in the same round stands
beside it, for wall seconds and for CPU seconds (user + system).

Limits: Linux only. The file cache is warm: from a cold disk both take longer by the same. stdout is a file.

    python -m benchmarks.trace_read [--rounds N] [--case NAME]... [--dir DIR] [--save FILE]

The exit code is 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from benchmarks.common import machine, save
from benchmarks.memory import CASES, LAYER, STORED, Case, llama, write
from benchmarks.processes import Run, environment, ffn, interleaved, ratio

MOST_BYTES, MOST_TIME = 1.05, 1.5
LLAMA_LAYERS = 14  # 4.3 GB
NAMES = ("llama", "phi3", "mixtral")
WARM_UPS = 1

YARDSTICK = """
import json, os, sys
import torch

for file, start, size in json.loads(sys.argv[1]):
    descriptor, buffer, at = os.open(file, os.O_RDONLY), memoryview(bytearray(size)), 0
    while at < size:
        at += os.preadv(descriptor, [buffer[at : at + (16 << 20)]], start + at)
os._exit(0)
"""
COUNTED = """
import atexit, sys

def report():
    print(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1], file=sys.stderr)

atexit.register(report)
if sys.argv.pop(1) == "nothing":
    from ffncli.models.files.bytes import OpenFiles
    OpenFiles._fill = lambda *_: None
from ffncli.cli.main import main
main()
"""


@dataclass(frozen=True)
class Result:
    """One checkpoint. Bytes, `read` beyond headers and imports; times the shortest; ratios to the yardstick."""

    case: str
    checkpoint_bytes: int
    ffn_bytes: int
    read_bytes: int
    read_ratio: float
    trace_s: float
    yardstick_s: float
    torch_s: float
    best_ratio: float
    wall_ratio: float
    cpu_ratio: float
    passed: bool
    rounds: int


def spans(case: Case, folder: Path) -> list[tuple[str, int, int]]:
    """(file, first byte, bytes) of each of the layer's FFN tensors."""
    weights = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    out = []
    for name in case.ffn:
        full = case.stem.format(i=LAYER) + name
        path = folder / weights[full]
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            start, end = json.loads(file.read(length))[full]["data_offsets"]
        out.append((str(path), 8 + length + start, end - start))
    return out


def rchar(what: str, arguments: list[str]) -> int:
    """Bytes that a trace got by reading, `nothing` of them weights, or `all`."""
    command = [sys.executable, "-c", COUNTED, what, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return int(done.stderr.split()[-1])


def measure(case: Case, folder: Path, rounds: int) -> Result:
    """Bytes once, times over rounds."""
    arguments = ["trace", str(folder), "--layer", str(LAYER)]
    wanted = case.ffn_params * STORED[case.stored]
    rchar("nothing", arguments)  # which writes the bytecode that is not there yet
    read = rchar("all", arguments) - rchar("nothing", arguments)
    commands = {
        "trace": ffn(*arguments),
        "yardstick": [sys.executable, "-c", YARDSTICK, json.dumps(spans(case, folder))],
        "torch": [sys.executable, "-c", "import torch"],
    }
    runs = interleaved(commands, rounds, WARM_UPS)
    if failed := next((run for done in runs.values() for run in done if run.code), None):
        raise SystemExit(f"a command failed with {failed.code}: {failed.errors}")
    return result(case, wanted, read, runs)


def result(case: Case, wanted: int, read: int, runs: dict[str, list[Run]]) -> Result:
    base = runs["yardstick"]
    times = {name: min(run.wall_s for run in done) for name, done in runs.items()}
    best = times["trace"] / times["yardstick"]
    ratios = best, ratio(runs["trace"], base, "wall_s"), ratio(runs["trace"], base, "cpu_s")
    passed = read <= MOST_BYTES * wanted and best <= MOST_TIME
    return Result(case.name, case.bytes, wanted, read, read / wanted, *times.values(), *ratios, passed, len(base))


def show(r: Result) -> None:
    """One line of the table."""
    sizes = f"{r.checkpoint_bytes / 1e6:>8.0f}{r.ffn_bytes / 1e6:>7.1f}{r.read_bytes / 1e6:>7.1f}{r.read_ratio:>8.4f}"
    times = f"{r.trace_s:>8.2f}{r.yardstick_s:>10.2f}{r.torch_s:>13.2f}{r.best_ratio:>6.2f}"
    times += f"{r.wall_ratio:>8.2f}{r.cpu_ratio:>7.2f}"
    print(f"{r.case:<8}{sizes}{times}  {'pass' if r.passed else 'MISS'}", flush=True)


def measure_all(names: list[str], root: Path, rounds: int) -> Iterator[Result]:
    """Write each checkpoint, measure, delete it."""
    for name in names:
        case = llama(LLAMA_LAYERS) if name == "llama" else CASES[name](0)
        if case.bytes * 1.05 > shutil.disk_usage(root).free:
            raise SystemExit(f"{name} needs {case.bytes / 1e9:.1f} GB: use --dir")
        folder = root / name
        try:
            write(case, folder)
            yield measure(case, folder, rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Write, measure, print, save; 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description="What ffn trace reads of a large checkpoint for one layer, and when.")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="rounds, at least 5 [11]")
    parser.add_argument("--case", action="append", choices=NAMES, help="only this one; repeatable [all]")
    parser.add_argument("--dir", metavar="DIR", help="where to write the checkpoints [a temporary directory]")
    parser.add_argument("--save", metavar="FILE", help="write the results there as CSV")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds must be at least 5")
    about = machine("torch")
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(
        f"{options.rounds} rounds; limits {MOST_BYTES} × the FFN's bytes, {MOST_TIME} × the yardstick's time; MB and s"
    )
    head = f"{'stored':>8}{'FFN':>7}{'read':>7}{'/ FFN':>8}{'trace':>8}{'yardstick':>10}{'import torch':>13}"
    print(f"{'case':<8}{head}{'×':>6}{'wall ×':>8}{'CPU ×':>7}")
    root = Path(tempfile.mkdtemp(prefix="ffn-trace-", dir=options.dir))
    results: list[Result] = []
    try:
        for measured in measure_all(options.case or list(NAMES), root, options.rounds):
            show(measured)
            results.append(measured)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.save:
        save(options.save, [f.name for f in fields(Result)], map(astuple, results), about)
    return int(not all(measured.passed for measured in results))


if __name__ == "__main__":
    sys.exit(main())
