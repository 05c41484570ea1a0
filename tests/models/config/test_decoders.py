"""Fields that change a decoder's FFN: what its config says with them is what its module holds, or it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.model import Resolved
from tests.oracles.architectures import Architecture, build, cases, numbers

CASES = cases()
VARIANTS: list[tuple[str, dict[str, Any], str | None]] = [
    ("falcon", {"new_decoder_architecture": True}, r".*\.ln_mlp\..*"),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, None),
    ("falcon", {"parallel_attn": False, "bias": True}, r".*\.post_attention_layernorm\..*"),
    ("opt", {"do_layer_norm_before": False, "enable_bias": False}, None),
    ("opt", {"layer_norm_elementwise_affine": False}, None),
    ("stablelm", {"use_parallel_residual": True}, r"(?!)"),
    ("hyperclovax", {"use_post_norm": False, "mlp_bias": True}, None),
    ("ernie4_5", {"use_bias": True}, None),
    ("starcoder2", {"use_bias": False}, None),
    ("internlm3", {"bias": True, "qkv_bias": True}, None),
    *[(name, {"mlp_bias": True}, None) for name in ("llama", "cwm", "helium", "granite", "arcee", "nemotron", "doge")],
    ("jais2", {"mlp_bias": False}, None),
    *[(name, {"n_inner": None}, None) for name in ("gpt2", "gpt_bigcode", "gptj", "codegen")],
    ("gpt_neo", {"intermediate_size": None}, None),
    ("gpt_neox_japanese", {"intermediate_multiple_size": 3}, None),
    ("apertus", {"hidden_act": "relu2"}, None),
    ("reformer", {"attn_layers": ["local", "lsh"]}, None),
]


def made(name: str, changes: dict[str, Any], norm: str | None = None) -> tuple[Resolved, Any, Architecture]:
    """What ffn reads from the config of a tiny model, that model, and the case that says which parameters count."""
    case = CASES[name]
    case = replace(case, values={**case.values, **changes}, norm=norm or case.norm)
    module = build(name, case, meta=True)
    values = json.loads(json.dumps(module.config.to_dict(), default=str))  # type: ignore[union-attr]
    return from_config(values, name, "config.json"), module, case


@pytest.mark.parametrize(("name", "changes", "norm"), VARIANTS)
def test_a_field_that_changes_the_ffn(name: str, changes: dict[str, Any], norm: str | None) -> None:
    model, module, case = made(name, changes, norm)
    counted = count(model)
    assert counted.ffn_params_total == numbers(module, case.ffn)
    norms = sum(group.norm_params_per_layer * len(group.layers) for group in counted.groups)
    assert norms == numbers(module, case.norm)


@pytest.mark.parametrize(
    ("name", "changes", "field", "expected"),
    [
        ("hyperclovax", {"use_post_norm": True}, "norm_position", "pre+branch"),
        ("hyperclovax", {"use_post_norm": False}, "norm_position", "pre"),
        ("molmo2_text", {"norm_after": True}, "norm_position", "branch"),
        ("flaubert", {"pre_norm": True}, "norm_position", "pre"),
        ("flaubert", {}, "norm_position", "post"),
        ("flaubert", {"gelu_activation": False}, "activation", "relu"),
        ("openai-gpt", {"afn": "gelu"}, "activation", "gelu_tanh"),
        ("openai-gpt", {"afn": "silu"}, "activation", "silu"),
        ("granite", {"residual_multiplier": 0.25}, "residual_scale", 0.25),
        ("minicpm3", {"scale_depth": 1.5}, "residual_scale", 0.75),  # over the root of 4 layers
        ("minicpm3", {"scale_depth": None}, "residual_scale", 1.0),
        ("doge", {}, "residual", False),
        ("reformer", {}, "residual", False),
        ("biogpt", {"layer_norm_eps": 0.5}, "norm_eps", 1e-5),
        ("ctrl", {"layer_norm_epsilon": 0.5}, "norm_eps", 1e-6),
    ],
)
def test_a_field_that_changes_no_parameter(name: str, changes: dict[str, Any], field: str, expected: object) -> None:
    model, _, _ = made(name, changes)
    assert {getattr(group.spec, field) for group in model.model.groups} == {expected}


def test_hrm_runs_its_stacks_in_cycles() -> None:
    model, _, _ = made("hrm_text", {"H_cycles": 3, "L_cycles": 5})
    stacks = [(group.stack, len(group.layers), group.runs) for group in model.model.groups]
    assert stacks == [("low", 4, 15), ("high", 4, 3)]


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("doge", {"is_moe": True, "num_experts": 16}, "is_moe = true"),
        ("gemma3n_text", {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]}, "activation_sparsity_pattern = 0.95"),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
         "enable_moe_block = true"),
        ("mpt", {"expansion_ratio": 2}, "expansion_ratio = 2"),
        ("mpt", {"no_bias": False}, "no_bias = false"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_.* = true"),
    ],
)  # fmt: skip
def test_what_the_block_cannot_say_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FFNError, match=f"config.json: {says} is not covered"):
        made(name, changes)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "moshi", "ffn_dim": 41}, "ffn_dim must be an even number, got 41"),
        ({"model_type": "reformer", "feed_forward_size": 40, "attn_layers": ["local"]}, "attn_layers must be one name"),
        ({"model_type": "gemma3n_text", "intermediate_size": 40, "num_hidden_layers": 11}, "pattern is missing"),
    ],
)
def test_fields_that_contradict_or_lack(values: dict[str, Any], says: str) -> None:
    with pytest.raises(FFNError, match=says):
        from_config({"hidden_size": 16, "num_hidden_layers": 2, **values}, "config.json", "config.json")
