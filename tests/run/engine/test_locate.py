"""Where FFNs lie in models in memory; tests/architectures/test_table.py asks it of every architecture."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_span, ffn_steps
from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.model import Resolved
from ffncli.run.engine.execute import run
from ffncli.run.engine.locate import live_ffn
from tests.oracles.architectures import build, cases
from tests.oracles.architectures.traced import live_weights

TINY = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 32}


def described(model: Any, name: str) -> Resolved:
    """What ffn makes of the config that transformers would write."""
    return from_config(json.loads(json.dumps(model.config.to_dict(), default=str)), name, name)


@pytest.mark.parametrize(("name", "layer", "enters", "leaves"), [
    ("bert", "0", "bert.encoder.layer.0.intermediate.dense", ["bert.encoder.layer.0.output.dense"]),
    ("opt", "3", "model.decoder.layers.3.fc1", ["model.decoder.layers.3.fc2"]),
    ("bloom", "1", "transformer.h.1.mlp.dense_h_to_4h", ["transformer.h.1.mlp.dense_4h_to_h"]),
    ("t5", "decoder.1", "decoder.block.1.layer.2.DenseReluDense.wi", ["decoder.block.1.layer.2.DenseReluDense.wo"]),
    ("mixtral", "2", "model.layers.2.mlp", ["model.layers.2.mlp"]),
    ("granitemoeshared", "0", "model.layers.0.block_sparse_moe",
     ["model.layers.0.block_sparse_moe", "model.layers.0.shared_mlp"]),
    ("axk1", "1", "model.layers.1.mlp", ["model.layers.1.mlp.experts", "model.layers.1.mlp.shared_experts"]),
    ("zamba", "0", "model.layers.1.shared_transf.feed_forward.gate_proj",
     ["model.layers.1.shared_transf.feed_forward.down_proj"]),
])  # fmt: skip
def test_modules_that_the_input_enters_and_the_output_leaves(name: str, layer: str, enters: str, leaves: list[str]):
    module = build(name, cases()[name], meta=True)
    model = described(module, name)
    found = live_ffn(module, model, model.model.layer(layer))
    assert (found.enters, list(found.leaves)) == (enters, leaves)
    assert enters.startswith(f"{found.layer}.")
    assert {*map(type, map(module.get_submodule, [found.layer, *found.norms.values()]))}  # all of them are there


def test_one_layer_that_runs_as_all_of_them():
    module = build("albert", replace(cases()["albert"], values={}), meta=True)
    model = described(module, "albert")
    at = "albert.encoder.albert_layer_groups.0"
    found = live_ffn(module, model, model.model.layer("0"))
    assert (found.layer, found.enters) == (at, f"{at}.albert_layers.0.ffn")
    assert found.norms == {"post_norm": f"{at}.albert_layers.0.full_layer_layer_norm"}


def test_a_norm_without_parameters_is_found_by_its_modules_name():
    module = build("olmo", cases()["olmo"], meta=True)
    model = described(module, "olmo")
    assert live_ffn(module, model, model.model.layer("1")).norms == {"norm": "model.layers.1.post_attention_layernorm"}


def test_a_square_conv1d_in_memory_gives_what_its_module_gives():
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY, n_inner=16)).eval()
    model = described(module, "gpt2")
    layer = model.model.layer("1")
    x = torch.randn(3, 16)
    weights, inner = live_weights(module, model, layer), ffn_steps(steps(layer.spec))
    with torch.no_grad():
        ours, theirs = run(inner, weights, {ffn_span(steps(layer.spec))[0]: x}), module.transformer.h[1].mlp(x)
    assert set(weights) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_rows_of_identity_experts_that_nothing_reads_are_left_out():
    case = cases()["longcat_flash"]
    module = build("longcat_flash", replace(case, values={**case.values, "zero_expert_num": 4}), meta=True)
    model = described(module, "longcat_flash")
    layer = model.model.layer("experts.1")
    weights = live_weights(module, model, layer)
    experts = layer.spec.moe.experts
    assert module.get_parameter("model.layers.1.mlp.experts.gate_up_proj").shape[0] == experts + 4
    assert {len(weights[f"{n}.weight"]) for n in ("gate", "up", "down")} == {experts}
    assert len(weights["router.weight"]) == experts + 4


def test_weights_in_memory_are_the_models_own_tensors():
    module = build("llama", cases()["llama"])
    model = described(module, "llama")
    up = live_weights(module, model, model.model.layer("0"))["up.weight"]
    assert up.data_ptr() == module.get_parameter("model.layers.0.mlp.up_proj.weight").data_ptr()
    assert not up.requires_grad


def test_a_layer_or_an_ffn_that_is_not_there():
    model = described(build("llama", cases()["llama"], meta=True), "llama")
    shorter = build("llama", replace(cases()["llama"], values={"num_hidden_layers": 2}), meta=True)
    for module in (shorter, nn.Linear(4, 4)):
        with pytest.raises(FFNError, match="no FFN of decoder layer 3 was recognised in the model in memory"):
            live_ffn(module, model, model.model.layer("3"))
