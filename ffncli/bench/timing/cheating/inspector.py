"""Inspector: what users' kernels of a case replaced, and how they get their answers. It costs nothing without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ffncli.bench.records import Job, TimedBlock
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.process import RefereeGone
from ffncli.bench.timing.arms import Arms
from ffncli.bench.timing.cheating import probes
from ffncli.bench.timing.cheating.diagnosis import cause
from ffncli.bench.timing.cheating.entry_points import Change, EntryPoints, files_of, in_words
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.cuda_clock import CudaClock
from ffncli.bench.timing.fresh_inputs import Reservoir
from ffncli.bench.timing.outcomes import BrokenArm
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.verdict import Ruling, WrongCode, WrongResult
from ffncli.system.host import busy_threads


class Inspector:
    """`entry_points` were fixed before any user's file was loaded; None where the job has no such file. Unless it
    `asks`, users' kernels are not called to see how they get their answers."""

    def __init__(self, job: Job, entry_points: EntryPoints | None = None, asks: bool = True) -> None:
        self._files = {choice.label: str(choice.file) for choice in job.kernels if choice.file is not None}
        self._entry_points = (entry_points or EntryPoints()) if self._files else None
        self._threads: frozenset[str] = frozenset()
        self._asks = asks
        self.notes: list[str] = []

    def settle(self) -> None:
        """The settings of a case have been made: they are right as they are."""
        if self._entry_points is not None:
            self._entry_points.settle()
            self._threads = frozenset(busy_threads())  # libraries have started theirs

    def fix(self, placed: PlacedKernel) -> None:
        """Nobody may change this kernel's code from now on, if it is one of the package's."""
        if self._entry_points is not None and placed.name not in self._files:
            self._entry_points.add(placed.built.compute)

    def replaced(self) -> Ruling:
        """On what a user's file replaced since the last time; it is put back, for the sake of the other kernels."""
        return self._replaced()[0]

    def require_nothing_replaced(self, placed: Mapping[str, PlacedKernel]) -> None:
        """Raises BrokenArm for a user's kernel that replaced something, or for any where nobody knows which did."""
        ruling, changes = self._replaced()
        if not ruling.wrong:
            return
        users = [name for name in placed if name in self._files]
        sources = files_of(changes)
        name = next((name for name in users if self._files[name] in sources), users[0] if users else "")
        if name:
            raise BrokenArm(name) from WrongResult(ruling)

    def suspect(self, placed: Mapping[str, PlacedKernel]) -> str:
        """The first user's kernel, where nobody knows whose code changed something; any if there is none."""
        return next((name for name in placed if name in self._files), next(iter(placed)))

    def after_check(self, placed: PlacedKernel) -> None:
        """Raises WrongResult if a user's kernel, which was right, replaced something or leaves a thread at work."""
        if placed.name not in self._files:
            return
        if (ruling := self.replaced()).wrong:
            raise WrongResult(ruling)
        try:
            probes.require_idle(self._threads)
        except WrongResult:
            self.notes.append(
                f"a thread of {placed.name} computes while the others are timed, so their times are too long"
            )
            raise

    def named(self, error: BaseException, placed: PlacedKernel | None, problem: Problem) -> BaseException:
        """The error of a user's kernel at its first check, with the code of its cause where that shows."""
        if not isinstance(error, WrongResult) or error.ruling.code or not error.ruling.error.largest or placed is None:
            return error
        if not self._asks or placed.name not in self._files or problem.case.device != "cpu":
            return error
        try:
            code = cause(placed, problem, Reservoir(problem), error.ruling.error)
        except RefereeGone:
            raise
        except Exception:  # it is wrong whatever else its code does now
            return error
        return error if code == WrongCode.WRONG_WHEN_TIMED else WrongResult(replace(error.ruling, code=code))

    def after_timing(
        self, arms: Arms, baseline: str, problem: Problem, blocks: Sequence[TimedBlock], clock: Clock
    ) -> None:
        """Judge kernels by their blocks, and ask users' kernels how they get their answers: `arms.rulings` get the
        cheats, and why others are wrong."""
        if not self._asks:
            return
        placed, rulings = {one.name: one for one in arms.kernels}, arms.rulings
        for name, untimed in probes.other_streams(placed, blocks).items():
            if rulings.get(name, Ruling()).code in (None, WrongCode.WRONG_WHEN_TIMED):
                rulings[name] = replace(untimed, error=rulings.get(name, untimed).error)
        users = [one for name, one in placed.items() if name in self._files]
        if isinstance(clock, CudaClock):
            for one in users:
                try:
                    probes.require_joined_streams(one, clock, problem.backward)
                except WrongResult as untimed_work:
                    arms.rule(one.name, untimed_work.ruling)
                except BrokenArm:  # its code raises now, and did not while it was timed
                    continue
        if not users or problem.case.device != "cpu":
            return
        source = Reservoir(problem)
        base = None if baseline in self._files else placed.get(baseline)
        asked = probes.Probes(problem, source, self._threads, base, blocks)
        for one in users:
            before = rulings.get(one.name, Ruling())
            try:
                if not before.wrong:
                    asked.require_honest(one)
                elif before.code in (None, WrongCode.WRONG_WHEN_TIMED):
                    rulings[one.name] = replace(before, code=cause(one, problem, source, before.error))
            except WrongResult as cheat:
                arms.rule(one.name, cheat.ruling)
            except RefereeGone:
                raise
            except Exception:  # its code raises now, and did not while it was timed
                continue

    def _replaced(self) -> tuple[Ruling, list[Change]]:
        changes = self._entry_points.changes() if self._entry_points is not None else []
        if self._entry_points is None or not changes:
            return Ruling(), []
        self._entry_points.restore()
        if left := self._entry_points.changes():
            self.notes.append(f"{in_words(left)}, for all kernels of this process: it could not be put back")
        return Ruling(in_words(changes), changes[0].code), changes
