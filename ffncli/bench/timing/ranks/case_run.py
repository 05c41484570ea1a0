"""One case over ranks, in one of them: the same steps as on one rank, each taken by all ranks together.

What one rank finds decides for all: a kernel that fails, is refused or wrong on one is not timed on any. An error that
only one rank meets while the others wait for it in a collective ends its process, and so their wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from ffncli.bench.machine.counters import Counters, Snapshot, SystemCounters
from ffncli.bench.records import GEMM, GRAVEST, Case, Job, Outcome, TimedUnit
from ffncli.bench.referee.problem import Problem, Referee
from ffncli.bench.referee.process import RefereeProcess
from ffncli.bench.request.split import ranks_here
from ffncli.bench.timing.arms import Arms, arms_of
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.cuda_clock import CudaClock, clock_for
from ffncli.bench.timing.cuda_counters import GpuCounters
from ffncli.bench.timing.fresh_inputs import source_of
from ffncli.bench.timing.measure_case import OneRank, measure_case
from ffncli.bench.timing.outcomes import first_cause, verdict_of
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.placement import Caching
from ffncli.bench.timing.ranks.arms import RankArms, RankSource
from ffncli.bench.timing.ranks.channel import RankChannel
from ffncli.bench.timing.ranks.clock import RankClock
from ffncli.bench.timing.ranks.kernels import KernelOverRanks, in_step, split_kernels
from ffncli.bench.verdict import Ruling
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
    here = clock or clock_for(mine.device)
    counters = _RankCounters(GpuCounters(here, None) if isinstance(here, CudaClock) else SystemCounters())
    in_turn = RankClock(here, channel, each_call=not isinstance(here, CudaClock))
    unit = measure_case(mine, job, in_turn, counters, start, referee, ranks=RankInStep(channel))
    blocks = tuple(replace(block, case=case.key) for block in unit.blocks)
    return replace(unit, case=case.key, blocks=blocks)


class RankInStep(OneRank):
    """One of the ranks of a case, which take each step together.

    It asks users' kernels nothing by calling them: a rank that calls one more often than the others waits for them.
    """

    asks, roofs = False, 0

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._splits: dict[str, KernelOverRanks] = {}

    def loaded(self, case: Case, job: Job, replaced: Callable[[], Ruling]) -> dict[str, Kernel | Outcome]:
        """The kernels on this rank's part; one that some rank cannot have, none has."""
        splits = split_kernels(job.kernels, case, self._channel, job.gone_in(case), replaced)
        self._splits = {name: one for name, one in splits.items() if isinstance(one, KernelOverRanks)}
        return {name: one.whole if isinstance(one, KernelOverRanks) else one for name, one in splits.items()}

    def problem(self, make: Callable[[], Problem]) -> Problem:
        """The case as tensors, whose answers all referees rule on."""
        problem = in_step(self._channel, make)
        return replace(problem, referee=_RankReferee(problem.rules, self._channel))

    def llc_and_room(self, case: Case, job: Job) -> tuple[int, int | None]:
        """A rank's share of a CPU's cache and memory; the smallest room of any, so that all place copies alike."""
        llc, room = super().llc_and_room(case, job)
        sharing = ranks_here(case.ranks) if case.device == "cpu" else 1  # a GPU has its own
        largest, *least = self._channel.largest([llc / sharing, -(room or 0) / sharing])
        return int(largest), None if room is None else int(-least[0])

    def agree(self, outcome: Outcome) -> Outcome:
        """Every rank has the gravest outcome of all, with the largest errors."""
        outcomes: list[Outcome] = self._channel.all(outcome)
        rank, gravest = min(enumerate(outcomes), key=lambda one: GRAVEST.index(one[1].status))
        note = outcome.note if gravest.status == outcome.status else f"rank {rank}: {gravest.note}"
        return replace(
            outcome, status=gravest.status, note=note,
            error_max=_largest(one.error_max for one in outcomes),
            error_rel=_largest(one.error_rel for one in outcomes),
            compile_s=_largest(one.compile_s for one in outcomes),
            peak_memory_bytes=max((one.peak_memory_bytes or 0 for one in outcomes), default=0) or None,
        )  # fmt: skip

    def arms(
        self, problem: Problem, placed: Mapping[str, PlacedKernel], baseline: str, caching: Caching,
        without: Collection[str], job: Job,
    ) -> Arms:  # fmt: skip
        """The arms of one rank and those of the collectives, all on the same inputs; no bare products."""
        ours, source = RankArms(self._channel, self._splits), RankSource(source_of(problem), self._channel)
        return arms_of(
            problem, [*placed.values()], placed.get(baseline), caching, {*without, GEMM}, job, source=source,
            more=ours.more, hear=ours.hear,
        )  # fmt: skip

    def timing_begins(self) -> None:
        """No call asks the other ranks any more."""
        for split in self._splits.values():
            split.careful = False

    def broke(self, name: str, error: BaseException) -> None:
        """Nothing is timed again in this process: the other ranks are in the midst of the call that broke."""
        cause = first_cause(error)
        text = str(cause) if isinstance(cause, RuntimeError) else verdict_of(cause)[1]
        raise KernelBroke(name, text) from error


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


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
