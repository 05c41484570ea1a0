"""Configs of DeepSeek-V4, Inkling and PhiMoE: published numbers, both ways to name layers, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ffncli.block.activations import Limits, hard_limits
from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.source import load
from ffncli.run.engine.prepare import prepare
from tests.oracles.architectures.tiny import tiny

FLASH = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "num_experts_per_tok": 6,
    "n_routed_experts": 256, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "num_hash_layers": 3,
    "expert_dtype": "fp4", "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
INKLING = {
    "model_type": "inkling_text", "vocab_size": 201024, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 24, "dense_intermediate_size": 96, "dense_mlp_idx": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "route_scale": 8.0, "hidden_act": "silu",
}  # fmt: skip


def read(values: dict, **changed):
    return from_config({**values, **changed}, "source", "config.json")


def test_deepseek_v4_flash():
    model = read(FLASH)
    expert = 3 * 4096 * 2048
    by_hand = 43 * (257 * expert + 256 * 4096) + 40 * 256  # the 256 numbers of a correction, not in the first layers
    assert count(model).ffn_params_total == by_hand == 278_152_620_032  # of published 284 B
    active = sum(group.ffn_params_active_per_layer * len(group.layers) for group in count(model).groups)
    assert active == by_hand - 43 * 250 * expert  # of published 13 B
    first, last = model.groups
    assert (first.layers, last.layers) == (tuple(range(3)), tuple(range(3, 43)))
    assert (first.spec.moe.lookup, first.spec.moe.correction) == (129280, False)
    assert (last.spec.moe.lookup, last.spec.moe.correction, last.spec.moe.score) == (None, True, "sqrtsoftplus")
    assert (first.spec.limits, last.spec.residual) == (hard_limits(10.0), False)
    assert model.notes == (
        "decoder: in 3 of the layers a table of 129,280 × 6 integers chooses the experts of each token id: "
        "not parameters, so not counted",
    )
    named = {name: value for name, value in FLASH.items() if name != "num_hash_layers"}
    kinds = ["hash_moe"] * 3 + ["moe"] * 40
    assert read(named, mlp_layer_types=kinds).groups == read(named).groups == model.groups


@pytest.mark.parametrize(("field", "value"), [
    ("n_shared_experts", 2), ("scoring_func", "tanh"), ("mlp_bias", True),
    ("mlp_layer_types", ["dense"] * 43), ("num_hash_layers", -1), ("topk_method", "greedy"),
])  # fmt: skip
def test_what_deepseek_v4_does_not_do_is_refused_by_name(field, value):
    with pytest.raises(FFNError) as refused:
        read(FLASH, **{field: value})
    assert field in refused.value.message


def test_inklings_two_widths():
    """With dense_intermediate_size, intermediate_size is the experts' width; without, it is the dense layers'."""
    old, plain = read(INKLING), {n: v for n, v in INKLING.items() if n != "dense_intermediate_size"}
    new = read(plain, intermediate_size=96, moe_intermediate_size=24,
               mlp_layer_types=["dense", "dense", "sparse", "sparse"])  # fmt: skip
    assert [(g.spec.d_ff, bool(g.spec.moe), len(g.layers)) for g in old.groups] == [(96, False, 2), (24, True, 2)]
    assert new.groups == old.groups
    expert = 3 * 64 * 24
    assert count(old).ffn_params_total == 2 * (3 * 64 * 96 + 1) + 2 * (10 * expert + 10 * 64 + 8 + 1)
    with pytest.raises(FFNError, match="shared_expert_sink"):
        read(INKLING, shared_expert_sink=False)


def test_inkling_2_and_phimoe():
    inkling = {"model_type": "inkling2_text", "hidden_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2,
               "n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4}  # fmt: skip
    spec = read(inkling, mlp_gate_softcap=3.0).main.spec
    assert (spec.limits, spec.moe.scale, spec.moe.eps) == (Limits(gate_cap=3.0, up_cap=25.0), 8.0, 1e-20)
    phimoe = {"model_type": "phimoe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
    moe = read(phimoe, router_jitter_noise=0.05).main.spec.moe
    assert (moe.order, moe.threshold, moe.renormalise) == ("one_by_one", 0.1, False)
    with pytest.raises(FFNError, match="num_experts_per_tok"):
        read(phimoe, num_experts_per_tok=3)


@pytest.mark.parametrize(("change", "message"), [
    (lambda table: table + 7, "lists experts"), (lambda table: table - 1, "lists experts"),
    (lambda table: table[:, :1].clone(), "has shape"), (lambda table: table.float(), "expected integers"),
    (lambda table: None, "no tensor tid2eid"),
])  # fmt: skip
def test_a_wrong_table_is_refused(change, message, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    source = tiny("deepseek_v4").folder
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.ffn.gate.tid2eid"
    table = tensors.pop(name)
    assert torch.equal(prepare(load(str(source)), layer="0").weights["route.lookup"], table)
    changed = change(table)
    save_file(tensors | ({} if changed is None else {name: changed}), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text("utf-8"))), "utf-8")
    with pytest.raises(FFNError, match=message):
        prepare(load(str(tmp_path)), layer="0")


ZAYA = {
    "model_type": "zaya", "vocab_size": 262272, "hidden_size": 2048, "num_hidden_layers": 40, "num_experts": 16,
    "num_experts_per_tok": 1, "moe_intermediate_size": 2048, "router_hidden_size": 256, "hidden_act": "silu",
    "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_zayas_router_by_hand():
    first, rest = read(ZAYA).groups
    assert (first.layers, rest.layers) == ((0,), tuple(range(1, 40)))
    router = 256 * 2048 + 256 + 2 * (256 * 256 + 256) + 17 * 256 + 17
    assert count(read(ZAYA)).ffn_params_total == 40 * (router + 16 * 3 * 2048 * 2048) + 39 * 256
    assert (first.spec.moe.router_carries, rest.spec.moe.router_carries) == (False, True)
    assert (rest.spec.moe.skip_experts, rest.spec.moe.renormalise, rest.spec.residual) == (1, False, False)
    with pytest.raises(FFNError, match="num_experts_per_tok"):
        read(ZAYA, num_experts_per_tok=2)


@pytest.mark.parametrize(("command", "said"), [
    (("verify",), "its router is an MLP, which no check and no kernel covers"),
    (("bench",), "its router is an MLP, which no kernel computes"),
    (("trace", "--layer", "1", "--input-ids", "3,4"), "its router gets a state from the router in the layer before"),
])  # fmt: skip
def test_what_no_run_covers_of_zaya_is_refused_in_one_line(command, said, call):
    name, *options = command
    code, _, err = call(name, str(tiny("zaya").folder), *options)
    *progress, line = err.splitlines()  # of saving the model
    assert (code, said in line, any("error" in text for text in progress)) == (2, True, False)
