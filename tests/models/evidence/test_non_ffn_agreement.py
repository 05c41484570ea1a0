"""Attention and vocabulary, config against tensors: what must differ does, and nothing that transformers builds."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.models.config.read import FAMILIES, from_config
from ffncli.models.counting.count import count
from ffncli.models.evidence.agreement import with_inventory
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.inventory import Inventory
from ffncli.models.model import Disagreement, Resolved
from tests.models.config.test_non_ffn import CASES, UNSAID
from tests.models.tensors.test_non_ffn import measured
from tests.oracles.whole import build

_HEADS = ("", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MASKED_LM", "CAUSAL_LM")
TRIED = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name, cases in CASES.items() if name in FAMILIES
    for i in range(len(cases)) if f"{name}-{i}" not in UNSAID
]  # fmt: skip


def inventory(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> Inventory:
    """The headers of a checkpoint in one file, without a file."""
    tensors = {name: TensorInfo(dtype, shape, 4 * prod(shape)) for name, shape in shapes.items()}
    return Inventory("here", tensors, dict.fromkeys(tensors, 1))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Everything that a checkpoint of it would hold, tied tensors by each of their names."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def beside(values: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> Resolved:
    """The model of a config beside these tensors."""
    return with_inventory(from_config(values, "config.json", "config.json"), inventory(stored))


@cache
def _classes(model_type: str) -> tuple[str, ...]:
    """The classes that transformers builds of a model_type: the bare model, and with each of the heads of tasks."""
    tables = [f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES" for head in _HEADS]
    found = [getattr(modeling_auto, table).get(model_type) for table in tables]
    return tuple(dict.fromkeys(n if isinstance(n, str) else n[0] for n in found if n))


def _models(values: Mapping[str, Any]) -> Iterator[nn.Module]:
    """A config's model with its language-model head, bare, and with the heads of tasks."""
    yield build(values).model
    given = {name: value for name, value in values.items() if name != "model_type"}
    for name in _classes(values["model_type"]):
        with torch.device("meta"):
            yield getattr(transformers, name)(CONFIG_MAPPING[values["model_type"]](**given))


@pytest.mark.architectures
@pytest.mark.parametrize(("name", "number"), TRIED)
def test_nothing_that_transformers_builds_differs(name: str, number: int) -> None:
    values = {"model_type": name, **CASES[name][number]}
    for model in _models(values):
        found = beside(values, shapes(model))
        assert [str(difference) for difference in found.differences] == []
        tensors = measured(found, inventory(shapes(model)))
        compared = sum(map(len, tensors.layers.values()))
        assert compared == found.model.layer_count, type(model).__name__
        assert name == "vit" or tensors.embedding, type(model).__name__


LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
    "hidden_act": "silu", "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
_MISTRAL_7B = {**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000}


