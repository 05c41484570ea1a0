"""One arm's kernel with its own buffers: the call that a block repeats, and the output of the last call."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from ffncli.bench.machine.machine import KernelMemory
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.gpu.cuda_graphs import replaying
from ffncli.bench.timing.outcomes import BrokenArm, Skipped
from ffncli.bench.timing.placement import MANY_COPIES, Arena, Caching, Params, Pool, nbytes, placeable, sharing
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.verdict import Ruling, WrongCode, WrongResult
from ffncli.block.steps import Experts
from ffncli.kernels.kernel import Computes, Kernel
from ffncli.run.user.kernels import located, unguarded

RING = 4  # number of buffers of x, at different addresses
_LARGE = 16 << 20  # bytes of x above which two buffers must suffice
_SLOW = 0.25  # s; a call that takes longer takes much of the other kernels' time
_OURS = 2  # number of ffncli's own arms with weights: the twin and the bare products


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel built for a case. `params` is the weights in the kernel's own form, which every arm copies.

    If a kernel of the package uses the drawn weights as they are, `params` holds those same weights.
    """

    kernel: Kernel
    compute: Computes
    params: Params
    compile_s: float | None = None


def pooled(kernels: Iterable["PlacedKernel"], copies: int, problem: Problem, draw: random.Random) -> list[Pool]:
    """Make kernels of the package that read the same weights as they were drawn share one pool of copies; return the
    pools.

    A user's kernel has copies of its own. A GPU's graphs are captured with their copies, in the order of one kernel.
    """
    pools: dict[tuple[int, ...], Pool] = {}
    if copies < MANY_COPIES or problem.case.device != "cpu" or problem.case.ranks.world_size > 1:
        return []
    drawn = {id(tensor) for tensor in problem.weights.values()}
    for placed in kernels:
        key = tuple(id(tensor) for tensor in placed.built.params)
        kernel = placed.built.kernel
        if not (placed.shared or kernel.origin or kernel.per_weights) and drawn.issuperset(key):
            placed.pool = pools.setdefault(key, Pool(placed.built.params, draw))
    return list(pools.values())


def build_kernel(kernel: Kernel, problem: Problem, memory: KernelMemory | None = None) -> BuiltKernel:
    """Build the kernel for this case; `memory` counts the memory that it keeps.

    Raises Skipped if the kernel does not support the case, WrongResult if the kernel's prepare changes the weights, and
    the kernel's own exceptions.
    """
    case = problem.case
    if reason := refusal(kernel, problem):
        raise Skipped(reason)
    weights = problem.weights
    if kernel.origin:  # a user's prepare may write to the weights
        weights = {name: tensor.clone() for name, tensor in problem.weights.items()}
    with torch.no_grad():
        params = tuple(kernel.prepare(problem.steps, weights))
    if kernel.origin and any(not torch.equal(weights[name], tensor) for name, tensor in problem.weights.items()):
        raise WrongResult(Ruling("its prepare changes the weights", WrongCode.CHANGED_WEIGHTS))
    start = time.perf_counter()
    with memory.keeping() if memory else nullcontext():
        compute = kernel.build(problem.steps, case.device, problem.dtype)  # guarded, see `unguard`
    took = time.perf_counter() - start if kernel.compiles else None
    return BuiltKernel(kernel, compute, params, took)


def refusal(kernel: Kernel, problem: Problem) -> str | None:
    """Return the reason why the kernel cannot run the case, or None if it can."""
    case = problem.case
    cold = case.cache == "cold-weights"  # cold-weights uses several copies; flushing the caches needs only one copy
    return kernel.refusal(problem.steps, case.device, problem.dtype, case.passes, case.tokens, cold)


