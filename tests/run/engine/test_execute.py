"""The reference reader against modules written by hand, torch's own norms, and transformers' routers."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from ffncli.block.activations import TABLE, hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import Ranks, rank_steps, shard
from ffncli.block.steps import Activation, Add, Axis, Dropout, Linear, Multiply, Norm, Route, Step
from ffncli.errors import FFNError
from ffncli.run.engine import execute as execute_module
from ffncli.run.engine.execute import Mode, execute, norm, route, run
from ffncli.run.engine.sharded import share_of, summed
from ffncli.run.engine.weights import random_weights
from tests.oracles import modules
from tests.oracles.modules import relative_error


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("spec", "module"),
    [
        (FFNSpec(12, 40, "relu"), lambda: modules.Plain(12, 40)),
        (FFNSpec(12, 40, "gelu", bias=False), lambda: modules.Plain(12, 40, False, functional.gelu)),
        (FFNSpec(12, 40, "swiglu"), lambda: modules.Gated(12, 40)),
        (FFNSpec(12, 40, "geglu", bias=True), lambda: modules.Gated(12, 40, True, functional.gelu)),
        (
            FFNSpec(12, 40, "quick_gelu", gated=True, bias=True, limits=hard_limits(7.0, 1.0)),
            lambda: modules.ClampedGated(12, 40, True),
        ),
    ],
)
def test_dense_blocks(spec, module, dtype):
    torch.manual_seed(0)
    oracle = module()
    block = steps(spec)
    weights = random_weights(block, generator(0))
    x = 9 * torch.randn(2, 5, 12)
    assert {n: w.tolist() for n, w in oracle.state_dict().items()} == {n: w.tolist() for n, w in weights.items()}
    found = run(block, {n: w.to(dtype) for n, w in weights.items()}, {"x": x.to(dtype)})
    assert found.dtype == dtype
    assert relative_error(found, oracle.to(dtype)(x.to(dtype))) <= (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("shared", [0, 2])
def test_moe_is_every_expert_on_every_token(shared):
    torch.manual_seed(3)
    oracle = modules.MoE(12, 20, 6, 2, shared).double()
    block = steps(FFNSpec(12, 20, "swiglu", moe=MoE(6, 2, shared, score_dtype="input")))
    state = oracle.state_dict()
    weights = {"router.weight": state["router.weight"]}
    for name in ("gate", "up", "down"):
        weights[f"{name}.weight"] = torch.stack([state[f"experts.{e}.{name}.weight"] for e in range(6)])
        if shared:
            weights[f"shared.{name}.weight"] = state[f"shared.{name}.weight"]
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    assert relative_error(run(block, weights, {"x": x}), oracle(x)) < 1e-13


def test_expert_weights_are_drawn_one_expert_after_the_other():
    torch.manual_seed(5)
    oracle = modules.MoE(8, 12, 3, 1)
    weights = random_weights(steps(FFNSpec(8, 12, "swiglu", moe=MoE(3, 1))), generator(5))
    assert torch.equal(weights["up.weight"][2], oracle.experts[2].up.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_torchs(dtype):
    x = torch.randn(4, 10, dtype=dtype)
    weight, bias = torch.randn(10, dtype=dtype), torch.randn(10, dtype=dtype)
    axis = Axis("d_model", 10)
    layer = norm(Norm("layernorm", axis, 1e-5, bias=True), {"weight": weight, "bias": bias}, x)
    assert torch.equal(layer, functional.layer_norm(x, (10,), weight, bias, 1e-5))
    tolerance = 2e-7 if dtype == torch.float32 else 1e-15
    rms = nn.RMSNorm(10, eps=1e-6, dtype=dtype)
    with torch.no_grad():
        rms.weight.copy_(weight)
        assert relative_error(norm(Norm("rmsnorm", axis, 1e-6), {"weight": weight}, x), rms(x)) <= tolerance
        one_plus = norm(Norm("rmsnorm", axis, 1e-6, "one_plus"), {"weight": weight - 1}, x)
        assert relative_error(one_plus, rms(x)) <= 4 * tolerance
        rms.weight.fill_(1.0)
        assert relative_error(norm(Norm("rmsnorm", axis, 1e-6, "none"), {}, x), rms(x)) <= tolerance
    bare = functional.layer_norm(x, (10,), eps=1e-5)
    assert relative_error(norm(Norm("layernorm", axis, 1e-5, "none"), {}, x), bare) <= tolerance


def test_norms_use_their_eps_and_bias():
    x, axis = torch.randn(4, 10, dtype=torch.float64), Axis("d_model", 10)
    weight, bias = torch.randn(2, 10, dtype=torch.float64)
    centred = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 0.5).sqrt()
    found = norm(Norm("layernorm", axis, 0.5, "one_plus", True), {"weight": weight, "bias": bias}, x)
    assert relative_error(found, centred * (1 + weight) + bias) < 1e-14
    plain = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt()
    found = norm(Norm("rmsnorm", axis, 0.5, "plain", True), {"weight": weight, "bias": bias}, x)
    assert relative_error(found, plain * weight + bias) < 1e-14


def test_rmsnorm_of_low_precision_is_computed_in_float32():
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300² overflows float16
    assert norm(Norm("rmsnorm", Axis("d_model", 64), 0.0, "none"), {}, x).tolist() == [[1.0] * 64]


def deepseek_v3_route(logits, bias, top_k, groups, top_groups, scale):
    """The published algorithm, token by token, in plain Python."""
    out = torch.zeros_like(logits)
    for t, row in enumerate(logits.sigmoid()):
        choice = row + bias
        size = len(row) // groups
        ranked = sorted(
            range(groups), key=lambda g: sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]), reverse=True
        )
        allowed = [e for g in ranked[:top_groups] for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: choice[e].item(), reverse=True)[:top_k]
        total = sum(row[e] for e in chosen)
        for e in chosen:
            out[t, e] = row[e] / total * scale
    return out


def test_deepseek_v3_routing():
    logits, bias = torch.randn(50, 16, generator=generator()).double(), torch.randn(16, generator=generator(1)).double()
    op = Route(
        Axis("experts", 16), 4, score="sigmoid", renormalise=True, scale=2.5, groups=4, top_groups=2, group_best=2,
        correction=True, score_dtype="input",
    )  # fmt: skip
    found = route(op, {"correction": bias}, logits)
    assert torch.allclose(found, deepseek_v3_route(logits, bias, 4, 4, 2, 2.5), atol=1e-15)
    assert ((found != 0).sum(-1) == 4).all()
    assert torch.allclose(
        route(op, {"correction": bias - 5}, logits), deepseek_v3_route(logits, bias - 5, 4, 4, 2, 2.5), atol=1e-15
    )


def test_softmax_of_the_chosen_is_the_renormalised_softmax():
    logits = torch.randn(20, 8, dtype=torch.float64)
    axis = Axis("experts", 8)
    first = route(Route(axis, 3, score_dtype="input"), {}, logits)
    chosen = route(Route(axis, 3, order="choose_first", score_dtype="input"), {}, logits)
    assert torch.allclose(first, chosen, atol=1e-15)
    assert torch.allclose(first.sum(-1), torch.ones(20, dtype=torch.float64))
    plain = route(Route(axis, 3, renormalise=False, score_dtype="input"), {}, logits)
    assert torch.allclose(plain.sum(-1), logits.softmax(-1).topk(3).values.sum(-1), atol=1e-15)


def test_a_scale_counts_in_either_order_and_few_experts_may_judge_a_group():
    logits, axis = torch.randn(9, 8, dtype=torch.float64), Axis("experts", 8)
    chosen = route(Route(axis, 3, order="choose_first", scale=2.5, score_dtype="input"), {}, logits)
    assert torch.allclose(chosen.sum(-1), torch.full((9,), 2.5, dtype=torch.float64))
    small, large = (route(Route(axis, 2, groups=4, top_groups=2, group_best=n), {}, logits) for n in (2, 9))
    assert torch.equal(small, large)


def test_a_parallel_block_adds_the_attention():
    block = steps(FFNSpec(4, 8, "relu", parallel=True))
    inputs = {"x": torch.randn(3, 4), "attention": torch.randn(3, 4)}
    found = {e.name: e.tensor for e in execute(block, random_weights(block, generator()), inputs)}
    assert relative_error(found["out"], inputs["x"] + inputs["attention"] + found["down"]) < 1e-6


def test_llama_4_weighs_what_enters_an_expert():
    block = steps(FFNSpec(4, 8, "relu", bias=False, moe=MoE(2, 1, score="sigmoid", renormalise=False, weigh="input")))
    weights, x = random_weights(block, generator(), torch.float64), torch.randn(5, 4, dtype=torch.float64)
    best, chosen = (x @ weights["router.weight"].T).max(-1)
    for token, (row, e) in enumerate(zip(x * best.float().sigmoid().double()[:, None], chosen, strict=True)):
        expected = weights["down.weight"][e] @ (weights["up.weight"][e] @ row).relu()
        assert relative_error(run(block, weights, {"x": x})[token], expected) < 1e-6


@pytest.mark.parametrize(("op", "expected"), [
    (Activation("identity", low=-1.0), [-1.0, 0.5, 3.0]),
    (Activation("identity", high=1.0), [-2.0, 0.5, 1.0]),
    (Activation("relu", plus=1.0), [1.0, 1.5, 4.0]),
])  # fmt: skip
def test_limits_of_an_activation(op, expected):
    block = (Step("act", op, ("x",)),)
    assert run(block, {}, {"x": torch.tensor([[-2.0, 0.5, 3.0]])}).tolist() == [expected]


def test_scores_are_computed_in_their_stated_dtype():
    logits = torch.randn(9, 8, dtype=torch.float64)
    found = route(Route(Axis("experts", 8), 8, renormalise=False), {}, logits)
    assert found.dtype == torch.float64
    assert torch.equal(found, logits.float().softmax(-1).double())


def test_dropout():
    block = steps(FFNSpec(4, 1000, "relu", dropout=0.25))
    weights = random_weights(block, generator())
    x = torch.randn(50, 4)

    def hidden(mode: Mode) -> dict[str, torch.Tensor]:
        return {e.name: e.tensor for e in execute(block, weights, {"x": x}, mode)}

    assert torch.equal(hidden(Mode())["dropout"], hidden(Mode())["act"])
    drawn = hidden(Mode(train=True, generator=generator(1)))
    kept = drawn["dropout"] != 0
    assert torch.allclose(drawn["dropout"][kept], drawn["act"][kept] / 0.75)
    live = drawn["act"] != 0
    assert abs((live & ~kept).sum() / live.sum() - 0.25) < 0.02  # 25,000 live values: 7 standard deviations
    again = hidden(Mode(train=True, generator=generator(1)))
    assert torch.equal(drawn["down"], again["down"])
    mask = torch.zeros(50, 1000, dtype=torch.bool)
    assert not hidden(Mode(train=True, masks={"dropout": mask}))["dropout"].any()


def test_tensors_are_freed_after_their_last_use():
    block = steps(FFNSpec(4, 8, "gelu"))
    weights = random_weights(block, generator())
    alive: dict[str, weakref.ref] = {}
    for event in execute(block, weights, {"x": torch.randn(3, 4)}):
        alive[event.name] = weakref.ref(event.tensor)
        del event
        gc.collect()
        if "act" in alive:
            assert alive["up"]() is None


def test_inputs_are_not_changed():
    block = steps(FFNSpec(4, 8, "swiglu", residual=True, norm="rmsnorm", moe=MoE(3, 2)))
    weights = random_weights(block, generator())
    x = torch.randn(5, 4)
    before, kept = x.clone(), {n: w.clone() for n, w in weights.items()}
    run(block, weights, {"x": x})
    assert torch.equal(x, before)
    assert all(torch.equal(w, kept[n]) for n, w in weights.items())


def test_weights_that_do_not_fit_are_refused():
    block = steps(FFNSpec(4, 8, "gelu"))
    weights = random_weights(block, generator())
    with pytest.raises(FFNError, match=r"up.weight has shape \(8, 4\), but the block needs \[16, 4\]"):
        run(steps(FFNSpec(4, 16, "gelu")), weights, {"x": torch.ones(1, 4)})
    with pytest.raises(FFNError, match=r"up\.bias has shape None"):
        run(block, {n: w for n, w in weights.items() if n != "up.bias"}, {"x": torch.ones(1, 4)})


@pytest.mark.parametrize("weight", ["none", "plain", "one_plus"])
def test_an_rmsnorms_bias_is_added(weight):
    axis, x = Axis("d_model", 4), torch.randn(2, 4, dtype=torch.float64)
    own = {"bias": torch.full((4,), 5.0, dtype=torch.float64)}
    if weight != "none":
        own["weight"] = torch.full((4,), {"plain": 2.0, "one_plus": 1.0}[weight], dtype=torch.float64)
    expected = x / x.square().mean(-1, keepdim=True).sqrt() * (1 if weight == "none" else 2) + 5
    assert torch.allclose(norm(Norm("rmsnorm", axis, 0.0, weight, True), own, x), expected)


def wide_tensors(block, weights, x, keep):
    """{step: address} of all outputs, and the most tensors of d_ff that were alive at once."""
    places, alive, most = {}, [], 0
    for event in execute(block, weights, {"x": x}, keep=keep):
        places[event.name] = event.tensor.data_ptr()
        if event.tensor.shape[-1] == 32:
            alive.append(weakref.ref(event.tensor))
        del event
        most = max(most, len({t.data_ptr() for r in alive if (t := r()) is not None}))
    return places, most


def test_without_keep_a_gated_block_needs_two_wide_tensors():
    block = steps(FFNSpec(8, 32, "swiglu", norm="rmsnorm", residual=True))
    weights, x = random_weights(block, generator()), torch.randn(5, 8)
    before = x.clone()
    places, most = wide_tensors(block, weights, x, frozenset())
    assert (places["act"], places["hidden"], most) == (places["gate"], places["gate"], 2)
    assert places["out"] == places["down"] != x.data_ptr()
    assert torch.equal(x, before)  # an input is the caller's
    places, _ = wide_tensors(block, weights, x, frozenset({"gate"}))
    assert places["act"] != places["gate"]
    assert places["hidden"] == places["act"]


@pytest.mark.parametrize("keep", [frozenset(), frozenset({"gate"}), frozenset({"up", "act"}), frozenset({"hidden"})])
def test_what_is_kept_is_not_changed(keep):
    block = steps(FFNSpec(8, 32, "swiglu", dropout=0.5, residual=True))
    weights, x = random_weights(block, generator()), torch.randn(5, 8)
    wanted = {e.name: e.tensor for e in execute(block, weights, {"x": x})}
    seen = {}
    held = {}
    for event in execute(block, weights, {"x": x}, keep=keep):
        seen[event.name] = event.tensor.clone()
        if event.name in keep:
            held[event.name] = event.tensor
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)
    assert all(torch.equal(held[name], wanted[name]) for name in keep)


def test_one_tensor_under_two_names_is_not_overwritten():
    """Dropout in eval, the identity and a sum of one hand on their very input."""
    wide = Axis("d_model", 8)
    block = (
        Step("a", Activation("relu"), ("x",)),
        Step("b", Activation("identity"), ("a",)),
        Step("c", Activation("silu"), ("b",)),  # last use of b, whose tensor is a's
        Step("d", Add(), ("a", "c")),
        Step("e", Dropout(0.5), ("d",)),
        Step("f", Activation("silu"), ("d",)),  # last use of d, whose tensor is e's
        Step("g", Multiply(), ("e", "f")),
        Step("h", Linear(wide, wide), ("g",)),
    )
    weights, x = {"h.weight": torch.randn(8, 8)}, torch.randn(5, 8)
    wanted = run(block, weights, {"x": x})
    *_, last = execute(block, weights, {"x": x}, keep=frozenset())
    assert torch.equal(last.tensor, wanted)


@pytest.mark.parametrize("name", TABLE)
def test_an_activation_over_its_input_is_the_same(name, monkeypatch):
    """In chunks, to the last bit."""
    monkeypatch.setattr(execute_module, "_CHUNK", 64)
    block = steps(FFNSpec(8, 37, name, gated=True, limits=hard_limits(2.0, 1.0)))
    weights, x = random_weights(block, generator()), 3 * torch.randn(2, 5, 8)
    found = {e.name: e.tensor.clone() for e in execute(block, weights, {"x": x}, keep=frozenset())}
    for event in execute(block, weights, {"x": x}):
        assert torch.equal(found[event.name], event.tensor), event.name


def test_what_is_kept_inside_an_expert_is_not_changed():
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(2, 2)))
    weights, x = random_weights(block, generator()), torch.randn(5, 8)
    wanted = {e.name: e.tensor for e in execute(block, weights, {"x": x})}
    keep = frozenset({"experts.1.gate", "experts.0.hidden"})
    found = {e.name: e.tensor for e in execute(block, weights, {"x": x}, keep=keep)}
    assert torch.equal(found["experts"], wanted["experts"])
    assert all(torch.equal(found[name], wanted[name]) for name in keep)
    assert found["experts.0.gate"].data_ptr() == found["experts.0.act"].data_ptr()


def test_a_gate_of_one_number_per_token_is_not_written_over():
    """shared experts: [tokens, 1] times [tokens, d_model], in chunks of rows."""
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(2, 1, 1, shared_gate=True)))
    weights, x = random_weights(block, generator()), torch.randn(2, 5, 8)
    wanted = run(block, weights, {"x": x})
    *_, last = execute(block, weights, {"x": x}, keep=frozenset())
    assert torch.equal(last.tensor, wanted)


def test_a_dtype_that_the_device_cannot_compute_is_said(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("\"silu_cpu\" not implemented for 'Half'")

    monkeypatch.setattr(execute_module, "activation", refuse)
    block = steps(FFNSpec(8, 16, "swiglu"))
    weights = random_weights(block, generator(), torch.float16)
    with pytest.raises(FFNError, match="step 'act' cannot be computed in float16 on cpu") as error:
        run(block, weights, {"x": torch.randn(2, 8).half()})
    assert error.value.code == 3


DENSE = FFNSpec(6, 12, "silu", gated=True, bias=True)


def test_each_rank_has_its_own_rows_or_columns() -> None:
    block = steps(DENSE)
    weights = random_weights(block, torch.Generator().manual_seed(0))
    shares = [share_of(weights, block, shard(block, rank, 3), rank) for rank in range(3)]
    for name, axis in (("gate.weight", 0), ("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        assert torch.equal(torch.cat([share[name] for share in shares], axis), weights[name])
    assert [("down.bias" in share) for share in shares] == [True, False, False]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "moe",
    [
        None, MoE(4, 2, shared_experts=1), MoE(4, 2, 1, latent=4), MoE(4, 2, 1, mixed_bias=True),
        MoE(4, 2, 1, latent=4, latent_norm=True, expert_norm=True), MoE(4, 2, 1, latent=4, mixed_norm=True),
    ],
)  # fmt: skip
def test_the_ranks_summed_are_the_whole(ranks: int, moe: MoE | None) -> None:
    block = steps(FFNSpec(6, 12, "silu", gated=True, bias=moe is None, moe=moe, norm="rmsnorm", residual=True))
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator, torch.float64)
    weights |= {
        name: torch.rand_like(weights[name]) for name in ("biased.bias", "expert_norm.weight") if name in weights
    }
    x = {"x": torch.randn(5, 6, dtype=torch.float64, generator=generator)}
    found = summed(block, weights, x, Ranks(ranks))
    torch.testing.assert_close(found, run(block, weights, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 4), (2, 2), (3, 4)])
@pytest.mark.parametrize("tokens", [1, 5, 8])  # fewer than ranks, not a multiple, a multiple
@pytest.mark.parametrize(
    "moe",
    [
        MoE(4, 2, shared_experts=1), MoE(8, 3, 1, latent=4, mixed_norm=True), MoE(4, 1, weigh="input"),
        MoE(4, 3, identity_experts=2), MoE(4, 2, 2, shared_routed=True), MoE(4, 2, skip_experts=2),
        MoE(8, 2, groups=4, top_groups=2, correction=True), MoE(4, 2, expert_norm=True, mixed_bias=True),
        MoE(4, 2, lookup=9),
    ],
)  # fmt: skip
def test_ranks_with_experts_of_their_own_give_the_whole(tp: int, ep: int, tokens: int, moe: MoE) -> None:
    block = steps(FFNSpec(6, 12, "silu", gated=True, bias=True, moe=moe, norm="rmsnorm", residual=True))
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator, torch.float64)
    names = ("biased.bias", "expert_norm.weight", "route.correction")
    weights |= {name: torch.rand_like(weights[name]) for name in names if name in weights}
    inputs = {"x": torch.randn(1, tokens, 6, dtype=torch.float64, generator=generator)}
    if moe.lookup:
        inputs["token_ids"] = torch.arange(tokens).reshape(1, -1, 1) % moe.lookup
    found = summed(block, weights, inputs, Ranks(tp, ep))
    torch.testing.assert_close(found, run(block, weights, inputs), rtol=1e-12, atol=1e-12)


def test_nothing_is_copied_for_a_rank() -> None:
    block = steps(FFNSpec(6, 12, "silu", gated=True, moe=MoE(4, 2)))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    own = share_of(weights, block, rank_steps(block, 3, Ranks(2, 2)), 1, 1)
    assert all(own[name].untyped_storage().data_ptr() == weights[name].untyped_storage().data_ptr() for name in own)
    assert torch.equal(own["down.weight"], weights["down.weight"][2:, :, 6:])
