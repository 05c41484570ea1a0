"""One case over ranks, in one of them: the same steps as on one rank, each taken by all ranks together.

What one rank finds decides for all: a kernel that fails, is refused or wrong on one is not timed on any. An error that
only one rank meets while the others wait for it in a collective ends its process, and so their wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial, reduce
from typing import Any

from ffncli.bench.activity import REPORTER
from ffncli.bench.machine.counters import Counters, Snapshot, SystemCounters
from ffncli.bench.records import GEMM, GRAVEST, TWIN, Case, Job, Outcome, TimedBlock, TimedUnit
from ffncli.bench.referee.problem import Problem, Referee
from ffncli.bench.referee.process import RefereeProcess
from ffncli.bench.request.split import ranks_here
from ffncli.bench.timing import arms as one_rank
from ffncli.bench.timing.arms import Arms
from ffncli.bench.timing.cheating.inspector import Inspector
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.cuda_clock import CudaClock, clock_for
from ffncli.bench.timing.cuda_counters import GpuCounters
from ffncli.bench.timing.fresh_inputs import source_of
from ffncli.bench.timing.measure_case import CaseRun
from ffncli.bench.timing.outcomes import BrokenArm, first_cause, verdict_of
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.ranks.arms import RankArms, RankSource
from ffncli.bench.timing.ranks.channel import RankChannel
from ffncli.bench.timing.ranks.clock import RankClock
from ffncli.bench.timing.ranks.kernels import KernelOverRanks, in_step, split_kernels
from ffncli.bench.timing.settings import settle
from ffncli.bench.verdict import Ruling
from ffncli.dataclass import dataclass
from ffncli.kernels.kernel import Kernel


class KernelBroke(RuntimeError):
    """A kernel raised on this rank while all were timing it: the others wait for what it will never send."""

    def __init__(self, kernel: str, text: str) -> None:
        super().__init__(text)
        self.kernel = kernel


def measure_over_ranks(
    case: Case,
    job: Job,
    channel: RankChannel,
    start: float = 0.0,
    referee: RefereeProcess | None = None,
    clock: Clock | None = None,
) -> TimedUnit:
    """One case with every kernel of the job, in one of the ranks of `channel`; rank 0's answer is the case's.

    Raises KernelBroke, and what a collective raises where another rank is lost.
    """
    mine = case.of_rank
    job = replace(job, gone=tuple((mine.key, outcome) for key, outcome in job.gone if key == case.key))
    inspector = _RankInspector(job)
    settle(mine, job)
    inspector.settle()
    here = clock or clock_for(mine.device)
    counters = _RankCounters(GpuCounters(here, None) if isinstance(here, CudaClock) else SystemCounters())
    in_turn = RankClock(here, channel, each_call=not isinstance(here, CudaClock))
    run = _RankRun(mine, job, in_turn, counters, {"start": start}, inspector, referee, roofs=0)
    unit = run.over(channel).unit()
    blocks = tuple(replace(block, case=case.key) for block in unit.blocks)
    return replace(unit, case=case.key, blocks=blocks)


@dataclass
class _RankRun(CaseRun):
    """The state of a case on one rank."""

    channel: RankChannel = field(init=False)
    splits: dict[str, KernelOverRanks] = field(init=False, default_factory=dict)

    def over(self, channel: RankChannel) -> _RankRun:
        """This run as one of the ranks of `channel`."""
        self.channel = channel
        return self

    def _kernels(self) -> dict[str, Kernel | Outcome]:
        """The kernels by label, on this rank's part; one that some rank cannot have, none has."""
        gone = self.job.gone_in(self.case)
        splits = split_kernels(self.job.kernels, self.case, self.channel, gone, self.inspector.replaced)
        REPORTER.stage("starting")  # loading is over
        self.splits = {name: one for name, one in splits.items() if isinstance(one, KernelOverRanks)}
        return {name: one.whole if isinstance(one, KernelOverRanks) else one for name, one in splits.items()}

    def _problem(self) -> Problem:
        problem = in_step(self.channel, super()._problem)
        return replace(problem, referee=_RankReferee(problem.rules, self.channel))

    def llc_and_room(self) -> tuple[int, int | None]:
        """A rank's share of a CPU's cache and memory; the smallest room of any, so that all place copies alike."""
        llc, room = super().llc_and_room()
        sharing = ranks_here(self.case.ranks) if self.case.device == "cpu" else 1  # a GPU has its own
        largest, *least = self.channel.largest([llc / sharing, -(room or 0) / sharing])
        return int(largest), None if room is None else int(-least[0])

    def _verify(self, name: str, kernel: Kernel | Outcome, problem: Problem) -> None:
        super()._verify(name, kernel, problem)
        self._agree(name)

    def _agree(self, name: str) -> None:
        """Every rank has the gravest outcome of all, with the largest errors."""
        outcomes: list[Outcome] = self.channel.all(self.outcomes[name])
        rank, gravest = min(enumerate(outcomes), key=lambda one: GRAVEST.index(one[1].status))
        note = self.outcomes[name].note
        if gravest.status != self.outcomes[name].status:
            note = f"rank {rank}: {gravest.note}"
        self.outcomes[name] = replace(
            self.outcomes[name], status=gravest.status, note=note,
            error_max=_largest(one.error_max for one in outcomes),
            error_rel=_largest(one.error_rel for one in outcomes),
            compile_s=_largest(one.compile_s for one in outcomes),
            peak_memory_bytes=max((one.peak_memory_bytes or 0 for one in outcomes), default=0) or None,
        )  # fmt: skip
        if gravest.status != "ok":
            self.placed.pop(name, None)
            self._tell_referee(name)

    def _time(self, problem: Problem) -> None:
        for split in self.splits.values():
            split.careful = False
        super()._time(problem)
        for name in self.outcomes:
            self._agree(name)

    def _without(self, broken: BrokenArm, error: BaseException | None = None) -> None:
        """Nothing is timed again in this process: the other ranks are in the midst of the call that broke."""
        cause = first_cause(error or broken)
        name = self.baseline if broken.name in (TWIN, GEMM) else broken.name
        text = str(cause) if isinstance(cause, RuntimeError) else verdict_of(cause)[1]
        raise KernelBroke(name, text) from broken

    def _arms_of(self, problem: Problem, kernels: Sequence[PlacedKernel]) -> Arms:
        source = RankSource(source_of(problem), self.channel)
        made = one_rank.arms_of(
            problem, kernels, self.placed.get(self.baseline), self.mode, {*self.without, GEMM}, self.job,
            partial(RankArms, source=source),
        )  # fmt: skip
        assert isinstance(made, RankArms)
        return made.over(self.channel, self.splits)


