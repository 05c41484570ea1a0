"""How much of a large checkpoint `ffn trace` reads to run one layer, and how long that takes.

What: `ffn trace DIR --layer 1` on sharded checkpoints with non-zero values, written by `memory.py`: Llama-2-7B's widths
in 4.3 GB, gate and up fused in one matrix (Phi-3's layout), one tensor per expert (Mixtral's layout). Targets: beyond
headers and imports, at most 1.05 × the bytes of the layer's FFN are read; the time is at most 1.5 × that of a process
that imports torch and reads the same bytes.

How: bytes are counted, not estimated: `rchar` in /proc/self/io at the end of the process, minus `rchar` of the same
command with a reader that skips the weights. Every byte obtained by read or pread counts; a memory map would give a
ratio below 1. The yardstick imports torch, reads the FFN's tensors with pread into one buffer, and skips the
interpreter's clean-up, which takes a quarter of a second that `ffn` does not spend; the time of `import torch` with the
clean-up is reported, too. Every round runs every command once, in random order. The target applies to the ratio of the
shortest wall times, because other work on the machine only adds to them. The median over rounds of the ratio in the
same round is also reported, for wall seconds and for CPU seconds (user + system).

Limits: Linux only. The file cache is warm: with a cold disk, both take longer by the same amount. stdout is a file.

    python -m benchmarks.trace_read [--rounds N] [--case NAME,...] [--dir DIR] [--save FILE]

The exit code is 1 if a target is missed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import script
from benchmarks.memory import CASES, LAYER, LLAMA_LAYERS, STORED, Case, checkpoint

MOST_BYTES, MOST_TIME = 1.05, 1.5
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
    from ffncli.models.files.rows import OpenFiles
    OpenFiles._fill = lambda *_: None
from ffncli.cli.main import main
main()
"""


def spans(case: Case, folder: Path) -> list[tuple[str, int, int]]:
    """Return the file, first byte and number of bytes of each of the layer's FFN tensors."""
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
    """Return the bytes that a trace reads, including `all` weights or `nothing` of the weights."""
    command = [sys.executable, "-c", COUNTED, what, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=script.environment())
    return int(done.stderr.split()[-1])


def measure(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """Return a row: bytes read beyond headers and imports, the shortest times over rounds, ratios to the yardstick."""
    arguments = ["trace", str(folder), "--layer", str(LAYER)]
    wanted = case.ffn_params * STORED[case.stored]
    rchar("nothing", arguments)  # writes missing bytecode files
    read = rchar("all", arguments) - rchar("nothing", arguments)
    commands = {
        "trace": script.ffn(*arguments),
        "yardstick": [sys.executable, "-c", YARDSTICK, json.dumps(spans(case, folder))],
        "torch": [sys.executable, "-c", "import torch"],
    }
    runs = script.runs_of(commands, rounds, WARM_UPS)
    times = {f"{name}_s": min(run.wall_s for run in done) for name, done in runs.items()}
    best = times["trace_s"] / times["yardstick_s"]
    ratios = {f"{what}_ratio": script.ratio(runs["trace"], runs["yardstick"], f"{what}_s") for what in ("wall", "cpu")}
    return {
        "case": case.name, "checkpoint_bytes": case.bytes, "ffn_bytes": wanted, "read_bytes": read,
        "read_ratio": read / wanted, **times, "best_ratio": best, **ratios,
        "passed": read <= MOST_BYTES * wanted and best <= MOST_TIME, "rounds": rounds,
    }  # fmt: skip


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each checkpoint."""
    with script.scratch("trace", options.dir) as root:
        for name in options.case:
            case = CASES[name](LLAMA_LAYERS)
            with checkpoint(case, root) as folder:
                yield measure(case, folder, options.rounds)


if __name__ == "__main__":
    script.main_once(__doc__, ("torch",), measured, rounds=11, case=("llama", "phi3", "mixtral"), dir=None)
