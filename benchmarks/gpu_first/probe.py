"""A probe: a question, what measures it on the GPU, what answers it from the figures; `ffn bench` as probes run it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.script import ROOT, command, environment, read

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """`yes` None: the figure alone is the answer. `figure` is short enough for a line."""

    yes: bool | None
    figure: str

    @property
    def word(self) -> str:
        """As a line shows it."""
        return "figure" if self.yes is None else "yes" if self.yes else "no"


@dataclass(frozen=True)
class Probe:
    """`measure` runs on the GPU, in a process of its own; `judge` answers from its figures, anywhere.

    `look` is what to look at if the answer is not the expected one. `variables` are set in the probe's environment.
    """

    name: str
    finding: str
    question: str
    limit_s: int
    measure: Callable[[], Figures]
    judge: Callable[[Figures], Answer]
    expected: bool | None
    look: str
    variables: Mapping[str, str] = field(default_factory=dict)


def micro(seconds: float) -> str:
    """`12.3 µs`."""
    return f"{1e6 * seconds:.3g} µs"


def percent(share: float) -> str:
    """`+3.1 %`."""
    return f"{100 * share:+.1f} %"


# --- ffn bench --device cuda ---------------------------------------------------------------------------------------

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
