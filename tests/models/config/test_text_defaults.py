"""Text configs of composites that leave fields to transformers' class: its values count, and a note says so."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.errors import FFNError
from ffncli.models.config.families import TEXT_DEFAULTS
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count

# What is published: LLaVA 1.5, Gemma 3 4B and PaliGemma, and a Qwen2 tower with fewer layers.
SPARSE: dict[str, tuple[str, dict[str, Any], str]] = {
    "LLaVA 1.5": ("llava", {"model_type": "llama", "_name_or_path": "a/b", "vocab_size": 32064}, "LlamaForCausalLM"),
    "no model_type": ("llava", {"vocab_size": 32064}, "LlamaForCausalLM"),
    "Gemma 3 4B": ("gemma3", {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                              "num_hidden_layers": 34}, "Gemma3ForCausalLM"),
    "Idefics 2": ("idefics2", {"model_type": "mistral", "vocab_size": 32003}, "MistralForCausalLM"),
    "Qwen2": ("llava_onevision", {"model_type": "qwen2", "num_hidden_layers": 3}, "Qwen2ForCausalLM"),
    "BLIP-2": ("blip-2", {"model_type": "opt"}, "OPTForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT_DEFAULTS)
def test_defaults_are_those_of_the_class(name: str) -> None:
    theirs = CONFIG_MAPPING[name]()
    assert {key: getattr(theirs, key) for key in TEXT_DEFAULTS[name]} == TEXT_DEFAULTS[name]


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_text_config_has_the_size_of_the_model_that_transformers_builds(name: str) -> None:
    composite, text, made = SPARSE[name]
    values = {"model_type": composite, "text_config": text, "vision_config": {"hidden_size": 64}}
    resolved = from_config(values, "m", "config.json")
    with torch.device("meta"):
        theirs = getattr(transformers, made)(CONFIG_MAPPING[composite](text_config=dict(text)).get_text_config())
    assert count(resolved).model_params_total == sum(tensor.numel() for tensor in theirs.parameters())
    (line,) = [note for note in resolved.notes if note.startswith("defaults of transformers: text_config leaves")]
    assert "num_attention_heads = " in line
    assert line in resolved.evidence


def test_a_null_dtype_in_the_text_config_is_no_dtype() -> None:
    """transformers writes `"dtype": null` into nested configs; the whole config's dtype holds."""
    text = {"model_type": "llama", "dtype": None, "vocab_size": 32064}
    read = from_config({"model_type": "llava", "dtype": "bfloat16", "text_config": text}, "m", "config.json")
    assert count(read).weight_bytes == 2 * 4_328_521_728


def test_another_spelling_of_a_composite_has_its_text_models_attention() -> None:
    """MiniMax-M3's config says minimax_m3, flat: the whole model is that of the text model's type."""
    fields = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 32,
        "intermediate_size": 8,
        "shared_intermediate_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    found = [
        count(from_config({**fields, "model_type": name}, "m", "config.json")).model_params_total
        for name in ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")
    ]
    assert found[0] is not None
    assert len({*found}) == 1


def test_only_a_nested_config_has_defaults() -> None:
    with pytest.raises(FFNError, match=r"num_hidden_layers .* is missing"):
        from_config({"model_type": "llama", "vocab_size": 32000}, "m", "config.json")
