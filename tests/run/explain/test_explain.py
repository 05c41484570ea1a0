"""How a number came about: each op's arithmetic against numpy and torch, and the end against the trace's own tensor."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.activations import Limits, hard_limits
from ffncli.block.recipe import FFNSpec, MoE, final_layer, steps
from ffncli.block.shard import shard
from ffncli.block.steps import OPS, block_inputs, id_inputs, state_inputs
from ffncli.errors import FFNError
from ffncli.run.engine.execute import Mode
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights
from ffncli.run.explain import explain as explain_module
from ffncli.run.explain.explain import explain
from ffncli.run.explain.scene import Scene, find, needed
from ffncli.run.measure.gap import exact_sum, ulp

SPECS = {
    "plain": FFNSpec(6, 10, "gelu", norm="layernorm", residual=True, residual_scale=0.5),
    "gated": FFNSpec(6, 10, "swiglu", norm="rmsnorm", norm_weight="one_plus", norm_position="branch", residual=True),
    "learned": FFNSpec(6, 10, "xielu", norm="rmsnorm", norm_position="branch"),
    "sub_norm": FFNSpec(6, 10, "relu2", gated=True, norm="layernorm", residual=True, sub_norm=True),
    "gpt_oss": FFNSpec(
        6, 10, "quick_gelu", gated=True, bias=True, limits=hard_limits(0.3, 1.0),
        moe=MoE(5, 2, order="choose_first", router_bias=True),
    ),
    "learned scale": FFNSpec(6, 10, "swiglu", learned_scale=True),
    "inkling": FFNSpec(
        6, 10, "swiglu", norm="rmsnorm", learned_scale=True,
        moe=MoE(5, 2, 2, score="sigmoid", correction=True, scale=8.0, shared_routed=True),
    ),
    "deepseek 4": FFNSpec(6, 10, "deepseek_v4", moe=MoE(8, 3, 1, score="sqrtsoftplus", scale=1.5, eps=0.1, lookup=20)),
    "phimoe": FFNSpec(6, 10, "swiglu", moe=MoE(8, 2, order="one_by_one", renormalise=False, threshold=0.8)),
    "deepseek": FFNSpec(
        6, 10, "swiglu",
        moe=MoE(
            8, 3, shared_experts=1, correction=True, score="sigmoid", scale=2.5, groups=4, top_groups=2, group_best=2
        ),
    ),
    "qwen": FFNSpec(6, 10, "swiglu", moe=MoE(4, 2, shared_experts=1, shared_gate=True, renormalise=False)),
    "llama4": FFNSpec(6, 10, "swiglu", moe=MoE(4, 1, score="sigmoid", weigh="input", renormalise=False)),
    "zaya": FFNSpec(
        6, 10, "swiglu",
        moe=MoE(4, 1, correction=True, renormalise=False, router_width=5, router_carries=True, skip_experts=2),
    ),
    "identities": FFNSpec(6, 10, "swiglu", moe=MoE(4, 3, identity_experts=3)),
    "latent": FFNSpec(
        6, 10, "swiglu", norm="rmsnorm", norm_weight="one_plus", norm_position="pre+branch", residual=True,
        post_norm_eps=1e-3, post_norm_weigh="input",
        moe=MoE(4, 2, latent=3, latent_norm=True, expert_norm=True, mixed_norm=True, mixed_bias=True),
    ),
}  # fmt: skip


def scene(spec: FFNSpec, dtype=torch.float32, leading=(2, 3), mode: Mode | None = None, **changed) -> Scene:
    """A traced block with everything kept, its learned numbers away from their initial values."""
    block = steps(spec)
    weights = dict(random_weights(block, torch.Generator().manual_seed(0), torch.float64))
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            continue
        weights[name] = (tensor + 0.1 * torch.randn(tensor.shape, generator=generator)).to(dtype)
    weights |= changed
    x = torch.randn(*leading, spec.d_model, generator=generator).to(dtype)
    ids = {name: torch.arange(x[..., 0].numel()).reshape(*leading, 1) for name in id_inputs(block)}
    states = {name: torch.randn(*leading, axis.size).to(dtype) for name, axis in state_inputs(block).items()}
    found = trace(block, weights, {"x": x, **ids, **states}, mode or Mode(), inside=None, keep=None)
    return Scene(block, weights, found.tensors, mode or Mode())


def pattern(value: float, dtype: torch.dtype) -> bytes:
    return torch.tensor([value], dtype=torch.float64).to(dtype).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_every_number_of_every_step_ends_with_the_traces_own(name, dtype):
    """And what float64 makes of the same numbers is it, but for the step's own rounding."""
    found = scene(SPECS[name], dtype)
    slack = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.05}[dtype]
    for step, tensor in found.tensors.items():
        if not tensor.is_floating_point():
            continue  # token ids
        rng = np.random.default_rng(len(step))
        size = tensor.double().abs().max().item()
        for _ in range(3):
            index = tuple(int(rng.integers(n)) for n in tensor.shape)
            (one,) = explain(found, step, index, most=2)
            assert struct.pack("<d", one.value) == struct.pack("<d", tensor[index].double().item())
            assert pattern(one.value, dtype) == tensor[index].reshape(1).view(torch.uint8).numpy().tobytes()
            loose = 3e-6 if step == "route" else slack  # its scores are float32 whatever the logits are
            assert abs(one.computed - one.value) <= max(slack, loose) * max(size, 1), (step, index)
            assert one.rounding == one.value - one.computed
            assert one.place == f"{step}[{','.join(map(str, index))}]"


