"""Tables outside the blocks, looked up by the last tokens or in every layer: how many parameters they hold.

An n-gram table may be larger than everything else. It is in the whole model where the family has a row of it
(`non_ffn_mixed`); elsewhere a count says how large it is wherever a config does. Each size is that of transformers
5.23's module of the family (`modeling_gemma3n.py`, `modeling_qwen4_exp.py`, `modeling_blt.py`).
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


def per_layer_table(config: Fields, d_model: int) -> int:
    """A narrow vector for each layer of every token."""
    narrow: int = config.integer("hidden_size_per_layer_input", 0, low=0)
    rows: int = config.integer("vocab_size_per_layer_input", 262_144, low=0)
    return rows * int(config.integer("num_hidden_layers")) * narrow


def per_layer_projection(config: Fields, d_model: int) -> int:
    """The projection of the input embedding to these vectors, and their norm."""
    narrow: int = config.integer("hidden_size_per_layer_input", 0, low=0)
    return d_model * int(config.integer("num_hidden_layers")) * narrow + narrow


def per_layer_matrices(config: Fields, d_model: int) -> Callable[[int], int]:
    """In each layer the gate and the projection of its vector, and a norm."""
    narrow: int = config.integer("hidden_size_per_layer_input", 0, low=0)
    return lambda i: 2 * d_model * narrow + d_model if narrow else 0


def _per_layer(config: Fields) -> int | None:
    """All of them together. The smallest models of a family have them; a config without the field may be of any."""
    if not config.integer("hidden_size_per_layer_input", None, low=0):
        return config.integer("hidden_size_per_layer_input", None, low=0)  # type: ignore[no-any-return]
    d_model, layers = int(config.integer("hidden_size")), int(config.integer("num_hidden_layers"))
    once = per_layer_table(config, d_model) + per_layer_projection(config, d_model)
    return once + layers * per_layer_matrices(config, d_model)(0)


def ngram_table(config: Fields, d_model: int) -> int:
    """One table for each layer of `ple_layer_ids`, a part of it per head: each part has a prime number of rows."""
    layers = len(set(config.integers("ple_layer_ids")))
    heads = (config.integer("ngram_size", 3) - 1) * config.integer("heads_per_ngram", 8)
    if not layers or not heads:
        return 0
    if layers * heads > _MOST_TABLES:
        raise config.wrong("heads_per_ngram", heads, f"at most {_MOST_TABLES} parts of tables")
    width: int = config.integer("ple_embed_dim", d_model) // heads
    to: int = config.integer("make_ngram_vocab_size_divisible_by", 128)
    base: int = config.integer("ngram_vocab_size_base", 20_000_000, high=_MOST_ROWS)
    primes = _primes_from(base)
    rows = [-(-sum(islice(primes, heads)) // to) * to for _ in range(layers)]
    return sum(rows) * width


def ngram_matrices(config: Fields, wide: int) -> Callable[[int], int]:
    """In each of these layers, counted from 1: keys for all streams (`wide` together), a value, three norms and a
    convolution.
    """
    chosen, d_model = set(config.integers("ple_layer_ids")), int(config.integer("hidden_size"))
    width, kernel = int(config.integer("ple_embed_dim", d_model)), int(config.integer("ple_conv_kernel_size", 4))
    return lambda i: width * (wide + d_model) + (3 + kernel) * wide if i + 1 in chosen else 0


def _ngrams(config: Fields) -> int:
    return ngram_table(config, int(config.integer("hidden_size")))


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
