"""Measure one case in this process: verify every kernel, time the correct ones, and check the timed outputs."""

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from ffncli.bench.judge.memory_need import explained, holders
from ffncli.bench.machine import machine
from ffncli.bench.machine.counters import Counters
from ffncli.bench.machine.devices import GpuProbe, gpu_probe, neighbours
from ffncli.bench.machine.machine import KernelMemory, release, set_math_mode
from ffncli.bench.records import BLOCK, GEMM, TWIN, Case, Job, Launched, Outcome, Roof, TimedUnit
from ffncli.bench.referee.prescribed_routing import ExpertLoad
from ffncli.bench.referee.problem import Problem, seed_of
from ffncli.bench.referee.process import RefereeGone, RefereeProcess
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.timing import correctness
from ffncli.bench.timing.arms import Arms, arms_of, kernels_by_label
from ffncli.bench.timing.cheating.entry_points import EntryPoints
from ffncli.bench.timing.cheating.inspector import Inspector
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.gpu.cuda_clock import CudaClock, clock_for, counters_for
from ffncli.bench.timing.modes.auto import kernel_of_auto
from ffncli.bench.timing.modes.auto_choice import AutoChoice
from ffncli.bench.timing.modes.by_step import time_steps
from ffncli.bench.timing.modes.sustained import sustained_remarks
from ffncli.bench.timing.outcomes import BrokenArm, after_breaking, first_cause, noted, require_device, verdict_of
from ffncli.bench.timing.placed_kernel import PlacedKernel, arm_sizes, build_kernel, shared_weights
from ffncli.bench.timing.placement import Caching, caching
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.roof import guarded, measured_roof
from ffncli.bench.timing.rounds import Arm, ChangedRecords, Measured, measure, plan_of
from ffncli.bench.verdict import Ruling, WrongCode, WrongResult, ruled
from ffncli.block.recipe import steps as steps_of
from ffncli.kernels import AUTO
from ffncli.kernels.compiled import cache as compile_cache
from ffncli.kernels.compiled import on_compiling, recompiles
from ffncli.kernels.kernel import Kernel, kernel_steps

_roof = cache(measured_roof)


def measure_case(
    case: Case,
    job: Job,
    clock: Clock | None = None,
    counters: Counters | None = None,
    start: float = 0.0,
    referee: RefereeProcess | None = None,
    entry_points: EntryPoints | None = None,
    ranks: "OneRank | None" = None,
) -> TimedUnit:
    """Measure one case with every kernel of the job. `start` is the seconds that the process took to start.

    Without a `referee`, the references are computed in this process. `entry_points` were recorded before a user's file
    was loaded; by default they are recorded now. `ranks` does what the ranks of a case do together.

    Every failure of a kernel is an outcome: `skipped`, `failed`, `wrong` or `oom`, with a note. If a kernel raises
    while it is timed, it is removed and the others are timed again. Raises only the package's own errors,
    SpoiledCapture, and DeviceLost if nothing more can be computed on the GPU in this process.
    """
    ranks = ranks or OneRank()
    inspector = Inspector(job, entry_points, ranks.asks)
    apply_settings(case, job)
    inspector.accept_settings()
    clock = clock or clock_for(case.device, case.threads)
    probe, unread = gpu_probe(case.device) if isinstance(clock, CudaClock) else (None, "")
    counters = counters or counters_for(clock, case.threads, probe)
    referee = referee if job.method.refereed_apart(case) else None
    rig = Rig(case, job, clock, counters, inspector, ranks, referee, probe, {"start": start})
    steps, free = job.method.by_step, machine.free(case.device)
    if referee:
        referee.begin(case)
    kernels = CaseKernels(BLOCK if steps else job.wanted_baseline, Caching(case.cache))
    kernels.notes += [unread, neighbours(case.device) if isinstance(clock, CudaClock) else ""]
    loaded = {} if steps else ranks.loaded(case, job, inspector.replaced)
    REPORTER.stage("starting")  # after loading
    timed = None
    try:
        with rig.spending("verify"):
            problem = ranks.problem(lambda: _problem(rig, kernels.baseline))
    except Exception as error:
        require_device(clock, "", error)
        kernels.end([BLOCK] if steps else [choice.label for choice in job.kernels], error)
        return _answer(rig, kernels, None, Roof(), free)
    try:
        if steps:
            timed = _by_step(rig, kernels, problem)
        else:
            verify(rig, kernels, problem, loaded)
            timed = time_kernels(rig, kernels, problem) if kernels.placed else None
        if referee:
            referee.report()
    except RefereeGone as gone:
        kernels.end(kernels.outcomes, gone)
        timed = None
    return _answer(rig, kernels, timed, _roof_of(rig, kernels) if timed else Roof(), free)


