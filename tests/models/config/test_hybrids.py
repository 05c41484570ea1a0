"""Hybrids and composites: the fields that change their FFNs, held to transformers' modules, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.errors import FFNError
from ffncli.models.config.families import BY_TYPE, REFUSED, TEXT_TYPES
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.model import Resolved
from tests.oracles.architectures import build, cases, numbers

_SIZES = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 4}
# What the default cases leave untested: (model_type, its fields).
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bamba", {"mlp_bias": True}),
    ("granitemoehybrid", {"num_local_experts": 0}),
    ("jamba", {"num_experts": 1}),
    ("jamba", {"expert_layer_period": 4, "expert_layer_offset": 2}),
    ("lfm2", {"block_ff_dim": 1200}),
    ("lfm2", {"block_auto_adjust_ff_dim": False}),
    ("lfm2", {"block_ffn_dim_multiplier": 1.7, "block_multiple_of": 16}),
    ("lfm2_moe", {"use_expert_bias": False, "num_dense_layers": 1}),
    ("lfm3", {"use_sandwich_norm": False}),
    ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mlp_bias": True}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-*EM-"}),
    ("olmo_hybrid", {"layer_types": ["full_attention", "linear_attention"] * 2}),
    ("xlstm", {"use_bias": True, "ffn_proj_factor": 1.3, "ffn_round_up_to_multiple_of": 8}),
    ("xlstm", {"weight_mode": "fused"}),
    ("zamba", {"layers_block_type": None, "num_hidden_layers": 20}),
    ("mllama", {"text_config": {"num_hidden_layers": 9}}),
    ("blt", {"patch_in_forward": False}),
    ("blt", {"encoder_config": {"intermediate_size": None}}),
]


def config_of(model: Any) -> dict[str, Any]:
    """The config.json that transformers would write."""
    values: dict[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))
    return values


def read(**values: Any) -> Resolved:
    """The model of a config's values."""
    return from_config(values, "config.json", "config.json")


@pytest.mark.parametrize(("name", "said"), VARIANTS)
def test_a_fields_value_counts_as_the_module_holds(name: str, said: dict[str, Any]) -> None:
    case = cases()[name]
    model = build(name, replace(case, values={**case.values, **said}), meta=True)
    assert count(from_config(config_of(model), name, name)).ffn_params_total == numbers(model, case.ffn)


def test_sandwich_and_xlstm_norms() -> None:
    for name, said in (("lfm3", {"use_sandwich_norm": False}), ("xlstm", {"use_bias": True})):
        case = cases()[name]
        model = build(name, replace(case, values={**case.values, **said}), meta=True)
        c = count(from_config(config_of(model), name, name))
        norms = sum(g.norm_params_per_layer * len(g.layers) for g in c.groups)
        assert norms == numbers(model, case.norm)


def test_nemotrons_published_pattern() -> None:
    """Nemotron-H-8B's config: 24 MLPs of 52 layers, 21504 wide, no gate."""
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    sizes = {"hidden_size": 4096, "intermediate_size": 21504, "mlp_hidden_act": "relu2"}
    model = read(model_type="nemotron_h", hybrid_override_pattern=pattern, num_hidden_layers=52, **sizes)
    c = count(model)
    assert (c.layers, c.ffn_params_total) == (24, 24 * 2 * 4096 * 21504)
    assert [i for g in model.model.groups for i in g.layers] == [i for i, kind in enumerate(pattern) if kind == "-"]
    assert model.model.layer(None).index == 1
    with pytest.raises(FFNError, match="num_hidden_layers = 50"):
        read(model_type="nemotron_h", hybrid_override_pattern=pattern, num_hidden_layers=50, **sizes)
    with pytest.raises(FFNError) as caught:
        model.model.layer("0")
    assert "has decoder layers 1, 3, 5, ..., 51" in str(caught.value.hint)


def test_lfm2_without_a_factor_does_not_round() -> None:
    """Its code skips both where the factor is null, which transformers 5.23's config class no longer lets through."""
    config = {**_SIZES, "intermediate_size": 600, "block_ffn_dim_multiplier": None}
    (group,) = read(model_type="lfm2", **config).model.groups
    assert group.spec.d_ff == 400


