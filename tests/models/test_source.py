"""SOURCE and dimension options: what they mean, and what is said of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.models import catalog, source
from ffncli.models.config.families import REFUSED
from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.model import block_model
from ffncli.models.source import load
from tests.oracles.checkpoints import GPT2, INDEX, LLAMA, T5, folder, tensors


def test_the_deciding_evidence_comes_first(tmp_path: Path):
    model = load(folder(tmp_path, LLAMA, tensors("llama")))
    assert model.evidence[0] == "gated: tensor 'model.layers.0.mlp.gate_proj.weight'"
    assert len(set(model.evidence)) == len(model.evidence)
    assert load("gpt2").evidence[0] == "catalog row in config.json fields"
    changed = load("gpt2", Dimensions(dropout=0.0, residual=False))
    assert changed.evidence == ("changed by options: residual, dropout", *load("gpt2").evidence)


def test_a_home_directory_and_names_with_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder(tmp_path / "gpt2", LLAMA)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/gpt2").model.model_type == "llama"
    assert load(" GPT2 ").model.main.spec == load("gpt2").model.main.spec


def test_what_belongs_to_a_file(tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("llama"))
    (tmp_path / "other.json").write_text(json.dumps(GPT2))
    assert load(f"{source}/config.json").checkpoint
    assert load(f"{source}/model.safetensors").checkpoint
    assert load(f"{source}/other.json").checkpoint is None  # whose weights those are nobody knows
    index = {"weight_map": dict.fromkeys(tensors("llama"), "model.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert load(f"{source}/{INDEX}").checkpoint


def test_a_config_alone_is_enough_and_a_directory_without_weights_says_so(tmp_path: Path):
    source = folder(tmp_path, LLAMA)
    assert load(f"{source}/config.json").notes == ()
    assert load(source).notes == (f"no safetensors in {source}: taken from the config alone",)
    (tmp_path / "model.pth").touch()
    assert "pickled weights are not read" in load(source).notes[0]
    with pytest.raises(FFNError, match=r"model\.pth is not a file of torch\.save"):
        load(f"{source}/model.pth")
    shutil.copy(tmp_path / "model.pth", tmp_path / "notes.txt")
    with pytest.raises(FFNError, match=r"notes\.txt is not a model"):
        load(f"{source}/notes.txt")


def test_a_shard_that_is_not_here_leaves_the_configs_dtype(tmp_path: Path):
    source = folder(tmp_path, {**LLAMA, "dtype": "bfloat16"})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors("llama"), "one.safetensors")}))
    assert load(source).model.dtype == "bf16"


def test_stacks_that_the_file_does_not_have_are_left_out(tmp_path: Path):
    names = {"wi": (6, 4), "wo": (4, 6)}
    import torch

    stored = {
        f"encoder.block.{i}.layer.1.DenseReluDense.{n}.weight": torch.zeros(s)
        for i in range(2)
        for n, s in names.items()
    }
    norms = {f"encoder.block.{i}.layer.1.layer_norm.weight": torch.zeros(4) for i in range(2)}
    model = load(folder(tmp_path, T5, {**stored, **norms}))
    assert {group.stack for group in model.model.groups} == {"encoder"}
    assert [note.split(" in ")[0] for note in model.notes] == ["no decoder tensors"]


def test_a_file_with_none_of_the_names_is_not_taken_for_half_a_model(tmp_path: Path):
    import torch

    with pytest.raises(FFNError) as refused:
        load(folder(tmp_path, T5, {"other": torch.zeros(1)}))
    assert "left out" not in str(refused.value)


def test_another_norm_has_its_own_kinds_bias():
    assert load("gpt2", Dimensions(norm="rmsnorm")).model.main.spec.norm_bias is False
    assert load("llama-2-7b", Dimensions(norm="layernorm")).model.main.spec.norm_bias is True
    spec = load("gpt2").model.main.spec
    assert load("gpt2", Dimensions(norm=spec.norm)).model.main.spec == spec


def test_options_keep_what_they_do_not_say_and_drop_what_no_longer_holds():
    given = FFNSpec(4, 8, norm="layernorm", norm_bias=False, moe=MoE(4, 2, 1, shared_d_ff=10))
    model = block_model(given, "b")
    assert with_dimensions(model, Dimensions(norm="layernorm")).model.main.spec == given
    assert with_dimensions(model, Dimensions(top_k=1)).model.main.spec.shared_width == 10
    assert with_dimensions(model, Dimensions(shared_experts=2)).model.main.spec.shared_width == 16


def test_norm_position_needs_a_norm():
    with pytest.raises(FFNError, match="needs norm"):
        load(None, Dimensions(d_model="4", norm_position="post"))
    assert load("gpt2", Dimensions(norm_position="post")).model.main.spec.norm_position == "post"


@pytest.mark.parametrize(
    ("said", "note"),
    [
        ({"bias": True, "d_ff": "8", "activation": "relu"}, None),
        ({"activation": "swiglu", "d_ff": "8"}, "no biases"),
        ({"activation": "gelu", "d_ff": "8"}, "biases"),
        ({"d_ff": "8"}, "activation relu, biases"),
        ({"experts": 1}, "d_ff = 4x, activation relu, biases"),
        ({"experts": 8, "bias": False}, "d_ff = 4x, activation relu, top_k = 2"),
        ({"experts": 8, "top_k": 1, "bias": False}, "d_ff = 4x, activation relu"),
    ],
)
def test_defaults_that_were_taken_are_noted(said, note):
    model = load(None, Dimensions(d_model="4", **said))
    assert model.notes == ((f"assuming {note}",) if note else ())


def test_one_expert_is_chosen_once_and_many_twice():
    assert [load("4x8", Dimensions(experts=n)).model.main.spec.moe.top_k for n in (1, 2, 8)] == [1, 2, 2]


def test_options_on_mixed_layers_say_which_ones_changed(tmp_path: Path):
    config = {"model_type": "qwen3_moe", "hidden_size": 4, "intermediate_size": 6, "moe_intermediate_size": 2}
    config |= {"num_hidden_layers": 3, "num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": [0, 1]}
    source = folder(tmp_path, {**config, "decoder_sparse_step": 1}) + "/config.json"
    model = load(source, Dimensions(d_ff="8"))
    assert [(bool(g.spec.moe), g.spec.d_ff) for g in model.model.groups] == [(False, 8), (True, 2)]
    assert model.notes[-1] == "widths and experts are changed in the dense layers only"


def test_multiples_of_d_model_are_exact():
    assert load("10x2.1x").model.main.spec.d_ff == 21  # 2.1 is no binary fraction
    assert load("4096x2.6875x").model.main.spec.d_ff == 11008


@pytest.mark.parametrize(
    ("source", "hint"),
    [("./gpt2", "the catalog has 'gpt2'"), ("openai/gpt2x", "hf://openai/gpt2x"), ("org/zzzzzz", "hf://org/zzzzzz"),
     ("./zzzzzz", "give a model directory")],
)  # fmt: skip
def test_a_path_that_is_not_there(source, hint):
    with pytest.raises(FFNError, match=hint):
        load(source)


def test_every_source_of_a_row_is_cited():
    citation = catalog.find("bert-large").citation
    assert citation.startswith("[T] huggingface/transformers")
    assert citation.endswith("; [P] the model's paper; [W] the dtype of the tensors in the released checkpoint")


# --- models that no row can say ---------------------------------------------------------------------------------------

MIXTRAL_LIKE = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_what_is_refused_from_a_config_is_refused_from_a_directory(model_type: str, tmp_path: Path):
    source = folder(tmp_path, {**MIXTRAL_LIKE, "model_type": model_type}, tensors("mixtral"))
    for text in (source, f"{source}/config.json"):
        with pytest.raises(FFNError, match=f"'{model_type}' is not covered") as refused:
            load(text)
        assert refused.value.hint == REFUSED[model_type]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/org/name", "hf://org/name"),
        ("http://huggingface.co/org/name/", "hf://org/name"),
        ("https://hf.co/Org-1/my.model_2?library=x#files", "hf://Org-1/my.model_2"),
        ("https://www.huggingface.co/org/name/tree/main", "hf://org/name@main"),
        ("HTTPS://huggingface.co/org/name/blob/v1.0/config.json", "hf://org/name@v1.0"),
        ("https://huggingface.co/org/name/resolve/0abc/model.safetensors", "hf://org/name@0abc"),
    ],
)
def test_the_address_of_a_models_page_is_its_name(address, name, monkeypatch):
    asked = []
    monkeypatch.setattr(source, "_from_hub", lambda text: asked.append(text) or catalog.find("gpt2"))
    assert load(address).model.name == "gpt2"
    assert asked == [name]


@pytest.mark.parametrize(
    "address",
    ["https://example.org/org/name", "https://huggingface.co/datasets/org/name", "https://huggingface.co", "https://",
     "https://huggingface.co/org/name/discussions/1", "https://huggingface.co.evil.org/org/name", "http:x"],
)  # fmt: skip
def test_another_address_is_refused_as_it_was_typed(address):
    with pytest.raises(FFNError, match=re.escape(f"{address!r} is not a model's page on the Hub; write it as hf://")):
        load(address)
