"""What a Request asks for is what runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.examples import notebook
from ffncli.models.source import load
from ffncli.run.engine.prepare import device_of, prepare
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


def test_what_is_assumed_is_noted(tmp_path: Path):
    stored = {f"layers.0.mlp.{n}.weight": torch.randn(shape) for n, shape in {"Wi": (12, 4), "Wo": (4, 6)}.items()}
    ready = prepare(load(folder(tmp_path, None, stored), Dimensions(activation="gelu")))
    assert ready.notes == ("assumed, because the files do not say: Wi: the gate's half is read as the first",)
