"""Is the block faster as two 1x1 convolutions than as matrix products? A text says that it can be.

What: `ffn bench` of the text's block, 512 -> 2048 -> 512 with ReLU and biases, kernels eager and conv1x1, on 1, 32 and
512 tokens, with 1 and 2 threads, in float32 and bfloat16. The ratio is conv1x1's time over eager's, with its interval.

Limits: one machine. The input is [tokens, d_model] for both; the convolution reads it as (1, d_model, tokens).

    python -m benchmarks.conv1x1 [--save FILE] ...    # continues FILE
    python -m benchmarks.conv1x1 --summary FILE

`make claims` quotes benchmarks/results/conv1x1.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.benched import START_S, Asked, about_line, bench, number
from benchmarks.common import machine
from benchmarks.kept import Kept, read
from benchmarks.timers import now

RESULTS = Path(__file__).parent / "results" / "conv1x1.csv"
COLUMNS = (
    "date", "source", "tokens", "threads", "dtype", "status", "verdict", "ratio", "low", "high", "conv_s", "eager_s",
    "aa_low", "aa_high", "processes", "error_rel", "baseline_error_rel", "page_faults_per_call", "wall_s", "warnings",
    "note",
)  # fmt: skip
Rows = Sequence[Mapping[str, str]]


def measured(source: str, tokens: str, threads: int, dtype: str, asked: Asked) -> list[dict[str, object]]:
    """A row for each number of tokens, from one invocation."""
    answer = bench(
        source, "--tokens", tokens, "--threads", str(threads), "--dtype", dtype, "--cache", "warm",
        "--kernel", "eager,conv1x1", "--baseline", "eager", *asked.options(),
    )  # fmt: skip
    eager = {row["case"]: row for row in answer.rows if row["kernel"] == "eager"}
    same = ("tokens", "status", "verdict", "processes", "warnings", "note")
    figures = ("ratio", "aa_low", "aa_high", "error_rel", "baseline_error_rel", "page_faults_per_call")
    return [
        {
            **{name: row[name] for name in same}, **{name: number(row, name) for name in figures},
            "date": now(), "source": source, "threads": threads, "dtype": dtype, "low": number(row, "ratio_low"),
            "high": number(row, "ratio_high"), "conv_s": number(row, "time_s"),
            "eager_s": number(eager[row["case"]], "time_s"), "wall_s": answer.wall_s,
        }
        for row in answer.rows if row["kernel"] == "conv1x1"
    ]  # fmt: skip


def ratio(row: Mapping[str, str]) -> str:
    """`0.953 (0.947 to 0.960)`."""
    value, low, high = (number(row, name) for name in ("ratio", "low", "high"))
    if value is None:
        return row["status"]
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def sentence(rows: Rows) -> str:
    """The answer in one line: for each dtype and number of threads the least and the largest ratio; "" without rows."""
    known = [row for row in rows if row["ratio"]]
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in known):
        for threads in sorted({int(row["threads"]) for row in known if row["dtype"] == dtype}):
            mine = [row for row in known if (row["dtype"], row["threads"]) == (dtype, str(threads))]
            mine.sort(key=lambda row: float(row["ratio"]))
            ends = dict.fromkeys(f"{ratio(row)} at {_tokens(row)}" for row in (mine[0], mine[-1]))
            parts.append(f"{dtype}, {threads} thread{'s' * (threads != 1)}: {' … '.join(ends)}")
    if not parts:
        return ""
    counts = ", ".join(
        f"{verdict} in {sum(row['verdict'] == verdict for row in known)}"
        for verdict in ("faster", "slower", "same", "inconclusive")
        if any(row["verdict"] == verdict for row in known)
    )
    return f"time over that of matrix products, {about_line(known, 'cpu', 'torch')}: {'; '.join(parts)}; {counts}"


def _tokens(row: Mapping[str, str]) -> str:
    return f"{row['tokens']} token{'s' * (row['tokens'] != '1')}"


def summary(rows: Rows) -> str:
    """A Markdown table with every case, and the sentence."""
    lines = ["| block | tokens | dtype | threads | conv1x1 / eager | verdict |", "| --- " * 6 + "|"]
    for row in sorted(rows, key=lambda r: (r["source"], r["dtype"], int(r["threads"]), int(r["tokens"]))):
        cells = (row["source"], row["tokens"], row["dtype"], row["threads"], ratio(row), row["verdict"])
        lines.append(f"| {' | '.join(cells)} |")
    said = sentence(rows)
    return "\n".join(lines) + (f"\n\n{said[0].upper()}{said[1:]}." if said else "")


def main() -> int:
    """Measure what is missing, print the answer."""
    words = argparse.ArgumentParser(description="1x1 convolutions beside matrix products.")
    words.add_argument("--save", metavar="FILE", help="rows go there as they come; an interrupted run goes on")
    words.add_argument("--summary", metavar="FILE", help="measure nothing, print the figures of FILE")
    words.add_argument("--source", default="512x2048:relu")
    words.add_argument("--tokens", default="1,32,512")
    words.add_argument("--threads", default="1,2")
    words.add_argument("--dtypes", default="fp32,bf16")
    words.add_argument("--processes", type=int, default=5)
    words.add_argument("--max-time", type=float, default=6.0, help="seconds of a case")
    words.add_argument("--precision", default="1%")
    options = words.parse_args()
    if options.summary:
        print(summary(read(options.summary)))
        return 0
    kept = Kept(options.save, COLUMNS, machine("ffncli", "torch", "numpy"))
    todo = [(int(threads), dtype) for dtype in options.dtypes.split(",") for threads in options.threads.split(",")]
    each = options.processes * START_S + len(options.tokens.split(",")) * options.max_time * 1.5
    print(f"about {len(todo) * each / 60:.0f} minutes in all", flush=True)
    for threads, dtype in todo:
        if all(
            kept.has(source=options.source, tokens=t, threads=threads, dtype=dtype) for t in options.tokens.split(",")
        ):
            continue
        asked = Asked(options.processes, options.max_time, options.precision)
        kept.add_all(measured(options.source, options.tokens, threads, dtype, asked))
        print(f"{dtype}, {threads} threads: done", flush=True)
    print(summary(kept.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
