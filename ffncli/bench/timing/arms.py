"""The arms of a case: its kernels, the baseline's twin, the machine anchor and the bare products, each with its own
buffers, placed again at every placement."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ffncli.bench.judge import roofline
from ffncli.bench.machine import machine
from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Job, Outcome
from ffncli.bench.referee.prescribed_routing import ExpertLoad
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing import correctness
from ffncli.bench.timing.bare_products import Chain
from ffncli.bench.timing.clock import monotonic_seconds
from ffncli.bench.timing.fresh_inputs import FreshInputs, RoutedSource, Source, drawn, in_turn, source_of
from ffncli.bench.timing.gpu.cuda_graphs import Capturable, Launching, by_graphs
from ffncli.bench.timing.outcomes import BrokenArm, verdict_of
from ffncli.bench.timing.placed_kernel import PlacedKernel, shuffle_buffers
from ffncli.bench.timing.placement import Caching, flusher
from ffncli.bench.timing.reference_arms import anchor, gpu_anchor, slowed_kernel
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.verdict import Ruling, WrongCode, ruled
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
    gone: Mapping[str, Outcome] = MappingProxyType({}),
    replaced: Callable[[], Ruling] = Ruling,
) -> dict[str, Kernel | Outcome]:
    """The kernels by label, in order, without `auto`, which is chosen later; in place of one that cannot be had, its
    outcome.

    Each by itself, so that a file that does not run costs its own rows alone; `replaced` is asked after each file what
    it replaced of others. Kernels that are `gone` are not loaded.
    """

    def one(choice: KernelChoice) -> Kernel | Outcome:
        if choice.label in gone:
            return gone[choice.label]
        if choice.file is not None:
            REPORTER.stage("loading", choice.label)
        failed = Outcome(choice.label)
        try:
            kernel = kernel_of(choice, steps, spec)
        except FFNError as error:
            failed = Outcome(choice.label, *verdict_of(error))
        ruling = replaced() if choice.file is not None or failed.note else Ruling()
        if ruling.wrong:
            return ruled(Outcome(choice.label), ruling)
        if failed.note:
            return failed
        kernel = replace(kernel, name=choice.label)
        return kernel if choice.factor is None else slowed_kernel(kernel, float(choice.factor))

    return {choice.label: one(choice) for choice in choices if choice.kernel != AUTO}


_CHECKED = 1 << 20  # inputs of this number and above are drawn for timed calls: nobody else asks for them


class Arms:
    """All arms of a case; `place` is the callback of `rounds.measure`. `twin` is the baseline's, if that is ok.

    `rulings` are on timed outputs, by the name of the kernel. `rounds` is the least number in a placement. Ranks enter
    a `source` of theirs, add `more` arms, and `hear` what others say of kernels once they have said which are wrong.
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
        more: Callable[[Arms], Sequence[Arm]] = lambda arms: (),
        hear: Callable[[Mapping[str, str]], Iterable[tuple[str, str]]] = lambda notes: (),
    ) -> None:
        self.kernels, self.twin, self.launching = tuple(kernels), twin, launching  # None on a CPU
        self.by_name: dict[str, Arm] = {}  # of the placement made last
        self.rulings: dict[str, Ruling] = {}
        self._placed_at = 0.0
        self.seconds = 0.0  # of checking timed outputs, within place
        self.problem, self._copies, self._more, self._hear = problem, caching.copies, more, hear
        self._draw = random.Random(problem.seed)
        self.flush = flusher(llc, problem.case.device) if caching.mode == "flush" else None
        self.chain: Chain | None = Chain(problem, self._draw, caching.shared)
        self.source = source or source_of(problem)
        checked = problem.inputs(_CHECKED + drawn(_CHECKED)) if problem.backward else None
        self._fresh = [
            FreshInputs(placed, problem, self.source, checked, rounds)
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
        self.source.draw()
        shuffle_buffers(placed, self._draw, self._copies)
        for one in placed:
            one.place(self._copies)
            machine.finish(self.problem.case.device)  # what its prepare has broken on a GPU is raised under its name
        if self.chain:
            self.chain.place(self._copies)
        REPORTER.rests()
        self.problem.rules.clock_started()
        self._placed_at = monotonic_seconds()
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
        # An output keeps the graph of its gradients, whose leaves belong to the stream of the plain calls, for which no
        # capture may wait.
        for fresh in self._fresh:
            fresh.placed.forget()
        calls = {name: 1 if self.flush else inner[name] for name in capturable}  # nothing gets between two of a graph
        users = [fresh for fresh in self._fresh if fresh.placed.built.kernel.origin and not self.flush]
        judged = {fresh.placed.name: fresh.captured_call for fresh in users}
        replayed = self.launching.capture(capturable, calls, judged)
        arms = self._arms(replayed)
        REPORTER.rests()
        for fresh in users if replayed else ():  # else not every graph was replayed
            fresh.take_captured()
        return arms

    def _arms(self, calls: Mapping[str, int]) -> list[Arm]:
        """All arms; `calls` that their replays make."""
        flush, every_call = self.flush, self.launching is None  # else other inputs before a block alone: on a GPU
        arms = [
            Arm(
                fresh.placed.name,
                fresh.placed.call,
                in_turn(fresh.before_call, flush) if every_call else flush,
                flushes=flush is not None,
                before_block=partial(fresh.before_block, every_call=every_call),
                after_block=fresh.after_block,
            )
            for fresh in self._fresh
        ]
        if chain := self.chain:  # its first input is written before every call as a kernel's is
            before = in_turn(partial(self.source.write, chain.entry), flush) if every_call else flush
            arms.append(Arm(GEMM, chain.call, before, flushes=flush is not None))
        arms = [replace(arm, calls=calls.get(arm.name, 1)) for arm in arms]
        more = self._more(self)
        self.by_name = {arm.name: arm for arm in (*arms, *more)}
        return [*arms, anchor_of(self.problem.case.device, self._draw), *more]

    @property
    def load(self) -> ExpertLoad:
        """Where the tokens of all calls went, if a routing is prescribed."""
        return self.source.load if isinstance(self.source, RoutedSource) else ExpertLoad()

    def _rule_on_users(self, ruling: Ruling) -> None:
        for placed in self.kernels:
            if placed.built.kernel.origin:
                self.rule(placed.name, ruling)

    def rule(self, name: str, ruling: Ruling) -> None:
        """Keep a ruling on that kernel; the first that is wrong stays."""
        self.rulings[name] = self.rulings.get(name, Ruling()).then(ruling)

    @property
    def wrong(self) -> dict[str, Ruling]:
        """The rulings on kernels that are wrong."""
        return {name: ruling for name, ruling in self.rulings.items() if ruling.wrong}

    def inspect(self) -> None:
        """Have judged what was answered in the blocks since the last time, and whether weights changed."""
        if remark := self.problem.rules.clock_stopped(monotonic_seconds() - self._placed_at):
            self._rule_on_users(Ruling(remark, WrongCode.PATCHED_CLOCK))  # none of their times can be believed
        ours = [one for one in (*self.kernels, *filter(None, [self.twin])) if not one.built.kernel.origin]
        if moved := next((placed.name for placed in ours if placed.moved()), None):  # to make it slower
            text = f"the weights of {moved} were moved in memory while it was timed"
            self._rule_on_users(Ruling(text, WrongCode.PATCHED_FFN))
        rulings = self.problem.rules.timed()
        for fresh in self._fresh:
            placed = fresh.placed
            name = placed.built.kernel.name if placed is self.twin else placed.name  # its errors are the baseline's
            if name not in self.wrong:
                self.rule(name, self._timed(fresh, rulings.get(placed.name, Ruling())))
        for name, note in self._hear({name: ruling.note for name, ruling in self.wrong.items()}):
            self.rule(name, Ruling(note))

    def _timed(self, fresh: FreshInputs, ruling: Ruling) -> Ruling:
        """The ruling on an arm's timed answers, and on whether its weights are unchanged."""
        if (touched := correctness.untouched(fresh.placed)).wrong:
            return touched
        answers = fresh.ruling.then(ruling)
        answers = answers if answers.wrong else answers.then(fresh.checked_ruling())
        return answers.at("", WrongCode.WRONG_WHEN_TIMED)

    def refresh(self) -> None:
        """Check the kernels' outputs on new tokens."""
        inputs = self.problem.inputs(2)
        for placed in self.kernels:
            if placed.name not in self.wrong:
                self.rule(placed.name, correctness.fresh(placed, self.problem, inputs))


def arms_of(
    problem: Problem,
    kernels: Sequence[PlacedKernel],
    baseline: PlacedKernel | None,
    caching: Caching,
    without: Collection[str],
    job: Job,
    **hooks: Any,
) -> Arms:
    """The arms of a case `without` those of ours that could not be had; `hooks` are those of Arms. Raises BrokenArm for
    a twin that cannot be."""
    case, draw, twin = problem.case, random.Random(problem.seed), None
    if baseline and TWIN not in without:
        try:
            twin = twin_of(baseline, problem, draw)
        except BaseException as error:  # SystemExit too: it is built by the user's code
            raise BrokenArm(TWIN) from error
    REPORTER.rests()  # what follows is ours: references, buffers
    llc, launching = machine.llc_bytes(case.device), launching_of(case, job)
    arms = Arms(problem, kernels, twin, caching, llc, launching, job.method.rounds, **hooks)
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
    REPORTER.first_call(TWIN)
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
