"""Every mixture of experts of transformers, run: what our steps make of tokens is what its own module makes of them.

The counts of tests/architectures/test_counts.py cannot see a routing; this can. Parameters are found in memory by the
names that these modules give them, and are random, corrections and biases too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import ffn_steps
from ffncli.models.config.families.moe import ROWS
from ffncli.models.config.families.routers import ROWS as ROUTERS
from ffncli.models.config.read import from_config
from ffncli.models.model import Group
from ffncli.run.engine.execute import run
from tests.architectures.test_trace import TABLE
from tests.oracles.architectures import build, cases
from tests.oracles.architectures.moe import CASES as ROUTED
from tests.oracles.architectures.text_towers import CASES as TOWERS
from tests.oracles.architectures.tiny import statement, tiny

# ZAYA's, whose router has a second input, has a file of its own: tests/run/engine/test_router_mlp.py.
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
        "route.factor": ("gate.global_scale",),
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
        inner = ffn_steps(steps(replace(spec, norm="none", norm_gate=None, parallel=False, residual=False)))
        ours = run(inner, weights(found, spec), {"x": x})
        if "post_mlp_layernorm.weight" in found:  # A.X-K1's module ends with the norm of its branch
            ours = module.get_submodule("post_mlp_layernorm")(ours)
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


# Their modules take more than x, the router's state and the kinds of tokens: the traces of their layers hold them.
TRACED = {"zaya", "ernie4_5_vl_moe_text"}


def test_every_row_is_run() -> None:
    assert {*ROWS, *ROUTERS} <= {*NAMES, *TRACED}
    assert all(TABLE[name]["result"] == "same" for name in TRACED)
