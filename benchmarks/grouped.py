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

from benchmarks.benched import about_line, number
from benchmarks.common import machine
from benchmarks.conv1x1 import ratio
from benchmarks.kept import Kept, read
from benchmarks.kernel_map import bench_cases
from benchmarks.timers import now
from ffncli.bench.records import Case, Method
from ffncli.bench.request.grid import cached
from ffncli.block.recipe import FFNSpec, MoE

RESULTS = Path(__file__).parent / "results" / "grouped.csv"
THEIRS = "benchmarks/transformers_experts.py"
KERNELS = {
    "eager": "eager", "grouped": "grouped", "batched": "batched", "hf-eager": f"hf-eager={THEIRS}:eager",
    "hf-batched_mm": f"hf-batched_mm={THEIRS}:batched_mm", "hf-grouped_mm": f"hf-grouped_mm={THEIRS}:grouped_mm",
}  # fmt: skip
MOST_ROWS = 64  # for which matrices are copied
GROUP = 9  # cases that share their workers
CASE = ("source", "device", "dtype", "threads", "experts", "top_k", "routing", "tokens")
COLUMNS = (
    "date", *CASE, "kernel", "status", "verdict", "ratio", "low", "high", "time_s", "aa_low", "aa_high", "launch",
    "processes", "error_rel", "process_ratios", "warnings", "note",
)  # fmt: skip
TAKEN = (
    "case", "kernel", "status", "verdict", "ratio", "ratio_low", "ratio_high", "time_s", "aa_low", "aa_high", "launch",
    "processes", "error_rel", "process_ratios", "warnings", "note",
)  # fmt: skip
Rows = Sequence[Mapping[str, str]]


def kernels(tokens: int, top_k: int) -> list[str]:
    """The labels of the kernels that are timed on so many tokens."""
    return [name for name in KERNELS if "batched" not in name or tokens * top_k <= MOST_ROWS]


def block(asked: Mapping[str, str]) -> Case:
    """A case as `ffn bench` has it."""
    label = f"{asked['source']}:top {asked['top_k']} of {asked['experts']}"
    mixture = MoE(int(asked["experts"]), int(asked["top_k"]))
    sizes, activation = asked["source"].split(":")
    d_model, d_ff = map(int, sizes.split("x"))
    spec, tokens = FFNSpec(d_model, d_ff, activation, moe=mixture), int(asked["tokens"])
    return Case(
        label, label, spec, tokens, asked["dtype"], cache=cached("auto", tokens), device=asked["device"],
        threads=int(asked["threads"] or 1), routing=asked["routing"],
    )  # fmt: skip


def alike(cases: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """Cases that the same workers can measure with the same kernels, a few in each group."""
    kinds: dict[tuple[str, int], list[Mapping[str, str]]] = {}
    for case in cases:
        kinds.setdefault((case["dtype"], len(kernels(int(case["tokens"]), int(case["top_k"])))), []).append(case)
    return [every[n : n + GROUP] for every in kinds.values() for n in range(0, len(every), GROUP)]


def measured(group: Sequence[Mapping[str, str]], method: Method) -> list[dict[str, object]]:
    """A row for each case and kernel, eager's first, from one run."""
    cases = {block(asked).key: asked for asked in group}
    chosen = [KERNELS[name] for name in kernels(int(group[0]["tokens"]), int(group[0]["top_k"]))]
    rows = bench_cases([block(asked) for asked in group], chosen, method, TAKEN)
    renamed = {"ratio_low": "low", "ratio_high": "high"}
    return [
        {**{renamed.get(name, name): value for name, value in row.items()}, **cases[str(row["case"])], "date": now()}
        for row in rows
    ]


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
    words.add_argument("--max-time", type=float, default=8.0, help="seconds of a case, over all processes")
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
    groups = alike([case for case in todo if not kept.has(**case)])
    for done, group in enumerate(groups, 1):
        kept.add_all(measured(group, Method(processes=options.processes, max_time=options.max_time)))
        print(f"{done} of {len(groups)} groups done", flush=True)
    print(summary(kept.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
