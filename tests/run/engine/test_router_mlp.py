"""A router that is an MLP, beside ZAYA's own module: its state, its skipped tokens, its costs, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs, input_shapes, parameters, shapes, state_inputs
from ffncli.errors import FFNError
from ffncli.models.model import block_model
from ffncli.run.engine.execute import execute, run
from ffncli.run.engine.prepare import prepare
from ffncli.run.trace.routing import routing_of

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
    assert ready.notes == (f"'{STATE}', the output of the router in the layer before, is random",)


@pytest.mark.parametrize("moe", [
    {"router_width": 0}, {"skip_experts": 1, "identity_experts": 1}, {"skip_experts": 1, "groups": 2, "top_groups": 2},
])  # fmt: skip
def test_what_it_cannot_be_combined_with(moe):
    with pytest.raises(FFNError):
        FFNSpec(6, 10, "swiglu", moe=MoE(8, 2, **moe))
