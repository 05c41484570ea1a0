"""The bare matrix products of a block, in torch, without the steps between them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from ffncli.bench.records import GEMM
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.gpu.cuda_graphs import replaying
from ffncli.bench.timing.outcomes import BrokenArm
from ffncli.bench.timing.placement import MANY_COPIES, Arena, Params, Pool
from ffncli.block.steps import Experts, Linear, Step, block_inputs

Thunk = Callable[[], object]


@dataclass(frozen=True)
class Product:
    """One product y = x · Wᵀ. `weight` is a canonical name; `expert` selects the expert's matrix, if there are several;
    `x` and `y` are buffer numbers."""

    weight: str
    expert: int | None
    x: int
    y: int


class Chain:
    """The products of a block in order. Each reads the output of the previous one, without biases or other steps
    between them.

    In an MoE block, the products belong to the experts that receive tokens, and use only these tokens' rows. In a
    backward pass, each product is followed by two more: the gradient times W, and the transposed gradient times x.
    `shared`: use the drawn weights instead of copies; `pool`: use its copies, in turn with the kernels.
    """

    def __init__(self, problem: Problem, draw: random.Random, shared: bool = False, pool: Pool | None = None) -> None:
        self.call: Thunk
        self.entry: Tensor  # the first buffer, which holds the block's input
        self.copies: list[list[Thunk]] = []
        self.products: list[Product] = []
        self._shapes: list[tuple[int, int]] = []
        self._sets: list[Params] = []  # the copies of the matrices
        self._filled: list[Tensor] = []  # random contents of the buffers, drawn once
        self._problem, self._shared = problem, shared
        self._arenas = Arena(problem.case.device, draw), Arena(problem.case.device, draw)
        first = self._buffer(problem.case.tokens, problem.case.spec.d_model)
        self._walk(problem.steps, {problem.entry: first}, None)
        self._matrices = {product.weight: problem.weights[product.weight] for product in self.products}
        drawn = {id(tensor) for tensor in pool.drawn} if pool else set()
        self._pool = pool if drawn.issuperset(map(id, self._matrices.values())) else None

    def _buffer(self, rows: int, width: int) -> int:
        self._shapes.append((rows, width))
        return len(self._shapes) - 1

    def _walk(self, steps: Sequence[Step], buffers: dict[str, int], expert: int | None) -> None:
        for step in steps:
            entering = buffers[step.inputs[0]]
            if isinstance(step.op, Linear):
                buffers[step.output] = self._buffer(self._shapes[entering][0], step.op.out.size)
                self.products.append(Product(f"{step.output}.weight", expert, entering, buffers[step.output]))
                continue
            if isinstance(step.op, Experts):
                self._experts(step.op, entering)
            buffers[step.output] = entering  # an elementwise step is not a product; its output is as wide as its input

    def _experts(self, op: Experts, entering: int) -> None:
        used = self._problem.experts
        assert used is not None
        counts = used[:, : op.experts.size].sum(0).tolist()
        (entry,) = block_inputs(op.program)
        for expert, tokens in enumerate(counts):
            if tokens:
                self._walk(op.program, {entry: self._buffer(tokens, self._shapes[entering][1])}, expert)

    def place(self, copies: int) -> None:
        """Place the inputs, the outputs and `copies` copies of the matrices at new addresses. Raises BrokenArm."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._place(copies)
        except Exception as error:
            raise BrokenArm(GEMM) from error

    def _place(self, copies: int) -> None:
        problem, device = self._problem, self._problem.case.device
        near, far = self._arenas
        if not self._filled:
            self._filled = [torch.randn(shape, device=device).to(problem.dtype) for shape in self._shapes]
        gradients: list[tuple[int, int]] = []  # in a backward pass, two per product: shaped like x, and like W
        for p in reversed(self.products) if problem.backward else ():
            gradients += [self._shapes[p.x], (self._shapes[p.y][1], self._shapes[p.x][1])]
        written = [torch.empty(shape, dtype=problem.dtype, device=device) for shape in gradients]
        (buffers,) = near.place([(*self._filled, *written)])
        drawn = self._pool.drawn if self._pool else tuple(self._matrices.values())
        if self._pool:
            self._sets = self._pool.copies
        elif not len(self._sets) == copies >= MANY_COPIES:
            self._sets = [drawn] if self._shared else far.place([drawn] * copies)
        self.entry = buffers[0]
        at = {id(tensor): number for number, tensor in enumerate(drawn)}
        places = {name: at[id(tensor)] for name, tensor in self._matrices.items()}
        thunks = {
            id(copy): self._thunks({name: copy[place] for name, place in places.items()}, buffers)
            for copy in self._sets
        }
        self.copies = list(thunks.values())
        turn = self._pool.turn if self._pool else cycle(self._sets)

        def call() -> object:
            for thunk in thunks[id(next(turn))]:
                thunk()
            return None

        self.call = call

    @staticmethod
    def on_copy(thunks: Sequence[Thunk]) -> object:
        """Run the products on one copy of the matrices, for capture."""
        for thunk in thunks:
            thunk()
        return None

    def replay(self, replays: Sequence[Thunk]) -> None:
        """Make every later call use the next of these replays."""
        self.call = replaying(replays)

    def _thunks(self, weights: Mapping[str, Tensor], buffers: Params) -> list[Thunk]:
        made = [_mm(buffers[p.x], _matrix(weights, p).T, buffers[p.y]) for p in self.products]
        at = len(self._shapes)
        for p in reversed(self.products) if self._problem.backward else ():
            x, y = buffers[p.x], buffers[p.y]
            made += [_mm(y, _matrix(weights, p), buffers[at]), _mm(y.T, x, buffers[at + 1])]
            at += 2
        return made


def _matrix(weights: Mapping[str, Tensor], product: Product) -> Tensor:
    tensor = weights[product.weight].detach()  # the shared copies of a backward pass require gradients
    return tensor if product.expert is None else tensor[product.expert]


def _mm(a: Tensor, b: Tensor, out: Tensor) -> Thunk:
    return lambda: torch.mm(a, b, out=out)
