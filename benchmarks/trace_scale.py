"""What tracing costs, step by step: `ffn trace` of a block as wide as those of the largest dense models.

What: for every step of a block (d_model 8192, d_ff 28672, 8192 tokens, float32; gated silu and plain relu), the time of
the step in the trace, the time of its statistics and excerpt, and the time of the bare step: the same operation in a
process that only runs the block, with a new tensor for every result, as torch does by default. The time for rendering
the page and the process's peak memory, minus that of importing torch, are measured, too.

How: two fresh processes per case. One runs the command line, with timers around the generator of steps; it reads VmHWM
at its end. The other runs the steps alone. Times are CPU seconds of all threads, including system time, which other
programs on the machine change only a little. Memory is bounded by the weights, the two largest intermediates, and the
tensors of width d_model that exist at the same time: the block's input and, if there is a norm, its output.

`share` is the time of the statistics divided by the bare step; `over` is (step + statistics) ÷ bare step − 1, the extra
time for tracing the step. A matrix product takes long, so 10 % of it is enough for its statistics. An elementwise step
is one pass over memory, and its exact statistics are about as much work, so norms and elementwise steps miss the
target. Their `over` shows the real cost: the trace writes their results over their inputs, which saves new memory.

Targets: `share` is at most 10 % for every step, and for all steps together with printing; memory is at most its bound
plus 100 MB (for code and the workspace of matrix products). The exit code is 1 if a target is missed. Linux only. MB
and GB are powers of ten.

    python -m benchmarks.trace_scale [--scale X] [--case gated|plain] [--threads N] [--save FILE]

--scale multiplies d_model, d_ff and tokens (0.25 is quick); --threads 0 lets torch choose.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import script

D_MODEL, D_FF, TOKENS = 8192, 28672, 8192
LIMIT, ALLOWANCE = 0.10, 100e6

IMPORTS = "import torch, numpy; finish()"
# The generator of steps is timed from outside: the time between two of its events is for statistics and excerpts.
TRACE = """
import ffncli.run.engine.trace as traced
from ffncli.cli.main import main
from ffncli.show.output import Output

execute, record, show = traced.execute, traced._record, Output.show
steps, watched, printing = {}, {}, []

def timed_steps(*arguments):
    events = execute(*arguments)
    while True:
        start = time.process_time()
        try:
            event = next(events)
        except StopIteration:
            return
        end = time.process_time()
        steps[event.name] = end - start
        yield event
        watched[event.name] = time.process_time() - end
        del event

def timed_show(self, answer):
    start = time.process_time()
    show(self, answer)
    printing.append(time.process_time() - start)

traced.execute, Output.show = timed_steps, timed_show
try:
    main()
finally:
    finish(steps=steps, watched=watched, printing=printing[0] if printing else None)
"""
BARE = """
import torch
from ffncli.block.recipe import FFNSpec, steps
from ffncli.run.engine.execute import execute
from ffncli.run.engine.weights import random_weights

d_model, d_ff, tokens, threads, activation, gated, norm = json.loads(sys.argv[1])
if threads:
    torch.set_num_threads(threads)
block = steps(FFNSpec(d_model, d_ff, activation, gated=gated, **({"norm": norm} if norm else {})))
draw = torch.Generator().manual_seed(0)
weights, x = random_weights(block, draw), torch.randn(tokens, d_model, generator=draw)
times, start = {}, time.process_time()
with torch.no_grad():
    for event in execute(block, weights, {"x": x}):
        times[event.name] = time.process_time() - start
        del event
        start = time.process_time()
finish(steps=times)
"""


@dataclass(frozen=True)
class Case:
    """A block and its dimensions; `norm` is `rmsnorm`, for a norm before the block, or None."""

    name: str
    activation: str
    gated: bool
    norm: str | None
    d_model: int
    d_ff: int
    tokens: int

    @property
    def arguments(self) -> list[str]:
        """The arguments of `ffn trace`."""
        form = ["--gated"] if self.gated else ["--plain"]
        norm = ["--norm", self.norm] if self.norm else []
        tokens = ["--tokens", str(self.tokens), "--input", "randn"]
        return ["trace", f"{self.d_model}x{self.d_ff}:{self.activation}", *form, *norm, *tokens]

    @property
    def bound(self) -> int:
        """Bytes of the weights, the two largest intermediates, and the tensors of width d_model beside them."""
        weights = (3 if self.gated else 2) * self.d_model * self.d_ff
        narrow = (2 if self.norm else 1) * self.d_model
        return 4 * (weights + self.tokens * (2 * self.d_ff + narrow))


def measure(case: Case, base: int, threads: int | None) -> list[dict[str, Any]]:
    """Return a row for each step, in CPU seconds, and a last row for all steps together, which also has bytes."""
    traced = script.child(TRACE, *case.arguments, *(["--threads", str(threads)] if threads else []))
    shape = [case.d_model, case.d_ff, case.tokens, threads, case.activation, case.gated, case.norm]
    bare = script.child(BARE, json.dumps(shape))["steps"]

    def row(name: str, alone: float, step: float, watched: float, **more: object) -> dict[str, Any]:
        share = watched / alone
        return {
            "case": case.name, "d_model": case.d_model, "d_ff": case.d_ff, "tokens": case.tokens, "step": name,
            "bare_s": alone, "step_s": step, "statistics_s": watched, "share": share,
            "over": (step + watched) / alone - 1, "passed": share <= LIMIT, "printing_s": None, "peak_bytes": None,
            "bound_bytes": None, **more,
        }  # fmt: skip

    rows = [row(name, alone, traced["steps"][name], traced["watched"][name]) for name, alone in bare.items()]
    alone, step, watched = (sum(one[name] for one in rows) for name in ("bare_s", "step_s", "statistics_s"))
    peak, watched = traced["peak"] - base, watched + traced["printing"]
    whole = row("all", alone, step, watched, printing_s=traced["printing"], peak_bytes=peak, bound_bytes=case.bound)
    return [*rows, whole | {"passed": whole["passed"] and peak <= case.bound + ALLOWANCE}]


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of every case."""
    size = [max(1, round(width * options.scale)) for width in (D_MODEL, D_FF, TOKENS)]
    base = min(script.child(IMPORTS)["peak"] for _ in range(3))
    cases = {"gated": ("silu", True, "rmsnorm"), "plain": ("relu", False, None)}
    for name in options.case:
        yield from measure(Case(name, *cases[name], *size), base, options.threads)


if __name__ == "__main__":
    script.main_once(__doc__, ("torch",), measured, scale=1.0, case=("gated", "plain"), threads=0)
