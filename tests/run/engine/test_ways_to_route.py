"""Ways to choose experts that are no best of k: token by token in plain Python, and as transformers computes them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ffncli.bench.records import Case
from ffncli.bench.referee.prescribed_routing import PrescribedRouting
from ffncli.block.cost import cost, step_costs
from ffncli.block.dtypes import dtype
from ffncli.block.recipe import FFNSpec, MoE, route_of, steps
from ffncli.block.steps import (
    ONE,
    Axis,
    Experts,
    Multiply,
    Route,
    block_inputs,
    id_inputs,
    input_shapes,
    parameters,
    shapes,
    state_inputs,
    tables,
)
from ffncli.block.symbols import right_hand_side
from ffncli.block.traffic import experts_touched, traffic
from ffncli.errors import FFNError
from ffncli.kernels.dense import places
from ffncli.kernels.routing import choice
from ffncli.models.config.read import from_config
from ffncli.models.model import block_model
from ffncli.run.engine.execute import execute, route, run
from ffncli.run.engine.prepare import prepare
from ffncli.run.engine.reference import in_float64, steady_tokens
from ffncli.run.engine.weights import random_weights
from ffncli.run.trace.routing import chosen_experts, routing_of

E8 = Axis("experts", 8)
INKLING = FFNSpec(
    6, 10, "swiglu", learned_scale=True,
    moe=MoE(5, 2, 3, score="sigmoid", correction=True, scale=8.0, shared_routed=True, score_dtype="input"),
)  # fmt: skip
TABLED = FFNSpec(6, 10, "swiglu", moe=MoE(8, 3, 1, score="sqrtsoftplus", scale=1.5, eps=1e-20, lookup=20))


def logits_of(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(chosen: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    return torch.zeros(len(chosen), size, dtype=weights.dtype).scatter_add(-1, chosen, weights)


def both(op: Route, params: dict[str, torch.Tensor], logits: torch.Tensor, ids: torch.Tensor | None = None):
    """The reference's weights, after the kernels' own were found to be the same."""
    found = route(op, params, logits, ids)
    ours, weights = choice(op, places(params), logits.dtype)(logits, (*params.values(), None), ids)
    assert torch.allclose(dense(ours, weights, op.experts.size), found, atol=1e-14)
    return found


def test_a_table_chooses_and_the_scores_weigh():
    op = Route(E8, 3, score="sqrtsoftplus", scale=1.5, eps=0.25, score_dtype="input", lookup=Axis("vocab", 10))
    logits, ids = logits_of(6, 8), torch.tensor([[3], [9], [0], [3], [1], [9]])
    table = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(n))[:3] for n in range(10)])
    found = both(op, {"lookup": table}, logits, ids)
    for token in range(6):
        listed = table[int(ids[token])].tolist()
        scores = {e: math.sqrt(math.log1p(math.exp(logits[token, e]))) for e in listed}
        for e in range(8):
            expected = 1.5 * scores[e] / (sum(scores.values()) + 0.25) if e in listed else 0.0
            assert found[token, e].item() == pytest.approx(expected, rel=1e-13)


def test_an_expert_that_a_table_lists_twice_counts_twice():
    op = Route(E8, 2, score="sigmoid", score_dtype="input", lookup=Axis("vocab", 2))
    found = both(op, {"lookup": torch.tensor([[4, 4], [1, 4]])}, logits_of(1, 8), torch.tensor([[0]]))
    assert found[0, 4].item() == pytest.approx(1.0)


def test_shared_experts_share_in_the_sum():
    op = Route(Axis("experts", 7), 2, score="sigmoid", correction=True, scale=8.0, score_dtype="input", always=2,
               learned_scale=True)  # fmt: skip
    logits, correction = logits_of(9, 7), torch.linspace(-0.5, 0.5, 5, dtype=torch.float64)
    found = both(op, {"correction": correction, "factor": torch.tensor([0.75], dtype=torch.float64)}, logits)
    for row, made in zip(logits.tolist(), found.tolist(), strict=True):
        scores = [1 / (1 + math.exp(-logit)) for logit in row]
        chosen = sorted(range(5), key=lambda e: scores[e] + correction[e].item())[-2:]
        total = sum(scores[e] for e in (*chosen, 5, 6))
        expected = [8 * 0.75 * scores[e] / total if e in (*chosen, 5, 6) else 0.0 for e in range(7)]
        assert made == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("threshold", [0.02, 0.5, 1.5])
@pytest.mark.parametrize("shift", [0.0, -5.0])  # where every logit is negative, the largest |logit| bounds
def test_one_choice_at_a_time_is_phimoes(threshold, shift):
    code = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    logits = logits_of(200, 8) + shift
    op = Route(E8, 2, order="one_by_one", renormalise=False, score_dtype="input", threshold=threshold)
    weights, chosen = code.sparsemixer(logits, jitter_eps=threshold / 2, training=False)
    found = both(op, {}, logits)
    assert torch.allclose(found, dense(chosen, weights, 8), atol=1e-15)
    assert threshold < 0.5 or (found[found != 0] < 0.999).any()


@pytest.mark.parametrize("shift", [0.0, -0.6])  # with -0.6 most corrected scores of the best groups are below 0
def test_experts_outside_the_best_groups_of_axk2_have_the_score_0(shift):
    code = pytest.importorskip("transformers.models.axk2.modeling_axk2")
    config = code.AXK2Config(hidden_size=8, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2)
    router = code.AXK2TopkRouter(config)
    correction = 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(2)) + shift
    router.weight.data, router.e_score_correction_bias = torch.eye(8), correction
    logits = logits_of(200, 8).float()
    _, weights, chosen = router(logits)
    spec = from_config({**config.to_dict(), "num_hidden_layers": 2}, "c", "c").model.groups[-1].spec
    op, params = route_of(spec), {"correction": correction}
    found = both(op, params, logits)
    assert torch.allclose(found, dense(chosen, weights, 8), atol=1e-6)
    left_out = route(replace(op, zero_outside=False), params, logits)
    assert torch.allclose(found, left_out) == (not shift)
    assert "2 of 4 groups, 0 for the others" in op.formula(["router"], str)


def test_formulas_say_how_experts_are_chosen():
    def printed(spec: FFNSpec) -> str:
        block = steps(spec)
        return next(right_hand_side(step, block) for step in block if isinstance(step.op, Route))

    assert printed(TABLED) == "1.5 · normalise(sqrtsoftplus(router)[lookup_route[token_ids]], sum + 1e-20)"
    assert printed(INKLING) == "8 · s_route · normalise(top2(sigmoid(router) | + b_route) and the last 3)"
    phimoe = MoE(8, 2, order="one_by_one", renormalise=False, threshold=0.02)
    assert printed(FFNSpec(6, 10, "swiglu", moe=phimoe)) == (
        "top2(softmax(router) | one by one, of logits within 2 % of the best)"
    )
    by = {step.output: right_hand_side(step, steps(INKLING)) for step in steps(INKLING)}
    assert by["shared"] == "Σ route[e] · expert_e(x), the last 3 of route"
    scaled = steps(FFNSpec(6, 10, "swiglu", learned_scale=True))
    assert (scaled[-1].op, right_hand_side(scaled[-1], scaled)) == (Multiply(learned=ONE), "s_scaled ⊙ down")


def test_shared_experts_in_the_route_by_hand():
    """Σ over the chosen and all the shared ones, each with its own weights: a loop over tokens."""
    block, generator = steps(INKLING), torch.Generator().manual_seed(3)
    weights = random_weights(block, generator, torch.float64) | {"route.factor": torch.tensor([0.3]).double()}
    x = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    events = {event.name: event.tensor for event in execute(block, weights, {"x": x})}

    def expert(at: str, e: int, token: torch.Tensor) -> torch.Tensor:
        gate, up, down = (weights[f"{at}{name}.weight"][e] for name in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ token) * (up @ token))

    for t in range(7):
        share = events["route"][t]
        routed = sum(share[e] * expert("", e, x[t]) for e in range(5) if share[e])
        shared = sum(share[5 + e] * expert("shared.", e, x[t]) for e in range(3))
        assert torch.allclose(events["moe"][t], routed + shared, rtol=1e-12)
        assert int((share != 0).sum()) == 5
    assert torch.allclose(in_float64(block, weights, {"x": x})[0], events["moe"], rtol=1e-13)
    assert {f"shared.{e}.gate" for e in range(3)} <= set(events)
    load = routing_of(block, events)
    assert load is not None
    assert (load.choices, len(load.tokens_per_expert), load.identity_choices) == (14, 5, 0)
    assert all(max(one.experts) < 5 and len(one.experts) == 2 for one in chosen_experts(block, events))


def test_token_ids_are_an_input_and_a_table_is_no_parameter():
    block = steps(TABLED)
    assert input_shapes(block, (2, 3)) == {"x": (2, 3, 6), "token_ids": (2, 3, 1)}
    assert (dict(id_inputs(block)), list(tables(block))) == ({"token_ids": 20}, ["route.lookup"])
    assert "route.lookup" not in parameters(block)
    plain = replace(TABLED, moe=replace(TABLED.moe, lookup=None))
    assert cost(block, 4) == cost(steps(plain), 4)  # a lookup costs nothing, and the table counts nowhere
    weights = random_weights(block, torch.Generator().manual_seed(0))
    table = weights["route.lookup"]
    assert (table.dtype, tuple(table.shape)) == (torch.int64, (20, 3))
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in table.tolist())
    with pytest.raises(FFNError, match="one = 1 values per token"):
        step_costs(block, {"x": (4, 6), "token_ids": (4, 2)})


def test_the_same_token_goes_to_the_same_experts_whatever_rounding_does():
    block = steps(TABLED)
    weights = random_weights(block, torch.Generator().manual_seed(0))
    inputs = {"x": torch.randn(6, 6), "token_ids": torch.tensor([[3], [19], [3], [0], [19], [3]])}
    share = next(e.tensor for e in execute(block, weights, inputs) if e.name == "route")
    for token, (one,) in enumerate(inputs["token_ids"].tolist()):
        assert set(share[token].nonzero().flatten().tolist()) == set(weights["route.lookup"][one].tolist())
    same, remark = steady_tokens(block, weights, inputs, torch.float32)
    assert (bool(same.all()), remark) == (True, "")
    reference, _ = in_float64(block, weights, inputs)
    assert torch.allclose(run(block, weights, inputs).double(), reference, rtol=1e-4, atol=1e-6)


def test_costs_of_shared_experts_in_the_route():
    d, d_ff, tokens = 6, 10, 7
    expert, rows = 3 * d * d_ff, 8 * d
    found = cost(steps(INKLING), tokens)
    assert found.params == 8 * expert + rows + 5 + 1  # the correction is of the routed ones, one number scales all
    assert found.params_active == 5 * expert + rows + 5 + 1
    assert found.matmul_flops == tokens * 2 * (5 * expert + rows)
    by = step_costs(steps(INKLING), input_shapes(steps(INKLING), (tokens,)))
    assert by["route"].elementwise_flops == tokens * (8 + 5 + 5 * 3)  # scores, correction; sum, scale, factor
    one_by_one = steps(FFNSpec(d, d_ff, "swiglu", moe=MoE(8, 2, order="one_by_one", renormalise=False, threshold=0.1)))
    assert step_costs(one_by_one, {"x": (tokens, d)})["route"].elementwise_flops == tokens * 2 * 8
    dense_block = steps(FFNSpec(d, d_ff, "swiglu", learned_scale=True))
    scaled = step_costs(dense_block, {"x": (tokens, d)})["scaled"]
    assert (scaled.params, scaled.elementwise_flops) == (1, tokens * d)


def test_every_shared_expert_is_read_however_few_the_tokens():
    fp32, expert = dtype("fp32"), 3 * 6 * 10
    read = traffic(steps(INKLING), fp32, fp32, tokens=2).weight_bytes_read
    touched = experts_touched(5, 2, 2)
    assert read == 4 * (3 * expert + 8 * 6 + 5 + 1) + sum(round(4 * 60 * touched) for _ in range(3))
    one = traffic(steps(INKLING), fp32, fp32, tokens=2, touched=1.0).weight_bytes_read
    assert one == 4 * (3 * expert + 8 * 6 + 5 + 1) + 4 * expert
    assert not any(isinstance(s.op, Experts) and s.op.always for s in steps(TABLED))


@pytest.mark.parametrize("moe", [
    {"shared_routed": True}, {"shared_experts": 1, "shared_routed": True, "shared_d_ff": 3},
    {"shared_experts": 1, "shared_routed": True, "shared_gate": True}, {"lookup": 9, "correction": True},
    {"lookup": 9, "order": "choose_first"}, {"lookup": 9, "groups": 2, "top_groups": 2}, {"lookup": 0},
    {"order": "one_by_one", "shared_experts": 1, "shared_routed": True}, {"order": "one_by_one", "identity_experts": 2},
    {"router_width": 0}, {"skip_experts": 1, "identity_experts": 1}, {"skip_experts": 1, "groups": 2, "top_groups": 2},
])  # fmt: skip
def test_choices_that_exclude_each_other_are_refused(moe):
    with pytest.raises(FFNError):
        FFNSpec(6, 10, "swiglu", moe=MoE(8, 2, **moe))


def test_routing_is_prescribed_for_the_routed_experts_alone():
    spec = replace(INKLING, d_model=32)
    block = steps(spec)
    weights = random_weights(block, torch.Generator().manual_seed(0))
    case = Case("s", "s", spec, 40, routing="uniform")
    prescribed = PrescribedRouting(case, block, weights)
    wanted = prescribed.draw(40, torch.Generator().manual_seed(1))
    assert (tuple(wanted.shape), wanted.sum(0).tolist()) == ((40, 5), [16] * 5)
    x = prescribed.entered(torch.randn(40, 32), wanted)
    assert torch.equal(prescribed.chosen(x), wanted)
    with pytest.raises(FFNError, match="table of token ids"):
        PrescribedRouting(replace(case, spec=TABLED), steps(TABLED), random_weights(steps(TABLED), torch.Generator()))


D, F, E, R = 12, 10, 5, 6
MOE = MoE(E, 1, correction=True, renormalise=False, score_dtype="input", router_width=R, router_carries=True,
          skip_experts=1)  # fmt: skip
SPEC = FFNSpec(D, F, "swiglu", bias=False, norm_eps=1e-5, moe=MOE)
STATE = "previous_router_state"
NAMES = {
    "router_in.weight": "gate.down_proj.weight", "router_in.bias": "gate.down_proj.bias",
    "router_carried.factor": "gate.router_states_scale", "router_norm.weight": "gate.router_mlp.norm.weight",
    "router_fc1.weight": "gate.router_mlp.fc1.weight", "router_fc1.bias": "gate.router_mlp.fc1.bias",
    "router_fc2.weight": "gate.router_mlp.fc2.weight", "router_fc2.bias": "gate.router_mlp.fc2.bias",
    "router.weight": "gate.router_mlp.out_proj.weight", "route.correction": "gate.balancing_biases",
    "down.weight": "experts.down_proj",
}  # fmt: skip


def module(spec: FFNSpec) -> nn.Module:
    """ZAYA's own, with numbers large enough that tokens go to different experts, and some are skipped."""
    code = pytest.importorskip("transformers.models.zaya.modeling_zaya")
    config = code.ZayaConfig(hidden_size=D, moe_intermediate_size=F, num_experts=E, router_hidden_size=R,
                             num_hidden_layers=2)  # fmt: skip
    config._experts_implementation = "eager"
    made: nn.Module = code.ZayaSparseMoeBlock(config, int(spec.moe is not None and spec.moe.router_carries))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            scale = 0.1 if "biases" in name else 1.0
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
        made.gate.balancing_biases[-1] = 0.2
    return made.eval()


