"""Does the baseline `eager` cost what a function written by hand costs? And `ffncli.kernel("eager")`?

What: the functions below, as a person writes them, on 12 cases: plain and gated blocks and a mixture of 8 experts, 1,
16 and 512 tokens, float32 and bfloat16, 1 and 2 threads. `ffn bench --cache warm` times the function beside eager; the
ratio is the function's time over eager's, with its interval. Then a fresh process calls `ffncli.kernel("eager")` and
the function in turn, a few milliseconds each; the ratio is the median of that of neighbours, kernel over function.

Marks: the verdict is `same` in all cases, and the whole interval lies within 1 % of 1 where a call takes 100 µs or
more; `ffncli.kernel` takes at most 2 % more there.

Limits: one machine, which must be quiet: a neighbour on a shared core is felt in every interval. --max-time is seconds
of a case of `ffn bench`, over all processes, and --call-time is seconds of calling the kernel and the function.

    python -m benchmarks.baseline [--save FILE] ...    # continues FILE
    python -m benchmarks.baseline --summary FILE
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import script
from benchmarks.script import Kept, Mark, Row, Rows, about_line, benched, how, number, ratio_text, table

THIS = "benchmarks/baseline.py"
EXPERTS, TOP_K = 8, 2
LEAST_S, WITHIN, OF_KERNEL = 100e-6, 0.01, 1.02  # a call of this long is judged; the marks of the ratios
TURN_S = 2e-3  # of the kernel's calls, and of the function's, until the other's turn
COLUMNS = (
    "date", "case", "compared", "status", "verdict", "ratio", "low", "high", "time_s", "aa_low", "aa_high", "processes",
    "error_rel", "loadavg", "wall_s", "warnings", "note",
)  # fmt: skip


# --- the functions written by hand ------------------------------------------------------------------------------------


def plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """A block with GELU and biases."""
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A block with SwiGLU."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mixture(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A mixture as in Mixtral: the two best experts of each token, whose weights add up to 1."""
    share, chosen = torch.softmax(F.linear(x, router).float(), -1).topk(TOP_K, -1)
    share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
    out = torch.zeros_like(x)
    for e in sorted(set(chosen.flatten().tolist())):
        token, slot = torch.where(chosen == e)
        weight = share[token, slot, None]
        out.index_add_(0, token, gated(x[token], gate[e], up[e], down[e]) * weight)
    return out


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`gated-64x256-16-fp32-1`: a function above, d_model and d_ff, tokens, dtype, threads."""

    function: str
    size: str
    tokens: int
    dtype: str
    threads: int

    @classmethod
    def of(cls, text: str) -> "Case":
        """From its text."""
        function, size, tokens, dtype, threads = text.split("-")
        return cls(function, size, int(tokens), dtype, int(threads))

    @property
    def source(self) -> str:
        """The block as `ffn bench` takes it."""
        return f"{self.size}:{'gelu' if self.function == 'plain' else 'swiglu'}"

    @property
    def words(self) -> list[str]:
        """The arguments of `ffn bench` for this case."""
        experts = ["--experts", str(EXPERTS), "--top-k", str(TOP_K)] if self.function == "mixture" else []
        return [
            self.source, *experts, "--tokens", str(self.tokens), "--dtype", self.dtype, "--threads", str(self.threads),
            "--cache", "warm", "--kernel", f"eager,hand={THIS}:{self.function}", "--baseline", "eager",
        ]  # fmt: skip


CASES = (
    "gated-64x256-1-fp32-1", "gated-64x256-16-fp32-1", "plain-64x256-16-fp32-1", "mixture-64x256-1-fp32-1",
    "gated-256x688-16-fp32-1", "plain-256x1024-16-bf16-1", "mixture-256x512-16-fp32-1", "gated-512x2048-16-fp32-1",
    "gated-512x2048-16-bf16-2", "plain-512x2048-512-fp32-2", "gated-256x688-512-fp32-2", "mixture-256x512-512-bf16-2",
)  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------


def calls(case: Case, seconds: float) -> dict[str, float]:
    """The times of `ffncli.kernel("eager")` over those of the function, called in turn in this process."""
    import ffncli
    from ffncli.block.dtypes import dtype
    from ffncli.block.recipe import FFNSpec, MoE, steps
    from ffncli.block.steps import parameters

    torch.set_num_threads(case.threads)
    d_model, d_ff = map(int, case.size.split("x"))
    moe = MoE(EXPERTS, TOP_K) if case.function == "mixture" else None
    spec = FFNSpec(d_model, d_ff, case.source.partition(":")[2], moe=moe)
    kind = getattr(torch, dtype(case.dtype).torch)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: [axis.size for axis in axes] for name, axes in parameters(steps(spec)).items()}
    weights = {n: (torch.randn(s, generator=generator) / s[-1] ** 0.5).to(kind) for n, s in shapes.items()}
    x, given = torch.randn(case.tokens, d_model, generator=generator).to(kind), tuple(weights.values())
    by_hand: Callable[..., Tensor] = globals()[case.function]
    kernel = ffncli.kernel("eager", spec, weights)
    with torch.no_grad():
        return in_turn(lambda: kernel(x), lambda: by_hand(x, *given), seconds)


def in_turn(one: Callable[[], object], other: Callable[[], object], seconds: float) -> dict[str, float]:
    """The median of the times of `one` over those of `other`, with its interval (order statistics), and other's time.

    Each has a turn of some milliseconds, then the other, which goes first in every second round.
    """
    for _ in range(3):
        count = max(1, round(TURN_S / max(_seconds(other, 3), _seconds(one, 3), 1e-9)))
    ratios: list[float] = []
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(ratios) < 16:
        if len(ratios) % 2:
            taken, least = _seconds(one, count), _seconds(other, count)
        else:
            least, taken = _seconds(other, count), _seconds(one, count)
        ratios.append(taken / least)
        times.append(least)
    ordered = sorted(ratios)
    edge = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    ends = {"low": ordered[edge], "high": ordered[-1 - edge]}
    return {"ratio": statistics.median(ratios), **ends, "time_s": statistics.median(times)}


def _seconds(call: Callable[[], object], count: int) -> float:
    """Seconds of a call, over `count` of them; each output is freed before the next call."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


