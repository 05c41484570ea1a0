"""Mixtures' rows: routers, lists and limits per layer, against published numbers and transformers; what is refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP

from ffncli.block.activations import NO_LIMITS, Limits, hard_limits, limits_after
from ffncli.block.recipe import steps
from ffncli.block.steps import Activation, ffn_steps
from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.dimensions import Dimensions
from ffncli.models.source import load
from ffncli.run.activations.on_data import _instead
from ffncli.run.engine.execute import run
from ffncli.run.engine.prepare import prepare
from tests.oracles.architectures import config_fields
from tests.oracles.architectures.tiny import tiny
from tests.oracles.checkpoints import refusal

TINY = {
    "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20,
}  # fmt: skip
WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
DEEPSEEK = {**TINY, "num_hidden_layers": 5, "n_group": 2, "topk_group": 1}
LLAMA4 = {**TINY, "intermediate_size_mlp": 44}
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 12, "n_routed_experts": 8}
FFN = {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 2}
DBRX = {"d_model": 16, "n_layers": 2}


def known(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """Without the widths that the model_type's config does not have: they would be refused."""
    names = config_fields(CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else set(values)
    return {name: value for name, value in values.items() if name in names or name not in WIDTHS}


def routed(model_type: str, **values: Any) -> list[int]:
    """The layers that have experts."""
    groups = from_config({"model_type": model_type, **known(model_type, values)}, "c", "c").model.groups
    return sorted(i for g in groups for i in g.layers if g.spec.moe)


def moe(model_type: str, **values: Any) -> Any:
    """The routing of the first layers that have one."""
    groups = from_config({"model_type": model_type, **known(model_type, values)}, "c", "c").model.groups
    return next(g.spec.moe for g in groups if g.spec.moe)


@pytest.mark.parametrize(
    ("model_type", "values", "layers"),
    [
        ("axk1", {**DEEPSEEK}, [1, 2, 3, 4]),
        ("axk1", {**DEEPSEEK, "first_k_dense_replace": 0, "moe_layer_freq": 2}, [0, 2, 4]),
        ("dots3_note_text", {**DEEPSEEK, "num_key_value_heads": 4, "moe_layer_freq": [0, 0, 1, 0, 1]}, [2, 4]),
        ("deepseek_v32", {**DEEPSEEK, "mlp_layer_types": ["sparse", "dense", "dense", "sparse", "dense"]}, [0, 3]),
        ("flint", {**TINY}, [2, 3]),
        ("flint", {**TINY, "mlp_only_layers": []}, [0, 1, 2, 3]),
        ("ernie4_5_moe", {**TINY, "moe_layer_end_index": 2}, [1, 2]),
        ("ernie4_5_moe", {**TINY, "moe_layer_interval": 2}, [1, 3]),
        ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2}, [1, 3]),
        ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2, "moe_layers": [0]}, [0]),
    ],
)
def test_which_layers_have_experts(model_type: str, values: dict[str, Any], layers: list[int]) -> None:
    assert routed(model_type, **values) == layers
    theirs = AutoConfig.for_model(model_type, **values)
    if hasattr(theirs, "mlp_layer_types"):
        assert [i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"] == layers
    if hasattr(theirs, "moe_layers"):
        assert theirs.moe_layers == layers


def test_null_is_not_absent_where_the_code_asks() -> None:
    assert moe("dbrx", **DBRX, ffn_config=FFN).renormalise is True
    assert moe("dbrx", **DBRX, ffn_config={**FFN, "moe_normalize_expert_weights": None}).renormalise is False
    assert moe("longcat_flash", hidden_size=16, moe_topk=2, **LONGCAT).identity_experts == 256
    assert moe("longcat_flash", hidden_size=16, moe_topk=2, **LONGCAT, zero_expert_num=None).identity_experts == 0


def test_a_list_with_one_top_k_per_layer() -> None:
    values = {k: v for k, v in TINY.items() if k != "num_experts_per_tok"}
    assert moe("hunyuan_v1_moe", **values, moe_topk=[3, 3, 3, 3]).top_k == 3
    with pytest.raises(FFNError, match=r"moe_topk must be one number for all layers, got \[3, 2, 3, 3\]"):
        moe("hunyuan_v1_moe", **values, moe_topk=[3, 2, 3, 3])


def test_cohere_2_takes_the_mean_of_experts_and_shared_ones() -> None:
    mean = moe("cohere2_moe", **TINY, num_shared_experts=1)
    whole = moe("cohere2_moe", **TINY, num_shared_experts=1, shared_expert_combination_strategy="sum")
    assert (mean.scale, mean.shared_scale, whole.scale, whole.shared_scale) == (0.5, 0.5, 1.0, 1.0)
    assert moe("cohere2_moe", **TINY).scale == 1.0


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("deepseek_v2", {**DEEPSEEK, "mlp_bias": True}, "mlp_bias = true is not covered"),
        ("ernie4_5_moe", {**TINY, "use_bias": True}, "use_bias = true is not covered"),
        ("aria_text", {**TINY, "hidden_act": "gelu"}, "hidden_act = 'gelu' is not covered"),
        ("kolibri1", {**TINY, "norm_topk_prob": True}, "norm_topk_prob = true is not covered"),
        ("laguna", {**TINY, "moe_router_logit_softcapping": 30.0}, "softcapping = 30.0 is not covered"),
        ("cohere2_moe", {**TINY, "expert_selection_fn": "entmax"}, "expert_selection_fn = 'entmax'"),
        ("cohere2_moe", {**TINY, "shared_expert_combination_strategy": "max"}, "strategy = 'max'"),
        ("dbrx", {**DBRX, "ffn_config": {**FFN, "moe_normalize_expert_weights": 2.0}}, "weights = 2.0"),
        ("dbrx", {**DBRX, "ffn_config": []}, r"ffn_config\.ffn_hidden_size is missing"),
        ("longcat_flash", {"hidden_size": 16, "moe_topk": 2, **LONGCAT, "router_bias": True}, "router_bias = true"),
        (
            "minimax_m3_vl_text",
            {**TINY, "shared_intermediate_size": 24, "swiglu_alpha": 2.0},
            "swiglu_alpha = 2.0 is not covered",
        ),
        ("mellum", {**TINY, "mlp_layer_types": ["sparse"]}, "must be a list of 4 out of dense, sparse"),
        ("mellum", {**TINY, "mlp_layer_types": ["sparse"] * 3 + [{}]}, "must be a list of 4"),
        ("axk1", {**DEEPSEEK, "moe_layer_freq": [1, 2, 3, 4, 5]}, "moe_layer_freq must be a list of 5 out of 0, 1"),
    ],
)
def test_what_is_not_covered_is_named(model_type: str, values: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal({"model_type": model_type, **known(model_type, values)}))


