"""Mixtures, hybrids and text towers of transformers, run: our steps make of tokens what their modules make of them.

The counts of test_table.py cannot see a routing, a norm's place, a multiplier or a residual; this can. Weights,
corrections and biases are random, all of them; what enters a layer's block and what leaves the layer are caught.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import ffn_steps
from ffncli.errors import FFNError
from ffncli.models.config.families.moe import ROWS
from ffncli.models.config.families.routers import ROWS as ROUTERS
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.model import Group, Resolved
from ffncli.run.engine.execute import function, run
from tests.architectures.test_table import TABLE, _functions
from tests.oracles.architectures import build, cases, config, numbers, outside, towers
from tests.oracles.architectures.families import MIXTURES as ROUTED
from tests.oracles.architectures.multimodal import REMOTE, TOWERS
from tests.oracles.architectures.tiny import statement, tiny
from tests.oracles.checkpoints import refusal

# ZAYA's, whose router has a second input, has tests of its own: tests/run/engine/test_ways_to_route.py.
ROUTED_TOWERS = ("deepseek_ocr2_text", "glm4v_moe_text", "glm5_next_text", "mistral4", "mistral_large4_text",
                 "qwen3_omni_moe_text", "qwen3_vl_moe_text", "step3p5", "unlimited_ocr_text")  # fmt: skip
NAMES = [*(n for n, case in ROUTED.items() if not case.reason and n != "zaya"), "aria_text", "bailing_hybrid",
         "deepseek_v2",
         "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flint", "glm4_moe", "glm4_moe_lite",
         "glm_moe_dsa", "gpt_oss", "hunyuan_v1_moe", "hy_v3", "hy_v4", "kimi_linear", "laguna", "mellum",
         "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
         "qwen3_5_moe_text", "qwen3_next", "solar_open", *ROUTED_TOWERS]  # fmt: skip
# Values that the defaults would leave untested: limits that random numbers pass, factors, choices.
SAID = {
    "gpt_oss": {"swiglu_limit": 0.3}, "minimax_m3_vl_text": {"swiglu_limit": 0.3}, "hy_v4": {"swiglu_limit": 0.3},
    "longcat_flash": {"zero_expert_num": 4}, "cohere2_moe": {"expert_selection_fn": "sigmoid"},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "norm_topk_prob": False},
    "deepseek_ocr2_text": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "glm5_next_text": {"swiglu_limit": 0.3},
    "step3p5": {"swiglu_limits": [0.0, 0.2, 0.3, None], "swiglu_limits_shared": [0.1, None, 0.2, 0.5],
                "moe_router_scaling_factor": 1.5}, "mistral4": {"routed_scaling_factor": 2.5},
    "dots1": {"norm_topk_prob": True}, "laguna": {"moe_routed_scaling_factor": 2.5}, "afmoe": {"route_scale": 2.5},
    "deepseek_v4": {"swiglu_limit": 0.3},
}  # fmt: skip
MODULES = ("block_sparse_moe", "feed_forward", "ffn", "mlp")
ROUTER = ("gate.weight", "router.weight", "router.gate.weight", "router.layer.weight", "gate.wg.weight",
          "router.classifier.weight")  # fmt: skip
CORRECTION = ("gate.e_score_correction_bias", "e_score_correction_bias", "expert_bias",
              "gate.moe_statics.e_score_correction_bias", "router.e_score_correction_bias")  # fmt: skip


def made(name: str) -> tuple[nn.Module, Mapping[int, FFNSpec], str]:
    """The model in memory, its routed layers' specs, and the name of its layers' list."""
    model, groups = varied(name) if name in SAID else (tiny(name).module, tiny(name).model.model.groups)
    specs = {i: g.spec for g in groups for i in g.layers if g.spec.moe}
    endings = ("layers", "blocks")
    at = next(n for n, m in model.named_modules() if n.endswith(endings) and isinstance(m, nn.ModuleList)
              and not n.startswith(("vision", "model.vision", "model.visual", "model.audio")))  # fmt: skip
    return model, specs, at


def varied(name: str) -> tuple[nn.Module, Sequence[Group]]:
    """The model with the values of SAID, and what ffn makes of its config."""
    case = TOWERS.get(name) or cases()[name]
    torch.manual_seed(0)
    model = build(name, replace(case, values={**case.values, **SAID[name]})).eval()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
    values = json.loads(json.dumps(model.config.to_dict(), default=str))
    return model, from_config(values, name, name).model.groups


def experts(found: Mapping[str, Tensor], spec: FFNSpec) -> dict[str, Tensor]:
    """The routed experts' weights, [experts, out, in]."""
    if "experts.mlp.w1" in found:  # dbrx: every expert's rows, one below the other; w2 is stored transposed
        gate, up, down = (found[f"experts.mlp.{n}"].unflatten(0, (-1, spec.d_ff)) for n in ("w1", "v1", "w2"))
        return {"gate.weight": gate, "up.weight": up, "down.weight": down.transpose(1, 2)}
    if "input_linear.weight" in found:  # jetmoe
        gate, up = found["input_linear.weight"].chunk(2, 1)
        return {"gate.weight": gate, "up.weight": up, "down.weight": found["output_linear.weight"]}
    fused, down = found["experts.gate_up_proj"], found["experts.down_proj"]
    if fused.shape[-1] != spec.d_model or down.shape[-1] != spec.d_ff:  # [experts, in, out]
        fused, down = fused.transpose(1, 2), down.transpose(1, 2)
    fused = fused[: down.shape[0]]  # LongCat allocates rows for identity experts, too
    if spec.bias:
        gate, up = fused[:, 0::2], fused[:, 1::2]
        both = found["experts.gate_up_proj_bias"]
        biases = {"gate.bias": both[:, 0::2], "up.bias": both[:, 1::2], "down.bias": found["experts.down_proj_bias"]}
        return {"gate.weight": gate, "up.weight": up, "down.weight": down, **biases}
    gate, up = fused.chunk(2, 1)
    return {"gate.weight": gate, "up.weight": up, "down.weight": down}


