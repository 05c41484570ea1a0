"""Why the activation matters: with `identity` a plain block is one matrix, with any other it is not linear.

Everything is in float64: these are statements about functions, and rounding would hide small differences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.block.rewrite import without_nonlinearity
from ffncli.block.steps import Linear, Norm, Step
from ffncli.run.engine.execute import run
from ffncli.run.engine.functions import function
from ffncli.run.verify.checks.case import CheckedBlock, DenseFFN
from ffncli.run.verify.checks.row import CheckRow, errors

_TOKENS = 4
_FAR_TOKENS, _FAR = (
    64,
    64.0,
)  # large inputs saturate units that a few small tokens leave linear, for example in a block of one unit
_ROWS = 64  # of the one matrix: all rows would take d_model / 64 times as long
_STACK = 3


def collapse(case: CheckedBlock) -> Iterator[CheckRow]:
    """With identity as its activation a plain block, and a stack of three, is one matrix; a gated one is quadratic."""
    judge, dense = case.judge("collapse", torch.float64), case.dense
    if case.layer.spec.moe:
        yield judge.skips(
            "mixture", "the router depends on the input, so the mixture is not a matrix; below: one expert"
        )
    if any(isinstance(step.op, Norm) for step in dense.steps):
        yield judge.skips(dense.label, "its norm over d_ff is not linear")
        return
    linear = _linear(dense)
    weights = {name: tensor.double() for name, tensor in linear.weights.items()}
    x = _drawn(dense, case.generator())
    if "gate" in {step.output for step in linear.steps}:
        yield from _quadratic(case, linear, weights, x)
        return
    for depth in (1, _STACK):
        matrix, offset = _one_matrix(linear.steps, weights, depth)
        output = x
        for _ in range(depth):
            output = run(linear.steps, weights, {linear.entry: output})
        label = "one block" if depth == 1 else f"a stack of {depth}"
        some = "" if len(matrix) == output.shape[-1] else f"the first {len(matrix)} rows of "
        note = f"{some}one matrix [{output.shape[-1]}, {x.shape[-1]}] and one vector"
        yield judge.equal(label, output[:, : len(matrix)], x @ matrix.T + offset, note)


def _quadratic(case: CheckedBlock, linear: DenseFFN, weights: dict[str, Tensor], x: Tensor) -> Iterator[CheckRow]:
    """Gate times up: not a matrix but a polynomial of degree 2, whose third differences are 0."""
    judge = case.judge("collapse", torch.float64)

    def f(points: Tensor) -> Tensor:
        return run(linear.steps, weights, {linear.entry: points})

    zero = torch.zeros_like(x)
    a, b = x, x.flip(0)
    note = "a gated block does not collapse: gate ⊙ up is quadratic; this is f(a) + f(b) - f(0) vs f(a + b)"
    yield judge.figure("gated, as a matrix", f(a) + f(b) - f(zero), f(a + b), note)
    note = "f(3x) = 3 f(2x) - 3 f(x) + f(0): a polynomial of degree 2"
    yield judge.equal("gated, as a quadratic", 3 * f(2 * x) - 3 * f(x) + f(zero), f(3 * x), note)


def _drawn(dense: DenseFFN, generator: torch.Generator, tokens: int = _TOKENS) -> Tensor:
    """Random tokens, as wide as the FFN's input."""
    return torch.randn(tokens, dense.x.shape[-1], generator=generator).to(dense.x.device, torch.float64)


def _linear(dense: DenseFFN) -> DenseFFN:
    """The dense FFN with identity as its activation and no limits; the activation's learned parameters are dropped."""
    steps = without_nonlinearity(dense.steps)
    names = {name for step in steps for name in step.parameters()}
    return replace(dense, steps=steps, weights={n: t for n, t in dense.weights.items() if n in names})


