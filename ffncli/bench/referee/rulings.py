"""The referee's rulings: whether an answer is right, and what is known so far about each kernel of a case.

The same code runs in the referee's process, or in the worker if there is no such process. In the referee's own process,
nothing that a kernel does to the worker's Python can change a limit, a comparison or a finding.

The baseline's error must be within `allowed`; any other kernel's error within `allowed` or 4 times the error of a
passing baseline, whichever is larger. A 16-bit output must also have an rms error within `rms_tolerance`, which
distinguishes 8-bit weights from 16-bit weights.

`allowed` is `measure.gap.tolerance_for`, 4 · (eps + eps_sum · √width), relative to the largest value of the reference.
With float32, eps_sum is eps, so `allowed` is c · eps · √d_ff with c = 4 (plus 4 · eps for the last rounding). With
16-bit dtypes, eps is the dtype's, for the rounding of every step, but eps_sum is float32's: if eps_sum were the
dtype's, c · eps · √d_ff would be 0.7 for bf16 and d_ff = 2048, and any kernel would pass.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ffncli.bench.records import TWIN, Case, CaseReport, Finding, Outcome
from ffncli.bench.referee.call_cost import INPUTS_OF_CALLS, call_cost
from ffncli.bench.referee.problem import GRADIENT, OUTPUT, CallSample, Inputs, Problem, Referee, errors_of
from ffncli.bench.verdict import Error, Ruling, WrongCode, ruled
from ffncli.block.recipe import steps
from ffncli.kernels import built_in
from ffncli.kernels.kernel import Computes, Params, kernel_steps
from ffncli.run.engine.prepare import dtype_of
from ffncli.run.measure.gap import declared_tolerance, rms_tolerance, tolerance_for
from ffncli.run.measure.statistics import in_words, not_finite

GRADIENTS = 2  # factor on `allowed` if gradients are checked, as twice as many matrix products are chained
TIMES = 4  # factor on the error of a passing baseline

# The relative precision to which the factors of float32 matmuls may be rounded (torch.set_float32_matmul_precision):
# TF32 has 10 bits, bf16 has 7.
_MATH_EPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}
_NOT_FINITE = Error(math.inf, math.inf)
_WIDE = 16  # a token with at least this many values does not repeat by chance
# How many tokens are compared at most, how many values they must have, and the least part of the dimensions that drawn
# ones span. In 3,000 draws of 12 to 40 tokens, the part was at least 0.75.
_SPAN_TOKENS, _SPAN_VALUES, _SPAN = 64, 512, 0.6


def allowed(problem: Problem, math_mode: str = "highest") -> float:
    """Return the maximum `Error.largest` of a correct baseline."""
    bound = tolerance_for(problem.dtype, problem.width, problem.scores)
    if problem.dtype == torch.float32:
        bound += 4 * _MATH_EPS[math_mode]
    return bound * (GRADIENTS if problem.backward else 1)


def error_limit(case: Case, computes: str, baseline_error: float | None) -> float:
    """Return the maximum `error_max` of a correct stored row, in the default math mode.

    `baseline_error` is the error of the row's baseline; None for the baseline itself.
    """
    problem = Problem(case, kernel_steps(steps(case.spec)), {}, dtype_of(case.dtype), 0)
    limit = max(allowed(problem), TIMES * (baseline_error or 0.0))
    return max(limit, declared_tolerance(computes)[0]) if computes else limit


def refereed(problem: Problem, baseline: str = "", math_mode: str = "highest") -> Problem:
    """Return the problem with a referee in this process."""
    return replace(problem, referee=Rulings(problem, baseline, math_mode))


class Rulings(Referee):
    """The referee of a case: limits, rulings and findings. `problem` computes its own references; `users` are the
    kernels whose code could change the inputs."""

    def __init__(
        self, problem: Problem, baseline: str = "", math_mode: str = "highest", users: Collection[str] = ()
    ) -> None:
        self._problem, self._baseline, self.users = problem, baseline, users
        self._entered: set[tuple[str, bytes]] = set()  # (kernel, token): kernels may share inputs
        self._tokens: dict[str, list[Tensor]] = {}  # the latest of each user's kernel
        self._allowed = self._others = allowed(problem, math_mode)
        self._known: dict[int, Inputs] = {}
        self._findings: dict[str, Finding] = {}
        self._shown: dict[tuple[str, int], CallSample] = {}
        self._built: dict[str, tuple[Computes, Params]] = {}

    def inputs(self, number: int) -> Inputs:
        """Return the inputs `number`, including references."""
        if number == 1:
            return self._problem.first
        if number not in self._known:
            self._known[number] = self._problem.inputs(number)
        return self._known[number]

    def declare(self, kernel: str, computes: str) -> None:
        """Record a kernel's number format; only the first call counts. Raises FFNError for an unknown format."""
        if computes:
            declared_tolerance(computes)
        self._findings.setdefault(kernel, Finding(Outcome(kernel, computes=computes)))

    def limit(self, kernel: str) -> float:
        """Return the maximum `Error.largest` of the kernel."""
        limit = self._allowed if kernel in (self._baseline, TWIN) else self._others
        computes = self._of(kernel).outcome.computes
        return max(limit, declared_tolerance(computes)[0]) if computes else limit

    def ruling(self, kernel: str, number: int, given: Mapping[str, Tensor]) -> Ruling:
        """Rule on the whole answer to the inputs `number`: the compared rows of the output and, in a backward
        pass, the gradients, named as in `errors_of`."""
        inputs = self.inputs(number)
        ruling = self._of_whole(kernel, inputs, given)
        finding = self._keep(kernel, ruling, answers=1)
        if kernel == self._baseline and number == 1 and not ruling.wrong and not finding.outcome.computes:
            self._others = max(self._others, TIMES * ruling.error.largest)
        return ruling

    def show(self, sample: CallSample) -> None:
        """Keep a sample of a timed call, replacing an earlier sample of the same block."""
        self._shown[sample.kernel, sample.block] = sample

    def timed(self) -> dict[str, Ruling]:
        """Return one ruling per kernel, on all its samples since the last call."""
        samples, self._shown = list(self._shown.values()), {}
        rulings = {kernel: Ruling() for kernel in dict.fromkeys(sample.kernel for sample in samples)}
        sound: list[CallSample] = []
        for sample in samples:
            if fault := self._fault_of(sample) or self._comes_back(sample):
                rulings[sample.kernel] = fault
            else:
                sound.append(sample)
        errors = self._problem.sampled(sound)
        for kernel in rulings:
            judged = [(e, s) for e, s in zip(errors, sound, strict=True) if e is not None and s.kernel == kernel]
            if not rulings[kernel].wrong and judged:
                rulings[kernel] = self._of_samples(kernel, *zip(*judged, strict=True))
            if not rulings[kernel].wrong:
                rulings[kernel] = self._not_drawn(kernel) or rulings[kernel]
            self._keep(kernel, rulings[kernel], samples=sum(sample.kernel == kernel for sample in samples))
        return rulings

    def sampled(self, samples: Sequence[CallSample]) -> list[Error | None]:
        """Return each sample's error, in order, without a ruling; None for a sample that was not judged."""
        return self._problem.sampled(samples)

    def accuse(self, kernel: str, note: str) -> None:
        """Record the worker's note on a wrong kernel; only the first note about each kernel is kept."""
        self._keep(kernel, Ruling(note))

    def call_cost(self, kernel: str) -> tuple[int, float]:
        """Build the kernel here, where no user's file was loaded, and time some calls on two inputs."""
        problem = self._problem
        if kernel not in self._built:
            one = built_in(kernel)
            params = tuple(one.prepare(problem.steps, problem.weights))
            self._built[kernel] = one.build(problem.steps, problem.case.device, problem.dtype), params
        compute, params = self._built[kernel]
        x = [self.inputs(number).x for number in INPUTS_OF_CALLS]
        now = x[0]

        def turn(number: int) -> None:
            nonlocal now
            now = x[number % len(x)]

        with torch.inference_mode():
            return call_cost(lambda: compute(now, params), turn, problem.case.threads)

    def clock_started(self) -> None:
        """Do nothing: the worker has only one clock."""

    def clock_stopped(self) -> None:
        """Do nothing: the worker has only one clock."""

    def clock_remark(self, seconds: float) -> str:
        """Return no fault: there is only one clock."""
        return ""

    def report(self) -> CaseReport:
        """Return the findings so far."""
        return CaseReport(self._problem.case.key, tuple(self._findings.values()))

    # --- the rules ----------------------------------------------------------------------------------------------------

    def _of_whole(self, kernel: str, inputs: Inputs, given: Mapping[str, Tensor]) -> Ruling:
        problem = self._problem
        tokens = problem.case.tokens if inputs.rows is None else len(inputs.rows)
        out = given.get(OUTPUT)
        wrong = "has no output" if out is None else form_fault(problem, out.shape, out.dtype, tokens)
        if out is None or (wrong := wrong or _gradient_fault(problem, given)):
            return Ruling(wrong)
        for what, tensor in given.items():
            if wrong := infinite(what, tensor):
                return Ruling(wrong, error=_NOT_FINITE)
        assert inputs.out is not None
        errors = errors_of(given, inputs.out, inputs.grads)
        worst, error = max(errors, key=lambda what: errors[what].largest), reduce(Error.worst, errors.values())
        beyond = self._beyond_limit(kernel, worst, error)
        return beyond or self._beyond_rms(kernel, errors[OUTPUT], out.numel(), inputs.rounding) or Ruling(error=error)

    def _of_samples(self, kernel: str, errors: Sequence[Error], samples: Sequence[CallSample]) -> Ruling:
        worst = reduce(Error.worst, errors)
        wrong = self._beyond_limit(kernel, OUTPUT, worst)
        # In a backward pass, the errors include those of the gradients.
        if wrong is None and not self._problem.backward:
            together = replace(worst, rel=math.sqrt(sum(error.rel**2 for error in errors) / len(errors)))
            values, rounding = sum(s.out.numel() for s in samples), self._problem.first.rounding
            if self._beyond_rms(kernel, together, values, rounding):
                # Another x may cause more rounding, especially in the router of a single token. The samples' own
                # rounding decides, but it is expensive, so it is computed only here.
                wrong = self._beyond_rms(kernel, together, values, max(rounding, self._problem.rounding_of(samples)))
        if wrong is None:
            return Ruling(error=worst)
        return wrong.at("", WrongCode.WRONG_WHEN_TIMED)

    def _beyond_limit(self, kernel: str, what: str, error: Error) -> Ruling | None:
        limit = self.limit(kernel)
        if error.largest <= limit:
            return None
        return Ruling(f"{what} is off by {error.largest:.2g}; the limit is {limit:.2g}", error=error)

    def _beyond_rms(self, kernel: str, error: Error, values: int, rounding: float) -> Ruling | None:
        """Rule on the rms error of a 16-bit dtype or a declared format; None if rounding explains it."""
        computes = self._of(kernel).outcome.computes
        if not values or not (computes or rounding):
            return None
        limit = declared_tolerance(computes)[1] if computes else rms_tolerance(self._problem.dtype, rounding, values)
        if error.rel <= limit:
            return None
        text = f"{OUTPUT} has an rms error of {error.rel:.2g}; the limit is {limit:.2g}"
        advice = f"it declares {computes}" if computes else "a kernel of fewer bits must declare them (`computes`)"
        return Ruling(f"{text}; {advice}", WrongCode.LOWER_PRECISION, error)

    def _fault_of(self, sample: CallSample) -> Ruling | None:
        """Return the ruling on a sample that cannot be judged by its values; None if it can."""
        tokens = len(sample.x)
        parts = {OUTPUT: sample.out} | ({} if sample.gradient is None else {GRADIENT + "x": sample.gradient})
        if self._problem.backward and sample.gradient is None:
            return Ruling(f"{GRADIENT}x is missing", WrongCode.WRONG_WHEN_TIMED)
        for what, tensor in parts.items():
            if wrong := form_fault(self._problem, tensor.shape, tensor.dtype, tokens) or infinite(what, tensor):
                return Ruling(wrong, WrongCode.WRONG_WHEN_TIMED, _NOT_FINITE)
        return None

    def _comes_back(self, sample: CallSample) -> Ruling | None:
        """Check that a timed input is new: if a token with enough values repeats, users' code has changed it."""
        if sample.x.shape[-1] < _WIDE or self._problem.case.input:  # rows of a file may repeat
            return None
        tokens = {(sample.kernel, bytes(row.contiguous().view(torch.uint8).tolist())) for row in sample.x}
        again = len(tokens) < len(sample.x) or not tokens.isdisjoint(self._entered)
        self._entered |= tokens
        if sample.kernel not in self.users:
            return None
        self._tokens[sample.kernel] = [*self._tokens.get(sample.kernel, []), *sample.x.float()][-_SPAN_TOKENS:]
        if not again:
            return None
        return Ruling("an input of its timed calls was repeated", WrongCode.PATCHED_FFN)

    def _not_drawn(self, kernel: str) -> Ruling | None:
        """Check that the timed inputs span as many dimensions as independent normal numbers do. If they are nearly
        equal, multiples of each other or in a plane, users' code has changed them, to know parts of the answers.

        The dimensions are (Σ λ)² / Σ λ² over the eigenvalues λ of the tokens' inner products; n tokens of d normal
        numbers have n · d / (n + d + 1).
        """
        tokens, case = self._tokens.get(kernel, []), self._problem.case
        # prescribed experts move tokens in common directions
        if len(tokens) * case.spec.d_model < _SPAN_VALUES or len(tokens) < 2 or case.routing:
            return None
        rows = torch.stack(tokens)
        products = rows @ rows.T
        span = float(products.trace() ** 2 / products.square().sum())
        count, width = rows.shape
        expected = count * width / (count + width + 1)
        if span >= _SPAN * expected:
            return None
        text = f"the inputs of its timed calls span {span:.0f} dimensions, drawn ones {expected:.0f}"
        return Ruling(text, WrongCode.PATCHED_FFN)

    # --- findings -----------------------------------------------------------------------------------------------------

    def _of(self, kernel: str) -> Finding:
        return self._findings.setdefault(kernel, Finding(Outcome(kernel)))

    def _keep(self, kernel: str, ruling: Ruling, answers: int = 0, samples: int = 0) -> Finding:
        """Add a ruling to the kernel's finding, which keeps its first fault; return the new finding."""
        before = self._of(kernel)
        after = Finding(ruled(before.outcome, ruling), before.answers + answers, before.samples + samples)
        self._findings[kernel] = after
        return after


