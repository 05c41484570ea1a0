"""What mixes tokens where layers differ: linear, compressed and shared attention, and which layer has which.

Facts: transformers 5.23 `modeling_*.py`; Kimi-K3's gates and residuals: the names and shapes of its checkpoint, as
implementations of it list them (ggml-org/llama.cpp#26185, lablup/mlxcel#1334).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ffncli.models.config.attention import (
    Attention,
    Heads,
    Latent,
    ngram_matrices,
    per_layer_matrices,
    per_layer_projection,
)
from ffncli.models.files.strict_json import Fields

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
_INDEXED = "indexed_attention"
_BIAS = ("attention_bias", False)


def layer_kinds(config: Fields, default: Callable[[int, int], str], known: Sequence[str]) -> list[str]:
    """What each layer is called. Raises FFNError for a list that has another length or an unknown name."""
    layers = config.integer("num_hidden_layers")
    kinds = config.get("layer_types", None)
    if kinds is None:
        return [default(i, layers) for i in range(layers)]
    if type(kinds) is not list or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise config.wrong("layer_types", kinds, f"one of {', '.join(known)} for each layer ({layers})")
    return kinds


def every_fourth(config: Fields) -> Callable[[int, int], str]:
    """Qwen's default: one layer of `full_attention_interval` attends to all tokens."""
    interval = config.integer("full_attention_interval", 4)
    return lambda i, layers: LINEAR if (i + 1) % interval else FULL


@dataclass(frozen=True)
class GatedDelta(Attention):
    """Gated DeltaNet (arXiv:2412.06464): queries and keys of some heads, values and gates of more."""

    needs: Sequence[str] = (
        "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"
    )  # fmt: skip

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases and norms of one layer's."""
        key_heads, key_dim, heads, value_dim = (config.integer(name) for name in self.needs)
        keys, values = key_heads * key_dim, heads * value_dim
        convolution = config.integer("linear_conv_kernel_dim", 4) * (2 * keys + values)
        into, decay = d_model * 2 * (keys + values + heads), 2 * heads
        return into + convolution + decay + value_dim + values * d_model


@dataclass(frozen=True)
class KimiDelta(Attention):
    """Kimi Delta Attention (arXiv:2510.26692): one decay per channel through a narrow matrix, a gate of the output
    through another, or of full rank (Kimi-K3, whose log-decays are one per channel of a head). `full_rank`: both are
    (Ling-3).
    """

    full_rank: bool = False
    heads: str = "linear_attn_config.num_heads|linear_num_heads"
    width: str = "linear_attn_config.head_dim|linear_head_dim"
    kernel: str = "linear_attn_config.short_conv_kernel_size|linear_conv_kernel_dim"

    @property
    def needs(self) -> Sequence[str]:
        """The fields that counting requires."""
        return (self.heads, self.width)

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases and norms of one layer's."""
        heads, width = config.integer(self.heads), config.integer(self.width)
        inner = heads * width
        narrow = d_model * width + width * inner
        full = config.flag("linear_attn_config.use_full_rank_gate", False)
        gates = narrow + (d_model * inner if full else narrow)
        if self.full_rank:
            gates = 2 * d_model * inner
        decay = inner + (width if full else heads)
        convolution = 3 * inner * config.integer(self.kernel, 4)
        return 4 * d_model * inner + convolution + gates + decay + d_model * heads + width


def kimi(config: Fields) -> Callable[[int], Attention]:
    """The layers of Kimi-Linear: numbered from 1 in `linear_attn_config`, else named, else a fourth attends to all."""
    linear, full = KimiDelta(), Latent(gate=("mla_use_output_gate", False))
    layers = config.integer("num_hidden_layers")
    numbers = config.integers("linear_attn_config.full_attn_layers")
    if config.get("layer_types", None) is None and numbers:
        if not all(1 <= i <= layers for i in numbers):
            raise config.wrong("linear_attn_config.full_attn_layers", list(numbers), f"layers from 1 to {layers}")
        return lambda i: full if i + 1 in numbers else linear
    kinds = layer_kinds(config, lambda i, layers: FULL if i and i % 4 == 0 else LINEAR, (LINEAR, FULL))
    return lambda i: full if kinds[i] == FULL else linear


