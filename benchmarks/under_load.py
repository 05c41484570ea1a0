"""Does `ffn bench` judge right on a busy machine? Its verdicts and intervals where the true ratio is known.

What: an arm is the baseline's call repeated, 20 calls against 20, 21, 22, 26, 40 and 480, with buffers of its own; so
the ratios are 1, 1.05, 1.1, 1.3, 2 and 24. Loads (benchmarks/loads.py): quiet; one and two busy processes a core;
bursts; a job that copies memory; the worker stopped and continued at random; a quota of processor time, where one can
be set. One and two threads.

How: `record` runs worker processes under each load, one after the other, which time all arms in the rounds of `ffn
bench` and keep every block; an interrupted recording goes on. `judge` draws runs of five whole processes from windows
of twelve neighbours, and judges each as `ffn bench` does: the same functions, on the same records. Beside it, peers on
the same blocks: the ratio of medians of an arm's blocks with a bootstrap interval, pyperf's rule (a t test of two sets
of process means, and at least 2 % apart), and the median ± IQR rule of torch's Timer.

What is tuned is tuned with `--tuning`: other loads of the same kinds, other seeds.

Marks: false verdicts at most 1 % of the drawn runs of a cell, the wrong direction never; 1.3, 2 and 24 told right in
95 %; 1.1 in 95 % when quiet and in 60 % beside one busy process a core; intervals hold the truth in 93 %.

    python -m benchmarks.under_load record FOLDER [--count 60] [--loads busy,...] [--threads 1,2] [--tuning]
    python -m benchmarks.under_load judge FOLDER [--draws 2000] [--save FILE] [--loads busy,...] [--tuning]
    python -m benchmarks.under_load real FILE [--count 25]
    python -m benchmarks.under_load hyperfine FILE [--count 25]

60 processes of every load and number of threads take about three hours; a file named `pause` in FOLDER makes `record`
wait, and FILE.pause `real`. `real` runs `ffn bench --max-time 10s` on kernels that compute a block 20, 21, ... 480
times, and adds a row for each ratio to FILE; so does `hyperfine`, with loops in awk, a program of one process and one
thread. The exit code is 1 where a mark is missed.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from math import exp, hypot, log
from pathlib import Path
from typing import Any

from benchmarks import script
from benchmarks.loads import LOADS, has_quota, under
from benchmarks.script import ROOT
from ffncli.bench.judge import ratios
from ffncli.bench.judge.ratios import Means
from ffncli.bench.judge.statistics import Interval, welch
from ffncli.bench.launch import environment
from ffncli.bench.records import TWIN, Method, TimedBlock
from ffncli.bench.results.csv_file import block_lines, parse_rounds

BASE, CASE = "base", "case"
ARMS: Mapping[str, int] = {"x1": 20, "x1.05": 21, "x1.1": 22, "x1.3": 26, "x2": 40, "x24": 480}
TRUTHS = {name: calls / 20 for name, calls in ARMS.items()}
_unexplained = ratios._unexplained
MARGIN, RUN, WINDOW = 0.02, 5, 12
FALSE, RIGHT, RIGHT_BUSY, COVERED = 0.01, 0.95, 0.6, 0.93
COLUMNS = (
    "tool", "load", "threads", "truth", "processes", "rounds", "disturbed", "draws", "slower", "faster", "same",
    "inconclusive", "covered", "half_width",
)  # fmt: skip

Judge = Callable[[Sequence[TimedBlock], str, Means | None], tuple[str, Interval]]  # blocks of an arm and BASE; the twin


# --- recording --------------------------------------------------------------------------------------------------------


def worker(process: int, threads: int, seconds: float) -> None:
    """Time all arms in this process once a line arrives on stdin, and print the blocks as lines of a rounds file."""
    import numpy  # noqa: F401  # before torch, as in a worker
    import torch
    from threadpoolctl import threadpool_limits

    from ffncli.bench.machine.counters import SystemCounters
    from ffncli.bench.timing.clock import CpuClock
    from ffncli.bench.timing.reference_arms import anchor
    from ffncli.bench.timing.rounds import Arm, measure, plan_of

    torch.set_num_threads(threads)
    threadpool_limits(threads)
    draw = random.SystemRandom()

    def arm(name: str, calls: int) -> Arm:
        gaps = [torch.empty(64 * draw.randrange(1, 4096), dtype=torch.uint8) for _ in range(3)]
        x, w, out = torch.randn(64, 128), torch.randn(128, 256), torch.randn(64, 256)
        del gaps  # so that each arm's tensors get other addresses
        mm = torch.mm

        def call() -> None:
            for _ in range(calls):
                mm(x, w, out=out)

        return Arm(name, call, before=_nothing)  # each call is timed by itself, as where `ffn bench` writes its inputs

    def place(number: int) -> list[Arm]:
        every = [*{BASE: 20, TWIN: 20, **ARMS}.items()]
        draw.shuffle(every)  # no arm always has the first tensors
        arms = [arm(name, calls) for name, calls in every]
        return [*arms, anchor(random.Random(draw.random()))]

    method = Method(processes=RUN, max_time=RUN * seconds)
    plan = plan_of(method, BASE, (BASE, *ARMS), "cpu", threads)
    sys.stdin.readline()
    with torch.inference_mode():
        measured = measure(process, CASE, place, CpuClock(threads), SystemCounters(threads=threads), plan)
    sys.stdout.write(block_lines("run", measured.blocks))


def _nothing() -> None:
    """Do nothing before a call."""


def record(options: argparse.Namespace) -> None:
    """Run the processes that a folder lacks."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for process in range(options.count):  # the loads in turn, so that a slow hour does not meet one load alone
        for load, threads in cells(options):
            path = path_of(options, load, threads)
            if process in processes_of(path):
                continue
            _wait_while(options.folder / "pause")
            words = [sys.executable, "-m", "benchmarks.under_load", "worker", str(process), str(threads)]
            child = subprocess.Popen(
                [*words, str(options.seconds)], cwd=ROOT, env=environment(threads, "fixed") | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            with under(load, child.pid, options.tuning, seed=1000 * process):
                time.sleep(0.5)
                began = time.perf_counter()
                lines, _ = child.communicate("go\n")
            if child.returncode:
                raise SystemExit(f"{load}, {threads} threads: a worker ended with exit code {child.returncode}")
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
            took = time.perf_counter() - began
            print(
                f"{load}, {threads} threads, process {process}: {lines.count(chr(10))} blocks, {took:.1f} s", flush=True
            )


def _wait_while(pause: Path) -> None:
    while pause.exists():
        time.sleep(1)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield every load with every number of threads."""
    for load in options.loads:
        if load == "quota" and not has_quota():
            continue
        yield from ((load, threads) for threads in options.threads)


def path_of(options: argparse.Namespace, load: str, threads: int) -> Path:
    """Return the file of a load and a number of threads."""
    return Path(options.folder, f"{'tuning-' if options.tuning else ''}{load}-{threads}.csv")


def processes_of(path: Path) -> set[int]:
    """Return the processes that a file has."""
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        return {int(line[1]) for line in csv.reader(file)}


# --- real runs --------------------------------------------------------------------------------------------------------

REAL = (
    "tool", "load", "threads", "run", "truth", "verdict", "ratio", "low", "high", "wall_s", "measuring_s",
)  # fmt: skip


def real(options: argparse.Namespace) -> None:
    """Add the runs that a file lacks."""
    kept = script.Kept(str(options.folder), REAL, script.machine("torch"))
    tool, measure = ("hyperfine", _by_hyperfine) if options.what == "hyperfine" else ("ffn bench", _by_ffn)
    done = {(row["tool"], row["load"], row["threads"], row["run"]) for row in kept.rows}
    for run in range(options.count):
        for load, threads in cells(options):
            if (tool, load, str(threads), str(run)) in done or (tool == "hyperfine" and threads > 1):
                continue
            _wait_while(Path(f"{options.folder}.pause"))
            rows = measure(partial(under, load, tuning=options.tuning, seed=1000 * run + 500), threads, run)
            same = {"tool": tool, "load": load, "threads": threads, "run": run}
            kept.add_all([same | dict(row) for row in rows])
            words = ", ".join(f"×{row['truth']:g} {row['verdict']} {float(row['ratio'] or 'nan'):.3g}" for row in rows)
            print(f"{load}, {threads} threads, run {run}, {rows[0]['wall_s']:.0f} s: {words}", flush=True)


def _by_ffn(load: Callable[..., AbstractContextManager[None]], threads: int, run: int) -> list[dict[str, Any]]:
    kernels = [f"base={script.KNOWN}:times_20", *(f"{arm}={script.KNOWN}:times_{n}" for arm, n in ARMS.items())]
    answer = script.bench(
        "64x256:relu", "--no-bias", "--tokens", "16", "--kernel", ",".join(kernels), "--baseline", "base",
        "--threads", str(threads), "--max-time", "10s", "--cache", "warm", "--seed", str(run), around=load,
    )  # fmt: skip
    seconds = {"wall_s": answer.wall_s, "measuring_s": sum(answer.spent.get(name, 0.0) for name in _MEASURING)}
    return [
        {"truth": TRUTHS[row["kernel"]], "verdict": row["verdict"] or row["status"], "ratio": row["ratio"],
         "low": row["ratio_low"], "high": row["ratio_high"], **seconds}
        for row in answer.rows if row["kernel"] in TRUTHS
    ]  # fmt: skip


_MEASURING = ("blocks", "lead_in", "placing", "rest")


def _by_hyperfine(load: Callable[..., AbstractContextManager[None]], threads: int, run: int) -> list[dict[str, Any]]:
    """hyperfine's mean ± standard deviation of ten runs of a command, against those of the baseline's command.

    It has no verdicts. A reader takes a ratio for real that is more than its ± away from 1, so this does, too.
    """
    loops = [f"awk 'BEGIN {{ for (i = 0; i < {25_000 * calls}; i++) s += i }}'" for calls in (20, *ARMS.values())]
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder, "out.json"), time.perf_counter()
        words = ["hyperfine", "-N", "--runs", "10", "--warmup", "1", "--export-json", str(path), *loops]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with load(process.pid):
            process.wait()
        wall = time.perf_counter() - start
        base, *others = [(one["mean"], one["stddev"]) for one in json.loads(path.read_text("utf-8"))["results"]]
    rows = []
    for truth, (mean, deviation) in zip(TRUTHS.values(), others, strict=True):
        ratio = mean / base[0]
        away = ratio * hypot(deviation / mean, base[1] / base[0])
        word = "slower" if ratio - away > 1 else "faster" if ratio + away < 1 else "inconclusive"
        rows.append({"truth": truth, "verdict": word, "ratio": ratio, "low": ratio - away, "high": ratio + away,
                     "wall_s": wall, "measuring_s": wall})  # fmt: skip
    return rows


# --- judging ----------------------------------------------------------------------------------------------------------


def ours(blocks: Sequence[TimedBlock], arm: str, twin: Means | None) -> tuple[str, Interval]:
    """Judge as a row of `ffn bench` is judged."""
    means = ratios.paired(blocks, arm, BASE)
    if means is None:
        return "inconclusive", Interval(0.0, -9.0, 9.0)
    means = ratios.judged(means, twin, blocks, MARGIN)
    return ratios.verdict(means.interval, MARGIN), means.interval


def bootstrap(blocks: Sequence[TimedBlock], arm: str, twin: Means | None) -> tuple[str, Interval]:
    """The ratio of medians over all blocks, with a bootstrap over blocks, as many scripts have it."""
    sides = [[b.per_call for b in blocks if b.kernel == name] for name in (arm, BASE)]
    draw = random.Random(len(sides[0]))
    values = sorted(
        log(statistics.median(draw.choices(sides[0], k=len(sides[0]))))
        - log(statistics.median(draw.choices(sides[1], k=len(sides[1]))))
        for _ in range(100)
    )
    centre = log(statistics.median(sides[0])) - log(statistics.median(sides[1]))
    interval = Interval(centre, values[2], values[97])
    return ratios.verdict(interval, MARGIN), interval


def pyperf(blocks: Sequence[TimedBlock], arm: str, twin: Means | None) -> tuple[str, Interval]:
    """pyperf compare_to: a two-sided t test over values, here the means of processes; 2 % apart to be called so."""
    sides = []
    for name in (BASE, arm):
        by: dict[int, list[float]] = defaultdict(list)
        for block in blocks:
            if block.kernel == name:
                by[block.process].append(block.per_call)
        sides.append([log(statistics.fmean(times)) for times in by.values()])
    shift = welch(*sides)
    assert shift is not None
    interval = shift.log_ratio
    if interval.low <= 0 <= interval.high or abs(interval.value) < log(1 + MARGIN):
        return "same", interval
    return ("slower" if interval.value > 0 else "faster"), interval


def timer(blocks: Sequence[TimedBlock], arm: str, twin: Means | None) -> tuple[str, Interval]:
    """torch's Timer: the median of each arm's blocks with its IQR; apart if the quartiles are."""
    quartiles = []
    for name in (arm, BASE):
        times = [b.per_call for b in blocks if b.kernel == name]
        quartiles.append([log(q) for q in statistics.quantiles(times, n=4)] if len(times) > 1 else [log(times[0])] * 3)
    (low, mid, high), (base_low, base_mid, base_high) = quartiles
    interval = Interval(mid - base_mid, low - base_high, high - base_low)
    return ratios.verdict(interval, 0.0) if not low <= base_high <= high else "inconclusive", interval


PEERS: Mapping[str, Judge] = {"ffn bench": ours, "median, bootstrap": bootstrap, "pyperf": pyperf, "torch Timer": timer}


def judged(cell: tuple[str, int], path: Path, draws: int) -> list[dict[str, object]]:
    """Return a row for each tool and truth of a cell."""
    load, threads = cell
    by: dict[int, list[TimedBlock]] = defaultdict(list)
    parts: dict[tuple[int, str], list[TimedBlock]] = defaultdict(list)
    for _, block in parse_rounds(path.read_bytes(), path.name):
        by[block.process].append(block)
        parts[block.process, block.kernel].append(block)
    # A block is in hundreds of drawn runs: its flags are parsed once.
    shares = {id(block): _unexplained(block) for mine in parts.values() for block in mine}
    ratios._unexplained = lambda block: shares[id(block)] if id(block) in shares else _unexplained(block)
    numbers, draw = sorted(by), random.Random(f"{load} {threads}")
    disturbed = statistics.fmean(ratios.disturbed_share(blocks) for blocks in by.values())
    rounds = statistics.fmean(len({(b.placement, b.round) for b in blocks}) for blocks in by.values())
    words: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    widths: dict[tuple[str, str], list[float]] = defaultdict(list)
    window = min(WINDOW, len(numbers))
    for at in range(draws):
        start = draw.randrange(len(numbers) - window + 1)
        chosen = draw.sample(numbers[start : start + window], RUN)
        sides = {arm: [b for n in chosen for name in (arm, BASE) for b in parts[n, name]] for arm in (*TRUTHS, TWIN)}
        twin = ratios.paired(sides[TWIN], TWIN, BASE)
        for tool, judge in PEERS.items():
            if tool != "ffn bench" and at >= draws // 40:  # fewer draws for the peers, whose rates are far from ours
                continue
            for arm, truth in TRUTHS.items():
                word, interval = judge(sides[arm], arm, twin)
                words[tool, arm][word] += 1
                words[tool, arm]["covered"] += interval.low <= log(truth) <= interval.high
                words[tool, arm]["draws"] += 1
                widths[tool, arm].append(interval.half_width)
    return [
        {
            "tool": tool, "load": load, "threads": threads, "truth": TRUTHS[arm], "processes": len(numbers),
            "rounds": rounds, "disturbed": disturbed, "half_width": exp(statistics.median(widths[tool, arm])) - 1,
            **{name: count[name] for name in ("draws", "slower", "faster", "same", "inconclusive", "covered")},
        }
        for (tool, arm), count in words.items()
    ]  # fmt: skip


def judge(options: argparse.Namespace) -> bool:
    """Judge every recorded cell; print the figures and the marks; return whether all are reached."""
    found = [(cell, path) for cell in cells(options) if len(processes_of(path := path_of(options, *cell))) >= RUN]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = [pool.submit(judged, cell, path, options.draws) for cell, path in found]
        rows: list[dict[str, object]] = []
        kept = script.Kept(options.save, COLUMNS, script.machine("torch"))
        for ((load, threads), _), one in zip(found, work, strict=True):  # the file keeps its other cells
            kept.drop(load=load, threads=threads)
            kept.add_all(one.result())
            rows += one.result()
    names = ("tool", "load", "threads", "truth", "slower", "faster", "same", "inconclusive", "covered")
    print(script.table((*names, "± %"), [_line(row, names) for row in rows]))
    verdicts = list(marks([row for row in rows if row["tool"] == "ffn bench"]))
    print(script.marks(verdicts))
    return all(good is not False for *_, good in verdicts)


def _line(row: Mapping[str, object], names: Sequence[str]) -> list[object]:
    counts = {name: f"{100 * float(str(row[name])) / float(str(row['draws'])):.1f}" for name in names[4:]}
    return [*(row[name] for name in names[:4]), *counts.values(), f"{100 * float(str(row['half_width'])):.1f}"]


def marks(rows: Sequence[Mapping[str, object]]) -> Iterator[script.Mark]:
    """Yield the marks over all cells, each with its worst cell."""

    def worst(
        what: str, share: Callable[[Mapping[str, object]], float], limit: float, most: bool, keep: Callable[..., bool]
    ) -> script.Mark:
        judged = [(share(row), row) for row in rows if keep(row)]
        if not judged:
            return what, "", f"{100 * limit:g} %", None
        value, row = (max if most else min)(judged, key=lambda pair: pair[0])
        figure = f"{100 * value:.1f} % ({row['load']}, {row['threads']} threads, ×{row['truth']})"
        return (
            what,
            figure,
            f"at {'most' if most else 'least'} {100 * limit:g} %",
            value <= limit if most else value >= limit,
        )

    def of(*names: str) -> Callable[[Mapping[str, object]], float]:
        return lambda row: sum(float(str(row[name])) for name in names) / float(str(row["draws"]))

    def truth(row: Mapping[str, object]) -> float:
        return float(str(row["truth"]))

    yield worst("false verdicts, ×1", of("slower", "faster"), FALSE, True, lambda row: truth(row) == 1)
    yield worst("false verdicts, above", of("same", "faster"), FALSE, True, lambda row: truth(row) > 1)
    yield worst("wrong direction", of("faster"), 0.0, True, lambda row: truth(row) > 1)
    yield worst("×1.3, 2, 24 told", of("slower"), RIGHT, False, lambda row: truth(row) >= 1.3)
    yield worst("×1.1 told, quiet", of("slower"), RIGHT, False, lambda r: (truth(r), r["load"]) == (1.1, "quiet"))
    yield worst("×1.1 told, busy", of("slower"), RIGHT_BUSY, False, lambda r: (truth(r), r["load"]) == (1.1, "busy"))
    yield worst("intervals hold the truth", of("covered"), COVERED, False, lambda row: True)


def main() -> int:
    """Record or judge; exit code 1 where a mark is missed."""
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        return 0
    listed = partial(str.split, sep=",")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "judge", "real", "hyperfine"))
    parser.add_argument("folder", type=Path, help="for real runs, a CSV file")
    parser.add_argument("--loads", type=listed, default=LOADS)
    parser.add_argument("--threads", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2))
    parser.add_argument("--count", type=int, default=60, help="processes of each cell [60]")
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring in a process [8]")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--tuning", action="store_true")
    parser.add_argument("--save", metavar="FILE")
    options = parser.parse_args()
    if options.what == "record":
        record(options)
        return 0
    if options.what != "judge":
        real(options)
        return 0
    return int(not judge(options))


if __name__ == "__main__":
    sys.exit(main())
