"""The referee's checks of a kernel's backward pass: its gradients of x and of every weight, against autograd over the
steps in float64."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ffncli.block.steps import block_inputs
from ffncli.run.engine.execute import run
from ffncli.run.engine.prepare import dtype_name
from ffncli.run.engine.reference import gradients_in_float64, perturbed
from ffncli.run.measure.gap import least_gradient, size
from ffncli.run.user.host_requests import Layout
from ffncli.run.user.hosted import Gradients, KernelFailure
from ffncli.run.verify.checks.case import CheckRow
from ffncli.run.verify.checks.causes import place
from ffncli.run.verify.checks.precision import RoundedProducts, classified, sum_bounds
from ffncli.run.verify.checks.trial import KernelTrial, equal_bits, reported
from ffncli.show.text import counted

# torch.compile makes a graph for each number of tokens and each choice of trained tensors, so these are few.
_COUNTS = (1, 17, 64)
_SOME = 17  # tokens in checks for which the token count does not matter
_MANY = 64
_ROOM = 2.0  # times the rms error of the steps' own gradients in a 16-bit dtype
_CHANGES, _TIMES = 8, 4.0  # random changes of the inputs, and times the largest effect that rounding may have
_LAYOUTS: Mapping[Layout, str] = {
    "columns": "dy as a transposed matrix",
    "one row": "dy expanded from one row",
    "one value": "dy expanded from one value, as of y.sum()",
}


@dataclass(frozen=True)
class Backward:
    """A backward pass: x [tokens, d_model], the gradient `g` of the output, and the references in float64."""

    x: Tensor
    g: Tensor
    output: Tensor
    gradients: Mapping[str, Tensor]


def values(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check every gradient for several numbers of tokens, for dy that is not contiguous in memory, with tensors that
    need no gradient, over several passes, and with other numbers in used buffers."""
    if trial.without_backward:
        demanded = False if trial.passes == "forward+backward" else None
        yield CheckRow("gradients", "all", passed=demanded, note=trial.without_backward)
        return
    for count in (n for n in _COUNTS if n <= trial.most_tokens):
        yield judged(trial, "gradients", counted(count, "token"), drawn(trial, count))
    for layout, subject in _LAYOUTS.items():
        x = trial.draw(_SOME, smooth=True)
        g = torch.randn(x.shape, generator=trial.generator)
        g = {"one row": g[:1], "one value": g[:1, :1]}.get(layout, g).expand(g.shape).to(x.dtype).contiguous()
        yield judged(trial, "gradients", subject, _referenced(trial, x, g), layout=layout)
    every = trial.trained
    for subject, trained in {"x": every[:-1], "all weights": ("x",), every[0]: every[1:]}.items():
        yield judged(trial, "gradients", f"{subject} frozen", drawn(trial, _SOME), trained=trained)
    yield from _passes(trial)
    yield from _state(trial)


