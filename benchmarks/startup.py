"""How long `ffn` takes to start, against the smallest program that Typer and rich allow.

What: the wall time from starting a process to its end, for commands that need no tensor (`COMMANDS` below), and for
completion on Tab (`TABS`). The yardstick is a program of one Typer command that prints a rich table, written to a
temporary directory and run by the same interpreter. A ratio of 1 means that `ffn` takes as long as its two libraries
need for that.

How: every round runs every command once, in random order, and divides its time by that of the round's yardstick run, so
that a machine that slows down slows both. The ratio is the median over rounds, with the order-statistic (sign) interval
that holds the true median with at least 95 %. Three rounds before that are thrown away: they fill the bytecode and file
caches. All of it happens twice, with stdout as a pipe and under a pseudo-terminal, where `ffn` loads rich.

Limits: warm caches only; the first start after an installation takes longer. The yardstick moves with Typer and rich,
whose versions are printed. `bare again` is the yardstick against itself: what it differs from 1 is noise.

    python -m benchmarks.startup [--rounds N] [--save FILE]

The exit code is 1 where a median ratio is above its limit.
"""

from __future__ import annotations

import argparse
import math
import os
import pty
import random
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common import BARE, machine, save
from benchmarks.processes import environment

AGAIN = "bare again"
COMMANDS: dict[str, float | None] = {  # arguments → the most that its ratio may be
    "-h": 1.35,
    "--help": 1.35,
    "--version": 1.35,
    "params llama-2-7b": 1.35,
    "plan llama-2-7b": 1.35,
    "activations": 1.35,
    "activations --all": None,
    "models": None,
    "params --help": 1.6,
    "trace --help": 1.6,
    "plan --help": 1.6,
    "activations --help": 1.6,
    "approximate --help": 1.6,
    "verify --help": 1.6,
    "bench --help": 1.6,
    "compare --help": 1.6,
    "doctor --help": 1.6,
    "trace -h": 1.6,
    "params -h": 1.6,
    "bench -h": 1.6,
}
TABS: dict[str, float] = {  # what stands before the cursor when Tab is pressed → the same; a shell reads it in a pipe
    "ffn tr": 1.35,
    "ffn trace gp": 1.35,
    "ffn trace --d": 1.35,
    "ffn activations ge": 1.35,
    "ffn bench -k ea": 1.35,
    "ffn verify --check m": 1.35,
    "ffn params --dtype q": 1.35,
}
WARM_UPS = 3
SIZE = (40, 100)  # of the pseudo-terminal


@dataclass(frozen=True)
class Result:
    """One command's figures: median seconds, median ratio to the yardstick with its interval."""

    where: str
    command: str
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    limit: float | None
    rounds: int

    @property
    def passed(self) -> bool | None:
        """Whether the median keeps the limit; None where there is no limit."""
        return None if self.limit is None else self.ratio <= self.limit


TERMINAL = {"TERM": "xterm-256color"}


# --- running ----------------------------------------------------------------------------------------------------------


def launcher() -> tuple[list[str], str]:
    """How `ffn` is started, and in words: the console script beside the interpreter, if it is installed."""
    script = Path(sys.executable).parent / "ffn"
    if script.exists():
        return [str(script)], "the console script `ffn`"
    return [sys.executable, "-m", "ffncli"], "`python -m ffncli`"


def in_pipe(command: Sequence[str], tab: str = "") -> float:
    """Seconds until the end of `command`, whose output goes to a pipe; of a completion where `tab` is the line."""
    env = environment() | TERMINAL | ({"_FFN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": tab} if tab else {})
    start = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False)
    seconds = time.perf_counter() - start
    _must_work(command, done.returncode, done.stdout + done.stderr)
    return seconds


