"""Give every call new inputs, and keep a kernel's answer to one call of every timed block as a sample.

A kernel that caches its answers finds no key for the cache. Before a call, outside the timed section, one of several
buffers (a new address) is filled with values that it never held (new contents for every token), without raising torch's
version counter. After a call, the call's answer replaces the stored one with probability 1 / k for the k-th call of a
block, so that every call is equally likely to be judged. The choice is only made when a call has returned, so a kernel
cannot predict which call is judged; and a stored answer is sent to the referee at once. All random choices come from
os.urandom.
"""

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

ROWS = 2  # tokens per sample
_LEAST_BYTES = 1 << 20  # minimum size of a reservoir


class Source(Protocol):
    """The source of x and, in a backward pass, of the gradient of the output, which is always random."""

    def draw(self) -> None:
        """Prepare other values; called once per placement (one set of buffers in memory)."""

    def write(self, x: Tensor) -> None:
        """Write new contents into x [tokens, d_model]."""

    def write_gradient(self, g: Tensor) -> None:
        """Write new contents into g [tokens, d_model]."""


class Reservoir:
    """A long array of normal random values. x is the sum of two windows at random positions, so that no token occurs
    twice in any call.

    (A single window would not be enough: at 256 tokens per call, a kernel could have stored the answers for most tokens
    after a second.)
    """

    def __init__(self, problem: Problem) -> None:
        count = problem.case.tokens * problem.case.spec.d_model
        total = max(2 * count, _LEAST_BYTES // problem.dtype.itemsize)
        self._flat = torch.empty(total, dtype=problem.dtype, device=problem.case.device)
        self._places = total - count + 1
        self.draw()

    def draw(self) -> None:
        """Draw all values again, with variance 1/2, so that the sum of two has variance 1."""
        generator = fresh_generator(self._flat.device)
        with torch.no_grad():
            normal = torch.randn(len(self._flat), generator=generator, device=generator.device)
            self._flat.copy_(normal.mul_(math.sqrt(0.5)))

    def write(self, x: Tensor) -> None:
        """Write new values into x, which is contiguous and has no gradient."""
        window, shape, strides, places = self._flat.as_strided, x.shape, x.stride(), self._places
        torch.add(window(shape, strides, drawn(places)), window(shape, strides, drawn(places)), out=x)

    def write_gradient(self, g: Tensor) -> None:
        """Write new values into g, which is random whatever the source of x."""
        Reservoir.write(self, g)


class FileSource(Reservoir):
    """Rows of the user's file; the gradient is random."""

    def __init__(self, problem: Problem, file: InputFile) -> None:
        super().__init__(problem)
        self._file = file

    def write(self, x: Tensor) -> None:
        """Write other rows, or the same rows at another scale."""
        x.copy_(self._file.drawn(len(x), fresh_generator()))


class RoutedSource:
    """Another source's x, shifted so that tokens go to prescribed experts; `load` counts them."""

    def __init__(self, source: Source, routing: PrescribedRouting) -> None:
        self.load = routing.new_load()
        self._source, self._routing = source, routing

    def draw(self) -> None:
        """Draw new values in the inner source."""
        self._source.draw()

    def write(self, x: Tensor) -> None:
        """Write new contents, for newly drawn experts."""
        self._source.write(x)
        wanted = self._routing.draw(len(x), fresh_generator())
        x.copy_(self._routing.entered(x, wanted))
        self.load.add(self._routing.chosen(x), wanted)

    def write_gradient(self, g: Tensor) -> None:
        """Write the inner source's gradient."""
        self._source.write_gradient(g)


def source_of(problem: Problem) -> Source:
    """Return the source of x for a case's timed calls."""
    source = Reservoir(problem) if problem.file is None else FileSource(problem, problem.file)
    return source if problem.routing is None else RoutedSource(source, problem.routing)


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for a single draw: its state does not predict the next draw."""
    return torch.Generator(device).manual_seed(drawn(1 << 62))


def drawn(below: int) -> int:
    """Return a random number from 0 to `below` - 1, from the system's entropy."""
    return int.from_bytes(os.urandom(8), "little") % below


class FreshInputs:
    """The inputs of one arm's calls (an arm is a timed call, such as a kernel), and samples of its answers.
    On a GPU, x is the same throughout a block, and the block's last call is judged, because a graph's x stays where it
    was captured.

    `ruling` covers faults that are visible at once: type, shape, dtype, a non-finite value, a changed input. `checked`
    are inputs with a complete reference (including the gradients of the weights): one call in one of the first `blocks`
    timed blocks receives these inputs, and is judged in addition to the drawn call.
    """

    def __init__(
        self, placed: PlacedKernel, problem: Problem, source: Source, checked: Inputs | None = None, blocks: int = 1
    ) -> None:
        self.placed = placed
        self.ruling = Ruling()
        self._problem, self._source, self._checked = problem, source, checked
        self._checked_block, self._checked_call = drawn(blocks), 0  # the call that receives `checked`
        self._block, self._calls, self._timed = -1, 0, False
        self._entered: tuple[Tensor, Tensor | None] | None = None  # copies of the next call's inputs
        self._answered: object = None  # the answer to `checked`
        self._captured: list[tuple[Tensor, Tensor | None, object]] = []  # x, g and output of captured calls

    def before_call(self) -> None:
        """Write new contents into another buffer; runs before every call, outside the timed section."""
        if self._entered is not None:
            self._returned()
        self.placed.turn(drawn(len(self.placed.ring)))
        self._enter()

    def before_block(self, calls: int, every_call: bool = True) -> None:
        """Begin a timed block. Unless `every_call` is set, write the inputs of the whole block now."""
        self._block, self._calls, self._timed = self._block + 1, 0, True
        if self._checked is not None and self._block == self._checked_block:
            self._checked_call = drawn(calls) if every_call else 0
        if not every_call:
            self._enter()

    def after_block(self) -> None:
        """End a timed block, whose last call has returned; later calls are not judged."""
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
        """Decide at random whether the answer of the call that has just returned replaces the stored answer."""
        entered, self._entered = self._entered, None
        if self.ruling.wrong or entered is None:
            return
        if self._is_checked_call:
            self._answered = _copied(self.placed.out)
        self._calls += 1
        if drawn(self._calls):  # 0 with probability 1 / k for the k-th call
            return
        x, g = entered
        self.ruling = self._show(x, g, self._block)
        if not self.ruling.wrong and not torch.equal(self.placed.entry[0], x):
            self.ruling = Ruling("changes its input x", WrongCode.CHANGED_INPUT)

    def _show(self, x: Tensor, g: Tensor | None, block: int) -> Ruling:
        """Show the referee a few tokens of the last answer to x, as a sample of this block. From then on, this process
        cannot change the sample. Return a ruling on faults that are visible at once."""
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
        """Make a call on other contents, to be captured together with copies of its answer; `take_captured` reads these
        after a replay.

        All replayed calls of a block share one x, so a kernel that reuses results of earlier calls in the graph would
        look right; with other contents, its answer is wrong.
        """
        x, g = self.placed.entry
        self._source.write_gradient(x)  # random: a graph cannot capture copies from the CPU
        if g is not None:
            self._source.write_gradient(g)
        entered = x.clone(), None if g is None else g.clone()
        out = self.placed.on_copy(params)
        self._captured.append((*entered, _copied(out)))
        return out

    def take_captured(self) -> None:
        """Show a few tokens of the captured calls, after they have been replayed."""
        captured, self._captured = self._captured, []
        for number, (x, g, out) in enumerate(captured):
            self.placed.out = out
            self.ruling = self.ruling.then(self._show(x, g, -2 - number))  # a negative index: not a timed block

    def checked_ruling(self) -> Ruling:
        """Return the ruling on the answer to the checked inputs; an empty ruling if there is no answer yet."""
        answered, self._answered = self._answered, None
        if answered is None or self._checked is None:
            return Ruling()
        self.placed.out = answered
        return correctness.compared(self.placed, self._problem, self._checked)


def in_turn(*calls: Callable[[], object] | None) -> Callable[[], object]:
    """Return a function that calls all of these, one after the other."""
    first, *rest = [call for call in calls if call is not None]
    if not rest:
        return first

    def every() -> None:
        first()
        for call in rest:
            call()

    return every


def drawn_rows(tokens: int) -> list[int]:
    """Draw the tokens of a sample, without replacement."""
    rows: set[int] = set()
    while len(rows) < min(ROWS, tokens):
        rows.add(drawn(tokens))
    return sorted(rows)


def _copied(out: object) -> object:
    """Copy an output and the gradients that came with it."""
    if isinstance(out, Tensor):
        return out.detach().clone()
    return tuple(_copied(one) for one in out) if isinstance(out, tuple) else out
