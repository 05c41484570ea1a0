"""Properties of every block: its tokens are independent; without its activation it is one matrix; zero stays zero."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.recipe import with_biases, without_nonlinearity
from ffncli.block.steps import Linear, Norm, Step, parameters
from ffncli.kernels import built_in
from ffncli.run.engine.execute import execute, function, run
from ffncli.run.engine.reference import output_and_experts, same_experts
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow, DenseFFN, errors, not_finite

_ALONE = 4  # tokens to run one at a time; few, because each reads all weights


def convolution(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check that Conv1d layers with kernel 1 over [1, d_in, tokens] equal every Linear, and together the whole FFN."""
    judge, dense = case.judge("convolution"), case.dense
    inside = "" if dense.label == "the FFN" else f"{dense.label}, "
    tensors = {dense.entry: dense.x}
    for event in execute(dense.steps, dense.weights, tensors):
        tensors[event.name] = event.tensor
        if isinstance(event.step.op, Linear):
            weight, bias = dense.weights[f"{event.name}.weight"], dense.weights.get(f"{event.name}.bias")
            turned = functional.conv1d(tensors[event.step.inputs[0]].T[None], weight[..., None], bias)
            yield judge.equal(f"{inside}{event.name}", turned[0].T, event.tensor)
    conv = built_in("conv1x1")
    reason = conv.refuses(case.ffn)
    if reason:
        yield judge.skips("whole FFN", f"conv1x1 {reason}")
        return
    output = conv.build(case.ffn, case.device, case.dtype)(case.x, conv.prepare(case.ffn, case.ffn_weights))
    yield judge.equal("whole FFN", output, run(case.ffn, case.ffn_weights, {case.entry: case.x}))