class PlacedKernel:
    """A built kernel with its own buffers. `out` is the output of its last call.

    In a backward pass, `out` is (output, gradients of x and of the floating-point params). x and the gradient of the
    output have several buffers, the `ring`; `x` and `g` are the buffers of the next call. `shared`: read the weights
    where they were built, without copies; only for kernels of the package.
    """

    def __init__(
        self, name: str, built: BuiltKernel, problem: Problem, draw: random.Random, shared: bool = False
    ) -> None:
        self.name, self.built = name, built
        self._guarded = built.compute
        self.frozen = built.kernel.per_weights and built.kernel.compiles  # its compiled code contains the weights
        self.shared = (shared or self.frozen) and not built.kernel.origin
        self.out: object = None
        self.first_s: float | None = None  # seconds of the first call, on a CPU and without compiling
        self.call: Callable[[], object]
        self.x = problem.first.x
        self.g = problem.first.g
        self.ring: list[Params] = []
        self.copies: list[Params] = []
        self.pool: Pool | None = None  # if other kernels use the same copies
        self._writable: list[Params] = []
        self._at = 0
        self._problem, self._draw = problem, draw
        self.arenas = Arena(problem.case.device, draw), Arena(problem.case.device, draw)
        self._versions: list[list[int]] = []
        self._places: list[list[tuple[object, ...]]] = []
        # An object's attributes are slower once its dict has been read. Checks read those of the kernels but not of the
        # twin, whose calls took 0.4 µs less.
        vars(self)

    def place(self, copies: int) -> None:
        """Place x and `copies` copies of the weights at new addresses; many copies are only put into another order.
        Raises BrokenArm, also if its prepare raises."""
        REPORTER.first_call(self.name)
        try:
            self._place(copies)
        except BaseException as error:  # SystemExit too
            raise BrokenArm(self.name) from error

    def _place(self, copies: int) -> None:
        problem, backward = self._problem, self._problem.backward
        if self.pool:
            self.copies = self.pool.copies
        keeps = len(self.copies) == copies >= MANY_COPIES
        self.out, self.copies = None, self.copies if keeps else []  # frees the old buffers first
        with torch.inference_mode(False), torch.no_grad():
            near, far = self.arenas
            entering, weights = self._sets(copies)
            self.ring = near.place(entering)
            # `.data` shares the memory, but not the version counter.
            self._writable = [tuple(t.data for t in buffers) for buffers in self.ring]
            self.turn(0)
            if keeps:
                if self.pool is None:  # `Arms.place` shuffles a pool
                    self._draw.shuffle(self.copies)
            elif self.frozen:
                self.copies = [self.built.params]
            elif self.shared:
                self.copies = [tuple(t.detach() for t in self.built.params)]
            elif placeable(self.built.params):
                self.copies = far.place(weights)
                if self.pool:
                    self.pool.hold(self.copies)
            else:  # weights packed into a library's form, which only the kernel can produce
                named = [dict(zip(problem.weights, copy, strict=True)) for copy in far.place(weights)]
                self.copies = [tuple(self.built.kernel.prepare(problem.steps, copy)) for copy in named]
            if backward:
                for tensor in (
                    *(x for x, *_ in self.ring),
                    *(t for p in self.copies for t in p if t.is_floating_point()),
                ):
                    tensor.requires_grad_()
            self._versions = [[t._version for t in copy] for copy in self.copies]
            self._places = self._places_now()
            if self.built.kernel.per_weights and not keeps:
                for copy in self.copies:
                    self.built.compute(self.x, copy)
        self.call = self._backward() if backward else self._forward()

    def _sets(self, copies: int) -> tuple[list[Params], list[Params]]:
        """Return the tensors to place: x for every buffer, and the weights for every copy."""
        first, params = self._problem.first, self.built.params
        entering = (first.x,) if first.g is None else (first.x, first.g)
        weights = params if placeable(params) else tuple(self._problem.weights.values())
        return [entering] * self._buffers, [] if self.shared else [weights] * copies

    def need(self, copies: int) -> tuple[int, int]:
        """Return the bytes that each of the kernel's two arenas needs for this many copies of the weights."""
        near, far = (arena.need(sets) for arena, sets in zip(self.arenas, self._sets(copies), strict=True))
        return near, far

    @property
    def slow_s(self) -> float | None:
        """The seconds of a call, if one call is all that its estimate and its check may take; only for kernels of the
        package, and on a single rank: all ranks make the same calls, whatever each of them measures."""
        one = self._problem.case.ranks.world_size == 1 and not self.built.kernel.origin
        return self.first_s if one and self.first_s is not None and self.first_s > _SLOW else None

    @property
    def _buffers(self) -> int:
        """The number of buffers of x. On a GPU it is 1: a graph reads the buffer that it was captured with."""
        if self._problem.case.device.startswith("cuda"):
            return 1
        return RING if self._problem.first.x.nbytes < _LARGE else 2

    def turn(self, number: int) -> None:
        """Use the buffers of this number in the next call."""
        self._at = number
        self.x, *rest = self.ring[number]
        self.g = rest[0] if rest else None

    @property
    def entry(self) -> tuple[Tensor, Tensor | None]:
        """x and g of the next call, as views. Writing to these views leaves torch's version counter unchanged, so
        kernels that cache answers by version give wrong answers."""
        x, *rest = self._writable[self._at]
        return x, rest[0] if rest else None

    def on_copy(self, params: Params) -> object:
        """Return a call's output on one copy of the weights; a graph is captured for every copy. Raises BrokenArm."""
        REPORTER.calls(self.name)
        try:
            y = self.built.compute(self.x, params)
            if not self._problem.backward:
                return y
            leaves = (self.x, *(t for t in params if t.is_floating_point()))
            return y, torch.autograd.grad(y, leaves, self.g, allow_unused=True)
        except BaseException as error:  # SystemExit too
            raise BrokenArm(self.name) from located(self._guarded, error)

    def replay(self, replays: Sequence[Callable[[], object]]) -> None:
        """Make later calls use these replays in turn; each returns what `on_copy` returns."""
        replay = replaying(replays)

        def call() -> object:
            self.out = replay()
            return self.out

        self.call = call

    def _forward(self) -> Callable[[], object]:
        """Return a function that frees the last output, as in normal use, and calls the kernel on the next copy."""
        compute, turn = self.built.compute, self.pool.turn if self.pool else cycle(self.copies)

        def call() -> object:
            self.out = None
            try:
                self.out = compute(self.x, next(turn))
            except BaseException as error:  # SystemExit too
                raise BrokenArm(self.name) from located(self._guarded, error)
            return self.out

        return call

    def _backward(self) -> Callable[[], object]:
        compute, grad = self.built.compute, torch.autograd.grad
        turn = self.pool.turn if self.pool else cycle(self.copies)
        floating = [n for n, tensor in enumerate(self.built.params) if tensor.is_floating_point()]

        def call() -> object:
            self.out = None
            params = next(turn)
            leaves = [params[n] for n in floating]
            try:
                y = compute(self.x, params)
                self.out = (y, grad(y, (self.x, *leaves), self.g, allow_unused=True))
            except BaseException as error:  # SystemExit too
                raise BrokenArm(self.name) from located(self._guarded, error)
            return self.out

        return call

    def call_untimed(self) -> None:
        """Make an untimed call; the parent process counts it as a separate call, and limits its time."""
        REPORTER.calls(self.name)
        self.call()

    def unguard(self) -> None:
        """Stop guarding a user's function, unless it needs the guard because it imports files during a call."""
        guarded, bare = self.built, replace(self.built, compute=unguarded(self.built.compute))
        if bare.compute is guarded.compute:
            return
        self.built = bare
        try:
            self.on_copy(self.copies[0])
        except BrokenArm:
            self.built = guarded

    def enter(self, x: Tensor, g: Tensor | None = None) -> None:
        """Write these values into the buffers of the next call."""
        x_buffer, g_buffer = self.entry
        x_buffer.copy_(x)
        if g is not None and g_buffer is not None:
            g_buffer.copy_(g)

    def forget(self) -> None:
        """Free the last call's output."""
        self.out = None

    @property
    def output(self) -> object:
        """The last call's output, without its gradients."""
        return self.out[0] if self._problem.backward and isinstance(self.out, tuple) else self.out

    @property
    def x_gradient(self) -> Tensor | None:
        """The last call's gradient of x; None in a forward pass."""
        if not self._problem.backward or not isinstance(self.out, tuple):
            return None
        gradient: Tensor | None = self.out[1][0]
        return torch.zeros_like(self.x) if gradient is None else gradient

    def gradients(self, problem: Problem) -> dict[str, Tensor]:
        """Return the last call's gradients of `x` and of the canonical weights."""
        assert isinstance(self.out, tuple)
        of_x, *rest = self.out[1]
        numbers = [n for n, t in enumerate(self.built.params) if t.is_floating_point()]
        weight_gradients = canonical_gradients(problem, self, dict(zip(numbers, rest, strict=True)))
        return {"x": torch.zeros_like(self.x) if of_x is None else of_x, **weight_gradients}

    def moved(self) -> bool:
        """Return True if its weights or the buffers of x have moved in memory, have other strides, or are tensors of
        another kind than when they were placed."""
        return self._places_now() != self._places

    def _places_now(self) -> list[list[tuple[object, ...]]]:
        return [[_place_of(t) for t in tensors] for tensors in (*self.copies, *self.ring, *self._writable)]

    def changed(self) -> bool:
        """Return True if torch has written to any copy of the weights."""
        return [[t._version for t in copy] for copy in self.copies] != self._versions

    @property
    def nbytes(self) -> int:
        """Bytes of x and, unless the weights are shared, of one copy of the weights."""
        return (0 if self.shared else nbytes(self.built.params)) + self.x.nbytes


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    if tensor.layout != torch.strided or not placeable((tensor,)):  # weights in a library's own form
        return type(tensor), hooks
    return type(tensor), hooks, tensor.data_ptr(), *tensor.stride()


