"""What lies beside the FFNs by the tensors alone, against the modules that transformers builds."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ffncli.models import catalog
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import ModelCount, count
from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.evidence.agreement import with_inventory
from ffncli.models.files.headers import Columns
from ffncli.models.files.inventory import Inventory, collect
from ffncli.models.model import Resolved
from ffncli.models.source import load
from ffncli.models.tensors.matching import items_of
from ffncli.models.tensors.non_ffn import MeasuredNonFFN, measure
from ffncli.models.tensors.recognise import recognise
from tests.architectures.test_table import TABLE
from tests.oracles.architectures import build, cases, config, numbers
from tests.oracles.architectures.nested import composites
from tests.oracles.architectures.tiny import statement, tiny

pytestmark = pytest.mark.architectures

CASES = cases()
_CORRECTION = r".*(e_score_correction_bias|expert_bias|router\.bias)|.*balancing_biases"

# model_type → (attention, norms) of layer 1 (layer 0 of the decoder where there are two stacks): patterns by hand
_BERT = (r".*\.layer\.1\.attention\.(self|output\.dense)\..*", r".*\.layer\.1\.(attention\.)?output\.LayerNorm\..*")
_LLAMA = (r"model\.layers\.1\.self_attn\..*", r"model\.layers\.1\.\w+norm\d?\.weight")
_BART = (r"model\.encoder\.layers\.1\.self_attn\..*", r"model\.encoder\.layers\.1\.(self_attn|final)_layer_norm\..*")
PARTS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("ernie", "rembert", "deberta", "deberta-v2", "roformer", "nystromformer", "tapas", "mra"), _BERT),
    "esm": (_BERT[0], r"esm\.encoder\.layer\.1\.(attention\.)?LayerNorm\..*"),
    "roberta-prelayernorm": (_BERT[0], r".*\.layer\.1\.(attention|intermediate)\.LayerNorm\..*"),
    "mpnet": (r"mpnet\.encoder\.layer\.1\.attention\.attn\..*", r".*\.layer\.1\.(attention|output)\.LayerNorm\..*"),
    "xlnet": (
        r"transformer\.layer\.1\.rel_attn\.(?!layer_norm).*",
        r"transformer\.layer\.1\.(rel_attn|ff)\.layer_norm\..*",
    ),
    "ctrl": (r"transformer\.h\.1\.multi_head_attention\..*", r"transformer\.h\.1\.layernorm[12]\..*"),
    "dbrx": (
        r"transformer\.blocks\.1\.norm_attn_norm\.attn\..*",
        r"transformer\.blocks\.1\.norm_attn_norm\.norm_[12]\.weight",
    ),
    # Norms inside the attention are its own; the one inside the MLP is the layer's.
    "bitnet": (_LLAMA[0], r"model\.layers\.1\.(mlp\.ffn_sub_norm|\w+_layernorm)\.weight"),
    **dict.fromkeys(("diffllama", "hyperclovax"), _LLAMA),
    **dict.fromkeys(("blenderbot", "pegasus", "marian", "mvp", "plbart"), _BART),
    "longt5": (
        r"encoder\.block\.1\.layer\.0\.LocalSelfAttention\..*",
        r"encoder\.block\.1\.layer\.[01]\.layer_norm\.weight",
    ),
    "voxtral_realtime": (r"(?!)", r"(?!)"),  # a small MLP scales its norm
    "falcon_h1": (r"model\.layers\.1\.(mamba|self_attn)\..*", r"model\.layers\.1\.(input|pre_ff)_layernorm\.weight"),
    "xlstm": (r"backbone\.blocks\.1\.mlstm_layer\..*", r"backbone\.blocks\.1\.norm_(mlstm|ffn)\.weight"),
}

# What a file holds that is not the text model's.
APART = r".*(vision|audio|visual|image_|multi_modal_projector|embed_vision|embed_audio|vision_embed_tokens)\b.*"
APART = r"(model\.)?(\w*vision\w*|\w*audio\w*|visual|multi_modal_projector)\..*"
# Whose total the tensors' names do not tell, and why.
UNTOLD = {
    "blt": "its patcher is a model of its own beside three stacks",
    **dict.fromkeys(("git", "t5gemma2"), "no module holds the text model alone"),
    **dict.fromkeys(("modernvbert", "ultravbert"), "its heads for retrieval are neither text nor image"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "its text encoder conditions a decoder of sound"),
    **dict.fromkeys(("phi4_multimodal",), "adapters for image and sound lie inside the text model"),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), "its encoder of sound is called encoder"),
    "neomme": "its towers are not set apart by name",
    "vibevoice_asr": "its tokenizers of sound are not known by name",
    "luke": "its config ties the head, its class does not",
    **dict.fromkeys(
        (
            "ernie4_5_vl_moe_text", "evolla", "higgs_audio_v2", "instructblip_qformer", "instructblipvideo_qformer",
            "layoutlmv2", "lilt", "lxmert", "tvp",  # the FFNs of other tokens among them
            "blt_local_decoder", "blt_local_encoder", "chameleon", "csm", "gradium_phonon_tts", "idefics",
            "inkling_text", "inkling2_text", "pocket_tts", "qwen3_omni_moe_talker_code_predictor",
            "qwen3_omni_moe_talker_text", "speecht5", "udop", "vilt", "visual_bert",
        ),
        "some of its tensors have names of no known place",
    ),
}  # fmt: skip
# Tables that are no parameters of the module, but stored: a file shows them like parameters.
STORED_TABLES = {
    "mistral_large4_text": r"rotary_emb\.alpha",
    "videoprism_text_model": r"embeddings\.position_embedding",
}


def stored(name: str) -> Inventory:
    """What the tiny model's file would hold: tied tensors once, buffers too."""
    model = tiny(name).module
    kept = model.state_dict(keep_vars=True)
    tensors = {n: p for n, p in (*model.named_parameters(), *model.named_buffers()) if n in kept}
    shapes = [tuple(p.shape) for p in tensors.values()]
    columns = Columns(list(tensors), ["F32"] * len(tensors), shapes, [4 * prod(shape) for shape in shapes])
    return Inventory("here", *collect([columns]))