def kimi_residuals(config: Fields, d_model: int) -> Callable[[int], int]:
    """Kimi-K3 weighs the outputs of earlier blocks before attention and FFN: each time a vector and a norm."""
    return lambda i: 4 * d_model if config.integer("attn_res_block_size", 0, low=0) else 0


def kimi_last_residual(config: Fields, d_model: int) -> int:
    """The same before the head."""
    return 2 * d_model if config.integer("attn_res_block_size", 0, low=0) else 0


# --- Gemma ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmaHeads:
    """Gemma 3n's and 4's attention in one layer: of its own widths, and perhaps without keys and values of its own."""

    kv_heads: int
    width: int
    keys: bool = True
    values: bool = True
    needs: Sequence[str] = ("num_attention_heads",)
    fields: Sequence[str] = ("num_attention_heads", "num_key_value_heads", "head_dim", "layer_types")

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases and norms of one layer's."""
        q, kv = config.integer("num_attention_heads") * self.width, self.kv_heads * self.width
        biased = config.flag(*_BIAS)
        projections = (d_model + biased) * (q + kv * (self.keys + (self.keys and self.values)))
        return projections + (q + biased) * d_model + self.width * (1 + self.keys)


def _shared_from(config: Fields, default: int) -> int:
    """The first layer that takes its keys and values from an earlier one."""
    layers = config.integer("num_hidden_layers")
    return layers - config.integer("num_kv_shared_layers", default, low=0, high=layers)


def gemma3n(config: Fields) -> Callable[[int], Attention]:
    """The last layers of Gemma 3n take keys and values from earlier ones."""
    kv_heads, width = config.integer("num_key_value_heads", 2), config.integer("head_dim", 256)
    shared = _shared_from(config, 15)
    return lambda i: GemmaHeads(kv_heads, width, keys=i < shared)


def gemma4(config: Fields) -> Callable[[int], Attention]:
    """Layers that attend to all tokens have wider heads, perhaps fewer for keys, and perhaps keys that are values."""
    kinds = layer_kinds(config, lambda i, layers: SLIDING if (i + 1) % 6 else FULL, (SLIDING, FULL))
    kinds[-1] = FULL
    kv_heads, width = config.integer("num_key_value_heads", 4), config.integer("head_dim", 256)
    alike = config.flag("attention_k_eq_v", False)
    wide = config.integer("global_head_dim", 512)
    fewer = config.integer("num_global_key_value_heads", kv_heads) if alike else kv_heads
    shared = _shared_from(config, 0)
    saved = config.get("per_layer_config", None)  # as transformers saves it

    def one(i: int) -> GemmaHeads:
        full = kinds[i] == FULL
        if saved is not None:
            layer = config.inside("per_layer_config").values.get(str(i), {})
            fields = Fields(layer if isinstance(layer, Mapping) else {}, f"{config.where}: per_layer_config.{i}")
            sizes = fields.integer("num_key_value_heads", kv_heads), fields.integer("head_dim", width)
        else:
            sizes = (fewer, wide) if full else (kv_heads, width)
        return GemmaHeads(*sizes, keys=i < shared, values=not (full and alike))

    return one


def gemma3n_extra(config: Fields, d_model: int) -> Callable[[int], int]:
    """AltUp's four matrices, scale and norm (arXiv:2301.13310), LAuReL's two with a norm (arXiv:2411.07501)."""
    streams = config.integer("altup_num_inputs", 4)
    altup = 2 * d_model + streams**2 + streams**3 + d_model * streams
    laurel = 2 * d_model * config.integer("laurel_rank", 64) + d_model
    embedded = per_layer_matrices(config, d_model)
    return lambda i: altup + laurel + embedded(i)


def gemma3n_last(config: Fields, d_model: int) -> int:
    """The projection of the embeddings for every layer, and those into and out of AltUp's further streams."""
    streams = config.integer("altup_num_inputs", 4)
    return per_layer_projection(config, d_model) + 2 * (streams - 1) * d_model**2


# --- DeepSeek-V4 ------------------------------------------------------------------------------------------------------

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {0: SLIDING, 4: _SPARSE, 128: _HEAVY}


