"""Measure one case over ranks; this code runs in each of the ranks. The steps are the same as on one rank, but all
ranks take each step together.

A finding on one rank counts for all: a kernel that is skipped, fails or is wrong on one rank is not timed on any rank.
If only one rank meets an error while the others wait for it in a collective, that rank ends its process, which ends
their wait.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ffncli.bench.judge.roofline import sent_by_rank
from ffncli.bench.machine.counters import Counters, Snapshot
from ffncli.bench.records import COLLECTIVES, COMPUTE, GEMM, GRAVEST, Case, Job, Outcome, TimedUnit
from ffncli.bench.referee.problem import Problem, Referee
from ffncli.bench.referee.process import RefereeProcess
from ffncli.bench.request.grid import ranks_here
from ffncli.bench.timing.arms import Arms, arms_of
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.fresh_inputs import Source, in_turn, source_of
from ffncli.bench.timing.gpu.cuda_clock import CudaClock, clock_for, counters_for
from ffncli.bench.timing.measure_case import OneRank, measure_case
from ffncli.bench.timing.outcomes import BrokenArm, first_cause, verdict_of
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.placement import Caching
from ffncli.bench.timing.ranks.channel import RankChannel, RankClock
from ffncli.bench.timing.ranks.kernels import KernelOverRanks, in_step, split_kernels
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.verdict import Ruling
from ffncli.kernels.kernel import Kernel


class KernelBroke(RuntimeError):
    """A kernel raised on this rank while all ranks were timing it: the others wait for data that never comes."""

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
    """Measure one case with every kernel of the job, in one of the ranks of `channel`; rank 0's unit is the case's
    result.

    Raises KernelBroke, and the error that a collective raises if another rank is lost.
    """
    mine = case.of_rank
    job = replace(job, gone=tuple((mine.key, outcome) for key, outcome in job.gone if key == case.key))
    here = clock or clock_for(mine.device, mine.threads)
    counters = _RankCounters(counters_for(here, mine.threads))
    in_turn = RankClock(here, channel, each_call=not isinstance(here, CudaClock))
    unit = measure_case(mine, job, in_turn, counters, start, referee, ranks=RankInStep(channel))
    blocks = tuple(replace(block, case=case.key) for block in unit.blocks)
    return replace(unit, case=case.key, blocks=blocks)


class RankInStep(OneRank):
    """One rank of a case; all ranks of the case take each step together.

    Users' kernels are not called to find out how they get their answers: a rank that called a kernel more often than
    the others would wait for them forever.
    """

    asks, roofs = False, 0

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._splits: dict[str, KernelOverRanks] = {}

    def loaded(self, case: Case, job: Job, replaced: Callable[[], Ruling]) -> dict[str, Kernel | Outcome]:
        """Load the kernels for this rank's part; a kernel that is unavailable on some rank is unavailable on all."""
        splits = split_kernels(job.kernels, case, self._channel, job.gone_in(case), replaced)
        self._splits = {name: one for name, one in splits.items() if isinstance(one, KernelOverRanks)}
        return {name: one.whole if isinstance(one, KernelOverRanks) else one for name, one in splits.items()}

    def problem(self, make: Callable[[], Problem]) -> Problem:
        """Return the case as tensors; the referees of all ranks rule on its answers."""
        problem = in_step(self._channel, make)
        return replace(problem, referee=_RankReferee(problem.rules, self._channel))

    def llc_and_room(self, case: Case, job: Job) -> tuple[int, int | None]:
        """Return a rank's part of a CPU's cache, and of memory; the rank with the least memory decides, so that all
        ranks make the same number of copies."""
        llc, room = super().llc_and_room(case, job)
        sharing = ranks_here(case.ranks) if case.device == "cpu" else 1  # each GPU has its own
        largest, *least = self._channel.largest([llc / sharing, -(room or 0) / sharing])
        return int(largest), None if room is None else int(-least[0])

    def agree(self, outcome: Outcome) -> Outcome:
        """Return the gravest of all ranks' outcomes, with the largest errors; it counts on every rank."""
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
        """Build the arms of one rank and of the collectives, all on the same inputs, without bare matrix products."""
        ours, source = RankArms(self._channel, self._splits), RankSource(source_of(problem), self._channel)
        return arms_of(
            problem, [*placed.values()], placed.get(baseline), caching, {*without, GEMM}, job, source=source,
            more=ours.more, hear=ours.hear,
        )  # fmt: skip

    def timing_begins(self) -> None:
        """Turn off the checks in which every call first waits for the other ranks."""
        for split in self._splits.values():
            split.careful = False

    def broke(self, name: str, error: BaseException) -> None:
        """Raise KernelBroke: the other ranks are still inside the failed call, so nothing more can be timed."""
        cause = first_cause(error)
        text = str(cause) if isinstance(cause, RuntimeError) else verdict_of(cause)[1]
        raise KernelBroke(name, text) from error


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


