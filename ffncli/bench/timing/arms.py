"""The arms of a case: its kernels, the baseline's twin, the machine anchor and the bare products, each with its own
buffers, laid out anew at every placement."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.bench.records import ANCHOR, BLOCK, GEMM, STEP, TWIN, Doing
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.anchor import anchor, gpu_anchor
from ffncli.bench.timing.bare_products import Chain
from ffncli.bench.timing.by_step import step_arms
from ffncli.bench.timing.cuda_graphs import Launching, Replayable
from ffncli.bench.timing.outcomes import Error, WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel, shuffle_buffers
from ffncli.bench.timing.placement import Arena, Caching, flusher
from ffncli.bench.timing.problem import Problem
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


class Arms:
    """All arms of a case; `place` is the callback of `rounds.measure`. `twin` is the baseline's, where that is ok.

    `wrong` has the errors in timed outputs, by the name of the kernel.
    """

    def __init__(
        self,
        problem: Problem,
        kernels: Sequence[PlacedKernel],
        twin: PlacedKernel | None,
        caching: Caching,
        llc: int,
        launching: Launching | None = None,
    ) -> None:
        self.kernels, self.twin, self._launching = tuple(kernels), twin, launching
        self.by_name: dict[str, Arm] = {}  # of the placement made last
        self.wrong: dict[str, WrongResult] = {}
        self.errors: dict[str, Error] = {}
        self.seconds = 0.0  # of checking timed outputs, within place
        self._problem, self._copies = problem, caching.copies
        self._draw = random.Random(problem.seed)
        self._flush = flusher(llc, problem.case.device) if caching.mode == "flush" else None
        self.chain: Chain | None = Chain(problem, self._draw)

    def place(self, number: int) -> list[Arm]:
        """All arms with new buffers, after a check of the last placement's outputs. Raises BrokenArm."""
        if number:
            start = time.perf_counter()
            self.inspect()
            self.seconds += time.perf_counter() - start
        every: dict[str, PlacedKernel | Chain] = {placed.name: placed for placed in self.kernels}
        if self.twin:
            every[self.twin.name] = self.twin
        if self.chain:
            every[GEMM] = self.chain
        self.by_name = {}  # frees the old buffers first
        shuffle_buffers([one for one in every.values() if isinstance(one, PlacedKernel)], self._draw)
        for one in every.values():
            one.place(self._copies)
        if self._launching:
            replayable: dict[str, Replayable] = {**every}
            self._launching.settle(replayable)
        self.by_name = {name: Arm(name, one.call, self._flush) for name, one in every.items()}
        return [*self.by_name.values(), anchor_of(self._problem.case.device, self._draw)]

    @property
    def launched(self) -> str:
        """A note on how the arms were called, where there was a choice."""
        return self._launching.note if self._launching else ""

    def inspect(self) -> None:
        """Check the outputs of the last timed calls."""
        for placed in self.kernels:
            self._check(placed.name, placed, lambda placed: correct.timed(placed, self._problem))
        if self.twin:
            self._check(self.twin.built.kernel.name, self.twin, lambda placed: correct.timed(placed, self._problem))

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


def twin_of(baseline: PlacedKernel, problem: Problem, draw: random.Random) -> PlacedKernel:
    """The baseline once more: built again, since a kernel may keep buffers; one that compiles only gets new tensors."""
    built = baseline.built
    if not built.kernel.compiles:
        compute = built.kernel.build(problem.steps, problem.case.device, problem.dtype)
        guarded = unguarded(built.compute) is not built.compute
        built = replace(built, compute=compute if guarded else unguarded(compute))
    return PlacedKernel(TWIN, built, problem, draw, baseline.limit)


def anchor_of(device: str, draw: random.Random) -> Arm:
    """The machine anchor: of the GPU itself where a GPU is measured."""
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
        return [
            *(Arm(name if (name := arm.name) == BLOCK else STEP + name, arm.call, self._flush) for arm in arms),
            anchor_of(self._problem.case.device, self._draw),
        ]

    def _placed_copy(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            ((copy,),) = Arena(self._problem.case.device, self._draw).place([(tensor,)])
        return copy
