"""decode and fused_gate in Triton's interpreter: every element right, all of it written, nothing else, by float64.

`make test-triton` runs these. The interpreter shows wrong indices, masks and formulas, not races, nor a GPU's rounding.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Activation, block_inputs, parameters
from ffncli.kernels import built_in
from ffncli.kernels.dense import Body, Dense, places
from ffncli.kernels.in_triton.kernels import FUNCTIONS, backward_launcher, launcher, split_launcher
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from tests.kernels.test_kernels import DENSE, drawn, gradients
from tests.oracles.modules import relative_error

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no triton here: make test-triton installs it"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1: make test-triton"),
]

KERNELS = ("triton_act", "decode", "fused_gate")
PRODUCTS = ("decode", "fused_gate")
AROUND = 300  # elements before and behind each buffer
LIMIT = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = ((1, 1), (15, 16), (16, 15), (1023, 5), (5, 1023))  # d_model, d_ff
OPS = {
    "alone": ({}, {}),
    "clipped": ({"low": -0.5, "high": 1.0}, {"low": -1.0, "high": 0.5, "plus": 1.0}),
    "limited after": ({"most": 0.25, "plus": -2.0}, {"high": 1.0}),
    "soft-capped": ({"soft_cap": 1.5, "most": 0.5}, {"soft_cap": 0.75, "plus": 0.5}),
}


@pytest.fixture(autouse=True)
def buffers(monkeypatch):
    """Every buffer that a kernel allocates is NaN, between NaN: in the end all of it is written, and nothing else."""
    made, real = [], torch.Tensor.new_empty

    def empty(x, *size, dtype=None, **options):
        if options:  # the interpreter's own
            return real(x, *size, **options)
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        whole = torch.full((shape.numel() + 2 * AROUND,), torch.nan, dtype=dtype or x.dtype)
        made.append(whole)
        return whole[AROUND : AROUND + shape.numel()].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x, *x.shape))
    yield made
    for whole in made:
        assert whole[:AROUND].isnan().all()
        assert whole[-AROUND:].isnan().all()
        assert not whole[AROUND:-AROUND].isnan().any()


@pytest.fixture
def readable(monkeypatch, buffers):
    """Contiguous tensors, to be listed: what is loaded is theirs or a buffer's, down to the last byte."""
    from triton.runtime.interpreter import _interpreter

    listed, real = [], _interpreter.load

    def load(pointers, mask, *rest):
        tensors = [*listed, *(whole[AROUND:-AROUND] for whole in buffers)]
        at = pointers[mask]
        inside = [(t.data_ptr() <= at) & (at < t.data_ptr() + t.nbytes) for t in tensors]
        assert np.any(inside, axis=0).all(), "it reads outside of its tensors"
        return real(pointers, mask, *rest)

    monkeypatch.setattr(_interpreter, "load", load)
    return listed


def case(spec: FFNSpec, tokens: int, dtype: torch.dtype = torch.float64):
    """(block, weights, x), drawn so that outputs are near 1."""
    block = kernel_steps(steps(spec))
    generator = torch.Generator().manual_seed(tokens)
    weights = {n: (2 * w / w.shape[-1] ** 0.5).to(dtype) for n, w in drawn(block, generator).items()}
    return block, weights, torch.randn(tokens, spec.d_model, generator=generator).to(dtype)


def expected(block, weights, x):
    return run(block, {n: w.double() for n, w in weights.items()}, {block_inputs(block)[0]: x.double()})


def computed(name, block, weights, x):
    kernel = built_in(name)
    return kernel.build(block, "cpu", x.dtype)(x, kernel.prepare(block, weights))


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 2, 17, 33])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [True, False])
def test_every_width(name, tokens, shape, gated, readable):
    block, weights, x = case(FFNSpec(*shape, "silu", gated=gated, bias=True), tokens)
    readable += [x, *weights.values()]
    assert relative_error(computed(name, block, weights, x), expected(block, weights, x)) < 1e-14


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("tokens", [1, 16, 65, 129])
def test_every_dtype_and_tile(name, dtype, tokens):
    """Four tiles of 16-bit dtypes, three of the others; gates, ups and partial sums of several programs each way."""
    block, weights, x = case(FFNSpec(70, 130, "swiglu", bias=True), tokens, dtype)
    out = computed(name, block, weights, x)
    assert out.dtype == dtype
    assert relative_error(out.double(), expected(block, weights, x)) < LIMIT[dtype]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("label", DENSE)