def in_terminal(command: Sequence[str]) -> float:
    """The same under a pseudo-terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, SIZE)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment() | TERMINAL)
    os.close(theirs)
    output = _until_closed(ours)
    code = process.wait()
    seconds = time.perf_counter() - start
    os.close(ours)
    _must_work(command, code, output)
    return seconds


def _until_closed(terminal: int) -> bytes:
    """All output; Linux reports the end of a pseudo-terminal as an error, others as no bytes."""
    output = b""
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:
            return output
        if not more:
            return output
        output += more


def _must_work(command: Sequence[str], code: int, output: bytes) -> None:
    if code != 0:
        shown = output.decode(errors="replace")
        raise SystemExit(f"{Path(command[0]).name} {' '.join(command[1:])} failed with {code}:\n{shown}")


def measure(where: str, bare: Path, rounds: int) -> list[Result]:
    """All commands, `rounds` times in random order, after the warm-ups."""
    run = in_pipe if where == "pipe" else in_terminal
    ffn, _ = launcher()
    yardstick = [sys.executable, str(bare)]
    commands = {text: [*ffn, *text.split()] for text in COMMANDS} | {AGAIN: yardstick, "": yardstick}
    runs = {text: partial(run, command) for text, command in commands.items()}
    if where == "pipe":
        runs |= {f"{tab}<Tab>": partial(in_pipe, ffn, tab) for tab in TABS}
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(WARM_UPS + rounds):
        for name in order.sample(list(runs), len(runs)):
            taken = runs[name]()
            if at >= WARM_UPS:
                seconds[name].append(taken)
    base = seconds.pop("")
    print(f"\nstdout is a {where}: bare program, median {1000 * statistics.median(base):.1f} ms")
    return [_result(where, name, taken, base) for name, taken in seconds.items()]


def _result(where: str, name: str, seconds: list[float], base: list[float]) -> Result:
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    low, high = median_interval(ratios)
    medians = statistics.median(seconds), statistics.median(ratios)
    limit = COMMANDS.get(name, TABS.get(name.removesuffix("<Tab>")))
    return Result(where, name, *medians, low, high, limit, len(seconds))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest pair of order statistics, the same rank from each end, that holds the median this surely.

    The number of values below the median is binomial(n, 1/2), whatever the distribution.
    """
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 0.0
    while 2 * (outside + math.comb(n, rank) / 2**n) <= 1 - confidence:
        outside += math.comb(n, rank) / 2**n
        rank += 1
    rank = max(rank, 1)  # too few values for the confidence: all of them
    return ordered[rank - 1], ordered[n - rank]


# --- reporting --------------------------------------------------------------------------------------------------------


def show(results: Sequence[Result]) -> None:
    """One place's results as a table."""
    print(f"{'command':<24} {'median':>9}  {'ratio':>6}  {'95 % interval':<15}  {'limit':>5}")
    for r in results:
        name = f"ffn {r.command}" if r.command in COMMANDS else r.command
        limit = "" if r.limit is None else f"{r.limit:.2f}"
        interval = f"{r.ratio_low:.3f} to {r.ratio_high:.3f}"
        figures = f"{1000 * r.median_s:6.1f} ms  {r.ratio:6.3f}  {interval:<15}"
        print(f"{name:<24} {figures}  {limit:>5}  {_verdict(r)}".rstrip())


def _verdict(r: Result) -> str:
    if r.limit is None:
        return ""
    near = " (the limit is inside the interval)" if r.ratio_low <= r.limit <= r.ratio_high else ""
    return ("pass" if r.passed else "MISS") + near


def main() -> int:
    """Measure, print, save; 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description="Startup time of ffn against a bare Typer program.")
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="rounds per place, at least 25 [31]")
    parser.add_argument("--save", metavar="FILE", help="write the results there as CSV")
    options = parser.parse_args()
    if options.rounds < 25:
        parser.error("--rounds must be at least 25")
    about = machine("typer", "rich")
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"ffn is {launcher()[1]}; {options.rounds} rounds after {WARM_UPS} warm-ups, caches warm")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE, "utf-8")
        for where in ("pipe", "pty"):
            measured = measure(where, bare, options.rounds)
            show(measured)
            results += measured
    if options.save:
        names = ("where", "command", "median_s", "ratio", "ratio_low", "ratio_high", "limit", "passed", "rounds")
        save(options.save, names, [[getattr(result, name) for name in names] for result in results], about)
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
