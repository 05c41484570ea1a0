"""Notes on the feed-forward layer: why it is not linear, its form as convolutions, and the final layer of the model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.cost import cost
from ffncli.block.recipe import without_nonlinearity
from ffncli.block.steps import Step, ffn_steps, parameters
from ffncli.run.engine.execute import function as activation
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import gap
from ffncli.run.texts.fact import (
    ROUNDING,
    Fact,
    agrees,
    compared,
    departure,
    doubled,
    drawn,
    error,
    function,
    intermediates,
    number,
)

WIDTHS = (4, 16, 64, 256)


def facts(ready: Prepared) -> tuple[Fact, ...]:
    """Check the block, its collapse to a linear map, approximation, convolutions, the final layer."""
    ready = doubled(ready)
    tensors = intermediates(ready)
    steps = ffn_steps(ready.steps)
    return (
        _widths(steps), *_convolutions(ready, tensors), *_collapse(steps, ready.weights),
        *map(_approximation, ("relu", "sigmoid", "tanh", "identity")), *_final(ready, tensors),
    )  # fmt: skip


def _widths(steps: Sequence[Step]) -> Fact:
    into, out = (parameters(steps)[name] for name in ("up.weight", "down.weight"))
    return compared("widths", "512 → 2048 → 512", f"{into[1].size} → {into[0].size} → {out[0].size}")


def _convolutions(ready: Prepared, tensors: Mapping[str, Tensor]) -> list[Fact]:
    """Compare two Conv1d of kernel size 1 over (B, d_model, L) with the block's steps."""
    weights, rows = ready.weights, tensors["x"]
    x = (rows if rows.dim() == 3 else rows.unsqueeze(0)).transpose(1, 2)
    hidden = functional.conv1d(x, weights["up.weight"].unsqueeze(-1), weights["up.bias"]).relu()
    y = functional.conv1d(hidden, weights["down.weight"].unsqueeze(-1), weights["down.bias"])
    apart = gap(y.transpose(1, 2).reshape(tensors["down"].shape), tensors["down"]).relative
    flops = cost(ffn_steps(ready.steps)).flops
    return [
        Fact(
            "the block equals two 1×1 convolutions over (B, d_model, L)",
            f"relative difference {error(apart, ROUNDING)}", "", agrees(apart, ROUNDING), f"on {tuple(x.shape)}",
        ),
        Fact(
            "as 1×1 convolutions it can be faster", f"{flops:,} FLOPs per token either way", "", "depends",
            "the same work in a different memory order: which form is faster depends on machine, sizes and dtype, "
            "so measure it there",
        ),
    ]  # fmt: skip


def _collapse(steps: Sequence[Step], weights: Mapping[str, Tensor]) -> list[Fact]:
    """Show that without a non-linearity one block is one matrix and one bias, and so is a stack of three."""
    linear = without_nonlinearity(steps)
    generator = torch.Generator().manual_seed(1)
    blocks = [weights, *(random_weights(steps, generator, torch.float64) for _ in range(2))]
    x, bent = drawn(4, 512), function(steps, weights)
    deep, matrix, bias, out = x, torch.eye(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64), []
    for block in blocks:
        deep = function(linear, block)(deep)
        matrix = block["down.weight"] @ block["up.weight"] @ matrix
        bias = block["down.weight"] @ (block["up.weight"] @ bias + block["up.bias"]) + block["down.bias"]
        out.append(gap(x @ matrix.T + bias, deep).relative)
    curved = departure(bent, x, drawn(4, 512, seed=1))
    note = f"one matrix [512, 512] and one bias; with relu max |f(a+b) − f(a) − f(b) + f(0)| is {number(curved)}"
    return [
        Fact(
            "without a non-linearity one block is one linear map", f"relative difference {error(out[0], ROUNDING)}",
            "", agrees(out[0], ROUNDING), note,
        ),
        Fact(
            "without a non-linearity a stack of three is one linear map",
            f"relative difference {error(out[2], ROUNDING)}", "", agrees(out[2], ROUNDING),
            "the W2·W1 of all three, multiplied together",
        ),
    ]  # fmt: skip


def _approximation(name: str) -> Fact:
    """Measure how well one hidden layer of growing width approximates sin(2x) on [-3, 3].

    The hidden layer is random, and only the output layer is fitted, by least squares. This shows that the error falls,
    but training could be more accurate.
    """
    x = torch.linspace(-3, 3, 400, dtype=torch.float64).unsqueeze(-1)
    target, rmse = (2 * x).sin(), []
    for width in WIDTHS:
        # Slopes are random; every unit has its kink somewhere on the interval.
        slopes, bends = (
            2 * drawn(1, width, seed=2),
            6 * torch.rand(1, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 3,
        )
        hidden = torch.cat([activation(name)(slopes * (x - bends)), torch.ones_like(x)], 1)
        fit = torch.linalg.lstsq(hidden, target, rcond=1e-10, driver="gelsd").solution
        rmse.append(float((hidden @ fit - target).square().mean().sqrt()))
    near = rmse[-1] < 0.01
    errors = ", ".join(f"{'below 0.001' if e < 1e-3 else f'{e:.2g}'} at {w}" for e, w in zip(rmse, WIDTHS, strict=True))
    if name == "identity":
        return Fact("the same with identity units", f"rmse {errors}", note="these units can only form a line")
    return Fact(
        f"one hidden layer of enough {name} units approximates any continuous function",
        f"rmse {errors}", "", "holds" if near else "wrong",
        "sin(2x) on [-3, 3], random hidden layer, fitted output layer; it holds on a bounded interval, and training "
        f"need not find such weights; with training: ffn approximate --activation {name}",
    )  # fmt: skip


def _final(ready: Prepared, tensors: Mapping[str, Tensor]) -> list[Fact]:
    """Check logits = W·h + b and their softmax."""
    if "probs" not in tensors:
        return []
    weight = ready.weights["logits.weight"]
    vocab = weight.shape[0]
    apart = gap(tensors["probs"].sum(-1), torch.ones(tensors["probs"].shape[:-1], dtype=torch.float64)).largest
    same = bool((tensors["probs"].argmax(-1) == tensors["logits"].argmax(-1)).all())
    return [
        compared("W of the final layer", f"V×512 = [{vocab}, 512]", f"V×512 = {list(weight.shape)}"),
        Fact(
            "softmax makes probabilities of the logits", f"sums differ from 1 by {error(apart, ROUNDING)}",
            "", agrees(apart, ROUNDING),
        ),
        Fact(
            "the likeliest token has the largest logit", f"argmax of probs = argmax of logits: {same}", "",
            "holds" if same else "wrong", "the token tables mark the argmax, the top-k set and the top-p set",
        ),
    ]  # fmt: skip