def configured(name: str) -> Resolved:
    """The tiny model by its config alone."""
    return from_config(tiny(name).config, "config.json", "config.json")


def saved(name: str) -> Resolved:
    """The same with its tensors."""
    return with_inventory(configured(name), stored(name))


def measured(found: Resolved, inventory: Inventory) -> MeasuredNonFFN:
    """What the tensors alone say."""
    items = items_of(inventory, found.quantization)
    return measure(found.model, items, recognise(items, found.model.main.spec.d_model)[0])


@statement
@pytest.mark.parametrize("name", PARTS)
def test_attention_and_norms_of_a_layer(name: str) -> None:
    model, found = tiny(name).module, saved(name)
    assert configured(name).model.non_ffn is None
    counted = count(found)
    attention, norms = (numbers(model, pattern) for pattern in PARTS[name])
    if not attention:
        assert (counted.attention_params_per_layer, counted.ffn_share_of_layer) == (None, None)
        return
    assert (counted.attention_params_per_layer, counted.layer_norm_params_per_layer) == (attention, norms)
    ffn = counted.ffn_params_per_layer
    assert counted.ffn_share_of_layer == ffn / (ffn + attention + norms)
    assert any(line.startswith("attention and norms: from the tensors") for line in counted.evidence)


SAME = [name for name, line in TABLE.items() if line["result"] == "same"]


@statement
@pytest.mark.parametrize("name", [name for name in SAME if name in composites()])
def test_the_text_model_of_a_composite_is_no_more_than_the_whole(name: str) -> None:
    """What its other towers and bridges are called is not known of each: they may be left out, never counted twice."""
    total, model = _total(saved(name), stored(name)), tiny(name).module
    tensors = [*model.parameters(), *model.buffers()]
    assert total is None or total <= sum(tensor.numel() for tensor in tensors)


@statement
@pytest.mark.parametrize("name", [name for name in SAME if name not in composites() and name != "pop2piano"])
def test_whole_model(name: str) -> None:
    """Every parameter of the module, tied ones once, other towers left out, and the choice corrections."""
    found, model = saved(name), tiny(name).module
    assert [str(difference) for difference in found.differences] == []
    total = _total(found, stored(name))
    if name in UNTOLD:
        assert total is None
        return
    tensors = dict(model.named_parameters())
    whole = sum(p.numel() for n, p in tensors.items() if not re.match(APART, n))
    buffers = rf"{_CORRECTION}|{STORED_TABLES.get(name, '(?!)')}"
    whole += sum(b.numel() for n, b in model.named_buffers() if re.fullmatch(buffers, n))
    assert total == whole
    assert configured(name).model.non_ffn or count(found).model_params_total == whole


