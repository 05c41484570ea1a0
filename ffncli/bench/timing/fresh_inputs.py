"""Other inputs at every call, and a sample of what a kernel answered at one call of every timed block.

A kernel that keeps its answers finds nothing to keep them by. Before a call, outside the clock, one of several buffers
(an address) is filled with numbers that it never had (contents, of every token), without torch's count of versions
going up. After a call it is drawn whether its answer is taken aside, in place of an earlier one: that of the k-th call
of a block with probability 1 / k, so that each is as likely to be the one that is judged. Until a call has returned
there is no number to look up, and nothing to count calls up to; and what is taken aside goes to the referee at once.
Everything is drawn from os.urandom.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ffncli.bench.referee.prescribed_routing import PrescribedRouting
from ffncli.bench.referee.problem import OUTPUT, CallSample, InputFile, Inputs, Problem
from ffncli.bench.referee.rulings import infinite
from ffncli.bench.timing import correctness
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.placement import Params
from ffncli.bench.verdict import Error, Ruling, WrongCode

ROWS = 2  # tokens of a sample
_LEAST_BYTES = 1 << 20  # of a reservoir


class Source(Protocol):
    """Where x comes from, and in a backward pass the gradient of the output, which is always random."""

    def draw(self) -> None:
        """Prepare other numbers; once in each placement."""

    def write(self, x: Tensor) -> None:
        """Other contents into x [tokens, d_model]."""

    def write_gradient(self, g: Tensor) -> None:
        """Other contents into g [tokens, d_model]."""


class Reservoir:
    """Normal numbers in a long row. x is the sum of two windows at random places: no token comes twice, in any call.

    (A single window would: of 256 tokens in each call, a table of answers by token has seen most after a second.)
    """

    def __init__(self, problem: Problem) -> None:
        count = problem.case.tokens * problem.case.spec.d_model
        total = max(2 * count, _LEAST_BYTES // problem.dtype.itemsize)
        self._flat = torch.empty(total, dtype=problem.dtype, device=problem.case.device)
        self._places = total - count + 1
        self.draw()

    def draw(self) -> None:
        """Other numbers throughout, of variance 1/2: a sum of two has 1."""
        generator = fresh_generator(self._flat.device)
        with torch.no_grad():
            normal = torch.randn(len(self._flat), generator=generator, device=generator.device)
            self._flat.copy_(normal.mul_(math.sqrt(0.5)))

    def write(self, x: Tensor) -> None:
        """Other numbers into x, which is contiguous and has no gradient."""
        window, shape, strides, places = self._flat.as_strided, x.shape, x.stride(), self._places
        torch.add(window(shape, strides, drawn(places)), window(shape, strides, drawn(places)), out=x)

    def write_gradient(self, g: Tensor) -> None:
        """Other numbers into g, random whatever x is."""
        Reservoir.write(self, g)


class FileSource(Reservoir):
    """Rows of the user's file; the gradient is random."""

    def __init__(self, problem: Problem, file: InputFile) -> None:
        super().__init__(problem)
        self._file = file

    def write(self, x: Tensor) -> None:
        """Other rows, or the same at another scale."""
        x.copy_(self._file.drawn(len(x), fresh_generator()))


class RoutedSource:
    """What another source writes, moved so that the router sends the tokens to prescribed experts. `load` counts where
    they went."""

    def __init__(self, source: Source, routing: PrescribedRouting) -> None:
        self.load = routing.new_load()
        self._source, self._routing = source, routing

    def draw(self) -> None:
        """Other numbers in the source."""
        self._source.draw()

    def write(self, x: Tensor) -> None:
        """Other contents, for experts that are drawn again too."""
        self._source.write(x)
        wanted = self._routing.draw(len(x), fresh_generator())
        x.copy_(self._routing.entered(x, wanted))
        self.load.add(self._routing.chosen(x), wanted)

    def write_gradient(self, g: Tensor) -> None:
        """As the source does."""
        self._source.write_gradient(g)


def source_of(problem: Problem) -> Source:
    """Where the x of a case's timed calls comes from."""
    source = Reservoir(problem) if problem.file is None else FileSource(problem, problem.file)
    return source if problem.routing is None else RoutedSource(source, problem.routing)


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """One for a single draw: its state says nothing of the next."""
    return torch.Generator(device).manual_seed(drawn(1 << 62))


def drawn(below: int) -> int:
    """A number from 0 up to `below`, from the system's entropy."""
    return int.from_bytes(os.urandom(8), "little") % below


