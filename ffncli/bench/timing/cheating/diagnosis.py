"""Why a timed answer was wrong: some more calls, after the verdict, that differ in one thing each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ffncli.bench.judge.wrong_codes import WrongCode
from ffncli.bench.referee.errors import Error
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.samples import CallSample
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.fresh_inputs import Source
from ffncli.bench.timing.placed_kernel import PlacedKernel

_FEW_BITS = 0.05  # of the output: rounding to bf16 gives some 0.003, weights of 6 bits 0.03, another input above 0.5
_EVEN = 4  # times the error of all values together, at most, of the largest one: one wrong value has above 10
_WAIT = 0.02  # s in which a thread would have done the work of a call
_CALLS = 32
_POISON = 7.125


def _few_bits(error: Error | None) -> bool:
    """Whether an error looks like rounding: small, and as large for all values."""
    return error is not None and 0 < error.rel < _FEW_BITS and error.largest < _EVEN * error.rel


def cause(placed: PlacedKernel, problem: Problem, source: Source, error: Error | None) -> WrongCode:
    """The code of what made an answer wrong; WRONG_WHEN_TIMED where that does not show."""
    if _few_bits(error):
        return WrongCode.LOWER_PRECISION
    if problem.backward:
        return WrongCode.WRONG_WHEN_TIMED
    with correct.computing(problem.backward):
        return _Calls(placed, problem, source).cause()


class _Calls:
    """Single calls of a kernel, on inputs of our choice."""

    def __init__(self, placed: PlacedKernel, problem: Problem, source: Source) -> None:
        self._placed, self._problem, self._source = placed, problem, source

    def cause(self) -> WrongCode:
        """The first of these that shows."""
        if self._changes_later():
            return WrongCode.DEFERRED_WORK
        if filled := self._filled_by_later_calls():
            return WrongCode.BATCHED_CALLS if filled > 2 else WrongCode.DEFERRED_WORK
        if self._unwritten():
            return WrongCode.STALE_MEMORY
        if not self._right_after_write():
            if self._right_after_counted_write():
                return WrongCode.REPLAY_BY_VERSION
            if self._right(self._placed.x.detach()):
                return WrongCode.REPLAY_BY_ID
            if self._right(self._placed.x.clone()):
                return WrongCode.REPLAY_BY_ADDRESS
        return WrongCode.REPLAY_BY_PHASE if self._repeats() else WrongCode.WRONG_WHEN_TIMED

    def _write(self) -> None:
        self._source.write(self._placed.entry[0])

    def _answer(self, x: Tensor | None = None) -> Tensor:
        """The output, itself, for the input as it is now."""
        placed = self._placed
        out = placed.built.compute(placed.x if x is None else x, placed.copies[0])
        assert isinstance(out, Tensor)
        return out

    def _right(self, x: Tensor) -> bool:
        """Whether the answer to x, filled with other numbers, is right."""
        self._write()
        if x.data_ptr() != self._placed.x.data_ptr():
            x.copy_(self._placed.entry[0])
        return self._is_right(x, self._answer(x))

    def _right_after_write(self) -> bool:
        """In the same tensor, after a write that torch does not count; twice, as a timed call would be."""
        self._answer()
        return all(self._right(self._placed.x) for _ in range(4))

    def _right_after_counted_write(self) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            fresh = self._placed.x.clone()
            self._source.write(fresh)
            self._placed.x.copy_(fresh)
        return self._is_right(self._placed.x, self._answer())

    def _is_right(self, x: Tensor, out: Tensor) -> bool:
        rows = slice(0, 2)
        sample = CallSample(self._placed.name, x[rows].detach().clone(), out[rows].detach().clone(), None, None)
        (error,) = self._problem.sampled([sample])
        return error is None or error.largest <= self._placed.limit

    def _changes_later(self) -> bool:
        """Whether an output changes although nothing is called."""
        for _ in range(_CALLS):
            self._write()
            out = self._answer()
            at_once = out.clone()
            if self._is_right(self._placed.x, at_once):
                continue
            time.sleep(_WAIT)
            return not torch.equal(at_once, out)
        return False

    def _filled_by_later_calls(self) -> int:
        """How many outputs changed at most in one later call, where each has memory of its own."""
        outs: list[Tensor] = []
        copies: list[Tensor] = []
        most = 0
        for _ in range(_CALLS):
            self._write()
            out = self._answer()
            changed = [n for n, before in enumerate(outs) if not _same(before, copies[n])]
            for n in changed:
                copies[n] = outs[n].clone()
            most = max(most, len(changed))
            outs.append(out)
            copies.append(out.clone())
        return most if len({out.data_ptr() for out in outs}) == len(outs) else 0

    def _unwritten(self) -> bool:
        """Whether an output has what was in its memory before."""
        self._placed.out = None
        like = self._answer()
        shape, kind = like.shape, like.dtype
        del like
        poison = torch.full(shape, _POISON, dtype=kind)
        del poison
        return int((self._answer() == _POISON).sum()) > 1

    def _repeats(self) -> bool:
        """Whether two calls in a row on unlike inputs have one answer."""
        answers = []
        for _ in range(_CALLS):
            self._write()
            answers.append(self._answer().clone())
        return _any_equal(answers)


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit: memory that nobody has written to may hold NaN."""
    return bytes(a.contiguous().view(torch.uint8).flatten()[:4096].tolist()) == bytes(
        b.contiguous().view(torch.uint8).flatten()[:4096].tolist()
    )


def _any_equal(answers: Sequence[Tensor]) -> bool:
    """Whether any token of an answer is that of the answer before."""
    return any(bool(((a == b) & (a != 0)).all(-1).any()) for a, b in pairwise(answers))