def weights_of(made: nn.Module, spec: FFNSpec) -> dict[str, Tensor]:
    there = made.state_dict()
    gate, up = there["experts.gate_up_proj"].chunk(2, -2)
    known = {ours: there[theirs] for ours, theirs in NAMES.items() if theirs in there}
    found = {**known, "gate.weight": gate, "up.weight": up}
    return {name: found[name] for name in parameters(steps(spec))}


@pytest.mark.parametrize("carries", [True, False])
def test_it_is_zayas_own_module(carries):
    spec = replace(SPEC, moe=replace(MOE, router_carries=carries))
    made, generator = module(spec), torch.Generator().manual_seed(1)
    x, state = torch.randn(1, 60, D, generator=generator), torch.randn(1, 60, R, generator=generator)
    weights, block = weights_of(made, spec), steps(spec)
    with torch.no_grad():
        theirs, passed_on = made(x, state)
        inputs = {"x": x, **({STATE: state} if carries else {})}
        found = {event.name: event.tensor for event in execute(block, weights, inputs)}
        assert (found["experts"] - theirs).abs().max() <= 1e-6 * theirs.abs().max()
        assert torch.allclose(found["router_state" if carries else "router_in"], passed_on, atol=1e-6)
        skipped = (found["route"][0, :, E] != 0).sum().item()
        assert 0 < skipped < 40  # these get nothing
        assert int((theirs[0] == 0).all(-1).sum()) == skipped
        if carries:
            assert not torch.allclose(run(block, weights, inputs | {STATE: -state}), found["experts"])
        load = routing_of(block, found)
        assert load is not None
        assert load.choices == 60 - skipped
        assert len(load.tokens_per_expert) - len(load.idle_experts) > 1
        made.double()
        made.gate.router_mlp.norm = nn.RMSNorm(R, 1e-5).double()  # ZAYA's computes in float32
        made.gate.router_mlp.norm.weight.copy_(weights["router_norm.weight"])
        exact, _ = made(x.double(), state.double())
        wide = {name: tensor.double() for name, tensor in weights.items()}
        ours = run(block, wide, {name: tensor.double() for name, tensor in inputs.items()})
        assert (ours - exact).abs().max() <= 1e-12 * exact.abs().max()


