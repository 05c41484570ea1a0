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

    python -m benchmarks.trace_read [--rounds N] [--case NAME,...] [--dir DIR] [--save FILE]

The exit code is 1 where a limit is missed.
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
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=script.environment())
    return int(done.stderr.split()[-1])


def measure(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """Bytes once, `read_bytes` beyond headers and imports; times over rounds, the shortest; ratios to the yardstick."""
    arguments = ["trace", str(folder), "--layer", str(LAYER)]
    wanted = case.ffn_params * STORED[case.stored]
    rchar("nothing", arguments)  # which writes the bytecode that is not there yet
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
    """A row for each checkpoint."""
    with script.scratch("trace", options.dir) as root:
        for name in options.case:
            case = CASES[name](LLAMA_LAYERS)
            with checkpoint(case, root) as folder:
                yield measure(case, folder, options.rounds)


if __name__ == "__main__":
    script.main_once(__doc__, ("torch",), measured, rounds=11, case=("llama", "phi3", "mixtral"), dir=None)
