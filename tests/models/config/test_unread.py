"""No silent field: what sounds like a size or arithmetic of the FFN is read, known to be harmless, noted or refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.models.config.families import FAMILIES
from ffncli.models.config.read import from_config
from ffncli.models.config.unread import HARMLESS, UnknownField
from tests.oracles.checkpoints import expect_refusal, refusal

QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 40,
    "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
# What a later release may add to any family; none of it is in a config that transformers 5.23 ships a class for.
LATER: dict[str, Any] = {
    "routed_expert_hidden_size": 8, "moe_latent_width": 8, "swiglu_limits": [7.0], "gate_clamp": 3.0,
    "ffn_hidden_multiplier": 1.5, "engram_rows": 384, "expert_out_norm": True, "router_soft_cap": 30.0,
    "intermediate_size_late": 80, "mlp_clip": 2.0, "num_null_experts": 4, "moe_config": {"experts": 3},
}  # fmt: skip

KIMI = ("kimi_linear", "routed_expert_hidden_size")  # which is the one that has it


def configs() -> dict[str, dict[str, Any]]:
    """The default config of every class of transformers that ffn reads."""
    found = {}
    for name in CONFIG_MAPPING:
        try:
            values = json.loads(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
            from_config(values, "c", "c")
        except UnknownField:
            found[name] = values
        except Exception:  # no row, or a config that cannot be made
            continue
        else:
            found[name] = values
    return found


@pytest.fixture(scope="module")
def shipped() -> dict[str, dict[str, Any]]:
    """`configs`, made once."""
    return configs()


def test_every_config_that_transformers_ships_is_read(shipped: dict[str, dict[str, Any]]) -> None:
    assert len(shipped) > 350
    for name, values in shipped.items():
        notes = from_config(values, "c", "c").notes
        assert not any("uses the default for" in note for note in notes), (name, notes)


def test_a_later_field_of_any_family_is_refused_by_name(shipped: dict[str, dict[str, Any]]) -> None:
    kinds = {values["model_type"]: values for values in shipped.values() if values.get("model_type") in FAMILIES}
    assert len(kinds) > 150
    for number, values in enumerate(kinds.values()):
        name = [*LATER][number % len(LATER)]
        family_name = values["model_type"]
        family = FAMILIES[family_name]
        if family.parts or any(tower in values for tower in family.text):
            continue
        if (family_name, name) == KIMI or any(re.fullmatch(p, name) for p in HARMLESS.get(family_name, ())):
            continue
        assert name in refusal({**values, name: LATER[name]})


def test_what_changes_no_parameter_is_counted_and_what_may_is_not() -> None:
    before = from_config(QWEN, "c", "c")
    for name in ("swiglu_limit", "router_logit_softcap", "moe_router_temperature", "residual_multiplier"):
        limited = from_config({**QWEN, name: 7}, "c", "c")
        assert limited.model.groups == before.model.groups
        assert limited.notes == (f"counted, but cannot be run: {name} = 7: unknown for model_type qwen3_moe",)
    for name in ("moe_latent_size", "expert_out_norm", "num_null_experts", "mlp_layers"):
        with pytest.raises(UnknownField, match=f"{name} = 7"):
            from_config({**QWEN, name: 7}, "c", "c")


def test_what_other_trainers_write_is_known_to_be_harmless() -> None:
    """Steps of 1, capacities, noise, the names of implementations, another spelling of the activation."""
    harmless: dict[str, Any] = {
        "moe_frequency": 1, "moe_layer_freq": 1, "expert_interval": 1, "capacity_factor": 2.0,
        "moe_eval_capacity_factor": 1.5, "input_jitter_noise": 0.01, "moe_router_bias_update_rate": 1e-3,
        "moe_router_load_balancing_type": "aux_loss", "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
        "experts_implementation": "grouped_mm", "moe_z_loss_coeff": 1e-3, "activation_function": "gelu",
        "linear_attn_config": {"gate_lower_bound": -5.0, "num_heads": 4},
    }  # fmt: skip
    before = from_config(QWEN, "c", "c")
    for name, value in harmless.items():
        read = from_config({**QWEN, name: value}, "c", "c")
        assert (read.model.groups, read.model.refused) == (before.model.groups, ""), name
    with pytest.raises(UnknownField, match="moe_frequency = 2"):
        from_config({**QWEN, "moe_frequency": 2}, "c", "c")


@pytest.mark.parametrize("name", ["moe_latent_size", "routed_expert_hidden_size", "swiglu_limit"])
def test_a_field_of_another_family_is_refused_here(name: str) -> None:
    before = from_config(QWEN, "c", "c")
    assert f"{name} = 7: unknown for model_type qwen3_moe" in refusal({**QWEN, name: 7})
    for off in (None, False, 0):
        assert from_config({**QWEN, name: off}, "c", "c").model == before.model


def test_two_spellings_may_only_agree() -> None:
    both = {**QWEN, "n_routed_experts": 8}
    assert from_config(both, "c", "c").model.groups == from_config(QWEN, "c", "c").model.groups
    with pytest.raises(UnknownField, match="n_routed_experts"):
        from_config({**both, "n_routed_experts": 16}, "c", "c")


def test_what_is_outside_the_text_model_is_noted() -> None:
    whole = {"model_type": "llava", "text_config": {**QWEN}, "merged_hidden_size": 99, "hidden_size": 16}
    notes = from_config(whole, "c", "c").notes
    assert notes[-1] == "outside the text model, so not read: merged_hidden_size = 99"


def test_what_matters_outside_the_block_is_noted() -> None:
    values = json.loads(json.dumps(CONFIG_MAPPING["switch_transformers"]().to_dict()))
    notes = from_config(values, "c", "c").notes
    assert notes == ("expert_capacity = 64: experts drop tokens beyond this capacity, which is not modelled",)


def test_layers_without_experts_may_say_anything_of_them() -> None:
    dense = {**QWEN, "mlp_only_layers": [0, 1], "norm_topk_prob": True}
    assert all(group.spec.moe is None for group in from_config(dense, "c", "c").model.groups)


def test_tensors_are_counted_and_not_run(call: Any, tmp_path: Path) -> None:
    """The headers show every width; what a limit does to the values they do not show."""
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 1,
        "hidden_act": "silu", "num_attention_heads": 2, "swiglu_limit": 7.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"gate_proj": (40, 16), "up_proj": (40, 16), "down_proj": (16, 40)}
    tensors = {f"model.layers.0.mlp.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    code, out, err = call("params", str(tmp_path), "--json")
    assert (code, json.loads(out)["rows"][0]["ffn_params_total"]) == (0, 3 * 16 * 40)
    assert "counted, but cannot be run: swiglu_limit = 7.0: unknown for model_type llama" in err + out
    expect_refusal(call("trace", str(tmp_path)), "cannot be run", "swiglu_limit")


def test_every_harmless_field_has_a_family_and_a_reason() -> None:
    assert HARMLESS.keys() <= FAMILIES.keys()
    assert all(reason and reason[0].islower() for fields in HARMLESS.values() for reason in fields.values())


@pytest.mark.parametrize(("kind", "name", "settled", "other"), [
    ("deepseek_v3", "scoring_func", "sigmoid", "softmax"), ("deepseek_v3", "topk_method", "noaux_tc", "greedy"),
    *((kind, name, True, False) for kind, name in (
        ("qwen3_5_moe_text", "norm_topk_prob"), ("minimax_m2", "use_routing_bias"), ("afmoe", "route_norm"),
        ("mistral_large4_text", "norm_topk_prob"), ("hy_v3", "norm_topk_prob"), ("mixtral", "norm_topk_prob"),
    )),
])  # fmt: skip
def test_a_field_may_say_what_the_family_does_and_nothing_else(kind: str, name: str, settled: Any, other: Any) -> None:
    """Routers always renormalise, or always add their correction: false is another model, not nothing."""
    values = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict()))
    before = from_config(values, "c", "c")
    if kind != "mixtral":
        assert from_config({**values, name: settled}, "c", "c").model == before.model
    assert f"{name} = {other!r}: unknown for model_type {kind}" in refusal({**values, name: other})


@pytest.mark.parametrize(("kind", "name", "value"), [
    ("ernie4_5_moe", "moe_norm_min", 1.0), ("deepseek_v2", "topk_method", "noaux_tc"),
    ("unlimited_ocr_text", "topk_method", "noaux_tc"),
])  # fmt: skip
def test_a_value_that_is_read_and_not_covered_is_refused(kind: str, name: str, value: object) -> None:
    """The least sum that ERNIE divides by, and a way to choose that DeepSeek-V2's code does not have."""
    values = {**json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict())), "num_experts_per_tok": 6}
    assert from_config(values, "c", "c").model.groups
    assert re.search(f"{name} = .* is not covered", refusal({**values, name: value}))
