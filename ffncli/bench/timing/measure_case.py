"""measure_case: one case in this process. Verify every kernel, time the correct ones, and check the timed outputs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cache

from ffncli.bench.activity import REPORTER
from ffncli.bench.judge.memory_need import explained, holders
from ffncli.bench.machine import machine
from ffncli.bench.machine.counters import Counters, SystemCounters
from ffncli.bench.machine.machine import KernelMemory, release
from ffncli.bench.machine.devices import neighbours
from ffncli.bench.machine.devices import GpuProbe, gpu_probe
from ffncli.bench.records import BLOCK, GEMM, TWIN, Case, Job, Launched, Outcome, Roof, TimedUnit
from ffncli.bench.referee.prescribed_routing import ExpertLoad
from ffncli.bench.referee.problem import Problem, seed_of
from ffncli.bench.referee.process import RefereeGone, RefereeProcess
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.timing import correctness
from ffncli.bench.timing.arms import Arms, arms_of, kernels_by_label
from ffncli.bench.timing.auto.choose import kernel_of_auto
from ffncli.bench.timing.auto.kept import AutoChoice
from ffncli.bench.timing.by_step import time_steps
from ffncli.bench.timing.cheating.entry_points import EntryPoints
from ffncli.bench.timing.cheating.inspector import Inspector
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.cuda_clock import CudaClock, clock_for
from ffncli.bench.timing.cuda_counters import GpuCounters
from ffncli.bench.timing.outcomes import (
    BrokenArm,
    after_breaking,
    all_spent,
    no_ratios,
    noted,
    require_device,
    right,
    verdict_of,
)
from ffncli.bench.timing.placed_kernel import PlacedKernel, arm_sizes, build_kernel, shared_weights, touched_least
from ffncli.bench.timing.placement import Caching, caching
from ffncli.bench.timing.roof import guarded, measured_roof
from ffncli.bench.timing.rounds import ChangedRecords, Measured, measure, plan_of
from ffncli.bench.timing.settings import settle
from ffncli.bench.timing.sustained import sustained_remarks
from ffncli.bench.verdict import Ruling, WrongCode, WrongResult
from ffncli.block.recipe import steps as steps_of
from ffncli.dataclass import dataclass
from ffncli.kernels import AUTO
from ffncli.kernels.compiled import cache as compile_cache
from ffncli.kernels.compiled import on_compiling, recompiles
from ffncli.kernels.kernel import Kernel, kernel_steps

_ROOFS = 2  # processes that measure the roof, once each; it takes half a second, and the best one counts
_roof = cache(measured_roof)


def measure_case(
    case: Case,
    job: Job,
    clock: Clock | None = None,
    counters: Counters | None = None,
    start: float = 0.0,
    referee: RefereeProcess | None = None,
    entry_points: EntryPoints | None = None,
) -> TimedUnit:
    """One case with every kernel of the job, in this process. `start`: seconds that the process took to start.

    Without a `referee` the references are computed here. `entry_points` were fixed before a user's file was loaded, or
    are now.

    Every failure of a kernel is an outcome: `skipped`, `failed`, `wrong`, `oom`, each with a note. A kernel that raises
    while it is timed is removed and the others are timed again. Raises only the package's own errors, SpoiledCapture,
    and DeviceLost: nothing can be computed on a GPU in this process any more.
    """
    inspector = Inspector(job, entry_points)
    settle(case, job)
    inspector.settle()
    clock = clock or clock_for(case.device)
    probe, unread = gpu_probe(case.device) if isinstance(clock, CudaClock) else (None, "")
    counters = counters or (GpuCounters(clock, probe) if isinstance(clock, CudaClock) else SystemCounters())
    spent, notes = {"start": start}, [unread, neighbours(case.device) if isinstance(clock, CudaClock) else ""]
    return CaseRun(case, job, clock, counters, spent, inspector, referee, probe, notes=notes).unit()


@dataclass
class CaseRun:
    """The state of one `measure_case`."""

    case: Case
    job: Job
    clock: Clock
    counters: Counters
    spent: dict[str, float]
    inspector: Inspector
    referee: RefereeProcess | None = None
    probe: GpuProbe | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    placed: dict[str, PlacedKernel] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    baseline: str = ""
    mode: Caching = field(default_factory=lambda: Caching("warm"))
    measured: Measured | None = None
    launch: Launched = ""
    plain_because: str = ""
    free: int | None = None  # bytes of memory before the case
    without: set[str] = field(default_factory=set)  # own arms that could not be made
    load: ExpertLoad = field(default_factory=ExpertLoad)
    roofs: int = _ROOFS
    choices: dict[str, AutoChoice] = field(default_factory=dict)  # of `auto`, by name

    def unit(self) -> TimedUnit:
        """The case, verified and timed."""
        self.free = machine.free(self.case.device)
        if not self.job.method.refereed_apart(self.case):
            self.referee = None
        if self.referee:
            self.referee.begin(self.case)
        kernels = {} if self.job.method.by_step else self._kernels()
        self.mode = Caching(self.case.cache)
        self.baseline = BLOCK if self.job.method.by_step else self.job.wanted_baseline
        try:
            problem = self._problem()
        except Exception as error:
            require_device(self.clock, "", error)
            self.end_all([BLOCK] if self.job.method.by_step else [choice.label for choice in self.job.kernels], error)
            return self._answer(Roof())
        if self.job.method.by_step:
            self._by_step(problem)
        else:
            try:
                self._verify_all(kernels, problem)
                if self.placed:
                    self._time(problem)
                if self.referee:
                    self.referee.report()
            except RefereeGone as gone:
                self.end_all(self.outcomes, gone)
                self.measured = None
        with self._spending("roof"):
            roof, note = Roof(), ""
            if self.measured and self.job.process < self.roofs:
                if self.case.device != "cpu":
                    self.placed.clear()  # their memory is the roof's now
                    release(self.case.device)
                roof, note = guarded(lambda: _roof(self.case.device, self.case.dtype, self.case.threads))
        self.notes.append(note)
        return self._answer(roof)

    def _kernels(self) -> Mapping[str, Kernel | Outcome]:
        """The kernels by label, from their files; in place of one that cannot be had, its outcome."""
        case, steps = self.case, kernel_steps(steps_of(self.case.spec))
        gone, replaced = self.job.gone_in(case), self.inspector.replaced
        kernels = kernels_by_label(self.job.kernels, steps, case.spec, gone, replaced)
        REPORTER.stage("starting")  # loading is over
        return kernels

    def _problem(self) -> Problem:
        """The case as tensors, with its referee."""
        with self._spending("verify"):
            problem = Problem.of(self.case, seed_of(self.case, self.job), self.referee)
            problem = problem if self.referee else refereed(problem, self.baseline, self.job.method.math_mode)
            _ = problem.first
        return problem

    def llc_and_room(self) -> tuple[int, int | None]:
        """Bytes of the last-level cache, and of memory that may be used."""
        return machine.llc_and_room(self.case.device, self.job.method.memory_limit)

    def end_all(self, names: Iterable[str], error: BaseException) -> None:
        """These kernels' outcome is this error."""
        status, note = verdict_of(error)
        self.outcomes = {name: Outcome(name, status, note) for name in names}

    def _answer(self, roof: Roof) -> TimedUnit:
        measured = self.measured
        arms = holders(self.job.kernels, self.mode.copies, self.referee is not None)
        return TimedUnit(
            process=self.job.process,
            case=self.case.key,
            baseline=self.baseline,
            cache=self.mode.mode,
            outcomes=tuple(explained(o, self.case, arms, self.mode.copies, self.free) for o in self.outcomes.values()),
            blocks=measured.blocks if measured else (),
            roof=roof,
            environment=machine.environment(self.case.device),
            notes=tuple(dict.fromkeys(note for note in (*self.notes, self.load.note, *self.inspector.notes) if note)),
            spent=all_spent(self.spent, measured.spent if measured else {}),
            launch=self.launch if measured else "",
            tokens_per_expert=self.load.tokens_per_expert,
            experts_touched=self.load.touched,
            plain_because=self.plain_because,
        )

    @contextmanager
    def _spending(self, on: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[on] = self.spent.get(on, 0.0) + time.perf_counter() - start

    def _verify_all(self, kernels: Mapping[str, Kernel | Outcome], problem: Problem) -> None:
        """Verify the baseline first: its error, if it is correct, raises the limit of the others."""
        llc, room = self.llc_and_room()
        self.mode = shared_weights(problem, kernels.values(), llc, room) or self.mode
        order = {choice.label: at for at, choice in enumerate(self.job.kernels)}  # of the options
        self.outcomes = {name: Outcome(name) for name in order}
        gone = self.job.gone_in(self.case)
        self.outcomes |= {name: outcome for name, outcome in gone.items() if name in order}
        autos = {choice.label for choice in self.job.kernels if choice.kernel == AUTO}  # after those that may be chosen
        turns = {name: (name != self.baseline, name in autos, at) for name, at in order.items()}
        for name in sorted(order.keys() - gone.keys(), key=lambda name: turns[name]):
            self._verify(name, self._chosen(name, problem) if name in autos else kernels[name], problem)
        skipped = self.outcomes.get(self.baseline, Outcome("", "skipped")).status == "skipped"
        if self.job.baseline is None and skipped:
            self.baseline = next((name for name in order if name in self.placed), self.baseline)
        REPORTER.stage("timing")
        self.notes.append(problem.first.remark)
        self._say_baseline()

    def _chosen(self, name: str, problem: Problem) -> Kernel | Outcome:
        """The kernel that `auto` stands for in this case, or its outcome if there is none."""
        compiled = [one.built.kernel.name for one in self.placed.values() if one.built.kernel.compiles]
        with self._spending("warm_up"):
            kernel, self.choices[name] = kernel_of_auto(name, self.job, problem, compiled)
        return kernel

    def _say_baseline(self) -> None:
        """Notes that without a baseline there is no ratio."""
        if self.baseline and self.baseline not in self.placed and self.placed:
            self.notes.append(no_ratios(self.baseline, self.outcomes.get(self.baseline)))

    def _verify(self, name: str, kernel: Kernel | Outcome, problem: Problem) -> None:
        if isinstance(kernel, Outcome):
            self.outcomes[name] = kernel
            return
        self.outcomes[name] = Outcome(name, computes=kernel.computes)
        REPORTER.stage("compiling" if kernel.compiles else "checking", name)
        REPORTER.first_call(name)
        cache_before = compile_cache()
        placed: PlacedKernel | None = None
        memory = KernelMemory(self.case.device)
        try:
            with self._spending("warm_up"):
                problem.rules.declare(name, kernel.computes)
                draw = random.Random(f"{problem.seed} {name}")
                placed = PlacedKernel(name, build_kernel(kernel, problem, memory), problem, draw, self.mode.shared)
                self.inspector.fix(placed)
                placed.place(1)
                with on_compiling(lambda: REPORTER.stage("compiling", name)):
                    compile_s = correctness.first_call(placed, problem, memory)
            REPORTER.stage("checking", name)
            with self._spending("verify"):
                numeric_error = correctness.before(placed, problem)
                with correctness.computing(problem.backward):
                    peak = memory.peak(placed.call_untimed, placed.forget)
            with correctness.computing(problem.backward):
                placed.unguard()
            self.clock.finish()  # what it has broken on a GPU is raised here, and not at the next kernel
            self.inspector.after_check(placed)
        except RefereeGone:
            raise
        except BaseException as error:  # SystemExit too: whatever a user's code raises ends that kernel alone
            require_device(self.clock, name, error)
            ruling = self.inspector.replaced()
            named = WrongResult(ruling) if ruling.wrong else self.inspector.named(error, placed, problem)
            self._broken(name, named)
            return
        finally:
            REPORTER.rests()
        cached = f"torch.compile's cache was {how}" if (how := compile_cache().since(cache_before)) else ""
        outcome = right(name, kernel, numeric_error, compile_s, peak, self.choices.get(name))
        self.outcomes[name] = noted(outcome, kernel.origin, cached, numeric_error.remark)
        self.placed[name] = placed

    def _broken(self, name: str, error: BaseException) -> None:
        """Record the outcome of a kernel that raised; it is not timed, and its memory is freed."""
        self.outcomes[name] = after_breaking(self.outcomes.get(name, Outcome(name)), error)
        self._tell_referee(name)
        self.placed.pop(name, None)
        release(self.case.device)

    def _tell_referee(self, name: str) -> None:
        """What was found here is kept there: what becomes of the outcome in this process then changes nothing."""
        if self.referee and (outcome := self.outcomes[name]).status == "wrong":
            self.referee.accuse(name, outcome.note)

    def _time(self, problem: Problem) -> None:
        """Repeat until no kernel raises. The blocks of an aborted attempt are dropped."""
        REPORTER.stands_for(TWIN, self.baseline)
        while self.placed:
            arms: Arms | None = None
            try:
                arms = self._arms(problem)
                self.measured = self._measure(arms, problem)
                self.load = arms.load
                self._sustain(arms, problem)
                with self._spending("verify"), correctness.computing(problem.backward):
                    arms.inspect()
                    arms.refresh()
                self.inspector.require_nothing_replaced(self.placed)
                with self._spending("verify"):
                    self.inspector.after_timing(arms, self.baseline, problem, self.measured.blocks, self.clock)
            except BrokenArm as broken:
                self.measured = None
                require_device(self.clock, REPORTER.read().kernel or broken.name, broken)
                wrong = {name: WrongResult(ruling) for name, ruling in (arms.wrong if arms else {}).items()}
                for name in dict.fromkeys((*wrong, broken.name)):  # what was wrong once is not asked again
                    self._without(broken if name == broken.name else BrokenArm(name), wrong.get(name))
                continue
            except (RuntimeError, MemoryError) as error:  # not from a kernel's call: it waits for the device, or we do
                running = REPORTER.read().kernel
                require_device(self.clock, running, error)
                self.measured = None
                status, note = verdict_of(error)
                if status == "oom":  # the buffer that empties caches
                    self.outcomes |= {n: replace(self.outcomes[n], status=status, note=note) for n in self.placed}
                    return
                if running not in self.placed:
                    raise
                self._without(BrokenArm(running), error)
                continue
            finally:
                REPORTER.rests()
            for name, ruling in arms.rulings.items():
                self.outcomes[name] = self.outcomes[name].ruled(ruling)
                self._tell_referee(name)
                if ruling.wrong and name == self.baseline:
                    self.notes.append(f"no ratios: the baseline {name} is wrong: {ruling.note}")
            return

    def _without(self, broken: BrokenArm, error: BaseException | None = None) -> None:
        """Remove the arm that broke from the next attempt; `error` is what it did, by default what it raised."""
        if broken.name in (TWIN, GEMM):
            _, note = verdict_of(broken.__cause__ or broken)
            self.without.add(broken.name)
            self.notes.append(f"no arm {broken.name}: {note}")
            return
        self._broken(broken.name, broken if isinstance(broken.__cause__, WrongResult) else error or broken)
        if broken.name == self.baseline:
            self._say_baseline()

    def _arms(self, problem: Problem) -> Arms:
        kernels = list(self.placed.values())
        for placed in kernels:
            if placed.built.kernel.compiles:  # compiling another kernel may have discarded it
                REPORTER.first_call(placed.name)
                with self._spending("warm_up"), correctness.computing(problem.backward):
                    placed.call()
        llc, room = self.llc_and_room()
        if not self.mode.shared:
            self.mode = caching(self.case.cache, arm_sizes(kernels), touched_least(problem, kernels), llc, room)
        self.notes.append(self.mode.note)
        if self.case.cache != "warm" and (llc_note := machine.llc_note(self.case.device)):
            self.notes.append(f"last-level cache: {llc_note}")
        return self._arms_of(problem, kernels)

    def _arms_of(self, problem: Problem, kernels: Sequence[PlacedKernel]) -> Arms:
        return arms_of(problem, kernels, self.placed.get(self.baseline), self.mode, self.without, self.job)

    def _sustain(self, arms: Arms, problem: Problem) -> None:
        """Time every kernel against the baseline in long turns, in the first process; note a different ratio."""
        if not self.job.method.sustained or self.job.process or self.measured is None:
            return
        with correctness.computing(problem.backward):
            compared = {name: arms.by_name[name] for name in self.placed}
            remarks = sustained_remarks(compared, self.baseline, self.measured.blocks, self.clock, self.probe)
        self.outcomes |= {name: noted(self.outcomes[name], remark) for name, remark in remarks.items()}

    def _measure(self, arms: Arms, problem: Problem) -> Measured:
        compiled, base = recompiles(), self.baseline if self.baseline in self.placed else next(iter(self.placed))
        plan = plan_of(self.job.method, base, tuple(self.placed), self.case.device, self.case.threads)
        with correctness.computing(problem.backward):
            process, key = self.job.process, self.case.key
            try:
                measured = measure(process, key, arms.place, self.clock, self.counters, plan, arms.captured)
            except ChangedRecords as changed:
                ruling = Ruling(str(changed), WrongCode.PATCHED_CLOCK)
                raise BrokenArm(self.inspector.suspect(self.placed)) from WrongResult(ruling)
        if arms.launching:
            self.launch, self.plain_because = arms.launching.launch, arms.launching.plain_because
            self.notes.append(arms.launching.note)
        self.spent["inside"] = arms.seconds
        self.spent["verify"] = self.spent.get("verify", 0.0) + arms.seconds
        if recompiles() > compiled:
            for name, placed in list(self.placed.items()):
                if "compiler" in placed.built.kernel.needs:  # triton_act compiles without torch
                    raise BrokenArm(name) from RuntimeError("torch compiled during timing")
        return measured

    def _by_step(self, problem: Problem) -> None:
        """Time the block's steps, each alone."""
        REPORTER.stage("timing")
        done = time_steps(self.case, self.job, problem, self.clock, self.counters, *self.llc_and_room())
        self.mode, self.load, self.measured = done.mode, done.load, done.measured
        self.outcomes = {name: Outcome(name) for name in done.names}
        self.launch = "plain" if self.case.device.startswith("cuda") else ""
        if self.case.cache == "cold-weights":
            self.notes.append(f"steps have one copy of their weights: {self.mode.mode} instead of cold-weights")
        if done.error:
            self.end_all(self.outcomes or [BLOCK], done.error)