def test_a_head_that_the_config_ties_is_counted_once_though_the_class_has_two() -> None:
    found, model = saved("pop2piano"), tiny("pop2piano").module
    head = model.get_output_embeddings().weight
    assert head is not model.get_input_embeddings().weight
    assert _total(found, stored("pop2piano")) == sum(p.numel() for p in model.parameters()) - head.numel()


@statement
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_a_decoders_tied_head_multiplies_by_the_embedding(name: str) -> None:
    """Of the two stacks, the decoder has the head: no parameter is only looked up."""
    model = tiny(name).module
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert measured(saved(name), stored(name)).lookup == 0


def _total(found: Resolved, inventory: Inventory) -> int | None:
    params = measured(found, inventory).params
    return None if params is None else params + count(found).ffn_params_total


_LLAMA_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.mark.parametrize(("gguf", "table"), [
    (False, "model.layers.1.engram.multi_head_embedding.embedding.weight"), (True, "blk.1.engram_embd.weight"),
    (False, "model.layers.1.ple.ple_embedding.ngram_embedding.weight"), (True, "per_layer_token_embd.weight"),
    (False, "model.ngram_embeddings.embedders.0.weight"), (False, "model.embed_tokens_per_layer.weight"),
])  # fmt: skip
def test_tables_by_tokens_are_in_the_whole(gguf: bool, table: str) -> None:
    """A table of 3,001 rows in a file: all of it is in the model, and a token multiplies by none of it."""
    shapes = {name: tuple(p.shape) for name, p in tiny("llama").module.named_parameters()}
    for theirs, ours in _LLAMA_NAMES.items() if gguf else ():
        shapes = {name.replace(theirs, ours): shape for name, shape in shapes.items()}
    embedding = shapes["token_embd.weight" if gguf else "model.embed_tokens.weight"]
    plain, larger = (_with(shapes | more) for more in ({}, {table: (3001, 7)}))
    assert plain.model_params_total is not None
    assert larger.model_params_total == plain.model_params_total + 3001 * 7
    assert larger.model_params_active is not None
    assert larger.model_params_active_no_embedding is not None
    looked_up = larger.model_params_active - larger.model_params_active_no_embedding
    assert looked_up == prod(embedding) + 3001 * 7
    assert larger.ffn_share_of_model == larger.ffn_params_total / larger.model_params_total


def _with(shapes: Mapping[str, tuple[int, ...]]) -> ModelCount:
    columns = Columns(
        list(shapes), ["F32"] * len(shapes), list(shapes.values()), [4 * prod(s) for s in shapes.values()]
    )
    return count(with_inventory(configured("llama"), Inventory("here", *collect([columns]))))


def test_other_towers_are_left_out_and_named() -> None:
    found, model = saved("qwen2_audio"), tiny("qwen2_audio").module
    left_out = measured(found, stored("qwen2_audio")).left_out
    modules = ("audio_tower", "multi_modal_projector")
    assert left_out == {name: numbers(model, rf"model\.{name}\..*") for name in modules}
    tower, bridge = left_out.values()
    assert found.notes == (
        f"not counted: module 'audio_tower', {tower:,} parameters: the counts cover only the text model",
        f"not counted: module 'multi_modal_projector', {bridge:,} parameters: the counts cover only the text model",
    )
    assert [(part.what, part.parameters) for part in count(found).not_counted][:2] == [
        ("module 'audio_tower'", tower), ("module 'multi_modal_projector'", bridge),
    ]  # fmt: skip


def test_a_multimodal_config_alone_says_that_other_towers_are_left_out() -> None:
    values = {"model_type": "gemma3", "text_config": config("gemma3_text", CASES["gemma3_text"]).to_dict()}
    model = from_config(values, "config.json", "config.json")
    assert model.notes == ("not counted: other towers: the counts cover only the text model",)
    assert from_config(values["text_config"], "config.json", "config.json").notes == ()


def _beside(**changes: Any) -> Resolved:
    """A family without a row of its attention: this config beside the tensors of one like it."""
    name = "hyperclovax"
    model = build(name, CASES[name], meta=True)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()} | changes.pop("more", {})
    columns = Columns(list(shapes), ["F32"] * len(shapes), [*shapes.values()], [4 * prod(s) for s in shapes.values()])
    values = {**config(name, CASES[name]).to_dict(), **changes}
    return with_inventory(from_config(values, "config.json", "config.json"), Inventory("here", *collect([columns])))