class _RankCounters:
    """This rank's counters. The rank's processor time is not judged, as a rank that waits for others is not busy. The
    time that its threads wait for a core is not judged either, since the threads of its collectives use the same cores.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def read(self) -> Snapshot:
        return self._counters.read()

    def flags(self, before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
        return tuple(flag for flag in self._counters.flags(before, after, seconds, 0) if flag != "preempted")


class _RankReferee(Referee):
    """Each rank's own referee; its rulings count on all ranks."""

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
    """Return the first ruling that finds an answer wrong, with its rank if that is another rank; if all answers are
    right, return a ruling with the largest errors."""
    first = [rulings[here], *(ruling.at(f"on rank {rank}, ") for rank, ruling in enumerate(rulings))]
    return reduce(Ruling.then, first)


# --- arms that exist only over ranks ----------------------------------------------------------------------------------


class RankSource:
    """Another source's x, written on the first of the ranks that get the same tokens, and copied to the others."""

    def __init__(self, source: Source, channel: RankChannel) -> None:
        self.source, self._channel = source, channel

    def draw(self) -> None:
        """Draw new values in the inner source."""
        self.source.draw()

    def write(self, x: Tensor) -> None:
        """Write new contents into x, identical on all these ranks."""
        self.source.write(x)
        self._channel.enter_alike(x)

    def write_gradient(self, g: Tensor) -> None:
        """Not used: no gradients are computed over ranks."""
        raise NotImplementedError


class RankArms:
    """The arms (timed calls) that the ranks of `channel` add to a case: the kernels in `splits` without their
    collectives, and the collectives without kernels."""

    def __init__(self, channel: RankChannel, splits: Mapping[str, KernelOverRanks]) -> None:
        self._channel, self._splits = channel, splits
        for name in splits:
            REPORTER.stands_for(name + COMPUTE, name)

    def hear(self, notes: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return (kernel, reason) for the kernels that some rank has found wrong; each is then wrong on all ranks."""
        every = enumerate(self._channel.all(dict(notes)))
        return [(name, f"rank {rank}: {note}") for rank, theirs in every for name, note in theirs.items()]

    def more(self, arms: Arms) -> list[Arm]:
        """Return the arms that exist only over ranks."""
        parts = ((placed, self._splits[placed.name].alone) for placed in arms.kernels)
        return [*(_alone(arms, placed, alone) for placed, alone in parts if alone), self._collectives(arms)]

    def _collectives(self, arms: Arms) -> Arm:
        """Build an arm that only communicates: the block's collectives, on tensors of the same sizes."""
        problem, group = arms.problem, self._channel.group
        sizes = sent_by_rank(problem.case)
        sent, calls = [], []
        for numbers in sizes.all_reduced:
            sent.append(torch.randn(numbers).to(problem.first.x))
            calls.append(partial(dist.all_reduce, sent[-1].clone(), group=group.mesh["tp"].get_group()))
        for numbers in sizes.exchanged:
            sent.append(torch.randn(numbers).to(problem.first.x))
            arriving = torch.empty_like(sent[-1])
            calls.append(partial(dist.all_to_all_single, arriving, sent[-1], group=group.mesh["ep"].get_group()))

        def call() -> None:
            for one in calls:
                one()

        def before() -> None:
            for one, numbers in zip(calls[: len(sizes.all_reduced)], sent, strict=False):
                one.args[0].copy_(numbers)  # summing the sums of the previous call would overflow

        return Arm(COLLECTIVES, call, in_turn(before, arms.flush), flushes=arms.flush is not None)


def _alone(arms: Arms, placed: PlacedKernel, compute: Callable[..., object]) -> Arm:
    """Build a kernel's arm without collectives, on the same x and weights; a call returns one rank's part of the
    output."""
    turn = cycle(placed.copies)

    def enter() -> None:
        arms.source.write(placed.entry[0])

    def call() -> object:
        try:
            return compute(placed.x, next(turn))
        except BaseException as error:  # SystemExit too
            raise BrokenArm(placed.name) from error

    return Arm(placed.name + COMPUTE, call, in_turn(enter, arms.flush), flushes=arms.flush is not None)
