"""The trace's numbers against numpy and against what the notebook prints."""

import numpy as np
import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import shard
from ffncli.errors import FFNError
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.examples import notebook
from ffncli.models.model import block_model
from ffncli.run.engine.execute import Mode, run
from ffncli.run.engine.prepare import prepare
from ffncli.run.engine.reference import gradients_in_float64
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights
from tests.bench.fake_memory import FakeMemory
from tests.oracles.modules import Gated


def traced(spec: FFNSpec, x: torch.Tensor, **options):
    block = steps(spec)
    weights = random_weights(block, torch.Generator().manual_seed(0), x.dtype)
    return trace(block, weights, {"x": x}, **options)


def test_the_notebooks_numbers():
    example = notebook()
    ready = prepare(example)
    found = trace(ready.steps, ready.weights, ready.inputs, ready.mode, show=None)
    up, act, dropped, down = (found.step(n) for n in ("up", "act", "dropout", "down"))
    assert found.step("x").values == torch.arange(24.0).reshape(2, 3, 4).tolist()
    assert (up.negatives, act.negatives, act.zeros, dropped.zeros) == (15, 0, 15, 21)
    first = [round(v, 4) for v in up.values[0][0]]
    assert first == [-2.2255, -0.1673, 1.5966, -1.5649, -0.1716, 0.4, 0.1738, -0.5781]
    assert (round(act.values[0][0][5], 4), round(dropped.values[0][0][5], 4)) == (0.4, 0.4444)
    assert (round(down.min, 4), round(down.max, 4)) == (-2.1799, 8.1412)
    assert (found.ffn_input, found.ffn_output) == ("x", "down")


def test_the_notebook_in_eval_mode_drops_nothing():
    example = notebook()
    ready = prepare(example, train=False)
    found = trace(ready.steps, ready.weights, ready.inputs, ready.mode)
    assert found.step("dropout").values == found.step("act").values


def test_another_seed_draws_another_mask():
    example = notebook()
    zeros = []
    for seed in (1, 2, 1):
        ready = prepare(example, seed=seed)
        zeros.append(trace(ready.steps, ready.weights, ready.inputs, ready.mode).step("dropout").values)
    assert zeros[0] == zeros[2] != zeros[1]


def test_statistics_are_numpys():
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    x[0, 0, :3] = torch.tensor([0.0, -0.0, -5.0])
    found = traced(FFNSpec(8, 16, "relu"), x)
    for record in found.steps:
        block = steps(FFNSpec(8, 16, "relu"))
        weights = random_weights(block, torch.Generator().manual_seed(0), x.dtype)
        full = trace(block, weights, {"x": x}, show=None).step(record.name)
        values = np.array(full.values)
        assert values.shape == record.shape
        assert record.min == values.min()
        assert record.max == values.max()
        assert record.mean == pytest.approx(values.mean(), rel=1e-12)
        assert record.std == pytest.approx(values.std(), rel=1e-12)  # divisor n
        assert (record.zeros, record.negatives) == ((values == 0).sum(), (values < 0).sum())


def test_nan_and_inf_are_counted_and_kept_out_of_the_statistics():
    x = torch.tensor([[1.0, float("nan"), float("inf"), -3.0], [float("-inf"), 0.0, 1.0, 2.0]])
    record = traced(FFNSpec(4, 8), x).step("x")
    assert (record.nan, record.inf, record.negatives, record.zeros) == (1, 2, 2, 1)
    assert (record.min, record.max, record.mean) == (-3.0, 2.0, pytest.approx(0.2))
    assert record.std == pytest.approx(np.std([1, -3, 0, 1, 2]))
    nothing = traced(FFNSpec(4, 8), torch.full((1, 4), float("nan"))).step("up")
    assert (nothing.min, nothing.max, nothing.mean, nothing.std, nothing.nan) == (None, None, None, None, 8)


def test_std_of_a_constant_far_from_zero_is_zero():
    assert traced(FFNSpec(4, 8), torch.full((100, 4), 1e6)).step("x").std == 0.0


