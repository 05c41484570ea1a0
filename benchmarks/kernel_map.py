"""Which kernel is the fastest for which shape, and how close does it get to this machine's limit?

What: gated blocks (silu) with d_model 1024 and 4096, d_ff 4 and 2.6875 times d_model, 1, 16, 128 and 512 tokens;
float32 on one and two threads, bfloat16 on one. `ffn bench` times eager and the built-in kernels that reorder weights
once; gemv at one token. In a third of the cases, drawn with a seed, the kernels that multiply differently are timed
too: packed, conv1x1, compiled and, with warm weights, frozen. Cases of up to 16 tokens have cold weights.

Targets for the fastest kernel of each case:

- its time divided by that of torch's three bare matrix products: the interval reaches 1.00 or below;
- compared with `compiled`, if that was timed: not slower beyond the interval;
- float32, from 128 tokens: at least 90 % of the best matrix product measured in the run on as many threads;
- float32, one token: at least 85 % of the bandwidth measured in the run.

A roof is the best of many short blocks, but a kernel's time is a mean. On a machine whose processor time varies, this
difference alone keeps a kernel below the roof, so the table also shows the kernel's own best block.

Limits: one machine. Each process places warm weights twice (once if a call of eager takes more than a third of a
second), and cold weights, which are several copies, once; it times as many rounds as take a few seconds. packed and
conv1x1 are left out if a call takes more than a third of a second; frozen, which times its ways to multiply in every
process, above a tenth of a second; compiled above five seconds. Blocks of d_model 4096, whose weights take long to
prepare, are timed in three processes, without onednn, packed and conv1x1.

    python -m benchmarks.kernel_map [--save FILE]      # continues FILE; about 100 minutes
    python -m benchmarks.kernel_map --summary FILE     # the tables; --picture FILE.svg draws them

--max-time limits a case, in seconds; --most leaves out cases whose calls take more seconds.
"""

import argparse
import itertools
import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

import torch

from benchmarks import script
from benchmarks.script import Kept, Row, Rows, number, read
from ffncli.bench.judge.statistics import t_interval, welch
from ffncli.bench.records import Case, Method
from ffncli.bench.request.grid import Grid, build_request, cached
from ffncli.bench.suite import new_run, run
from ffncli.block.recipe import FFNSpec
from ffncli.kernels import onednn

COLUMNS = (
    "isa", "blas", "d_model", "d_ff", "tokens", "dtype", "threads", "cache", "kernel", "status", "time_s", "time_low_s",
    "time_high_s", "ratio", "ratio_low", "ratio_high", "gemm_ratio", "gemm_low", "gemm_high", "tflops", "gbytes_per_s",
    "roof_fraction", "bound", "aa_low", "aa_high", "error_rel", "compile_s", "processes", "process_ratios", "warnings",
    "note", "least_s",
)  # fmt: skip
D_MODEL, WIDER, TOKENS = (1024, 4096), (4.0, 2.6875), (1, 16, 128, 512)
SETTINGS = (("fp32", 1), ("fp32", 2), ("bf16", 1))
# FLOP/s of a core in eager, for estimates only: torch multiplies bfloat16 slowly on a processor that cannot.
RATE = {"fp32": 60e9, "bf16": 120e9 if onednn.available("cpu") and onednn.multiplies(torch.bfloat16) else 9e9}
READ = 15e9  # bytes read per second, also for estimates only
TUNED, LONG, LONGEST = 0.1, 0.3, 5.0  # seconds of a call
LARGE = 2048  # d_model from which a process takes long to prepare its weights
ROUNDS = ((0.01, 24), (0.06, 8), (LONG, 4), (1.0, 2), (float("inf"), 1))  # (a call takes less than, rounds)


