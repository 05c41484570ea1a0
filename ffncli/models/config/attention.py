"""Count, from a config's fields, the parameters of one layer's attention and of lookup tables outside the blocks
(tables for n-grams or for every layer). Common kinds of attention are dataclasses whose attributes are names of the
config's fields.

A fused projection counts like its parts. An n-gram table may be larger than the rest of the model. The whole-model
count includes the table if the family has a row for it in `config.non_ffn`; otherwise the table's size is reported if
the config specifies it. Facts: transformers 5.23 `modeling_*.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from ffncli.models.files.strict_json import Fields
from ffncli.models.model import NotCounted, Projection

Flag = bool | tuple[str, bool]  # a value fixed by the family's code, or a field name with its default


def flag(config: Fields, value: Flag) -> bool:
    """Return a Flag's value for this config. Raises FFNError if the field is neither true nor false."""
    return value if isinstance(value, bool) else config.flag(*value)


class Attention:
    """The token mixer of a layer: its projections, and its other parameters. Modules have transformers' names."""

    @property
    def needs(self) -> Sequence[str]:
        """The config fields required for counting."""
        return ()

    @property
    def fields(self) -> Sequence[str]:
        """The config fields that determine its widths."""
        return self.needs

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        yield from ()

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the other parameters of one layer: biases, norms, convolutions."""
        return 0

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count its parameters in one layer."""
        return sum(one.params for one in self.matrices(config, d_model)) + self.others(config, d_model, cross)