def test_a_tied_head_that_is_stored_twice_counts_once() -> None:
    """Untied: both tables are the model's, and one is only looked up. Tied: one, and it is multiplied as the head."""
    table = 64 * 16
    untied, tied, unsaid = (count(_beside(tie_word_embeddings=tie)) for tie in (False, True, None))
    assert untied.model_params_total is not None
    assert untied.model_params_active_no_embedding == untied.model_params_total - table
    assert tied.model_params_total == untied.model_params_total - table
    assert tied.model_params_active_no_embedding == tied.model_params_total
    assert (unsaid.model_params_total, unsaid.ffn_share_of_model) == (None, None)
    assert unsaid.attention_params_per_layer == untied.attention_params_per_layer


def test_constants_are_no_parameters() -> None:
    more = {"model.rotary_emb.inv_freq": (2,), "model.layers.1.self_attn.rotary_emb.inv_freq": (2,),
            "model.layers.1.self_attn.k_scale": (1,), "model.position_ids": (1, 64)}  # fmt: skip
    assert count(_beside(more=more)).model_params_total == count(_beside()).model_params_total
    assert count(_beside(more=more)).attention_params_per_layer == count(_beside()).attention_params_per_layer


def test_a_layer_with_something_unknown_in_it_says_nothing() -> None:
    plain, adapted = count(_beside()), count(_beside(more={"model.layers.1.bottleneck.weight": (16, 4)}))
    assert plain.attention_params_per_layer is not None
    assert (adapted.attention_params_per_layer, adapted.layer_norm_params_per_layer) == (None, None)
    assert adapted.model_params_total == (plain.model_params_total or 0) + 64


def test_a_file_without_some_of_the_layers_has_no_total() -> None:
    found = _beside(num_hidden_layers=5)
    assert [difference.name for difference in found.differences] == ["layers"]
    assert count(found).model_params_total is None
    assert count(_beside(intermediate_size=48)).model_params_total is None  # nor one of other FFNs


def test_layers_of_multi_token_prediction_are_left_out() -> None:
    layer = {n: tuple(p.shape) for n, p in build("hyperclovax", CASES["hyperclovax"], meta=True).named_parameters()
             if n.startswith("model.layers.3.")}  # fmt: skip
    more = {name.replace("layers.3", "layers.4"): shape for name, shape in layer.items()}
    found = _beside(more={**more, "model.layers.4.eh_proj.weight": (16, 32)}, num_nextn_predict_layers=1)
    assert found.differences == ()
    assert count(found).model_params_total == count(_beside()).model_params_total
    module = {name.replace("model.layers.3", "mtp.layers.0"): shape for name, shape in layer.items()}
    assert (
        count(_beside(more={**module, "mtp.fc.weight": (16, 32)})).model_params_total
        == count(_beside()).model_params_total
    )


def test_another_d_ff_keeps_the_attention_and_another_d_model_does_not() -> None:
    model = _beside()
    before, wider = count(model), count(with_dimensions(model, Dimensions(d_ff="80")))
    assert wider.attention_params_per_layer == before.attention_params_per_layer
    more = wider.ffn_params_total - before.ffn_params_total
    assert wider.model_params_total == (before.model_params_total or 0) + more
    assert count(with_dimensions(model, Dimensions(d_model="32"))).attention_params_per_layer is None


@pytest.mark.parametrize(("name", "d_model", "heads"), [("transformer-base", 512, 8), ("transformer-big", 1024, 16)])
def test_the_transformer_of_the_paper(name: str, d_model: int, heads: int) -> None:
    """torch's attention and norms, without the biases that the paper's attention does not have."""
    attention = numbers(torch.nn.MultiheadAttention(d_model, heads, bias=False, device="meta"), ".*")
    norm = numbers(torch.nn.LayerNorm(d_model, device="meta"), ".*")
    model = catalog.find(name)
    assert model is not None
    encoder, decoder = count(model).groups
    assert (encoder.attention_params_per_layer, encoder.layer_norm_params_per_layer) == (attention, 2 * norm)
    assert (decoder.attention_params_per_layer, decoder.layer_norm_params_per_layer) == (2 * attention, 3 * norm)
    ffn = encoder.ffn_params_per_layer
    assert encoder.ffn_share_of_layer == ffn / (ffn + attention + 2 * norm)
    assert count(model).model_params_total is None


def test_a_base_model_has_no_head(tmp_path: Path) -> None:
    """What is stored decides, where all of it is here: an untied LlamaModel has no lm_head."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 60,
    }
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    found = count(load(str(tmp_path)))
    assert (found.model_params_total, found.differences) == (sum(p.numel() for p in model.parameters()), ())
    assert found.model_params_total == found.stored_params