@dataclass(frozen=True, order=True)
class Shape:
    """One case of the map."""

    d_model: int
    d_ff: int
    tokens: int
    dtype: str
    threads: int

    @property
    def seconds(self) -> float:
        """The estimated seconds of a call."""
        weights = 3 * self.d_model * self.d_ff
        computing = 2 * self.tokens * weights / RATE[self.dtype] / self.threads
        return max(computing, weights * (4 if self.dtype == "fp32" else 2) / READ)

    @property
    def rounds(self) -> int:
        """The rounds in each placement: every fourth times the bare products, and a placement costs seconds anyway."""
        return next(rounds for most, rounds in ROUNDS if self.seconds < most)

    @property
    def case(self) -> Case:
        """The case of `ffn bench`."""
        spec, cache = FFNSpec(self.d_model, self.d_ff, "swiglu"), cached("auto", self.tokens)
        label = f"{self.d_model}x{self.d_ff}:swiglu"
        return Case(label, label, spec, self.tokens, self.dtype, cache=cache, threads=self.threads)


def shapes() -> list[Shape]:
    """Return all cases, those with short calls first."""
    every = [
        Shape(d_model, round(d_model * wider), tokens, dtype, threads)
        for (dtype, threads), d_model, wider, tokens in itertools.product(SETTINGS, D_MODEL, WIDER, TOKENS)
    ]
    return sorted(every, key=lambda shape: shape.seconds)