def shared(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shared experts' weights, [out, in]."""
    for at in ("shared_expert.", "shared_experts.", "shared_mlp."):
        own = {name.removeprefix(at): tensor for name, tensor in found.items() if name.startswith(at)}
        fused = own.get("gate_up_proj.weight", own.get("input_linear.weight"))
        if fused is not None:
            gate, up = fused.chunk(2)
            down = own.get("down_proj.weight", own.get("output_linear.weight"))
            return {"shared.gate.weight": gate, "shared.up.weight": up, "shared.down.weight": down}
        if "gate_proj" in own:  # one matrix for each of Inkling's
            return {f"shared.{n}.weight": own[f"{n}_proj"] for n in ("gate", "up", "down")}
        if own:
            return {f"shared.{n}.weight": own[f"{n}_proj.weight"] for n in ("gate", "up", "down")}
    return {}


def weights(found: Mapping[str, Tensor], spec: FFNSpec) -> dict[str, Tensor]:
    """Canonical weights of a module with experts."""
    spellings = {
        "router.weight": ROUTER, "router.bias": ("router.bias",), "route.correction": CORRECTION,
        "shared_gate.weight": ("shared_expert_gate.weight",), "biased.bias": ("bias",),
        "route.factor": ("gate.global_scale",), "post_norm.weight": ("post_mlp_layernorm.weight",),
    }  # fmt: skip
    own = {ours: found[theirs] for ours, names in spellings.items() for theirs in names if theirs in found}
    if "route.correction" in own:
        own["route.correction"] = own["route.correction"].flatten()  # Ernie's is [1, experts]
    return {**own, **experts(found, spec), **shared(found)}


@statement
@pytest.mark.parametrize("name", sorted(NAMES))
def test_experts_are_run_as_their_module_runs_them(name: str) -> None:
    model, specs, at = made(name)
    index, spec = max(specs.items())
    layer = model.get_submodule(at)[index]
    module = next(getattr(layer, n) for n in MODULES if hasattr(layer, n))
    found = dict(module.state_dict())
    beside = getattr(layer, "shared_mlp", None)  # Granite's stands beside the experts
    if beside is not None:
        found |= {f"shared_mlp.{n}": t for n, t in beside.state_dict().items()}
    x = torch.randn(1, 24, spec.d_model, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = module(x.clone())
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).reshape(x.shape)
        theirs = theirs if beside is None else theirs + beside(x)
        norm: dict[str, Any] = {"norm_position": "branch"} if spec.post_norm_inside else {"norm": "none"}
        inner = ffn_steps(steps(replace(spec, norm_gate=None, parallel=False, residual=False, **norm)))
        ours = run(inner, weights(found, spec), {"x": x})
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


# Their modules take more than x, the router's state and the kinds of tokens: the traces of their layers hold them.
TRACED = {"zaya", "ernie4_5_vl_moe_text"}


def test_every_row_is_run() -> None:
    assert {*ROWS, *ROUTERS} <= {*NAMES, *TRACED}
    assert all(TABLE[name]["result"] == "same" for name in TRACED)


# model_type → where a layer is; in it, what the block reads first (its norm, or the FFN), where the FFN is, and what
# gives the block's output ("" for the layer itself).
LAYERS = {
    **dict.fromkeys(("bamba", "falcon_h1", "jamba"), ("model.layers.{}", "pre_ff_layernorm", "feed_forward", "")),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), ("model.layers.{}", "ffn_norm", "feed_forward", "")),
    "granitemoehybrid": ("model.layers.{}", "post_attention_layernorm", "", ""),
    "nemotron_h": ("model.layers.{}", "norm", "mixer", ""),
    "olmo_hybrid": ("model.layers.{}", "post_attention_layernorm", "mlp", ""),
    "qwen3_5_text": ("model.layers.{}", "post_attention_layernorm", "mlp", ""),
    "recurrent_gemma": ("model.layers.{}", "channel_pre_norm", "mlp_block", ""),
    "xlstm": ("backbone.blocks.{}", "norm_ffn", "ffn", ""),
    "zamba": ("model.layers.1", "shared_transf.pre_ff_layernorm", "shared_transf.feed_forward", "shared_transf"),
    "git": ("git.encoder.layer.{}", "intermediate", "", ""),
    "musicgen": ("decoder.model.decoder.layers.{}", "final_layer_norm", "", ""),
    "blt": ("model.global_transformer.layers.{}", "post_attention_layernorm", "mlp", ""),
}
SPELLINGS = {
    "gate.weight": r"(gate_proj|w1|proj_up_gate)\.weight", "gate.bias": r"(gate_proj|w1|proj_up_gate)\.bias",
    "up.weight": r"(up_proj|w3|proj_up|fc1|intermediate\.dense)\.weight",
    "up.bias": r"(up_proj|w3|proj_up|fc1|intermediate\.dense)\.bias",
    "down.weight": r"(down_proj|w2|proj_down|fc2|output\.dense)\.weight",
    "down.bias": r"(down_proj|w2|proj_down|fc2|output\.dense)\.bias",
    "router.weight": r"(block_sparse_moe\.)?(router|gate)\.weight",
    "route.correction": r"expert_bias|gate\.e_score_correction_bias",
    "shared.up.weight": r"shared_experts\.up_proj\.weight", "shared.down.weight": r"shared_experts\.down_proj\.weight",
    "latent.weight": r"fc1_latent_proj\.weight", "widened.weight": r"fc2_latent_proj\.weight",
}  # fmt: skip


