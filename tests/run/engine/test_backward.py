"""The backward rules against torch's autograd: every op, activation, limit and way to choose experts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ffncli.block import activations
from ffncli.block.activations import TABLE, Limits, hard_limits, limits_after
from ffncli.block.recipe import FFNSpec, MoE, final_layer, steps
from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import (
    ONE,
    Activation,
    Add,
    Axis,
    Linear,
    Multiply,
    Norm,
    Step,
    block_inputs,
    input_shapes,
    walk,
)
from ffncli.run.engine.backward import backward, forward
from ffncli.run.engine.execute import EVAL, Mode, run
from ffncli.run.engine.weights import random_weights

FP64, FP32 = 1e-12, 1e-6
D, F, TOKENS = 6, 10, 5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomised(block: Sequence[Step], dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights; the norms', biases' and factors' too, which are drawn as ones and zeros."""
    weights = random_weights(block, generator(1), dtype, "cpu")
    return {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator(2)).to(dtype)
        if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }  # fmt: skip


def inputs_of(block: Sequence[Step], dtype: torch.dtype, leading: tuple[int, ...] = (TOKENS,)) -> dict[str, Tensor]:
    from ffncli.block.steps import id_inputs

    shapes, ids = input_shapes(block, leading), id_inputs(block)
    return {
        name: torch.randint(0, ids[name], shape, generator=generator(4)) if name in ids
        else 1.5 * torch.randn(shape, generator=generator(3)).to(dtype)
        for name, shape in shapes.items()
    }  # fmt: skip


def autograd(
    block: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], g: Tensor, mode: Mode = EVAL
) -> dict[str, Tensor]:
    leaves = {n: t.clone().requires_grad_() for n, t in {**inputs, **weights}.items() if t.is_floating_point()}
    given = {**inputs, **weights, **leaves}
    with torch.enable_grad():
        out = run(block, {n: given[n] for n in weights}, {n: given[n] for n in inputs}, mode)
        made = torch.autograd.grad(out, [*leaves.values()], g, allow_unused=True)
    return {
        n: torch.zeros_like(leaf) if gradient is None else gradient
        for (n, leaf), gradient in zip(leaves.items(), made, strict=True)
    }


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """max|a - b| / max|b| for each gradient; a gradient far below the largest is judged as if 1 % of it."""
    floor = 0.01 * max(float(t.abs().max()) for t in theirs.values())
    return {n: float((ours[n] - t).abs().max()) / max(floor, float(t.abs().max())) for n, t in theirs.items()}


def in_double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


def compared(
    block: Sequence[Step], dtype: torch.dtype, mode: Mode = EVAL, leading: tuple[int, ...] = (TOKENS,)
) -> dict[str, float]:
    weights, inputs = randomised(block, dtype), inputs_of(block, dtype, leading)
    ran = forward(block, weights, inputs, mode)
    g = torch.randn(ran.tensors[block[-1].output].shape, generator=generator(5)).to(dtype)
    gradients = {one.name: one for one in backward(block, ran, {block[-1].output: ("g", g)})}
    mode = replace(mode, masks=ran.masks)
    theirs = autograd(block, weights, inputs, g, mode)
    ours = {n: gradients[n].tensor if n in gradients else torch.zeros_like(t) for n, t in theirs.items()}
    assert all(ours[n].shape == t.shape and ours[n].dtype == t.dtype for n, t in theirs.items())
    errors = apart(ours, theirs)
    if dtype == torch.float32:  # a single number is a sum over all values, and its terms may cancel
        errors = {n: error / (10 if theirs[n].numel() == 1 else 1) for n, error in errors.items()}
        if max(errors.values()) > FP32:  # on some CPUs torch's own rounding is larger than that; ours may be as large
            exact = autograd(block, in_double(weights), in_double(inputs), g.double(), mode)
            errors = {n: errors[n] - 2 * rounding for n, rounding in apart(in_double(theirs), exact).items()}
    return errors


def check(spec: FFNSpec, mode: Mode = EVAL) -> None:
    block = steps(spec)
    single = any(getattr(step.op, "score_dtype", "input") == "fp32" for _, step in walk(block))
    double = compared(block, torch.float64, mode, (2, 3))
    assert max(double.values()) <= (FP32 if single else FP64), double
    in_single = compared(block, torch.float32, mode)
    assert max(in_single.values()) <= FP32, in_single


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", TABLE)
def test_every_activation(name: str, gated: bool) -> None:
    check(FFNSpec(D, F, name, gated=gated, bias=True))