_CHILD = """
from benchmarks.baseline import Case, calls
finish(**calls(Case.of(sys.argv[1]), float(sys.argv[2])))
"""


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Both comparisons of each case that lacks a row."""
    for text in options.cases:
        case = Case.of(text)
        if not kept.has(case=text, compared="bench"):
            same = {"case": text, "compared": "bench", "loadavg": os.getloadavg()[0]}
            rows = benched((*COLUMNS, "kernel"), *case.words, *how(options), **same)
            kept.add_all(row for row in rows if row["kernel"] == "hand")
        if not kept.has(case=text, compared="kernel"):
            load, start = os.getloadavg()[0], time.perf_counter()
            found = script.child(_CHILD, text, str(options.call_time))
            about = {"date": script.now(), "status": "ok", "loadavg": load, "wall_s": time.perf_counter() - start}
            kept.add({**found, **about, "case": text, "compared": "kernel"})
        print(f"{text}: done", flush=True)


# --- figures ----------------------------------------------------------------------------------------------------------


def judged(rows: Rows) -> list[Mark]:
    """The marks of the module's docstring; None where there is no row."""
    bench = [row for row in rows if row["compared"] == "bench"]
    long = [row for row in rows if (number(row, "time_s") or 0) >= LEAST_S and row["ratio"]]
    hand, kernel = ([row for row in long if row["compared"] == name] for name in ("bench", "kernel"))
    same = sum(row["verdict"] == "same" for row in bench)
    near = [row for row in hand if _far(row) <= WITHIN]
    most = max((float(row["ratio"]) for row in kernel), default=None)
    farthest = max(map(_far, hand), default=None)
    return [
        ("verdict `same`", f"{same} of {len(bench)}", "all", same == len(bench) if bench else None),
        (
            "function ÷ eager: an end of an interval, farthest from 1",
            "" if farthest is None else f"{farthest:.1%} ({len(near)} of {len(hand)} within)",
            f"at most {WITHIN:.0%} from 100 µs on",
            None if farthest is None else farthest <= WITHIN,
        ),
        (
            'ffncli.kernel("eager") ÷ function, largest',
            "" if most is None else f"{most:.3f}",
            f"at most {OF_KERNEL} from 100 µs on",
            None if most is None else most <= OF_KERNEL,
        ),
    ]


def _far(row: Row) -> float:
    """How far an interval reaches from 1."""
    return max(abs(float(row[name] or "nan") - 1) for name in ("low", "high"))


def summary(rows: Rows) -> tuple[str, bool]:
    """(Markdown, whether every mark is reached): the marks, then a line for each case."""
    if not rows:
        return "nothing is measured yet", False
    verdicts, lines = judged(rows), []
    for text in dict.fromkeys(row["case"] for row in rows):
        of = {row["compared"]: row for row in rows if row["case"] == text}
        case, seconds = Case.of(text), next((number(row, "time_s") for row in of.values()), None)
        lines.append((
            case.function, case.source, case.tokens, case.dtype, case.threads,
            "" if seconds is None else f"{seconds * 1e6:.0f} µs", ratio_text(of["bench"]) if "bench" in of else "",
            of["bench"]["verdict"] if "bench" in of else "", ratio_text(of["kernel"]) if "kernel" in of else "",
        ))  # fmt: skip
    head = ("function", "block", "tokens", "dtype", "threads", "time", "÷ eager", "verdict", "kernel ÷ function")
    text = "\n\n".join([script.marks(verdicts), table(head, lines), about_line(rows, "cpu", "python", "torch")])
    return text, all(reached for *_, reached in verdicts)


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch"), COLUMNS, measure, summary, cases=CASES, processes=5, max_time=20.0,
        precision="0.3%", call_time=5.0,
    )  # fmt: skip
