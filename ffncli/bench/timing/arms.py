"""The arms of a case: its kernels, the baseline's twin, the machine anchor and the bare products, each with its own
buffers, placed again at every placement."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ffncli.bench.judge import roofline
from ffncli.bench.judge.wrong_codes import WrongCode
from ffncli.bench.machine import machine
from ffncli.bench.records import ANCHOR, BLOCK, GEMM, STEP, TWIN, Doing
from ffncli.bench.referee.errors import OUTPUT, Error
from ffncli.bench.referee.prescribed_routing import ExpertLoad
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.anchor import anchor, gpu_anchor
from ffncli.bench.timing.bare_products import Chain
from ffncli.bench.timing.by_step import step_arms
from ffncli.bench.timing.clock import monotonic_seconds
from ffncli.bench.timing.cuda_graphs import Launching, Replayable, by_graphs
from ffncli.bench.timing.fresh_inputs import ROWS, FreshInputs, RoutedSource, drawn, in_turn, source_of
from ffncli.bench.timing.outcomes import BrokenArm, WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel, shuffle_buffers
from ffncli.bench.timing.placement import Arena, Caching, flusher
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.timing.slowed import slowed_kernel
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels.choice import KernelChoice
from ffncli.kernels.kernel import Kernel, Steps
from ffncli.run.user.kernels import kernel_of, unguarded


def kernels_by_label(
    choices: Sequence[KernelChoice],
    steps: Steps,
    spec: FFNSpec,
    without: Collection[str] = (),
    tell: Callable[[Doing, str], None] = lambda doing, name: None,
    changed: Callable[[], WrongResult | None] = lambda: None,
) -> dict[str, Kernel | FFNError | WrongResult]:
    """The kernels by label, in order; in place of one that cannot be had, why.

    Each by itself, so that a file that does not run costs its own rows alone; `tell` hears of each file before it runs.
    Those `without` which it is to go are not loaded. `changed` is asked after each file what it replaced of others.
    """

    def one(choice: KernelChoice) -> Kernel | FFNError | WrongResult:
        if choice.label in without:
            return FFNError(f"{choice.label} is left out")
        if choice.file is not None:
            tell("loading", choice.label)
        try:
            kernel = kernel_of(choice, steps, spec)
        except FFNError as error:
            return changed() or error
        if choice.file is not None and (wrong := changed()):
            return wrong
        kernel = replace(kernel, name=choice.label)
        return kernel if choice.factor is None else slowed_kernel(kernel, float(choice.factor))

    return {choice.label: one(choice) for choice in choices}


_WHOLE = 1 << 20  # inputs of this number and above are drawn for timed calls: nobody else asks for them


class Arms:
    """All arms of a case; `place` is the callback of `rounds.measure`. `twin` is the baseline's, if that is ok.

    `wrong` has the errors in timed outputs, by the name of the kernel. `rounds` is the least number in a placement.
    """

    def __init__(
        self,
        problem: Problem,
        kernels: Sequence[PlacedKernel],
        twin: PlacedKernel | None,
        caching: Caching,
        llc: int,
        launching: Launching | None = None,
        rounds: int = 1,
    ) -> None:
        self.kernels, self.twin, self._launching = tuple(kernels), twin, launching
        self.by_name: dict[str, Arm] = {}  # of the placement made last
        self.wrong: dict[str, WrongResult] = {}
        self.errors: dict[str, Error] = {}
        self._placed_at = 0.0
        self.seconds = 0.0  # of checking timed outputs, within place
        self._problem, self._copies = problem, caching.copies
        self._draw = random.Random(problem.seed)
        self._flush = flusher(llc, problem.case.device) if caching.mode == "flush" else None
        self.chain: Chain | None = Chain(problem, self._draw)
        self._source = source_of(problem)
        whole = problem.inputs(_WHOLE + drawn(_WHOLE)) if problem.backward else None
        self._fresh = [
            FreshInputs(placed, problem, self._source, whole, rounds)
            for placed in (*self.kernels, *([twin] if twin else []))
        ]

    def place(self, number: int) -> list[Arm]:
        """All arms with new buffers, after a check of the last placement's outputs. Raises BrokenArm."""
        if number:
            start = monotonic_seconds()
            self.inspect()
            self.seconds += monotonic_seconds() - start
        every: dict[str, PlacedKernel | Chain] = {placed.name: placed for placed in self.kernels}
        if self.twin:
            every[self.twin.name] = self.twin
        if self.chain:
            every[GEMM] = self.chain
        self.by_name = {}  # frees the old buffers first
        self._source.draw()
        shuffle_buffers([one for one in every.values() if isinstance(one, PlacedKernel)], self._draw)
        for one in every.values():
            one.place(self._copies)
        if self._launching:
            replayable: dict[str, Replayable] = {**every}
            self._launching.settle(replayable)
        self._start_clocks()
        arms = [self._fresh_arm(fresh) for fresh in self._fresh]
        if self.chain:
            arms.append(self._chain_arm(self.chain))
        self.by_name = {arm.name: arm for arm in arms}
        return [*arms, anchor_of(self._problem.case.device, self._draw)]

    def _fresh_arm(self, fresh: FreshInputs) -> Arm:
        """A kernel's arm: other inputs before every call, on a GPU before every block."""
        placed, flush, every_call = fresh.placed, self._flush, not self._problem.case.device.startswith("cuda")
        return Arm(
            placed.name,
            placed.call,
            in_turn(fresh.before_call, flush) if every_call else flush,
            flushes=flush is not None,
            before_block=partial(fresh.before_block, every_call=every_call),
            after_block=fresh.after_block,
        )

    def _chain_arm(self, chain: Chain) -> Arm:
        """The bare products: their first input is written before every call as a kernel's is."""
        flush, every_call = self._flush, not self._problem.case.device.startswith("cuda")
        before = in_turn(partial(self._source.write, chain.entry), flush) if every_call else flush
        return Arm(GEMM, chain.call, before, flushes=flush is not None)

    @property
    def load(self) -> ExpertLoad:
        """Where the tokens of all calls went, if a routing is prescribed."""
        return self._source.load if isinstance(self._source, RoutedSource) else ExpertLoad()

    @property
    def launched(self) -> str:
        """A note on how the arms were called, if there was a choice."""
        return self._launching.note if self._launching else ""

    def _start_clocks(self) -> None:
        if self._problem.referee:
            self._problem.referee.clock_started()
        self._placed_at = monotonic_seconds()

    def _compare_clocks(self) -> None:
        """Where the referee's clock says otherwise, no time of a user's kernel can be believed."""
        referee, passed = self._problem.referee, monotonic_seconds() - self._placed_at
        if referee and (remark := referee.clock_stopped(passed)):
            for placed in self.kernels:
                if placed.built.kernel.origin:
                    self.wrong.setdefault(placed.name, WrongResult(remark, code=WrongCode.PATCHED_CLOCK))

    def inspect(self) -> None:
        """Judge what was answered in the blocks since the last time, and whether weights changed."""
        self._compare_clocks()
        samples = [sample for fresh in self._fresh for sample in fresh.samples]
        errors = iter(self._problem.sampled(samples))
        for fresh in self._fresh:
            judged = [error for _, error in zip(fresh.samples, errors, strict=False) if error is not None]
            fresh.samples.clear()
            check = partial(self._timed, fresh, judged)
            self._check(self._reported(fresh.placed), fresh.placed, check)

    def _reported(self, placed: PlacedKernel) -> str:
        """The kernel that an arm's errors count for; the twin's are the baseline's."""
        return placed.built.kernel.name if placed is self.twin else placed.name

    def _timed(self, fresh: FreshInputs, judged: Sequence[Error], placed: PlacedKernel) -> Error:
        """The error of an arm's timed answers, after a check that its weights are unchanged. Raises WrongResult."""
        problem = self._problem

        def answers() -> Error:
            if fresh.wrong is not None:
                raise fresh.wrong
            worst = Error()
            for error in judged:
                worst = worst.worst(error)
            correct.require_within(OUTPUT, worst, placed.limit)
            if not problem.backward:  # there `judged` are the worst of outputs and gradients
                together = replace(worst, rel=math.sqrt(sum(error.rel**2 for error in judged) / max(1, len(judged))))
                values = len(judged) * min(ROWS, problem.case.tokens) * problem.case.spec.d_model
                correct.require_rms(together, values, problem.first.rounding, problem, placed)
            return worst.worst(fresh.whole_error())

        correct.untouched(placed)
        return correct.checked_at("", answers, WrongCode.WRONG_WHEN_TIMED)

    def refresh(self) -> None:
        """Check the kernels' outputs on new tokens."""
        inputs = self._problem.inputs(2)
        for placed in self.kernels:
            self._check(placed.name, placed, lambda placed: correct.fresh(placed, self._problem, inputs))

    def _check(self, name: str, placed: PlacedKernel, error_of: Callable[[PlacedKernel], Error]) -> None:
        if name in self.wrong:
            return
        try:
            error = error_of(placed)
        except WrongResult as wrong:
            self.wrong[name] = wrong
            error = wrong.error or Error()
        self.errors[name] = self.errors.get(name, error).worst(error)