def test_costs_by_hand():
    block, tokens = steps(SPEC), 7
    router = (
        D * R + R + R + 2 * (R * R + R) + R * (E + 1) + E + 1
    )  # in, state's factors, two layers, logits, correction
    found = cost(block, tokens)
    assert found.params == router + 3 * D * F * E
    assert (found.params_active, found.norm_params) == (router + 3 * D * F, R)
    assert found.matmul_flops == tokens * 2 * (D * R + 2 * R * R + R * (E + 1) + 3 * D * F)


def test_the_state_is_an_input_as_wide_as_the_router():
    block = steps(SPEC)
    assert block_inputs(block) == ("x", STATE)
    assert input_shapes(block, (2, 3)) == {"x": (2, 3, D), STATE: (2, 3, R)}
    assert {name: axis.size for name, axis in state_inputs(block).items()} == {STATE: R}
    assert not state_inputs(steps(FFNSpec(D, F, "swiglu", learned_scale=True)))
    with pytest.raises(FFNError, match="Multiply expects router = 6"):
        shapes(block, {"x": (3, D), STATE: (3, D)})


def test_without_a_prompt_the_state_is_random_and_noted():
    ready = prepare(block_model(SPEC, "zaya"), leading=(3,))
    assert ready.inputs[STATE].shape == (3, R)
    assert ready.notes == (f"'{STATE}', the output of the router in the previous layer, is random",)