@pytest.mark.parametrize("show", [1, 2, 5, 8, None])
def test_values_stand_at_their_indices(show):
    x = torch.randn(4, 30, dtype=torch.float64)
    found = traced(FFNSpec(30, 50, "swiglu"), x, show=show)
    full = traced(FFNSpec(30, 50, "swiglu"), x, show=None)
    for record in found.steps:
        whole = np.array(full.step(record.name).values)
        assert np.array_equal(np.array(record.values), whole[np.ix_(*record.values_index)])
        assert all(
            len(i) == (n if show is None else min(n, show))
            for i, n in zip(record.values_index, record.shape, strict=True)
        )


def test_inside_the_experts():
    spec = FFNSpec(8, 12, "swiglu", moe=MoE(4, 2))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    closed, opened = traced(spec, x), traced(spec, x, inside=None)
    assert [r.name for r in closed.steps] == ["x", "router", "route", "experts"]
    inner = [r for r in opened.steps if r.tokens is not None]
    assert sum(len(r.tokens) for r in inner if r.name.endswith(".down")) == 6 * 2
    assert all(r.shape[0] == len(r.tokens) for r in inner)
    one = traced(spec, x, inside=frozenset({2}))
    assert {r.name for r in one.steps if r.tokens is not None} == {
        f"experts.2.{n}" for n in ("gate", "up", "act", "hidden", "down")
    }
    assert opened.step("experts.2.act").inputs == ("experts.2.gate",)


def test_units_of_a_shared_expert_write_with_its_own_weights():
    moe = MoE(4, 2, 2, score="sigmoid", shared_routed=True)
    block = steps(FFNSpec(8, 12, "swiglu", moe=moe))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    found = trace(block, weights, {"x": x}, inside=None, top_units=1)
    for name, of_all in (("experts", weights["down.weight"]), ("shared", weights["shared.down.weight"])):
        (unit,) = found.step(f"{name}.1.hidden").units.largest_norm
        assert unit.writes == pytest.approx(unit.norm * of_all[1][:, unit.unit].norm().item(), rel=1e-6)


def test_unknown_step_is_named():
    with pytest.raises(FFNError, match="no step 'gate'"):
        traced(FFNSpec(4, 8), torch.ones(1, 4)).step("gate")


def test_random_weights_and_input_repeat_in_plain_torch():
    ready = prepare(block_model(FFNSpec(16, 48, "swiglu"), "16x48:swiglu"), seed=7, leading=(5,))
    torch.manual_seed(7)
    module = Gated(16, 48)
    x = torch.randn(5, 16)
    assert torch.equal(ready.inputs["x"], x)
    assert all(torch.equal(ready.weights[n], w) for n, w in module.state_dict().items())


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_dtypes(dtype):
    spec = FFNSpec(16, 48, "xielu", norm="rmsnorm", residual=True, moe=MoE(4, 2))
    ready = prepare(block_model(spec, "b"), dtype=dtype)
    found = trace(ready.steps, ready.weights, ready.inputs)
    names = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    assert {r.dtype for r in found.steps} == {names[dtype]}


def test_statistics_of_low_precision_are_those_of_its_values():
    x = (100 + torch.randn(1000, 4)).bfloat16()
    record, values = traced(FFNSpec(4, 8), x).step("x"), x.double().numpy()
    assert (record.mean, record.std) == (pytest.approx(values.mean(), rel=1e-9), pytest.approx(values.std(), rel=1e-9))


def test_dropout_is_counted_only_where_it_is_active():
    block = steps(FFNSpec(4, 50, "relu", dropout=0.5))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(6, 4)
    quiet = trace(block, weights, {"x": x}).step("dropout")
    assert (quiet.live, quiet.dropped) == (None, None)
    mask = torch.zeros(6, 50, dtype=torch.bool)
    drop = trace(block, weights, {"x": x}, Mode(True, {"dropout": mask})).step("dropout")
    live = int((x @ weights["up.weight"].T + weights["up.bias"] > 0).sum())
    assert (drop.live, drop.dropped, drop.zeros) == (live, live, 300)