def arms_of(
    problem: Problem,
    kernels: Sequence[PlacedKernel],
    baseline: PlacedKernel | None,
    caching: Caching,
    without: Collection[str],
    rounds: int,
) -> Arms:
    """The arms of a case `without` those of ours that could not be had. Raises BrokenArm for a twin that cannot be."""
    case, draw, twin = problem.case, random.Random(problem.seed), None
    if baseline and TWIN not in without:
        try:
            twin = twin_of(baseline, problem, draw)
        except BaseException as error:  # SystemExit too: it is built by the user's code
            raise BrokenArm(TWIN) from error
    launching = None
    if case.device.startswith("cuda"):
        work = roofline.work_of(case)
        launching = Launching(by_graphs(work.flops, work.bytes))
    arms = Arms(problem, kernels, twin, caching, machine.llc_bytes(case.device), launching, rounds)
    if GEMM in without:
        arms.chain = None
    return arms


def twin_of(baseline: PlacedKernel, problem: Problem, draw: random.Random) -> PlacedKernel:
    """The baseline once more: built again, since a kernel may keep buffers; one that compiles only gets new tensors."""
    built = baseline.built
    if not built.kernel.compiles:
        compute = built.kernel.build(problem.steps, problem.case.device, problem.dtype)
        guarded = unguarded(built.compute) is not built.compute
        built = replace(built, compute=compute if guarded else unguarded(compute))
    return PlacedKernel(TWIN, built, problem, draw, baseline.limit)


