"""One case as tensors, with its reference output in float64, and how far a kernel's tensors are from that.

The process that runs kernels has a Problem whose `referee` is another process: it gets inputs without a reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from ffncli.block.analysis.gated import factor
from ffncli.block.cost import cost
from ffncli.block.recipe import steps as steps_of
from ffncli.block.steps import Activation, Route, Step, block_inputs, walk
from ffncli.errors import FFNError, shown_path
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.prepare import dtype_of
from ffncli.run.engine.reference import (
    events_in_float64,
    gradients_in_float64,
    in_float64,
    output_and_experts,
    steady_tokens,
)
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import gap

_REDRAWS = 8
_MOST_JUDGED = 4e9  # FLOPs of the references of samples in one placement: some 0.2 s of a core
# FLOPs of a reference. One core does some 2·10¹⁰ in float64 a second; in a larger case only some tokens are checked.
_MOST_FLOPS = 4e10
_FEW = 16


@dataclass(frozen=True)
class Inputs:
    """The input x [tokens, d_model] of that number, and its reference output in float64.

    `rows` are the tokens that are compared (None: all), `out` [rows, d_model] their reference. In a backward pass `g`
    [tokens, d_model] is the gradient of the output, `grads` those of `x` and of the canonical weights by name. `out`
    and `grads` are None where only the referee has them. `rounding` is the rms error of an output that is rounded to
    the dtype after every step, for 16-bit dtypes; else 0.
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
    """Who has the right answers of a case and rules on others.

    Rulings answers each question itself; any other referee passes them on by `_ask`.
    """

    def inputs(self, number: int) -> Inputs:
        """The inputs of that number, 1 upward: different numbers have different values."""
        inputs: Inputs = self._ask("inputs", number)
        return inputs

    def declare(self, kernel: str, computes: str) -> None:
        """What a kernel computes in; empty: the case's dtype. Raises FFNError for an unknown format."""
        self._ask("declare", kernel, computes)

    def limit(self, kernel: str) -> float:
        """The largest `Error.largest` that kernel may have."""
        limit: float = self._ask("limit", kernel)
        return limit

    def ruling(self, kernel: str, number: int, given: Mapping[str, Tensor]) -> Ruling:
        """On a kernel's whole answer to the inputs of that number: its output, for the rows that are compared, and in a
        backward pass its gradients, as `errors_of` names them."""
        ruling: Ruling = self._ask("ruling", kernel, number, given)
        return ruling

    def show(self, sample: CallSample) -> None:
        """Take a sample of a timed call, in place of an earlier one of the same block."""
        self._ask("show", sample)

    def timed(self) -> dict[str, Ruling]:
        """On each kernel's samples since the last time, together."""
        rulings: dict[str, Ruling] = self._ask("timed")
        return rulings

    def sampled(self, samples: Sequence[CallSample]) -> list[Error | None]:
        """How far each sample is off, in their order, without a ruling; None for one that was not judged."""
        errors: list[Error | None] = self._ask("sampled", samples)
        return errors

    def accuse(self, kernel: str, note: str) -> None:
        """Keep what the worker found about a kernel; the first note about one stays."""
        self._ask("accuse", kernel, note)

    def clock_started(self) -> None:
        """Compare its clock with the worker's from now on."""
        self._ask("clock_started")

    def clock_stopped(self, seconds: float) -> str:
        """What is wrong with the worker's clock, by which `seconds` have passed since; empty where nothing is."""
        remark: str = self._ask("clock_stopped", seconds)
        return remark

    def _ask(self, question: str, *arguments: Any) -> Any:
        """The answer of another referee to that question."""
        raise NotImplementedError


QUESTIONS = frozenset(name for name in vars(Referee) if not name.startswith("_"))


