"""A notebook that steps through a tiny block: Linear(4 → 8), ReLU, Dropout(0.1), Linear(8 → 4), on arange(24)."""

from collections.abc import Mapping
from dataclasses import replace
from math import comb

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffncli.block.recipe import without_nonlinearity
from ffncli.run.engine.execute import Mode, run
from ffncli.run.engine.prepare import Prepared
from ffncli.run.measure.gap import gap
from ffncli.run.texts.fact import (
    ROUNDING,
    Block,
    Fact,
    Verdict,
    agrees,
    compared,
    departure,
    doubled,
    drawn,
    error,
    function,
    intermediates,
    number,
    table,
)

P = 0.1


def facts(ready: Prepared) -> tuple[Fact, ...]:
    """Check the values that the notebook prints, and its conclusions."""
    ready = doubled(ready)
    tensors = intermediates(ready)
    return (
        *_printed(tensors), *_counts(tensors), *_calls(ready, tensors), *_nonlinear(ready, tensors), *_bias(ready),
        _line(),
    )  # fmt: skip


def _printed(tensors: Mapping[str, Tensor]) -> list[Fact]:
    """Check the slices and the ranges that the notebook prints."""
    first = " ".join(number(v) for v in tensors["up"][0, 0].tolist())
    stated = "-2.2255 -0.1673 1.5966 -1.5649 -0.1716 0.4000 0.1738 -0.5781"
    out = [compared("pre-activations up[0, 0]", stated, first)]
    out += [Fact(f"{name}[:, :, :2]", table(tensors[name][:, :, :2])) for name in ("x", "up", "act", "dropout", "down")]
    low, high = (f"{number(float(tensors[n].min()))} … {number(float(tensors[n].max()))}" for n in ("x", "down"))
    return [*out, Fact("range of the input", low), compared("range of the output", "-2.1799 … 8.1412", high)]


def _counts(tensors: Mapping[str, Tensor]) -> list[Fact]:
    up, act, after = tensors["up"], tensors["act"], tensors["dropout"]
    live = int((act != 0).sum())
    dropped = int(((act != 0) & (after == 0)).sum())
    zeros, of = int((after == 0).sum()), after.numel()
    # The probability of dropping at least `dropped` of the live values, each with probability P.
    tail = sum(comb(live, k) * P**k * (1 - P) ** (live - k) for k in range(dropped, live + 1))
    share = f"{100 * dropped / live:.0f} %"
    kept = f"{number(float(act[0, 0, 5]))} → {number(float(after[0, 0, 5]))}"
    why = (
        f"then {zeros} of {of} values are zero ({100 * zeros / of:.0f} %), most of them from ReLU; 10 % is the mean "
        f"over many masks: {100 * tail:.0f} % of masks drop {dropped} or more of {live}"
    )
    return [
        compared("negatives before ReLU", "15", str(int((up < 0).sum()))),
        compared("negatives after ReLU", "0", str(int((act < 0).sum()))),
        compared("zeros before and after dropout", "15 → 21", f"{int((act == 0).sum())} → {zeros}"),
        compared("kept values are scaled by 1/(1−p)", "0.4000 → 0.4444", kept),
        Fact(
            "zeros that dropout makes", f"{dropped} of {live} live values ({share})", "~10 %",
            "holds" if abs(dropped / live - P) < P / 4 else "wrong", why,
        ),
    ]  # fmt: skip


def _calls(ready: Prepared, tensors: Mapping[str, Tensor]) -> list[Fact]:
    """Compare a step-by-step run with one call of nn.Module: without dropout, with the same mask, with another mask."""
    x = tensors["x"]
    with torch.random.fork_rng(devices=[]):  # nn.Linear and nn.Dropout draw from torch's own generator
        module = _module(ready.weights)
        quiet = gap(module.eval()(x), run(ready.steps, ready.weights, {"x": x})).largest
        torch.manual_seed(0)
        once, again = module.train()(x), module(x)
        torch.manual_seed(0)  # the same random numbers, so the same mask
        mask = functional.dropout(torch.ones_like(tensors["act"]), P) != 0
    same = gap(once, run(ready.steps, ready.weights, {"x": x}, Mode(True, {"dropout": mask}))).largest
    naive = gap(once, again).largest
    why = "each call draws its own mask; two calls agree in eval mode, or if both have the same mask"
    return [
        Fact("step by step = module, eval mode", f"{quiet < ROUNDING}, max difference {error(quiet, ROUNDING)}"),
        Fact(
            "step by step = module, train mode, same mask",
            f"{same < ROUNDING}, max difference {error(same, ROUNDING)}",
        ),
        Fact(
            "step by step = module, two calls in train mode", f"{naive < ROUNDING}, max difference {number(naive)}",
            "False", "depends" if same < ROUNDING < naive else "wrong", why,
        ),
    ]  # fmt: skip