def caught(name: str) -> tuple[nn.Module, Mapping[str, tuple[Any, Any]]]:
    """The model after one forward pass, and every module's first input and output."""
    model = tiny(name).module
    seen: dict[str, tuple[Any, Any]] = {}

    def catch(at: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
            first = given[0] if given else next(iter(named.values()), None)
            seen[at] = (first.clone() if isinstance(first, Tensor) else first, out)

        return hook

    hooks = [module.register_forward_hook(catch(at), with_kwargs=True) for at, module in model.named_modules()]
    tokens = torch.randint(3, 60, (1, 8), generator=torch.Generator().manual_seed(2))
    codes = {"decoder_input_ids": tokens.repeat(4, 1)} if name == "musicgen" else {}
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False, **codes)
    for hook in hooks:
        hook.remove()
    return model, seen


def layer_weights(found: Mapping[str, Tensor], spec: FFNSpec, norm: str) -> dict[str, Tensor]:
    """Canonical weights among a layer's own."""
    own = {ours: t for ours, names in SPELLINGS.items() for n, t in found.items() if re.fullmatch(names, n)}
    for fused, prefix in (("experts.", ""), ("block_sparse_moe.experts.", ""), ("shared_mlp.", "shared.")):
        both = found.get(f"{fused}gate_up_proj", found.get(f"{fused}input_linear.weight"))
        if both is not None:
            own[f"{prefix}gate.weight"], own[f"{prefix}up.weight"] = both.chunk(2, -2)
        elif f"{fused}up_proj" in found:
            own[f"{prefix}up.weight"] = found[f"{fused}up_proj"]
        down = found.get(f"{fused}down_proj", found.get(f"{fused}output_linear.weight"))
        own |= {f"{prefix}down.weight": down} if down is not None else {}
    return own


