"""`ffn bench --device cuda` as a probe runs it: exit code, seconds and rows, whatever became of the run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.benched import ROOT, command, environment
from benchmarks.gpu_first.probe import Figures
from benchmarks.kept import read

KERNELS = "benchmarks/gpu_first/faulty.py"
_COLUMNS = (
    "case", "kernel", "tokens", "cache", "status", "verdict", "time_s", "ratio", "ratio_low", "ratio_high", "aa_low",
    "aa_high", "roof_fraction", "peak_memory_bytes", "launch", "warnings", "note",
)  # fmt: skip


def bench(*words: str) -> dict[str, Any]:
    """`code`, `wall_s`, `rows` with the columns that judges read, `spent`; what it printed goes to this probe's log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.csv")
        line = command("bench", *words, "--device", "cuda", "--save", str(path), "--json", "-q")
        print("$", " ".join(line), flush=True)
        began = time.perf_counter()
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), check=False)
        wall = time.perf_counter() - began
        rows = [{name: row.get(name, "") for name in _COLUMNS} for row in read(path)]
    for row in rows:
        print(row, file=sys.stderr)
    try:
        spent = json.loads(done.stdout).get("spent", {})
    except (ValueError, AttributeError):
        spent = {}
    return {"code": done.returncode, "wall_s": wall, "rows": rows, "spent": spent}


def rows_of(figures: Figures, kernel: str) -> list[dict[str, str]]:
    """The rows of one kernel."""
    return [row for row in figures["rows"] if row["kernel"] == kernel]


def statuses(rows: Sequence[dict[str, str]]) -> str:
    """`eager ok, bad wrong (its note)`, or that there are no rows."""
    texts = dict.fromkeys(
        f"{r['kernel']} {r['status']}" + (f" ({r['note'][:60]})" if r["status"] != "ok" and r["note"] else "")
        for r in rows
    )
    return ", ".join(texts) or "no rows"
