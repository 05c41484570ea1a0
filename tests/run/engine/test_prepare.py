"""What a Request asks for is what runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import ffn_span, ffn_steps
from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.examples import notebook
from ffncli.models.model import Resolved
from ffncli.models.source import load
from ffncli.run.engine.execute import run
from ffncli.run.engine.locate import live_ffn
from ffncli.run.engine.prepare import device_of, prepare
from ffncli.run.engine.weights import random_weights, steps_with_weights
from tests.oracles.architectures import build, cases
from tests.oracles.architectures.traced import live_weights
from tests.oracles.checkpoints import LLAMA, folder, tensors
from tests.system import fake_gpu


def test_a_seed_decides_everything_that_is_drawn():
    model = load("palm-540b", Dimensions(d_model="4", d_ff="8"))
    one, same, other = (prepare(model, seed=seed) for seed in (None, 0, 1))
    for name in ("x", "attention"):
        assert torch.equal(one.inputs[name], same.inputs[name])
        assert not torch.equal(one.inputs[name], other.inputs[name])
    assert torch.equal(one.weights["up.weight"], same.weights["up.weight"])
    assert not torch.equal(one.weights["up.weight"], other.weights["up.weight"])
    assert (one.origin, other.origin) == ("random weights, seed 0", "random weights, seed 1")


def test_origin_names_the_layer(tmp_path: Path):
    stored = tensors("llama")
    ready = prepare(load(folder(tmp_path, LLAMA, stored)), layer="1")
    assert ready.origin == "weights of decoder layer 1"
    assert torch.equal(ready.weights["up.weight"], stored["model.layers.1.mlp.up_proj.weight"])


def test_an_examples_own_input_dtype_and_mask():
    example = notebook()
    ready = prepare(example, dtype="fp64")
    assert {w.dtype for w in ready.weights.values()} == {torch.float64}
    assert ready.mode.train
    assert set(ready.mode.masks) == {"dropout"}
    assert not prepare(example, train=False).mode.train
    assert prepare(example, seed=3).mode.masks == {}
    given = prepare(example, input="1,2,3,4")
    assert (given.inputs["x"].shape, given.mode.masks) == ((1, 4), {})
    assert prepare(example, input="ones").inputs["x"].shape == (4, 4)
    changed = with_dimensions(example, Dimensions(dropout=0.5))
    assert prepare(changed).mode.masks == {}


def test_without_an_example_dropout_is_off_unless_asked_for():
    model = load("4x8", Dimensions(dropout=0.5))
    assert not prepare(model).mode.train
    assert prepare(model, train=True).mode.train


def test_a_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch):
    """A user's own kernel launches on the current device, not on that of its arguments."""
    fake_gpu.install(monkeypatch, there := fake_gpu.FakeCudaTorch(count=2))
    assert device_of("cuda:1") == "cuda:1"
    assert there.current == 1


def renamed(was: str, now: str) -> dict[str, torch.Tensor]:
    """Llama's tensors with another name for a norm."""
    return {name.replace(was, now): tensor for name, tensor in tensors("llama").items()}


def test_without_the_norm_before_it_the_ffn_alone_is_run(tmp_path: Path):
    ready = prepare(load(folder(tmp_path, LLAMA, renamed("post_attention_layernorm", "strange"))), layer="1")
    assert [step.output for step in ready.steps] == ["gate", "up", "act", "hidden", "down"]
    assert set(ready.inputs) == {"norm"}
    (note,) = ready.notes
    assert "this file does not describe the norm before the FFN" in note
    assert "begins at ffn_input, which is 'norm'" in note


def test_without_the_norm_after_it_the_block_ends_with_the_ffn(tmp_path: Path):
    config = {**LLAMA, "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
    stored = renamed("post_attention_layernorm", "pre_feedforward_layernorm")
    ready = prepare(load(folder(tmp_path, config, stored)))
    assert [step.output for step in ready.steps] == ["norm", "gate", "up", "act", "hidden", "down"]
    (note,) = ready.notes
    assert "this file does not describe the norm after the FFN: the trace ends at ffn_output, which is 'down'" in note


@pytest.mark.parametrize(("lost", "first", "note"), [
    ([], "norm", None),
    (["post_norm"], "norm", "the norm after the FFN: the trace ends at ffn_output, which is 'experts'"),
    (["norm"], "router", "begins at ffn_input, which is 'norm', and ends at ffn_output"),
    (["norm", "post_norm"], "router", "begins at ffn_input, which is 'norm', and ends at ffn_output"),
])  # fmt: skip
def test_a_norm_that_ends_the_module_may_be_missing(lost: list[str], first: str, note: str | None):
    spec = FFNSpec(4, 8, norm="rmsnorm", norm_position="pre+branch", post_norm_inside=True, moe=MoE(2, 1))
    block = steps(spec)
    weights = random_weights(block, torch.Generator())
    there = {name: tensor for name, tensor in weights.items() if name.partition(".")[0] not in lost}
    kept, notes = steps_with_weights(block, there)
    assert (kept[0].output, kept[-1].output) == (first, "experts" if "post_norm" in lost else "post_norm")
    assert not note or note in notes[0]


def test_what_is_assumed_is_noted(tmp_path: Path):
    stored = {f"layers.0.mlp.{n}.weight": torch.randn(shape) for n, shape in {"Wi": (12, 4), "Wo": (4, 6)}.items()}
    ready = prepare(load(folder(tmp_path, None, stored), Dimensions(activation="gelu")))
    assert ready.notes == ("assumed, because the files do not say: Wi: the first half is read as the gate",)


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
    ("axk1", "1", "model.layers.1.mlp", ["model.layers.1.mlp"]),
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
