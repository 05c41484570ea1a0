"""What other inputs at every call cost: time per round and noise of `ffn bench`, by this tree and by another, in turn.

What: the kernel eager alone, so that each round has it, its twin, the bare products and the anchor; a small block with
one token, and a gated one with 1, 32 and 256; on one thread and on two. Time per round: blocks and lead-in of all arms,
of which the timed calls are a part. Noise: the half-width of the 95 % interval of the ratio of eager to its twin.

Limits: one machine; both trees get the same time, so that a slower round means fewer rounds.

    python -m benchmarks.fresh_inputs --base DIRECTORY [--save FILE] ...    # continues FILE
    python -m benchmarks.fresh_inputs --summary FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from statistics import median

from benchmarks.benched import ROOT, about_line, environment
from benchmarks.common import machine
from benchmarks.kept import Kept, read
from benchmarks.timers import now

COLUMNS = (
    "date", "inputs", "source", "tokens", "threads", "repeat", "rounds", "round_s", "calls_s", "lead_in_s", "time_s",
    "aa_ratio", "aa_half_width", "warnings",
)  # fmt: skip
CASES = (("64x256:relu", 1), ("512x2048:swiglu", 1), ("512x2048:swiglu", 32), ("512x2048:swiglu", 256))
Rows = Sequence[Mapping[str, str]]


def measured(tree: Path, source: str, tokens: int, threads: int, max_time: float) -> dict[str, object]:
    """One invocation of the tree's own `ffn bench`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.csv")
        words = [
            *(sys.executable, "-m", "ffncli", "bench", source, "--tokens", str(tokens), "--threads", str(threads)),
            *("--kernel", "eager", "--cache", "warm", "--processes", "3", "--max-time", f"{max_time:g}s"),
            *("--precision", "0.05%", "--save", str(path), "--json", "-q"),
        ]
        variables = environment() | {"PYTHONPATH": str(tree)}
        done = subprocess.run(words, capture_output=True, text=True, cwd=tree, env=variables, check=False)
        rows, blocks = read(path), read(path.with_suffix(".rounds.csv"))
    if not rows:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr}")
    spent = {name: float(seconds) for name, seconds in json.loads(done.stdout)["spent"].items()}
    rounds = len({(b["process"], b["placement"], b["round"]) for b in blocks})
    low, high = (float(rows[0][name]) for name in ("aa_low", "aa_high"))
    return {
        "rounds": rounds, "round_s": (spent["blocks"] + spent["lead_in"]) / rounds,
        "calls_s": sum(float(b["seconds"]) for b in blocks) / rounds, "lead_in_s": spent["lead_in"] / rounds,
        "time_s": float(rows[0]["time_s"]), "aa_ratio": float(rows[0]["aa_ratio"]),
        "aa_half_width": log(high / low) / 2, "warnings": rows[0]["warnings"],
    }  # fmt: skip


def summary(rows: Rows) -> str:
    """A Markdown table: medians over repeats, the same inputs first."""
    lines = [
        "| block | tokens | threads | time per round: same inputs | other inputs | | A/A: same inputs | other inputs |",
        "| --- " * 8 + "|",
    ]
    for source, tokens, threads in dict.fromkeys((r["source"], r["tokens"], r["threads"]) for r in rows):
        same, other = (
            [r for r in rows if (r["source"], r["tokens"], r["threads"], r["inputs"]) == (source, tokens, threads, of)]
            for of in ("same", "other")
        )
        if same and other:
            times = [median(float(r["round_s"]) for r in side) for side in (same, other)]
            widths = [median(float(r["aa_half_width"]) for r in side) for side in (same, other)]
            cells = [source, tokens, threads, *(f"{1e3 * t:.2f} ms" for t in times), f"× {times[1] / times[0]:.2f}"]
            lines.append(f"| {' | '.join([*cells, *(f'±{100 * width:.2f} %' for width in widths)])} |")
    return "\n".join([*lines, "", f"Measured {about_line(rows, 'cpu', 'torch')}."]) if rows else ""


def main() -> int:
    """Measure what is missing, print the table."""
    words = argparse.ArgumentParser(description="The cost of other inputs at every call.")
    words.add_argument("--base", metavar="DIRECTORY", help="a checkout that enters the same inputs at every call")
    words.add_argument("--save", metavar="FILE", help="rows go there as they come; an interrupted run goes on")
    words.add_argument("--summary", metavar="FILE", help="measure nothing, print the table of FILE")
    words.add_argument("--repeats", type=int, default=3)
    words.add_argument("--max-time", type=float, default=6.0, help="seconds of an invocation")
    options = words.parse_args()
    if options.summary:
        print(summary(read(options.summary)))
        return 0
    if not options.base:
        words.error("give --base")
    kept = Kept(options.save, COLUMNS, machine("torch", "numpy"))
    trees = {"same": Path(options.base).resolve(), "other": ROOT}
    for repeat in range(options.repeats):
        for source, tokens in CASES:
            for threads in (1, 2):
                for inputs in ("same", "other") if repeat % 2 else ("other", "same"):
                    key = {"inputs": inputs, "source": source, "tokens": tokens, "threads": threads, "repeat": repeat}
                    if not kept.has(**key):
                        row = measured(trees[inputs], source, tokens, threads, options.max_time)
                        kept.add({"date": now(), **key, **row})
                        print(f"{os.fspath(trees[inputs])}: {key}", file=sys.stderr, flush=True)
    print(summary(kept.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
