"""config.json against transformers' own configuration classes: the same widths and routing, whatever is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.block.activations import hard_limits
from ffncli.errors import FFNError
from ffncli.models.config.read import FAMILIES, from_config, quantization_of
from ffncli.models.dimensions import Dimensions
from ffncli.models.files.fields import Fields
from ffncli.models.model import Resolved
from ffncli.models.source import load

# What a family's default config leaves null although its models have it, or where the default is refused.
GIVEN = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "n_routed_experts": 64},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * 35},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 24},
    "sam3_lite_text_text_model": {"use_repmixer_blocks": False},
    "squeezebert": {"intermediate_groups": 1, "output_groups": 1},
}


def specs(values: dict) -> list:
    model: Resolved = from_config(values, "config.json", "config.json")
    return [(group.stack, group.layers, group.spec) for group in model.model.groups]


def specs_or_refusal(values: dict) -> list | str:
    try:
        return specs(values)
    except FFNError as error:
        return error.message


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & {*CONFIG_MAPPING}))
def test_a_field_left_out_means_what_transformers_means(family):
    """Every field of the family's default config is dropped in turn: the same blocks come out, or a refusal.

    Where they differ, they are those of the config that transformers makes of what is left (HRM).
    """
    whole = written(family, GIVEN.get(family, {}))
    expected = specs(whole)
    for name in set(whole) - {"model_type"}:
        rest = {key: value for key, value in whole.items() if key != name}
        found = specs_or_refusal(rest)
        if found != expected and not (isinstance(found, str) and "missing" in found):
            assert found == specs_or_refusal(written(family, rest)), name


def written(family: str, values: dict) -> dict:
    """The config.json that transformers writes for these values."""
    from transformers import AutoConfig

    given = {name: value for name, value in values.items() if name != "model_type"}
    return json.loads(AutoConfig.for_model(family, **given).to_json_string(use_diff=False))


def test_a_multimodal_config_lends_its_dtype_to_the_text_tower():
    inner = {"model_type": "gemma3_text", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    model = from_config({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": inner}, "c", "c")
    assert (model.model.dtype, model.model.main.spec.d_ff) == ("bf16", 16)


def kinds(name: str, **said) -> list[tuple]:
    groups = load(name, Dimensions(**said)).model.groups
    return [(bool(g.spec.moe), g.spec.d_ff, g.spec.moe.top_k if g.spec.moe else 0) for g in groups]


def test_options_change_the_layers_of_the_main_kind_where_kinds_mix():
    assert kinds("deepseek-v3") == [(False, 18432, 0), (True, 2048, 8)]
    assert kinds("deepseek-v3", top_k=4) == [(False, 18432, 0), (True, 2048, 4)]
    assert kinds("deepseek-v3", d_ff="1024") == [(False, 18432, 0), (True, 1024, 8)]
    assert kinds("deepseek-v3", d_model="1024") == [(False, 18432, 0), (True, 2048, 8)]
    assert "in the MoE layers only" in load("deepseek-v3", Dimensions(top_k=4)).notes[-1]
    assert load("deepseek-v3", Dimensions(activation="gelu")).notes == ()
    assert kinds("gpt2", experts=4) == [(True, 3072, 2)]


def test_shared_experts_are_as_wide_as_routed_ones_when_they_are_asked_for():
    spec = load("deepseek-v3", Dimensions(shared_experts=2)).model.main.spec
    assert spec.shared_width == 2 * 2048


@pytest.mark.parametrize(
    "choices",
    [
        {"norm": "batchnorm"},
        {"norm_position": "mid"},
        {"residual_scale": float("nan")},
        {"dropout": "x"},
        {"limits": hard_limits("7")},
    ],
)
def test_a_choice_that_is_none_is_refused(choices):
    from ffncli.block.recipe import FFNSpec

    with pytest.raises(FFNError):
        FFNSpec(4, 8, **choices)


def test_a_routing_that_is_none_is_refused():
    from ffncli.block.recipe import FFNSpec, MoE

    with pytest.raises(FFNError, match="score: unknown choice 'entmax'"):
        FFNSpec(4, 8, moe=MoE(4, 2, score="entmax"))


@pytest.mark.parametrize("nest", [lambda c: c, lambda c: {"text_config": c}])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantization_config_may_be_nested(nest: Any, key: str):
    gptq = {"quant_method": "gptq", "bits": 4}
    assert quantization_of(Fields(nest({key: gptq, "hidden_size": 4}), "c")) == gptq
    assert quantization_of(Fields(nest({key: None}), "c")) is None
    assert quantization_of(Fields(nest({key: [gptq]}), "c")) is None
