"""How long `ffn` takes to start, compared with the smallest program that Typer and rich allow.

What: the wall time from the start of a process to its end, for commands that need no tensor (`COMMANDS` below), and for
completion on Tab (`TABS`). The yardstick is a program with one Typer command that prints a rich table, written to a
temporary directory and run by the same interpreter. A ratio of 1 means that `ffn` takes as long as this program.

How: every round runs every command once, in random order, and divides its time by the yardstick's time in this round,
so that a machine that slows down affects both. The ratio is the median over rounds, with the order-statistic (sign)
interval that contains the true median with a probability of at least 95 %. Three rounds before that, which fill the
bytecode and file caches, are discarded. Everything is measured twice: with stdout as a pipe, and under a
pseudo-terminal, where `ffn` loads rich.

Limits: warm caches only; the first start after an installation takes longer. The yardstick depends on the versions of
Typer and rich, which are printed. `bare again` compares the yardstick with itself: its difference from 1 is noise.

    python -m benchmarks.startup [--rounds N] [--save FILE]

The exit code is 1 if a median ratio is above its limit.
"""

import argparse
import math
import os
import pty
import statistics
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import script

AGAIN = "bare again"
FRONT, HELP, PLAIN = 0.6, 0.9, 1.45  # the largest ratio allowed for `ffn --help`, a command's help, a command's answer
COMMANDS: dict[str, float | None] = {
    **dict.fromkeys(("-h", "--help", "--version"), FRONT),
    **dict.fromkeys(("params llama-2-7b", "plan llama-2-7b", "activations"), PLAIN),
    **dict.fromkeys(("activations --all", "models")),
    **dict.fromkeys(("trace -h", "params -h", "bench -h"), HELP),
    **dict.fromkeys((f"{name} --help" for name in (
        "params", "trace", "plan", "activations", "approximate", "verify", "bench", "compare", "doctor",
    )), HELP),
}  # fmt: skip
TABS = (  # the line before the cursor when Tab is pressed; a shell reads the answer from a pipe
    "ffn tr", "ffn trace gp", "ffn trace --d", "ffn activations ge", "ffn bench -k ea", "ffn verify --check m",
    "ffn params --dtype q",
)  # fmt: skip
WARM_UPS = 3
SIZE = (40, 100)  # of the pseudo-terminal
TERMINAL = {"TERM": "xterm-256color"}


def in_pipe(command: Sequence[str], tab: str = "") -> float:
    """Return the seconds that `command` takes with its output in a pipe, or its completion of the line `tab`."""
    env = (
        script.environment()
        | TERMINAL
        | ({"_FFN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": tab} if tab else {})
    )
    start = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False)
    seconds = time.perf_counter() - start
    _must_work(command, done.returncode, done.stdout + done.stderr)
    return seconds


def in_terminal(command: Sequence[str]) -> float:
    """Return the seconds that `command` takes under a pseudo-terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, SIZE)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=script.environment() | TERMINAL)
    os.close(theirs)
    output = _until_closed(ours)
    code = process.wait()
    seconds = time.perf_counter() - start
    os.close(ours)
    _must_work(command, code, output)
    return seconds


def _until_closed(terminal: int) -> bytes:
    """Return all output; Linux reports the end of a pseudo-terminal as an error, other systems as no bytes."""
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


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each command, in a pipe and under a pseudo-terminal."""
    if options.rounds < 25:
        raise SystemExit("--rounds must be at least 25")
    with script.scratch("startup") as folder:
        bare = folder / "bare.py"
        bare.write_text(script.BARE, "utf-8")
        yardstick = [sys.executable, str(bare)]
        commands = {text: script.ffn(*text.split()) for text in COMMANDS} | {AGAIN: yardstick, "": yardstick}
        for where, run in (("pipe", in_pipe), ("pty", in_terminal)):
            runs = {text: partial(run, command) for text, command in commands.items()}
            if where == "pipe":
                runs |= {f"{tab}<Tab>": partial(in_pipe, script.ffn(), tab) for tab in TABS}
            seconds = script.interleaved(runs, options.rounds, WARM_UPS)
            base = seconds.pop("")
            for name, taken in seconds.items():
                ratios = [a / b for a, b in zip(taken, base, strict=True)]
                ratio, limit = statistics.median(ratios), PLAIN if name.endswith("<Tab>") else COMMANDS.get(name)
                low, high = median_interval(ratios)
                yield {
                    "where": where, "command": name, "median_s": statistics.median(taken), "ratio": ratio,
                    "ratio_low": low, "ratio_high": high, "limit": limit,
                    "passed": None if limit is None else ratio <= limit, "rounds": options.rounds,
                }  # fmt: skip


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the narrowest pair of order statistics, of the same rank from each end, that reaches this confidence.

    The number of values below the median has the distribution binomial(n, 1/2), for any distribution of the values.
    """
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 0.0
    while 2 * (outside + math.comb(n, rank) / 2**n) <= 1 - confidence:
        outside += math.comb(n, rank) / 2**n
        rank += 1
    rank = max(rank, 1)  # too few values for the confidence: all of them
    return ordered[rank - 1], ordered[n - rank]


if __name__ == "__main__":
    script.main_once(__doc__, ("typer", "rich"), measured, rounds=31)
