"""The step-by-step explanation: GELU(X·W1 + b1)·W2 + b2, 512 → 2048 → 512, and one vector of the word "Hello"."""

from math import sqrt

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.block.cost import cost
from ffncli.block.formulas import SCALAR
from ffncli.run.engine.prepare import Prepared
from ffncli.run.measure.gap import gap
from ffncli.run.texts.fact import (
    ROUNDING,
    Fact,
    agrees,
    compared,
    doubled,
    drawn,
    error,
    function,
    intermediates,
    number,
)

WORKED = (
    (0.12, "0.066"), (-0.08, "-0.037"), (0.25, "0.150"), (0.18, "0.103"),
    (0.19, "0.109"), (0.21, "0.115"), (-0.15, "-0.058"), (0.28, "0.168"),
)  # fmt: skip


def facts(ready: Prepared) -> tuple[Fact, ...]:
    """Check shapes and counts, one unit's dot product, worked values, and claims about positions and attention."""
    ready = doubled(ready)
    return (
        *_sizes(ready), *_dot_product(ready), *(_gelu(x, stated) for x, stated in WORKED), _phi(), _positions(ready),
        _attention(),
    )  # fmt: skip


def _sizes(ready: Prepared) -> list[Fact]:
    up, down = ready.weights["up.weight"], ready.weights["down.weight"]
    shapes = f"{list(up.T.shape)} and {list(down.T.shape)}"
    note = f"torch stores the transposes: up.weight {list(up.shape)}, down.weight {list(down.shape)}"
    matrices, whole = up.numel(), cost(ready.steps).params
    biases = f"{matrices:,} in each matrix, {whole - 2 * matrices:,} in the biases"
    return [
        compared("shapes of W1[in, out] and W2[in, out]", "[512, 2048] and [2048, 512]", shapes, note),
        compared("d_ff over d_model", "4", f"{up.shape[0] / up.shape[1]:g}"),
        Fact("parameters", f"{whole:,}", note=biases),
        Fact("inputs of 'Hello'", "0.146, 0.108, 0.192, ..., 0.11 are stated; the 508 values between are invented"),
    ]


def _dot_product(ready: Prepared) -> list[Fact]:
    """Write one hidden unit as a sum: with torch's indices, with the explanation's, and with this run's values."""
    tensors = intermediates(ready)
    x, w, bias = tensors["x"].flatten(0, -2)[0], ready.weights["up.weight"][0], ready.weights["up.bias"][0]
    terms = [f"{x[i]:.3f}·{number(float(w[i]))}" for i in (0, 1)]
    last = f"{x[-1]:.3f}·{number(float(w[-1]))}"
    total, printed = float(x @ w + bias), float(tensors["up"].flatten(0, -2)[0, 0])
    return [
        Fact("one unit, torch's W[out, in]", "up[0] = x[0]·W[0,0] + x[1]·W[0,1] + ... + x[511]·W[0,511] + b[0]"),
        Fact(
            "one unit, the explanation's W1[in, out]",
            "H[0] = X[0]·W1[0,0] + X[1]·W1[1,0] + ... + X[511]·W1[511,0] + b1[0]",
            note="the same values: W1 is W transposed; the explanation leaves b1[0] out of the sum",
        ),
        Fact(
            "with the values of this run",
            f"{' + '.join(terms)} + ... + {last} + {number(float(bias))} = {number(total)}",
            note=f"up[0] of the trace is {number(printed)}",
        ),
    ]


def _gelu(x: float, stated: str) -> Fact:
    """Check one worked value to the digits that the explanation gives; the note gives the correct f(x)/x."""
    exact = float(TABLE["gelu"].f(x, SCALAR))
    holds = number(exact, len(stated.rpartition(".")[2])) == stated
    note = f"f(x)/x = Φ(x) = {number(exact / x)}"
    if not holds:
        note += f", and {stated}/{x:g} = {number(float(stated) / x)}"
    return Fact(f"gelu({x:g})", number(exact), stated, "holds" if holds else "wrong", note,
                f"ffn activations gelu --expect {x:g}={stated}")  # fmt: skip


def _phi() -> Fact:
    exact = float(TABLE["gelu"].f(0.18, SCALAR)) / 0.18
    return compared("Φ(0.18)", "0.572", number(exact, 3), f"f(x)/x; more exactly {number(exact, 5)}",
                    "ffn activations gelu --at 0.18")  # fmt: skip


def _positions(ready: Prepared) -> Fact:
    """Run tokens through the block together, in another order, and one at a time."""
    f, x = function(ready.steps, ready.weights), drawn(6, 512)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    whole = f(x)
    moved = gap(f(x[order]), whole[order]).largest
    alone = gap(torch.cat([f(x[i : i + 1]) for i in range(6)]), whole).largest
    worst = max(moved, alone)
    return Fact(
        "every position goes through the same function on its own", f"max difference {error(worst, ROUNDING)}", "",
        agrees(worst, ROUNDING), "6 tokens together, in another order, and each alone",
    )  # fmt: skip


def _attention() -> Fact:
    """Compare f(2x) with 2 f(x) for one head of softmax attention with random weights."""
    width = 64
    x, (q, k, v) = drawn(8, width), drawn(3, width, width, seed=1) / sqrt(width)

    def attention(x: Tensor) -> Tensor:
        scores = (x @ q) @ (x @ k).T / sqrt(width)
        mixed: Tensor = scores.softmax(-1) @ (x @ v)
        return mixed

    doubled, twice = attention(2 * x), 2 * attention(x)
    share = float((doubled - twice).norm() / twice.norm())
    return Fact(
        "attention is linear", f"f(2x) is {100 * share:.0f} % away from 2 f(x)", "",
        agrees(share, ROUNDING),
        f"|f(2x) − 2 f(x)| / |2 f(x)| of one softmax head, 8 tokens, width {width}, random weights; attention is "
        "linear in its values only; two more of the texts make this claim",
    )  # fmt: skip