def canonical_gradients(
    problem: Problem, placed: PlacedKernel, gradients: Mapping[int, Tensor | None]
) -> dict[str, Tensor]:
    """Compute the gradients of the canonical weights from the gradients of the kernel's own params (by the params'
    indices), by differentiating the kernel's prepare.

    Raises Skipped if the kernel's prepare cannot be differentiated.
    """
    kernel = placed.built.kernel
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in problem.weights.items()}
        params = kernel.prepare(problem.steps, leaves)
        pairs = [(params[n], d) for n, d in gradients.items() if d is not None]
        if not all(param.requires_grad for param, _ in pairs):
            raise Skipped("its prepare cannot be differentiated, so its gradients cannot be checked")
        outputs, upstream = [p for p, _ in pairs], [d for _, d in pairs]
        leaf_gradients = (
            torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True) if pairs else [None]
        )
    zeros = {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    return zeros | {n: d for n, d in zip(leaves, leaf_gradients, strict=False) if d is not None}


def shuffle_buffers(kernels: Sequence[PlacedKernel], draw: random.Random, copies: Sequence[int]) -> None:
    """Shuffle the kernels' memory before they are placed again with these numbers of copies, so that an arm gets random
    pages, rather than the same pages every time.

    Otherwise, one arm could have the slower pages throughout a process (A/A measured 1.02 in each of five processes).
    All arenas get the size that the largest kernel needs, so that no arena has to be allocated again for another
    kernel. Many copies stay where they are.
    """
    inputs = [placed.arenas[0] for placed in kernels]
    moving = [placed for placed, number in zip(kernels, copies, strict=True) if number < MANY_COPIES]
    weights = [placed.arenas[1] for placed in moving]
    needs = [placed.need(number) for placed, number in zip(kernels, copies, strict=True)]
    for arenas, least in (
        (inputs, max(near for near, _ in needs)),
        (weights, max((far for placed, (_, far) in zip(kernels, needs, strict=True) if placed in moving), default=0)),
    ):
        draw.shuffle(arenas)
        for arena in arenas:
            arena.least = least
    staying = iter(weights)
    for placed, near in zip(kernels, inputs, strict=True):
        placed.arenas = near, next(staying) if placed in moving else placed.arenas[1]


def shared_weights(problem: Problem, kernels: Iterable[object], llc: int, free: int | None) -> Caching | None:
    """Return the cache mode of arms that share one copy of the weights, or None if `free` bytes suffice for a copy per
    arm.

    `kernels` that refuse the case need no memory. A user's kernel gets a copy in any case, and keeps the weights that
    its prepare received.
    """
    case, weights = problem.case, nbytes(tuple(problem.weights.values()))
    running = [kernel for kernel in kernels if isinstance(kernel, Kernel) and not refusal(kernel, problem)]
    copies = _OURS
    for kernel in running:
        # In memory at the same time, besides the drawn weights: a placed copy, the form that the kernel makes of it,
        # and the form made when it was built. A user's kernel also keeps the weights that its prepare received.
        forms = kernel.forms(problem.dtype)
        copies += 1 + (forms if kernel.per_weights else 2 * forms) + bool(kernel.origin)
    need = copies * weights
    if free is None or need <= free:
        return None
    return sharing(case.cache, weights, touched(problem), llc, need, free)


def touched(problem: Problem) -> int:
    """Return the bytes of weights that a call reads: only experts with tokens; over ranks, the mean."""
    total, used = 0, problem.experts
    for step in problem.steps:
        sizes = {name: problem.weights[name].nbytes for name in step.parameters()}
        if isinstance(step.op, Experts) and used is not None:
            common = sum(size for name, size in sizes.items() if step.op.is_common(name))
            running = int(used[:, : step.op.experts.size].any(0).sum())
            total += common + (sum(sizes.values()) - common) * running // step.op.experts.size
        else:
            total += sum(sizes.values())
    return total // problem.case.ranks.world_size


def touched_by(problem: Problem, placed: PlacedKernel) -> int:
    """Return the bytes of weights that a call of this kernel reads: fewer if it stores them in fewer bits."""
    whole = nbytes(tuple(problem.weights.values()))
    return touched(problem) * min(nbytes(placed.built.params), whole) // whole


def arm_sizes(problem: Problem, kernels: Sequence[PlacedKernel]) -> list[tuple[int, int]]:
    """Return (bytes of weights and x, bytes of weights that a call reads) for each arm: first the kernels' arms, then
    our own arms, whose weights are as they were drawn and whose size is counted as the kernels' mean."""
    sizes = [placed.nbytes for placed in kernels]
    ours = sum(sizes) // len(sizes), touched(problem)
    return [
        *((size, touched_by(problem, placed)) for size, placed in zip(sizes, kernels, strict=True)),
        *[ours] * _OURS,
    ]
