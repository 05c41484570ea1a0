"""Rows of families whose layers differ outside the FFN, or that have tables besides the input embedding.

Facts: transformers 5.23 `configuration_*.py` and `modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ffncli.models.config import memories, mixers
from ffncli.models.config.attention import Flag, Heads, Latent
from ffncli.models.config.non_ffn_row import Rest

_BIASED: Flag = ("attention_bias", False)
_QWEN = Rest(attention=mixers.QWEN_HEADS, mixers=mixers.qwen, needs=mixers.GatedDelta().needs)
_INDEXED = Rest(attention=Latent(), mixers=mixers.chosen_tokens, needs=("index_n_heads", "index_head_dim"))
_GEMMA4 = Rest(
    attention=mixers.GemmaHeads(1, 1), mixers=mixers.gemma4, norms=4, tied=True, other=memories.per_layer_projection,
    extra=memories.per_layer_matrices, tables=memories.per_layer_table, needs=("hidden_size_per_layer_input",),
)  # fmt: skip
_MUSE_HEADS = Heads(qkv_bias=_BIASED, output_bias=_BIASED, gate=False, kv_default=2, head_dim_default=128)

MIXED: Mapping[str, Rest] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "qwen4_exp_text": replace(
        _QWEN, attention=mixers.QWEN4_HEADS, mixers=mixers.qwen4, norms=0, final_norm=False, other=mixers.qwen4_last,
        extra=mixers.qwen4_extra, tables=memories.ngram_table,
    ),
    "kimi_linear": Rest(
        attention=Latent(), mixers=mixers.kimi, extra=mixers.kimi_residuals, other=mixers.kimi_last_residual,
        needs=mixers.KimiDelta().needs,
    ),
    "deepseek_v4": Rest(
        attention=mixers.Compressed(), mixers=mixers.deepseek_v4, extra=mixers.streams, other=mixers.last_streams,
        needs=("index_n_heads", "index_head_dim"),
    ),
    "glm_moe_dsa": _INDEXED,
    "glm5_next_text": replace(_INDEXED, mixers=mixers.glm5_next, extra=mixers.streams),
    "hy_v4": replace(_INDEXED, mixers=mixers.hy4, extra=mixers.narrow_streams, other=mixers.last_streams),
    "axk2": replace(
        _INDEXED, mixers=None, attention=mixers.FromBothLatents(indexer=True), extra=mixers.gated_norm
    ),
    "bailing_hybrid": Rest(attention=Latent(), mixers=mixers.ling3),
    "gemma3n_text": replace(_GEMMA4, mixers=mixers.gemma3n, extra=mixers.gemma3n_extra, other=mixers.gemma3n_last),
    "gemma4_text": _GEMMA4,
    "muse_spark_text": Rest(attention=replace(_MUSE_HEADS, kv_default=16, head_dim_default=64), norms=3,
                            extra=lambda config, d_model: lambda i: 2 * d_model),  # gates of the two residuals
    "muse_glimmer_text": Rest(attention=_MUSE_HEADS, norms=4),
    "openai_privacy_filter": Rest(
        attention=Heads(qkv_bias=("attention_bias", True), output_bias=("attention_bias", True), sinks=True,
                        head_dim_default=64, kv_default=2),
        head=None,
    ),
}  # fmt: skip