def anchor_of(device: str, draw: random.Random) -> Arm:
    """The machine anchor; on a GPU, work on that GPU."""
    return Arm(ANCHOR, gpu_anchor(device)) if device.startswith("cuda") else anchor(draw)


class StepArms:
    """The arms of --by-step: the whole block and its steps, as `engine.execute` computes them, and the machine anchor.

    Their caches are warm, or emptied before every call.
    """

    def __init__(self, problem: Problem, caching: Caching, llc: int) -> None:
        self._problem, self._draw = problem, random.Random(problem.seed)
        self._flush = flusher(llc, problem.case.device) if caching.mode == "flush" else None

    def place(self, number: int) -> list[Arm]:
        """All arms with new buffers."""
        arms = step_arms(self._problem.steps, self._problem.weights, self._problem.first.x, self._placed_copy)
        named = {arm.name if arm.name == BLOCK else STEP + arm.name: arm.call for arm in arms}
        return [
            *(Arm(name, call, self._flush, flushes=self._flush is not None) for name, call in named.items()),
            anchor_of(self._problem.case.device, self._draw),
        ]

    @property
    def load(self) -> ExpertLoad:
        """Where the tokens of the one input go, if a routing is prescribed."""
        routing = self._problem.routing
        return ExpertLoad() if routing is None else routing.counted(self._problem.first.x)

    def _placed_copy(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            ((copy,),) = Arena(self._problem.case.device, self._draw).place([(tensor,)])
        return copy
