"""`ffncli.kernel`: f(x) against torch's own functions in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import ffncli
from ffncli.block.recipe import MoE
from ffncli.errors import FFNError
from ffncli.kernels.kernel import kernel_steps

SPEC = ffncli.FFNSpec(8, 24, "swiglu", bias=True, norm="rmsnorm", residual=True)


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (24, 8), "up": (24, 8), "down": (8, 24)}
    return {
        f"{name}.{kind}": (0.4 * torch.randn(shape[: 2 - (kind == "bias")], generator=generator)).to(dtype)
        for name, shape in shapes.items() for kind in ("weight", "bias")
    }  # fmt: skip


def expected(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gated block by torch's functions, in float64."""
    x, w = x.double(), {name: tensor.double() for name, tensor in w.items()}
    gate, up = (functional.linear(x, w[f"{n}.weight"], w[f"{n}.bias"]) for n in ("gate", "up"))
    return functional.linear(functional.silu(gate) * up, w["down.weight"], w["down.bias"])


@pytest.mark.parametrize("name", ["eager", "module", "packed", "inplace", "conv1x1", "numpy"])
def test_every_kernel_is_a_function_of_x(name: str):
    weights, x = drawn(), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    f = ffncli.kernel(name, SPEC, weights)
    out, right = f(x), expected(x, weights)
    assert (out.shape, out.dtype) == (x.shape, torch.float32)
    assert (out - right).abs().max() <= 2e-6 * right.abs().max()
    other, once = f(2 * x), out.clone()
    assert f(x[0, 0]).shape == (8,)
    assert torch.equal(out, once)  # a later call overwrites no earlier output
    assert not torch.equal(other, out)
    assert f(x[:0]).shape == (0, 3, 8)


def test_auto_and_steps_and_the_names():
    weights, x = drawn(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    right = expected(x, weights)
    for f in (ffncli.kernel("auto", SPEC, weights), ffncli.kernel("packed", kernel_steps(ffncli.steps(SPEC)), weights)):
        assert (f(x) - right).abs().max() <= 2e-6 * right.abs().max()
    assert {"eager", "packed", "compiled"} <= {*ffncli.kernel_names()}


def test_a_users_kernel(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch.nn.functional import linear, silu\n"
        "def mlp(x, gate, up, down, gate_bias, up_bias, down_bias):\n"
        "    return linear(silu(linear(x, gate, gate_bias)) * linear(x, up, up_bias), down, down_bias)\n"
    )
    weights, x = drawn(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ffncli.kernel(f"{file}:mlp", SPEC, weights)(x).double(), expected(x, weights), atol=1e-6)
    with pytest.raises(FFNError, match=r"needs the block as an ffncli\.FFNSpec"):
        ffncli.kernel(f"{file}:mlp", ffncli.steps(SPEC), weights)


def test_gradients_flow_to_x_where_the_kernel_has_any():
    weights, x = drawn(torch.float64), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(ffncli.kernel("packed", SPEC, weights)(x).sum(), x)
    (right,) = torch.autograd.grad(expected(x, weights).sum(), x)
    assert torch.allclose(ours, right, rtol=1e-12)
    with pytest.raises(FFNError, match="inplace computes forward only"):
        ffncli.kernel("inplace", SPEC, weights)(x)


def _without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in drawn().items() if key != name}


@pytest.mark.parametrize(("weights", "message"), [
    (_without("up.bias"), "weights: up.bias missing"),
    (drawn() | {"upp.weight": torch.zeros(2)}, "weights: no weight 'upp.weight'"),
    (drawn() | {"up.weight": torch.zeros(8, 24)}, r"up.weight has shape \[8, 24\], expected \[24, 8\] \(d_ff = 24"),
    (drawn() | {"up.weight": torch.zeros(24, 8, dtype=torch.bfloat16)}, "gate.weight is fp32 on cpu, up.weight is b"),
    (drawn() | {"up.weight": 3.0}, "up.weight must be a tensor, got a float"),
    ([], "weights must be a mapping"),
])  # fmt: skip
def test_weights_that_do_not_fit(weights: object, message: str):
    with pytest.raises(FFNError, match=message):
        ffncli.kernel("packed", SPEC, weights)


def test_what_a_kernel_and_its_function_refuse():
    plain = ffncli.FFNSpec(8, 24, "relu", bias=False)
    with pytest.raises(FFNError, match="packed: a plain block has no gate to pack"):
        ffncli.kernel("packed", plain, {"up.weight": torch.zeros(24, 8), "down.weight": torch.zeros(8, 24)})
    for name, message in (("fast", "unknown kernel 'fast'"), (3, "kernel must be text")):
        with pytest.raises(FFNError, match=message):
            ffncli.kernel(name, SPEC, drawn())
    with pytest.raises(FFNError, match=r"block must be an ffncli\.FFNSpec"):
        ffncli.kernel("packed", "8x24:swiglu", drawn())
    f = ffncli.kernel("packed", SPEC, drawn())
    for x, message in (
        (torch.zeros(3, 9), r"shape \[3, 9\], expected \[..., 8\]"), (torch.zeros(8).double(), "x is fp64 on cpu"),
        ([1.0], "x must be a tensor"),
    ):  # fmt: skip
        with pytest.raises(FFNError, match=message):
            f(x)


def test_a_mixture_is_the_sum_of_its_chosen_experts():
    spec = ffncli.FFNSpec(8, 12, "swiglu", bias=False, moe=MoE(experts=4, top_k=2))
    generator = torch.Generator().manual_seed(3)
    shapes = {"router": (4, 8), "gate": (4, 12, 8), "up": (4, 12, 8), "down": (4, 8, 12)}
    w = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(5, 8, generator=generator)
    out, right = ffncli.kernel("eager", spec, w)(x), torch.zeros(5, 8, dtype=torch.float64)
    wide, score = {n: t.double() for n, t in w.items()}, torch.softmax(x.double() @ w["router.weight"].double().T, -1)
    top, chosen = score.topk(2)
    for token in range(5):
        for share, e in zip(top[token] / top[token].sum(), chosen[token], strict=True):
            gate, up, down = (wide[f"{n}.weight"][e] for n in ("gate", "up", "down"))
            right[token] += share * (down @ (functional.silu(gate @ x[token].double()) * (up @ x[token].double())))
    assert (out - right).abs().max() <= 2e-6 * right.abs().max()
