"""Which built-in kernels does the referee certify, how precise are they, and which are batch-invariant?

What: `ffn verify --referee` of every built-in kernel, in fp32 and bf16, on 1 and 2 threads.

- `batch_invariant`: a token's output has the same bits alone and in every batch that is tried
- `other_bits`: the largest difference from the same token's output in the largest batch, divided by the largest output

Limits: one machine, one block. The bits depend on the libraries and on the processor's instructions.

    python -m benchmarks.certificates [--save FILE]    # continues FILE
"""

import argparse
from itertools import product

import ffncli
from benchmarks import script
from benchmarks.script import Kept, Row, Rows, table
from ffncli.kernels import BUILT_IN

SOURCE = "512x2048:swiglu"
COLUMNS = (
    "source", "kernel", "dtype", "threads", "verdict", "error_class", "error_rel", "batch_invariant", "other_bits",
    "reason", "seed",
)  # fmt: skip


def measure(kept: Kept, _: argparse.Namespace) -> None:
    """Make a certificate for each kernel, dtype and number of threads that has no row yet."""
    for kernel, dtype, threads in product(BUILT_IN, ("fp32", "bf16"), (1, 2)):
        case = {"source": SOURCE, "kernel": kernel, "dtype": dtype, "threads": threads}
        if kept.has(**case):
            continue
        try:
            verdict = ffncli.verify(SOURCE, kernel=kernel, referee=True, dtype=dtype, threads=threads, call_time=300.0)
        except ffncli.FFNError as error:  # it does not compute this dtype
            kept.add(case | {"verdict": "not applicable", "reason": error.message})
            continue
        certificate = verdict.certificate
        assert certificate is not None
        names = ("verdict", "error_class", "error_rel", "batch_invariant", "reason", "seed")
        apart = [row.relative_error or 0.0 for row in verdict.rows if row.check == "batch"]
        figures = {name: getattr(certificate, name) for name in names}
        kept.add(case | figures | {"other_bits": max(apart, default=None)})


def summary(rows: Rows) -> str:
    """Return a table with a line for each kernel and dtype, which combines all numbers of threads."""
    lines = []
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in rows):
        mine = sorted((r for r in rows if (r["kernel"], r["dtype"]) == (kernel, dtype)), key=lambda r: r["threads"])
        verdicts = " / ".join(dict.fromkeys(row["verdict"] for row in mine))
        if any(row["verdict"] != "certified" for row in mine):
            verdicts += f": {mine[0]['reason']}"
        classes = " / ".join(dict.fromkeys(row["error_class"] for row in mine))
        lines.append((f"`{kernel}`", dtype, verdicts, classes, _invariant(mine)))
    return table(("kernel", "dtype", "verdict", "precision", "batch-invariant"), lines)


def _invariant(rows: Rows) -> str:
    """Return `yes` or text such as `no (4.1e-07)`, for each number of threads if they differ."""

    def text(row: Row) -> str:
        if not row["batch_invariant"]:
            return ""
        return "yes" if row["batch_invariant"] == "true" else f"no ({float(row['other_bits']):.1e})"

    if len({text(row).partition(" ")[0] for row in rows}) == 1:
        return text(max(rows, key=lambda row: float(row["other_bits"] or 0)))
    return ", ".join(f"{row['threads']} thread{'s' * (row['threads'] != '1')}: {text(row)}" for row in rows)


if __name__ == "__main__":
    script.main(
        __doc__, ("torch", "numpy"), COLUMNS, measure,
        lambda rows: (summary(rows), all(row["verdict"] != "refused" for row in rows)),
    )  # fmt: skip
