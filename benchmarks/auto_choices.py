"""Does `--kernel auto` pick the fastest kernel? Cases are drawn after the code is frozen, from a seed it cannot know.

What: `ffn bench` of all kernels that auto may choose, and of auto. The choice is right if the interval of auto's time
divided by the fastest kernel's time reaches 1.00 or below, and auto is not slower than eager beyond the interval.
Target: 95 % of 40 cases.

Cases: d_model 128 to 4096, d_ff 1 to 4 times d_model, gated or plain, 1 to 512 tokens, float32 and bfloat16, one thread
or two. A case in which a call of eager takes more than a fifth of a second is replaced by another one.

    python -m benchmarks.auto_choices --seed TEXT [--save FILE]    # TEXT: the commit, say; about 40 minutes
    python -m benchmarks.auto_choices --summary FILE
"""

import argparse
import random
from collections.abc import Sequence

from benchmarks import kernel_map, script
from benchmarks.kernel_map import beside, fastest, least_seconds
from benchmarks.script import Kept, Row
from ffncli.bench.records import Case
from ffncli.bench.request.grid import cached
from ffncli.block.recipe import FFNSpec

LONGEST = 0.2  # estimated seconds of the longest call
# FLOP/s of a core, for the estimate: fixed, so that every machine draws the same cases. bfloat16 is slow in torch on a
# processor without bfloat16 instructions.
RATE = {"fp32": 60e9, "bf16": 9e9}
COLUMNS = (*kernel_map.COLUMNS, "activation", "gated", "case", "draw")
KERNELS = ("auto", "eager", "packed", "inplace", "conv1x1", "onednn", "onednn_packed", "mkl", "numpy")


def drawn(seed: str, count: int) -> list[Case]:
    """Draw `count` different cases from the seed."""
    draw, cases = random.Random(seed), dict[str, Case]()
    while len(cases) < count:
        d_model = 64 * round(2 ** draw.uniform(1, 6))
        d_ff = 32 * round(d_model * draw.uniform(1, 4) / 32)
        tokens = round(2 ** draw.uniform(0, 9))
        dtype, threads = draw.choice(("fp32", "bf16")), draw.choice((1, 2))
        spec = FFNSpec(d_model, d_ff, draw.choice(("swiglu", "geglu", "gelu", "relu")))
        matrices = 3 if spec.gated else 2
        if 2 * matrices * tokens * d_model * d_ff / RATE[dtype] / threads <= LONGEST:
            label = f"{d_model}x{d_ff}:{spec.activation}{'+gated' if spec.gated else ''}"
            case = Case(label, label, spec, tokens, dtype, cache=cached("auto", tokens), threads=threads)
            cases[case.key] = case
    return list(cases.values())


def verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    """Return whether auto was right in a case, and text with its choice, the fastest kernel and their ratio."""
    auto = next(row for row in rows if row["kernel"] == "auto")
    others = [row for row in rows if row["kernel"] != "auto"]
    best, eager = fastest(others), next(row for row in others if row["kernel"] == "eager")
    if auto["status"] != "ok" or best is None:
        return False, f"auto is {auto['status']}: {auto['note']}"
    ratio, low, high = beside(auto, best)
    chosen = auto["note"].partition(",")[0]
    text = f"{chosen}, fastest {best['kernel']}: {ratio:.3f} [{low:.3f}, {high:.3f}]"
    return low <= 1.0 and beside(auto, eager)[1] <= 1.0, text


def summary(rows: Sequence[Row]) -> str:
    """Return the share of right choices, and a line for every case."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = ("d_model", "d_ff", "activation", "gated", "tokens", "dtype", "threads")
        cases.setdefault(tuple(row[name] for name in key), []).append(row)
    lines, right = [], 0
    for case, group in cases.items():
        good, text = verdict(group)
        right += good
        lines.append(f"{'right' if good else 'WRONG'}  {' '.join(case)}: {text}")
    share = f"{100 * right / len(cases):.0f} %" if cases else "none"
    title = f"Right in {right} of {len(cases)} cases ({share}); target 95 %."
    return script.folded(title, "\n".join(["```text", *lines, "```"]))


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Measure every drawn case that has no rows yet."""
    for case in drawn(options.seed, options.count):
        if kept.has(case=case.key):
            continue
        form = "--gated" if case.spec.gated else "--plain"
        answer = script.bench(
            f"{case.spec.d_model}x{case.spec.d_ff}:{case.spec.activation}", form, "--tokens", str(case.tokens),
            "--dtype", case.dtype, "--device", "cpu", "--threads", str(case.threads), "--kernel", ",".join(KERNELS),
            *script.how(options),
        )  # fmt: skip
        least = least_seconds(answer.blocks)
        for row in answer.rows:
            more = {"case": case.key, "least_s": least.get((row["case"], row["kernel"])), "draw": options.seed}
            kept.add({name: row.get(name, "") for name in COLUMNS} | more)
        print(case.key, flush=True)


if __name__ == "__main__":
    packages = ("ffncli", "torch", "numpy")
    script.main(__doc__, packages, COLUMNS, measure, summary, seed="", count=40, processes=5, max_time=8.0)