def test_all_ops_are_explained():
    assert set(explain_module._ARMS) == set(OPS)


def test_a_dot_product_by_numpy():
    found = scene(FFNSpec(50, 7, "relu"), leading=(4,))
    x = found.tensors["x"].double().numpy()[2]
    w, b = found.weights["up.weight"].double().numpy()[5], found.weights["up.bias"].double().numpy()[5]
    (one,) = explain(found, "up", (2, 5), most=3)
    order = np.argsort(-np.abs(x * w))
    assert [t.factors[0].place for t in one.terms] == [f"x[2,{i}]" for i in order[:3]]
    assert [t.factors[1].place for t in one.terms] == [f"up.weight[5,{i}]" for i in order[:3]]
    assert [t.factors[1].symbol for t in one.terms] == [f"W1[{i},5]" for i in order[:3]]
    assert [t.value for t in one.terms] == [(x * w)[i] for i in order[:3]]
    assert (one.others, one.others_sum) == (47, math.fsum((x * w)[order[3:]]))
    (bias,) = one.quantities
    assert (bias.name, bias.place, bias.value) == ("b1[5]", "up.bias[5]", b)
    assert one.computed == math.fsum([*(x * w), b])
    assert one.origin == f"x[2,{order[0]}]"
    assert one.ulps == abs(one.rounding) / np.spacing(np.float32(abs(one.value)))


def test_an_activation_has_the_slope_that_torch_differentiates():
    for name, values in (("gelu", {}), ("silu", {}), ("xielu", {}), ("relu", {})):
        found = scene(FFNSpec(6, 10, name), torch.float64)
        x = found.tensors["up"][1, 2, 4].clone().requires_grad_()
        (one,) = explain(found, "act", (1, 2, 4))
        number = {q.name: q.value for q in one.quantities}
        learned = {n: found.weights[f"act.{n}"] for n in ("alpha_p", "alpha_n") if f"act.{n}" in found.weights}
        y = {
            "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "relu": torch.relu,
            "xielu": lambda v, p=learned: xielu(v, p),
        }[name](x)  # fmt: skip
        y.sum().backward()
        assert number["x"] == x.item()
        assert number[f"{name}(x)"] == pytest.approx(y.item(), rel=1e-12)
        assert number["slope there"] == pytest.approx(x.grad.item(), rel=1e-12)
        assert number[f"{name}(x) / x"] == pytest.approx(y.item() / x.item(), rel=1e-12)
        assert not values


