"""Inspector: what users' kernels of a case replaced, and how they get their answers. It costs nothing without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from ffncli.bench.timing.outcomes import BrokenArm, WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.wrong_codes import WrongCode
from ffncli.system.host import busy_threads


class Inspector:
    """`entry_points` were fixed before any user's file was loaded; None where the job has no such file."""

    def __init__(self, job: Job, entry_points: EntryPoints | None = None) -> None:
        self._files = {choice.label: str(choice.file) for choice in job.kernels if choice.file is not None}
        self._entry_points = (entry_points or EntryPoints()) if self._files else None
        self._threads: frozenset[str] = frozenset()
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

    def replaced(self) -> WrongResult | None:
        """What a user's file replaced since the last time; it is put back, for the sake of the other kernels."""
        wrong, _ = self._replaced()
        return wrong

    def require_nothing_replaced(self, placed: Mapping[str, PlacedKernel]) -> None:
        """Raises BrokenArm for a user's kernel that replaced something, or for any where nobody knows which did."""
        wrong, changes = self._replaced()
        if wrong is None:
            return
        users = [name for name in placed if name in self._files]
        sources = files_of(changes)
        name = next((name for name in users if self._files[name] in sources), users[0] if users else "")
        if name:
            raise BrokenArm(name) from wrong

    def suspect(self, placed: Mapping[str, PlacedKernel]) -> str:
        """The first user's kernel, where nobody knows whose code changed something; any if there is none."""
        return next((name for name in placed if name in self._files), next(iter(placed)))

    def after_check(self, placed: PlacedKernel) -> None:
        """Raises WrongResult if a user's kernel, which was right, replaced something or leaves a thread at work."""
        if placed.name not in self._files:
            return
        if wrong := self.replaced():
            raise wrong
        try:
            probes.require_idle(self._threads)
        except WrongResult:
            self.notes.append(
                f"a thread of {placed.name} computes while the others are timed, so their times are too long"
            )
            raise

    def named(self, error: BaseException, placed: PlacedKernel | None, problem: Problem) -> BaseException:
        """The error of a user's kernel at its first check, with the code of its cause where that shows."""
        if not isinstance(error, WrongResult) or error.code or error.error is None or placed is None:
            return error
        if placed.name not in self._files or problem.case.device != "cpu":
            return error
        try:
            code = cause(placed, problem, Reservoir(problem), error.error)
        except RefereeGone:
            raise
        except Exception:  # it is wrong whatever else its code does now
            return error
        return error if code == WrongCode.WRONG_WHEN_TIMED else WrongResult(str(error), error.error, code)

    def after_timing(
        self, arms: Arms, baseline: str, problem: Problem, blocks: Sequence[TimedBlock], clock: Clock
    ) -> None:
        """Judge kernels by their blocks, and ask users' kernels how they get their answers: `arms.wrong` gets the
        cheats, and why others are wrong."""
        placed, wrong = {one.name: one for one in arms.kernels}, arms.wrong
        for name, untimed in probes.other_streams(placed, blocks).items():
            if name not in wrong or wrong[name].code in (None, WrongCode.WRONG_WHEN_TIMED):
                wrong[name] = untimed
        users = [one for name, one in placed.items() if name in self._files]
        if isinstance(clock, CudaClock):
            for one in users:
                self._require_joined_streams(one, clock, problem, wrong)
        if not users or problem.case.device != "cpu":
            return
        source = Reservoir(problem)
        base = None if baseline in self._files else placed.get(baseline)
        asked = probes.Probes(problem, source, self._threads, base, blocks)
        for one in users:
            before = wrong.get(one.name)
            try:
                if before is None:
                    asked.require_honest(one)
                elif before.code in (None, WrongCode.WRONG_WHEN_TIMED):
                    code = cause(one, problem, source, before.error)
                    wrong[one.name] = WrongResult(str(before), before.error, code)
            except WrongResult as cheat:
                wrong[one.name] = cheat
            except RefereeGone:
                raise
            except Exception:  # its code raises now, and did not while it was timed
                continue

    def _require_joined_streams(
        self, placed: PlacedKernel, clock: CudaClock, problem: Problem, wrong: dict[str, WrongResult]
    ) -> None:
        try:
            probes.require_joined_streams(placed, clock, problem.backward)
        except WrongResult as untimed:
            wrong.setdefault(placed.name, untimed)
        except BrokenArm:  # its code raises now, and did not while it was timed
            return

    def _replaced(self) -> tuple[WrongResult | None, list[Change]]:
        if self._entry_points is None:
            return None, []
        changes = self._entry_points.changes()
        if not changes:
            return None, []
        self._entry_points.restore()
        if left := self._entry_points.changes():
            self.notes.append(f"{in_words(left)}, for all kernels of this process: it could not be put back")
        return WrongResult(in_words(changes), code=changes[0].code), changes