class OneRank:
    """Steps of a case that one rank does alone. Several ranks do them together (ranks/case_run.py)."""

    asks = True  # users' kernels may be called extra times, to find out how they get their answers
    roofs = 2  # the number of processes that measure the roof, each in half a second; the best roof counts

    def loaded(self, case: Case, job: Job, replaced: Callable[[], Ruling]) -> Mapping[str, Kernel | Outcome]:
        """Load the kernels by label; a kernel that cannot be loaded is replaced by its outcome."""
        return kernels_by_label(job.kernels, kernel_steps(steps_of(case.spec)), case.spec, job.gone_in(case), replaced)

    def problem(self, make: Callable[[], Problem]) -> Problem:
        """Return the case as tensors, which `make` draws."""
        return make()

    def llc_and_room(self, case: Case, job: Job) -> tuple[int, int | None]:
        """Return (bytes of the last-level cache, bytes of memory that copies may use, or None)."""
        return machine.llc_and_room(case.device, job.method.memory_limit)

    def agree(self, outcome: Outcome) -> Outcome:
        """Return a kernel's final outcome over all ranks; `outcome` is its outcome on this rank."""
        return outcome

    def arms(
        self, problem: Problem, placed: Mapping[str, PlacedKernel], baseline: str, caching: Caching,
        without: Collection[str], job: Job,
    ) -> Arms:  # fmt: skip
        """Build the arms of a case."""
        return arms_of(problem, [*placed.values()], placed.get(baseline), caching, without, job)

    def timing_begins(self) -> None:
        """Called once all kernels are verified."""

    def broke(self, name: str, error: BaseException) -> None:
        """Called if a kernel raised while it was timed; raises if no other kernel can be timed in this process."""


@dataclass
class Rig:
    """Everything that a case is measured with."""

    case: Case
    job: Job
    clock: Clock
    counters: Counters
    inspector: Inspector
    ranks: OneRank
    referee: RefereeProcess | None
    probe: GpuProbe | None
    spent: dict[str, float]

    @contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Count the seconds spent inside the `with` block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[on] = self.spent.get(on, 0.0) + time.perf_counter() - start


@dataclass
class CaseKernels:
    """The state of a case's kernels: their outcomes, and the kernels that are placed for timing."""

    baseline: str
    mode: Caching
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    placed: dict[str, PlacedKernel] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def end(self, names: Iterable[str], error: BaseException) -> None:
        """Make this error the outcome of the named kernels, and drop all other outcomes."""
        status, note = verdict_of(error)
        self.outcomes = {name: Outcome(name, status, note) for name in names}

    def note_baseline(self) -> None:
        """Note why there are no ratios, if the baseline is not among the placed kernels."""
        if self.baseline and self.baseline not in self.placed and self.placed:
            outcome = self.outcomes.get(self.baseline)
            reason = f"{outcome.status}: {outcome.note}" if outcome else "not among the kernels"
            self.notes.append(f"no ratios: the baseline {self.baseline} is {reason}")


@dataclass(frozen=True)
class Timed:
    """The timings of a case, the experts that its tokens went to, and how its calls were launched."""

    measured: Measured
    load: ExpertLoad
    launch: Launched = ""
    plain_because: str = ""


