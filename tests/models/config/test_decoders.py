"""Decoders, encoders and pairs: fields that change the FFN say what the module holds, or are refused."""

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.model import Resolved
from tests.oracles.architectures import Architecture, build, cases, numbers
from tests.oracles.checkpoints import refusal

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
    module = build(name, replace(CASES[name], values={**CASES[name].values, **changes}), meta=True)
    values = json.loads(json.dumps(module.config.to_dict(), default=str))  # type: ignore[union-attr]
    assert re.search(f"{says} is not covered", refusal(values))


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


BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
MOBILE = BERT | {"model_type": "mobilebert", "intra_bottleneck_size": 8, "num_feedforward_networks": 2}
SQUEEZE = BERT | {"model_type": "squeezebert", "intermediate_groups": 4, "output_groups": 4}
FUNNEL = {"model_type": "funnel", "d_model": 16, "d_inner": 40, "num_decoder_layers": 2, "block_sizes": [1, 2]}
T5 = {"model_type": "t5", "d_model": 16, "d_ff": 40, "num_layers": 2}
SWITCH = T5 | {"model_type": "switch_transformers", "num_decoder_layers": 3, "num_experts": 8}
NLLB = {
    "model_type": "nllb-moe", "d_model": 16, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 24, "num_experts": 8,
}  # fmt: skip
PERCEIVER = {"model_type": "perceiver", "d_latents": 16, "d_model": 24, "num_self_attends_per_block": 3}


def read(values: dict[str, Any]) -> Resolved:
    return from_config(values, "x", "x/config.json")


@pytest.mark.parametrize(
    ("name", "first", "tokens"),
    [("albert", ".ffn", 8), ("funnel", ".ffn.linear_1", 8), ("perceiver", ".mlp.dense1", 64)],
)
def test_runs_are_the_forward_calls(name: str, first: str, tokens: int) -> None:
    """Every FFN's first projection is hooked, and counts the calls of one forward pass."""
    model = build(name, cases()[name]).eval()
    calls: Counter[str] = Counter()

    def counting(path: str) -> Any:
        return lambda *_: calls.update([path])

    hooked = [(path, module) for path, module in model.named_modules() if path.endswith(first)]
    for path, module in hooked:
        assert isinstance(module, nn.Linear)
        module.register_forward_hook(counting(path))
    with torch.no_grad():
        model(input_ids=torch.full((1, tokens), 3))
    found = read(json.loads(json.dumps(model.config.to_dict(), default=str)))
    ours = [group.runs for group in found.model.groups for _ in group.layers]
    assert sorted(ours) == sorted(calls[path] for path, _ in hooked)


def test_a_funnel_without_a_decoder_counts_its_encoder_alone() -> None:
    stacks = [{g.stack for g in read(FUNNEL | {"architectures": [made]}).model.groups} for made in
              ("FunnelForMaskedLM", "FunnelBaseModel")]  # fmt: skip
    assert stacks == [{"encoder", "decoder"}, {"encoder"}]


def test_t5_believes_the_fields_that_follow_where_a_file_has_them() -> None:
    from transformers import T5Config

    said = {"feed_forward_proj": "relu", "dense_act_fn": "silu", "is_gated_act": True}
    theirs = T5Config(**said)
    ours = read(T5 | said).model.groups[0].spec
    assert (ours.activation, ours.gated) == (theirs.dense_act_fn, theirs.is_gated_act)


@pytest.mark.parametrize(
    ("pre", "reuse", "norm"), [(False, True, "none"), (True, True, "shared"), (True, False, "own")]
)
def test_xmods_norm_is_the_ffns_where_no_adapter_uses_it(pre: bool, reuse: bool, norm: str) -> None:
    values = BERT | {"model_type": "xmod", "pre_norm": pre, "adapter_reuse_layer_norm": reuse}
    spec = read(values).model.groups[0].spec
    assert norm == ("none" if spec.norm == "none" else "shared" if spec.shared_norm else "own")


def test_an_encoder_decoder_is_two_models_of_any_family() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 3}
    for decoder, expected in ((gpt2, ("decoder", 3, 64)), (BERT, ("decoder", 2, 40))):
        model = read({"model_type": "encoder-decoder", "encoder": BERT, "decoder": decoder})
        assert [(g.stack, len(g.layers), g.spec.d_ff) for g in model.model.groups] == [("encoder", 2, 40), expected]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (BERT | {"model_type": "convbert", "num_groups": 2}, "num_groups = 2 is not covered"),
        (SQUEEZE, "intermediate_groups = 4 is not covered"),
        (BERT | {"model_type": "ibert", "quant_mode": True}, "quant_mode = true is not covered"),
        (MOBILE | {"normalization_type": "layer_norm"}, "normalization_type = 'layer_norm' is not covered"),
        (MOBILE | {"num_feedforward_networks": 200, "num_hidden_layers": 200}, "are out of range"),
        (BERT | {"model_type": "albert", "num_hidden_groups": 10_001}, "are out of range"),
        (PERCEIVER | {"architectures": ["PerceiverForOpticalFlow"]}, "is not covered"),
        (FUNNEL | {"block_repeats": [1]}, "block_repeats must be one number from 1 per block"),
        (FUNNEL | {"block_sizes": [5, -1]}, "block_sizes must be"),
        (SWITCH | {"router_dtype": "bfloat16"}, "router_dtype = 'bfloat16' is not covered"),
        (NLLB | {"second_expert_policy": "sampling"}, "second_expert_policy = 'sampling' is not covered"),
        ({"model_type": "encoder-decoder", "encoder": BERT}, "decoder is missing"),
        ({"model_type": "encoder-decoder", "encoder": T5, "decoder": BERT}, "is not a single stack"),
    ],
)
def test_what_a_block_cannot_say_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    assert said in refusal(values)