def stored_of(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of a config's model holds, with its language-model head."""
    return shapes(build(values).model)


def differences(values: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    return [(d.name, d.field, d.config, d.tensors, d.where) for d in beside(values, stored).differences]


def test_the_vocabulary_of_another_model() -> None:
    """Llama-3.1-8B's config beside Mistral-7B's file: FFNs and attention agree, the embedding does not."""
    assert differences(LLAMA_8B, stored_of(_MISTRAL_7B)) == [
        ("vocabulary", "vocab_size", "128,256", "32,000", "model.embed_tokens.weight")
    ]


def test_the_heads_of_another_model() -> None:
    """As many key-value heads as heads: four d_model by d_model matrices, against two narrow ones among them."""
    found = beside({**LLAMA_8B, "num_key_value_heads": 32}, stored_of(LLAMA_8B)).differences
    assert found == (
        Disagreement(
            "attention", "attention (num_attention_heads, num_key_value_heads, head_dim)",
            f"{4 * 4096**2:,} parameters per layer", f"{2 * 4096**2 + 2 * 4096 * 1024:,}",
            "model.layers.0.self_attn.k_proj.weight", "decoder", 0, 2,
        ),
    )  # fmt: skip
    assert str(found[0]).endswith("(model.layers.0.self_attn.k_proj.weight and 1 more)")


def test_a_latent_rank_of_another_model() -> None:
    values = {"model_type": "deepseek_v3", **CASES["deepseek_v3"][0]}
    (found,) = differences({**values, "kv_lora_rank": 4}, stored_of(values))
    assert found[0] == "attention"
    assert "kv_lora_rank" in found[1]


def test_biases_that_the_config_does_not_have() -> None:
    values = {"model_type": "llama", **CASES["llama"][0]}
    assert [found[0] for found in differences(values, stored_of({**values, "attention_bias": True}))] == ["attention"]


@pytest.mark.parametrize(("rows", "differs"), [(50257, False), (50304, False), (50264, False), (50176, True),
                                               (50688, False), (51200, True), (65536, True)])  # fmt: skip
def test_padded_vocabulary(rows: int, differs: bool) -> None:
    """GPT-2's 50,257 tokens, rounded up to a multiple of 128 or of 8: legal. Fewer rows, or many more: not."""
    values = {"model_type": "gpt2", **CASES["gpt2"][0], "vocab_size": 50257}
    stored = stored_of(values)
    stored |= {name: (rows, 24) for name, shape in stored.items() if shape == (50257, 24)}
    found = beside(values, stored)
    assert [d.name for d in found.differences] == (["vocabulary"] if differs else [])
    assert any("is padded to" in note for note in found.notes) == (not differs and rows != 50257)


def test_masks_of_old_files_are_no_parameters() -> None:
    """What GPT-2's files of before 2023 hold beside the parameters: masks, as `attn.bias` and `attn.masked_bias`."""
    values = {"model_type": "gpt2", **CASES["gpt2"][0]}
    stored = stored_of(values)
    for layer in range(3):
        stored[f"transformer.h.{layer}.attn.bias"] = (1, 1, 33, 33)
        stored[f"transformer.h.{layer}.attn.masked_bias"] = ()
    assert differences(values, stored) == []


def test_rotary_constants_of_old_files_are_no_parameters() -> None:
    values = {"model_type": "gpt_neox", **CASES["gpt_neox"][0]}
    stored = stored_of(values)
    for layer in range(3):
        stored[f"gpt_neox.layers.{layer}.attention.bias"] = (1, 1, 33, 33)
        stored[f"gpt_neox.layers.{layer}.attention.masked_bias"] = ()
        stored[f"gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq"] = (2,)
    assert differences(values, stored) == []


def test_norms_by_their_old_names() -> None:
    """BERT's files of 2018 call a norm's weight and bias gamma and beta."""
    values = {"model_type": "bert", **CASES["bert"][0]}
    names = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    stored = stored_of(values)
    for new, old in names.items():
        stored = {name.replace(new, old): shape for name, shape in stored.items()}
    found = beside(values, stored)
    assert found.differences == ()
    assert measured(found, inventory(stored)).layers["encoder"][1].norms == 4 * 24


def test_one_stack_of_two() -> None:
    """A T5 encoder alone, as text-to-image models carry it."""
    values = {"model_type": "t5", **CASES["t5"][0]}
    stored = {name: shape for name, shape in stored_of(values).items() if not name.startswith("decoder.")}
    found = beside(values, stored)
    assert found.differences == ()
    assert found.model.layer_count == 3


def gptq(stored: Mapping[str, tuple[int, ...]], bias: bool) -> Inventory:
    """Every matrix of the layers in 4 bits as AutoGPTQ writes it, with a bias for each or without."""
    tensors: dict[str, TensorInfo] = {}
    for name, shape in stored.items():
        if ".layers." not in name or len(shape) != 2:
            tensors[name] = TensorInfo("F16", shape, 2 * prod(shape))
            continue
        (out, into), stem = shape, name.removesuffix(".weight")
        pieces = {"qweight": ("I32", (into // 8, out)), "qzeros": ("I32", (1, out // 8)), "scales": ("F16", (1, out)),
                  "g_idx": ("I32", (into,)), **({"bias": ("F16", (out,))} if bias else {})}  # fmt: skip
        for piece, (dtype, size) in pieces.items():
            tensors[f"{stem}.{piece}"] = TensorInfo(dtype, size, (2 if dtype == "F16" else 4) * prod(size))
    return Inventory("here", tensors, dict.fromkeys(tensors, 1))


@pytest.mark.parametrize("bias", [False, True])
def test_quantized_attention(bias: bool) -> None:
    """The zeros that AutoGPTQ writes as biases are no contradiction of the attention; other widths are."""
    values = {**LLAMA_8B, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "vocab_size": 97,
              "num_key_value_heads": 4, "quantization_config": {"quant_method": "gptq", "bits": 4}}  # fmt: skip
    plain = {name: value for name, value in values.items() if name != "quantization_config"}
    packed = gptq(stored_of(plain), bias)
    for kv_heads, differs in ((4, False), (8, True)):
        model = from_config({**values, "num_key_value_heads": kv_heads}, "config.json", "config.json")
        found = with_inventory(model, packed)
        assert ("attention" in [difference.name for difference in found.differences]) == differs


def test_a_missing_file_leaves_the_config_alone() -> None:
    stored = inventory(stored_of(_MISTRAL_7B))
    partly = replace(stored, missing=("model-00002-of-00002.safetensors",), files=2)
    alone = from_config(LLAMA_8B, "config.json", "config.json")
    found = with_inventory(alone, partly)
    assert (found.differences, found.model) == ((), alone.model)


def test_the_config_counts_where_its_family_is_known() -> None:
    found = count(beside(LLAMA_8B, stored_of(LLAMA_8B)))
    assert found.attention_params_per_layer == 2 * 4096**2 + 2 * 4096 * 1024
    assert not any("from the tensors" in line for line in found.evidence)


def test_what_agrees_is_not_noted() -> None:
    assert beside(LLAMA_8B, stored_of(LLAMA_8B)).notes == ()


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_relative_positions(name: str) -> None:
    """T5's table lies in layer 0 and is no attention of it; UMT5 has one in each layer, which is."""
    values = {"model_type": name, **CASES[name][0]}
    found = beside(values, stored_of(values))
    first, second, _ = measured(found, inventory(stored_of(values))).layers["encoder"].values()
    table = 6 * 9 if name == "umt5" else 0
    assert first.attention == second.attention == 4 * 24 * 60 + table
    assert (first.table, second.table) == (0 if name == "umt5" else 6 * 9, 0)