def _passes(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check a second backward pass over the same graph, which a kernel may refuse, and gradients that add up over two
    inputs."""
    one, other = drawn(trial, _SOME), drawn(trial, _SOME)
    yield judged(trial, "gradients", "a second pass with retain_graph", one, passes=2, refuses=True)
    sums = _referenced(trial, other.x, one.g).gradients
    both = {name: one.gradients[name] + (0 if name == "x" else sums[name]) for name in one.gradients}
    # The output is that of the second input.
    both_inputs = replace(one, gradients=both, output=other.output)
    yield judged(trial, "gradients", "accumulated over two inputs", both_inputs, then=other.x)


def _state(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check new numbers in used buffers, and that the same numbers have gradients with the same bits."""
    one, other = drawn(trial, _SOME), drawn(trial, _SOME)
    first = _called(trial, one, trial.trained)
    yield judged(trial, "gradients", "another dy for the same x", _referenced(trial, one.x, other.g))
    yield judged(trial, "gradients", "another x in the same buffer", _referenced(trial, other.x, one.g))
    for subject, buffer in (("the same numbers again", 0), ("the same numbers in another buffer", 1)):
        again = _called(trial, one, trial.trained, place=buffer)
        rows = [
            equal_bits("gradients", subject, again.by_name[name], first.by_name[name], f"gradient of {name}")
            for name in trial.trained
        ]
        row = next((row for row in rows if not row.passed), replace(rows[0], note=""))
        # A GPU's atomic additions come in any order.
        yield row if trial.host.device == "cpu" else replace(row, passed=row.passed or None)


def batch(trial: KernelTrial) -> Iterator[CheckRow]:
    """Compare the gradient of x of tokens alone and in a batch, bit by bit; a difference is only reported, unless batch
    invariance is demanded."""
    if trial.without_backward:
        return
    whole = drawn(trial, min(_MANY, trial.most_tokens))
    there = _called(trial, whole, trial.trained).by_name["x"]
    for count in _COUNTS[:-1]:
        part = slice(3, 3 + count)
        alone = _called(trial, replace(whole, x=whole.x[part], g=whole.g[part]), trial.trained).by_name["x"]
        yield reported(
            trial, equal_bits("gradient-batch", f"{counted(count, 'token')} of {len(there)}", alone, there[part])
        )


def error_class(trial: KernelTrial) -> Iterator[CheckRow]:
    """Measure the rms error of every gradient, and report which arithmetic has an error of that size."""
    if trial.without_backward:
        return
    one = drawn(trial, min(_MANY, trial.most_tokens))
    given = _called(trial, one, trial.trained)
    bounds = {} if trial.block.computes else _bounds(trial, one)
    floor = least_gradient(one.gradients)
    for name in trial.trained:
        if largest := size(one.gradients[name]):
            error = _rms(given.by_name[name], one.gradients[name], max(1.0, floor / largest))
            yield classified(trial, "gradient-class", error, bounds.get(name, {}), name)


# --- calls and references ---------------------------------------------------------------------------------------------


def drawn(trial: KernelTrial, count: int) -> Backward:
    """Draw x and a gradient of the output, and compute their references."""
    x = trial.draw(count, smooth=True)
    g = torch.randn(x.shape, generator=trial.generator).to(x.dtype)
    return _referenced(trial, x, g)


def _referenced(trial: KernelTrial, x: Tensor, g: Tensor) -> Backward:
    block = trial.block
    output, by_name = gradients_in_float64(block.ffn, block.ffn_weights, {block.entry: x}, g)
    by_name["x"] = by_name.pop(block.entry)
    return Backward(x, g, output, by_name)


def _called(trial: KernelTrial, one: Backward, trained: Sequence[str], **options: Any) -> Gradients:
    given = trial.host.gradients(one.x, one.g, trained, **options)
    return given or Gradients(one.output, {name: torch.full_like(one.gradients[name], torch.nan) for name in trained})


def judged(
    trial: KernelTrial,
    check: str,
    subject: str,
    one: Backward,
    trained: Sequence[str] | None = None,
    refuses: bool = False,
    **options: Any,
) -> CheckRow:
    """Compare the output and the gradients with the references. The row is about the first wrong tensor, in the order
    in which a backward pass computes them, or about the largest error. With `refuses`, the kernel may raise."""
    trained = trained or trial.trained
    judge = trial.block.judge(check, tokens=len(one.x))
    try:
        given = _called(trial, one, trained, **options)
    except KernelFailure as failure:
        if failure.gone or not refuses:
            return judge.fails(subject, str(failure))
        return judge.skips(subject, f"the kernel refuses it: {failure}")
    floor = least_gradient(one.gradients)
    output, limits = judge.equal(subject, given.output, one.output, what="its output"), None
    rows = [output if output.passed or output.note else replace(output, note="its output")]
    for name in trained:
        tensor, reference, what = given.by_name[name], one.gradients[name], f"gradient of {name}"
        row = judge.equal(subject, tensor, reference, what=what, floor=floor)
        scale = max(size(reference), floor)
        if row.passed is False and row.relative_error is not None and scale:
            limits = limits or _by_rounding(trial, one)
            limit = max(judge.tolerance, limits[name] / scale)
            row = replace(row, tolerance=limit, passed=row.relative_error <= limit)
            if not row.passed:
                row = replace(row, note=f"{what}; {place(tensor, reference, limit * scale)}")
        rows.append(row)
    failed = next((row for row in rows if row.passed is False), None)
    return failed or max(rows, key=lambda row: row.relative_error or 0.0)


def _by_rounding(trial: KernelTrial, one: Backward) -> dict[str, float]:
    """Return how far rounding may move any value of each gradient: some times as far as random relative changes of x,
    dy and the weights by the dtype's eps. A router's gradient is a small difference of the experts' outputs."""
    block, most = trial.block, dict.fromkeys(one.gradients, 0.0)
    eps, exact = torch.finfo(block.dtype).eps, _referenced(trial, one.x, one.g).gradients
    for _ in range(_CHANGES):
        x, g = (perturbed(tensor, eps, trial.generator) for tensor in (one.x, one.g))
        weights = {name: perturbed(tensor, eps, trial.generator) for name, tensor in block.ffn_weights.items()}
        _, by_name = gradients_in_float64(block.ffn, weights, {block.entry: x}, g)
        for name in most:
            other = by_name[block.entry if name == "x" else name]
            most[name] = max(most[name], float((other - exact[name]).abs().max()))
    return {name: _TIMES * change for name, change in most.items()}


# --- the precision of gradients ---------------------------------------------------------------------------------------


def _bounds(trial: KernelTrial, one: Backward) -> dict[str, dict[str, float]]:
    """Return, for each gradient, the largest rms error of each class of arithmetic, as in `judged.error_bounds`."""
    block, dtype = trial.block, trial.block.dtype
    inputs, floor = {block.entry: one.x}, least_gradient(one.gradients)

    def errors(by_name: Mapping[str, Tensor]) -> dict[str, float]:
        return {
            name: _rms(by_name[name], reference, max(1.0, floor / size(reference) if size(reference) else 1.0))
            for name, reference in one.gradients.items()
        }

    if dtype.itemsize > 2:

        def rounded_to(bits: int) -> dict[str, float]:
            with RoundedProducts(bits):
                _, by_name = gradients_in_float64(block.ffn, block.ffn_weights, inputs, one.g)
            return errors({**by_name, "x": by_name[block.entry]})

        by_11, by_8 = rounded_to(11), rounded_to(8)
        return {name: sum_bounds(trial, by_11[name], by_8[name], len(one.x)) for name in trial.trained}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in block.ffn_weights.items()}
    x = one.x.detach().requires_grad_()
    with torch.enable_grad():
        out = run(block.ffn, leaves, {block_inputs(block.ffn)[0]: x})
        every = [x, *leaves.values()]
        of_steps = torch.autograd.grad(out, every, one.g, allow_unused=True)
    steps = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for name, leaf, gradient in zip(("x", *leaves), every, of_steps, strict=True)
    }
    kind = f"{dtype_name(dtype)}-true"
    return {name: {kind: _ROOM * error} for name, error in errors(steps).items()}


def _rms(gradient: Tensor, reference: Tensor, scale: float) -> float:
    """Return ‖a − b‖ / (scale · ‖b‖); a scale above 1 is for a gradient far smaller than the largest one."""
    length = float(reference.norm()) * scale
    error = float((gradient.double() - reference).norm())
    if error != error or error == float("inf"):
        return float("inf")
    return error / length if length else float("inf") if error else 0.0