def tokens(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check that a token's output depends neither on other tokens nor on its position."""
    judge, n = case.judge("tokens"), case.tokens
    if n < 2:
        yield judge.skips("permuted", "only one token: give --tokens 2 or more")
        return
    whole, went = output_and_experts(case.steps, case.weights, case.inputs)

    def compared(subject: str, order: Tensor, parts: list[Tensor]) -> CheckRow:
        """Run each of `parts` alone, and compare with the same tokens, at positions `order`, of the full run."""
        made = [
            output_and_experts(case.steps, case.weights, {k: t[part] for k, t in case.inputs.items()}) for part in parts
        ]
        output = torch.cat([tensor for tensor, _ in made])
        there = torch.cat([e for _, e in made if e is not None]) if went is not None else None
        same, note = same_experts(there, None if went is None else went[order], len(order))
        return judge.equal(subject, output[same], whole[order][same], note)

    shuffled = torch.randperm(n, generator=case.generator()).to(case.device)
    every = torch.arange(n, device=case.device)
    yield compared("permuted", shuffled, [shuffled])
    yield compared("split in two", every, [every[: n // 2], every[n // 2 :]])
    few = every[:_ALONE]
    label = "one at a time" if n <= _ALONE else f"first {_ALONE}, one at a time"
    yield compared(label, few, [token[None] for token in few])


# Why the activation matters: with `identity` a plain block is one matrix; with any other activation it is not linear.
# These checks run in float64: they are statements about functions, and rounding would hide small differences.

_TOKENS = 4
_FAR_TOKENS, _FAR = (
    64,
    64.0,
)  # large inputs saturate units that a few small tokens leave linear, such as the unit of a one-unit block
_ROWS = 64  # number of rows of the matrix to compute; all rows would take d_model / 64 times as long
_STACK = 3


def collapse(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check that with identity as activation plain blocks are one matrix, and a gated block is quadratic."""
    judge, dense = case.judge("collapse", torch.float64), case.dense
    if case.layer.spec.moe:
        yield judge.skips(
            "mixture",
            "the routes depend on the input, so the mixture is not one matrix; the rows below check one expert",
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
    """Check that gate times up is not a matrix but a polynomial of degree 2, whose third differences are 0."""
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
    """Draw random tokens, as wide as the FFN's input."""
    return torch.randn(tokens, dense.x.shape[-1], generator=generator).to(dense.x.device, torch.float64)


def _linear(dense: DenseFFN) -> DenseFFN:
    """Return the dense FFN with identity as its activation, without limits or learned parameters."""
    steps = without_nonlinearity(dense.steps)
    names = {name for step in steps for name in step.parameters()}
    return replace(dense, steps=steps, weights={n: t for n, t in dense.weights.items() if n in names})


def _one_matrix(steps: tuple[Step, ...], weights: dict[str, Tensor], depth: int) -> tuple[Tensor, Tensor]:
    """Return (M [rows, d_model], c [rows]) such that the first rows of block(... block(x)) equal M x + c. The matrix
    product starts with the last Linear, so every intermediate matrix has only `rows` rows."""
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
    """Check that max |f(a + b) - f(a) - f(b) + f(0)| is 0 if f is a linear map with a bias, and not 0 otherwise."""
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
    """Return, for each activation, max |f(a + b) - f(a) - f(b) + f(0)| and that error relative to max |f(a + b)|."""
    defects = []
    for output in _with_every_activation(dense, torch.cat([a + b, a, b, torch.zeros_like(a)])):
        whole, one, other, zero = output.chunk(4)
        _, relative, _ = errors(one + other - zero, whole, torch.float64)
        defects.append((float((whole - one - other + zero).abs().max()), relative))
    return defects


def _is_small(defect: float, relative: float | None, tolerance: float) -> bool:
    return defect == 0 or (relative is not None and relative <= tolerance)


def _with_every_activation(dense: DenseFFN, points: Tensor) -> list[Tensor]:
    """Return the FFN's output for each activation in TABLE; the projections before the activation run only once."""
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


# A zero input: without biases the output is 0, with biases it is not, and all tokens have the same output.


def zero(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check the output for a zero input: without biases, with random biases, and that all tokens have the same."""
    judge = case.judge("zero")
    nothing = torch.zeros_like(case.x)
    bare, biased = with_biases(case.ffn, False), with_biases(case.ffn, True)
    without = run(bare, _kept(bare, case.ffn_weights), {case.entry: nothing})
    expected, note = _without_biases(case, without)
    yield judge.equal("without biases", without, expected, note)
    out = run(biased, _with_drawn(case, biased), {case.entry: nothing})
    size = float(out.abs().max())
    note = "the largest output, with random biases: must not be 0"
    yield CheckRow(judge.check, "with biases", size, tolerance=0.0, passed=size > 0, note=note)
    note = "in eval mode; in train mode dropout makes equal tokens differ"
    yield judge.equal("equal tokens", out, out[:1].expand_as(out), note)


def _without_biases(case: CheckedBlock, out: Tensor) -> tuple[Tensor, str]:
    """Return the expected output and the reason: 0, unless f(0) is not 0 and no gate multiplies it by 0."""
    act = next((step for step in case.ffn if step.output == "act"), None)
    expected, note = torch.zeros_like(out), "0, exactly"
    if act is None or case.layer.spec.gated or case.layer.spec.sub_norm:
        return expected, note
    learned = {name.removeprefix("act."): t for name, t in case.ffn_weights.items() if name.startswith("act.")}
    at_zero = function(case.layer.spec.activation, learned)(torch.zeros(1, dtype=case.dtype, device=case.device))
    if float(at_zero) == 0:
        return expected, note
    down = case.ffn_weights["down.weight"]
    rise = at_zero.expand(len(out), down.shape[1])
    return functional.linear(
        rise, down
    ), f"{case.layer.spec.activation}(0) = {float(at_zero):.4g}, so the output is W2 times that"


def _kept(steps: tuple[Step, ...], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weights[name] for name in parameters(steps)}


def _with_drawn(case: CheckedBlock, steps: tuple[Step, ...]) -> dict[str, Tensor]:
    """Return the weights with a random bias for every Linear."""
    generator = case.generator()
    out = {}
    for name, axes in parameters(steps).items():
        shape = [axis.size for axis in axes]
        linear = name.endswith(".bias") and "norm" not in name
        drawn = torch.randn(shape, generator=generator).to(case.device, case.dtype) if linear else None
        out[name] = case.ffn_weights[name] if drawn is None else drawn
    return out


# Before any comparison: are the weights and the input finite?


def finite(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check that the weights and the input contain no NaN and no infinity."""
    for what, tensors in (("weights", case.weights), ("input", case.inputs)):
        wrong = [f"{name} has {count}" for name, tensor in tensors.items() if (count := not_finite(tensor))]
        many = f" and {len(wrong) - 4} more tensors" if len(wrong) > 4 else ""
        yield CheckRow("finite", what, passed=not wrong, note="; ".join(wrong[:4]) + many)