@pytest.mark.parametrize("limits", [Limits(act_high=0.01, up_limit=0.2), Limits(gate_cap=0.5, up_cap=0.3)])
def test_limits_of_a_gate_and_of_up_are_shown_with_their_slopes(limits):
    found = scene(FFNSpec(6, 10, "silu", gated=True, limits=limits), torch.float64)
    reached = set()
    for step, source in (("act", "gate"), ("lift", "up")):
        for unit in range(10):
            x = found.tensors[source][1, 2, unit].clone().requires_grad_()
            (one,) = explain(found, step, (1, 2, unit))
            number = {q.name: q.value for q in one.quantities}
            if limits.act_high:
                y = torch.nn.functional.silu(x).clamp(max=0.01) if step == "act" else x.clamp(-0.2, 0.2)
            else:
                y = 0.5 * torch.tanh(x / 0.5) * torch.sigmoid(x) if step == "act" else 0.3 * torch.tanh(x / 0.3)
            y.backward()
            assert (one.computed, number["slope there"]) == pytest.approx((y.item(), x.grad.item()), rel=1e-12)
            reached |= {note.rpartition(":")[2] for note in one.notes}
            assert bool(one.notes) == (x.grad.item() == 0)
            if limits.gate_cap and step == "act":
                assert number["0.5 · tanh(x / 0.5) · sigmoid(x)"] == pytest.approx(y.item(), rel=1e-12)
    assert reached == ({" the slope is 0 there"} if limits.act_high else set())


def xielu(x, learned):
    """Huang & Schlag 2024, with transformers' softplus of both numbers and β = 1/2."""
    positive = torch.nn.functional.softplus(learned["alpha_p"]).reshape(())
    negative = 0.5 + torch.nn.functional.softplus(learned["alpha_n"]).reshape(())
    return torch.where(x > 0, positive * x * x + 0.5 * x, negative * (torch.expm1(x) - x) + 0.5 * x)


def test_a_clip_and_a_plus_are_shown():
    found = scene(SPECS["gpt_oss"])
    for name in found.tensors:
        if not name.endswith(".lift"):
            continue
        up = found.tensors[name.replace("lift", "up")]
        row, unit = (int(i) for i in up.abs().flatten().argmax().unsqueeze(0).expand(2))
        row, unit = row // up.shape[1], unit % up.shape[1]
        (one,) = explain(found, name, (row, unit))
        number = {q.name: q.value for q in one.quantities}
        value = up[row, unit].item()
        assert number["clipped x"] == pytest.approx(max(-0.3, min(0.3, value)), rel=1e-6)
        assert (number["plus"], number["slope there"]) == (1.0, 0.0 if abs(value) > 0.3 else 1.0)
        assert any("clipped" in note for note in one.notes) == (abs(value) > 0.3)


def test_norms_by_torch():
    plain = scene(FFNSpec(6, 10, norm="layernorm"), torch.float64)
    x = plain.tensors["x"][1, 0]
    (one,) = explain(plain, "norm", (1, 0, 3))
    number = {q.name: q.value for q in one.quantities}
    assert number["mean"] == pytest.approx(x.mean().item(), rel=1e-12)
    assert number["variance"] == pytest.approx(x.var(correction=0).item(), rel=1e-12)
    assert number["√(variance + eps)"] == pytest.approx(math.sqrt(x.var(correction=0).item() + 1e-5), rel=1e-12)
    expected = torch.layer_norm(x, (6,), plain.weights["norm.weight"], plain.weights["norm.bias"], 1e-5)[3]
    assert one.computed == pytest.approx(expected.item(), rel=1e-12)

    gemma = scene(FFNSpec(6, 10, norm="rmsnorm", norm_weight="one_plus", norm_eps=0.5), torch.float64)
    x, w = gemma.tensors["x"][1, 0].numpy(), gemma.weights["norm.weight"].numpy()
    (one,) = explain(gemma, "norm", (1, 0, 3))
    number = {q.name: q.value for q in one.quantities}
    assert number["mean square"] == pytest.approx((x * x).mean(), rel=1e-12)
    assert number["1 + weight"] == pytest.approx(1 + w[3], rel=1e-12)
    assert one.computed == pytest.approx(x[3] / np.sqrt((x * x).mean() + 0.5) * (1 + w[3]), rel=1e-12)
    at = int(np.argmax(np.abs(x)))
    assert one.notes[0].startswith(f"x[1,0,{at}] = ")
    assert f"{100 * x[at] ** 2 / (x * x).sum():.3g} %" in one.notes[0]