def form_fault(problem: Problem, shape: Sequence[int], dtype: torch.dtype, tokens: int) -> str:
    """Return what is wrong with the shape or dtype of an output for this number of tokens; empty if both are right."""
    expected = [tokens, problem.case.spec.d_model]
    if list(shape) != expected:
        return f"returns shape {list(shape)}, expected {expected}"
    if dtype != problem.dtype:
        return f"returns {str(dtype).removeprefix('torch.')}, expected {str(problem.dtype).removeprefix('torch.')}"
    return ""


def infinite(what: str, tensor: Tensor) -> str:
    """Return text such as `its output has 3 NaN`, or "" if all values are finite."""
    return "" if bool(tensor.isfinite().all()) else f"{what} has {in_words(*not_finite(tensor))}"


def _gradient_fault(problem: Problem, given: Mapping[str, Tensor]) -> str:
    """Return the fault of a gradient that is missing or has the wrong shape; empty if there is none."""
    if not problem.backward:
        return ""
    width = problem.case.spec.d_model
    shapes = {"x": [problem.case.tokens, width]} | {name: list(t.shape) for name, t in problem.weights.items()}
    for name, shape in shapes.items():
        gradient = given.get(GRADIENT + name)
        if gradient is None:
            return f"{GRADIENT}{name} is missing"
        if list(gradient.shape) != shape:
            return f"{GRADIENT}{name} has shape {list(gradient.shape)}, expected {shape}"
    return ""