class FreshInputs:
    """The inputs of one arm's calls, and the samples of its answers. On a GPU x is the same throughout a block, whose
    last call is judged: a graph's x stays where it was captured.

    `ruling` is on what shows at once: type, shape, dtype, a value that is not finite, an input that changed.
    `checked` are inputs with a complete reference (the gradients of the weights, too): one call gets them
    in one of the first `blocks` timed blocks, and is judged as well as the drawn one.
    """

    def __init__(
        self, placed: PlacedKernel, problem: Problem, source: Source, checked: Inputs | None = None, blocks: int = 1
    ) -> None:
        self.placed = placed
        self.ruling = Ruling()
        self._problem, self._source, self._checked = problem, source, checked
        self._checked_block, self._checked_call = drawn(blocks), 0  # the timed block that gets them, and its call
        self._block, self._calls, self._timed = -1, 0, False
        self._entered: tuple[Tensor, Tensor | None] | None = None  # copies for the call that comes, in a timed block
        self._answered: object = None  # the answer to `checked`
        self._captured: list[tuple[Tensor, Tensor | None, object]] = []  # x, g and output of captured calls

    def before_call(self) -> None:
        """Enter other contents into another buffer; ahead of every call, outside the clock."""
        if self._entered is not None:
            self._returned()
        self.placed.turn(drawn(len(self.placed.ring)))
        self._enter()

    def before_block(self, calls: int, every_call: bool = True) -> None:
        """A timed block begins. Without `every_call` its contents are entered now."""
        self._block, self._calls, self._timed = self._block + 1, 0, True
        if self._checked is not None and self._block == self._checked_block:
            self._checked_call = drawn(calls) if every_call else 0
        if not every_call:
            self._enter()

    def after_block(self) -> None:
        """The last call of a timed block has returned; the calls that follow are not judged."""
        if self._entered is not None:
            self._returned()
        self._timed = False

    @property
    def _is_checked_call(self) -> bool:
        return self._checked is not None and (self._block, self._calls) == (self._checked_block, self._checked_call)

    def _enter(self) -> None:
        x, g = self.placed.entry
        if self._checked is not None and self._timed and self._is_checked_call:
            self.placed.enter(self._checked.x, self._checked.g)
        else:
            self._source.write(x)
            if g is not None:
                self._source.write_gradient(g)
        if self._timed:
            self._entered = x.clone(), None if g is None else g.clone()

    def _returned(self) -> None:
        """A call has returned: draw whether it takes the place of the one that is to be judged."""
        entered, self._entered = self._entered, None
        if self.ruling.wrong or entered is None:
            return
        if self._is_checked_call:
            self._answered = _copied(self.placed.out)
        self._calls += 1
        if drawn(self._calls):
            return
        x, g = entered
        self.ruling = self._show(x, g, self._block)
        if not self.ruling.wrong and not torch.equal(self.placed.entry[0], x):
            self.ruling = Ruling("changes its input x", WrongCode.CHANGED_INPUT)

    def _show(self, x: Tensor, g: Tensor | None, block: int) -> Ruling:
        """Show the referee a few tokens of what was answered last, to that x, as a sample of that block: nothing is
        left here to change. What shows at once is ruled on here."""
        placed = self.placed
        if (form := correctness.form_of(placed.output, self._problem)).wrong:
            return form
        assert isinstance(placed.output, Tensor)
        out, gradient = placed.output.detach(), placed.x_gradient
        if fault := infinite(OUTPUT, out):
            return Ruling(fault, error=Error(math.inf, math.inf))
        rows = torch.tensor(drawn_rows(len(x)), device=x.device)
        self._problem.rules.show(
            CallSample(
                placed.name, x[rows], out[rows], None if g is None else g[rows],
                None if gradient is None else gradient.detach()[rows], block,
            )
        )  # fmt: skip
        return Ruling()

    def captured_call(self, params: Params) -> object:
        """A call on other contents, captured with a few more; `take_captured` takes their answers after a replay.

        Replayed, all calls of a block have one x: what a kernel keeps from one call of a graph to the next is right
        there, and wrong here.
        """
        x, g = self.placed.entry
        self._source.write_gradient(x)  # random: what a file or a routing brings from the CPU cannot be captured
        if g is not None:
            self._source.write_gradient(g)
        entered = x.clone(), None if g is None else g.clone()
        out = self.placed.on_copy(params)
        self._captured.append((*entered, _copied(out)))
        return out

    def take_captured(self) -> None:
        """A few tokens of the captured calls, which have been replayed."""
        captured, self._captured = self._captured, []
        for number, (x, g, out) in enumerate(captured):
            self.placed.out = out
            self.ruling = self.ruling.then(self._show(x, g, -2 - number))  # of no timed block

    def checked_ruling(self) -> Ruling:
        """Rule on the answer to the checked inputs, once there is one."""
        answered, self._answered = self._answered, None
        if answered is None or self._checked is None:
            return Ruling()
        self.placed.out = answered
        return correctness.compared(self.placed, self._problem, self._checked)


def in_turn(first: Callable[[], object], then: Callable[[], object] | None) -> Callable[[], object]:
    """Both, one after the other."""
    if then is None:
        return first

    def both() -> None:
        first()
        then()

    return both


def drawn_rows(tokens: int) -> list[int]:
    """The tokens of a sample, each once."""
    rows: set[int] = set()
    while len(rows) < min(ROWS, tokens):
        rows.add(drawn(tokens))
    return sorted(rows)


def _copied(out: object) -> object:
    """Copies of an output, and of the gradients that came with it."""
    if isinstance(out, Tensor):
        return out.detach().clone()
    return tuple(_copied(one) for one in out) if isinstance(out, tuple) else out
