"""How large are the errors of ratios measured by `ffn bench` and by other timers, if the true ratio is known?

What: `ffn bench` is compared with torch.utils.benchmark (Timer.blocked_autorange), a loop like triton's do_bench on the
CPU, and pytest-benchmark's fixture. All time the same three functions of benchmarks/known.py: `base`, `same` (ratio 1)
and `slow` (ratio 1.05). Four shapes, 1 and 2 threads, on a quiet machine and with another job (numpy GEMMs on a core).

How: a repeat is one `ffn bench` invocation per block, over all its tokens and threads, followed by a fresh process of
each other timer, in random order. For each shape, the other timer gets exactly the time that `ffn bench` spent on
measuring (blocks, lead-in and new placements, including references), and spends a third of it on each function, one
after the other; its ratio is the ratio of medians. The error is log(ratio / truth); errors over repeats and both truths
are combined as the root mean square (rms).

Targets: our rms divided by that of the best other timer in each cell (shape, threads, load) is at most 0.5 in the
median and never above 1.1; at least 90 % of our 95 % intervals contain the truth; the spread (standard deviation of the
errors over repeats) of torch's Timer divided by ours is at least 4 in the median.

Limits: the other timers reuse one set of tensors in one process, as a script does. The time for starting processes and
verifying is not counted as measuring; it is included in the column wall_s.

    python -m benchmarks.timers [--save FILE] [--repeats N] ...    # continues FILE where a run has ended; about an hour
    python -m benchmarks.timers --summary FILE                     # the figures of FILE

The exit code is 1 if a target is missed.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from benchmarks import script
from benchmarks.other_job import other_job
from benchmarks.script import KNOWN, ROOT, Answer, Kept, Mark, Row, Rows, number

OURS = "ffn bench"
PEERS = ("torch Timer", "do_bench", "pytest-benchmark")
TRUTHS: Mapping[str, float] = {"same": 1.0, "slow": 1.05}
BEST, WORST, COVERED, SPREAD = 0.5, 1.1, 0.9, 4.0
COLUMNS = (
    "date", "repeat", "load", "threads", "shape", "tool", "truth", "ratio", "low", "high", "ratio_mean", "ratio_min",
    "measuring_s", "wall_s", "injected", "loadavg",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Tokens, d_model, d_ff and activation, written `32x512x2048:swiglu`."""

    tokens: int
    d_model: int
    d_ff: int
    activation: str

    @classmethod
    def of(cls, text: str) -> "Shape":
        """Parse a shape such as `32x512x2048:swiglu`."""
        dims, _, activation = text.partition(":")
        return cls(*map(int, dims.split("x")), activation or "swiglu")

    @property
    def text(self) -> str:
        """The shape as it is typed."""
        return f"{self.tokens}x{self.source}"

    @property
    def source(self) -> str:
        """The block without the tokens, as typed for `ffn bench`."""
        return f"{self.d_model}x{self.d_ff}:{self.activation}"

    @property
    def gated(self) -> bool:
        """Whether the block is gated; known.py has gated kernels with silu and plain kernels with gelu."""
        return self.activation == "swiglu"


# --- measuring --------------------------------------------------------------------------------------------------------


def ours(source: str, shapes: Sequence[Shape], threads: Sequence[int], method: Sequence[str]) -> Answer:
    """Run `ffn bench` once over all tokens of a block and all numbers of threads."""
    plain = "" if shapes[0].gated else "_plain"
    kernels = ",".join(f"{name}={KNOWN}:{name}{plain}" for name in ("base", "same", "slow"))
    tokens = ",".join(str(shape.tokens) for shape in shapes)
    return script.bench(
        source, "--tokens", tokens, "--threads", ",".join(map(str, threads)), "--cache", "warm",
        "--kernel", kernels, "--baseline", "base", *method,
    )  # fmt: skip


def shares(answer: Answer) -> dict[str, float]:
    """Return a mapping from each case to its seconds of measuring (blocks, lead-in, placing) in all processes.

    Only the total over all cases is known (`spent` in the JSON). It is divided in proportion to the time of each case's
    blocks and the calls before them: 4 calls per block, or 1 if a call takes more than 20 ms.
    """
    taken: dict[str, float] = defaultdict(float)
    for block in answer.blocks:
        seconds, inner = float(block["seconds"]), int(block["inner"])
        taken[block["case"]] += seconds + seconds / inner * (1 if seconds / inner > 0.02 else 4)
    spent = sum(answer.spent.get(name, 0.0) for name in ("blocks", "lead_in", "placing"))
    scale = spent / sum(taken.values()) if spent else 1.0
    return {case: seconds * scale for case, seconds in taken.items()}