FLASH = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "num_experts_per_tok": 6,
    "n_routed_experts": 256, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "num_hash_layers": 3,
    "expert_dtype": "fp4", "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
INKLING = {
    "model_type": "inkling_text", "vocab_size": 201024, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 24, "dense_intermediate_size": 96, "dense_mlp_idx": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "route_scale": 8.0, "hidden_act": "silu",
}  # fmt: skip


def read(values: dict, **changed):
    return from_config({**values, **changed}, "source", "config.json")


def test_deepseek_v4_flash():
    model = read(FLASH)
    expert = 3 * 4096 * 2048
    by_hand = 43 * (257 * expert + 256 * 4096) + 40 * 256  # the 256 numbers of a correction, not in the first layers
    assert count(model).ffn_params_total == by_hand == 278_152_620_032  # of published 284 B
    active = sum(group.ffn_params_active_per_layer * len(group.layers) for group in count(model).groups)
    assert active == by_hand - 43 * 250 * expert  # of published 13 B
    first, last = model.model.groups
    assert (first.layers, last.layers) == (tuple(range(3)), tuple(range(3, 43)))
    assert (first.spec.moe.lookup, first.spec.moe.correction) == (129280, False)
    assert (last.spec.moe.lookup, last.spec.moe.correction, last.spec.moe.score) == (None, True, "sqrtsoftplus")
    assert (first.spec.limits, last.spec.residual) == (hard_limits(10.0), False)
    assert model.notes == (
        "decoder: in 3 layers, a table of 129,280 × 6 integers assigns experts to token ids; "
        "it has no parameters, so it is not counted",
    )
    named = {name: value for name, value in FLASH.items() if name != "num_hash_layers"}
    kinds = ["hash_moe"] * 3 + ["moe"] * 40
    assert read(named, mlp_layer_types=kinds).model.groups == read(named).model.groups == model.model.groups


@pytest.mark.parametrize(("field", "value"), [
    ("n_shared_experts", 2), ("scoring_func", "tanh"), ("mlp_bias", True),
    ("mlp_layer_types", ["dense"] * 43), ("num_hash_layers", -1), ("topk_method", "greedy"),
])  # fmt: skip
def test_what_deepseek_v4_does_not_do_is_refused_by_name(field, value):
    with pytest.raises(FFNError) as refused:
        read(FLASH, **{field: value})
    assert field in refused.value.message


