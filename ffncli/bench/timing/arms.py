"""The arms of a case: its kernels, the baseline's twin, the machine anchor and the bare products, each with its own
buffers, placed again at every placement."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ffncli.bench.activity import ACTIVITY
from ffncli.bench.judge import roofline
from ffncli.bench.machine import machine
from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Doing, Job
from ffncli.bench.referee.errors import Error, Ruling
from ffncli.bench.referee.prescribed_routing import ExpertLoad
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.anchor import anchor, gpu_anchor
from ffncli.bench.timing.bare_products import Chain
from ffncli.bench.timing.clock import monotonic_seconds
from ffncli.bench.timing.cuda_graphs import Capturable, Launching, by_graphs
from ffncli.bench.timing.fresh_inputs import FreshInputs, RoutedSource, Source, drawn, in_turn, source_of
from ffncli.bench.timing.outcomes import BrokenArm, WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel, shuffle_buffers
from ffncli.bench.timing.placement import Caching, flusher
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.timing.slowed import slowed_kernel
from ffncli.bench.wrong_codes import WrongCode
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels import AUTO
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
    Those `without` which it is to go are not loaded, and `auto` is chosen later. `changed` is asked after each file
    what it replaced of others.
    """

    def one(choice: KernelChoice) -> Kernel | FFNError | WrongResult:
        if choice.label in without:
            return FFNError(f"{choice.label} is left out")
        if choice.kernel == AUTO:
            return FFNError(f"{choice.label} stands for no kernel yet")
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
        source: Source | None = None,
    ) -> None:
        self.kernels, self.twin, self.launching = tuple(kernels), twin, launching  # None on a CPU
        self.by_name: dict[str, Arm] = {}  # of the placement made last
        self.wrong: dict[str, WrongResult] = {}
        self.errors: dict[str, Error] = {}
        self._placed_at = 0.0
        self.seconds = 0.0  # of checking timed outputs, within place
        self._problem, self._copies = problem, caching.copies
        self._draw = random.Random(problem.seed)
        self._flush = flusher(llc, problem.case.device) if caching.mode == "flush" else None
        self.chain: Chain | None = Chain(problem, self._draw, caching.shared)
        self._source = source or source_of(problem)
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
        placed = [fresh.placed for fresh in self._fresh]
        self.by_name = {}  # frees the old buffers first
        self._source.draw()
        shuffle_buffers(placed, self._draw, self._copies)
        for one in placed:
            one.place(self._copies)
            machine.finish(self._problem.case.device)  # what its prepare has broken on a GPU is raised under its name
        if self.chain:
            self.chain.place(self._copies)
        ACTIVITY.rests()
        self._start_clocks()
        return self._arms({})

    def captured(self, inner: Mapping[str, int]) -> list[Arm]:
        """The arms just placed as they are timed on a GPU: replayed, if that is how they are launched; none on a CPU.

        Raises BrokenArm, and SpoiledCapture.
        """
        if self.launching is None:
            return []
        capturable: dict[str, Capturable] = {fresh.placed.name: fresh.placed for fresh in self._fresh}
        if self.chain:
            capturable[GEMM] = self.chain
        calls = {name: 1 if self._flush else inner[name] for name in capturable}  # nothing gets between two of a graph
        users = [fresh for fresh in self._fresh if fresh.placed.built.kernel.origin and not self._flush]
        judged = {fresh.placed.name: fresh.captured_call for fresh in users}
        replayed = self.launching.capture(capturable, calls, judged)
        arms = self._arms(replayed)
        ACTIVITY.rests()
        for fresh in users if replayed else ():  # else not every graph was replayed
            fresh.take_captured()
        return arms

    def _arms(self, calls: Mapping[str, int]) -> list[Arm]:
        """All arms; `calls` that their replays make."""
        arms = [self._fresh_arm(fresh) for fresh in self._fresh]
        if self.chain:
            arms.append(self._chain_arm(self.chain))
        arms = [replace(arm, calls=calls.get(arm.name, 1)) for arm in arms]
        self.by_name = {arm.name: arm for arm in arms}
        return [*arms, anchor_of(self._problem.case.device, self._draw)]

    def _fresh_arm(self, fresh: FreshInputs) -> Arm:
        """A kernel's arm: other inputs before every call, on a GPU before every block."""
        placed, flush, every_call = fresh.placed, self._flush, self.launching is None
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
        flush, every_call = self._flush, self.launching is None
        before = in_turn(partial(self._source.write, chain.entry), flush) if every_call else flush
        return Arm(GEMM, chain.call, before, flushes=flush is not None)

    @property
    def load(self) -> ExpertLoad:
        """Where the tokens of all calls went, if a routing is prescribed."""
        return self._source.load if isinstance(self._source, RoutedSource) else ExpertLoad()

    def _start_clocks(self) -> None:
        self._problem.rules.clock_started()
        self._placed_at = monotonic_seconds()

    def _compare_clocks(self) -> None:
        """Where the referee's clock says otherwise, no time of a user's kernel can be believed."""
        if remark := self._problem.rules.clock_stopped(monotonic_seconds() - self._placed_at):
            for placed in self.kernels:
                if placed.built.kernel.origin:
                    self.wrong.setdefault(placed.name, WrongResult(remark, code=WrongCode.PATCHED_CLOCK))

    def _require_weights_in_place(self) -> None:
        """Where the weights of a kernel of ours were moved, a user's kernel did that to make it slower."""
        ours = [one for one in (*self.kernels, *filter(None, [self.twin])) if not one.built.kernel.origin]
        moved = next((placed.name for placed in ours if placed.moved()), None)
        for placed in self.kernels if moved else ():
            if placed.built.kernel.origin:
                text = f"the weights of {moved} were moved in memory while it was timed"
                self.wrong.setdefault(placed.name, WrongResult(text, code=WrongCode.PATCHED_FFN))

    def inspect(self) -> None:
        """Have judged what was answered in the blocks since the last time, and whether weights changed."""
        self._compare_clocks()
        self._require_weights_in_place()
        rulings = self._problem.rules.timed()
        for fresh in self._fresh:
            check = partial(self._timed, fresh, rulings.get(fresh.placed.name, Ruling()))
            self._check(self._reported(fresh.placed), fresh.placed, check)

    def _reported(self, placed: PlacedKernel) -> str:
        """The kernel that an arm's errors count for; the twin's are the baseline's."""
        return placed.built.kernel.name if placed is self.twin else placed.name

    def _timed(self, fresh: FreshInputs, ruling: Ruling, placed: PlacedKernel) -> Error:
        """The error of an arm's timed answers, after a check that its weights are unchanged. Raises WrongResult."""

        def answers() -> Error:
            if fresh.wrong is not None:
                raise fresh.wrong
            return correct.obeyed(ruling).worst(fresh.whole_error())

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
    job: Job,
    kind: Callable[..., Arms] = Arms,
) -> Arms:
    """The arms of a case `without` those of ours that could not be had. Raises BrokenArm for a twin that cannot be."""
    case, draw, twin = problem.case, random.Random(problem.seed), None
    if baseline and TWIN not in without:
        try:
            twin = twin_of(baseline, problem, draw)
        except BaseException as error:  # SystemExit too: it is built by the user's code
            raise BrokenArm(TWIN) from error
    ACTIVITY.rests()  # what follows is ours: references, buffers
    arms = kind(
        problem, kernels, twin, caching, machine.llc_bytes(case.device), launching_of(case, job), job.method.rounds
    )
    if GEMM in without:
        arms.chain = None
    return arms