def our_rows(answer: Answer, shapes: Sequence[Shape]) -> list[dict[str, object]]:
    """Return a row of `ffn bench` for each shape, number of threads and truth."""
    by_tokens, seconds, rows = {shape.tokens: shape for shape in shapes}, shares(answer), []
    for row in answer.rows:
        if row["kernel"] not in TRUTHS or number(row, "ratio") is None:
            continue
        rows.append({
            "threads": row["threads"], "shape": by_tokens[int(row["tokens"])].text, "tool": OURS,
            "truth": TRUTHS[row["kernel"]], "ratio": number(row, "ratio"), "low": number(row, "ratio_low"),
            "high": number(row, "ratio_high"), "measuring_s": seconds.get(row["case"]), "wall_s": answer.wall_s,
        })  # fmt: skip
    return rows


def peer_rows(tool: str, budgets: Mapping[Shape, float], threads: int, seed: int) -> list[dict[str, object]]:
    """Run another timer in a fresh process, and return the same rows."""
    shapes = [
        {"tokens": s.tokens, "d_model": s.d_model, "d_ff": s.d_ff, "gated": s.gated, "seconds": seconds}
        for s, seconds in budgets.items()
    ]
    words = [sys.executable, "-m", "benchmarks.timers_peer"]
    request = json.dumps({"tool": tool, "threads": threads, "seed": seed, "shapes": shapes})
    start = time.perf_counter()
    done = subprocess.run(
        words, input=request, capture_output=True, text=True, cwd=ROOT, env=script.environment(), check=False
    )
    wall = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{tool}: exit {done.returncode}\n{done.stderr}")
    said, rows = json.loads(done.stdout), []
    for shape, found in zip(budgets, said["shapes"], strict=True):
        times = found["times"]
        for name, truth in TRUTHS.items():
            by = {which: times[name][which] / times["base"][which] for which in ("median", "mean", "min")}
            rows.append({
                "threads": threads, "shape": shape.text, "tool": tool, "truth": truth, "ratio": by["median"],
                "ratio_mean": by["mean"], "ratio_min": by["min"], "measuring_s": found["measuring_s"], "wall_s": wall,
                "injected": said["injected"],
            })  # fmt: skip
    return rows


def repeat(at: int, load: str, kept: Kept, options: argparse.Namespace) -> None:
    """Measure one repeat under one load, except the rows that the file already has."""

    def add(rows: Sequence[Mapping[str, object]]) -> None:
        for row in rows:
            if not kept.has(**{k: row[k] for k in ("threads", "shape", "tool", "truth")}, repeat=at, load=load):
                kept.add({**row, "date": script.now(), "repeat": at, "load": load, "loadavg": os.getloadavg()[0]})

    shapes = options.shapes
    for source in dict.fromkeys(shape.source for shape in shapes):
        mine = [shape for shape in shapes if shape.source == source]
        wanted = [(shape.text, threads) for shape in mine for threads in options.threads]
        if not all(kept.has(tool=OURS, repeat=at, load=load, shape=s, threads=t) for s, t in wanted):
            add(our_rows(ours(source, mine, options.threads, script.how(options, seed=at)), mine))
    todo = [(tool, threads) for tool in PEERS for threads in options.threads]
    random.Random(at).shuffle(todo)
    for tool, threads in todo:
        place = {"repeat": at, "load": load, "threads": threads}
        rows = {shape: kept.of(tool=OURS, shape=shape.text, **place) for shape in shapes}
        budgets = {shape: float(found[0]["measuring_s"]) for shape, found in rows.items() if found}
        if not all(len(kept.of(tool=tool, shape=shape.text, **place)) == len(TRUTHS) for shape in budgets):
            add(peer_rows(tool, budgets, threads, at))


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The errors for one shape, number of threads and load.

    `rms` and `spread` map each tool to the rms and the standard deviation of the log error over repeats and truths.
    `covered` of our `intervals` contain the truth.
    """

    shape: str
    threads: str
    load: str
    rms: Mapping[str, float]
    spread: Mapping[str, float]
    covered: int
    intervals: int

    @property
    def over_best(self) -> float:
        """Our rms divided by the smallest rms of another timer."""
        return self.rms[OURS] / min(value for tool, value in self.rms.items() if tool != OURS)

    @property
    def torch_over_ours(self) -> float:
        """The spread of torch's Timer divided by ours."""
        return self.spread[PEERS[0]] / self.spread[OURS]


