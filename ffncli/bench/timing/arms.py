"""The arms of a case: its kernels, the baseline's twin, the machine anchor and the bare products. Each arm has its own
buffers, which get new addresses at every placement."""

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
from ffncli.bench.timing.placed_kernel import PlacedKernel, pooled, shuffle_buffers, touched, touched_by
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
    """Load the kernels, by label, in order; a kernel that cannot be loaded is replaced by its outcome. `auto` is left
    out, as it is chosen later.

    Each kernel is loaded on its own, so that a broken file costs only its own rows. After each file, `replaced` checks
    whether the file has replaced functions of other code. Kernels in `gone` are not loaded.
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


_CHECKED = 1 << 20  # input numbers from here on are reserved for timed calls
_PROMPT, _READINGS = 0.02, 20  # s for a prompt answer; how often the referee reads its clock if none is prompt


class Arms:
    """All arms of a case; `place` is the callback of `rounds.measure`. `twin` is the baseline's twin, if the baseline
    is ok.

    `rulings` are the rulings on timed outputs, by kernel name. `rounds` is the minimum number of rounds in a placement.
    A run over ranks passes its own `source`, adds `more` arms, and exchanges rulings with `hear`, which takes this
    rank's wrong kernels and returns the wrong kernels of all ranks.
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
        more: "Callable[[Arms], Sequence[Arm]]" = lambda arms: (),
        hear: Callable[[Mapping[str, str]], Iterable[tuple[str, str]]] = lambda notes: (),
    ) -> None:
        self.kernels, self.twin, self.launching = tuple(kernels), twin, launching  # None on a CPU
        self._placed = (*self.kernels, *filter(None, [twin]))
        self.by_name: dict[str, Arm] = {}  # of the latest placement
        self.rulings: dict[str, Ruling] = {}
        self._placed_at = 0.0
        self.seconds = 0.0  # spent on checking timed outputs within `place`
        self.problem, self._more, self._hear = problem, more, hear
        self._draw = random.Random(problem.seed)
        self.flush = flusher(llc, problem.case.device) if caching.mode == "flush" else None
        self._of_drawn = caching.copies_of(touched(problem))  # copies of the weights as they were drawn
        self._copies = [caching.copies_of(touched_by(problem, placed)) for placed in self._placed]
        self._pools = pooled(self._placed, self._of_drawn, problem, self._draw)
        pool = next(iter(self._pools), None)
        self.chain: Chain | None = Chain(problem, self._draw, caching.shared, pool)
        self.source = source or source_of(problem)
        checked = problem.inputs(_CHECKED + drawn(_CHECKED)) if problem.backward else None
        self._fresh = [FreshInputs(placed, problem, self.source, checked, rounds) for placed in self._placed]

    def place(self, number: int) -> list[Arm]:
        """Check the outputs of the previous placement, then place all arms in new buffers. Raises BrokenArm."""
        if number:
            start = monotonic_seconds()
            self.inspect()
            self.seconds += monotonic_seconds() - start
        self.by_name = {}  # frees the old buffers first
        self.source.draw()
        shuffle_buffers(self._placed, self._draw, self._copies)
        for pool in self._pools:
            pool.shuffle()
        for one, copies in zip(self._placed, self._copies, strict=True):
            one.place(copies)
            machine.finish(self.problem.case.device)  # raises an error that its prepare caused on a GPU
        if self.chain:
            self.chain.place(self._of_drawn)
        REPORTER.rests()
        self._placed_at = moment_of(self.problem.rules.clock_started)
        return self._arms({})

    def captured(self, inner: Mapping[str, int]) -> list[Arm]:
        """Return the arms just placed, replayed from CUDA graphs if calls are launched that way; return none on a CPU.

        Raises BrokenArm and SpoiledCapture.
        """
        if self.launching is None:
            return []
        capturable: dict[str, Capturable] = {fresh.placed.name: fresh.placed for fresh in self._fresh}
        if self.chain:
            capturable[GEMM] = self.chain
        # An output keeps its autograd graph alive, whose leaves belong to the stream of the plain calls; a capture must
        # not wait for that stream.
        for fresh in self._fresh:
            fresh.placed.forget()
        calls = {name: 1 if self.flush else inner[name] for name in capturable}  # a graph's calls leave no gap
        users = [fresh for fresh in self._fresh if fresh.placed.built.kernel.origin and not self.flush]
        judged = {fresh.placed.name: fresh.captured_call for fresh in users}
        replayed = self.launching.capture(capturable, calls, judged)
        arms = self._arms(replayed)
        REPORTER.rests()
        for fresh in users if replayed else ():  # if empty, some graph was not replayed
            fresh.take_captured()
        return arms

    def _arms(self, calls: Mapping[str, int]) -> list[Arm]:
        """Build all arms; `calls` is the number of calls in each arm's replay."""
        flush, every_call = self.flush, self.launching is None  # on a GPU, x changes between blocks
        arms = [
            Arm(
                fresh.placed.name,
                fresh.placed.call,
                in_turn(fresh.before_call, flush) if every_call else flush,
                flushes=flush is not None,
                before_block=partial(fresh.before_block, every_call=every_call),
                after_block=fresh.after_block,
                slow_s=fresh.placed.slow_s,
            )
            for fresh in self._fresh
        ]
        if chain := self.chain:  # the first input is rewritten before every call, like a kernel's input
            before = in_turn(partial(self.source.write, chain.entry), flush) if every_call else flush
            arms.append(Arm(GEMM, chain.call, before, flushes=flush is not None))
        arms = [replace(arm, calls=calls.get(arm.name, 1)) for arm in arms]
        more = self._more(self)
        self.by_name = {arm.name: arm for arm in (*arms, *more)}
        return [*arms, anchor_of(self.problem.case.device, self._draw), *more]

    @property
    def load(self) -> ExpertLoad:
        """The experts that the tokens of all calls went to, if a routing is prescribed."""
        return self.source.load if isinstance(self.source, RoutedSource) else ExpertLoad()

    def _rule_on_users(self, ruling: Ruling) -> None:
        for placed in self.kernels:
            if placed.built.kernel.origin:
                self.rule(placed.name, ruling)

    def rule(self, name: str, ruling: Ruling) -> None:
        """Add a ruling on a kernel; the first ruling that finds the kernel wrong is kept."""
        self.rulings[name] = self.rulings.get(name, Ruling()).then(ruling)

    @property
    def wrong(self) -> dict[str, Ruling]:
        """The rulings on kernels that are wrong."""
        return {name: ruling for name, ruling in self.rulings.items() if ruling.wrong}

    def inspect(self) -> None:
        """Rule on the answers of the blocks since the last inspection, and on whether weights changed."""
        rules = self.problem.rules
        if remark := rules.clock_remark(moment_of(rules.clock_stopped) - self._placed_at):
            self._rule_on_users(Ruling(remark, WrongCode.PATCHED_CLOCK))  # the times of these kernels cannot be trusted
        ours = [one for one in self._placed if not one.built.kernel.origin]
        if moved := next((placed.name for placed in ours if placed.moved()), None):  # which would make it slower
            text = f"the weights or the inputs of {moved} were moved in memory while it was timed"
            self._rule_on_users(Ruling(text, WrongCode.PATCHED_FFN))
        rulings = rules.timed()
        for fresh in self._fresh:
            placed = fresh.placed
            name = placed.built.kernel.name if placed is self.twin else placed.name  # counts for the baseline
            if name not in self.wrong:
                self.rule(name, self._timed(fresh, rulings.get(placed.name, Ruling())))
        for name, note in self._hear({name: ruling.note for name, ruling in self.wrong.items()}):
            self.rule(name, Ruling(note))

    def _timed(self, fresh: FreshInputs, ruling: Ruling) -> Ruling:
        """Return a ruling on an arm: on its timed answers, and on whether its weights are unchanged."""
        if (touched := correctness.untouched(fresh.placed)).wrong:
            return touched
        answers = fresh.ruling.then(ruling)
        answers = answers if answers.wrong else answers.then(fresh.checked_ruling())
        return answers.at("", WrongCode.WRONG_WHEN_TIMED)

    def refresh(self, kernels: Iterable[PlacedKernel]) -> None:
        """Check these kernels' outputs on new tokens."""
        inputs = self.problem.inputs(2)
        for placed in kernels:
            if placed.name not in self.wrong:
                self.rule(placed.name, correctness.fresh(placed, self.problem, inputs))


