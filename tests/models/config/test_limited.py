"""Limits that configs state per layer, for shared experts or by a unit's name, against transformers and by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP

from ffncli.block.activations import NO_LIMITS, Limits, hard_limits, limits_after
from ffncli.block.recipe import steps
from ffncli.block.steps import Activation, ffn_steps
from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.dimensions import Dimensions
from ffncli.models.source import load
from ffncli.run.activations.variants import _instead
from ffncli.run.engine.execute import run

# As public threads quote Step-3.5-Flash's and Ling-3.0-flash's configs, with fewer layers and smaller widths.
STEP = {
    "model_type": "step3p5", "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 5, "moe_num_experts": 6,
    "moe_top_k": 2, "moe_intermediate_size": 4, "share_expert_dim": 10, "moe_layers_enum": "1,3,4",
    "moe_router_activation": "sigmoid", "use_moe_router_bias": True, "norm_expert_weight": True,
    "moe_router_scaling_factor": 3.0, "hidden_act": "silu", "num_nextn_predict_layers": 1,
    "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 7.0, 0.0], "swiglu_limits_shared": [0.0, 0.0, 0.5, None, 16.0, 0.0],
}  # fmt: skip
LING = {
    "model_type": "bailing_hybrid", "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 4, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "hidden_act": "silu",
    "expert_swiglu_limit_list": [0, 0, 0, 4], "share_expert_swiglu_limit_list": [0, 0, 5.0, 7.0],
}  # fmt: skip
K3 = {
    "model_type": "kimi_linear", "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 2, "num_experts": 8,
    "num_experts_per_token": 2, "moe_intermediate_size": 4, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "hidden_act": "situ",
}  # fmt: skip


def specs(config, **changes):
    groups = from_config({**config, **changes}, "config.json", "config.json").model.groups
    by_layer = {i: group.spec for group in groups for i in group.layers}
    return [by_layer[i] for i in sorted(by_layer)]


def stated(config, **changes):
    return [(spec.limits, spec.shared_limits) for spec in specs(config, **changes)]


def test_step_limits_routed_and_shared_experts_layer_by_layer():
    assert [spec.moe is not None for spec in specs(STEP)] == [False, True, False, True, True]
    assert stated(STEP) == [
        (NO_LIMITS, None), (NO_LIMITS, NO_LIMITS), (limits_after(0.5), None), (limits_after(7.0), NO_LIMITS),
        (limits_after(7.0), limits_after(16.0)),
    ]  # fmt: skip
    assert {spec.moe.scale for spec in specs(STEP) if spec.moe} == {3.0}
    assert stated(STEP, swiglu_limits=None, swiglu_limits_shared=[])[4] == (NO_LIMITS, NO_LIMITS)


def test_a_dense_layer_of_step_is_transformers_own():
    config = Step3p7TextConfig(
        hidden_size=8, intermediate_size=20, num_hidden_layers=5, swiglu_limits_shared=[0.0, 0.0, 0.5, None, 16.0]
    )
    torch.manual_seed(0)
    block = ffn_steps(steps(specs(STEP)[2]))
    for layer, same in ((2, True), (1, False)):
        module = Step3p7MLP(config, layer).double()
        weights = {name.replace("_proj", ""): tensor for name, tensor in module.named_parameters()}
        x = 3 * torch.randn(9, 8, dtype=torch.float64)
        assert torch.allclose(run(block, weights, {"norm": x}), module(x), rtol=1e-12, atol=1e-12) == same


def test_ling_limits_experts_after_silu():
    assert stated(LING) == [
        (NO_LIMITS, None), (NO_LIMITS, NO_LIMITS), (NO_LIMITS, limits_after(5.0)),
        (limits_after(4.0), limits_after(7.0)),
    ]  # fmt: skip
    assert stated({k: v for k, v in LING.items() if "limit" not in k})[3] == (NO_LIMITS, NO_LIMITS)


def test_kimi_k3_states_its_soft_caps():
    assert stated(K3)[1] == (Limits(gate_cap=4.0, up_cap=25.0), None)
    beta = stated(K3, activation_situ_beta=2.0, activation_situ_linear_beta=9.0)
    assert beta == [(Limits(gate_cap=2.0, up_cap=9.0), None)] * 2
    assert stated(K3, activation_situ_linear_beta=None)[0][0] == Limits(gate_cap=4.0)
    both = stated(K3, activation_situ_beta=2.0, activation_situ_linear_beta=None)
    assert both[0][0] == Limits(gate_cap=2.0)
    with pytest.raises(FFNError, match=r"activation_situ_beta = 2\.0: not known"):
        stated({**K3, "hidden_act": "silu"}, activation_situ_beta=2.0)
    assert {spec.activation for spec in specs(K3)} == {"silu"}


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (STEP, {"swiglu_limits": [7.0]}, "swiglu_limits must be a list of 5 limits"),
        (STEP, {"swiglu_limits": 7.0}, "swiglu_limits must be a list of 5"),
        (STEP, {"swiglu_limits_shared": [0, 0, 0, 0, "16"]}, "swiglu_limits_shared must be a list"),
        (STEP, {"swiglu_limits": [0, 0, 0, 0, -7.0]}, "swiglu_limits must be"),
        (STEP, {"swiglu_limits": [0, 0, 0, 0, float("nan")]}, "swiglu_limits must be"),
        (STEP, {"swiglu_limits": [0, 0, 0, 0, True]}, "swiglu_limits must be"),
        (STEP, {"moe_layers_enum": "1,x"}, "moe_layers_enum must be layer numbers"),
        (STEP, {"moe_layers_enum": 3}, "moe_layers_enum must be layer numbers"),
        (STEP, {"moe_router_activation": "softmax"}, "moe_router_activation"),
        (STEP, {"swiglu_limit": 7.0}, "swiglu_limit"),
        (LING, {"expert_swiglu_limit_list": [4, 0, 0, 0]}, "expert_swiglu_limit_list[0] is not covered"),
        (LING, {"swiglu_limits": [4, 0, 0, 0]}, "swiglu_limits"),
        (K3, {"activation_situ_beta": 0}, "the soft cap of the gate must be positive"),
        (K3, {"activation_situ_beta": "4"}, "activation_situ_beta must be a number"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config, changes, words):
    with pytest.raises(FFNError) as error:
        specs(config, **changes)
    assert words in f"{error.value.message} {error.value.hint}"


def test_the_oracle_of_a_step_config_is_the_same_list():
    """The padding for the layers that predict further tokens is cut off there too."""
    config = Step3p7TextConfig(**{k: v for k, v in STEP.items() if k != "model_type"})
    assert config.mlp_layer_types == ["dense", "sparse", "dense", "sparse", "sparse"]
    assert config.swiglu_limits == [0.0, 0.0, 0.0, 7.0, 7.0]
    assert SimpleNamespace(**config.to_dict()).n_routed_experts == 6


def test_the_name_of_a_unit_replaces_a_models_limits_and_that_of_a_function_does_not():
    names = ("swiglu", "situ", "silu")
    given = {name: load("gpt-oss-20b", Dimensions(activation=name)).model.main.spec.limits for name in names}
    assert given == {"swiglu": NO_LIMITS, "situ": Limits(gate_cap=4.0, up_cap=25.0), "silu": hard_limits(7.0, 1.0)}


def test_a_soft_cap_is_left_out_with_a_function_that_has_no_linear_factor():
    x = torch.linspace(-3, 3, 13)
    found = _instead(Activation("silu", soft_cap=0.5, most=0.4), "gelu", {}, x)
    assert torch.equal(found, torch.nn.functional.gelu(x).clamp(max=0.4))