def launching_of(case: Case, job: Job) -> Launching | None:
    """How the arms of a case are called; None on a CPU."""
    if not case.device.startswith("cuda"):
        return None
    work = roofline.work_of(case)
    asked = job.method.launch if case.ranks.world_size == 1 else "plain"  # collectives are not captured
    return Launching(asked, by_graphs(work.flops, work.bytes), dict(job.plain).get(case.key, ""))


def twin_of(baseline: PlacedKernel, problem: Problem, draw: random.Random) -> PlacedKernel:
    """The baseline once more: built again, since a kernel may keep buffers; one that compiles only gets new tensors."""
    ACTIVITY.first_call(TWIN)
    built = baseline.built
    if not built.kernel.compiles:
        compute = built.kernel.build(problem.steps, problem.case.device, problem.dtype)
        guarded = unguarded(built.compute) is not built.compute
        built = replace(built, compute=compute if guarded else unguarded(compute))
    problem.rules.declare(TWIN, built.kernel.computes)
    return PlacedKernel(TWIN, built, problem, draw, baseline.shared)


def anchor_of(device: str, draw: random.Random) -> Arm:
    """The machine anchor; on a GPU, work on that GPU."""
    return Arm(ANCHOR, gpu_anchor(device)) if device.startswith("cuda") else anchor(draw)
