"""One arm's kernel with buffers of its own: what is called in a block, and what its last call gave."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from ffncli.bench.timing.outcomes import BrokenArm, Skipped, WrongResult
from ffncli.bench.timing.placement import Arena, Params, nbytes, placeable
from ffncli.bench.timing.problem import Problem
from ffncli.block.steps import Experts
from ffncli.kernels.kernel import Computes, Kernel
from ffncli.run.user.kernels import unguarded


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel built for a case. `params` are its weights in its own form, which every arm of it gets copies of."""

    kernel: Kernel
    compute: Computes
    params: Params
    compile_s: float | None = None


def build_kernel(kernel: Kernel, problem: Problem) -> BuiltKernel:
    """The kernel for this case.

    Raises Skipped where it cannot do it, WrongResult where its prepare changes the weights, and what it raises.
    """
    case = problem.case
    reason = kernel.refusal(problem.steps, case.device, problem.dtype, case.passes)
    if reason:
        raise Skipped(reason)
    weights = {name: tensor.clone() for name, tensor in problem.weights.items()}  # a user's prepare may write to them
    with torch.no_grad():
        params = tuple(kernel.prepare(problem.steps, weights))
    if any(not torch.equal(weights[name], tensor) for name, tensor in problem.weights.items()):
        raise WrongResult("its prepare changes the weights")
    start = time.perf_counter()
    compute = kernel.build(problem.steps, case.device, problem.dtype)  # guarded: says where it raises; see `unguard`
    took = time.perf_counter() - start if kernel.compiles else None
    return BuiltKernel(kernel, compute, params, took)


class PlacedKernel:
    """A built kernel with buffers of its own. `limit` is the error that it may have, `out` what its last call gave.

    In a backward pass that is (output, gradients of x and of those of its params that are floats).
    """

    def __init__(self, name: str, built: BuiltKernel, problem: Problem, draw: random.Random, limit: float) -> None:
        self.name, self.built, self.limit = name, built, limit
        self.out: object = None
        self.call: Callable[[], object]
        self.x = problem.first.x
        self.copies: list[Params] = []
        self._problem = problem
        self.arenas = Arena(problem.case.device, draw), Arena(problem.case.device, draw)
        self._versions: list[list[int]] = []

    def place(self, copies: int) -> None:
        """New places for x and for so many copies of the weights. Raises BrokenArm, of what its prepare raises too."""
        try:
            self._place(copies)
        except BaseException as error:  # SystemExit too
            raise BrokenArm(self.name) from error

    def _place(self, copies: int) -> None:
        problem, backward = self._problem, self._problem.backward
        self.out, self.copies = None, []  # what lies there now goes first
        with torch.inference_mode(False), torch.no_grad():
            near, far = self.arenas
            extra = () if problem.first.g is None else (problem.first.g,)
            ((self.x, *rest),) = near.place([(problem.first.x, *extra)])
            self.g = rest[0] if rest else None
            params = self.built.params
            if placeable(params):
                self.copies = far.place([params] * copies)
            else:  # packed into a library's own form: only the kernel can make it again
                sets = far.place([tuple(problem.weights.values())] * copies)
                named = [dict(zip(problem.weights, own, strict=True)) for own in sets]
                self.copies = [tuple(self.built.kernel.prepare(problem.steps, own)) for own in named]
            if backward:
                for tensor in (self.x, *(t for own in self.copies for t in own if t.is_floating_point())):
                    tensor.requires_grad_()
            self._versions = [[t._version for t in own] for own in self.copies]
        self.call = self._backward() if backward else self._forward()

    def on_copy(self, own: Params) -> object:
        """What a call gives on one copy of the weights: for graphs, each copy has its own. Raises BrokenArm."""
        try:
            y = self.built.compute(self.x, own)
            if not self._problem.backward:
                return y
            leaves = (self.x, *(t for t in own if t.is_floating_point()))
            return y, torch.autograd.grad(y, leaves, self.g, allow_unused=True)
        except BaseException as error:  # SystemExit too
            raise BrokenArm(self.name) from error

    def replay(self, calls: Sequence[Callable[[], object]]) -> None:
        """From now on a call is the next of these, which give what `on_copy` does."""
        turn = cycle(calls)

        def call() -> object:
            self.out = next(turn)()
            return self.out

        self.call = call

    def _forward(self) -> Callable[[], object]:
        """Calls the kernel on the next copy; the output before is freed first, as where nobody keeps it."""
        compute, x, turn = self.built.compute, self.x, cycle(self.copies)

        def call() -> object:
            self.out = None
            try:
                self.out = compute(x, next(turn))
            except BaseException as error:  # SystemExit too
                raise BrokenArm(self.name) from error
            return self.out

        return call

    def _backward(self) -> Callable[[], object]:
        compute, x, g, grad = self.built.compute, self.x, self.g, torch.autograd.grad
        turn = cycle([(own, (x, *(t for t in own if t.is_floating_point()))) for own in self.copies])

        def call() -> object:
            self.out = None
            own, leaves = next(turn)
            try:
                y = compute(x, own)
                self.out = (y, grad(y, leaves, g, allow_unused=True))
            except BaseException as error:  # SystemExit too
                raise BrokenArm(self.name) from error
            return self.out

        return call

    def unguard(self) -> None:
        """From now on a user's function is called as it was written, where it can be: some import neighbours then."""
        guarded, bare = self.built, replace(self.built, compute=unguarded(self.built.compute))
        if bare.compute is guarded.compute:
            return
        self.built = bare
        try:
            self.on_copy(self.copies[0])
        except BrokenArm:
            self.built = guarded

    def enter(self, x: Tensor, g: Tensor | None = None) -> None:
        """Other numbers in the same buffers. No version count tells of them: an answer kept by it is found out too."""
        self.x.data.copy_(x)
        if g is not None and self.g is not None:
            self.g.data.copy_(g)

    @property
    def output(self) -> object:
        """The last call's output without its gradients."""
        return self.out[0] if self._problem.backward and isinstance(self.out, tuple) else self.out

    def gradients(self, problem: Problem) -> dict[str, Tensor]:
        """The last call's gradients of `x` and of the canonical weights."""
        assert isinstance(self.out, tuple)
        of_x, *rest = self.out[1]
        numbers = [n for n, t in enumerate(self.built.params) if t.is_floating_point()]
        own = canonical_gradients(problem, self, dict(zip(numbers, rest, strict=True)))
        return {"x": torch.zeros_like(self.x) if of_x is None else of_x, **own}

    def changed(self) -> bool:
        """Whether torch wrote to any copy of the weights."""
        return [[t._version for t in own] for own in self.copies] != self._versions

    @property
    def nbytes(self) -> int:
        """Of one copy of the weights, and of what enters."""
        return nbytes(self.built.params) + self.x.nbytes