def _largest(values: object) -> float | None:
    return max((value for value in values if value is not None), default=None)  # type: ignore[attr-defined]


class _RankInspector(Inspector):
    """Asks users' kernels nothing by calling them: a rank that calls one more often than the others waits for them."""

    def named(self, error: BaseException, placed: PlacedKernel | None, problem: Problem) -> BaseException:
        """The error as it is."""
        return error

    def after_timing(
        self, arms: Arms, baseline: str, problem: Problem, blocks: Sequence[TimedBlock], clock: Clock
    ) -> None:
        """Nothing is asked."""


class _RankCounters:
    """This rank's counters. Its processor time is not judged, as a rank that waits for others is not busy; nor is how
    long its threads wait for a core, which those of its collectives want too."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def read(self) -> Snapshot:
        """The counts now."""
        return self._counters.read()

    def flags(self, before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
        """What happened in a block, but for `preempted`."""
        return tuple(flag for flag in self._counters.flags(before, after, seconds, 0) if flag != "preempted")


class _RankReferee(Referee):
    """Each rank's own referee, whose rulings count on all of them."""

    def __init__(self, referee: Referee, channel: RankChannel) -> None:
        self._referee, self._channel = referee, channel

    def _ask(self, question: str, *arguments: Any) -> Any:
        answer = getattr(self._referee, question)(*arguments)
        if question == "ruling":
            return _gravest(self._channel.all(answer), self._channel.rank)
        if question == "timed":
            rulings: list[dict[str, Ruling]] = self._channel.all(answer)
            names = dict.fromkeys(name for one in rulings for name in one)
            return {name: _gravest([one.get(name, Ruling()) for one in rulings], self._channel.rank) for name in names}
        return answer


def _gravest(rulings: Sequence[Ruling], here: int) -> Ruling:
    """The first wrong one, with its rank if that is another; where all are right, one with the largest errors."""
    first = [rulings[here], *(ruling.at(f"on rank {rank}, ") for rank, ruling in enumerate(rulings))]
    return reduce(Ruling.then, first)
