"""Inspector: finds what users' kernels replaced, and how they compute their answers. Without users' kernels, it takes
no time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

from ffncli.bench.records import Job, TimedBlock
from ffncli.bench.referee.problem import CallSample, Problem
from ffncli.bench.referee.process import RefereeGone
from ffncli.bench.timing.arms import Arms
from ffncli.bench.timing.cheating import probes
from ffncli.bench.timing.cheating.entry_points import Change, EntryPoints, files_of, in_words
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.correctness import computing
from ffncli.bench.timing.fresh_inputs import Reservoir, Source, drawn, in_turn
from ffncli.bench.timing.gpu.cuda_clock import CudaClock
from ffncli.bench.timing.outcomes import BrokenArm
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.verdict import Error, Ruling, WrongCode, WrongResult
from ffncli.system.child import ENDED, processor_times, sleeps

# s between looks in the mean: at everything that can be replaced, some 10 ms, and at processes, some 0.1 ms
_LOOK, _COUNT = 0.4, 0.02
_MOST, _DRAWS = 0.5, 1 << 20  # the largest probability after a block


class Inspector:
    """Inspects the kernels of a job. `entry_points` were recorded before any user's file was loaded; they are None if
    the job has no such file. If `asks` is false, users' kernels are not called to find out how they compute their
    answers."""

    def __init__(self, job: Job, entry_points: EntryPoints | None = None, asks: bool = True) -> None:
        self._files = {choice.label: str(choice.file) for choice in job.kernels if choice.file is not None}
        self._entry_points = (entry_points or EntryPoints()) if self._files else None
        if self._entry_points is not None:
            self._entry_points.users = self._files
        self._known: frozenset[str] = frozenset()
        self._ended = 0.0  # when the last block ended
        self._before: dict[str, int] | None = None  # the processor times then, if the next block is looked at
        self._slept = 0  # how often threads and processes of users' files had gone to sleep before it
        self._beside = [0.0, 0.0]  # s of processor time of other processes during such blocks, and s of these blocks
        self._waking: list[bool] = []  # for each of these blocks, whether such a thread or process woke
        self._asks = asks
        self.notes: list[str] = []

    def accept_settings(self) -> None:
        """Accept the current settings, which have just been made for a case."""
        if self._entry_points is not None:
            self._entry_points.accept_settings()
            # including the threads that libraries have started, and the referee's process
            self._known = frozenset(processor_times()) - {ENDED}

    def fix(self, placed: PlacedKernel) -> None:
        """Record this kernel's code, if it is one of the package's, so that later changes to it are found."""
        if self._entry_points is not None and placed.name not in self._files:
            self._entry_points.add(placed.built.compute)
            self._entry_points.keep(placed.built)

    def replaced(self) -> Ruling:
        """Return the ruling on what users' files have replaced since the last call; restore what they replaced for the
        other kernels."""
        return self._replaced()[0]

    def require_nothing_replaced(self, placed: Mapping[str, PlacedKernel]) -> None:
        """Raise BrokenArm for the user's kernel that replaced something; if that kernel is unknown, for the first
        user's kernel."""
        ruling, changes = self._replaced()
        if not ruling.wrong:
            return
        users = [name for name in placed if name in self._files]
        sources = files_of(changes)
        name = next((name for name in users if self._files[name] in sources), users[0] if users else "")
        if name:
            raise BrokenArm(name) from WrongResult(ruling)

    def watched(self, arms: Sequence[Arm], placed: Mapping[str, PlacedKernel]) -> list[Arm]:
        """Return the arms of a placement. After some of their blocks, at random moments, what users' files may have
        replaced is looked at, so that it cannot be put back before every check. Raises BrokenArm then, as
        `require_nothing_replaced` does."""
        if self._entry_points is None or not self._asks:
            return [*arms]
        self._ended, self._before = perf_counter(), None
        return [
            replace(arm, after_block=in_turn(arm.after_block, partial(self._after_block, arm.name, placed)))
            for arm in arms
        ]

    def _after_block(self, name: str, placed: Mapping[str, PlacedKernel]) -> None:
        """Look at what was replaced, every _LOOK seconds in the mean, and more often at what processes compute during a
        block of the package's kernels."""
        assert self._entry_points is not None
        seconds, self._ended = perf_counter() - self._ended, perf_counter()
        if self._before is not None and name not in self._files:
            after = processor_times(threads=False)
            self._beside[0] += probes.by_others(self._before, after, self._known, processes=True) * 1e-9
            self._beside[1] += seconds
            self._waking.append(self._sleeps() > self._slept)
        self._before = None
        if _by_chance(seconds, _LOOK):
            with torch.inference_mode(False), torch.enable_grad():  # as where settings are accepted
                if next(self._entry_points.quick_changes(), None):
                    self.require_nothing_replaced(placed)
        if _by_chance(seconds, _COUNT):
            self._slept = self._sleeps()
            self._before, self._ended = processor_times(threads=False), perf_counter()

    def _sleeps(self) -> int:
        # libraries start threads for the calls of a case with several
        return sleeps(self._known, threads=torch.get_num_threads() == 1)

    def suspect(self, placed: Mapping[str, PlacedKernel]) -> str:
        """Return the kernel to blame if the responsible kernel is unknown: the first user's kernel, or else the first
        kernel."""
        return next((name for name in placed if name in self._files), next(iter(placed)))

    def after_check(self, placed: PlacedKernel) -> None:
        """Raise WrongResult if a user's kernel, though right, has replaced something or leaves a thread running."""
        if placed.name not in self._files:
            return
        if (ruling := self.replaced()).wrong:
            raise WrongResult(ruling)
        try:
            probes.require_idle(self._known)
        except WrongResult:
            self.notes.append(
                f"a thread of {placed.name} computes while the others are timed, so their times are too long"
            )
            raise

    def named(self, error: BaseException, placed: PlacedKernel | None, problem: Problem) -> BaseException:
        """Return the error of a user's kernel at its first check, with the code of the cause if the cause was found."""
        if not isinstance(error, WrongResult) or error.ruling.code or not error.ruling.error.largest or placed is None:
            return error
        if not self._asks or placed.name not in self._files or problem.case.device != "cpu":
            return error
        try:
            code = cause(placed, problem, Reservoir(problem), error.ruling.error)
        except RefereeGone:
            raise
        except Exception:  # the kernel is wrong, whatever its code does now
            return error
        return error if code == WrongCode.WRONG_WHEN_TIMED else WrongResult(replace(error.ruling, code=code))

    def after_timing(
        self, arms: Arms, baseline: str, problem: Problem, blocks: Sequence[TimedBlock], clock: Clock
    ) -> None:
        """Judge kernels by their blocks, and call users' kernels to find out how they compute their answers. Adds
        rulings on cheating kernels to `arms.rulings`, and adds a cause to existing rulings without one."""
        if not self._asks:
            return
        placed, rulings = {one.name: one for one in arms.kernels}, arms.rulings
        users = [one for name, one in placed.items() if name in self._files]
        for name, untimed in probes.other_streams([one.name for one in users], blocks).items():
            if rulings.get(name, Ruling()).code in (None, WrongCode.WRONG_WHEN_TIMED):
                rulings[name] = replace(untimed, error=rulings.get(name, untimed).error)
        if isinstance(clock, CudaClock):
            for one in users:
                try:
                    probes.require_joined_streams(one, clock, problem.backward)
                except WrongResult as untimed_work:
                    arms.rule(one.name, untimed_work.ruling)
                except BrokenArm:  # its code raises now, but did not while it was timed
                    continue
        if not users or problem.case.device != "cpu":
            return
        source = Reservoir(problem)
        base = None if baseline in self._files else placed.get(baseline)
        cpu, seconds = self._beside
        cores = cpu / seconds if seconds else 0.0
        asked = probes.Probes(problem, source, self._known, base, blocks, cores, self._waking)
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
            except Exception:  # its code raises now, but did not while it was timed
                continue

    def _replaced(self) -> tuple[Ruling, list[Change]]:
        changes = self._entry_points.changes() if self._entry_points is not None else []
        if self._entry_points is None or not changes:
            return Ruling(), []
        self._entry_points.restore()
        if left := self._entry_points.changes():
            self.notes.append(f"{in_words(left)} and could not be restored, which affects all kernels of this process")
            self._entry_points.accept_settings()  # so that no other kernel is blamed
        return Ruling(in_words(changes), changes[0].code), changes