def _one_matrix(steps: tuple[Step, ...], weights: dict[str, Tensor], depth: int) -> tuple[Tensor, Tensor]:
    """(M [rows, d_model], c [rows]) with block(... block(x)) = M x + c in those rows, multiplied from the last Linear
    back to the first, so that every product has `rows` rows.
    """
    linears = [step for step in steps if isinstance(step.op, Linear)] * depth
    wide = weights[f"{linears[-1].output}.weight"].shape[0]
    first = weights[f"{linears[0].output}.weight"]
    matrix = torch.eye(min(wide, _ROWS), wide, dtype=first.dtype, device=first.device)
    offset = torch.zeros(len(matrix), dtype=first.dtype, device=first.device)
    for step in reversed(linears):
        if f"{step.output}.bias" in weights:
            offset = offset + matrix @ weights[f"{step.output}.bias"]
        matrix = matrix @ weights[f"{step.output}.weight"]
    return matrix, offset


def nonlinearity(case: CheckedBlock) -> Iterator[CheckRow]:
    """max |f(a + b) - f(a) - f(b) + f(0)|: 0 for every linear map with a bias, and only for those here."""
    judge, dense = case.judge("nonlinearity", torch.float64), case.dense
    generator = case.generator()
    near = _defects(dense, *(_drawn(dense, generator) for _ in range(2)))
    far: list[tuple[float, float | None]] | None = None
    dead = next((n for n, w in dense.weights.items() if w.dim() == 2 and not w.any()), None)
    gated = any(step.output == "gate" for step in dense.steps)
    normed = any(isinstance(step.op, Norm) for step in dense.steps)
    for at, name in enumerate(TABLE):
        linear = name == "identity" and not gated and not normed
        if dead and not linear:
            yield judge.skips(name, f"{dead} is all 0: nothing passes through the activation")
            continue
        defect, relative = near[at]
        if not linear and _is_small(defect, relative, judge.tolerance):
            far = far or _defects(dense, *(_FAR * _drawn(dense, generator, _FAR_TOKENS) for _ in range(2)))
            defect, relative = far[at]
        note = "linear: must be 0" if linear else "not linear: must not be 0"
        note = "quadratic with a gate: must not be 0" if name == "identity" and gated else note
        small = _is_small(defect, relative, judge.tolerance)
        yield CheckRow(judge.check, name, defect, relative, None, judge.tolerance, small == linear, note)


def _defects(dense: DenseFFN, a: Tensor, b: Tensor) -> list[tuple[float, float | None]]:
    """For each activation of the table max |f(a + b) - f(a) - f(b) + f(0)|, also relative to max |f(a + b)|."""
    defects = []
    for output in _with_every_activation(dense, torch.cat([a + b, a, b, torch.zeros_like(a)])):
        whole, one, other, zero = output.chunk(4)
        _, relative, _ = errors(one + other - zero, whole, torch.float64)
        defects.append((float((whole - one - other + zero).abs().max()), relative))
    return defects


def _is_small(defect: float, relative: float | None, tolerance: float) -> bool:
    return defect == 0 or (relative is not None and relative <= tolerance)


def _with_every_activation(dense: DenseFFN, points: Tensor) -> list[Tensor]:
    """The FFN's output for each activation of the table: the projections run once, for all of them."""
    at = next(i for i, step in enumerate(dense.steps) if step.output == "act")
    weights = {n: t.double() for n, t in dense.weights.items()}
    tensors = {dense.entry: points}
    for step in dense.steps[:at]:
        params = {name: weights[name] for name in step.parameters()}
        tensors[step.output] = run([step], params, {name: tensors[name] for name in step.inputs})
    driven = tensors[dense.steps[at].inputs[0]]
    acts = []
    for name, row in TABLE.items():
        learned = {
            n: torch.tensor([value], dtype=driven.dtype, device=driven.device) for n, value in row.learned.items()
        }
        acts.append(function(name, learned)(driven))
    after = {"act": torch.cat(acts)} | {n: t.repeat(len(TABLE), 1) for n, t in tensors.items() if n != dense.entry}
    names = {name for step in dense.steps[at + 1 :] for name in step.parameters()}
    rest = {n: t for n, t in weights.items() if n in names}
    return list(run(dense.steps[at + 1 :], rest, after).chunk(len(TABLE)))
