"""Do the shares of `ffn precision` add up, and how large is the rest, in the FFNs of many model families?

What: the FFN of one catalog model of each of 40 families (model types of transformers), with its activation, gate,
biases, norm and limits, at widths 256 and 512, and in a mixture 8 experts of which 2 are chosen; random weights, 64
tokens. Weights and inputs are rounded in every format. For each format:

- `gap`: the distance of the sum of all shares from 1
- `rest`: the share of E = ‖e‖² that tensors cause only together; target: at most 5 % of E in formats of 8 bits
- `by_hand`, for the formats with a power of two per block (mxfp8) in dense families with a plain activation: the rest,
  from this script's own formulas in float64, which share no code with ffncli

    python -m benchmarks.precision_families [--save FILE]

docs/precision.md quotes benchmarks/results/precision_families.csv.
"""

import argparse
from collections.abc import Iterator
from itertools import combinations
from math import fsum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import ffncli
from benchmarks import script
from benchmarks.script import Kept, Mark, Rows
from ffncli.block.steps import Activation
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.run.trace.session import Session

RESULTS = script.RESULTS / "precision_families.csv"
EIGHT = ("fp8", "int8", "q8_0", "mxfp8:rceil", "mxfp8")
FOUR = ("nvfp4", "mxfp4", "int4:g32", "q4_0")
SIZES: dict[str, Any] = {"d_model": 256, "d_ff": 512, "tokens": 64}
COLUMNS = (
    "family", "model", "format", "error_rel", "x", "W1", "W3", "hidden", "W2", "pairs", "rest", "gap", "by_hand",
)  # fmt: skip
CLIPS = "mxfp8"  # its default rule clips values up to 512 to 448
MARK, APART = 0.05, 0.001
ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
               "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
               "relu2": lambda x: functional.relu(x).square()}  # fmt: skip


def families() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each family, its first model in the catalog, and the model's options at a small width."""
    seen = set()
    for name in catalog.names():
        found = catalog.find(name)
        assert found is not None
        family = found.model.model_type or "transformer"
        if family not in seen:
            seen.add(family)
            moe = any(group.spec.moe for group in found.model.groups)
            yield family, name, SIZES | ({"experts": 8, "top_k": 2} if moe else {})


# --- the rest by hand -------------------------------------------------------------------------------------------------


def mxfp8(x: Tensor, rule: str) -> Tensor:
    """Round the rows of x to MXFP8: E4M3 with a power of two for 32 values, from the exponent of the largest value
    (floor), or the least with which the largest is not clipped (rceil). Values beyond 448 are clipped."""
    blocks = x.float().double().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    exponent = torch.frexp(largest).exponent - 1 - 8  # 2^8 is the power of two of 448
    if rule == "rceil":
        exponent = (largest / 448).log2().ceil().int()
    codes = torch.ldexp(blocks, -exponent).clamp(-448, 448)
    step = torch.ldexp(torch.ones_like(codes), torch.frexp(codes).exponent.clamp(min=-5) - 4)  # three bits of mantissa
    return torch.ldexp((codes / step).round() * step, exponent).flatten(-2)


def by_hand(session: Session, rule: str) -> float | None:
    """Return the rest of a dense FFN, computed with the formulas above; None for other blocks."""
    steps = {step.output: step for step in session.prepared.steps}
    w = {name: tensor.double() for name, tensor in session.prepared.weights.items()}
    act = steps["act"].op if "act" in steps else None
    bare = isinstance(act, Activation) and (act.low, act.high, act.most, act.soft_cap, act.plus) == (*[None] * 4, 0)
    others = {"lift", "router", "sub_norm"} & {*steps}
    if not isinstance(act, Activation) or not bare or others or act.function not in ACTIVATIONS:
        return None
    entering, f = session[steps["up"].inputs[0]].double(), ACTIVATIONS[act.function]
    names = ("x", "up", "down", "hidden", *(("gate",) if "gate" in steps else ()))

    def output(*chosen: str) -> Tensor:
        def near(name: str, tensor: Tensor) -> Tensor:
            return mxfp8(tensor, rule) if name in chosen else tensor

        def linear(name: str, x: Tensor) -> Tensor:
            return x @ near(name, w[f"{name}.weight"]).T + w.get(f"{name}.bias", torch.zeros(()))

        x = near("x", entering)
        hidden = f(linear("gate", x)) * linear("up", x) if "gate" in steps else f(linear("up", x))
        return linear("down", near("hidden", hidden))

    exact = output()
    error, alone = output(*names) - exact, [output(name) - exact for name in names]
    parts = [float(one.square().sum()) for one in alone] + [2 * float((a * b).sum()) for a, b in combinations(alone, 2)]
    return 1 - fsum(parts) / float(error.square().sum())


# --- rows and figures -------------------------------------------------------------------------------------------------


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Add the rows of 40 families."""
    done = dict.fromkeys(row["family"] for row in kept.rows)
    for family, model, how in families():
        if family in done or len(done) == options.families:
            continue
        try:
            rows = ffncli.precision(model, dtype=[*EIGHT, *FOUR], what="both", **how).rows
        except FFNError as error:
            print(f"{model}: {error}", flush=True)
            continue
        done[family] = None
        session = ffncli.trace(model, keep=True, **how)
        rules = {"mxfp8": "floor", "mxfp8:rceil": "rceil"}
        kept.add_all(
            {
                "family": family, "model": model, "format": row.format, "error_rel": row.error_rel, **row.by_tensor,
                "pairs": fsum(share for share in row.by_pair.values() if share is not None), "rest": row.rest,
                "gap": abs(fsum(row.shares) - 1),
                "by_hand": by_hand(session, rules[row.format]) if row.format in rules else None,
            }
            for row in rows
        )  # fmt: skip
        print(f"{family}: {', '.join(f'{row.format} {100 * (row.rest or 0):.2g} %' for row in rows)}", flush=True)


def summary(rows: Rows) -> tuple[str, bool]:
    """Return the figures of every format; whether the shares add up, and the rest is small where it should be."""
    count, gap = len({row["family"] for row in rows}), max(float(row["gap"]) for row in rows)
    marks: list[Mark] = [
        (f"{count} families: the sum of all shares, its distance from 1", f"{gap:.1g}", "≤ 1e-12", gap <= 1e-12)
    ]
    for name in (*EIGHT, *FOUR):
        rests = [abs(float(row["rest"])) for row in rows if row["format"] == name]
        held, judged = sum(rest <= MARK for rest in rests), name in EIGHT and name != CLIPS
        figure = f"{held} of {len(rests)}; the largest {max(rests):.1%}"
        met = held == len(rests) or not judged
        marks.append((f"{name}: families with a rest of at most 5 %", figure, "all" if judged else "", met))
    apart = [abs(float(row["by_hand"]) - float(row["rest"])) for row in rows if row["by_hand"]]
    met = max(apart) <= APART
    marks.append((f"difference from the rest by hand, {len(apart)} rows", f"{max(apart):.1g}", f"≤ {APART}", met))
    return script.marks(marks), all(good for *_, good in marks)


if __name__ == "__main__":
    script.main(__doc__, ("ffncli", "torch"), COLUMNS, measure, summary, families=40)