@dataclass(frozen=True)
class Problem:
    """The steps of a case as passed to kernels, their weights, and random inputs on demand.

    `weights` are initialised as in torch's modules, so that outputs are of order 1 and tokens go to all experts.
    """

    case: Case
    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    seed: int
    referee: Referee | None = None  # None: this is the referee's own, which computes the references

    @classmethod
    def of(cls, case: Case, seed: int, referee: Referee | None = None) -> Problem:
        """Raises FFNError (exit 3) if memory is too small for the weights."""
        steps, dtype = kernel_steps(steps_of(case.spec)), dtype_of(case.dtype)
        weights = random_weights(steps, seeded(seed, case.device), dtype, case.device)
        return cls(case, steps, weights, dtype, seed, referee)

    @property
    def backward(self) -> bool:
        """Whether gradients are computed too."""
        return self.case.passes == "forward+backward"

    @property
    def width(self) -> int:
        """The longest sum of products: over d_model, d_ff, and in a backward pass over tokens."""
        spec = self.case.spec
        return max(spec.d_model, spec.d_ff, spec.shared_width, self.case.tokens if self.backward else 1)

    @property
    def scores(self) -> torch.dtype | None:
        """The dtype of a router with its own dtype."""
        fixed = any(isinstance(step.op, Route) and step.op.score_dtype == "fp32" for step in self.steps)
        return torch.float32 if fixed else None

    @property
    def entry(self) -> str:
        """The name of the input."""
        return block_inputs(self.steps)[0]

    @cached_property
    def first(self) -> Inputs:
        """The timed inputs."""
        return self.inputs(1)

    @cached_property
    def routing(self) -> PrescribedRouting | None:
        """Where the tokens are to go; None where the router decides."""
        return PrescribedRouting(self.case, self.steps, self.weights) if self.case.routing else None

    @cached_property
    def file(self) -> InputFile | None:
        """The file of real x, if x is not random."""
        return InputFile.of(self.case) if self.case.input else None

    @cached_property
    def experts(self) -> Tensor | None:
        """Which experts the tokens of `first` go to, booleans [tokens, experts]; None in a dense block."""
        with torch.no_grad():
            return output_and_experts(self.steps, self.weights, {self.entry: self.first.x})[1]

    def inputs(self, number: int) -> Inputs:
        """The inputs of that number, 1 upward: different numbers have different values."""
        return replace(self.referee.inputs(number) if self.referee else self._inputs(number), number=number)

    @property
    def rules(self) -> Referee:
        """Who rules on answers. Only a problem that has a referee is given to kernels."""
        assert self.referee is not None, "a problem without a referee"
        return self.referee

    def sampled(self, samples: Sequence[CallSample]) -> list[Error | None]:
        """How far each sample is off, in their order; None for one that was not judged."""
        return self.referee.sampled(samples) if self.referee else judged(self, samples)

    def _inputs(self, number: int) -> Inputs:
        generator = self._generator(self.seed + number)
        x, left_out = self._steady(generator)
        if not self.backward:
            return self._forward(x, left_out, generator)
        g = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
        g[left_out] = 0  # they then add nothing to any gradient
        return self._backward(x, g, left_out)

    def other(self, number: int) -> Tensor:
        """Tokens like those of `inputs`, without a reference."""
        generator = self._generator(self.seed - number)
        return self._drawn(self.case.tokens, generator, self._wanted(generator))

    def _generator(self, seed: int) -> torch.Generator:
        """On the device, unless a file's rows or experts are drawn: these are chosen on the CPU."""
        return seeded(seed, "cpu" if self.routing or self.file else self.case.device)

    def _wanted(self, generator: torch.Generator) -> Tensor | None:
        """The experts that the tokens are to go to, if that is prescribed."""
        return None if self.routing is None else self.routing.draw(self.case.tokens, generator)

    def _drawn(self, tokens: int, generator: torch.Generator, wanted: Tensor | None = None) -> Tensor:
        """x for so many tokens, sent to the wanted experts if a routing is prescribed."""
        if self.file is None:
            x = torch.randn(tokens, self.case.spec.d_model, generator=generator, device=generator.device)
        else:
            x = self.file.drawn(tokens, generator)
        x = x.to(self.case.device, self.dtype)
        return x if self.routing is None or wanted is None else self.routing.entered(x, wanted)

    def _steady(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens whose output should not depend on a kernel's rounding, booleans for those where it still does).

        If two experts score nearly the same, or the input of a relu is nearly 0, the last digit decides which expert
        computes and which slope counts. Such tokens are drawn again, a few times.
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
        """The tokens, booleans, for which rounding decides an expert or, in a backward pass, a slope."""
        same, _ = steady_tokens(self.steps, self.weights, {self.entry: x}, self.dtype)
        bad = ~same.to(x.device)
        if self.backward:
            for tokens in near_kinks(self.steps, self.weights, {self.entry: x}):
                bad[tokens] = True
        return bad

    def _forward(self, x: Tensor, left_out: Tensor, generator: torch.Generator) -> Inputs:
        rows = (~left_out).nonzero().flatten()
        remark = _remark(len(rows), len(x), "for the others, rounding decides the experts")
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
        """The rms error of an execution that rounds every step to the dtype, of these samples' own x."""
        outs = torch.split(_references(self, samples)[0], [len(sample.x) for sample in samples])
        every = [self._rounding(sample.x, out) for sample, out in zip(samples, outs, strict=True)]
        return math.sqrt(sum(one**2 for one in every) / len(every))

    @torch.no_grad()
    def _rounding(self, x: Tensor, out: Tensor) -> float:
        if self.dtype.itemsize != 2 or not len(x):
            return 0.0
        return error_of(output_and_experts(self.steps, self.weights, {self.entry: x.detach()})[0], out, 0.0).rel


def weight_bytes(case: Case) -> int:
    """Bytes of a case's weights."""
    return cost(kernel_steps(steps_of(case.spec))).params * dtype_of(case.dtype).itemsize


def seeded(seed: int, device: str) -> torch.Generator:
    """A generator on the device itself: a GPU would wait seconds for the numbers of a large case from a CPU."""
    return torch.Generator(torch.device(device)).manual_seed(seed)


def _remark(checked: int, tokens: int, why: str) -> str:
    return f"{checked} of {tokens} tokens checked, {why}" if checked < tokens else ""


def seed_of(case: Case, job: Job) -> int:
    """Every process and case draws its own numbers, the same in every run of the same seed."""
    return Random(f"{job.method.seed} {job.process} {case.key}").getrandbits(48)


def judged(problem: Problem, samples: Sequence[CallSample]) -> list[Error | None]:
    """How far each sample is off, in their order; None for those that were not drawn, or that rounding decides.

    Errors are relative to the largest value of the case's first inputs at least: of a single token all values can be
    small by chance.
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
    """The numbers of the samples to judge: one of each kernel at least, then any until `_MOST_JUDGED`."""
    numbers = list(range(len(samples)))
    SystemRandom().shuffle(numbers)
    first = dict.fromkeys(samples[n].kernel for n in numbers)
    leading = [next(n for n in numbers if samples[n].kernel == kernel) for kernel in first]
    left = _MOST_JUDGED / (max(1, cost(problem.steps).flops) * (3 if problem.backward else 1))
    drawn = []
    for n in dict.fromkeys([*leading, *numbers]):
        if n in leading or left >= 0:
            drawn.append(n)
            left -= len(samples[n].x)
    return sorted(drawn)


def _references(problem: Problem, samples: Sequence[CallSample]) -> tuple[Tensor, Tensor | None]:
    """(the outputs of all these tokens, the gradients of x where they have any), in float64."""
    x = torch.cat([sample.x for sample in samples])
    g = [sample.g for sample in samples if sample.g is not None]
    if not problem.backward:
        with torch.no_grad():
            return in_float64(problem.steps, problem.weights, {problem.entry: x})[0], None
    inputs = {problem.entry: x}
    out, gradients = gradients_in_float64(problem.steps, problem.weights, inputs, torch.cat(g), of_weights=False)
    return out, gradients[problem.entry]


def near_kinks(steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """For every activation with kinks, the tokens (indices) that rounding may carry across one.

    A sum of n products is accurate to eps · √n of the largest sum, eps that of float32 for all dtypes but float64:
    rounding it afterwards keeps its sign.
    """
    if not any(_kinks(step.op) for _, step in walk(steps) if isinstance(step.op, Activation)):
        return
    (entering,) = inputs.values()
    eps = torch.finfo(torch.promote_types(entering.dtype, torch.float32)).eps
    tensors: dict[str, Tensor] = {}
    expert: int | None = None
    for event in events_in_float64(steps, weights, inputs):
        if event.expert != expert:  # an activation's input is in the same expert
            tensors, expert = {}, event.expert
        tensors[event.name] = event.tensor
        if isinstance(event.step.op, Activation):
            z = tensors[event.name.removesuffix(event.step.output) + event.step.inputs[0]]
            margin = eps * math.sqrt(entering.shape[-1]) * z.abs().max()
            near = torch.zeros(len(z), dtype=torch.bool, device=z.device)
            for kink in _kinks(event.step.op):
                near |= ((z - kink).abs() <= margin).any(-1)
            yield near.nonzero().flatten() if event.tokens is None else event.tokens[near]


def _kinks(op: Activation) -> tuple[float, ...]:
    """The places where the slope jumps."""
    return tuple(x for x, order in factor(op).row.kinks if order == 1)


# --- rows of a user's file as x ---------------------------------------------------------------------------------------


class InputFile:
    """The rows of the file of --input."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @classmethod
    def of(cls, case: Case) -> InputFile:
        """The file of a case. Raises FFNError if it has changed since the run began."""
        rows = input_rows(case.input, case.spec.d_model)
        if digest("--input", case.input) != case.input_sha256:
            raise FFNError(f"{shown_path(Path(case.input))} has changed since the run began", "start again")
        return cls(rows)

    def drawn(self, tokens: int, generator: torch.Generator) -> Tensor:
        """[tokens, d_model] in float32 or wider: rows drawn with replacement, each times 1 ± 0.02 at most."""
        places = torch.randint(len(self._rows), (tokens,), generator=generator)
        rows = self._rows[places]
        scale = 1 + SCALED * (2 * torch.rand(tokens, 1, generator=generator, dtype=torch.float64) - 1)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(wide) * scale.to(wide)


OUTPUT, GRADIENT = "its output", "its gradient of "  # what is compared, in a note's words
_SMALL = 0.01  # of the largest gradient; a smaller one is judged as if it were that large


@dataclass(frozen=True)
class CallSample:
    """Some tokens of one call: x [rows, d_model] as it was entered, `out` [rows, d_model] as the kernel gave it.

    In a backward pass `g` is the gradient of the output that was entered, `gradient` that of x that came back. Of the
    calls of a `block`, counted for each kernel, the sample that was shown last is judged.
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
    """The error of every finite tensor that a kernel gave, by what it is: OUTPUT, or GRADIENT and a name.

    `out` and `gradients` are the reference, of the same shapes.
    """
    floor = least_gradient(gradients) if gradients else 0.0
    errors = {}
    for what, tensor in given.items():
        if what == OUTPUT:
            errors[what] = error_of(tensor, out, 0.0)
        elif gradients is not None:
            errors[what] = error_of(tensor, gradients[what.removeprefix(GRADIENT)], floor)
    return errors


def least_gradient(gradients: Mapping[str, Tensor]) -> float:
    """What the largest value of a gradient counts as at least."""
    return _SMALL * max(size(t) for t in gradients.values())


def error_of(tensor: Tensor, reference: Tensor, floor: float) -> Error:
    """The error of one finite tensor; `floor` is the least value used for max|b|."""
    apart, largest = gap(tensor, reference), size(reference)
    scale = max(largest, floor)
    share = apart.largest / scale if scale else (math.inf if apart.largest else 0.0)
    wide = reference.to(tensor.device)
    length = float(wide.norm()) * (scale / largest if largest else 0.0) or 1.0
    rel = float((tensor.double() - wide).norm()) / length
    small = tensor.abs()
    return Error(share, rel, int(((small > 0) & (small < torch.finfo(tensor.dtype).tiny)).sum()))


def size(tensor: Tensor) -> float:
    """max|b|."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
