"""Tables of n-grams and per-layer embeddings: their parameters are those of transformers' own modules.

A family with a row of the whole model counts them in it: these configs lack a field of its attention, so it cannot.
"""

from __future__ import annotations

import copy
import json
from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.models.config.read import from_config
from ffncli.models.model import NotCounted
from tests.fuzz.configs import specimens
from tests.oracles.architectures import numbers, text_architectures

_PER_LAYER = r".*per_layer.*"
_NGRAMS = {
    "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 53, "heads_per_ngram": 4, "ngram_size": 3, "ple_embed_dim": 16,
    "make_ngram_vocab_size_divisible_by": 8,
}  # fmt: skip


def module(name: str, values: dict[str, Any]) -> torch.nn.Module:
    """transformers' model of a config, its shapes alone."""
    case = specimens()[name][0]
    with torch.device("meta"):
        built = CONFIG_MAPPING[name].from_dict({k: v for k, v in values.items() if k != "model_type"})
        model: torch.nn.Module = attrgetter(case.model or text_architectures()[name])(transformers)(built)
    return model


def tables(values: dict[str, Any]) -> tuple[NotCounted, ...]:
    """What ffn says of them where the whole model is not known."""
    alone = {key: value for key, value in values.items() if key != "num_attention_heads"}
    return from_config(alone, "m", "config.json").not_counted


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "qwen4_exp_text"])
def test_what_is_in_the_whole_is_not_left_out(name: str) -> None:
    values = {**copy.deepcopy(specimens()[name][1]), **(_NGRAMS if name == "qwen4_exp_text" else {})}
    assert from_config(values, "m", "config.json").not_counted == ()
    assert tables(values) != ()


@pytest.mark.parametrize(("name", "pattern", "more"), [
    ("gemma3n_text", _PER_LAYER, {}), ("gemma3n_text", _PER_LAYER, {"hidden_size_per_layer_input": 6}),
    ("gemma4_text", _PER_LAYER, {}), ("gemma4_text", _PER_LAYER, {"vocab_size_per_layer_input": 21}),
    ("qwen4_exp_text", r".*\.ngram_embedding\.weight", _NGRAMS),
    ("qwen4_exp_text", r".*\.ngram_embedding\.weight", {**_NGRAMS, "ple_layer_ids": [3], "ngram_size": 2}),
    ("blt", r".*encoder_hash_tok_embedding.*", {"encoder_hash_byte_group_vocab": 90}),
    ("blt", r".*encoder_hash_tok_embedding.*",
     {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 5],
      "encoder_hash_byte_group_nb_functions": 2}),
])  # fmt: skip
def test_parameters_are_the_modules(name: str, pattern: str, more: dict[str, Any]) -> None:
    values = {**copy.deepcopy(specimens()[name][1]), **more}
    found = tables(values)
    assert [part.parameters for part in found] == [numbers(module(name, values), pattern)]


@pytest.mark.parametrize(("name", "fields"), [
    ("gemma4_text", ["vocab_size_per_layer_input"]), ("blt", [f"encoder_hash_byte_group_{n}" for n in
                                                              ("vocab", "size", "nb_functions")]),
])  # fmt: skip
def test_absent_fields_are_the_classs_defaults(name: str, fields: list[str]) -> None:
    default = json.loads(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
    bare = {key: value for key, value in default.items() if key not in fields}
    assert len(bare) == len(default) - len(fields)
    assert tables(bare) == tables(default) != ()


def test_ngrams_of_the_published_size() -> None:
    """Qwen3.8-Flash-Next: 20,000,000 n-grams in one layer, 51 G parameters (its model card): rows of 2,560 numbers."""
    config = {**specimens()["qwen4_exp_text"][1], "ple_layer_ids": [1], "ple_embed_dim": 2560}
    (part,) = tables({k: v for k, v in config.items() if "ngram" not in k})
    assert part.parameters is not None
    assert 16 * 20_000_000 * 160 < part.parameters < 1.001 * 16 * 20_000_000 * 160
    assert round(part.parameters / 1e9) == 51


def test_a_family_without_such_a_table_says_nothing_and_a_new_one_its_size_is_unknown() -> None:
    values = specimens()["llama"][1]
    assert tables(values) == ()
    (part,) = tables({**values, "hidden_size_per_layer_input": 8})
    assert (part.what, part.parameters) == ("embeddings for every layer", None)
    gemma = specimens()["gemma4_text"][1]
    assert tables({**gemma, "hidden_size_per_layer_input": 0}) == ()
    (part,) = tables({key: value for key, value in gemma.items() if key != "hidden_size_per_layer_input"})
    assert (part.why, part.parameters) == ("if it has them: the config does not say how wide they are", None)


@pytest.mark.parametrize("value", [0, -1, 10**10, "8", True, 2.5])
def test_a_table_that_cannot_be_is_refused(value: object) -> None:
    from ffncli.errors import FFNError

    with pytest.raises(FFNError, match="ngram_vocab_size_base must be"):
        tables({**specimens()["qwen4_exp_text"][1], **_NGRAMS, "ngram_vocab_size_base": value})
