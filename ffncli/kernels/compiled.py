"""compiled, max_autotune, frozen: torch.compile of eager's function, a graph per shape; gemv: of one token's products,
written as sums; counters of compilations.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import update_wrapper
from io import StringIO
from types import FunctionType

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.errors import FFNError
from ffncli.kernels import eager
from ffncli.kernels.dense import Weights, between, dense_block, normed, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, cxx, register
from ffncli.kernels.per_weights import PerWeights, aliases


@register("compiled", needs=("compiler",), refuses=refuses_all_but_dense, compiles=True)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """eager's function, compiled as one graph for the shapes of its first call, which takes seconds."""
    return graph(eager.build(steps, device, dtype), device)


@register("max_autotune", needs=("cuda", "compiler"), refuses=refuses_all_but_dense, compiles=True)
def build_tuned(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """As compiled, after torch has timed its ways to compute each product and chosen the fastest, which takes longer.

    Without CUDA graphs of its own: a benchmark makes them of every kernel. On a CPU torch has other ways only for
    weights that are constants of the graph: `frozen`.
    """
    return graph(eager.build(steps, device, dtype), device, "max-autotune-no-cudagraphs")


@register(
    "frozen", prepare=aliases, needs=("cpu", "compiler"), refuses=refuses_all_but_dense, trains=False,
    compiles=True, per_weights=True,
)  # fmt: skip
def build_frozen(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """eager's function with the weights as constants of the graph, which torch packs once; it times its ways to compute
    each product, those that it writes in C++ too, and one of them computes gate and up together.
    """
    compute = eager.build(steps, device, dtype)

    def make(x: Tensor, params: Params) -> Computes:
        weights = _Constants(params)

        def of_constants(x: Tensor, params: Params) -> Tensor:
            return compute(x, weights())

        call = graph(of_constants, device)
        with torch._inductor.config.patch(_FREEZING), _quiet():
            call(x, ())
        return call

    graphs = PerWeights(make)

    def run(x: Tensor, params: Params) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # in another mode torch would compile again, unfrozen
            return graphs.get(x, params)(x, ())

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's tuning writes to stderr, whatever its options are, and its warnings about itself."""
    with warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield


_FREEZING: dict[str, bool | int] = {
    "freezing": True, "max_autotune": True, "cpp.enable_grouped_gemm_template": True,
}  # fmt: skip


class _Constants(torch.nn.Module):
    """The params as parameters of a module, the only tensors that torch freezes. They share their memory."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.kept = torch.nn.ParameterList(torch.nn.Parameter(p.detach(), requires_grad=False) for p in params)

    def forward(self) -> Params:
        """The params."""
        return tuple(self.kept)


@register("gemv", needs=("cpu", "compiler"), refuses=refuses_all_but_dense, trains=False, compiles=True, most_tokens=1)
def build_gemv(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """The block of one token, compiled; more tokens are computed as eager does.

    One token's product is a matrix times a vector: torch.compile makes one loop of the multiplying and the summing,
    which streams the weights once. The libraries' products are made for matrices, and read slower.
    """
    shape, names = dense_block(steps), tuple(parameters(steps))
    middle, wide = between(shape), torch.promote_types(dtype, torch.float32)

    def product(name: str, x: Tensor, w: Weights) -> Tensor:
        y = (w[f"{name}.weight"].to(wide) * x).sum(-1)
        bias = w.get(f"{name}.bias")
        return y if bias is None else y + bias

    def one(x: Tensor, params: Params) -> Tensor:
        pairs = zip(names, params, strict=True)
        w = {name: tensor if tensor.dim() == 2 else tensor.to(wide) for name, tensor in pairs}
        token = x[0].to(wide)
        gate = product("gate", token, w) if shape.gated else None
        hidden = normed(shape, middle(gate, product("up", token, w), w), w)
        return product("down", hidden, w)[None].to(x.dtype)

    of_one, of_many = graph(one, device), eager.build(steps, device, dtype)

    def run(x: Tensor, params: Params) -> Tensor:
        return of_one(x, params) if len(x) == 1 else of_many(x, params)

    return run


def graph(function: Computes, device: str, mode: str | None = None) -> Computes:
    """The function as one compiled graph. Another shape or grad mode compiles again, which `recompiles` counts.

    Every call makes a graph of code of its own: torch counts the graphs of a function's code, and of one that many
    blocks share it would refuse the ninth. Raises FFNError if the function cannot be one graph, or the compiler fails.
    """
    import torch._dynamo  # takes a second, so only if something is compiled
    import torch._inductor.config as inductor

    if not device.startswith("cuda") and (compiler := cxx()):
        inductor.cpp.cxx = (None, compiler)  # by default it looks only for g++
    call: Computes = torch.compile(_with_code(function), fullgraph=True, dynamic=False, mode=mode)
    failures = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)

    def run(x: Tensor, params: Params) -> Tensor:
        try:
            return call(x, params)
        except failures as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise FFNError(f"torch.compile: {first[:200]}", "TORCHDYNAMO_VERBOSE=1 says more") from error

    return run


def _with_code(function: Computes) -> Computes:
    """The same function with a copy of its code."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return update_wrapper(FunctionType(code, function.__globals__, closure=function.__closure__), function)


def recompiles() -> int:
    """How many graphs torch has compiled in this process. If timing raises it, compiling was timed."""
    return _counted("stats", "unique_graphs")


@contextmanager
def on_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` for each graph that torch begins to compile inside, including a user's own torch.compile."""
    if "torch._dynamo" not in sys.modules:  # torch.compile has not been used, and importing it takes a second
        yield
        return
    from torch._dynamo.callback import callback_handler

    def heard(*about: object) -> None:
        tell()

    callback_handler.register_start_callback(heard)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(heard)


@dataclass(frozen=True)
class CompileCache:
    """Hits and misses of torch's cache of graphs on disk, in this process so far."""

    hits: int
    misses: int

    def since(self, before: CompileCache) -> str:
        """The origin of the graphs compiled since then: `cold`, `cached`, or an empty text for neither."""
        if self.misses > before.misses:
            return "cold"
        return "cached" if self.hits > before.hits else ""


def cache() -> CompileCache:
    """The cache's hits and misses until now."""
    hits = _counted("inductor", "fxgraph_cache_hit") + _counted("aot_autograd", "autograd_cache_hit")
    missed = ("fxgraph_cache_miss", "fxgraph_cache_bypass")
    return CompileCache(hits, sum(_counted("inductor", name) for name in missed))


def _counted(group: str, name: str) -> int:
    """One of torch's counters; 0 if nothing was compiled: the counting module is not imported for this."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = getattr(utils, "counters", {})
    return int(counters.get(group, {}).get(name, 0))