def _by_chance(seconds: float, every: float) -> bool:
    """Return True once in `every` seconds in the mean, if it is asked after these `seconds`."""
    return drawn(_DRAWS) < _DRAWS * min(_MOST, seconds / every)


# --- why a timed answer was wrong -------------------------------------------------------------------------------------


_FEW_BITS = 0.05  # relative error: rounding to bf16 causes about 0.003, weights of 6 bits 0.03, another input above 0.5
_EVEN = 4  # maximum ratio of the largest error to the error over all values; a single wrong value gives above 10
_WAIT = 0.02  # s within which a thread would have finished the work of a call
_CALLS = 32
_ROW = 6  # consecutive calls; a kernel that sometimes cheats is not right in all of them
_POISON, _POISONED = 7.125, 64  # the value that fills memory, and the number of filled blocks of an output's size
_MOMENT = 0.002  # s


def cause(placed: PlacedKernel, problem: Problem, source: Source, error: Error) -> WrongCode:
    """Return the code of the cause of a wrong answer, or WRONG_WHEN_TIMED if the cause cannot be found."""
    if problem.backward:
        return WrongCode.WRONG_WHEN_TIMED
    if 0 < error.rel < _FEW_BITS and error.largest < _EVEN * error.rel:  # small errors, evenly spread, like rounding
        return WrongCode.LOWER_PRECISION
    with computing(problem.backward):
        return _Calls(placed, problem, source).cause()


