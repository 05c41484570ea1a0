"""The language itself: every op through every reader, shapes, formulas, inputs."""

import inspect
from dataclasses import replace

import pytest
import torch

from ffncli.block import steps as language
from ffncli.block.activations import hard_limits
from ffncli.block.cost import cost, step_costs
from ffncli.block.kept import kept
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import shard
from ffncli.block.steps import (
    OPS,
    Activation,
    Add,
    AllReduce,
    Axis,
    Dropout,
    Experts,
    Linear,
    Multiply,
    Norm,
    Op,
    Route,
    Step,
    block_inputs,
    ffn_span,
    ffn_steps,
    ffn_sum,
    input_shapes,
    parameters,
    shapes,
    walk,
)
from ffncli.block.symbols import right_hand_side
from ffncli.errors import FFNError
from ffncli.run.engine.backward import backward, forward, step_gradients
from ffncli.run.engine.execute import run
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights

D, F, E = Axis("d_model", 6), Axis("d_ff", 8), Axis("experts", 4)
MODEL = Step("up", Linear(D, F, True), ("x",))

# One small block per op, in which it does its work.
BLOCKS: dict[type[Op], tuple[Step, ...]] = {
    Linear: (MODEL, Step("down", Linear(F, D), ("up",))),
    Activation: (MODEL, Step("act", Activation("gelu", -1, 2, 1), ("up",)), Step("down", Linear(F, D), ("act",))),
    Multiply: (MODEL, Step("hidden", Multiply(), ("up", "up")), Step("down", Linear(F, D), ("hidden",))),
    Add: (MODEL, Step("down", Linear(F, D), ("up",)), Step("out", Add(0.5), ("x", "down"))),
    Norm: (
        Step("norm", Norm("rmsnorm", D, 1e-6, "one_plus"), ("x",)),
        Step("up", Linear(D, F), ("norm",)),
        Step("down", Linear(F, D), ("up",)),
    ),
    Dropout: (MODEL, Step("dropout", Dropout(0.5), ("up",)), Step("down", Linear(F, D), ("dropout",))),
    Route: steps(FFNSpec(6, 8, "swiglu", moe=MoE(4, 2, groups=2, top_groups=2, correction=True, scale=2.0))),
    Experts: steps(FFNSpec(6, 8, "relu", moe=MoE(4, 2, weigh="input", order="choose_first"))),
    AllReduce: shard(steps(FFNSpec(6, 8, "swiglu")), 0, 2),
}


def test_every_op_has_a_block_here():
    declared = {c for _, c in inspect.getmembers(language, inspect.isclass) if issubclass(c, Op) and c is not Op}
    assert set(BLOCKS) == set(OPS) == declared
    assert len(OPS) == 9
    for op, block in BLOCKS.items():
        assert any(isinstance(step.op, op) for _, step in walk(block))


@pytest.mark.parametrize("op", OPS)
def test_every_op_through_every_reader(op):
    block = BLOCKS[op]
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator, torch.float64)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        name: tuple(axis.size for axis in axes) for name, axes in parameters(block).items()
    }
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator)
    recorded = trace(block, weights, {"x": x}).steps
    assert [r.name for r in recorded] == ["x", *(s.output for s in block)]
    assert {r.name: r.shape for r in recorded} == shapes(block, input_shapes(block, (2, 3)))
    assert sum(r.params for r in recorded) == cost(block).params + cost(block).norm_params
    assert sum(r.flops for r in recorded) == cost(block, 6).flops
    assert all(s.op.formula(s.inputs, lambda p: p) for _, s in walk(block))
    assert run(block, weights, {"x": x}).isfinite().all()
    ran, last = forward(block, weights, {"x": x}), block[-1].output
    back = {one.name: one for one in backward(block, ran, {last: ("1", torch.ones_like(ran.tensors[last]))})}
    assert {"x", *parameters(block)} <= {*back}
    assert all(one.formula for one in back.values())
    assert sum(one.bytes for one in kept(block, 6)) > 0
    assert all(step_costs(block, {"x": (1, 6)})[s.output].elements > 0 for s in block)


def test_an_op_without_an_arm_is_noticed():
    class Unknown(Op):
        pass

    block = (MODEL, Step("odd", Unknown(), ("up",)))
    with pytest.raises(AssertionError, match="no branch for Unknown"):
        cost(block)
    with pytest.raises(AssertionError, match="no branch for Unknown"):
        step_gradients(block[1], {}, {}, [torch.ones(1, 8)], torch.ones(1, 8))
    with pytest.raises(AssertionError, match="no branch for Unknown"):
        kept(block)
    with pytest.raises(AssertionError, match="no branch for Unknown"):
        run(block, random_weights((MODEL,), torch.Generator()), {"x": torch.ones(1, 6)})


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            (Step("down", Linear(F, D), ("act",)), Step("act", Activation("relu"), ("down",))),
            "before anything produced",
        ),
        ((MODEL, Step("up", Activation("relu"), ("up",))), "assigned twice"),
        ((MODEL, Step("down", Linear(D, F), ("up",))), "expects d_model = 6"),
        ((MODEL, Step("out", Add(), ("x", "up"))), "differ"),
        ((MODEL, Step("out", Multiply(), ("x", "up"))), "do not broadcast"),
        ((MODEL, Step("norm", Norm("rmsnorm", D, 0.0), ("up",))), "Norm expects"),
    ],
)
def test_misfits_are_named(block, message):
    with pytest.raises(FFNError, match=message):
        shapes(block, {"x": (1, 6)})


