"""Which built-in kernels does the referee certify, how precise are they, and which are batch-invariant?

What: `ffn verify --referee` of every built-in kernel, in fp32 and bf16, on 1 and 2 threads.

- `batch_invariant`: a token's bits are the same alone and in every batch that is tried
- `other_bits`: the largest difference to the same token in the largest batch, over the largest output

Limits: one machine, one block. Bits depend on the libraries and on the processor's instructions.

    python -m benchmarks.certificates [--save FILE]    # continues FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import ffncli
from benchmarks.common import machine
from benchmarks.kept import Kept
from ffncli.kernels import BUILT_IN
from ffncli.run.verify.verify import Verdict

RESULTS = Path(__file__).parent / "results" / "certificates.csv"
SOURCE = "512x2048:swiglu"
COLUMNS = (
    "source", "kernel", "dtype", "threads", "verdict", "error_class", "error_rel", "batch_invariant", "other_bits",
    "reason", "seed",
)  # fmt: skip
Rows = Sequence[Mapping[str, str]]


def measured(kernel: str, dtype: str, threads: int) -> dict[str, object]:
    """The row of one certificate."""
    asked = {"source": SOURCE, "kernel": kernel, "dtype": dtype, "threads": threads}
    try:
        verdict = ffncli.verify(SOURCE, kernel=kernel, referee=True, dtype=dtype, threads=threads, call_time=300.0)
    except ffncli.FFNError as error:  # it does not compute this dtype
        return asked | {"verdict": "not for it", "reason": error.message}
    return asked | cells(verdict)


def cells(verdict: Verdict) -> dict[str, object]:
    """What a row says of a verdict."""
    certificate = verdict.certificate
    assert certificate is not None
    names = ("verdict", "error_class", "error_rel", "batch_invariant", "reason", "seed")
    apart = [row.relative_error or 0.0 for row in verdict.rows if row.check == "batch"]
    return {name: getattr(certificate, name) for name in names} | {"other_bits": max(apart, default=None)}


def summary(rows: Rows) -> str:
    """A table: a line per kernel and dtype, the numbers of threads together."""
    lines = ["| kernel | dtype | verdict | precision | batch-invariant |", "| --- | --- | --- | --- | --- |"]
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in rows):
        mine = sorted((r for r in rows if (r["kernel"], r["dtype"]) == (kernel, dtype)), key=lambda r: r["threads"])
        verdicts = " / ".join(dict.fromkeys(row["verdict"] for row in mine))
        if any(row["verdict"] != "certified" for row in mine):
            verdicts += f": {mine[0]['reason']}"
        classes = " / ".join(dict.fromkeys(row["error_class"] for row in mine))
        lines.append(f"| `{kernel}` | {dtype} | {verdicts} | {classes} | {_invariant(mine)} |")
    return "\n".join(lines)


def _invariant(rows: Rows) -> str:
    """`yes`, `no (4.1e-07)`; by number of threads where these differ."""
    texts = {row["threads"]: _of_row(row) for row in rows}
    plain = {text.partition(" ")[0] for text in texts.values()}
    if len(plain) == 1:
        return _of_row(max(rows, key=lambda row: float(row["other_bits"] or 0)))
    return ", ".join(f"{threads} thread{'s' * (threads != '1')}: {text}" for threads, text in texts.items())


def _of_row(row: Mapping[str, str]) -> str:
    if not row["batch_invariant"]:
        return ""
    return "yes" if row["batch_invariant"] == "true" else f"no ({float(row['other_bits']):.1e})"


def main() -> int:
    """Measure what FILE does not have yet; print the table."""
    options = argparse.ArgumentParser(description="The certificates of the built-in kernels.")
    options.add_argument("--save", metavar="FILE")
    kept = Kept(options.parse_args().save, COLUMNS, machine("torch", "numpy"))
    for kernel, dtype, threads in product(BUILT_IN, ("fp32", "bf16"), (1, 2)):
        if not any((r["kernel"], r["dtype"], r["threads"]) == (kernel, dtype, str(threads)) for r in kept.rows):
            kept.add(measured(kernel, dtype, threads))
    print(summary(kept.rows))
    return int(any(row["verdict"] == "refused" for row in kept.rows))


if __name__ == "__main__":
    sys.exit(main())
