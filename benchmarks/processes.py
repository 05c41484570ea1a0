"""Running other programs, each by itself: wall seconds, CPU seconds and peak memory of every process."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Run:
    """One process: wall and CPU (user + system) seconds, peak resident bytes, exit code, what it wrote."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    code: int
    output: str
    errors: str


def run(command: Sequence[str]) -> Run:
    """Start `command`, wait for it alone, and read what the kernel counted for it (wait4).

    Both its outputs go to files: a reader of pipes would take turns with it on a small machine. The peak starts at what
    this process holds when it starts the other one, so whoever measures must hold little.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment())
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        output, errors = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    cpu = usage.ru_utime + usage.ru_stime
    return Run(wall, cpu, usage.ru_maxrss * unit, process.returncode, output, errors)


def environment() -> dict[str, str]:
    """The caller's, without what would change colours, widths or bytecode caches, and without any network."""
    drop = {
        "FORCE_COLOR",
        "CLICOLOR_FORCE",
        "PY_COLORS",
        "GITHUB_ACTIONS",
        "NO_COLOR",
        "COLUMNS",
        "LINES",
        "PYTHONDONTWRITEBYTECODE",
    }
    return {name: value for name, value in os.environ.items() if name not in drop} | {"HF_HUB_OFFLINE": "1"}


def ffn(*arguments: str) -> list[str]:
    """How `ffn` is started: the console script beside the interpreter, if it is installed."""
    script = Path(sys.executable).parent / "ffn"
    return [
        str(script) if script.exists() else sys.executable,
        *([] if script.exists() else ["-m", "ffncli"]),
        *arguments,
    ]


def interleaved(commands: Mapping[Name, Sequence[str]], rounds: int, warm_ups: int) -> dict[Name, list[Run]]:
    """Every command once a round, in random order, so that a machine that slows down slows all of them.

    The first `warm_ups` rounds fill the bytecode and file caches and do not count.
    """
    order = random.Random(0)
    runs: dict[Name, list[Run]] = {name: [] for name in commands}
    for at in range(warm_ups + rounds):
        for name in order.sample(list(commands), len(commands)):
            done = run(commands[name])
            if at >= warm_ups:
                runs[name].append(done)
    return runs


def ratio(runs: Sequence[Run], base: Sequence[Run], figure: str) -> float:
    """The median over rounds of a figure of one program over that of another in the same round."""
    return statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in zip(runs, base, strict=True))


def median(runs: Sequence[Run], figure: str) -> float:
    """The median of a figure over rounds."""
    return float(statistics.median(getattr(run, figure) for run in runs))
