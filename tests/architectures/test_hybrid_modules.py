"""Hybrids and odd text towers, run whole: a layer's block, by our steps, gives what the layer itself gives.

A tiny model reads random tokens; what enters a layer's FFN block and what leaves the layer are caught on the way. So
norms, their places, multipliers, residuals and routings are seen, which counts cannot. Weights are random, all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec, steps
from ffncli.run.engine.execute import run
from tests.oracles.architectures.tiny import statement, tiny

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
}  # fmt: skip
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


def weights(found: Mapping[str, Tensor], spec: FFNSpec, norm: str) -> dict[str, Tensor]:
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
        own = weights(inside, spec, norm)
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