def test_every_kernel_is_the_reference_or_refuses(name, label):
    kernel, block = built_in(name), kernel_steps(steps(DENSE[label]))
    refused = label == "learned" or (name == "fused_gate" and "inside" in label)
    assert (kernel.refusal(block, "cpu", "fp64") is not None) == refused
    if refused:
        return
    generator = torch.Generator().manual_seed(0)
    weights, x = drawn(block, generator), torch.randn(9, 6, generator=generator).double()
    before = {**{n: t.clone() for n, t in weights.items()}, "x": x.clone()}
    call, params = kernel.build(block, "cpu", x.dtype), kernel.prepare(block, weights)
    for tokens in (9, 4, 1, 9):
        assert relative_error(call(x[:tokens], params), expected(block, weights, x[:tokens])) < 1e-14
    assert all(torch.equal(before[n], t) for n, t in {**weights, "x": x}.items())


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_views_of_any_strides(name, tokens):
    """x and every matrix turned, as columns of a wider one, and every second column; as an arena's views are."""
    block, weights, x = case(FFNSpec(70, 69, "swiglu"), tokens)
    views = (
        lambda t: t.T.contiguous().T,
        lambda t: torch.cat([torch.full_like(t, torch.nan), t, torch.full_like(t, torch.nan)], 1).tensor_split(3, 1)[1],
        lambda t: t.repeat_interleave(2, 1)[:, ::2],
    )
    right = expected(block, weights, x)
    for view in views:
        assert relative_error(computed(name, block, weights, view(x)), right) < 1e-14
        for matrix in weights:
            assert relative_error(computed(name, block, {**weights, matrix: view(weights[matrix])}, x), right) < 1e-14


@pytest.mark.parametrize(("tokens", "parts"), [(1, 3), (3, 13)])
def test_partial_sums_are_of_several_parts(tokens, parts, buffers):
    """Of matrices as they are, and of those by columns."""
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(*size, generator=generator).double() for size in ((tokens, 1023), (5, 1023), (5,)))
    call, right = split_launcher(torch.float64), x @ weight.T + bias
    for left, matrix in ((x, weight), (x.T.contiguous().T, weight), (x, weight.T.contiguous().T)):
        assert relative_error(call(left, matrix, bias), right) < 1e-14
    assert {whole.numel() - 2 * AROUND for whole in buffers} == {parts * tokens * 5, tokens * 5}


@pytest.mark.parametrize("name", KERNELS)
def test_no_token_is_no_work(name):
    block, weights, x = case(FFNSpec(6, 24, "swiglu"), 0)
    assert computed(name, block, weights, x).shape == (0, 6)


# --- functions --------------------------------------------------------------------------------------------------------


def shapes(name: str, limits: str):
    """A gated and a plain block of that function and these limits; none if it cannot be soft-capped."""
    ours, lifts = OPS[limits]
    if "soft_cap" in ours and name not in ("identity", "silu"):
        return
    act = Activation(name, **ours)
    yield Dense(True, act, Activation("identity", **lifts), 0.7, None)
    yield Dense(True, act, None, 1, None)
    yield Dense(False, act, None, 1, None)


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up: normal numbers, and kinks and limits, where a derivative has two values."""
    generator = torch.Generator().manual_seed(3)
    gate, up = 3 * torch.randn(2, 4, 21, generator=generator).double()
    gate[0, :6] = torch.tensor([0.0, -0.5, 1.0, -0.5 / 0.7, 1 / 0.7, 0.25])
    up[0, :4] = torch.tensor([-1.0, 0.5, 1.0, 0.0])
    return gate, up


@pytest.mark.parametrize("limits", OPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_with_every_limit(name, limits):
    """gate is x itself, and up is x / 2 (in a plain block x): all as torch's own functions have it."""
    x, one = points()[0], torch.eye(21).double()
    for shape in shapes(name, limits):
        body = Body(shape, places(["gate.weight", "up.weight"]))
        weights = (one, one / 2 if shape.gated else one, None)
        right = body.hidden(x, x / 2, p=weights) if shape.gated else body.hidden(None, x, p=weights)
        assert relative_error(launcher(body, torch.float64)(x, weights, None), right) < 1e-14