@dataclass(frozen=True, kw_only=True)
class Heads(Attention):
    """Multi-head attention in which heads may share keys and values (MHA, GQA, MQA). Strings are field names.

    `heads` None: queries, keys and values are as wide as the model, whatever the number of heads. `kv_heads` is a field
    name or a fixed number; None means as many as heads. A null or absent `head_dim` means `head_dim_default`, else
    d_model / heads.
    """

    heads: str | None = "num_attention_heads"
    kv_heads: str | int | None = "num_key_value_heads"
    kv_default: int | None = None  # used if the field is absent; null means as many as heads
    head_dim: str | None = "head_dim"
    head_dim_default: int | None = None
    qkv_bias: Flag = False
    key_bias: bool = True  # False: queries and values have a bias, keys do not
    output_bias: Flag = False
    qk_norm: Flag = False
    qk_norm_per_head: bool = False  # each head has its own weight; by default all heads share a weight
    qk_norm_bias: bool = False
    sinks: bool = False  # one learned logit per head
    gate: Flag | None = None  # the bias of an output gate as wide as the queries; None: no gate
    gate_with_queries: bool = False  # the gate is the second half of the queries' projection
    head_gate: Flag = False  # an output gate with one value per head
    at: str = "self_attn"  # the module's name
    buckets: tuple[str, int] | None = None  # a relative-position table in the self-attention of every layer

    @property
    def needs(self) -> Sequence[str]:
        """The config fields required for counting."""
        return () if self.heads is None else (self.heads,)

    @property
    def fields(self) -> Sequence[str]:
        """The config fields that determine its widths."""
        return tuple(name for name in (self.heads, self.kv_heads, self.head_dim) if isinstance(name, str))

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections to queries, keys, values and gates, and the output's."""
        heads, kv_heads, head_dim = self._sizes(config, d_model)
        q, kv, gated = heads * head_dim, kv_heads * head_dim, self.gate is not None
        yield Projection(f"{self.at}.q_proj", 2 * q if gated and self.gate_with_queries else q, d_model)
        yield Projection(f"{self.at}.k_proj", kv, d_model)
        yield Projection(f"{self.at}.v_proj", kv, d_model)
        yield Projection(f"{self.at}.o_proj", d_model, q)
        if gated and not self.gate_with_queries:
            yield Projection(f"{self.at}.gate_proj", q, d_model)
        if flag(config, self.head_gate):
            yield Projection(f"{self.at}.g_proj", heads, d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count biases, norms, sinks and position table of one attention."""
        heads, kv_heads, head_dim = self._sizes(config, d_model)
        q, kv, total = heads * head_dim, kv_heads * head_dim, 0
        if flag(config, self.qkv_bias):
            total += q + kv + (kv if self.key_bias else 0)
        if flag(config, self.output_bias):
            total += d_model
        if flag(config, self.qk_norm):
            total += (q + kv if self.qk_norm_per_head else 2 * head_dim) * (2 if self.qk_norm_bias else 1)
        if self.sinks:
            total += heads
        if self.gate is not None:
            total += flag(config, self.gate) * q
        if self.buckets and not cross:
            total += heads * config.integer(*self.buckets)
        return total

    def _sizes(self, config: Fields, d_model: int) -> tuple[int, int, int]:
        """Return heads, key-value heads and the width of one head."""
        if self.heads is None:
            return 1, 1, d_model
        heads = config.integer(self.heads)
        narrow = d_model // heads if self.head_dim_default is None else self.head_dim_default
        head_dim = config.integer(self.head_dim, narrow) if self.head_dim else narrow
        if not isinstance(self.kv_heads, str):
            return heads, self.kv_heads or heads, head_dim
        absent = not any(name in config.values for name in self.kv_heads.split("|"))
        return heads, config.integer(self.kv_heads, (absent and self.kv_default) or heads), head_dim


@dataclass(frozen=True, kw_only=True)
class Latent(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 §2.1): keys and values pass through a narrow latent.

    `bias` applies to the three projections that read or write the residual stream. If q_lora_rank is null, queries are
    projected directly. `indexer`: a small attention chooses the tokens to attend to (DeepSeek Sparse Attention).
    """

    bias: Flag = ("attention_bias", False)
    gate: Flag = False  # an output gate as wide as the values
    gate_name: str = "gate_proj"
    head_gate: bool = False  # an output gate with one value per head
    sinks: bool = False  # one learned logit per head
    indexer: bool = False
    pooled: bool = False  # each of the indexer's keys pools `index_kpool` tokens
    needs: Sequence[str] = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    fields: Sequence[str] = (*needs, "q_lora_rank")

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections into and out of the latents, the output's and gates, and those of the indexer: queries
        from the latent, one key, and a weight for each head."""
        heads, rank, nope, rope, value = (config.integer(name, low=0) for name in self.needs)
        q_rank, q = config.integer("q_lora_rank", 0), heads * (nope + rope)
        if q_rank:
            yield Projection("self_attn.q_a_proj", q_rank, d_model)
        yield Projection(f"self_attn.{'q_b_proj' if q_rank else 'q_proj'}", q, q_rank or d_model)
        # the rope part of the key is shared by all heads and bypasses the latent
        yield Projection("self_attn.kv_a_proj_with_mqa", rank + rope, d_model)
        yield Projection("self_attn.kv_b_proj", heads * (nope + value), rank)
        yield Projection("self_attn.o_proj", d_model, heads * value)
        if flag(config, self.gate):
            yield Projection(f"self_attn.{self.gate_name}", heads * value, d_model)
        if self.head_gate:
            yield Projection("self_attn.g_proj", heads, d_model)
        if self.indexer:
            heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
            yield Projection("self_attn.indexer.wq_b", heads * width, q_rank)
            yield Projection("self_attn.indexer.wk", width, d_model)
            yield Projection("self_attn.indexer.weights_proj", heads, d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases, the latents' norms and sinks, the layer norm of the indexer's key, and its pools."""
        heads, rank, _, rope, _ = (config.integer(name, low=0) for name in self.needs)
        bias, q_rank = flag(config, self.bias), config.integer("q_lora_rank", 0)
        width = config.integer("index_head_dim") if self.indexer else 0
        pools = (config.integer("index_kpool", 16) + d_model) * width if self.pooled else 0
        return (bias + 1) * q_rank + bias * (rank + rope + d_model) + rank + heads * self.sinks + 2 * width + pools


_PER_LAYER, _NGRAMS = "embeddings for every layer", "tables of n-grams"
_OUTSIDE = "outside the FFN, and missing from the whole-model count"
_MOST_TABLES, _MOST_ROWS = 1024, 10**9
# Maps each field that indicates such a table, in any family, to the kind of table.
MEMORIES: Mapping[str, str] = {
    "hidden_size_per_layer_input": _PER_LAYER,
    "vocab_size_per_layer_input": _PER_LAYER,
    "ngram_vocab_size_base": _NGRAMS,
    "encoder_hash_byte_group_vocab": _NGRAMS,
}


def memories(config: Fields, family: str) -> tuple[NotCounted, ...]:
    """Return a model's lookup tables, as parts that are not counted; their parameters are None if their size is
    unknown."""
    if config.values.get("model_type") == "gemma4_unified_text":
        return ()  # it has gemma4_text's blocks, but not these embeddings
    if row := _SIZES.get(family):
        what, size = row
        parameters = size(config)
        if parameters is None:
            return (NotCounted(what, "the model may have none: the config does not specify their width"),)
        return (NotCounted(what, _OUTSIDE, parameters),) if parameters else ()
    kinds = {what for field, what in MEMORIES.items() if config.values.get(field)}
    return tuple(NotCounted(what, _OUTSIDE) for what in sorted(kinds))


def per_layer_table(config: Fields, d_model: int) -> int:
    """Count a table with a narrow vector for every token and layer."""
    narrow = config.integer("hidden_size_per_layer_input", 0, low=0)
    rows = config.integer("vocab_size_per_layer_input", 262_144, low=0)
    return rows * config.integer("num_hidden_layers") * narrow


def per_layer_projection(config: Fields, d_model: int) -> int:
    """Count the projection of the input embedding to the per-layer vectors, and their norm."""
    narrow = config.integer("hidden_size_per_layer_input", 0, low=0)
    return d_model * config.integer("num_hidden_layers") * narrow + narrow


def per_layer_matrices(config: Fields, d_model: int) -> Callable[[int], int]:
    """Count a norm, the gate, and the projection of the layer's vector, for each layer."""
    narrow = config.integer("hidden_size_per_layer_input", 0, low=0)
    return lambda i: 2 * d_model * narrow + d_model if narrow else 0


def _per_layer(config: Fields) -> int | None:
    """Count all per-layer embeddings; None if the config lacks the field. Only the smallest models of a family have
    these embeddings, so a config without the field may belong to any size."""
    if not (narrow := config.integer("hidden_size_per_layer_input", None, low=0)):
        return narrow
    d_model, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    once = per_layer_table(config, d_model) + per_layer_projection(config, d_model)
    return once + layers * per_layer_matrices(config, d_model)(0)


def ngram_table(config: Fields, d_model: int) -> int:
    """Count the n-gram tables: one per layer of `ple_layer_ids`, with a part per head that has a prime number of
    rows."""
    layers = len(set(config.integers("ple_layer_ids")))
    heads = (config.integer("ngram_size", 3) - 1) * config.integer("heads_per_ngram", 8)
    if not layers or not heads:
        return 0
    if layers * heads > _MOST_TABLES:
        raise config.wrong("heads_per_ngram", heads, f"at most {_MOST_TABLES} parts of tables")
    width = config.integer("ple_embed_dim", d_model) // heads
    to = config.integer("make_ngram_vocab_size_divisible_by", 128)
    base = config.integer("ngram_vocab_size_base", 20_000_000, high=_MOST_ROWS)
    primes = _primes_from(base)
    rows = [-(-sum(islice(primes, heads)) // to) * to for _ in range(layers)]
    return sum(rows) * width


def ngram_matrices(config: Fields, wide: int) -> Callable[[int], int]:
    """Count the matrices that read the n-gram tables, by layer: keys for all streams (`wide` is their total width), a
    value, three norms and a convolution. `ple_layer_ids` counts layers from 1."""
    chosen, d_model = set(config.integers("ple_layer_ids")), config.integer("hidden_size")
    width, kernel = config.integer("ple_embed_dim", d_model), config.integer("ple_conv_kernel_size", 4)
    return lambda i: width * (wide + d_model) + (3 + kernel) * wide if i + 1 in chosen else 0


def _primes_from(start: int) -> Iterator[int]:
    """Yield the prime numbers from `start` upwards."""
    return (n for n in count(max(start, 2)) if all(n % d for d in range(2, int(n**0.5) + 1)))


def _hashes(config: Fields) -> int:
    """Count BLT's hash tables: one per hash function and byte-group size, as wide as the byte encoder."""
    functions = config.integer("encoder_hash_byte_group_nb_functions", 1, low=0)
    groups = config.integers("encoder_hash_byte_group_size")
    rows = config.integer("encoder_hash_byte_group_vocab", 500_002, low=0)
    sizes = len(groups) if "encoder_hash_byte_group_size" in config.values else 6
    return functions * sizes * rows * config.integer("encoder_config.hidden_size")


# Maps each family to the kind of its tables, and to a function that counts the tables' parameters.
_SIZES: Mapping[str, tuple[str, Callable[[Fields], int | None]]] = {
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), (_PER_LAYER, _per_layer)),
    "qwen4_exp_text": (_NGRAMS, lambda config: ngram_table(config, config.integer("hidden_size"))),
    "blt": (_NGRAMS, _hashes),
}