@dataclass(frozen=True)
class Compressed:
    """DeepSeek-V4's attention: one key that is the value too, sinks, an output in groups; and what compresses the keys
    of so many tokens (`rate`) to one, twice with an indexer where it is `sparse`.
    """

    rate: int = 0
    sparse: bool = False
    needs: Sequence[str] = ("num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
    fields: Sequence[str] = ("num_attention_heads", "head_dim", "q_lora_rank")

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases and norms of one layer's."""
        heads, width, q_rank, groups, o_rank = (config.integer(name) for name in self.needs)
        queries = (d_model + 1 + heads * width) * q_rank
        output = o_rank * heads * width + groups * o_rank * d_model
        total = queries + (d_model + 1) * width + output + heads
        if not self.rate:
            return total
        if not self.sparse:
            return total + self._compressor(d_model, width, width)
        index_heads, index_width = config.integer("index_n_heads"), config.integer("index_head_dim")
        indexer = self._compressor(d_model, index_width, 2 * index_width)
        indexer += q_rank * index_heads * index_width + d_model * index_heads
        return total + self._compressor(d_model, width, 2 * width) + indexer

    def _compressor(self, d_model: int, width: int, wide: int) -> int:
        """Keys and their gates, a bias for each position in a chunk, a norm."""
        return (2 * d_model + self.rate) * wide + width


def deepseek_v4(config: Fields) -> Callable[[int], Attention]:
    """Each layer compresses four tokens to one, 128 tokens, or none: `compress_ratios`, or names in `layer_types`."""
    inner = config.inside("compress_rates") if config.get("compress_rates", None) is not None else Fields({}, "")
    sparse = inner.integer(_SPARSE, config.integer("compress_rate_csa", 4))
    heavy = inner.integer(_HEAVY, config.integer("compress_rate_hca", 128))
    mixers = {SLIDING: Compressed(), _SPARSE: Compressed(sparse, True), _HEAVY: Compressed(heavy)}
    ratios, layers = config.integers("compress_ratios"), config.integer("num_hidden_layers")
    if config.get("layer_types", None) is None and ratios:
        if len(ratios) < layers or any(ratio not in _RATIOS for ratio in ratios):
            raise config.wrong("compress_ratios", list(ratios), f"0, 4 or 128 for each layer ({layers})")
        return lambda i: mixers[_RATIOS[ratios[i]]]
    kinds = layer_kinds(config, lambda i, layers: _SPARSE if i >= 2 and i % 2 else _HEAVY, tuple(mixers))
    return lambda i: mixers[kinds[i]]


def streams(config: Fields, d_model: int) -> Callable[[int], int]:
    """Before attention and FFN: what mixes the residual streams (hyper-connections, arXiv:2409.19606)."""
    count = config.integer("hc_mult", 4)
    mixed = (2 + count) * count
    return lambda i: 2 * (mixed * count * d_model + mixed + 3)


def last_streams(config: Fields, d_model: int) -> int:
    """What makes one of the streams before the head."""
    count = config.integer("hc_mult", 4)
    return count * count * d_model + count + 1


def narrow_streams(config: Fields, d_model: int) -> Callable[[int], int]:
    """Hy4's, which only reads from the streams and writes to them."""
    count = config.integer("hc_mult", 4)
    return lambda i: 2 * (2 * count * count * d_model + 2 * count + 2)


# --- others -----------------------------------------------------------------------------------------------------------


def chosen_tokens(config: Fields) -> Callable[[int], Attention]:
    """GLM-5: latent attention to the tokens that an indexer chose; layers called shared use an earlier one's."""
    every = config.integer("index_topk_freq", 1, low=0)
    offset = config.integer("index_skip_topk_offset", 2, low=0)
    indexed = _with_indexer(config, lambda i: not max(i - offset + 1, 0) % max(every, 1))
    return lambda i: Latent(indexer=indexed[i])


def _with_indexer(config: Fields, default: Callable[[int], bool]) -> list[bool]:
    """Whether a layer has an indexer, by `indexer_types` or a pattern such as FSSS."""
    layers = config.integer("num_hidden_layers")
    kinds, pattern = config.get("indexer_types", None), config.get("index_topk_pattern", None)
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(c, c) for c in pattern] if isinstance(pattern, str) else pattern
    if kinds is None:
        return [default(i) for i in range(layers)]
    if type(kinds) is not list or len(kinds) < layers or any(kind not in ("full", "shared") for kind in kinds):
        raise config.wrong("indexer_types", kinds, f"full or shared for each layer ({layers})")
    return [kind == "full" for kind in kinds]


