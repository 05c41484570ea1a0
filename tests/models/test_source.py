"""SOURCE: what it and the dimension options mean; models, the blocks of the texts, and who uses which activation."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from ffncli.block.activations import CANONICAL, TABLE
from ffncli.block.analysis.gated import UNITS
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, unit_ops
from ffncli.block.symbols import right_hand_side
from ffncli.errors import FFNError
from ffncli.models import catalog, source
from ffncli.models.config.families import REFUSED
from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.examples import EXAMPLES, final_layer_alone, find
from ffncli.models.model import Group, Model, block_model, grouped
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
    assert load(source).notes == (f"no safetensors in {source}: the model is read from the config alone",)
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
        ("https://huggingface.co/gpt2", "hf://gpt2"),
        ("https://huggingface.co/bert-base-uncased/tree/main?x", "hf://bert-base-uncased@main"),
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
     "https://huggingface.co/org/name/discussions/1", "https://huggingface.co.evil.org/org/name", "http:x",
     "https://huggingface.co/models", "https://huggingface.co/gpt2/discussions", "https://huggingface.co/docs?q=x"],
)  # fmt: skip
def test_another_address_is_refused_as_it_was_typed(address):
    with pytest.raises(FFNError, match=re.escape(f"{address!r} is not a model's page on the Hub; write it as hf://")):
        load(address)


SMALL, LARGE = FFNSpec(4, 8), FFNSpec(4, 16)


def model(*groups: tuple[str, tuple[int, ...], FFNSpec]) -> Model:
    return Model("m", tuple(Group(*g) for g in groups))


def test_layers_with_equal_specs_are_one_group():
    assert grouped("decoder", {0: SMALL, 1: LARGE, 2: SMALL}) == [
        Group("decoder", (0, 2), SMALL),
        Group("decoder", (1,), LARGE),
    ]


def test_the_main_group_has_most_layers_or_comes_first():
    tied = model(("decoder", (0, 2), SMALL), ("decoder", (1, 3), LARGE))
    assert tied.main.spec == SMALL
    assert tied.layer_count == 4
    assert model(("decoder", (0,), SMALL), ("decoder", (1, 2), LARGE)).main.spec == LARGE


def test_a_layer_is_found_in_its_group_and_stack():
    both = model(("encoder", (0, 2), SMALL), ("encoder", (1,), LARGE), ("decoder", (0,), LARGE))
    assert (both.layer(None).stack, both.layer(None).index) == ("encoder", 0)
    assert both.layer("encoder.1").spec == both.layer("decoder.0").spec == LARGE
    with pytest.raises(FFNError, match=r"ambiguous; write encoder\.0 or decoder\.0"):
        both.layer("0")
    with pytest.raises(FFNError, match=r"'2' is ambiguous; write encoder\.2$"):
        both.layer("2")
    with pytest.raises(FFNError, match=r"m has encoder layers 0 to 2 and decoder layers 0 to 0"):
        both.layer("decoder.1")


# What the texts say: d_model, d_ff, activation, gated.
SAID = {
    "notebook": (4, 8, "relu", False),
    "explained": (512, 2048, "gelu", False),
    "llama": (4096, 11008, "silu", True),
    "conv": (512, 2048, "relu", False),
    "bert": (768, 3072, "gelu", False),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_dimensions_are_the_texts(name):
    spec = find(name).model.main.spec
    assert (spec.d_model, spec.d_ff, spec.activation, spec.gated) == SAID[name]
    assert spec.bias == (name != "llama")
    assert find(name).example.shape[-1] == spec.d_model


def test_what_is_not_given_is_said():
    for name in EXAMPLES:
        assert bool(find(name).evidence) == (not find(name).example.weights)
    assert find("explained").example.given == {(0, 0): 0.146, (0, 1): 0.108, (0, 2): 0.192, (0, 511): 0.11}


def test_llama_merges_first():
    block = find(" LLama ").example.block
    assert [right_hand_side(s, block) for s in block] == [
        "x + attention", "rmsnorm(merged)", "norm · W1", "norm · W3", "silu(gate)", "act ⊙ up", "hidden · W2",
    ]  # fmt: skip
    assert cost(block).params == 3 * 4096 * 11008


@pytest.mark.parametrize(("name", "hint"), [("notbook", "did you mean 'notebook'"), ("xyz", "use one of notebook, ex")])
def test_unknown_names(name, hint):
    with pytest.raises(FFNError, match=hint) as error:
        find(name)
    assert all(known in str(error.value) for known in EXAMPLES)


def test_a_final_layer_alone():
    assert [s.output for s in final_layer_alone(8, 30, True).example.block] == ["logits", "probs"]
    assert cost(final_layer_alone(8, 30, False).example.block).params == 240


# A family's name in the table → its model_type in transformers and the field of the config that says the activation.
CONFIGURED = {
    "BERT": "bert", "RoBERTa": "roberta", "BART": "bart", "ViT": "vit", "wav2vec 2.0": "wav2vec2",
    "Whisper": "whisper", "Falcon": "falcon", "Pythia": "gpt_neox", "ModernBERT": "modernbert", "Zamba": "zamba",
    "OPT": "opt", "Switch Transformers": "switch_transformers", "M2M-100": "m2m_100", "NLLB-MoE": "nllb-moe",
    "DETR": "detr", "DAB-DETR": "dab-detr", "T5 v1.0": "t5",
    "Nemotron": "nemotron", "nanochat": "nanochat", "Persimmon": "persimmon", "AFM": "arcee", "Jais-2": "jais2",
    "BitNet": "bitnet",
    "GPT-2": "gpt2", "GPT-J": "gptj", "Phi-2": "phi", "StarCoder": "gpt_bigcode", "SigLIP": "siglip_text_model",
    "Gemma": "gemma", "mT5": "mt5",
    "CLIP": "clip_text_model", "OWL-ViT": "owlvit_text_model", "ImageGPT": "imagegpt",
    "Llama": "llama", "Mistral": "mistral", "Mixtral": "mixtral", "Qwen": "qwen2", "DeepSeek": "deepseek_v3",
    "OLMo": "olmo2", "Phi-3": "phi3", "Phi-4": "phi3", "Granite": "granite", "Falcon3": "llama", "Apertus": "apertus",
    "MobileNet": "mobilenet_v2", "DeepSeek-V4's router": "deepseek_v4",
    "DeepSeek-V4": "deepseek_v4", "GLM-5.3-Flash": "glm5_next_text", "Hy4": "hy_v4", "Step-3.5": "step3p5",
    "Step-3.7": "step3p5", "Inkling-2": "inkling2_text",
}  # fmt: skip
FIELDS = ("scoring_func", "dense_act_fn", "hidden_activation", "hidden_act", "activation_function", "activation")
# What no config of transformers says: older than it, a part of a model, or decided by the model's code or its version.
ELSEWHERE = {
    "Transformer (2017)", "Primer", "GPT-3", "PaLM", "GPT-NeoX-20B", "BLOOM", "T5 v1.1", "gpt-oss",
    "Privacy Filter", "MiniMax-M3",
    "Kimi-K3",
    "bilinear GLU", "GLU", "MoE routers", "MEGA", "YOLOv4", "EnCodec", "MobileNetV3",
}  # fmt: skip


def families(used_by: str) -> list[str]:
    """`T5 v1.1, Gemma (gated)` → T5 v1.1 and Gemma; a year in brackets belongs to the name."""
    return [part.strip() for part in re.split("[,;]", re.sub(r" \((?!\d)[^)]*\)", "", used_by)) if part.strip()]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"\(\d+\)", "", name).lower())


def _named_by(model: str, table: Mapping[str, str]) -> set[str]:
    """The rows of the catalog's model's family, the one with the longest name that the model's name begins with."""
    rows: dict[str, set[str]] = {}
    for row, used_by in table.items():
        for family in families(used_by):
            if _plain(model).startswith(_plain(family)):
                rows.setdefault(_plain(family), set()).add(row)
    return rows[max(rows, key=len)] if rows else set()