def test_inputs_are_what_nobody_produces():
    assert block_inputs(steps(FFNSpec(4, 8, norm="layernorm", residual=True))) == ("x",)
    assert block_inputs(steps(FFNSpec(4, 8, residual=True, parallel=True))) == ("x", "attention")


@pytest.mark.parametrize(
    ("spec", "span"),
    [
        (FFNSpec(4, 8), ("x", "down")),
        (FFNSpec(4, 8, norm="rmsnorm", residual=True), ("norm", "down")),
        (FFNSpec(4, 8, norm="rmsnorm", norm_position="pre+branch", residual=True), ("norm", "down")),
        (FFNSpec(4, 8, norm="layernorm", norm_position="post", residual=True), ("x", "down")),
        (FFNSpec(4, 8, moe=MoE(2, 1), norm="rmsnorm", residual=True), ("norm", "experts")),
        (FFNSpec(4, 8, moe=MoE(2, 1, 1), norm="rmsnorm", residual=True), ("norm", "moe")),
    ],
)
def test_span_of_the_ffn(spec, span):
    block = steps(spec)
    assert ffn_span(block) == span
    core = ffn_steps(block)
    assert core[-1].output == span[1]
    assert not any(isinstance(s.op, Norm) for s in core)


@pytest.mark.parametrize(
    ("spec", "total"),
    [(FFNSpec(4, 8), "down"), (FFNSpec(4, 8, moe=MoE(2, 1)), "experts"), (FFNSpec(4, 8, moe=MoE(2, 1, 1)), "moe")],
)
def test_a_norm_inside_the_module_ends_the_ffn(spec, total):
    normed = replace(spec, norm="rmsnorm", norm_position="pre+branch", residual=True)
    around, within = steps(normed), steps(replace(normed, post_norm_inside=True))
    assert [s.output for s in around] == [s.output for s in within]
    assert (ffn_span(around), ffn_sum(around)) == (("norm", total), total)
    assert (ffn_span(within), ffn_sum(within)) == (("norm", "post_norm"), total)
    assert [s.output for s in ffn_steps(within)][-2:] == [total, "post_norm"]
    split = shard(within, 0, 2)
    assert (ffn_span(split), ffn_sum(split)) == (("norm", "post_norm"), f"{total}.sum")


def printed(spec: FFNSpec) -> list[str]:
    block = steps(spec)
    return [f"{s.output} = {right_hand_side(s, block)}" for s in block]


def test_formulas_number_weights_as_the_field_does():
    assert printed(FFNSpec(4, 8, "gelu")) == ["up = x · W1 + b1", "act = gelu(up)", "down = act · W2 + b2"]
    assert printed(FFNSpec(4, 8, "swiglu", norm="rmsnorm", residual=True)) == [
        "norm = rmsnorm(x)",
        "gate = norm · W1",
        "up = norm · W3",
        "act = silu(gate)",
        "hidden = act ⊙ up",
        "down = hidden · W2",
        "out = x + down",
    ]
    assert printed(FFNSpec(4, 8, "quick_gelu", gated=True, limits=hard_limits(7.0, 1.0)))[2:5] == [
        "act = quick_gelu(min(gate, 7))",
        "lift = clip(up, -7, 7) + 1",
        "hidden = act ⊙ lift",
    ]
    shared = printed(FFNSpec(4, 8, "swiglu", moe=MoE(4, 2, 1, scale=2.5)))
    assert shared[:3] == [
        "router = x · W_router",
        "route = 2.5 · normalise(top2(softmax(router)))",
        "experts = Σ route[e] · expert_e(x)",
    ]
    assert "shared.down = shared.hidden · shared.W2" in shared
    moe = MoE(8, 4, groups=4, top_groups=2, correction=True, score="sigmoid", scale=2.5)
    assert printed(FFNSpec(4, 8, "swiglu", moe=moe))[1] == (
        "route = 2.5 · normalise(top4(sigmoid(router) | + b_route, 2 of 4 groups))"
    )
    assert printed(FFNSpec(4, 8, residual=True, residual_scale=0.22))[-1] == "out = x + 0.22 · down"


def test_formulas_of_rarer_ops():
    def formula(op: Op, *inputs: str) -> str:
        return op.formula(inputs, lambda parameter: parameter)

    assert formula(Activation("relu", low=-1), "x") == "relu(max(x, -1))"
    assert formula(Activation("identity", plus=1), "f(x)") == "f(x) + 1"
    assert formula(Activation("identity", plus=1), "x") == "identity(x) + 1"
    assert formula(Experts((MODEL,), E, "input"), "x", "route") == "Σ expert_e(route[e] · x)"
    assert formula(Experts((MODEL,), E, identity=3), "x", "route").endswith("expert_e(x), the last 3 are identities")
    assert formula(Route(E, 2, order="choose_first"), "router") == "softmax(top2(router))"
    assert formula(Route(E, 2, renormalise=False), "router") == "top2(softmax(router))"
    assert formula(AllReduce(4), "down") == "all_reduce(down, 4)"


def test_the_span_of_a_shard_ends_at_the_sum():
    assert ffn_span(BLOCKS[AllReduce]) == ("x", "down.sum")


def test_walk_names_what_is_inside_experts():
    assert [name for name, _ in walk(BLOCKS[Experts])][-3:] == ["experts[e].up", "experts[e].act", "experts[e].down"]


def test_shapes_without_a_width_are_refused():
    with pytest.raises(FFNError, match="do not broadcast"):
        Multiply().shape((2, 6), (3, 6))
    with pytest.raises(FFNError, match="expects d_model = 6"):
        Linear(D, F).shape(())
    with pytest.raises(FFNError, match="fixes its width"):
        input_shapes((Step("act", Activation("relu"), ("x",)),), (1,))