def canonical_gradients(
    problem: Problem, placed: PlacedKernel, gradients: Mapping[int, Tensor | None]
) -> dict[str, Tensor]:
    """Gradients of the canonical weights from those of a kernel's own form of them, by number, through its prepare.

    Raises Skipped where its prepare cannot be differentiated.
    """
    kernel = placed.built.kernel
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in problem.weights.items()}
        params = kernel.prepare(problem.steps, leaves)
        pairs = [(params[n], d) for n, d in gradients.items() if d is not None]
        if not all(own.requires_grad for own, _ in pairs):
            raise Skipped("its prepare cannot be differentiated, so its gradients cannot be checked")
        own, given = [p for p, _ in pairs], [d for _, d in pairs]
        found = torch.autograd.grad(own, list(leaves.values()), given, allow_unused=True) if pairs else [None]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    return zeros | {n: d for n, d in zip(leaves, found, strict=False) if d is not None}


def shuffle_buffers(kernels: Sequence[PlacedKernel], draw: random.Random) -> None:
    """Kernels exchange their memory, to be placed anew in it: which pages an arm has is chance, not its own for good.

    Without this the pages of one arm can be the slower ones throughout a process (A/A read 1.02 in each of five).
    """
    arenas = [placed.arenas for placed in kernels]
    draw.shuffle(arenas)
    for placed, own in zip(kernels, arenas, strict=True):
        placed.arenas = own


def touched(problem: Problem) -> int:
    """Bytes of the weights that one call reads: of experts, those alone that any token goes to."""
    total, used = 0, problem.experts
    for step in problem.steps:
        size = sum(problem.weights[name].nbytes for name in step.parameters())
        if isinstance(step.op, Experts) and used is not None:
            size = size * int(used[:, : step.op.experts.size].any(0).sum()) // step.op.experts.size
        total += size
    return total


def total(kernels: Sequence[PlacedKernel]) -> int:
    """Bytes that the kernels hold, one copy of each."""
    return sum(placed.nbytes for placed in kernels)