LIMITS = {
    "hard": hard_limits(0.4, 1.0), "after": limits_after(0.3), "caps": Limits(gate_cap=0.7, up_cap=0.5),
    "one": Limits(gate_high=0.2),
}  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["silu", "quick_gelu", "relu", "xielu", "prelu"])
def test_every_limit(name: str, limits: str) -> None:
    if LIMITS[limits].gate_cap is not None and name not in activations.SOFT_CAPPED:
        pytest.skip("no linear factor")
    check(FFNSpec(D, F, name, gated=True, limits=LIMITS[limits]))


NORMS = [
    FFNSpec(D, F, "gelu", norm=kind, norm_weight=weight, norm_bias=bias, norm_position=position, residual=True)
    for kind in ("rmsnorm", "layernorm") for weight in ("none", "plain", "one_plus") for bias in (False, True)
    for position in ("pre", "post", "branch", "pre+branch")
]  # fmt: skip


@pytest.mark.parametrize("spec", NORMS, ids=lambda s: f"{s.norm}-{s.norm_weight}-{s.norm_bias}-{s.norm_position}")
def test_every_norm(spec: FFNSpec) -> None:
    check(spec)


OTHER = {
    "weigh": FFNSpec(D, F, "silu", norm="rmsnorm", norm_position="pre+branch", post_norm_weigh="input", residual=True),
    "weigh-one": FFNSpec(D, F, "silu", norm="rmsnorm", norm_position="branch", post_norm_weigh="input",
                         norm_weight="one_plus", norm_bias=True),
    "sub-norm": FFNSpec(D, F, "relu2", gated=True, sub_norm=True), "scaled": FFNSpec(
        D, F, "swiglu", learned_scale=True, gate_scale=0.5, residual_scale=0.22, residual=True),
    "norm-gate": FFNSpec(D, F, "swiglu", norm="rmsnorm", norm_gate=3, residual=True),
    "parallel": FFNSpec(D, F, "gelu", norm="layernorm", parallel=True, residual=True),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_every_other_step(name: str) -> None:
    check(OTHER[name])


MIXTURES = {
    "softmax": MoE(8, 2), "all": MoE(4, 4, renormalise=False), "sigmoid": MoE(8, 3, score="sigmoid", scale=2.5),
    "sqrtsoftplus": MoE(8, 3, score="sqrtsoftplus", eps=0.25), "first": MoE(8, 2, order="choose_first"),
    "unnormalised": MoE(8, 2, 1, renormalise=False), "groups": MoE(8, 2, 1, groups=4, top_groups=2),
    "groups-2": MoE(8, 3, groups=4, top_groups=2, group_best=2, correction=True, score="sigmoid", scale=1.5),
    "outside": MoE(8, 3, groups=4, top_groups=2, zero_outside=True, correction=True),
    "one-by-one": MoE(8, 2, order="one_by_one", renormalise=False, threshold=0.5),
    "one-by-one-far": MoE(8, 3, order="one_by_one", renormalise=False, threshold=1.5, score="softmax"),
    "lookup": MoE(8, 3, 1, score="sqrtsoftplus", scale=1.5, lookup=20), "input": MoE(8, 2, weigh="input"),
    "input-sigmoid": MoE(4, 1, 1, weigh="input", score="sigmoid", renormalise=False),
    "identity": MoE(6, 3, identity_experts=3, renormalise=False), "skip": MoE(6, 2, skip_experts=1),
    "latent": MoE(8, 2, latent=4, latent_norm=True, mixed_norm=True), "bias": MoE(8, 2, mixed_bias=True,
                                                                                   router_bias=True),
    "shared-gate": MoE(8, 2, 2, shared_gate=True, shared_scale=0.5, shared_d_ff=7), "norm": MoE(8, 2, expert_norm=True),
    "shared-routed": MoE(5, 2, 3, score="sigmoid", correction=True, scale=8.0, shared_routed=True),
    "router-norm": MoE(8, 2, router_norm=True, router_scale=0.4, expert_scale=True),
    "router-width": MoE(8, 2, router_width=5), "router-carries": MoE(8, 2, router_width=5, router_carries=True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["input", "fp32"])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_way_to_choose(name: str, dtype: str) -> None:
    spec = FFNSpec(D, F, "swiglu", norm="rmsnorm", moe=replace(MIXTURES[name], score_dtype=dtype), residual=True)
    spec = replace(spec, learned_scale=True) if name == "shared-routed" else spec
    check(spec)


def test_dropout_with_its_mask() -> None:
    spec = FFNSpec(D, F, "gelu", bias=True, dropout=0.4)
    for seed in range(3):
        mode = Mode(train=True, generator=generator(seed))
        assert max(compared(steps(spec), torch.float64, mode).values()) <= FP64


def test_the_final_layer_and_shares_of_a_rank() -> None:
    block = (*steps(FFNSpec(D, F, "gelu")), *final_layer("down", D, 9, True))
    assert max(compared(block, torch.float64).values()) <= FP64
    mixture = FFNSpec(D, 12, "swiglu", moe=MoE(4, 2, score_dtype="input"))
    for spec, ranks in ((FFNSpec(D, 12, "swiglu", bias=True), Ranks(2, 1)), (mixture, Ranks(2, 2))):
        for rank in range(ranks.world_size):
            assert max(compared(rank_steps(steps(spec), rank, ranks), torch.float64).values()) <= FP64


def test_a_name_that_is_read_twice_and_a_broadcast_factor() -> None:
    d = Axis("d_model", D)
    block = (
        Step("one", Linear(d, ONE, bias=True), ("x",)), Step("square", Multiply(), ("x", "x")),
        Step("gated", Multiply(learned=d), ("square", "one")), Step("half", Multiply(learned=ONE), ("gated",)),
        Step("sum", Add(0.5, bias=d), ("half", "x", "gated")),
        Step("normed", Norm("layernorm", d, 1e-5, weight="one_plus", bias=True), ("sum",)),
        Step("out", Activation("softplus", low=-0.3, high=0.9, plus=2.0), ("normed",)),
    )  # fmt: skip
    assert max(compared(block, torch.float64).values()) <= FP64
    assert [*block_inputs(block)] == ["x"]


KINKS = [
    (Activation("relu"), 0.0), (Activation("relu6"), 6.0), (Activation("leaky_relu"), 0.0),
    (Activation("hardswish"), -3.0), (Activation("hardswish"), 3.0), (Activation("prelu"), 0.0),
    (Activation("identity", low=-7, high=7), 7.0), (Activation("identity", low=-7, high=7), -7.0),
    (Activation("silu", high=7), 7.0), (Activation("relu", most=2.0), 2.0), (Activation("selu"), 0.0),
    (Activation("elu"), 0.0), (Activation("relu2"), 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("op", "x"), KINKS, ids=lambda v: str(v))
def test_the_slope_at_a_kink_is_torchs(op: Activation, x: float) -> None:
    block, given = (Step("act", op, ("x",)),), {"x": torch.tensor([[x, x - 1e-9, x + 1e-9]], dtype=torch.float64)}
    weights = {f"act.{p}": torch.tensor([0.25], dtype=torch.float64) for p in op.parameters()}
    g = torch.ones(1, 3, dtype=torch.float64)
    ran = forward(block, weights, given)
    ours = {one.name: one.tensor for one in backward(block, ran, {"act": ("g", g)})}
    theirs = autograd(block, weights, given, g)
    for name, gradient in theirs.items():
        assert ours[name].flatten().tolist() == pytest.approx(gradient.flatten().tolist(), rel=1e-15, abs=0), name


def test_16_bits_are_near_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        block = steps(FFNSpec(D, F, "swiglu", norm="rmsnorm", residual=True))
        found = compared(block, dtype)
        assert max(found.values()) <= 4 * torch.finfo(dtype).eps, found


def test_every_learned_parameter_has_a_slope() -> None:
    assert {n: {*row.learned} for n, row in TABLE.items()} == {n: {*row.learned_slopes} for n, row in TABLE.items()}


def test_formulas() -> None:
    def printed(spec: FFNSpec) -> dict[str, str]:
        block = steps(spec)
        ran = forward(block, randomised(block, torch.float64), inputs_of(block, torch.float64))
        last = block[-1].output
        g = torch.ones_like(ran.tensors[last])
        return {one.symbol: one.formula for one in backward(block, ran, {last: ("1", g)})}

    assert printed(FFNSpec(D, F, "relu", bias=True)) == {
        "d down": "1", "dW2": "actᵀ · d down", "db2": "Σ d down", "d act": "d down · W2ᵀ",
        "d up": "d act ⊙ relu'(up)", "dW1": "xᵀ · d up", "db1": "Σ d up", "d x": "d up · W1ᵀ",
    }  # fmt: skip
    gated = printed(FFNSpec(D, F, "swiglu", residual=True))
    assert gated["d x"] == "d gate · W1ᵀ + d up · W3ᵀ + d out"
    assert gated["d up"] == "d hidden ⊙ act"
    assert gated["d gate"] == "d act ⊙ silu'(gate)"