@pytest.mark.parametrize("name", catalog.names())
def test_every_known_model_stands_at_its_activation_and_nowhere_else(name):
    """Of SwiGLU the tables name a few of the many families, of every other unit all."""
    model = catalog.find(name)
    assert model is not None
    functions = {group.spec.activation for group in model.model.groups}
    named = _named_by(name, {row.name: row.used_by for row in TABLE.values()})
    units = {
        unit
        for unit, row in UNITS.items()
        for spec in (group.spec for group in model.model.groups)
        if spec.gated and unit_ops(spec.activation, spec.limits) == (row.gate, row.up)
    }
    in_units = _named_by(name, {unit.name: unit.used_by for unit in UNITS.values()})
    assert named == functions or (functions == {"silu"} and not named)
    assert in_units in (units, units - {"swiglu"})
    assert bool(units) == any(group.spec.gated for group in model.model.groups)


def test_every_family_is_held_by_something():
    said = {f for row in (*TABLE.values(), *UNITS.values()) for f in families(row.used_by)}
    assert said == CONFIGURED.keys() | ELSEWHERE


@pytest.mark.parametrize("family", CONFIGURED)
def test_families_have_the_activation_that_their_config_says(family):
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[CONFIGURED[family]]()
    said = next((value for field in FIELDS if isinstance(value := getattr(config, field, None), str)), "")
    if family in ("DeepSeek", "DeepSeek-V4", "Inkling-2"):  # its scoring_func is the router's
        said = config.hidden_act
    rows = [row.name for row in TABLE.values() if family in families(row.used_by)]
    gates = [unit.gate.function for unit in UNITS.values() if family in families(unit.used_by)]
    assert set(rows + gates) == {CANONICAL[said.lower()]}