def apply_settings(case: Case, job: Job) -> None:
    """Set the threads of torch and of all other libraries, the math mode and the seed, for the case and the method."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    torch.set_num_threads(case.threads)
    threadpool_limits(case.threads)
    set_math_mode(job.method.math_mode, case.device)
    torch.manual_seed(job.method.seed)


def _problem(rig: Rig, baseline: str) -> Problem:
    problem = Problem.of(rig.case, seed_of(rig.case, rig.job), rig.referee)
    problem = problem if rig.referee else refereed(problem, baseline, rig.job.method.math_mode)
    _ = problem.first
    return problem


def _roof_of(rig: Rig, kernels: CaseKernels) -> Roof:
    """Measure the roof, in the first processes of a run; an empty roof in the others, or with a note if it fails."""
    case = rig.case
    if rig.job.process >= rig.ranks.roofs:
        return Roof()
    with rig.spending("roof"):
        if case.device != "cpu":
            kernels.placed.clear()  # so that the roof can use their memory
            release(case.device)
        roof, note = guarded(lambda: _roof(case.device, case.dtype, case.threads))
    kernels.notes.append(note)
    return roof


def _answer(rig: Rig, kernels: CaseKernels, timed: Timed | None, roof: Roof, free: int | None) -> TimedUnit:
    """Build the unit of a case; `free` is the bytes that were free when the case began."""
    case, job, mode = rig.case, rig.job, kernels.mode
    load, copies = timed.load if timed else ExpertLoad(), mode.copies
    arms = holders(job.kernels, copies, rig.referee is not None)
    around, measuring = rig.spent, dict(timed.measured.spent) if timed else {}
    spent = measuring | {on: around.get(on, 0.0) + measuring.get(on, 0.0) for on in ("start", "verify", "warm_up")}
    # Outputs are also verified while arms are placed; those seconds are already counted as verification.
    spent["placing"] = max(0.0, measuring.get("placing", 0.0) - around.get("inside", 0.0))
    spent["rest"] = measuring.get("rest", 0.0) + around.get("roof", 0.0)
    return TimedUnit(
        process=job.process,
        case=case.key,
        baseline=kernels.baseline,
        cache=mode.mode,
        outcomes=tuple(explained(outcome, case, arms, copies, free) for outcome in kernels.outcomes.values()),
        blocks=timed.measured.blocks if timed else (),
        roof=roof,
        environment=machine.environment(case.device),
        notes=tuple(dict.fromkeys(note for note in (*kernels.notes, load.note, *rig.inspector.notes) if note)),
        spent=spent,
        launch=timed.launch if timed else "",
        tokens_per_expert=load.tokens_per_expert,
        experts_touched=load.touched,
        plain_because=timed.plain_because if timed else "",
    )


# --- verifying --------------------------------------------------------------------------------------------------------


def verify(rig: Rig, kernels: CaseKernels, problem: Problem, loaded: Mapping[str, Kernel | Outcome]) -> None:
    """Verify the baseline first, since its error raises the limit for the other kernels; then place the correct
    kernels."""
    job = rig.job
    llc, room = rig.ranks.llc_and_room(rig.case, job)
    kernels.mode = shared_weights(problem, loaded.values(), llc, room) or kernels.mode
    order = {choice.label: at for at, choice in enumerate(job.kernels)}  # in the order of the options
    gone = job.gone_in(rig.case)
    kernels.outcomes = {name: gone.get(name, Outcome(name)) for name in order}
    autos = {choice.label for choice in job.kernels if choice.kernel == AUTO}  # after the kernels that it may choose
    turns = {name: (name != kernels.baseline, name in autos, at) for name, at in order.items()}
    for name in sorted(order.keys() - gone.keys(), key=lambda name: turns[name]):
        kernel, choice = loaded.get(name), None
        if kernel is None:
            compiled = [one.built.kernel.name for one in kernels.placed.values() if one.built.kernel.compiles]
            with rig.spending("warm_up"):
                kernel, choice = kernel_of_auto(name, job, problem, compiled)
        if isinstance(kernel, Outcome):
            kernels.outcomes[name] = kernel
        else:
            _verify_kernel(rig, kernels, problem, name, kernel, choice)
        _agree(rig, kernels, name)
    skipped = kernels.outcomes.get(kernels.baseline, Outcome("", "skipped")).status == "skipped"
    if job.baseline is None and skipped:
        kernels.baseline = next((name for name in order if name in kernels.placed), kernels.baseline)
    REPORTER.stage("timing")
    kernels.notes.append(problem.first.remark)
    kernels.note_baseline()


def _verify_kernel(
    rig: Rig, kernels: CaseKernels, problem: Problem, name: str, kernel: Kernel, choice: AutoChoice | None
) -> None:
    outcomes, inspector = kernels.outcomes, rig.inspector
    outcomes[name] = Outcome(name, computes=kernel.computes)
    REPORTER.stage("compiling" if kernel.compiles else "checking", name)
    REPORTER.first_call(name)
    cache_before, memory = compile_cache(), KernelMemory(rig.case.device)
    placed: PlacedKernel | None = None
    try:
        with rig.spending("warm_up"):
            problem.rules.declare(name, kernel.computes)
            draw = random.Random(f"{problem.seed} {name}")
            placed = PlacedKernel(name, build_kernel(kernel, problem, memory), problem, draw, kernels.mode.shared)
            inspector.fix(placed)
            placed.place(1)
            with on_compiling(lambda: REPORTER.stage("compiling", name)):
                compile_s = correctness.first_call(placed, problem, memory)
        REPORTER.stage("checking", name)
        with rig.spending("verify"):
            error = correctness.before(placed, problem, _in_full(rig, placed))
            with correctness.computing(problem.backward):
                peak = memory.peak(placed.call_untimed, placed.forget)
        with correctness.computing(problem.backward):
            placed.unguard()
        rig.clock.finish()  # an error that it left on the GPU is raised here, not at the next kernel
        inspector.after_check(placed)
    except RefereeGone:
        raise
    except BaseException as raised:  # SystemExit too: whatever a user's code raises ends only that kernel
        require_device(rig.clock, name, raised)
        ruling = inspector.replaced()
        named = WrongResult(ruling) if ruling.wrong else inspector.named(raised, placed, problem)
        _leave_out(rig, kernels, name, named)
        return
    finally:
        REPORTER.rests()
    cached = f"torch.compile's cache was {how}" if (how := compile_cache().since(cache_before)) else ""
    note, chosen = (choice.note, choice.kernel) if choice else ("", "")
    outcome = Outcome(name, "ok", note, error.largest, error.rel, compile_s, peak, kernel.computes, chosen)
    outcomes[name] = noted(outcome, kernel.origin, cached, error.remark)
    kernels.placed[name] = placed


def _in_full(rig: Rig, placed: PlacedKernel) -> bool:
    """Return whether a kernel is to be verified in full. A kernel of the package was, in the run's first process,
    unless a call takes long; its timed answers are judged in all processes."""
    return bool(placed.built.kernel.origin) or (rig.job.process == 0 and placed.slow_s is None)


def _leave_out(rig: Rig, kernels: CaseKernels, name: str, error: BaseException) -> None:
    """Record the outcome of a kernel that raised; it is not timed, and its memory is freed."""
    kernels.outcomes[name] = after_breaking(kernels.outcomes.get(name, Outcome(name)), error)
    _accuse(rig, kernels.outcomes[name])
    kernels.placed.pop(name, None)
    if kernels.outcomes[name].status != "skipped":  # a skipped kernel has no memory
        release(rig.case.device)


def _accuse(rig: Rig, outcome: Outcome) -> None:
    """Report a wrong kernel to the referee, so that later changes to the outcome in this process do not matter."""
    if rig.referee and outcome.status == "wrong":
        rig.referee.accuse(outcome.kernel, outcome.note)


def _agree(rig: Rig, kernels: CaseKernels, name: str) -> None:
    """Record the outcome on which all ranks agree."""
    before = kernels.outcomes[name]
    outcome = kernels.outcomes[name] = rig.ranks.agree(before)
    if outcome is not before and outcome.status != "ok":
        kernels.placed.pop(name, None)
        _accuse(rig, outcome)


# --- timing -----------------------------------------------------------------------------------------------------------


def time_kernels(rig: Rig, kernels: CaseKernels, problem: Problem) -> Timed | None:
    """Time the placed kernels. If a kernel raises, time again without it, until no kernel raises. Return None if no
    kernel is left.

    The blocks of an aborted attempt are dropped.
    """
    REPORTER.stands_for(TWIN, kernels.baseline)
    rig.ranks.timing_begins()
    without: set[str] = set()  # our own arms that could not be made
    timed: Timed | None = None
    while kernels.placed and timed is None:
        raised: dict[str, BaseException] = {}  # exceptions by arm, the user's kernels and our own arms
        arms: Arms | None = None
        try:
            arms = _arms(rig, kernels, problem, without)
            timed = _attempt(rig, kernels, problem, arms)
        except BrokenArm as broken:
            require_device(rig.clock, REPORTER.read().kernel or broken.name, broken)
            raised = {name: WrongResult(ruling) for name, ruling in (arms.wrong if arms else {}).items()}
            if broken.name not in raised or isinstance(broken.__cause__, WrongResult):
                raised[broken.name] = broken  # an arm that is already wrong keeps that ruling
        except (RuntimeError, MemoryError) as error:  # raised while waiting for the device, or by our own code
            running = REPORTER.read().kernel
            require_device(rig.clock, running, error)
            status, note = verdict_of(error)
            if status == "oom":  # raised by the buffer that flushes the caches
                ended = {name: replace(kernels.outcomes[name], status=status, note=note) for name in kernels.placed}
                kernels.outcomes |= ended
                break
            if running not in kernels.placed:
                raise
            raised = {running: error}
        finally:
            REPORTER.rests()
        for name, cause in raised.items():
            rig.ranks.broke(kernels.baseline if name in (TWIN, GEMM) else name, cause)
            if name in (TWIN, GEMM):
                without.add(name)
                kernels.notes.append(f"no arm {name}: {verdict_of(first_cause(cause))[1]}")
                continue
            _leave_out(rig, kernels, name, cause)
            if name == kernels.baseline:
                kernels.note_baseline()
    for name in kernels.outcomes:
        _agree(rig, kernels, name)
    return timed


def _arms(rig: Rig, kernels: CaseKernels, problem: Problem, without: Collection[str]) -> Arms:
    case, placed = rig.case, [*kernels.placed.values()]
    for one in placed:
        if one.built.kernel.compiles:  # compiling another kernel may have discarded its compiled code
            REPORTER.first_call(one.name)
            with rig.spending("warm_up"), correctness.computing(problem.backward):
                one.call()
    llc, room = rig.ranks.llc_and_room(case, rig.job)
    if not kernels.mode.shared:
        kernels.mode = caching(case.cache, arm_sizes(problem, placed), llc, room)
    kernels.notes.append(kernels.mode.note)
    if case.cache != "warm" and (llc_note := machine.llc_note(case.device)):
        kernels.notes.append(f"last-level cache: {llc_note}")
    return rig.ranks.arms(problem, kernels.placed, kernels.baseline, kernels.mode, without, rig.job)


def _attempt(rig: Rig, kernels: CaseKernels, problem: Problem, arms: Arms) -> Timed:
    """Time all arms and judge their answers; the rulings go into the outcomes. Raises BrokenArm if a kernel raises."""
    measured = _measure(rig, kernels, problem, arms)
    if rig.job.method.sustained and not rig.job.process:  # long turns are run only in the first process
        with correctness.computing(problem.backward):
            compared = {name: arms.by_name[name] for name in kernels.placed}
            remarks = sustained_remarks(compared, kernels.baseline, measured.blocks, rig.clock, rig.probe)
        kernels.outcomes |= {name: noted(kernels.outcomes[name], remark) for name, remark in remarks.items()}
    with rig.spending("verify"), correctness.computing(problem.backward):
        arms.inspect()
        arms.refresh([placed for placed in kernels.placed.values() if _in_full(rig, placed)])
    rig.inspector.require_nothing_replaced(kernels.placed)
    with rig.spending("verify"):
        rig.inspector.after_timing(arms, kernels.baseline, problem, measured.blocks, rig.clock)
    for name, ruling in arms.rulings.items():
        kernels.outcomes[name] = ruled(kernels.outcomes[name], ruling)
        _accuse(rig, kernels.outcomes[name])
        if ruling.wrong and name == kernels.baseline:
            kernels.notes.append(f"no ratios: the baseline {name} is wrong: {ruling.note}")
    how = (arms.launching.launch, arms.launching.plain_because) if arms.launching else ()
    return Timed(measured, arms.load, *how)


def _measure(rig: Rig, kernels: CaseKernels, problem: Problem, arms: Arms) -> Measured:
    job, case, compiled = rig.job, rig.case, recompiles()
    base = kernels.baseline if kernels.baseline in kernels.placed else next(iter(kernels.placed))
    plan = plan_of(job.method, base, tuple(kernels.placed), case.device, case.threads)

    def place(number: int) -> list[Arm]:
        return rig.inspector.watched(arms.place(number), kernels.placed)

    def captured(inner: Mapping[str, int]) -> list[Arm]:
        return rig.inspector.watched(arms.captured(inner), kernels.placed)

    with correctness.computing(problem.backward):
        try:
            measured = measure(job.process, case.key, place, rig.clock, rig.counters, plan, captured)
        except ChangedRecords as changed:
            ruling = Ruling(str(changed), WrongCode.PATCHED_CLOCK)
            raise BrokenArm(rig.inspector.suspect(kernels.placed)) from WrongResult(ruling)
    if arms.launching:
        kernels.notes.append(arms.launching.note)
    rig.spent["inside"] = arms.seconds
    rig.spent["verify"] = rig.spent.get("verify", 0.0) + arms.seconds
    if recompiles() > compiled:
        for name, placed in list(kernels.placed.items()):
            if "compiler" in placed.built.kernel.needs:  # triton_act compiles, but without torch.compile
                raise BrokenArm(name) from RuntimeError("torch compiled during timing")
    return measured


def _by_step(rig: Rig, kernels: CaseKernels, problem: Problem) -> Timed | None:
    case = rig.case
    REPORTER.stage("timing")
    llc, room = rig.ranks.llc_and_room(case, rig.job)
    done = time_steps(case, rig.job, problem, rig.clock, rig.counters, llc, room)
    kernels.mode = done.mode
    kernels.outcomes = {name: Outcome(name) for name in done.names}
    if case.cache == "cold-weights":
        kernels.notes.append(f"measured {done.mode.mode}, not cold-weights: steps have a single copy of their weights")
    if done.error:
        kernels.end(kernels.outcomes or [BLOCK], done.error)
    if done.measured is None:
        return None
    return Timed(done.measured, done.load, "plain" if case.device.startswith("cuda") else "")