def cells(rows: Rows) -> list[Cell]:
    """Return the figures of each cell for which every tool has at least two repeats."""
    groups: dict[tuple[str, str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["shape"], row["threads"], row["load"]][row["tool"]].append(row)
    found = []
    for (shape, threads, load), tools in sorted(groups.items()):
        if any(len(tools[name]) < 2 for name in (OURS, *PEERS)):
            continue
        errors = {
            tool: [math.log(float(row["ratio"]) / float(row["truth"])) for row in mine] for tool, mine in tools.items()
        }
        rms = {tool: math.sqrt(statistics.fmean(e * e for e in values)) for tool, values in errors.items()}
        spread = {tool: statistics.stdev(values) for tool, values in errors.items()}
        bounded = [row for row in tools[OURS] if row["low"] and row["high"]]
        held = [float(row["low"]) <= float(row["truth"]) <= float(row["high"]) for row in bounded]
        found.append(Cell(shape, threads, load, rms, spread, sum(held), len(tools[OURS])))
    return found


def judged(found: Sequence[Cell]) -> list[Mark]:
    """Judge these cells by the targets in the module's docstring; without cells, nothing is reached or missed."""
    if not found:
        return [("all", "", "", None)]
    over, spread = [cell.over_best for cell in found], statistics.median(cell.torch_over_ours for cell in found)
    covered, intervals = sum(cell.covered for cell in found), sum(cell.intervals for cell in found)
    share = covered / intervals
    middle, most = statistics.median(over), max(over)
    return [
        ("rms error ÷ the best other timer's, median", f"{middle:.2f}", f"at most {BEST:g}", middle <= BEST),
        ("rms error ÷ the best other timer's, largest", f"{most:.2f}", f"at most {WORST:g}", most <= WORST),
        ("95 % intervals that contain the true ratio", f"{covered} of {intervals} ({share:.0%})",
         f"at least {COVERED:.0%}", share >= COVERED),
        ("spread of torch's Timer ÷ spread of ffn bench, median", f"{spread:.1f}", f"at least {SPREAD:g}",
         spread >= SPREAD),
    ]  # fmt: skip


def summary(rows: Rows) -> tuple[str, bool]:
    """Return the Markdown (the targets, then a line for each cell), and whether every target is reached."""
    found = cells(rows)
    verdicts = judged(found)
    if not found:
        return "no cell has two repeats of every tool yet", False
    tools = (OURS, *PEERS)
    lines = []
    for cell in sorted(found, key=lambda c: (c.load != "quiet", c.threads, Shape.of(c.shape).tokens, c.shape)):
        errors = (f"{cell.rms[tool]:.2%} ({cell.spread[tool]:.2%})" for tool in tools)
        ends = f"{cell.over_best:.2f}", f"{cell.covered} of {cell.intervals}"
        lines.append((cell.load, cell.threads, cell.shape, *errors, *ends))
    said = [number(row, "injected") for row in rows]
    injected = [value for value in said if value is not None and not math.isnan(value)]
    head = f"Measured {script.about_line(rows, 'cpu', 'python', 'torch', 'numpy', 'pytest-benchmark')}."
    notes = "Each figure is the rms error of the log ratio over all repeats and both true ratios (1 and 1.05), with its"
    notes += f" standard deviation in brackets. {head}"
    if injected:
        low, middle, high = min(injected), statistics.median(injected), max(injected)
        notes += f" The true ratio injected in the other timers' processes was {middle:.4f} ({low:.4f} to {high:.4f})."
    head = ("load", "threads", "shape", *tools, "÷ the best other timer", "intervals")
    text = "\n\n".join([script.marks(verdicts), script.table(head, lines), notes])
    return text, all(reached for *_, reached in verdicts)


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Measure every repeat under every load."""
    options.shapes = [Shape.of(text) for text in options.shapes]
    for at in range(options.repeats):
        for load in options.loads:
            start = time.perf_counter()
            with nullcontext() if load == "quiet" else other_job():
                repeat(at, load, kept, options)
            print(f"repeat {at + 1} of {options.repeats}, {load}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch", "numpy", "pytest-benchmark"), COLUMNS, measure, summary, repeats=10, processes=5,
        max_time=1.0, precision="0.5%", threads=(1, 2), loads=("quiet", "busy"),
        shapes=tuple(f"{tokens}x256x1024:swiglu" for tokens in (1, 4, 16, 32)),
    )  # fmt: skip
