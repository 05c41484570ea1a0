"""Text models inside multimodal ones, held to the modules that transformers builds; remote code to published totals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.model import Resolved
from ffncli.run.engine.functions import function
from tests.architectures.test_counts import _functions
from tests.oracles.architectures import config, numbers, outside, towers
from tests.oracles.architectures.text_towers import REMOTE
from tests.oracles.architectures.tiny import statement, tiny

CASES = {name: case for name, case in towers().items() if not case.reason}
# What a file may leave out: the row's default must be transformers'.
_OPTIONAL = (
    "hidden_act", "activation_function", "hidden_activation", "dense_act_fn", "rms_norm_eps", "layer_norm_eps",
    "layer_norm_epsilon", "mlp_bias", "use_bias", "swin_norm", "swiglu_limit", "residual_multiplier", "norm_topk_prob",
    "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mlp_layer_types",
    "decoder_sparse_step", "mlp_only_layers", "topk_method",
)  # fmt: skip


def _read(values: Mapping[str, Any], name: str) -> Resolved:
    return from_config(json.loads(json.dumps(values, default=str)), name, f"{name}/config.json")


@statement
@pytest.mark.parametrize("name", CASES)
def test_counts_are_the_modules(name: str) -> None:
    one, case = tiny(name), CASES[name]
    for module, model in ((one.module, one.model), (one.wide, one.wide_model)):
        c = count(model)
        assert c.ffn_params_total == numbers(module, case.ffn) > 0
        norms = numbers(module, case.norm)
        assert sum(g.norm_params_per_layer * len(g.layers) for g in c.groups) == norms
        assert norms > 0 or case.norm.endswith("(?!)")
    assert outside(one.module, one.wide, case) == []


@statement
@pytest.mark.parametrize("name", sorted(set(CASES) - {"openai_privacy_filter"}))  # it writes its function out
def test_activations_are_the_modules(name: str) -> None:
    model = tiny(name).model
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    held = list(_functions(tiny(name).module, CASES[name]))
    assert held
    ours = {name: function(name)(x) for name in {group.spec.activation for group in model.model.groups}}
    alike = [{at for at, y in ours.items() if torch.allclose(y, theirs(x), atol=2e-4)} for _, theirs in held]
    assert all(alike), [where for (where, _), names in zip(held, alike, strict=True) if not names]
    assert set().union(*alike) == set(ours)


@statement
@pytest.mark.parametrize("name", CASES)
def test_what_a_file_leaves_out_is_transformers_default(name: str) -> None:
    case = replace(CASES[name], drop=(*CASES[name].drop, *_OPTIONAL))
    values = config(name, case).to_dict()
    sparse = {k: v for k, v in values.items() if k not in _OPTIONAL or k in case.values}
    assert _read(sparse, name).model.groups == _read(values, name).model.groups


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "hunyuan_vl"])
def test_old_files_have_the_text_fields_beside_the_vision_config(name: str) -> None:
    values = config(f"{name}_text", CASES[f"{name}_text"]).to_dict()
    flat = _read({**values, "model_type": name, "vision_config": {"hidden_size": 8}}, name)
    inner = {k: v for k, v in values.items() if k != "model_type"}
    nested = _read({"model_type": name, "text_config": inner, "vision_config": {}}, name)
    assert flat.model.groups == nested.model.groups == _read(values, f"{name}_text").model.groups


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_thinkers_text_model_lies_two_levels_deep(name: str) -> None:
    values = config(f"{name}_text", CASES[f"{name}_text"]).to_dict()
    inner = {"text_config": {k: v for k, v in values.items() if k != "model_type"}}
    for said in ({"model_type": f"{name}_thinker"}, {}):
        thinker = _read({"model_type": name, "thinker_config": {**said, **inner}}, name)
        assert thinker.model.groups == _read(values, "").model.groups


@pytest.mark.parametrize("name", ["diffusion_gemma"])
def test_what_no_block_says_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(FFNError, match="is not covered; it"):
        _read({"model_type": name, "text_config": {"model_type": f"{name}_text", "hidden_size": 16}}, name)


@pytest.mark.parametrize("name", REMOTE)
def test_remote_code_is_held_to_published_totals(name: str) -> None:
    values, total, active = REMOTE[name]
    c = count(_read({"model_type": name, **values}, name))
    assert (c.model_params_total, c.model_params_active) == (total, active)


def test_chatglm_of_the_first_version_is_not_guessed() -> None:
    with pytest.raises(FFNError, match="ffn_hidden_size is missing"):
        _read({"model_type": "chatglm", "hidden_size": 4096, "inner_hidden_size": 16384, "num_layers": 28}, "chatglm")
    values = {**REMOTE["chatglm"][0], "model_type": "chatglm", "apply_residual_connection_post_layernorm": True}
    with pytest.raises(FFNError, match="apply_residual_connection_post_layernorm = true is not covered"):
        _read(values, "chatglm")


@pytest.mark.parametrize(
    ("name", "near"),
    [("lama", "llama"), ("gemma-2", "gemma2"), ("mixtrall", "mixtral"), ("deepseek-v3", "deepseek_v3"), ("t55", ""),
     ("my_new_model", ""), ("phi4mm", ""), ("qwen2_5_vlm", "qwen2_5_vl"), ("qwen9", ""), ("llama5", "")],
)  # fmt: skip
def test_only_a_misspelling_is_taken_for_another_type(name: str, near: str) -> None:
    with pytest.raises(FFNError) as refused:
        _read({"model_type": name, "hidden_size": 16}, name)
    assert refused.value.message == f"{name}/config.json: model_type '{name}' is not known"
    wanted = f"did you mean '{near}'" if near else "give its tensors (a directory or .safetensors file)"
    assert refused.value.hint.startswith(wanted)
