"""compiled, max_autotune, frozen: eager's function compiled by torch.compile, one graph per shape; gemv: one token's
products, written as sums; counters of compilations."""

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

from ffncli.errors import FFNError
from ffncli.kernels import eager
from ffncli.kernels.dense import body_of, plus, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, cxx, register
from ffncli.kernels.per_weights import PerWeights, aliases


@register(
    "compiled",
    "by torch.compile of eager's function",
    needs=("compiler",),
    refuses=refuses_all_but_dense,
    compiles=True,
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compile eager's function as one graph for the shapes of its first call, which takes seconds."""
    return graph(eager.build(steps, device, dtype), device)


@register(
    "max_autotune",
    "as compiled, but torch first times several ways to multiply and picks the fastest",
    needs=("cuda", "compiler"),
    refuses=refuses_all_but_dense,
    compiles=True,
)
def build_tuned(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compile eager's function; torch times several ways to compute each product and keeps the fastest, which takes
    longer.

    torch creates no CUDA graphs here, because a benchmark creates them for every kernel. On a CPU torch has several
    ways only if weights are constants of the graph: see `frozen`.
    """
    return graph(eager.build(steps, device, dtype), device, "max-autotune-no-cudagraphs")


@register(
    "frozen",
    "by torch.compile with constant weights: torch times MKL, oneDNN and C++ code that it generates (in "
    "which one matrix product computes gate and up), and packs the weights once for the fastest; for "
    "cold weights, only with --cache flush",
    prepare=aliases, needs=("cpu", "compiler"), refuses=refuses_all_but_dense, trains=False,
    compiles=True, per_weights=True,
)  # fmt: skip
def build_frozen(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compile eager's function with the weights as constants of the graph. torch packs them once and times several ways
    to compute each product, including generated C++ code, which can compute gate and up together."""
    compute = eager.build(steps, device, dtype)

    def make(x: Tensor, params: Params) -> Computes:
        weights = _Constants(params)

        def of_constants(x: Tensor, params: Params) -> Tensor:
            return compute(x, weights())

        call = graph(of_constants, device)
        # torch's tuning prints on stderr whatever its options are, and torch warns about itself
        with torch._inductor.config.patch(_FREEZING), warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            call(x, ())
        return call

    graphs = PerWeights(make)

    def run(x: Tensor, params: Params) -> Tensor:
        # in another grad mode torch would compile again, without freezing the weights
        with torch.inference_mode(False), torch.no_grad():
            return graphs.get(x, params)(x, ())

    return run


_FREEZING: dict[str, bool | int] = {
    "freezing": True, "max_autotune": True, "cpp.enable_grouped_gemm_template": True,
}  # fmt: skip


class _Constants(torch.nn.Module):
    """A module with the params as parameters, the only tensors that torch freezes; their memory is shared."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.kept = torch.nn.ParameterList(torch.nn.Parameter(p.detach(), requires_grad=False) for p in params)

    def forward(self) -> Params:
        """Return the params."""
        return tuple(self.kept)


@register(
    "gemv",
    "by sums over the rows of each matrix, which torch.compile fuses into one loop",
    needs=("cpu", "compiler"),
    refuses=refuses_all_but_dense,
    trains=False,
    compiles=True,
    most_tokens=1,
)
def build_gemv(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compile the block for one token; more tokens are computed by eager.

    With one token a product is a matrix times a vector: torch.compile fuses multiplying and summing into one loop,
    which streams the weights once. Library products are made for matrices, and read the weights more slowly.
    """
    wide = torch.promote_types(dtype, torch.float32)
    compute = body_of(steps).composed(lambda weight, bias: lambda x, p: plus((p[weight].to(wide) * x).sum(-1), p[bias]))

    def one(x: Tensor, params: Params) -> Tensor:
        in_wide = tuple(tensor if tensor.dim() == 2 else tensor.to(wide) for tensor in params)
        return compute(x[0].to(wide), in_wide)[None].to(x.dtype)

    of_one, of_many = graph(one, device), eager.build(steps, device, dtype)

    def run(x: Tensor, params: Params) -> Tensor:
        return of_one(x, params) if len(x) == 1 else of_many(x, params)

    return run


def graph(function: Computes, device: str, mode: str | None = None) -> Computes:
    """Compile the function as one graph. A new shape or grad mode triggers another compilation, which `recompiles`
    counts.

    Raises FFNError if the function cannot become one graph, or if the compiler fails.
    """
    import torch._dynamo  # importing takes a second, so only if something is compiled
    import torch._inductor.config as inductor

    if not device.startswith("cuda") and (compiler := cxx()):
        inductor.cpp.cxx = (None, compiler)  # by default torch looks only for g++
    # Each graph needs its own code object: torch counts graphs per code object, and would refuse the ninth block that
    # shares it.
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
    """Return the same function with its own copy of the code."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return update_wrapper(FunctionType(code, function.__globals__, closure=function.__closure__), function)


def recompiles() -> int:
    """Return how many graphs torch has compiled here; if it rises while timing, compiling was timed."""
    return _counted("stats", "unique_graphs")


@contextmanager
def on_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` whenever torch starts to compile a graph in this context, even for a user's own torch.compile."""
    if "torch._dynamo" not in sys.modules:  # then torch.compile has not been used, and importing it takes a second
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
    """Hits and misses of torch's on-disk graph cache, in this process so far."""

    hits: int
    misses: int

    def since(self, before: "CompileCache") -> str:
        """Return the origin of the graphs compiled since `before`: `cold`, `cached`, or "" if there are none."""
        if self.misses > before.misses:
            return "cold"
        return "cached" if self.hits > before.hits else ""


def cache() -> CompileCache:
    """Return the cache's hits and misses so far."""
    hits = _counted("inductor", "fxgraph_cache_hit") + _counted("aot_autograd", "autograd_cache_hit")
    missed = ("fxgraph_cache_miss", "fxgraph_cache_bypass")
    return CompileCache(hits, sum(_counted("inductor", name) for name in missed))


def _counted(group: str, name: str) -> int:
    """Return one of torch's counters; 0 if nothing was compiled, as the counting module was then not imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = getattr(utils, "counters", {})
    return int(counters.get(group, {}).get(name, 0))