@statement
@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_block_gives_what_the_layer_gives(name: str) -> None:
    model, seen = caught(name)
    path, norm, ffn, out = LAYERS[name]
    groups = tiny(name).model.model.groups
    stack = "global" if name == "blt" else groups[0].stack
    compared = 0
    for index, spec in {i: g.spec for g in groups if g.stack == stack for i in g.layers}.items():
        at = path.format(index)
        layer = dict(model.get_submodule(at).state_dict())
        inside = {n.removeprefix(f"{ffn}."): t for n, t in layer.items() if not ffn or n.startswith(f"{ffn}.")}
        own = layer_weights(inside, spec, norm)
        first = norm
        if spec.norm_position == "branch":
            first = ffn
        if spec.norm_position in ("pre", "pre+branch"):
            own |= {f"norm.{n}": layer[f"{norm}.{n}"] for n in ("weight", "bias") if f"{norm}.{n}" in layer}
        after = {"olmo_hybrid": "post_feedforward_layernorm", "lfm3": "post_ffn_norm", "git": "output.LayerNorm"}
        if spec.norm_position != "pre":
            behind = after[name]
            own |= {f"post_norm.{n}": layer[f"{behind}.{n}"] for n in ("weight", "bias") if f"{behind}.{n}" in layer}
        theirs = seen[at if not out else f"{at}.{out}"][1]
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        ours = run(steps(spec), own, {"x": seen[f"{at}.{first}"][0]})
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max(), index
        compared += 1
    assert compared


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
    assert "apply_residual_connection_post_layernorm = true is not covered" in refusal(values)


@pytest.mark.parametrize(
    ("name", "near"),
    [("lama", "llama"), ("gema2", "gemma2"), ("mixtrall", "mixtral"), ("deepsek_v3", "deepseek_v3"), ("t55", ""),
     ("my_new_model", ""), ("phi4mm", ""), ("qwen2_5_vlm", "qwen2_5_vl"), ("qwen9", ""), ("llama5", "")],
)  # fmt: skip
def test_only_a_misspelling_is_taken_for_another_type(name: str, near: str) -> None:
    with pytest.raises(FFNError) as refused:
        _read({"model_type": name, "hidden_size": 16}, name)
    assert refused.value.message == f"{name}/config.json: model_type '{name}' is not known"
    wanted = f"did you mean '{near}'" if near else "give the model's tensors (a directory or .safetensors file)"
    assert refused.value.hint.startswith(wanted)
