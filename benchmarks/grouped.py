"""Is a mixture faster when its experts are computed together? Against the loop, and against transformers' own ways.

What: `ffn bench` of mixtures of 8, 32 and 128 experts, top 1, 2 and 8, on 1, 32 and 512 tokens, with even routing and
one in which few experts get most tokens (zipf:1.2). Kernels: eager (the loop), grouped, batched, and transformers'
Qwen3-MoE with its experts as `eager`, `batched_mm` and `grouped_mm`. The ratio is a kernel's time over eager's, with
its interval.

Limits: one machine, one size of expert. Kernels that copy matrices for every token are left out beyond 64 rows (tokens
times top_k), where one call takes seconds on a CPU.

    python -m benchmarks.grouped [--save FILE] ...    # continues FILE
    python -m benchmarks.grouped --summary FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from benchmarks.benched import START_S, Asked, about_line, bench, number
from benchmarks.common import machine
from benchmarks.conv1x1 import ratio
from benchmarks.kept import Kept, read
from benchmarks.timers import now

RESULTS = Path(__file__).parent / "results" / "grouped.csv"
THEIRS = "benchmarks/transformers_experts.py"
KERNELS = {
    "eager": "eager", "grouped": "grouped", "batched": "batched", "hf-eager": f"hf-eager={THEIRS}:eager",
    "hf-batched_mm": f"hf-batched_mm={THEIRS}:batched_mm", "hf-grouped_mm": f"hf-grouped_mm={THEIRS}:grouped_mm",
}  # fmt: skip
MOST_ROWS = 64  # for which matrices are copied
IMPORT_S = 10.0  # of transformers, in each process
CASE = ("source", "device", "dtype", "threads", "experts", "top_k", "routing", "tokens")
COLUMNS = (
    "date", *CASE, "kernel", "status", "verdict", "ratio", "low", "high", "time_s", "aa_low", "aa_high", "launch",
    "processes", "error_rel", "wall_s", "warnings", "note",
)  # fmt: skip
Rows = Sequence[Mapping[str, str]]


def kernels(tokens: int, top_k: int) -> list[str]:
    """The labels of the kernels that are timed on so many tokens."""
    return [name for name in KERNELS if "batched" not in name or tokens * top_k <= MOST_ROWS]


def measured(case: Mapping[str, str], asked: Asked) -> list[dict[str, object]]:
    """A row for each kernel, eager's first, from one invocation."""
    words = [f"--{name.replace('_', '-')}={case[name]}" for name in CASE[1:] if case[name]]
    chosen = [KERNELS[name] for name in kernels(int(case["tokens"]), int(case["top_k"]))]
    answer = bench(case["source"], *words, "--kernel", ",".join(chosen), "--baseline", "eager", *asked.options())
    same = ("kernel", "status", "verdict", "processes", "launch", "warnings", "note")
    figures = ("ratio", "aa_low", "aa_high", "error_rel", "time_s")
    return [
        {
            **case, **{name: row[name] for name in same}, **{name: number(row, name) for name in figures},
            "date": now(), "low": number(row, "ratio_low"), "high": number(row, "ratio_high"), "wall_s": answer.wall_s,
        }
        for row in answer.rows
    ]  # fmt: skip


def summary(rows: Rows) -> str:
    """A Markdown table: a line for each case, eager's time, the others' ratios."""
    others = [name for name in KERNELS if name != "eager"]
    lines = [f"| experts | top_k | routing | tokens | dtype | eager | {' | '.join(others)} |"]
    lines.append("| --- " * (6 + len(others)) + "|")
    cases = dict.fromkeys(tuple(row[name] for name in CASE) for row in rows)
    for case in sorted(cases, key=lambda c: (c[:4], int(c[4]), int(c[5]), c[6], int(c[7]))):
        of = {row["kernel"]: row for row in rows if tuple(row[name] for name in CASE) == case}
        eager = number(of["eager"], "time_s") if "eager" in of else None
        cells = [*case[4:], case[2], "" if eager is None else f"{eager * 1e6:.0f} µs"]
        lines.append(f"| {' | '.join([*cells, *(ratio(of[name]) if name in of else '' for name in others)])} |")
    return "\n".join([*lines, "", about_line(rows, "cpu", "torch", "transformers")]) if rows else ""


def main() -> int:
    """Measure what is missing, print the table."""
    words = argparse.ArgumentParser(description="Mixtures whose experts are computed together.")
    words.add_argument("--save", metavar="FILE", help="rows go there as they come; an interrupted run goes on")
    words.add_argument("--summary", metavar="FILE", help="measure nothing, print the figures of FILE")
    words.add_argument("--source", default="256x512:swiglu")
    words.add_argument("--device", default="cpu")
    words.add_argument("--threads", default="1", help="on a GPU leave it")
    for name, default in (
        ("dtypes", "fp32,bf16"), ("experts", "8,32,128"), ("top-k", "1,2,8"), ("routing", "uniform,zipf:1.2"),
        ("tokens", "1,32,512"),
    ):  # fmt: skip
        words.add_argument(f"--{name}", default=default)
    words.add_argument("--processes", type=int, default=5)
    words.add_argument("--max-time", type=float, default=10.0, help="seconds of a case")
    words.add_argument("--precision", default="2%")
    options = words.parse_args()
    if options.summary:
        print(summary(read(options.summary)))
        return 0
    kept = Kept(options.save, COLUMNS, machine("ffncli", "torch", "transformers"))
    lists = (options.dtypes, options.experts, options.top_k, options.routing, options.tokens)
    todo = [
        dict(zip(CASE, (options.source, options.device, dtype, options.threads, e, k, routing, n), strict=True))
        for dtype, e, k, routing, n in product(*(text.split(",") for text in lists))
    ]
    todo = [case for case in todo if not any(all(row[n] == case[n] for n in CASE) for row in kept.rows)]
    each = options.processes * (START_S + IMPORT_S) + options.max_time * 1.5
    print(f"{len(todo)} cases, about {len(todo) * each / 60:.0f} minutes in all", flush=True)
    for case in todo:
        kept.add_all(measured(case, Asked(options.processes, options.max_time, options.precision)))
        print(", ".join(f"{name} {case[name]}" for name in CASE[2:]), "done", flush=True)
    print(summary(kept.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
