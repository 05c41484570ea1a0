"""eager is the function that is written by hand: the same bits, the same operations, no more Python on the way."""

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ffncli
from benchmarks.baseline import gated, mixture, plain
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.kernels import built_in
from ffncli.kernels.kernel import Params, kernel_steps
from ffncli.run.engine.weights import random_weights


def plain_without_bias(x, up, down):
    return F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)


def chosen_first(x, router, router_bias, gate, gate_bias, up, up_bias, down, down_bias):
    share, chosen = F.linear(x, router, router_bias).topk(2, -1)
    share = torch.softmax(share, -1)
    out = torch.zeros_like(x)
    for e in sorted(set(chosen.flatten().tolist())):
        token, slot = torch.where(chosen == e)
        weight = share[token, slot, None]
        rows = x[token]
        act = F.silu(F.linear(rows, gate[e], gate_bias[e]))
        hidden = act * F.linear(rows, up[e], up_bias[e])
        out.index_add_(0, token, F.linear(hidden, down[e], down_bias[e]) * weight)
    return out


CHOSEN_FIRST = MoE(4, 2, order="choose_first", renormalise=False, router_bias=True, score_dtype="input")
BLOCKS: dict[str, tuple[FFNSpec, Callable[..., Tensor]]] = {
    "plain": (FFNSpec(8, 24, "gelu"), plain),
    "no bias": (FFNSpec(8, 24, "gelu_tanh", bias=False), plain_without_bias),
    "gated": (FFNSpec(8, 24, "swiglu"), gated),
    "mixture": (FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)), mixture),
    "choose first": (FFNSpec(8, 24, "swiglu", bias=True, moe=CHOSEN_FIRST), chosen_first),
}


def built(label: str, dtype: torch.dtype, tokens: int = 9) -> tuple[Tensor, Params, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    block = kernel_steps(steps(BLOCKS[label][0]))
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(block, generator).items()}
    x = torch.randn(tokens, 8, generator=generator).to(dtype)
    return x, built_in("eager").prepare(block, weights), weights


def eager(label: str, dtype: torch.dtype) -> Callable[[Tensor, Params], Tensor]:
    return built_in("eager").build(kernel_steps(steps(BLOCKS[label][0])), "cpu", dtype)


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> Counter[str]:
    with torch.no_grad(), Operations() as mode:
        call()
    return mode.counts


def python_calls(call: Callable[[], object]) -> int:
    """The Python functions that a call enters, itself included; dictionaries are built by dict() or zip() too."""
    entered = 0

    def count(frame, event, arg):
        nonlocal entered
        entered += event == "call" or (event == "c_call" and arg in (dict, zip))

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("label", BLOCKS)
def test_eager_is_the_function_written_by_hand(label, tokens, dtype):
    x, params, _ = built(label, dtype, tokens)
    assert torch.equal(eager(label, dtype)(x, params), BLOCKS[label][1](x, *params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", BLOCKS)
def test_eager_runs_no_operation_more_than_the_function(label, dtype):
    x, params, _ = built(label, dtype)
    call, by_hand = eager(label, dtype), BLOCKS[label][1]
    assert operations(lambda: call(x, params)) == operations(lambda: by_hand(x, *params))


@pytest.mark.parametrize("label", ["plain", "no bias", "gated"])
def test_eager_enters_no_more_python_than_the_function(label):
    x, params, _ = built(label, torch.float32)
    call, by_hand = eager(label, x.dtype), BLOCKS[label][1]
    assert python_calls(lambda: call(x, params)) <= python_calls(lambda: by_hand(x, *params)) <= 4


@pytest.mark.parametrize("label", ["mixture", "choose first"])
def test_a_mixture_enters_little_python_for_each_expert(label):
    """Choosing, adding, and for each expert its weights, its function, the activation and a norm that is none."""
    x, params, _ = built(label, torch.float32)
    call = eager(label, x.dtype)
    assert python_calls(lambda: call(x, params)) <= 8 + 4 * 4


@pytest.mark.parametrize("label", BLOCKS)
def test_a_kernel_as_a_function_of_x_only_looks_at_x(label):
    x, params, weights = built(label, torch.float32)
    f, call = ffncli.kernel("eager", BLOCKS[label][0], weights), eager(label, x.dtype)
    assert operations(lambda: f(x)) == operations(lambda: call(x, params))
    assert python_calls(lambda: f(x)) <= python_calls(lambda: call(x, params)) + 3
    assert torch.equal(f(x.view(3, 3, 8)).view(9, 8), call(x, params))
    assert torch.equal(f(x.T.contiguous().T), call(x, params))


DENSE = ("eager", "module", "packed", "inplace", "conv1x1", "onednn", "onednn_packed", "mkl", "numpy", "int8")


@pytest.mark.parametrize("name", [*DENSE, "grouped", "batched"])
def test_a_kernel_declares_whether_it_overwrites_its_output(name):
    label, kernel = "gated" if name in DENSE else "mixture", built_in(name)
    spec = FFNSpec(32, 64, "swiglu", moe=BLOCKS[label][0].moe)
    block = kernel_steps(steps(spec))
    if kernel.refusal(block, "cpu", "fp32"):
        pytest.skip("not on this machine")
    generator = torch.Generator().manual_seed(0)
    params = kernel.prepare(block, random_weights(block, generator))
    call, x = kernel.build(block, "cpu", torch.float32), torch.randn(5, 32, generator=generator)
    with torch.no_grad():
        first = call(x, params)
        kept = first.clone()
        call(2 * x, params)
    assert torch.equal(first, kept) == (kernel.keeps != "output")