@pytest.mark.parametrize("limits", OPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_derivative_is_torchs(name, limits):
    gate, up = points()
    d_hidden = torch.randn(gate.shape, generator=torch.Generator().manual_seed(4)).double()
    for shape in shapes(name, limits):
        leaves = [t.clone().requires_grad_() for t in ((gate, up) if shape.gated else (gate,))]
        hidden = Body(shape, places(())).hidden(leaves[0] if shape.gated else None, leaves[-1], p=(None,))
        right = torch.autograd.grad(hidden, leaves, d_hidden)
        d_gate, d_up, again = backward_launcher(shape)((gate, up if shape.gated else gate), d_hidden)
        assert relative_error(again, hidden.detach()) < 1e-14
        torch.testing.assert_close((d_gate, d_up)[: len(right)], right, rtol=1e-13, atol=1e-14)


# --- a backward pass --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [label for label in DENSE if label != "learned" and "inside" not in label])
@pytest.mark.parametrize("tokens", [1, 9])
def test_gradients_are_those_of_the_reference(label, tokens):
    """Those of x and of every weight, for a drawn gradient of the output."""
    block, weights, x = case(DENSE[label], tokens)
    assert_gradients(block, weights, x, torch.randn(tokens, 6, generator=torch.Generator().manual_seed(2)).double())


def test_gradients_of_a_sum_and_of_strided_tensors():
    """sum() gives a gradient whose strides are 0; a turned matrix gets one of its own shape."""
    block, weights, x = case(FFNSpec(15, 33, "geglu", bias=True), 5)
    assert_gradients(block, weights, x, torch.ones(1, 1).double().expand(5, 15))
    turned = {n: w.T.contiguous().T if w.dim() == 2 else w for n, w in weights.items()}
    assert_gradients(block, turned, x.T.contiguous().T, torch.ones(5, 15).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_in_other_dtypes(dtype):
    block, weights, x = case(FFNSpec(33, 65, "swiglu", bias=True), 17, dtype)
    assert_gradients(block, weights, x, torch.ones(17, 33).to(dtype), 3 * LIMIT[dtype])


def assert_gradients(block, weights, x, d_out, limit=1e-13):
    found = gradients(lambda x, w: computed("fused_gate", block, w, x), weights, x, d_out)
    wide = {n: w.double() for n, w in weights.items()}
    right = gradients(lambda x, w: expected(block, w, x), wide, x.double(), d_out.double())
    assert len(found) == len(weights) + 1
    for name, a, b in zip(["x", *weights], found, right, strict=True):
        assert a.dtype == x.dtype
        assert relative_error(a.double(), b) < limit, name


def test_only_the_gradients_that_are_wanted():
    block, weights, x = case(FFNSpec(6, 24, "swiglu"), 3)
    call = built_in("fused_gate").build(block, "cpu", x.dtype)
    names = [*parameters(block)]
    for wanted in range(1 + len(names)):
        leaves = [t.clone().requires_grad_(n == wanted) for n, t in enumerate((x, *weights.values()))]
        call(leaves[0], tuple(leaves[1:])).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [n == wanted for n in range(len(leaves))]


def test_nothing_is_kept_without_gradients(buffers):
    block, weights, x = case(FFNSpec(6, 24, "swiglu"), 3)
    leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
    with torch.no_grad():
        first = computed("fused_gate", block, leaves, x)
    assert len(buffers) == 1
    assert torch.equal(computed("fused_gate", block, leaves, x), first)
    assert len(buffers) == 4


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_the_command(name, stdout_of):
    out = stdout_of("verify", "8x40:swiglu", "--check", "kernels", "--dtype", "bf16", "--kernel", name)
    assert f"PASS  {name}" in out
