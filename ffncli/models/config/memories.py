"""Tables outside the blocks, looked up by the last tokens or in every layer: how many parameters they hold.

An n-gram table may be larger than everything else, so a count says how large it is wherever a config does. Each size
is that of transformers 5.23's module of the family (`modeling_gemma3n.py`, `modeling_qwen4_exp.py`, `modeling_blt.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice

from ffncli.models.files.fields import Fields
from ffncli.models.model import NotCounted

_PER_LAYER, _NGRAMS = "embeddings for every layer", "tables of n-grams"
_OUTSIDE = "outside the FFN, in no row of the whole model"
_MOST_TABLES, _MOST_ROWS = 1024, 10**9
# Field that says that there is such a table, in any family → what it is.
MEMORIES: Mapping[str, str] = {
    "hidden_size_per_layer_input": _PER_LAYER,
    "vocab_size_per_layer_input": _PER_LAYER,
    "ngram_vocab_size_base": _NGRAMS,
    "encoder_hash_byte_group_vocab": _NGRAMS,
}


def memories(config: Fields, family: str) -> tuple[NotCounted, ...]:
    """The tables of a model; their parameters are None where the family's code is not known to have them."""
    if config.values.get("model_type") == "gemma4_unified_text":
        return ()  # it has gemma4_text's blocks without these embeddings
    if row := _SIZES.get(family):
        what, size = row
        parameters = size(config)
        if parameters is None:
            return (NotCounted(what, "if it has them: the config does not say how wide they are"),)
        return (NotCounted(what, _OUTSIDE, parameters),) if parameters else ()
    kinds = {what for field, what in MEMORIES.items() if config.values.get(field)}
    return tuple(NotCounted(what, _OUTSIDE) for what in sorted(kinds))


def _per_layer(config: Fields) -> int | None:
    """One narrow vector per token and layer, a projection of the embedding to them, and in each layer two matrices."""
    narrow: int | None = config.integer("hidden_size_per_layer_input", None, low=0)
    rows: int = config.integer("vocab_size_per_layer_input", 262_144, low=0)
    layers: int = config.integer("num_hidden_layers")
    d_model: int = config.integer("hidden_size")
    if not narrow:  # the smallest models of a family have them, and a config without the field may be of any
        return narrow
    return (rows + d_model) * layers * narrow + narrow + layers * (2 * d_model * narrow + d_model)


def _ngrams(config: Fields) -> int:
    """One table for each layer of `ple_layer_ids`, a part of it per head: each part has a prime number of rows."""
    layers = len(set(config.integers("ple_layer_ids")))
    heads = (config.integer("ngram_size", 3) - 1) * config.integer("heads_per_ngram", 8)
    if not layers or not heads:
        return 0
    if layers * heads > _MOST_TABLES:
        raise config.wrong("heads_per_ngram", heads, f"at most {_MOST_TABLES} parts of tables")
    width: int = config.integer("ple_embed_dim", config.integer("hidden_size")) // heads
    to: int = config.integer("make_ngram_vocab_size_divisible_by", 128)
    base: int = config.integer("ngram_vocab_size_base", 20_000_000, high=_MOST_ROWS)
    primes = _primes_from(base)
    rows = [-(-sum(islice(primes, heads)) // to) * to for _ in range(layers)]
    return sum(rows) * width


def _primes_from(start: int) -> Iterator[int]:
    """The prime numbers from `start` on."""
    return (n for n in count(max(start, 2)) if all(n % d for d in range(2, int(n**0.5) + 1)))


def _hashes(config: Fields) -> int:
    """One part for each hash function and number of bytes, of vectors as wide as the encoder of bytes."""
    functions: int = config.integer("encoder_hash_byte_group_nb_functions", 1, low=0)
    groups = config.integers("encoder_hash_byte_group_size")
    rows: int = config.integer("encoder_hash_byte_group_vocab", 500_002, low=0)
    sizes = len(groups) if "encoder_hash_byte_group_size" in config.values else 6
    return functions * sizes * rows * int(config.integer("encoder_config.hidden_size"))


# Family → what it has, and how many parameters that is.
_SIZES: Mapping[str, tuple[str, Callable[[Fields], int | None]]] = {
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), (_PER_LAYER, _per_layer)),
    "qwen4_exp_text": (_NGRAMS, _ngrams),
    "blt": (_NGRAMS, _hashes),
}
