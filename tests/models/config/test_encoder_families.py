"""Encoders and encoder-decoders: how often stored layers run, what follows from two fields, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.model import Resolved
from tests.oracles.architectures import build, cases

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
)  # fmt: skip
def test_what_a_block_cannot_say_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(FFNError, match=r"config\.json") as caught:
        read(values)
    assert said in str(caught.value)