def drawn_third(every: Sequence[Shape]) -> set[Shape]:
    """Draw the third of the cases in which more kernels are timed."""
    ordered = sorted(every, key=lambda shape: str(vars(shape)))
    return set(random.Random(19).sample(ordered, len(ordered) // 3))


def kernels_of(shape: Shape, with_all: bool) -> list[str]:
    """Return the names of the kernels that are timed in a case."""
    names = ["eager", "onednn_packed", "numpy", *(["mkl"] if shape.dtype == "fp32" else [])]
    if shape.d_model < LARGE:
        names.append("onednn")
    if shape.tokens == 1:
        names.append("gemv")
    if with_all and shape.seconds < LONG and shape.d_model < LARGE:
        names += ["packed", "conv1x1"]
    if with_all and shape.seconds < LONGEST:
        names += ["compiled", *(["frozen"] if shape.case.cache == "warm" and shape.seconds < TUNED else [])]
    return names


def measured(shape: Shape, kernels: Sequence[str], options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure a case with `ffn bench`, in fewer rounds if a call takes long; return a row for every kernel."""
    placements = 2 if shape.case.cache == "warm" and shape.seconds < LONG else 1
    processes = min(options.processes, 3) if shape.d_model >= LARGE else options.processes
    method = Method(processes, max_time=options.max_time, placements=placements, rounds=shape.rounds)
    grid = Grid(device=("cpu",), threads=(shape.threads,))
    request, _ = build_request(grid, kernels, "eager", method, frozen=(shape.case,))
    with tempfile.TemporaryDirectory() as folder, new_run(Path(folder, "bench.csv"), request) as journal:
        result = run(journal)
        least = least_seconds(read(result.rounds))
    rows = [
        {name: getattr(row, name, None) for name in COLUMNS} | {"least_s": least.get((row.case, row.kernel))}
        for row in result.rows
    ]
    return [row | {name: ";".join(map(str, row[name])) for name in ("process_ratios", "warnings")} for row in rows]


def least_seconds(rounds: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Return the seconds of a call in the best block of all processes, by case and kernel."""
    least: dict[tuple[str, str], float] = {}
    for row in rounds:
        key, seconds = (row["case"], row["kernel"]), float(row["seconds"]) / int(row["inner"])
        least[key] = min(seconds, least.get(key, seconds))
    return least


# --- judging ----------------------------------------------------------------------------------------------------------


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the row with the least time among the rows of a case, or None."""
    timed = [row for row in rows if row["status"] == "ok" and row["time_s"]]
    return min(timed, key=lambda row: float(row["time_s"]), default=None)


def best_fraction(row: Row) -> float:
    """Return the share of the roof that the kernel reaches in its best block."""
    least, seconds = number(row, "least_s"), number(row, "time_s")
    return (number(row, "roof_fraction") or 0.0) * (seconds / least if seconds and least else 1.0)


def beside(row: Row, other: Row) -> tuple[float, float, float]:
    """Return the ratio of two kernels of a case with its interval, from their ratios to eager in each process; where
    one of them was timed in fewer processes, the processes are not paired."""
    logs, others = ([log(float(text)) for text in one["process_ratios"].split(";")] for one in (row, other))
    if len(logs) == len(others):
        interval = t_interval([a - b for a, b in zip(logs, others, strict=True)])
    else:
        shift = welch(others, logs)
        if shift is None:  # one process
            return exp(fmean(logs) - fmean(others)), 0.0, inf
        interval = shift.log_ratio
    ratio = interval.map(exp)
    return ratio.value, ratio.low, ratio.high


def missed(rows: Rows) -> list[str]:
    """Return, in words, the targets that the fastest kernel of a case misses; `rows` are the rows of that case."""
    best = fastest(rows)
    if best is None:
        return ["no kernel was timed"]
    said, roof = [], number(best, "roof_fraction")
    low = number(best, "gemm_low")
    if low is None or low > 1.0:
        said.append(
            f"{best['kernel']} takes {best['gemm_ratio']} of the bare matrix products' time, "
            f"at least {best['gemm_low']}"
        )
    for other in rows:
        if other["kernel"] == "compiled" and other["status"] == "ok" and best is not other:
            ratio, least, _ = beside(best, other)
            said += [f"{best['kernel']} takes {ratio:.3f} of compiled's time"] if least > 1.0 else []
    if best["tokens"] == "1" and best["cache"] != "cold-weights":
        return [*said, "its weights were not cold: memory had room for one copy, of which the caches may hold a part"]
    mark = {"1": 0.85, "128": 0.90, "512": 0.90}.get(best["tokens"]) if best["dtype"] == "fp32" else None
    if mark is not None and (roof is None or roof < mark):
        what = "bandwidth" if best["tokens"] == "1" else "best matrix product"
        reached = f"{100 * (roof or 0):.0f} % of the {what}, {100 * best_fraction(best):.0f} % in its best block"
        said.append(f"{best['kernel']} reaches {reached}; target {100 * mark:.0f} %")
    return said


def by_case(rows: Iterable[Row]) -> dict[tuple[str, str, str, str, str], list[Row]]:
    """Group the rows by (dtype, threads, d_model, d_ff, tokens), in that order."""
    cases: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["dtype"], row["threads"], row["d_model"], row["d_ff"], row["tokens"]), []).append(row)
    return dict(sorted(cases.items(), key=lambda item: (item[0][0] != "fp32", *map(int, item[0][1:]))))


def cell(rows: Rows) -> str:
    """Return text such as `onednn 0.61 [0.60, 0.62], 93 % (98 %)`: the fastest kernel, its time divided by the bare
    matrix products' time, its share of the roof, and that share in its best block."""
    best = fastest(rows)
    if best is None:
        return ""
    ratio, low, high, roof = (
        number(best, name) or 0.0 for name in ("gemm_ratio", "gemm_low", "gemm_high", "roof_fraction")
    )
    of_roof = f"{100 * roof:.0f} % ({100 * best_fraction(best):.0f} %)"
    return f"`{best['kernel']}` {ratio:.2f} [{low:.2f}, {high:.2f}], {of_roof}"


def summary(rows: Rows) -> str:
    """Return a table for each dtype and number of threads, the machine, and the missed targets."""
    cases, parts = by_case(rows), []
    for dtype, threads in dict.fromkeys(key[:2] for key in cases):
        mine = {key[2:]: group for key, group in cases.items() if key[:2] == (dtype, threads)}
        tokens = sorted({key[2] for key in mine}, key=int)
        lines = [
            (f"{d_model} × {d_ff}", *(cell(mine.get((d_model, d_ff, count), [])) for count in tokens))
            for d_model, d_ff in dict.fromkeys(key[:2] for key in mine)
        ]
        head = (f"{dtype}, {_plural(threads, 'thread')}", *(_plural(count, "token") for count in tokens))
        parts.append(script.table(head, lines))
    words = [
        f"- {dtype}, {_plural(threads, 'thread')}, {d_model} × {d_ff}, {_plural(tokens, 'token')}: {text}"
        for (dtype, threads, d_model, d_ff, tokens), group in cases.items()
        for text in missed(group)
    ]
    one = rows[0]
    parts.append(f"{one['cpu']}; {one['isa']}; torch {one['torch']} ({one['blas']}). {len(cases)} cases.")
    title = f"Targets missed: {len(words) or 'none'}."
    parts.append(script.folded(title, "\n".join(words)) if words else title)
    return "\n\n".join(parts)


def _plural(count: str, what: str) -> str:
    return f"{count} {what}{'s' * (count != '1')}"


# --- a picture --------------------------------------------------------------------------------------------------------

_COLOURS = {
    "eager": "#9aa0a6", "packed": "#c58af9", "conv1x1": "#78d9ec", "numpy": "#fdd663", "onednn": "#8ab4f8",
    "onednn_packed": "#669df6", "mkl": "#f28b82", "gemv": "#81c995", "compiled": "#fcad70", "frozen": "#e6c9a8",
}  # fmt: skip
_WIDE, _HIGH, _LEFT, _TOP = 150, 44, 210, 60


def picture(rows: Rows) -> str:
    """Return the map as SVG: a cell for each case, coloured by its fastest kernel, with the share of the roof."""
    cases = by_case(rows)
    columns = sorted({key[4] for key in cases}, key=int)
    lines = list(dict.fromkeys(key[:4] for key in cases))
    width, height = _LEFT + _WIDE * len(columns) + 10, _TOP + _HIGH * len(lines) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(10, 24, "The fastest kernel, and the share of the machine's measured roof that it reaches", 15),
    ]
    out += [_text(_LEFT + _WIDE * n + 8, _TOP - 8, _plural(t, "token")) for n, t in enumerate(columns)]
    for line, (dtype, threads, d_model, d_ff) in enumerate(lines):
        y = _TOP + _HIGH * line
        out.append(_text(10, y + 27, f"{d_model} × {d_ff}, {dtype}, {_plural(threads, 'thread')}"))
        for column, tokens in enumerate(columns):
            best = fastest(cases.get((dtype, threads, d_model, d_ff, tokens), []))
            if best is None:
                continue
            x, colour = _LEFT + _WIDE * column, _COLOURS.get(best["kernel"], "#dddddd")
            out.append(
                f'<rect x="{x + 2}" y="{y + 2}" width="{_WIDE - 4}" height="{_HIGH - 4}" rx="4" fill="{colour}"/>'
            )
            out.append(_text(x + 10, y + 19, best["kernel"]))
            out.append(_text(x + 10, y + 35, f"{100 * (number(best, 'roof_fraction') or 0):.0f} % of the roof"))
    return "\n".join([*out, "</svg>", ""])


def _text(x: int, y: int, text: str, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#202124">{escape(text)}</text>'


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Measure every case that has no rows yet."""
    third = drawn_third(shapes())
    for shape in shapes():
        wanted = shape.seconds <= options.most and shape.dtype in options.dtypes
        if wanted and not kept.has(**vars(shape)):
            kept.add_all(measured(shape, kernels_of(shape, shape in third), options))
            rows = kept.of(**vars(shape))
            print(f"{shape}: {cell(rows)} {'; '.join(missed(rows))}", flush=True)


def main() -> None:
    """Measure the missing cases, and print the tables."""
    options = script.options_of(__doc__, picture=None, processes=5, max_time=20.0, most=1e9, dtypes=("fp32", "bf16"))
    rows = script.rows_of(options, ("ffncli", "torch", "numpy"), COLUMNS, measure)
    if options.picture:
        Path(options.picture).write_text(picture(rows), "utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()
