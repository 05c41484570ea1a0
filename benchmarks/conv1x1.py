"""Is the block faster as two 1x1 convolutions than as matrix products? One of the example texts says that it can be.

What: `ffn bench` of that text's block, 512 -> 2048 -> 512 with ReLU and biases, kernels eager and conv1x1, on 1, 32 and
512 tokens, with 1 and 2 threads, in float32 and bfloat16. The ratio is conv1x1's time divided by eager's.

Limits: one machine. The input is [tokens, d_model] for both; the convolution reads it as (1, d_model, tokens).
--max-time is the time for a case, in seconds.

    python -m benchmarks.conv1x1 [--save FILE] ...    # continues FILE
    python -m benchmarks.conv1x1 --summary FILE

`make claims` quotes benchmarks/results/conv1x1.csv.
"""

import argparse
from itertools import product

from benchmarks import script
from benchmarks.script import Kept, Row, Rows, about_line, benched, how, ratio_text, table

RESULTS = script.RESULTS / "conv1x1.csv"
COLUMNS = (
    "date", "source", "tokens", "threads", "dtype", "status", "verdict", "ratio", "low", "high", "conv_s", "eager_s",
    "aa_low", "aa_high", "processes", "error_rel", "baseline_error_rel", "page_faults_per_call", "wall_s", "warnings",
    "note",
)  # fmt: skip


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Run `ffn bench` for each dtype and number of threads that has no row yet."""
    for dtype, threads in product(options.dtypes, options.threads):
        same = {"source": options.source, "dtype": dtype, "threads": threads}
        if not all(kept.has(**same, tokens=tokens) for tokens in options.tokens):
            tokens = ",".join(map(str, options.tokens))
            rows = benched(
                (*COLUMNS, "kernel", "time_s"), options.source, "--tokens", tokens, "--threads", str(threads),
                "--dtype", dtype, "--cache", "warm", "--kernel", "eager,conv1x1", "--baseline", "eager", *how(options),
                **same,
            )  # fmt: skip
            eager = {row["tokens"]: row["time_s"] for row in rows if row["kernel"] == "eager"}
            kept.add_all(
                row | {"conv_s": row["time_s"], "eager_s": eager[row["tokens"]]}
                for row in rows
                if row["kernel"] == "conv1x1"
            )
            print(f"{dtype}, {threads} threads: done", flush=True)


def sentence(rows: Rows) -> str:
    """Return the answer in one line: the smallest and largest ratio per dtype and thread count; "" without rows."""
    known = sorted((row for row in rows if row["ratio"]), key=lambda row: float(row["ratio"]))
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows if row["ratio"]):
        for threads in sorted({int(row["threads"]) for row in known if row["dtype"] == dtype}):
            mine = [row for row in known if (row["dtype"], row["threads"]) == (dtype, str(threads))]
            ends = dict.fromkeys(f"{ratio_text(row)} at {_tokens(row)}" for row in (mine[0], mine[-1]))
            parts.append(f"{dtype}, {threads} thread{'s' * (threads != 1)}: {' … '.join(ends)}")
    if not parts:
        return ""
    counts = {verdict: sum(row["verdict"] == verdict for row in known) for verdict in _VERDICTS}
    words = ", ".join(f"{verdict} in {count}" for verdict, count in counts.items() if count)
    on = f"time of the convolutions divided by the time of the matrix products, {about_line(known, 'cpu', 'torch')}"
    return f"{on}: {'; '.join(parts)}; {words}"


_VERDICTS = ("faster", "slower", "same", "inconclusive")


def _tokens(row: Row) -> str:
    return f"{row['tokens']} token{'s' * (row['tokens'] != '1')}"


def summary(rows: Rows) -> str:
    """Return a table with every case, and the sentence."""
    names = ("source", "tokens", "dtype", "threads")
    ordered = sorted(rows, key=lambda r: (r["source"], r["dtype"], int(r["threads"]), int(r["tokens"])))
    lines = [(*(row[name] for name in names), ratio_text(row), row["verdict"]) for row in ordered]
    text, answer = table(("block", *names[1:], "conv1x1 / eager", "verdict"), lines), sentence(rows)
    return text + (f"\n\n{answer[0].upper()}{answer[1:]}." if answer else "")


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch", "numpy"), COLUMNS, measure, summary, source="512x2048:relu", tokens=(1, 32, 512),
        threads=(1, 2), dtypes=("fp32", "bf16"), processes=5, max_time=6.0, precision="1%",
    )  # fmt: skip
