"""A track of the public suite, run twice: does any pair of kernels change its order?

What: `ffn bench --suite ffn-1` two times, one after the other, with the same kernels. For every case and every two
kernels of one error class it compares how their ranks order them: `same` order in both runs; `split`: one run tells
them apart and the other does not; `changed`: each run tells them apart, the other way round. Mark: no pair changed.

    python -m benchmarks.suite_twice [--save FILE] [--into DIRECTORY] [-- OPTIONS OF ffn bench]
    python -m benchmarks.suite_twice --of A.csv B.csv      # times nothing, of two results
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.benched import ROOT, command, environment
from benchmarks.common import machine
from benchmarks.kept import Kept
from benchmarks.results_table import Entry, ranked
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.results.row import ResultRow

COLUMNS = (
    "case",
    "error_class",
    "kernel",
    "other",
    "rank_first",
    "other_first",
    "rank_second",
    "other_second",
    "order",
)
Ranks = dict[tuple[str, str, str], int]  # (case, error class, kernel) → rank


def ranks_of(rows: Sequence[ResultRow]) -> Ranks:
    """The ranks of one run, of kernels that were timed."""
    cases: dict[str, list[Entry]] = {}
    for row in rows:
        if row.status == "ok" and row.ratio is not None:
            cases.setdefault(row.case, []).append(Entry(row, ""))
    return {
        (case, entry.error_class, entry.row.kernel): rank
        for case, entries in cases.items()
        for rank, entry in ranked(entries)
    }


def compared(first: Ranks, second: Ranks) -> Iterator[dict[str, object]]:
    """A row for every pair of kernels that both runs have in one case and class."""
    groups: dict[tuple[str, str], list[str]] = {}
    for case, error_class, kernel in first:
        if (case, error_class, kernel) in second:
            groups.setdefault((case, error_class), []).append(kernel)
    for (case, error_class), kernels in groups.items():
        for one, other in itertools.combinations(kernels, 2):
            places = [ranks[case, error_class, name] for ranks in (first, second) for name in (one, other)]
            row = (case, error_class, one, other, *places, order(*places))
            yield dict(zip(COLUMNS, row, strict=True))


def order(one_first: int, other_first: int, one_second: int, other_second: int) -> str:
    """`same`, `split` or `changed`."""
    before, after = ((a > b) - (a < b) for a, b in ((one_first, other_first), (one_second, other_second)))
    return "same" if before == after else "changed" if before * after < 0 else "split"


def measured(folder: Path, number: int, options: Sequence[str]) -> tuple[tuple[ResultRow, ...], float]:
    """(the rows of one run, its seconds). Raises SystemExit if it did not measure."""
    path, start = folder / f"run-{number}.csv", time.monotonic()
    words = [*command(), "bench", "--suite", "ffn-1", *options, "--save", str(path), "--force", "-q"]
    code = subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=False).returncode
    if not path.exists():
        raise SystemExit(f"ffn bench ended with exit code {code} and left no result")
    return read_rows(path), time.monotonic() - start


def summary(rows: Sequence[dict[str, object]], seconds: Sequence[float]) -> str:
    """The answer in a line or two."""
    counts = Counter(row["order"] for row in rows)
    text = (
        f"{len(rows)} pairs of kernels: {counts['same']} in the same order in both runs, {counts['split']} told apart "
    )
    text += f"in one of them only, {counts['changed']} changed"
    if seconds:
        text += f"\nseconds of a run: {', '.join(f'{one:.0f}' for one in seconds)} (mark: 600)"
    return text + "".join(
        f"\nchanged: {row['kernel']} and {row['other']} in {row['case']}" for row in rows if row["order"] == "changed"
    )


def main() -> int:
    """Measure twice, or read two results; exit 1 if a pair has changed."""
    words = argparse.ArgumentParser(description="The public suite twice.")
    words.add_argument("--save", metavar="FILE", help="a row for every pair")
    words.add_argument("--into", metavar="DIRECTORY", help="keep both results there")
    words.add_argument("--of", nargs=2, metavar="FILE.csv", help="measure nothing, compare two results")
    words.add_argument("options", nargs="*", metavar="OPTION", help="of ffn bench, after --")
    given = words.parse_args()
    seconds: list[float] = []
    if given.of:
        both = [read_rows(path) for path in given.of]
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(given.into or scratch)
            folder.mkdir(parents=True, exist_ok=True)
            runs = [measured(folder, number, given.options) for number in (1, 2)]
        both, seconds = [rows for rows, _ in runs], [took for _, took in runs]
    rows = list(compared(*map(ranks_of, both)))
    Kept(given.save, COLUMNS, machine("ffncli", "torch", "numpy")).add_all(rows)
    print(summary(rows, seconds))
    return int(any(row["order"] == "changed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
