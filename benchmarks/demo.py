"""The manual's demonstration of `ffn bench`: the same question in five fresh shells, and a regression that is caught.

The question: how does `packed` compare with `eager`? Each shell measures with two torch Timers, one after the other (1
second each, five times their default), and with `ffn bench`. Then `ffn bench --fail-if-slower 3%` compares two versions
of a user's kernel; the new version is slower because it computes the gate in float64.

    python -m benchmarks.demo [--into README.md] [--source 512x2048:swiglu] [--tokens 32] [--threads 1]

The Markdown goes between the markers of the file (docs/demo.md is created if it is missing). Takes about 4 minutes.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import script
from benchmarks.script import ROOT, bench, environment, machine, number

START = "<!-- demo: written by make demo -->"
OLD = """\
from torch.nn.functional import linear, silu

def mlp(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)
"""
NEW = """\
from torch.nn.functional import linear, silu

def mlp(x, gate, up, down):
    hidden = silu(linear(x, gate).double()) * linear(x, up)  # the gate in float64, to be exact
    return linear(hidden.float(), down)
"""
# What a user would write: the same matrix products as in the kernels eager and packed.
TIMERS = """
import sys, torch
from torch.nn.functional import linear, silu
from torch.utils.benchmark import Timer
tokens, d_model, d_ff, threads = map(int, sys.argv[1:])
x = torch.randn(tokens, d_model)
gate, up, down = (torch.randn(s) * s[1] ** -0.5 for s in ((d_ff, d_model), (d_ff, d_model), (d_model, d_ff)))
both = torch.cat([gate, up])
def eager(): return linear(silu(linear(x, gate)) * linear(x, up), down)
def packed():
    a, b = linear(x, both).chunk(2, -1)
    return linear(silu(a) * b, down)
with torch.inference_mode():
    a, b = (Timer("f()", globals={"f": f}, num_threads=threads).blocked_autorange(min_run_time=1).median
            for f in (eager, packed))
print(b / a)
"""


@dataclass(frozen=True)
class Shell:
    """The answers in one shell: the quotient of two Timers, and the ratio of `ffn bench` with its interval."""

    timers: float
    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class Caught:
    """The comparison of the two versions: the command as typed, its output, its exit code."""

    command: str
    output: str
    code: int


def shell(options: argparse.Namespace) -> Shell:
    """Measure once with the Timers and once with `ffn bench`, in fresh processes."""
    d_model, d_ff = options.source.partition(":")[0].split("x")
    words = [sys.executable, "-c", TIMERS, options.tokens, d_model, d_ff, str(options.threads)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment(), check=True)
    answer = bench(
        options.source, "--tokens", options.tokens, "--threads", str(options.threads), "--cache", "warm",
        "--kernel", "eager,packed",
    )  # fmt: skip
    row = next(row for row in answer.rows if row["kernel"] == "packed")
    ratio, low, high = (number(row, name) or float("nan") for name in ("ratio", "ratio_low", "ratio_high"))
    return Shell(float(done.stdout), ratio, low, high, row["verdict"])


def caught(options: argparse.Namespace) -> Caught:
    """Compare the two versions as a user would, in a folder with both files."""
    asked = ["ffn", "bench", options.source, "--tokens", options.tokens, "--threads", str(options.threads)]
    asked += ["--kernel", "old=old.py:mlp,new=new.py:mlp", "--baseline", "old", "--fail-if-slower", "3%"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "old.py").write_text(OLD, "utf-8")
        Path(folder, "new.py").write_text(NEW, "utf-8")
        words = [sys.executable, "-m", "ffncli", *asked[1:], "--save", "ab.csv"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment(), check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(asked)}: exit {done.returncode}\n{done.stderr}")
    return Caught(f"{' '.join(asked)} --save ab.csv", done.stdout.rstrip(), done.returncode)


def text(shells: Sequence[Shell], ab: Caught, question: str, about: str) -> str:
    """Return the Markdown for between the markers."""
    rows = [
        (at, f"{s.timers:.3f}", f"{s.ratio:.3f}", f"{s.low:.3f} to {s.high:.3f}", s.verdict)
        for at, s in enumerate(shells, 1)
    ]
    spans = [max(values) / min(values) - 1 for values in ([s.timers for s in shells], [s.ratio for s in shells])]
    return "\n".join([
        f"The same question in {_count(len(shells))} fresh shells, {question}: "
        "the time of `packed` divided by the time of `eager`.",
        "",
        script.table(("shell", "two Timers, one after the other", "`ffn bench`", "95 % interval", "verdict"), rows),
        "",
        f"The largest and the smallest ratio differ by {100 * spans[0]:.1f} % with Timers, and by "
        f"{100 * spans[1]:.1f} % with `ffn bench`. Measured {about}.",
        "",
        "A change that looks harmless (`old.py`, then `new.py`):",
        "",
        *_block("py", OLD.rstrip()),
        "",
        *_block("py", NEW.rstrip()),
        "",
        *_block("text", f"$ {ab.command}\n{ab.output}\n$ echo $?\n{ab.code}"),
    ])  # fmt: skip


def _block(language: str, body: str) -> list[str]:
    return [f"```{language}", body, "```"]


def _count(n: int) -> str:
    return {2: "two", 3: "three", 4: "four", 5: "five"}.get(n, str(n))


def main() -> int:
    """Measure and write; return 1 if the regression was not caught."""
    options = script.options_of(
        __doc__, into="docs/demo.md", source="512x2048:swiglu", tokens="32", threads=1, shells=5
    )
    path = Path(options.into)
    page = path.read_text("utf-8") if path.exists() else f"# A demonstration\n\n{START}\n<!-- end of demo -->\n"
    script.put(page, START, "")  # fails before the measurement, not after it
    shells = []
    for at in range(options.shells):
        shells.append(shell(options))
        print(f"shell {at + 1}: {shells[-1]}", flush=True)
    ab = caught(options)
    print(f"$ {ab.command}\n{ab.output}\nexit {ab.code}", flush=True)
    threads = f"{options.threads} thread{'s' * (options.threads != 1)}"
    question = f"{options.source} with {options.tokens} tokens in float32 on {threads}"
    about = f"{script.now()[:10]}, {machine()['cpu']}, torch {machine('torch')['torch']}"
    path.write_text(script.put(page, START, text(shells, ab, question, about)), "utf-8")
    return int(ab.code != 1)


if __name__ == "__main__":
    sys.exit(main())
