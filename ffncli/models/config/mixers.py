"""Token mixers of models whose layers differ: linear, compressed and shared attention, and the rules that assign a
mixer to each layer.

Facts: transformers 5.23 `modeling_*.py`. Kimi-K3's gates and residuals are from its checkpoint's tensor names and
shapes, as listed by implementations (ggml-org/llama.cpp#26185, lablup/mlxcel#1334).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ffncli.models.config.attention import (
    Attention,
    Heads,
    Latent,
    flag,
    ngram_matrices,
    per_layer_matrices,
    per_layer_projection,
)
from ffncli.models.config.delta import GatedDelta, KimiDelta
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import Projection

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
_INDEXED, _BLOCKS = "indexed_attention", "minimax_m3_sparse"
_BIAS = ("attention_bias", False)


def layer_kinds(config: Fields, default: Callable[[int, int], str], known: Sequence[str]) -> list[str]:
    """Return the name of each layer's kind. Raises FFNError if the list has the wrong length or an unknown name."""
    layers = config.integer("num_hidden_layers")
    names = "layer_types|layers_block_type"
    kinds = config.get(names, None)
    if kinds is None:
        return [default(i, layers) for i in range(layers)]
    if type(kinds) is not list or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise config.wrong(names, kinds, f"one of {', '.join(known)} for each layer ({layers})")
    return kinds


def every_fourth(config: Fields) -> Callable[[int, int], str]:
    """Build Qwen's default rule: every `full_attention_interval`-th layer has full attention."""
    interval = config.integer("full_attention_interval", 4)
    return lambda i, layers: LINEAR if (i + 1) % interval else FULL


def kimi(config: Fields) -> Callable[[int], Attention]:
    """Return Kimi-Linear's attention by layer. Layers with full attention are listed in `linear_attn_config` (counting
    from 1) or marked in `layer_types`; by default, every fourth layer has full attention."""
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
    """Count the parameters with which Kimi-K3 weights the outputs of earlier blocks, by layer: a vector and a norm
    before attention, and again before the FFN."""
    return lambda i: 4 * d_model if config.integer("attn_res_block_size", 0, low=0) else 0


def kimi_last_residual(config: Fields, d_model: int) -> int:
    """Count the vector and the norm with which Kimi-K3 weights the outputs of earlier blocks before the head."""
    return 2 * d_model if config.integer("attn_res_block_size", 0, low=0) else 0


# --- Gemma ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmaHeads(Attention):
    """The attention of one layer in Gemma 3n and 4. Its widths may differ from other layers' widths. If `keys` is
    false, it reuses an earlier layer's keys and values; if only `values` is false, its keys also serve as values."""

    kv_heads: int
    width: int
    keys: bool = True
    values: bool = True
    needs: Sequence[str] = ("num_attention_heads",)
    fields: Sequence[str] = ("num_attention_heads", "num_key_value_heads", "head_dim", "layer_types")

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        q, kv = config.integer("num_attention_heads") * self.width, self.kv_heads * self.width
        yield Projection("self_attn.q_proj", q, d_model)
        if self.keys:
            yield Projection("self_attn.k_proj", kv, d_model)
        if self.keys and self.values:
            yield Projection("self_attn.v_proj", kv, d_model)
        yield Projection("self_attn.o_proj", d_model, q)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases and norms of one layer."""
        biases = sum(one.rows for one in self.matrices(config, d_model)) if config.flag(*_BIAS) else 0
        return biases + self.width * (1 + self.keys)


def _shared_from(config: Fields, default: int) -> int:
    """Return the first layer that reuses an earlier layer's keys and values."""
    layers = config.integer("num_hidden_layers")
    return layers - config.integer("num_kv_shared_layers", default, low=0, high=layers)


def gemma3n(config: Fields) -> Callable[[int], Attention]:
    """Return Gemma 3n's attention by layer; the last layers reuse the keys and values of an earlier layer."""
    kv_heads, width = config.integer("num_key_value_heads", 2), config.integer("head_dim", 256)
    shared = _shared_from(config, 15)
    return lambda i: GemmaHeads(kv_heads, width, keys=i < shared)