def test_a_scaled_sum_and_a_product():
    found = scene(SPECS["plain"])
    (one,) = explain(found, "out", (0, 1, 2))
    x, down = (found.tensors[n][0, 1, 2].item() for n in ("x", "down"))
    assert [[f.value for f in t.factors] for t in one.terms] == [[x], [0.5, down]]
    assert one.computed == x + 0.5 * down
    gated = scene(SPECS["gated"])
    (one,) = explain(gated, "hidden", (0, 1, 2))
    assert one.computed == gated.tensors["act"][0, 1, 2].item() * gated.tensors["up"][0, 1, 2].item()
    assert one.origin in ("act[0,1,2]", "up[0,1,2]")


def test_a_gate_of_one_number_per_token_is_read_at_its_only_feature():
    found = scene(SPECS["qwen"])
    narrow = {name for name, tensor in found.tensors.items() if tensor.shape[-1] == 1}
    mixed = next(s for s in found.steps if type(s.op).__name__ == "Multiply" and narrow & {*s.inputs})
    (one,) = explain(found, mixed.output, (1, 1, 4))
    features = {name: 0 if name in narrow else 4 for name in mixed.inputs}
    assert [f.place for f in one.terms[0].factors] == [f"{name}[1,1,{at}]" for name, at in features.items()]
    assert one.computed == math.prod(found.tensors[name][1, 1, at].item() for name, at in features.items())


def test_dropout_kept_dropped_and_in_eval():
    spec = FFNSpec(6, 10, "gelu", dropout=0.25)
    mask = torch.ones(2, 3, 10, dtype=torch.bool)
    mask[0, 0, 4] = False
    for masks in ({"dropout": mask}, {}):
        mode = Mode(True, masks, torch.Generator().manual_seed(3))
        found = scene(spec, mode=mode)
        kept = found.tensors["dropout"] != 0
        assert masks == {} or torch.equal(kept, mask)
        for keep, note in ((True, "kept, and scaled (p = 0.25)"), (False, "dropped")):
            index = tuple((kept == keep).nonzero()[0].tolist())
            (one,) = explain(found, "dropout", index)
            assert one.notes[0].startswith(note)
            expected = found.tensors["act"][index].item() / 0.75 if keep else 0.0
            assert one.computed == pytest.approx(expected, rel=1e-12)
    (one,) = explain(scene(spec), "dropout", (0, 0, 4))
    assert "eval mode" in one.notes[0]
    zero = scene(FFNSpec(6, 10, "relu", dropout=0.25), mode=Mode(True, {}, torch.Generator().manual_seed(3)))
    index = tuple((zero.tensors["act"] == 0).nonzero()[0].tolist())
    assert explain(zero, "dropout", index)[0].notes == ("x is zero: kept or dropped, it stays 0",)