def moment_of(reading: Callable[[], None]) -> float:
    """Make the referee read its clock, and return when that was, by the worker's clock.

    If a process waits for a processor meanwhile, the answer is late, and nobody knows when the clock was read: the
    referee reads it again.
    """
    for _ in range(_READINGS):
        start = monotonic_seconds()
        reading()
        end = monotonic_seconds()
        if end - start < _PROMPT:
            break
    return (start + end) / 2


def arms_of(
    problem: Problem,
    kernels: Sequence[PlacedKernel],
    baseline: PlacedKernel | None,
    caching: Caching,
    without: Collection[str],
    job: Job,
    **hooks: Any,
) -> Arms:
    """Build the arms of a case. `without` has the names of our own arms that an earlier attempt could not build; they
    are left out. `hooks` are arguments of Arms. Raises BrokenArm if the twin cannot be built."""
    case, draw, twin = problem.case, random.Random(problem.seed), None
    if baseline and TWIN not in without:
        try:
            twin = twin_of(baseline, problem, draw)
        except BaseException as error:  # SystemExit too: the user's code builds the twin
            raise BrokenArm(TWIN) from error
    REPORTER.rests()  # our own code follows: references, buffers
    llc, launching = machine.llc_bytes(case.device), launching_of(case, job)
    arms = Arms(problem, kernels, twin, caching, llc, launching, job.method.rounds, **hooks)
    if GEMM in without:
        arms.chain = None
    return arms


def launching_of(case: Case, job: Job) -> Launching | None:
    """Return how the arms of a case are launched; None on a CPU."""
    if not case.device.startswith("cuda"):
        return None
    work = roofline.work_of(case)
    asked = job.method.launch if case.ranks.world_size == 1 else "plain"  # collectives are not captured
    return Launching(asked, by_graphs(work.flops, work.bytes), dict(job.plain).get(case.key, ""))


def twin_of(baseline: PlacedKernel, problem: Problem, draw: random.Random) -> PlacedKernel:
    """Return the baseline's twin: the baseline built again, as it may keep buffers. A baseline that needs compilation
    is not rebuilt; its twin only gets new tensors."""
    REPORTER.first_call(TWIN)
    built = baseline.built
    if not built.kernel.compiles:
        compute = built.kernel.build(problem.steps, problem.case.device, problem.dtype)
        guarded = unguarded(built.compute) is not built.compute
        built = replace(built, compute=compute if guarded else unguarded(compute))
    problem.rules.declare(TWIN, built.kernel.computes)
    return PlacedKernel(TWIN, built, problem, draw, baseline.shared)


def anchor_of(device: str, draw: random.Random) -> Arm:
    """Return the machine anchor of a CPU, or of this GPU."""
    return Arm(ANCHOR, gpu_anchor(device)) if device.startswith("cuda") else anchor(draw)