def test_no_graph_is_kept():
    seen: list[bool] = []
    block = shard(steps(FFNSpec(4, 8)), 0, 2)
    weights = random_weights(block, torch.Generator())
    trace(block, weights, {"x": torch.ones(1, 4)}, Mode(reduce=lambda t: seen.append(torch.is_grad_enabled()) or t))
    assert seen == [False]


def test_costs_of_each_step():
    spec = FFNSpec(8, 12, "swiglu", norm="rmsnorm", moe=MoE(4, 2))
    found = traced(spec, torch.randn(6, 8), inside=None)
    assert found.step("norm").params == 8
    assert [p.symbol for p in found.step("experts").parameters] == ["W1", "W3", "W2"]
    for record in found.steps:
        if record.name.endswith(".up"):
            assert record.flops == 2 * len(record.tokens) * 8 * 12
    biased = traced(FFNSpec(8, 12), torch.randn(6, 8)).step("up")
    assert biased.flops == 6 * (2 * 8 * 12 + 12)


def test_dropout_inside_an_expert_is_counted_too():
    block = steps(FFNSpec(8, 64, "relu", dropout=0.5, moe=MoE(2, 2)))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    mode = Mode(train=True, generator=torch.Generator().manual_seed(1))
    found = trace(block, weights, {"x": torch.randn(6, 8)}, mode, show=None, inside=None)
    before, after = (np.array(found.step(f"experts.1.{name}").values) for name in ("act", "dropout"))
    record = found.step("experts.1.dropout")
    assert record.live == (before != 0).sum()
    assert record.dropped == ((before != 0) & (after == 0)).sum()
    assert 0 < record.dropped < record.live


SPECS = {
    "dense": FFNSpec(8, 12, "gelu", bias=True),
    "experts": FFNSpec(8, 12, "swiglu", moe=MoE(16, 2, shared_experts=1)),
    "shares of inputs": FFNSpec(8, 12, "swiglu", moe=MoE(4, 2, weigh="input")),
    "identity experts": FFNSpec(8, 12, "swiglu", moe=MoE(4, 4, identity_experts=3)),
    "biases": FFNSpec(8, 12, "gelu", bias=True, moe=MoE(4, 2)),
}


def drawn(spec, tokens=5, dtype=torch.float32):
    """(its steps, weights, x and the gradient of the output)"""
    block, generator = kernel_steps(steps(spec)), torch.Generator().manual_seed(0)
    weights = random_weights(block, generator, dtype)
    x, g = (torch.randn(tokens, spec.d_model, generator=generator).to(dtype) for _ in range(2))
    return block, weights, x, g


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_they_are_those_of_the_whole_block(spec, dtype):
    block, weights, x, g = drawn(spec, dtype=dtype)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in {"x": x, **weights}.items()}
    out = run(block, leaves, {"x": leaves["x"]})
    expected = torch.autograd.grad(out, list(leaves.values()), g.double(), allow_unused=True)
    found, gradients = gradients_in_float64(block, weights, {"x": x}, g)
    torch.testing.assert_close(found, out.detach(), rtol=0, atol=0)
    assert set(gradients) == set(leaves)
    for name, gradient in zip(leaves, expected, strict=True):
        wanted = torch.zeros_like(leaves[name]) if gradient is None else gradient
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-13, atol=1e-14, msg=name)
    _, alone = gradients_in_float64(block, weights, {"x": x}, g, of_weights=False)
    assert list(alone) == ["x"]
    assert torch.equal(alone["x"], gradients["x"])


def test_one_expert_is_widened_at_a_time():
    """In bf16 DeepSeek-V3's layer is 23 GB: in float64 90 GB, of which only the gradients stay."""
    d_model, d_ff, experts = 64, 256, 32
    block, weights, x, g = drawn(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(experts, 4)), tokens=4)
    expert = 8 * 3 * d_model * d_ff
    peaks = {}
    for of_weights in (True, False):
        with FakeMemory() as memory:
            gradients_in_float64(block, weights, {"x": x}, g, of_weights)
        peaks[of_weights] = memory.peak
    assert expert < peaks[False] < 3 * expert
    assert experts * expert < peaks[True] < (experts + 4) * expert