def gemma4(config: Fields) -> Callable[[int], Attention]:
    """Return Gemma 4's attention by layer. Layers with full attention have wider heads; they may have fewer key-value
    heads, and keys that also serve as values."""
    kinds = layer_kinds(config, lambda i, layers: SLIDING if (i + 1) % 6 else FULL, (SLIDING, FULL))
    kinds[-1] = FULL
    kv_heads, width = config.integer("num_key_value_heads", 4), config.integer("head_dim", 256)
    alike = config.flag("attention_k_eq_v", False)
    wide = config.integer("global_head_dim", 512)
    fewer = config.integer("num_global_key_value_heads", kv_heads) if alike else kv_heads
    shared = _shared_from(config, 0)
    saved = config.get("per_layer_config", None)  # the form in which transformers saves it

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
    """Count AltUp (arXiv:2301.13310: 4 matrices, scale, norm) and LAuReL (arXiv:2411.07501: 2 matrices, norm)."""
    streams = config.integer("altup_num_inputs", 4)
    altup = 2 * d_model + streams**2 + streams**3 + d_model * streams
    laurel = 2 * d_model * config.integer("laurel_rank", 64) + d_model
    embedded = per_layer_matrices(config, d_model)
    return lambda i: altup + laurel + embedded(i)


def gemma3n_last(config: Fields, d_model: int) -> int:
    """Count the projection of the per-layer embeddings, and the projections into and out of AltUp's other streams."""
    streams = config.integer("altup_num_inputs", 4)
    return per_layer_projection(config, d_model) + 2 * (streams - 1) * d_model**2


# --- DeepSeek-V4 ------------------------------------------------------------------------------------------------------

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {0: SLIDING, 4: _SPARSE, 128: _HEAVY}