def _module(weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the same block from torch's own modules."""
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(P), nn.Linear(8, 4)).double()
    module.load_state_dict({
        "0.weight": weights["up.weight"], "0.bias": weights["up.bias"],
        "3.weight": weights["down.weight"], "3.bias": weights["down.bias"],
    })  # fmt: skip
    return module.requires_grad_(False)


def _nonlinear(ready: Prepared, tensors: Mapping[str, Tensor]) -> list[Fact]:
    """Check that the block is not linear, and check the evidence that the notebook gives for it."""
    a, b = tensors["x"], drawn(2, 3, 4)
    f, linear = function(ready.steps, ready.weights), function(without_nonlinearity(ready.steps), ready.weights)
    bent, straight = departure(f, a, b), departure(linear, a, b)
    y = linear(a)
    span = f"{number(float(y.min()))} … {number(float(y.max()))}"
    shift = gap(f(a + 1), f(a)).largest
    return [
        Fact(
            "the ranges show that the block is non-linear",
            f"max |f(a+b) − f(a) − f(b) + f(0)| = {number(bent)} with relu, {error(straight, ROUNDING)} with identity",
            "", "wrong" if straight < ROUNDING < float((y.max() - a.max()).abs()) else "holds",
            f"ranges show nothing: with identity in place of relu the output has {span}, just as far from the input's",
        ),
        Fact(
            "biases bring shift invariance", f"max |f(x + 1) − f(x)| = {number(shift)}", "", agrees(shift, ROUNDING),
            "a bias moves where each unit bends; it does not undo a shift of the input",
        ),
    ]  # fmt: skip


def _bias(ready: Prepared) -> list[Fact]:
    """Run a zero input with and without biases."""
    zero = torch.zeros(2, 3, 4, dtype=torch.float64)
    without = {n: torch.zeros_like(t) if n.endswith("bias") else t for n, t in ready.weights.items()}
    row = _row(function(ready.steps, ready.weights), zero)
    bare = float(function(ready.steps, without)(zero).abs().max())
    trained = run(ready.steps, ready.weights, {"x": zero}, replace(ready.mode, train=True))
    apart = float((trained.flatten(0, -2) - trained[0, 0]).abs().max())
    differs: Verdict = "holds" if float(row.abs().max()) > ROUNDING else "wrong"
    return [
        Fact("with biases a zero input does not give zero", f"every row {table(row)}", "", differs),
        Fact("without biases a zero input gives zero", f"max |f(0)| = {bare:g}", "", agrees(bare, ROUNDING)),
        Fact(
            "zero input in train mode",
            f"equal rows come out up to {number(apart)} apart",
            note="as in the notebook: each row has its own mask, but the block is the same",
        ),
    ]


def _row(f: Block, zero: Tensor) -> Tensor:
    """Return the one row that all tokens of a zero input share."""
    out = f(zero).flatten(0, -2)
    assert gap(out, out[:1].expand_as(out)).largest < ROUNDING
    return out[0]


# Two classes of points in the plane, for w = (1, 1); their sums x + y match the notebook's interval for b.
POINTS = (((0.0, 0.0), 0), ((1.0, 1.0), 0), ((2.0, 2.0), 1), ((3.0, 1.0), 1))


def _line() -> Fact:
    """Find the range of b in which the line w·x + b = 0 separates the classes."""
    low = max(x + y for (x, y), label in POINTS if label == 0)
    high = min(x + y for (x, y), label in POINTS if label == 1)
    wrong = [point for point, label in POINTS if (sum(point) - 1 > 0) != bool(label)]
    verdict: Verdict = "wrong" if wrong else "holds"
    where = ", ".join(f"({x:g}, {y:g})" for x, y in wrong)
    return Fact(
        "a bias of −1 separates the two classes", f"−{high:g} < b < −{low:g} does", "", verdict,
        f"b = −1 puts {where} on the wrong side; w = (1, 1); the points are (0, 0), (1, 1) in class 0 and "
        "(2, 2), (3, 1) in class 1",
    )  # fmt: skip