class _Calls:
    """Single calls of a kernel, on inputs chosen here."""

    def __init__(self, placed: PlacedKernel, problem: Problem, source: Source) -> None:
        self._placed, self._problem, self._source = placed, problem, source

    def cause(self) -> WrongCode:
        """Call the kernel in several ways, and return the first cause that explains its wrong answers."""
        if self._changes_later():
            return WrongCode.DEFERRED_WORK
        if code := self._filled_later():
            return code
        if self._unwritten():
            return WrongCode.STALE_MEMORY
        x = self._placed.x
        if not self._right(x):
            if self._right(x, counted=True):
                return WrongCode.REPLAY_BY_VERSION
            if all(map(self._right_once, [x.detach() for _ in range(_ROW)])):
                return WrongCode.REPLAY_BY_ID
            if all(map(self._right_once, [x.clone() for _ in range(_ROW)])):
                return WrongCode.REPLAY_BY_ADDRESS
        return WrongCode.REPLAY_BY_PHASE if self._repeats() else WrongCode.WRONG_WHEN_TIMED

    def _write(self) -> None:
        self._source.write(self._placed.entry[0])

    def _answer(self, x: Tensor | None = None) -> Tensor:
        """Return the output itself, not a copy, for the current input."""
        placed = self._placed
        REPORTER.calls(placed.name)
        out = placed.built.compute(placed.x if x is None else x, placed.copies[0])
        assert isinstance(out, Tensor)
        return out

    def _right(self, x: Tensor, counted: bool = False) -> bool:
        """Return True if each call on new values is right; `counted` makes torch count the writes to x."""
        return all(self._right_once(x, counted) for _ in range(_ROW))

    def _right_once(self, x: Tensor, counted: bool = False) -> bool:
        self._write()
        if counted:
            with torch.inference_mode(False), torch.no_grad():
                self._placed.x.copy_(self._placed.x.clone())
        elif x.data_ptr() != self._placed.x.data_ptr():
            x.copy_(self._placed.entry[0])
        return self._is_right(x, self._answer(x))

    def _is_right(self, x: Tensor, out: Tensor) -> bool:
        rows = slice(0, 2)
        sample = CallSample(self._placed.name, x[rows].detach().clone(), out[rows].detach().clone(), None, None)
        with REPORTER.resting():
            (error,) = self._problem.sampled([sample])
        return error is None or error.largest <= self._problem.rules.limit(self._placed.name)

    def _changes_later(self) -> bool:
        """Return True if an output changes after its call, without another call."""
        for _ in range(_CALLS):
            self._write()
            out = self._answer()
            at_once = out.clone()
            if self._is_right(self._placed.x, at_once):
                continue
            time.sleep(_WAIT)
            return not _same(at_once, out)
        return False

    def _filled_later(self) -> WrongCode | None:
        """Return BATCHED_CALLS if one call fills the outputs of several earlier calls, and DEFERRED_WORK if a call
        fills one earlier output, or if outputs change without a call.

        Return None if nothing changes, and also if outputs share memory.
        """
        outs: list[Tensor] = []
        copies: list[Tensor] = []
        most = 0
        for _ in range(_CALLS):
            self._write()
            outs.append(self._answer())
            copies.append(outs[-1].clone())
            changed = [n for n, out in enumerate(outs[:-1]) if not _same(out, copies[n])]
            for n in changed:
                copies[n] = outs[n].clone()
            most = max(most, len(changed))
            time.sleep(_MOMENT)
            if not all(map(_same, outs, copies)):
                return WrongCode.DEFERRED_WORK
        if not most or len({out.data_ptr() for out in outs}) < len(outs):
            return None
        return WrongCode.BATCHED_CALLS if most > 2 else WrongCode.DEFERRED_WORK

    def _unwritten(self) -> bool:
        """Return True if an output contains values that were in its memory before."""
        self._placed.out = None
        like = self._answer()
        shape, kind = like.shape, like.dtype
        del like
        poison = [torch.full(shape, _POISON, dtype=kind) for _ in range(_POISONED)]
        del poison
        return any(int((self._answer() == _POISON).sum()) > 1 for _ in range(_ROW))

    def _repeats(self) -> bool:
        """Return True if the output for any token equals its output in the previous answer, although the input was
        different."""
        answers = []
        for _ in range(_CALLS):
            self._write()
            answers.append(self._answer().clone())
        return any(bool(((a == b) & (a != 0)).all(-1).any()) for a, b in pairwise(answers))


def _same(a: Tensor, b: Tensor) -> bool:
    """Compare bit by bit, since memory that was never written may hold NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
