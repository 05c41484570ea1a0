"""Triton kernels in Triton's interpreter: every element right, none written outside. `make test-triton` runs these.

The interpreter shows wrong indices and masks, not races, not a GPU's rounding.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Activation
from ffncli.kernels import built_in
from ffncli.kernels.dense import Dense
from ffncli.kernels.in_triton.kernels import BLOCK, FUNCTIONS, act_launcher
from ffncli.kernels.kernel import kernel_steps
from tests.kernels.test_kernels import drawn
from tests.oracles.activations import ORACLES
from tests.oracles.modules import relative_error

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no triton here: make test-triton installs it"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1: make test-triton"),
]

SIZES = ((1, 1), (1, 15), (5, 16), (3, BLOCK - 1), (1, BLOCK), (2, BLOCK + 1))
EPS = {torch.float64: 1e-15, torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def pair(tokens: int, columns: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * columns)
    return [(4 * torch.randn(tokens, columns, generator=generator)).to(dtype) for _ in range(2)]


def launched(shape: Dense, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Its output between two rows of NaN, which must stay: nothing is written outside, and everything inside."""
    tokens, columns = gate.shape
    around = torch.full((tokens + 2, columns), torch.nan, dtype=gate.dtype)
    out = act_launcher(shape)(gate, up, around[1:-1])
    assert around[0].isnan().all()
    assert around[-1].isnan().all()
    return out


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_every_function_at_every_width(name, size):
    gate, up = pair(*size)
    with torch.no_grad():
        expected = ORACLES[name](gate)
    assert relative_error(launched(Dense(False, Activation(name), None, 1, None), gate, gate), expected) < 1e-15
    assert relative_error(launched(Dense(True, Activation(name), None, 1, None), gate, up), expected * up) < 1e-15


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_dtype_is_rounded_once(name, dtype):
    gate, up = pair(2, 33, dtype)
    with torch.no_grad():
        expected = ORACLES[name](gate.double()) * up.double()
    out = launched(Dense(True, Activation(name), None, 1, None), gate, up)
    assert out.dtype == dtype
    assert relative_error(out.double(), expected) < EPS[dtype]


def test_limits_scale_and_lift():
    """gpt-oss's unit with a scaled gate, by torch's functions."""
    gate, up = pair(3, 31)
    shape = Dense(True, Activation("quick_gelu", None, 0.4), Activation("identity", -0.4, 0.4, 1.0), 0.3, None)
    limited = (0.3 * gate).clamp(max=0.4)
    expected = limited * torch.sigmoid(1.702 * limited) * (up.clamp(-0.4, 0.4) + 1)
    assert relative_error(launched(shape, gate, up), expected) < 1e-15
    shape = Dense(False, Activation("silu", -0.5, None, 2.0), None, 1, None)
    assert relative_error(launched(shape, gate, gate), torch.nn.functional.silu(gate.clamp(min=-0.5)) + 2) < 1e-15


def test_views_of_any_strides():
    shape = Dense(True, Activation("silu"), None, 1, None)
    packed = torch.cat(pair(4, 37), -1)
    gate, up = packed.chunk(2, -1)
    turned = pair(37, 4)[0].T
    one = pair(1, 37)[0].expand(4, 37)
    for g, u in ((gate, up), (turned, up), (gate, turned), (one, up[:, ::1]), (gate[:, ::2], up[:, 1::2])):
        width = min(g.shape[1], u.shape[1])
        g, u = g[:, :width], u[:, :width]
        assert relative_error(launched(shape, g, u), torch.nn.functional.silu(g) * u) < 1e-15


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of infinite numbers
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_numbers_give_what_the_formula_gives(name):
    """Not torch's own calls: its vector code for gelu makes NaN of infinity."""
    inf = torch.inf
    x = torch.tensor([[torch.nan, inf, -inf, 0.0, -0.0, 1e-40, -1e-40, 88.8, -88.8, -104.0, 1e30, -1e30]])
    expected = TABLE[name].f(x, torch)
    out = launched(Dense(False, Activation(name), None, 1, None), x, x)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-36, equal_nan=True)


def test_no_token_is_no_work():
    block = kernel_steps(steps(FFNSpec(6, 24, "swiglu")))
    weights = drawn(block, torch.Generator().manual_seed(0))
    kernel = built_in("triton_act")
    call = kernel.build(block, "cpu", torch.float64)
    assert call(torch.empty(0, 6, dtype=torch.float64), kernel.prepare(block, weights)).shape == (0, 6)


# --- a user's file ----------------------------------------------------------------------------------------------------

USERS = """
import torch
import triton
import triton.language as tl
from torch.nn.functional import linear


@triton.jit
def gated(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=at < size)


def mlp(x, gate, up, down):
    g, u = linear(x, gate), linear(x, up)
    hidden = torch.empty_like(g)
    gated[(triton.cdiv(g.numel(), 256),)](g, u, hidden, g.numel(), BLOCK=256)
    return linear(hidden, down)


def no_last_block(x, gate, up, down):
    g, u = linear(x, gate), linear(x, up)
    hidden = torch.full_like(g, torch.nan)
    gated[(g.numel() // 256,)](g, u, hidden, g.numel(), BLOCK=256)
    return linear(hidden, down)
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gate.py").write_text(USERS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_users_kernel_is_checked(users, call, dtype):
    words = ("verify", "64x256:swiglu", "--check", "kernels", "--dtype", dtype, "--kernel")
    assert call(*words, "gate.py:mlp")[0] == 0
    assert call(*words, "gate.py:no_last_block")[0] == 0  # widths that 256 divides do not show it


def test_the_referee_finds_what_is_not_written(users, call):
    assert call("verify", "8x32:swiglu", "--referee", "--kernel", "gate.py:mlp", "--seed", "0")[0] == 0
    code, _, err = call("verify", "8x32:swiglu", "--referee", "--kernel", "gate.py:no_last_block", "--seed", "0")
    assert code == 1
    assert "refused: gate.py:no_last_block: shapes, 1 token" in err