def test_zamba_stores_one_ffn_and_runs_it_in_every_hybrid_layer() -> None:
    (group,) = read(model_type="zamba", hidden_size=3712, intermediate_size=14848, num_hidden_layers=76).model.groups
    assert (len(group.layers), group.runs, group.spec.residual) == (1, 13, False)


def test_falcon_h1s_multipliers() -> None:
    (group,) = read(
        model_type="falcon_h1", hidden_size=16, intermediate_size=40, num_hidden_layers=2, mlp_multipliers=[0.9, 0.3]
    ).model.groups
    assert (group.spec.gate_scale, group.spec.residual_scale) == (0.9, 0.3)
    assert [s.output for s in group.steps] == ["norm", "gate", "up", "gate_scaled", "act", "hidden", "down", "out"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_model_type_that_cannot_be_said_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(FFNError) as caught:
        read(model_type=name, hidden_size=16)
    assert caught.value.hint == REFUSED[name]
    assert name not in BY_TYPE


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "falcon_h1", "mlp_multipliers": [1.0]}, "mlp_multipliers must be two numbers"),
    ({"model_type": "falcon_h1", "mlp_multipliers": [1.0, float("inf")]}, "residual_scale must be a number"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-x"}, "hybrid_override_pattern must be made of"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MM"}, "no layer of this model has an FFN"),
    ({"model_type": "nemotron_h", "layers_block_type": [1]}, "layers_block_type must be a list with a name per layer"),
    (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "E", "moe_intermediate_size": 12,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "mlp_bias": True},
        "mlp_bias = true is not covered",
    ),
    ({"model_type": "olmo_hybrid", "layer_types": ["full_attention"]}, "layer_types must be a name per layer (4)"),
    ({"model_type": "zamba", "layers_block_type": ["mamba"] * 4}, "layers_block_type has no hybrid layer"),
    ({"model_type": "lfm2", "block_multiple_of": 2**40}, "block_multiple_of must be a whole number"),
    ({"model_type": "xlstm", "ffn_proj_factor": 1e20}, "d_ff must be"),
    ({"model_type": "lfm2", "block_ffn_dim_multiplier": 1e29}, "d_ff must be"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "message"), REFUSALS)
def test_what_cannot_be_said_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(FFNError) as caught:
        read(**{**_SIZES, **said})
    assert message in caught.value.message


# The code of kimi and of LLaVA's own repository is not in transformers; rag is made of two whole configs, and names a
# tower that it does not store.
_ELSEWHERE = {"kimi_vl", "kimi_k3", "llava_llama", "llava_mistral", "llava_qwen", "rag"}


@pytest.mark.parametrize("name", sorted(set(TEXT_TYPES) - _ELSEWHERE))
def test_a_text_config_without_a_model_type_is_transformers_default(name: str) -> None:
    nested = CONFIG_MAPPING[name].sub_configs_defaults  # type: ignore[attr-defined]
    if "thinker_config" in nested:  # its text_config lies one level deeper
        nested = CONFIG_MAPPING[nested["thinker_config"].model_type].sub_configs_defaults  # type: ignore[attr-defined]
    text = next(key for key in ("text_config", "vlm_config", "decoder_config", "esmc_config") if key in nested)
    assert TEXT_TYPES[name] == nested[text].model_type


def test_a_text_config_without_a_model_type_is_read_as_that_family() -> None:
    model = read(model_type="voxtral", text_config={**_SIZES, "hidden_act": "silu"}, audio_config={"hidden_size": 8})
    assert (model.model.model_type, model.model.groups[0].spec.d_model) == ("llama", 16)


def test_a_musicgen_decoder_is_the_text_tower() -> None:
    decoder = {"model_type": "musicgen_decoder", "hidden_size": 16, "ffn_dim": 40, "num_hidden_layers": 4}
    model = read(model_type="musicgen", text_encoder={"model_type": "t5"}, decoder=decoder)
    assert (model.model.model_type, count(model).ffn_params_total) == ("musicgen_decoder", 4 * 2 * 16 * 40)