def glm5_next(config: Fields) -> Callable[[int], Attention]:
    """Three layers of Kimi Delta Attention, then one of GLM-5's over pools of tokens."""
    kinds = layer_kinds(config, lambda i, layers: FULL if i % 4 == 3 else LINEAR, (LINEAR, FULL, _INDEXED))
    chosen = chosen_tokens(config)

    def one(i: int) -> Attention:
        attention = chosen(i)
        return KimiDelta() if kinds[i] == LINEAR else replace(attention, pooled=True)  # type: ignore[type-var]

    return one


def hy4(config: Fields) -> Callable[[int], Attention]:
    """Hy4: the same with a gate and sinks; layer 0 and then every fourth layer has an indexer."""
    indexed = _with_indexer(config, lambda i: i == 0 or i % 4 == 1)
    return lambda i: Latent(indexer=indexed[i], gate=True, sinks=True)


def ling3(config: Fields) -> Callable[[int], Attention]:
    """Ling-3: Kimi Delta Attention as wide as the heads; the last of a group is latent, with a gate per head."""
    group = config.integer("layer_group_size", 6)
    kinds = layer_kinds(config, lambda i, layers: LINEAR if (i + 1) % group else FULL, (LINEAR, FULL))
    linear = KimiDelta(True, "num_attention_heads", "head_dim|linear_head_dim", "short_conv_kernel_size")
    return lambda i: linear if kinds[i] == LINEAR else Latent(head_gate=True)


@dataclass(frozen=True, kw_only=True)
class FromBothLatents(Latent):
    """A.X-K2: queries and a gate as wide as the values, in a matrix that reads the latent before and after its norm."""

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases and norms of one layer's."""
        heads, _, nope, rope, value = (config.integer(name, low=0) for name in self.needs)
        rank, queries = config.integer("q_lora_rank"), heads * (nope + rope)
        return super().params(config, d_model) + rank * (queries + 2 * heads * value)


def gated_norm(config: Fields, d_model: int) -> Callable[[int], int]:
    """A.X-K2: two narrow matrices that gate the norm before attention."""
    rank = config.integer("gated_norm_rank", 16)
    return lambda i: 2 * rank * d_model


@dataclass(frozen=True, kw_only=True)
class Indexed(Heads):
    """Heads that attend to the tokens that an indexer chose (Qwen4-Exp)."""

    @property
    def needs(self) -> Sequence[str]:
        """The fields that counting requires."""
        return (*super().needs, "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim")

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases and norms of one layer's."""
        *_, queries, keys, width = (config.integer(name) for name in self.needs)
        return super().params(config, d_model) + d_model * (queries + keys) * width + 2 * width


QWEN_HEADS = Heads(head_dim_default=256, qk_norm=True, qkv_bias=_BIAS, output_bias=_BIAS, gate=_BIAS)
QWEN4_HEADS = Indexed(head_dim_default=256, qk_norm=True, qkv_bias=_BIAS, output_bias=_BIAS, gate=_BIAS)


def qwen(config: Fields) -> Callable[[int], Attention]:
    """Qwen3-Next's and Qwen3.5's layers."""
    kinds = layer_kinds(config, every_fourth(config), (LINEAR, FULL))
    return lambda i: QWEN_HEADS if kinds[i] == FULL else GatedDelta()


def qwen4(config: Fields) -> Callable[[int], Attention]:
    """Qwen4-Exp's, whose full attention is the indexed one."""
    kinds = layer_kinds(config, every_fourth(config), (LINEAR, FULL, _INDEXED))
    return lambda i: GatedDelta() if kinds[i] == LINEAR else QWEN4_HEADS


def _mixed_streams(config: Fields, d_model: int) -> int:
    """Qwen4-Exp's mix of the residual streams: a norm, and a narrow pair of matrices."""
    wide = config.integer("hc_count", 4) * d_model
    return wide + 2 * wide * config.integer("hc_lowrank", 320)


def qwen4_extra(config: Fields, d_model: int) -> Callable[[int], int]:
    """The mixes before attention and FFN, each with what it writes to every stream; what reads the n-grams."""
    count = config.integer("hc_count", 4)
    mixes = 2 * (_mixed_streams(config, d_model) + count * count * d_model)
    ngrams = ngram_matrices(config, count * d_model)
    return lambda i: mixes + ngrams(i)


def qwen4_last(config: Fields, d_model: int) -> int:
    """The mix before the head, which takes the place of a last norm."""
    return _mixed_streams(config, d_model)
