"""Is a mixture faster if its experts are computed together? Compared with a loop and with transformers' own ways.

What: `ffn bench` of mixtures of 8, 32 and 128 experts, top 1, 2 and 8, on 1, 32 and 512 tokens, with even routing and
with routing in which few experts receive most tokens (zipf:1.2). Kernels: eager (the loop), grouped, batched, and
transformers' Qwen3-MoE with its experts as `eager`, `batched_mm` and `grouped_mm`. The ratio is a kernel's time divided
by eager's, with its interval.

Limits: one machine, one size of expert. Kernels that copy matrices for every token are left out above 64 rows (tokens
times top_k), because a call then takes seconds on a CPU. --max-time limits a case, in seconds, over all processes.

    python -m benchmarks.grouped [--save FILE] ...    # continues FILE
    python -m benchmarks.grouped --summary FILE
"""

import argparse
from itertools import groupby, product

from benchmarks import script
from benchmarks.script import Kept, Rows, about_line, benched, how, number, ratio_text, table

THEIRS = "benchmarks/transformers_experts.py"
KERNELS = {
    "eager": "eager", "grouped": "grouped", "batched": "batched", "hf-eager": f"hf-eager={THEIRS}:eager",
    "hf-batched_mm": f"hf-batched_mm={THEIRS}:batched_mm", "hf-grouped_mm": f"hf-grouped_mm={THEIRS}:grouped_mm",
}  # fmt: skip
MOST_ROWS = 64  # the most rows for which matrices are copied
CASE = ("source", "device", "dtype", "threads", "experts", "top_k", "routing", "tokens")
COLUMNS = (
    "date", *CASE, "kernel", "status", "verdict", "ratio", "low", "high", "time_s", "aa_low", "aa_high", "launch",
    "processes", "error_rel", "process_ratios", "warnings", "note",
)  # fmt: skip


def kernels(tokens: int, top_k: int) -> list[str]:
    """Return the labels of the kernels that are timed with this number of tokens."""
    return [name for name in KERNELS if "batched" not in name or tokens * top_k <= MOST_ROWS]


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Run `ffn bench` for each mixture and list of kernels, on the token counts and routings that have no row yet."""
    for dtype, experts, top_k in product(options.dtypes, options.experts, options.top_k):
        same = {"source": options.source, "device": options.device, "dtype": dtype, "threads": options.threads,
                "experts": experts, "top_k": top_k}  # fmt: skip
        for names, tokens in groupby(options.tokens, key=lambda n, k=top_k: kernels(n, k)):
            words = [options.source, "--experts", str(experts), "--top-k", str(top_k), "--dtype", dtype]
            words += ["--device", options.device, *(["--threads", str(options.threads)] if options.threads else [])]
            words += ["--kernel", ",".join(KERNELS[name] for name in names), "--baseline", "eager", *how(options)]
            cases = [{"tokens": n, "routing": routing} for n, routing in product(tokens, options.routing)]
            if not all(kept.has(**same, **case) for case in cases):
                grid = [f"--{name}={','.join(dict.fromkeys(str(case[name]) for case in cases))}" for name in cases[0]]
                kept.add_all(benched(COLUMNS, *words, *grid, **same))
        print(f"{dtype}, top {top_k} of {experts}: done", flush=True)


def summary(rows: Rows) -> str:
    """Return a table with a line for each case: eager's time and the other kernels' ratios."""
    others, lines = [name for name in KERNELS if name != "eager"], []
    cases = dict.fromkeys(tuple(row[name] for name in CASE) for row in rows)
    for case in sorted(cases, key=lambda c: (c[:4], int(c[4]), int(c[5]), c[6], int(c[7]))):
        of = {row["kernel"]: row for row in rows if tuple(row[name] for name in CASE) == case}
        eager = number(of["eager"], "time_s") if "eager" in of else None
        time = "" if eager is None else f"{eager * 1e6:.0f} µs"
        lines.append((*case[4:], case[2], time, *(ratio_text(of[name]) if name in of else "" for name in others)))
    head = ("experts", "top_k", "routing", "tokens", "dtype", "eager", *others)
    return "\n".join([table(head, lines), "", about_line(rows, "cpu", "torch", "transformers")]) if rows else ""


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch", "transformers"), COLUMNS, measure, summary, source="256x512:swiglu", device="cpu",
        threads=1, dtypes=("fp32", "bf16"), experts=(8, 32, 128), top_k=(1, 2, 8), routing=("uniform", "zipf:1.2"),
        tokens=(1, 32, 512), processes=5, max_time=8.0,
    )  # fmt: skip