@dataclass(frozen=True)
class Compressed(Attention):
    """DeepSeek-V4's attention: a single key that also serves as the value, sinks, and an output projection in groups. A
    compressor merges the keys of `rate` tokens into one (0: no compressor). If `sparse`, the compressor is twice as
    wide, and there is an indexer with a compressor of its own."""

    rate: int = 0
    sparse: bool = False
    needs: Sequence[str] = ("num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
    fields: Sequence[str] = ("num_attention_heads", "head_dim", "q_lora_rank")

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer: those of compressors compute keys and their gates."""
        heads, width, q_rank, groups, o_rank = (config.integer(name) for name in self.needs)
        yield Projection("self_attn.q_a_proj", q_rank, d_model)
        yield Projection("self_attn.q_b_proj", heads * width, q_rank)
        yield Projection("self_attn.kv_proj", width, d_model)
        yield Projection("self_attn.o_a_proj", groups * o_rank, heads * width // groups)
        yield Projection("self_attn.o_b_proj", d_model, groups * o_rank)
        for at, _, wide in self._compressors(config):
            yield Projection(f"self_attn.{at}.kv_proj", wide, d_model)
            yield Projection(f"self_attn.{at}.gate_proj", wide, d_model)
        if self.rate and self.sparse:
            index_heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
            yield Projection("self_attn.compressor.indexer.q_b_proj", index_heads * width, q_rank)
            yield Projection("self_attn.compressor.indexer.scorer.weights_proj", index_heads, d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the norms and sinks of one layer; in a compressor, a bias for each position in a chunk, and a norm."""
        heads, width, q_rank, *_ = (config.integer(name) for name in self.needs)
        return q_rank + width + heads + sum(self.rate * wide + width for _, width, wide in self._compressors(config))

    def _compressors(self, config: Fields) -> Iterator[tuple[str, int, int]]:
        """Yield the compressors: their names, the width of their keys, and that of what they merge."""
        if self.rate:
            width = config.integer("head_dim")
            yield "compressor", width, width * (1 + self.sparse)
        if self.rate and self.sparse:
            width = config.integer("index_head_dim")
            yield "compressor.indexer", width, 2 * width


def deepseek_v4(config: Fields) -> Callable[[int], Attention]:
    """Return DeepSeek-V4's attention by layer. A layer merges the keys of 4 or of 128 tokens, or has no compressor, as
    specified by `compress_ratios` or by the names in `layer_types`."""
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
    """Count the hyper-connections (arXiv:2409.19606) that mix the residual streams before attention and FFN."""
    count = config.integer("hc_mult", 4)
    mixed = (2 + count) * count
    # a projection of all streams to weights that collapse, expand and mix them, its bias, and a scale for each of the
    # three
    return lambda i: 2 * (mixed * count * d_model + mixed + 3)


def last_streams(config: Fields, d_model: int) -> int:
    """Count the parameters that merge the residual streams into one before the head."""
    count = config.integer("hc_mult", 4)
    return count * count * d_model + count + 1


def narrow_streams(config: Fields, d_model: int) -> Callable[[int], int]:
    """Count Hy4's hyper-connections, which only read from the streams and write to them."""
    count = config.integer("hc_mult", 4)
    return lambda i: 2 * (2 * count * count * d_model + 2 * count + 2)


# --- others -----------------------------------------------------------------------------------------------------------


def chosen_tokens(config: Fields) -> Callable[[int], Attention]:
    """Return GLM-5's latent attention over tokens chosen by an indexer; `shared` layers reuse an earlier layer's
    choice."""
    every = config.integer("index_topk_freq", 1, low=0)
    offset = config.integer("index_skip_topk_offset", 2, low=0)
    indexed = _with_indexer(config, lambda i: not max(i - offset + 1, 0) % max(every, 1))
    return lambda i: Latent(indexer=indexed[i])


def _with_indexer(config: Fields, default: Callable[[int], bool]) -> list[bool]:
    """Return whether each layer has an indexer, from `indexer_types` or a pattern such as FSSS."""
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
    """Return the attention by layer: three layers of Kimi Delta Attention, then one of GLM-5's attention over pools of
    tokens."""
    kinds = layer_kinds(config, lambda i, layers: FULL if i % 4 == 3 else LINEAR, (LINEAR, FULL, _INDEXED))
    chosen = chosen_tokens(config)

    def one(i: int) -> Attention:
        attention = chosen(i)
        return KimiDelta() if kinds[i] == LINEAR else replace(attention, pooled=True)  # type: ignore[type-var]

    return one


def hy4(config: Fields) -> Callable[[int], Attention]:
    """Return Hy4's attention: GLM-5's with a gate and sinks; by default layers 0, 1, 5, 9, ... have an indexer."""
    indexed = _with_indexer(config, lambda i: i == 0 or i % 4 == 1)
    return lambda i: Latent(indexer=indexed[i], gate=True, sinks=True)


def ling3(config: Fields) -> Callable[[int], Attention]:
    """Return Ling-3's attention by layer: Kimi Delta Attention with full-rank gates; the last layer of each group has
    latent attention with a gate per head."""
    group = config.integer("layer_group_size", 6)
    kinds = layer_kinds(config, lambda i, layers: LINEAR if (i + 1) % group else FULL, (LINEAR, FULL))
    # transformers moves the published head_dim to linear_head_dim, and saves the rotary width as head_dim
    linear = KimiDelta(True, "num_attention_heads", "linear_head_dim|head_dim", "short_conv_kernel_size")
    return lambda i: linear if kinds[i] == LINEAR else Latent(head_gate=True)


@dataclass(frozen=True, kw_only=True)
class FromBothLatents(Latent):
    """A.X-K2's latent attention: one matrix reads the query latent before and after its norm, and computes the queries
    and a gate as wide as the values."""

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        heads, _, _, _, value = (config.integer(name, low=0) for name in self.needs)
        for one in super().matrices(config, d_model):
            if one.name == "self_attn.q_b_proj":
                one = Projection("self_attn.q_gate_proj", one.rows + heads * value, 2 * one.columns)
            yield one


def gated_norm(config: Fields, d_model: int) -> Callable[[int], int]:
    """Count A.X-K2's two narrow matrices that gate the norm before attention, by layer."""
    rank = config.integer("gated_norm_rank", 16)
    return lambda i: 2 * rank * d_model


@dataclass(frozen=True, kw_only=True)
class Indexed(Heads):
    """Heads that attend only to tokens chosen by an indexer (Qwen4-Exp, MiniMax-M3): `index` are its heads of queries
    and of keys, and their width."""

    index: tuple[str, str | None, str] = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim")
    index_defaults: tuple[int, int] | None = None  # of queries and width

    @property
    def needs(self) -> Sequence[str]:
        """The config fields required for counting."""
        return super().needs if self.index_defaults else (*super().needs, *filter(None, self.index))

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer; the indexer's may be one for its queries and keys."""
        yield from super().matrices(config, d_model)
        queries, keys, width = self._index(config)
        if self.index[1]:
            yield Projection("self_attn.indexer.index_qk_proj", (queries + keys) * width, d_model)
        else:
            yield Projection("self_attn.indexer.q_proj", queries * width, d_model)
            yield Projection("self_attn.indexer.k_proj", keys * width, d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases and norms of one layer."""
        return super().others(config, d_model) + 2 * self._index(config)[2]

    def _index(self, config: Fields) -> tuple[int, int, int]:
        """Return the indexer's heads of queries and of keys, and their width."""
        names, defaults = self.index, self.index_defaults
        queries = config.integer(names[0], defaults[0]) if defaults else config.integer(names[0])
        width = config.integer(names[2], defaults[1]) if defaults else config.integer(names[2])
        return queries, config.integer(names[1]) if names[1] else 1, width


QWEN_HEADS = Heads(
    head_dim_default=256, qk_norm=True, qkv_bias=_BIAS, output_bias=_BIAS, gate=_BIAS, gate_with_queries=True
)
QWEN4_HEADS = Indexed(
    head_dim_default=256, qk_norm=True, qkv_bias=_BIAS, output_bias=_BIAS, gate=_BIAS, gate_with_queries=True
)


def qwen(fused: bool) -> Callable[[Fields], Callable[[int], Attention]]:
    """Build the rule of Qwen3-Next (`fused`) and Qwen3.5: the attention by layer."""

    def mixers(config: Fields) -> Callable[[int], Attention]:
        kinds = layer_kinds(config, every_fourth(config), (LINEAR, FULL))
        return lambda i: QWEN_HEADS if kinds[i] == FULL else GatedDelta(fused)

    return mixers


def qwen4(config: Fields) -> Callable[[int], Attention]:
    """Return Qwen4-Exp's attention by layer; its full attention is the indexed attention."""
    kinds = layer_kinds(config, every_fourth(config), (LINEAR, FULL, _INDEXED))
    return lambda i: GatedDelta() if kinds[i] == LINEAR else QWEN4_HEADS


def _mixed_streams(config: Fields, d_model: int) -> int:
    """Count one of Qwen4-Exp's mixes of the residual streams: a norm and two narrow matrices."""
    wide = config.integer("hc_count", 4) * d_model
    return wide + 2 * wide * config.integer("hc_lowrank", 320)


def qwen4_extra(config: Fields, d_model: int) -> Callable[[int], int]:
    """Count, by layer, the mixes before attention and FFN, the weights that write each output to every stream, and the
    matrices that read the n-gram tables."""
    count = config.integer("hc_count", 4)
    mixes = 2 * (_mixed_streams(config, d_model) + count * count * d_model)
    ngrams = ngram_matrices(config, count * d_model)
    return lambda i: mixes + ngrams(i)


def qwen4_last(config: Fields, d_model: int) -> int:
    """Count the mix before the head, which replaces the final norm."""
    return _mixed_streams(config, d_model)


# --- layers whose heads differ ----------------------------------------------------------------------------------------

_MINIMAX_HEADS = Heads(qk_norm=True, kv_default=4, head_dim_default=128)
_MINIMAX_INDEXED = Indexed(
    qk_norm=True, kv_default=4, head_dim_default=128, index_defaults=(4, 128),
    index=("sparse_attention_config.sparse_num_index_heads|index_n_heads", None,
           "sparse_attention_config.sparse_index_dim|index_head_dim"),
)  # fmt: skip


def minimax(config: Fields) -> Callable[[int], Attention]:
    """Return MiniMax-M3's attention by layer: over blocks of keys that an indexer chooses, or over all."""
    nested = config.get("sparse_attention_config", None) is not None
    chosen = config.integers("sparse_attention_config.sparse_attention_freq") if nested else ()
    kinds = layer_kinds(config, lambda i, layers: _BLOCKS if i < len(chosen) and chosen[i] else FULL, (FULL, _BLOCKS))
    return lambda i: _MINIMAX_INDEXED if kinds[i] == _BLOCKS else _MINIMAX_HEADS


@dataclass(frozen=True)
class SizedHeads(Attention):
    """Attention whose values may be narrower than its keys, with sizes that a rule has read for this layer."""

    heads: int
    kv_heads: int
    width: int
    value: int
    bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    head_gate: bool = False
    needs: Sequence[str] = ()
    fields: Sequence[str] = ("num_attention_heads", "num_key_value_heads", "head_dim")

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        yield Projection("self_attn.q_proj", self.heads * self.width, d_model)
        yield Projection("self_attn.k_proj", self.kv_heads * self.width, d_model)
        yield Projection("self_attn.v_proj", self.kv_heads * self.value, d_model)
        yield Projection("self_attn.o_proj", d_model, self.heads * self.value)
        if self.head_gate:
            yield Projection("self_attn.g_proj", self.heads, d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases, norms and sinks of one layer."""
        biased = self.heads * self.width + self.kv_heads * (self.width + self.value)
        biases = self.bias * biased + self.output_bias * d_model
        return biases + self.heads * self.sinks + 2 * self.width * self.qk_norm


def mimo(config: Fields) -> Callable[[int], Attention]:
    """Return MiMo-V2's attention by layer. Sliding layers have twice the key-value heads, and sinks; published configs
    give their sizes (`swa_*`) and mark them by a 1 in `hybrid_layer_pattern`."""
    pattern, bias = config.integers("hybrid_layer_pattern"), flag(config, _BIAS)
    kinds = layer_kinds(
        config,
        lambda i, layers: SLIDING if (pattern[i] if i < len(pattern) else i and (i + 1) % 6) else FULL,
        (FULL, SLIDING),
    )
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads", 4)
    width, value = config.integer("head_dim", 192), config.integer("v_head_dim", 128)
    full = SizedHeads(heads, kv_heads, width, value, bias, sinks=config.flag("add_full_attention_sink_bias", False))
    sliding = SizedHeads(
        config.integer("swa_num_attention_heads", heads), config.integer("swa_num_key_value_heads", 2 * kv_heads),
        config.integer("swa_head_dim", width), config.integer("swa_v_head_dim", value), bias,
        sinks=config.flag("add_swa_attention_sink_bias", True),
    )  # fmt: skip
    return lambda i: sliding if kinds[i] == SLIDING else full


def step(config: Fields) -> Callable[[int], Attention]:
    """Return Step-3.5's attention by layer, with a gate per head; sliding layers may have another number of heads."""
    layers, kinds = config.integer("num_hidden_layers"), config.get("layer_types", None)
    if kinds is None:
        kinds = [FULL] * layers
    if type(kinds) is not list or len(kinds) < layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise config.wrong("layer_types", kinds, f"{FULL} or {SLIDING} for each layer ({layers})")
    heads, bias = config.integer("num_attention_heads"), flag(config, _BIAS)
    kv_heads, width = config.integer("num_attention_groups|num_key_value_heads", 8), config.integer("head_dim", 128)
    nested = "attention_other_setting.num_attention_heads|" if config.get("attention_other_setting", None) else ""
    other = config.integer(f"{nested}num_sliding_attention_heads", heads)

    def one(i: int) -> Attention:
        count = other if kinds[i] == SLIDING else heads
        return SizedHeads(count, kv_heads, width, width, bias, bias, qk_norm=True, head_gate=True)

    return one


@dataclass(frozen=True, kw_only=True)
class ScaledLatent(Latent):
    """Mistral Large 4's latent attention: queries and its indexer are read from the residual stream, and each head has
    a learned scale. A layer without rotated positions has `no_rope`; one without a `latent` reads another layer's."""

    no_rope: bool = False
    latent: bool = True

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        heads, rank, nope, rope, value = (config.integer(name, low=0) for name in self.needs)
        yield Projection("self_attn.q_proj", heads * (nope + rope), d_model)
        if self.latent:
            yield Projection("self_attn.kv_a_proj_with_mqa", rank + (0 if self.no_rope else rope), d_model)
        yield Projection("self_attn.kv_b_proj", heads * (nope + (rope if self.no_rope else 0) + value), rank)
        yield Projection("self_attn.o_proj", d_model, heads * value)
        if self.indexer:
            heads, width = config.integer("index_n_heads", 32), config.integer("index_head_dim", 128)
            yield Projection("self_attn.indexer.wq_b", heads * width, d_model)
            yield Projection("self_attn.indexer.wk", width, d_model)
            yield Projection("self_attn.indexer.weights_proj", heads, d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases, norms and scales of one layer."""
        heads, rank, _, rope, _ = (config.integer(name, low=0) for name in self.needs)
        bias = flag(config, self.bias)
        reads = bias * (rank + (0 if self.no_rope else rope)) + rank if self.latent else 0
        chosen = 0
        if self.indexer:
            width, count = config.integer("index_head_dim", 128), config.integer("index_n_heads", 32)
            chosen = 2 * (d_model + width + count)
        return reads + bias * d_model + 2 * heads + chosen


def mistral_large4(config: Fields) -> Callable[[int], Attention]:
    """Return Mistral Large 4's attention by layer; by default every fourth layer has no rotated positions."""
    layers, period = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotated, sources = config.integers("no_rope_layers"), config.integers("kv_source_layers")
    if any(0 < len(values) < layers for values in (rotated, sources)):
        raise config.wrong(
            "no_rope_layers|kv_source_layers", list(rotated or sources), f"a number per layer ({layers})"
        )
    every, offset = config.integer("index_topk_freq", 1, low=0), config.integer("index_skip_topk_offset", 2, low=0)
    indexed = _with_indexer(config, lambda i: not max(i - offset + 1, 0) % max(every, 1))

    def one(i: int) -> Attention:
        rope = rotated[i] if rotated else (i + 1) % period
        return ScaledLatent(indexer=indexed[i], no_rope=not rope, latent=not sources or sources[i] == i)

    return one


_DOTS_SLIDING = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}


@dataclass(frozen=True, kw_only=True)
class LayersLatent(Latent):
    """Dots3's latent attention, with a norm on the rotated part of the key; `sizes` are this layer's sizes where they
    are not the config's."""

    sizes: tuple[tuple[str, Any], ...] = ()

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        return super().matrices(self._layer(config), d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases and norms of one layer."""
        layer = self._layer(config)
        return super().others(layer, d_model) + layer.integer("qk_rope_head_dim", low=0)

    def _layer(self, config: Fields) -> Fields:
        """Return the config with this layer's sizes."""
        return replace(config, values={**config.values, **dict(self.sizes)})


def dots3(config: Fields) -> Callable[[int], Attention]:
    """Return Dots3's attention by layer. Layers 0, 1, 5, 9, ... attend to tokens that an indexer chooses, unless
    `use_dsa` is false; the others have a window, and sizes of their own (`swa_*`)."""
    saved = config.get("per_layer_config", None)  # the form in which transformers saves it
    window, chosen = config.flag("use_sliding_window", True), config.flag("use_dsa", saved is None)
    kinds = layer_kinds(
        config, lambda i, layers: SLIDING if window and i > 1 and i % 4 != 1 else FULL, (FULL, SLIDING, _INDEXED)
    )
    sizes = {name: config.integer(f"swa_{name}", default) for name, default in _DOTS_SLIDING.items()}
    rotated = sizes["head_dim"] - sizes["qk_nope_head_dim"]
    sizes["qk_rope_head_dim"] = config.integer("swa_qk_rope_head_dim", rotated, low=0)

    def one(i: int) -> Attention:
        if saved is None:
            layer = sizes if kinds[i] == SLIDING else {}
        else:
            layer = config.inside("per_layer_config").values.get(str(i), {})
        indexed = kinds[i] == _INDEXED or (chosen and kinds[i] == FULL)
        return LayersLatent(head_gate=True, indexer=indexed, sizes=tuple(layer.items()))

    return one