def test_inklings_two_widths():
    """With dense_intermediate_size, intermediate_size is the experts' width; without, it is the dense layers'."""
    old, plain = read(INKLING), {n: v for n, v in INKLING.items() if n != "dense_intermediate_size"}
    new = read(plain, intermediate_size=96, moe_intermediate_size=24,
               mlp_layer_types=["dense", "dense", "sparse", "sparse"])  # fmt: skip
    assert [(g.spec.d_ff, bool(g.spec.moe), len(g.layers)) for g in old.model.groups] == [(96, False, 2), (24, True, 2)]
    assert new.model.groups == old.model.groups
    expert = 3 * 64 * 24
    assert count(old).ffn_params_total == 2 * (3 * 64 * 96 + 1) + 2 * (10 * expert + 10 * 64 + 8 + 1)
    assert "shared_expert_sink" in refusal({**INKLING, "shared_expert_sink": False})


def test_inkling_2_and_phimoe():
    inkling = {"model_type": "inkling2_text", "hidden_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2,
               "n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4}  # fmt: skip
    spec = read(inkling, mlp_gate_softcap=3.0).model.main.spec
    assert (spec.limits, spec.moe.scale, spec.moe.eps) == (Limits(gate_cap=3.0, up_cap=25.0), 8.0, 1e-20)
    phimoe = {"model_type": "phimoe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
    moe = read(phimoe, router_jitter_noise=0.05).model.main.spec.moe
    assert (moe.order, moe.threshold, moe.renormalise) == ("one_by_one", 0.1, False)
    assert "num_experts_per_tok" in refusal({**phimoe, "num_experts_per_tok": 3})
    assert not refusal({**phimoe, "input_jitter_noise": 0.01})


@pytest.mark.parametrize(("change", "message"), [
    (lambda table: table + 7, "lists experts"), (lambda table: table - 1, "lists experts"),
    (lambda table: table[:, :1].clone(), "has shape"), (lambda table: table.float(), "expected integers"),
    (lambda table: None, "no tensor tid2eid"),
])  # fmt: skip
def test_a_wrong_table_is_refused(change, message, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    source = tiny("deepseek_v4").folder
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.ffn.gate.tid2eid"
    table = tensors.pop(name)
    assert torch.equal(prepare(load(str(source)), layer="0").weights["route.lookup"], table)
    changed = change(table)
    save_file(tensors | ({} if changed is None else {name: changed}), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text("utf-8"))), "utf-8")
    with pytest.raises(FFNError, match=message):
        prepare(load(str(tmp_path)), layer="0")


ZAYA = {
    "model_type": "zaya", "vocab_size": 262272, "hidden_size": 2048, "num_hidden_layers": 40, "num_experts": 16,
    "num_experts_per_tok": 1, "moe_intermediate_size": 2048, "router_hidden_size": 256, "hidden_act": "silu",
    "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_zayas_router_by_hand():
    first, rest = read(ZAYA).model.groups
    assert (first.layers, rest.layers) == ((0,), tuple(range(1, 40)))
    router = 256 * 2048 + 256 + 2 * (256 * 256 + 256) + 17 * 256 + 17
    assert count(read(ZAYA)).ffn_params_total == 40 * (router + 16 * 3 * 2048 * 2048) + 39 * 256
    assert (first.spec.moe.router_carries, rest.spec.moe.router_carries) == (False, True)
    assert (rest.spec.moe.skip_experts, rest.spec.moe.renormalise, rest.spec.residual) == (1, False, False)
    assert "num_experts_per_tok" in refusal({**ZAYA, "num_experts_per_tok": 2})


@pytest.mark.parametrize(("command", "said"), [
    (("verify",), "its router is an MLP, which no check or kernel covers"),
    (("bench",), "its router is an MLP, which no kernel computes"),
    (("trace", "--layer", "1", "--input-ids", "3,4"), "receives a state from the router in the previous layer"),
])  # fmt: skip
def test_what_no_run_covers_of_zaya_is_refused_in_one_line(command, said, call):
    name, *options = command
    code, _, err = call(name, str(tiny("zaya").folder), *options)
    *progress, line = err.splitlines()  # of saving the model
    assert (code, said in line, any("error" in text for text in progress)) == (2, True, False)


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
    with pytest.raises(FFNError, match=r"activation_situ_beta = 2\.0: unknown"):
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
