"""`ffn bench` as its users run it: a command line, an exit code, and the CSV that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kept import read

ROOT = Path(__file__).parent.parent
# User kernels whose true ratio is known, and arms that disturb others.
KNOWN = "benchmarks/known.py"
# What a run of `ffn bench` costs before it measures, in seconds per worker process; for estimates only.
START_S = 4.0


@dataclass(frozen=True)
class Answer:
    """One invocation: its exit code, rows of the CSV and of the rounds file, the JSON object, wall seconds, stderr."""

    code: int
    rows: tuple[Mapping[str, str], ...]
    blocks: tuple[Mapping[str, str], ...]
    json: Mapping[str, object]
    wall_s: float
    errors: str
    command: str = ""

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of all workers together by what they were spent on; empty where nothing is said."""
        found = self.json.get("spent")
        return {str(k): float(v) for k, v in found.items()} if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Asked:
    """The options of an invocation that the scripts share."""

    processes: int = 5
    max_time: float = 3.0
    precision: str = "1%"
    seed: int = 0
    more: tuple[str, ...] = field(default=())

    def options(self) -> list[str]:
        """As they are typed."""
        return [
            *("--processes", str(self.processes), "--max-time", f"{self.max_time:g}s"),
            *("--precision", self.precision, "--seed", str(self.seed), *self.more),
        ]


def command(*arguments: str) -> list[str]:
    """How `ffn` is started here: this interpreter, this working tree."""
    return [sys.executable, "-m", "ffncli", *arguments]


def bench(*arguments: str) -> Answer:
    """Run `ffn bench` in a process of its own. Stops the script where it says 2 (bad input)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.csv")
        words = command("bench", *arguments, "--save", str(path), "--json", "-q")
        start = time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)
        wall = time.perf_counter() - start
        rows, blocks = read(path), read(path.with_suffix(".rounds.csv"))
    if done.returncode in (2, 130) or not rows:
        raise SystemExit(f"ffn bench {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
    try:
        said = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = {}
    return Answer(done.returncode, tuple(rows), tuple(blocks), said, wall, done.stderr, " ".join(arguments))


def environment() -> dict[str, str]:
    """The caller's, with this working tree, without what changes colours or reaches a network."""
    drop = ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def number(row: Mapping[str, str], name: str) -> float | None:
    """A figure of a row; None where the cell is empty."""
    return float(row[name]) if row.get(name) else None


def marks(found: Sequence[tuple[str, str, str, bool | None]]) -> str:
    """(what, figure, mark, whether it is reached; None: no data) as a Markdown table; "" is no mark, only a figure."""
    said = {True: "reached", False: "**missed**", None: "no data"}
    lines = [
        f"| {what} | {figure} | {mark} | {'' if reached and not mark else said[reached]} |"
        for what, figure, mark, reached in found
    ]
    return "\n".join(["| what | measured | mark | |", "| --- | --- | --- | --- |", *lines])


def about_line(rows: Sequence[Mapping[str, str]], *names: str) -> str:
    """`2026-11-22, cpu ..., torch ...`: when and on what rows were measured."""
    days = sorted({row["date"][:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    versions = [f"{name} {', '.join(sorted({row[name] for row in rows}))}" for name in names if name != "cpu"]
    return "; ".join([when, ", ".join(sorted({row["cpu"] for row in rows})), *versions])