def test_a_router_by_torch():
    found = scene(SPECS["deepseek"], torch.float64)
    logits, given_ = found.tensors["router"][1, 2], found.tensors["route"][1, 2]
    scores, corrected = logits.sigmoid(), logits.sigmoid() + found.weights["route.correction"]
    judged = corrected.reshape(4, 2).sum(-1)
    allowed = judged.topk(2).indices.tolist()
    best = sorted((e for e in range(8) if e // 2 in allowed), key=lambda e: -corrected[e])[:3]
    assert set(given_.nonzero().flatten().tolist()) == set(best)
    for expert in range(8):
        (one,) = explain(found, "route", (1, 2, expert))
        choices = {c.expert: c for c in one.experts}
        assert {e for e, c in choices.items() if c.chosen} == set(best)
        mine = choices[expert]
        assert mine.score == pytest.approx(scores[expert].item(), rel=1e-6)
        assert (mine.choice, mine.group) == (pytest.approx(corrected[expert].item(), rel=1e-6), expert // 2)
        expected = 2.5 * scores[expert] / scores[best].sum() if expert in best else torch.tensor(0.0)
        assert one.computed == pytest.approx(expected.item(), rel=1e-6)
        assert any("are left out" in note for note in one.notes) == (expert // 2 not in allowed)


def test_a_router_that_chooses_first_scores_the_chosen_alone():
    found = scene(SPECS["gpt_oss"], torch.float64)
    logits = found.tensors["router"][0, 0]
    best = logits.topk(2)
    (one,) = explain(found, "route", (0, 0, int(best.indices[1])))
    assert one.computed == pytest.approx(best.values.softmax(-1)[1].item(), rel=1e-6)
    other = next(e for e in range(5) if e not in best.indices)
    (one,) = explain(found, "route", (0, 0, other))
    assert (one.computed, one.value, one.experts[-1].score) == (0.0, 0.0, None)


@pytest.mark.parametrize("name", ["deepseek", "llama4", "identities"])
def test_experts_mix_what_each_of_them_makes(name):
    found = scene(SPECS[name], torch.float64)
    x = found.tensors["x"].flatten(0, -2)
    for token in range(6):
        (one,) = explain(found, "experts", (*divmod(token, 3), 2))
        total = 0.0
        for e in found.tensors["route"].flatten(0, -2)[token].nonzero().flatten().tolist():
            share = found.tensors["route"].flatten(0, -2)[token, e]
            if e >= 4 and name == "identities":
                total += (share * x[token, 2]).item()
                continue
            w = {n: found.weights[f"{n}.weight"][e] for n in ("gate", "up", "down")}
            entry = x[token] * share if name == "llama4" else x[token]
            out = w["down"] @ (torch.nn.functional.silu(w["gate"] @ entry) * (w["up"] @ entry))
            total += (out[2] * (1 if name == "llama4" else share)).item()
        assert one.computed == pytest.approx(total, rel=1e-10)
        assert [abs(t.value) for t in one.terms] == sorted((abs(t.value) for t in one.terms), reverse=True)


def test_inside_an_expert_rows_are_its_tokens():
    found = scene(SPECS["llama4"])
    route = found.tensors["route"].flatten(0, -2)
    expert = int((route != 0).sum(0).argmax())
    tokens = route[:, expert].nonzero().flatten().tolist()
    name = f"experts.{expert}.gate"
    (one,) = explain(found, name, (-1, 3))
    assert (len(tokens) > 1, one.token) == (True, tokens[-1])
    lead = divmod(tokens[-1], 3)
    assert one.terms[0].factors[0].place.startswith(f"route[{lead[0]},{lead[1]},{expert}] · x[{lead[0]},{lead[1]},")
    assert one.terms[0].factors[1].place.startswith(f"gate.weight[{expert},3,")
    assert one.formula == "x · W1"
    assert one.origin.startswith(f"x[{lead[0]},{lead[1]},")


def test_a_sum_over_ranks():
    block = shard(steps(FFNSpec(4, 8)), 0, 2)
    weights = random_weights(block, torch.Generator().manual_seed(0))
    mode = Mode(reduce=lambda tensor: tensor + 2)
    tensors = trace(block, weights, {"x": torch.ones(1, 4)}, mode, keep=None).tensors
    (one,) = explain(Scene(block, weights, tensors, mode), "down.sum", (0, 1))
    assert one.quantities[1].value == pytest.approx(2, rel=1e-6)
    assert one.value == tensors["down.sum"][0, 1].item()


def test_depth_follows_the_largest_term_to_the_input():
    found = scene(SPECS["gated"])
    chain = explain(found, "out", (0, 0, 1), depth=20)
    assert chain[0].place == "out[0,0,1]"
    assert [one.origin for one in chain[:-1]] == [one.place for one in chain[1:]]
    assert (chain[-1].op, chain[-1].origin) == ("input", None)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_needed_is_enough(name):
    """A trace that keeps only what `needed` names says the same as one that keeps everything."""
    whole = scene(SPECS[name])
    for step in (n for n, t in whole.tensors.items() if t.numel()):
        index = (0,) * whole.tensors[step].dim()
        for depth in (1, 3):
            keep = needed(whole.steps, [step], depth)
            x = {name: whole.tensors[name] for name in block_inputs(whole.steps)}
            tensors = trace(whole.steps, whole.weights, x, keep=keep).tensors
            assert set(tensors) <= keep
            part = Scene(whole.steps, whole.weights, tensors)
            assert explain(part, step, index, depth=depth) == explain(whole, step, index, depth=depth)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(bad):
    block = steps(FFNSpec(4, 8, "gelu", norm="layernorm"))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.tensor([[1.0, bad, 0.0, 2.0]])
    tensors = trace(block, weights, {"x": x}, keep=None).tensors
    for step in tensors:
        (one,) = explain(Scene(block, weights, tensors), step, (0, 1))
        assert one.value == tensors[step][0, 1].item() or math.isnan(one.value)


def test_the_worst_term_of_a_nan_is_the_nan():
    block = steps(FFNSpec(4, 8, "relu"))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    tensors = trace(block, weights, {"x": torch.tensor([[1.0, 2.0, math.nan, 2.0]])}, keep=None).tensors
    (one,) = explain(Scene(block, weights, tensors), "up", (0, 1), most=1)
    assert (one.terms[0].factors[0].place, one.rounding) == ("x[0,2]", 0.0)


@pytest.mark.parametrize(
    ("name", "index", "words"),
    [
        ("up", (0, 0, 10), "10 is out of range, up has shape [2, 3, 10]"),
        ("up", (0, -4, 1), "-4 is out of range"),
        ("up", (5,), "needs 3 indices, not 1; such as up[0,0,0]"),
        ("upp", (0,), "no step 'upp'; did you mean 'up'?"),
        ("experts.0.up", (0,), "no step 'experts.0.up'"),
    ],
)
def test_places_that_are_not_there(name, index, words):
    with pytest.raises(FFNError) as error:
        explain(scene(SPECS["plain"]), name, index)
    assert words in str(error.value)


def test_experts_that_are_not_there():
    found = scene(FFNSpec(6, 10, "swiglu", moe=MoE(64, 1)), leading=(1,))
    with pytest.raises(FFNError, match="no expert 64; experts has experts 0 to 63"):
        find(found.steps, "experts.64.up")
    idle = next(e for e in range(64) if not found.tensors["route"][0, e])
    with pytest.raises(FFNError, match=f"no token is routed to expert {idle}"):
        explain(found, f"experts.{idle}.up", (0, 0))
    with pytest.raises(FFNError, match=r"did you mean 'experts\.3\.gate'"):
        find(found.steps, "experts.3.gaet")
    with pytest.raises(FFNError, match=r"did you mean 'experts\.0\.gate'"):
        find(found.steps, "gate")


@given(st.floats(-(2.0**127), 2.0**127, width=32))  # above the largest there is no next number
def test_an_ulp_is_numpys_spacing(value):
    assert ulp(value, torch.float32) == np.spacing(np.float32(abs(value)))
    assert ulp(value, torch.float64) == np.spacing(abs(value))
    assert ulp(value, torch.float16) == 2.0 ** max(math.floor(math.log2(max(abs(value), 2**-14))) - 10, -24)


def test_ulps_of_bfloat16():
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    after = torch.nextafter(one, torch.tensor(2.0, dtype=torch.bfloat16))
    assert ulp(1.0, torch.bfloat16) == (after - one).item()
    assert math.isnan(ulp(math.inf, torch.float32))


def test_sums():
    assert exact_sum([1e16, 1.0, -1e16]) == 1.0
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert exact_sum([1e308, 1e308]) == math.inf


def test_a_softmax_over_all_lists_the_largest_and_the_one_asked_for():
    final = final_layer("x", 6, 50, bias=True)
    weights = random_weights(final, torch.Generator().manual_seed(0))
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(5))
    found = Scene(final, weights, trace(final, weights, {"x": x}, keep=None).tensors)
    probs = found.tensors["probs"][0]
    (made,) = explain(found, "probs", (0, 7), most=3)
    best = probs.argsort(descending=True)[:3].tolist()
    assert [choice.expert for choice in made.experts] == [*best, *([] if 7 in best else [7])]
    assert made.value == probs[7].item()
    assert made.computed == pytest.approx(found.tensors["logits"][0].double().softmax(-1)[7].item(), rel=1e-12)
    assert made.notes == (f"number {int((probs > probs[7]).sum()) + 1} of 50 by score",)
