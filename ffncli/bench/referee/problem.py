"""A case as tensors: weights, and inputs with a reference output in float64. Also the errors of what a kernel returns.

In the process that runs kernels, the `referee` of a Problem is a separate process, and the inputs that it sends have no
reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import torch
from torch import Tensor

from ffncli.bench.records import Case, Job
from ffncli.bench.referee.prescribed_routing import PrescribedRouting
from ffncli.bench.request.data import SCALED, digest, input_rows
from ffncli.bench.verdict import Error, Ruling
from ffncli.block.cost import cost
from ffncli.block.recipe import steps as steps_of
from ffncli.block.steps import Route, Step, block_inputs
from ffncli.errors import FFNError, shown_path
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.prepare import dtype_of
from ffncli.run.engine.reference import (
    gradients_in_float64,
    in_float64,
    near_kinks,
    output_and_experts,
    steady_tokens,
)
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import gap, least_gradient, size

_REDRAWS = 8
_MOST_JUDGED = 4e9  # FLOPs of the samples' references in one placement: about 0.2 s of a core
# FLOPs of a reference. One core computes about 2·10¹⁰ FLOPs per second in float64; in a larger case, only some tokens
# are checked.
_MOST_FLOPS = 4e10
_FEW = 16


@dataclass(frozen=True)
class Inputs:
    """The input x [tokens, d_model] of a kernel's calls, and its reference output in float64. Inputs are numbered:
    `number` identifies them.

    `rows` are the tokens that are compared (None: all), and `out` [rows, d_model] is their reference. In a backward
    pass, `g` [tokens, d_model] is the gradient of the output, and `grads` maps `x` and the canonical names of the
    weights to their gradients. `out` and `grads` are None if only the referee has them. `rounding` is the rms error of
    the output if every step is rounded to the dtype, for 16-bit dtypes; otherwise 0.
    """

    x: Tensor
    out: Tensor | None
    rows: Tensor | None = None
    g: Tensor | None = None
    grads: Mapping[str, Tensor] | None = None
    remark: str = ""
    number: int = 0
    rounding: float = 0.0


class Referee:
    """Knows the right answers of a case, and rules on a kernel's answers.

    The subclass Rulings answers each question itself; all other subclasses pass the questions on through `_ask`.
    """

    def inputs(self, number: int) -> Inputs:
        """Return the inputs `number`, counted from 1; each number has its own values."""
        inputs: Inputs = self._ask("inputs", number)
        return inputs

    def declare(self, kernel: str, computes: str) -> None:
        """Record a kernel's number format (empty: the case's dtype). Raises FFNError for an unknown format."""
        self._ask("declare", kernel, computes)

    def limit(self, kernel: str) -> float:
        """Return the maximum `Error.largest` that the kernel may have."""
        limit: float = self._ask("limit", kernel)
        return limit

    def ruling(self, kernel: str, number: int, given: Mapping[str, Tensor]) -> Ruling:
        """Rule on a kernel's whole answer to the inputs `number`: the compared rows of its output and, in a
        backward pass, its gradients, named as in `errors_of`."""
        ruling: Ruling = self._ask("ruling", kernel, number, given)
        return ruling

    def show(self, sample: CallSample) -> None:
        """Take a sample of a timed call, replacing an earlier sample of the same block."""
        self._ask("show", sample)

    def timed(self) -> dict[str, Ruling]:
        """Return one ruling per kernel, on all its samples since the last call."""
        rulings: dict[str, Ruling] = self._ask("timed")
        return rulings

    def sampled(self, samples: Sequence[CallSample]) -> list[Error | None]:
        """Return each sample's error, in order, without a ruling; None for a sample that was not judged."""
        errors: list[Error | None] = self._ask("sampled", samples)
        return errors

    def accuse(self, kernel: str, note: str) -> None:
        """Record the worker's note on a wrong kernel; only the first note about each kernel is kept."""
        self._ask("accuse", kernel, note)

    def call_cost(self, kernel: str) -> tuple[int, float]:
        """Return the cost of a call of a kernel of the package in the referee's process (`call_cost.call_cost`)."""
        nanoseconds, faults = self._ask("call_cost", kernel)
        return nanoseconds, faults

    def clock_started(self) -> None:
        """Start to compare the referee's clock with the worker's."""
        self._ask("clock_started")

    def clock_stopped(self) -> None:
        """Read the referee's clock for a comparison; the last reading since `clock_started` counts."""
        self._ask("clock_stopped")

    def clock_remark(self, seconds: float) -> str:
        """Return what is wrong with the worker's clock, which counted `seconds` from `clock_started` to
        `clock_stopped`; empty if it is right."""
        remark: str = self._ask("clock_remark", seconds)
        return remark

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Pass a question to another referee, and return its answer."""
        raise NotImplementedError


QUESTIONS = frozenset(name for name in vars(Referee) if not name.startswith("_"))


@dataclass(frozen=True)
class Problem:
    """The steps of a case as passed to kernels, their weights, and random inputs on demand.

    `weights` are initialised as in torch's modules, so that outputs have a magnitude of about 1 and tokens go to all
    experts.
    """

    case: Case
    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    seed: int
    referee: Referee | None = None  # None: the referee's own problem, which computes the references

    @classmethod
    def of(cls, case: Case, seed: int, referee: Referee | None = None) -> Problem:
        """Build the problem of a case. Raises FFNError (exit 3) if memory is too small for the weights."""
        steps, dtype = kernel_steps(steps_of(case.spec)), dtype_of(case.dtype)
        weights = random_weights(steps, seeded(seed, case.device), dtype, case.device)
        return cls(case, steps, weights, dtype, seed, referee)

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.case.passes == "forward+backward"

    @property
    def width(self) -> int:
        """The length of the longest sum in a matrix product: over d_model, d_ff or, in a backward pass, the tokens."""
        spec = self.case.spec
        return max(spec.d_model, spec.d_ff, spec.shared_width, self.case.tokens if self.backward else 1)

    @property
    def scores(self) -> torch.dtype | None:
        """The dtype of the router's scores, if it is fixed; otherwise None."""
        fixed = any(isinstance(step.op, Route) and step.op.score_dtype == "fp32" for step in self.steps)
        return torch.float32 if fixed else None

    @property
    def entry(self) -> str:
        """The name of the input."""
        return block_inputs(self.steps)[0]

    @cached_property
    def first(self) -> Inputs:
        """The inputs of timed calls, which are number 1."""
        return self.inputs(1)

    @cached_property
    def routing(self) -> PrescribedRouting | None:
        """The prescribed routing; None if the router decides."""
        return PrescribedRouting(self.case, self.steps, self.weights) if self.case.routing else None

    @cached_property
    def file(self) -> InputFile | None:
        """The file of real x, if x is not random."""
        return InputFile.of(self.case) if self.case.input else None

    @cached_property
    def experts(self) -> Tensor | None:
        """The experts to which the tokens of `first` go, as booleans [tokens, experts]; None in a dense block."""
        with torch.no_grad():
            return output_and_experts(self.steps, self.weights, {self.entry: self.first.x})[1]

    def inputs(self, number: int) -> Inputs:
        """Return the inputs `number`, counted from 1; each number has its own values."""
        return replace(self.referee.inputs(number) if self.referee else self._inputs(number), number=number)

    @property
    def rules(self) -> Referee:
        """The referee that rules on answers. Kernels are only given problems that have a referee."""
        assert self.referee is not None, "a problem without a referee"
        return self.referee

    def sampled(self, samples: Sequence[CallSample]) -> list[Error | None]:
        """Return each sample's error, in order; None for a sample that was not judged."""
        return self.referee.sampled(samples) if self.referee else judged(self, samples)

    def _inputs(self, number: int) -> Inputs:
        generator = self._generator(self.seed + number)
        x, left_out = self._steady(generator)
        if not self.backward:
            return self._forward(x, left_out, generator)
        g = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
        g[left_out] = 0  # so that these tokens add nothing to any gradient
        return self._backward(x, g, left_out)

    def other(self, number: int) -> Tensor:
        """Draw tokens like those of `inputs`, without a reference."""
        generator = self._generator(self.seed - number)
        return self._drawn(self.case.tokens, generator, self._wanted(generator))

    def _generator(self, seed: int) -> torch.Generator:
        """Return a generator on the device, or on the CPU if it draws rows of a file, or experts."""
        return seeded(seed, "cpu" if self.routing or self.file else self.case.device)

    def _wanted(self, generator: torch.Generator) -> Tensor | None:
        """Choose at random the experts that the tokens should go to, if a routing is prescribed."""
        return None if self.routing is None else self.routing.draw(self.case.tokens, generator)

    def _drawn(self, tokens: int, generator: torch.Generator, wanted: Tensor | None = None) -> Tensor:
        """Draw x for this number of tokens; if a routing is prescribed, x sends the tokens to the wanted experts."""
        if self.file is None:
            x = torch.randn(tokens, self.case.spec.d_model, generator=generator, device=generator.device)
        else:
            x = self.file.drawn(tokens, generator)
        x = x.to(self.case.device, self.dtype)
        return x if self.routing is None or wanted is None else self.routing.entered(x, wanted)

    def _steady(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return (tokens whose output should not depend on a kernel's rounding, booleans that mark tokens whose output
        still does).

        If two experts score nearly the same, or the input of a relu is nearly 0, rounding decides which expert
        computes and which slope counts. Such tokens are drawn again, up to `_REDRAWS` times.
        """
        wanted = self._wanted(generator)
        x = self._drawn(self.case.tokens, generator, wanted)
        bad = self.unsteady(x)
        for _ in range(_REDRAWS):
            rows = bad.nonzero().flatten()
            if not len(rows):
                break
            x[rows] = self._drawn(len(rows), generator, None if wanted is None else wanted[rows])
            bad[rows] = self.unsteady(x[rows])
        return x, bad

    @torch.no_grad()
    def unsteady(self, x: Tensor) -> Tensor:
        """Return booleans that mark the tokens whose experts or, in a backward pass, slopes are decided by rounding."""
        same, _ = steady_tokens(self.steps, self.weights, {self.entry: x}, self.dtype)
        bad = ~same.to(x.device)
        if self.backward:
            for tokens in near_kinks(self.steps, self.weights, {self.entry: x}):
                bad[tokens] = True
        return bad

    def _forward(self, x: Tensor, left_out: Tensor, generator: torch.Generator) -> Inputs:
        rows = (~left_out).nonzero().flatten()
        remark = _remark(len(rows), len(x), "rounding decides which experts the others use")
        most = max(_FEW, int(_MOST_FLOPS / max(1, cost(self.steps).flops)))
        if most < len(rows):
            shuffled = torch.randperm(len(rows), generator=generator, device=generator.device)
            rows = rows[shuffled[:most].to(rows.device)]
            remark = _remark(len(rows), len(x), "drawn at random")
        with torch.no_grad():
            out, _ = in_float64(self.steps, self.weights, {self.entry: x[rows]})
        rounding = self._rounding(x[rows], out)
        return Inputs(x, out, None if len(rows) == len(x) else rows, remark=remark, rounding=rounding)

    def _backward(self, x: Tensor, g: Tensor, left_out: Tensor) -> Inputs:
        out, gradients = gradients_in_float64(self.steps, self.weights, {self.entry: x}, g)
        grads = {"x": gradients[self.entry], **{name: gradients[name] for name in self.weights if name in gradients}}
        rows = (~left_out).nonzero().flatten()
        remark = _remark(len(rows), len(x), "the others depend on rounding and have no gradient")
        rounding = self._rounding(x[rows], out[rows])
        return Inputs(x, out[rows], None if len(rows) == len(x) else rows, g, grads, remark, rounding=rounding)

    def rounding_of(self, samples: Sequence[CallSample]) -> float:
        """Return the rms error of rounding every step to the dtype, computed on these samples' own x."""
        outs = torch.split(_references(self, samples)[0], [len(sample.x) for sample in samples])
        every = [self._rounding(sample.x, out) for sample, out in zip(samples, outs, strict=True)]
        return math.sqrt(sum(one**2 for one in every) / len(every))

    @torch.no_grad()
    def _rounding(self, x: Tensor, out: Tensor) -> float:
        if self.dtype.itemsize != 2 or not len(x):
            return 0.0
        return error_of(output_and_experts(self.steps, self.weights, {self.entry: x.detach()})[0], out, 0.0).rel


def weight_bytes(case: Case) -> int:
    """Return the number of bytes of a case's weights."""
    return cost(kernel_steps(steps_of(case.spec))).params * dtype_of(case.dtype).itemsize


def seeded(seed: int, device: str) -> torch.Generator:
    """Return a generator on the device: a CPU would take seconds to draw the values of a large case."""
    return torch.Generator(torch.device(device)).manual_seed(seed)


def _remark(checked: int, tokens: int, why: str) -> str:
    return f"{checked} of {tokens} tokens checked, {why}" if checked < tokens else ""


def seed_of(case: Case, job: Job) -> int:
    """Return the seed of a process and a case, which is the same in every run with the same seed."""
    return Random(f"{job.method.seed} {job.process} {case.key}").getrandbits(48)


def judged(problem: Problem, samples: Sequence[CallSample]) -> list[Error | None]:
    """Return each sample's error, in order; None for samples that were not drawn, or whose answer depends on rounding.

    Errors are relative to at least the largest value of the case's first inputs, since all values of a single token may
    be small by chance.
    """
    errors: list[Error | None] = [None] * len(samples)
    drawn = _drawn_samples(problem, samples)
    if not drawn:
        return errors
    entered = [samples[n] for n in drawn]
    steady = ~problem.unsteady(torch.cat([s.x for s in entered]))
    out, gradient = _references(problem, entered)
    assert problem.first.out is not None
    floor, at = size(problem.first.out), 0
    for n, sample in zip(drawn, entered, strict=True):
        kept = steady[at : at + len(sample.x)]
        rows = slice(at, at + len(sample.x))
        at += len(sample.x)
        if not bool(kept.any()):
            continue
        error = error_of(sample.out[kept], out[rows][kept], floor)
        if gradient is not None and sample.gradient is not None:
            assert problem.first.grads is not None
            least = max(size(problem.first.grads["x"]), least_gradient(problem.first.grads))
            error = error.worst(error_of(sample.gradient[kept], gradient[rows][kept], least))
        errors[n] = error
    return errors


def _drawn_samples(problem: Problem, samples: Sequence[CallSample]) -> list[int]:
    """Draw the samples to judge: at least one per kernel, then others up to `_MOST_JUDGED`."""
    numbers = list(range(len(samples)))
    SystemRandom().shuffle(numbers)
    first = dict.fromkeys(samples[n].kernel for n in numbers)
    leading = [next(n for n in numbers if samples[n].kernel == kernel) for kernel in first]
    # Tokens that may be judged; a forward and backward pass costs three times a forward pass.
    left = _MOST_JUDGED / (max(1, cost(problem.steps).flops) * (3 if problem.backward else 1))
    drawn = []
    for n in dict.fromkeys([*leading, *numbers]):
        if n in leading or left >= 0:
            drawn.append(n)
            left -= len(samples[n].x)
    return sorted(drawn)


def _references(problem: Problem, samples: Sequence[CallSample]) -> tuple[Tensor, Tensor | None]:
    """Return (the outputs of all these tokens, the gradients of x in a backward pass), in float64."""
    x = torch.cat([sample.x for sample in samples])
    g = [sample.g for sample in samples if sample.g is not None]
    if not problem.backward:
        with torch.no_grad():
            return in_float64(problem.steps, problem.weights, {problem.entry: x})[0], None
    inputs = {problem.entry: x}
    out, gradients = gradients_in_float64(problem.steps, problem.weights, inputs, torch.cat(g), of_weights=False)
    return out, gradients[problem.entry]


# --- rows of a user's file as x ---------------------------------------------------------------------------------------


class InputFile:
    """The rows of the file of --input."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @classmethod
    def of(cls, case: Case) -> InputFile:
        """Read the file of a case. Raises FFNError if it has changed since the run began."""
        rows = input_rows(case.input, case.spec.d_model)
        if digest("--input", case.input) != case.input_sha256:
            raise FFNError(f"{shown_path(Path(case.input))} has changed since the run began", "start again")
        return cls(rows)

    def drawn(self, tokens: int, generator: torch.Generator) -> Tensor:
        """Draw rows with replacement, each scaled by 0.98 to 1.02: [tokens, d_model] in float32 or wider."""
        places = torch.randint(len(self._rows), (tokens,), generator=generator)
        rows = self._rows[places]
        scale = 1 + SCALED * (2 * torch.rand(tokens, 1, generator=generator, dtype=torch.float64) - 1)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(wide) * scale.to(wide)


OUTPUT, GRADIENT = "its output", "its gradient of "  # how notes name the compared tensor


@dataclass(frozen=True)
class CallSample:
    """Some tokens of one call: x [rows, d_model] as the kernel received it, and the kernel's answer `out` [rows,
    d_model].

    In a backward pass, `g` is the gradient of the output that the kernel received, and `gradient` the gradient of x
    that the kernel returned. Blocks are numbered separately for each kernel; only the last sample shown of a `block` is
    judged.
    """

    kernel: str
    x: Tensor
    out: Tensor
    g: Tensor | None = None
    gradient: Tensor | None = None
    block: int = 0


def errors_of(
    given: Mapping[str, Tensor], out: Tensor, gradients: Mapping[str, Tensor] | None = None
) -> dict[str, Error]:
    """Map the name of each finite tensor that a kernel returned (OUTPUT, or GRADIENT and a name) to its error.

    `out` and `gradients` are the references, of the same shapes.
    """
    floor = least_gradient(gradients) if gradients else 0.0
    errors = {}
    for what, tensor in given.items():
        if what == OUTPUT:
            errors[what] = error_of(tensor, out, 0.0)
        elif gradients is not None:
            errors[what] = error_of(tensor, gradients[what.removeprefix(GRADIENT)], floor)
    return errors


def error_of(tensor: Tensor, reference: Tensor, floor: float) -> Error:
    """Return the error of one finite tensor; `floor` is the minimum of max|b|."""
    apart, largest = gap(tensor, reference), size(reference)
    scale = max(largest, floor)
    share = apart.largest / scale if scale else (math.inf if apart.largest else 0.0)
    wide = reference.to(tensor.device)
    # ‖b‖, scaled up by the same factor as max|b| if max|b| is below `floor`; 1 if the reference is 0.
    length = float(wide.norm()) * (scale / largest if largest else 0.0) or 1.0
    rel = float((tensor.double() - wide).norm()) / length
    small = tensor.abs()
    return Error(share, rel, int(((small > 0) & (small < torch.finfo(tensor.dtype).tiny)).sum()))
