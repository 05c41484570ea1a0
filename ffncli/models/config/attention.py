"""The attention of one layer: how many parameters it has, from the config's fields. Common schemes, as records.

Facts: transformers 5.23 `modeling_*.py`. A fused projection holds as many numbers as its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ffncli.dataclass import dataclass
from ffncli.models.files.fields import Fields

Flag = bool | tuple[str, bool]  # a value fixed by the family's code, or a field's name with its default


def flag(config: Fields, value: Flag) -> bool:
    """A Flag's value for this config. Raises FFNError if the field is neither true nor false."""
    return value if isinstance(value, bool) else config.flag(*value)


class Attention(Protocol):
    """What mixes the tokens in a layer: the fields that counting requires, those that give its widths, its size."""

    @property
    def needs(self) -> Sequence[str]:
        """The fields that counting requires."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields that give its widths."""

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Its parameters in one layer."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Projections to heads, which may share keys and values (MHA, GQA, MQA). Strings are field names.

    `heads` None: queries, keys and values are as wide as the model for any number of heads. `kv_heads` None: as many as
    heads; a number: fixed. A null or absent `head_dim` means `head_dim_default`, else d_model / heads.
    """

    heads: str | None = "num_attention_heads"
    kv_heads: str | int | None = "num_key_value_heads"
    kv_default: int | None = None  # if the field is absent; null means as many as heads
    head_dim: str | None = "head_dim"
    head_dim_default: int | None = None
    qkv_bias: Flag = False
    key_bias: bool = True  # False: queries and values have the bias, keys do not
    output_bias: Flag = False
    qk_norm: Flag = False
    qk_norm_per_head: bool = False  # a weight for each head, not one that all heads share
    qk_norm_bias: bool = False
    sinks: bool = False  # one learned logit per head
    gate: Flag | None = None  # the bias of a gate of the output, as wide as the queries; None: no gate
    buckets: tuple[str, int] | None = None  # a relative-position table in the self-attention of every layer

    @property
    def needs(self) -> Sequence[str]:
        """The fields that counting requires."""
        return () if self.heads is None else (self.heads,)

    @property
    def fields(self) -> Sequence[str]:
        """The fields that give its widths."""
        return tuple(name for name in (self.heads, self.kv_heads, self.head_dim) if isinstance(name, str))

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases, norms, sinks and position table of one attention."""
        heads, kv_heads, head_dim = self._sizes(config, d_model)
        q, kv = heads * head_dim, kv_heads * head_dim
        total = d_model * (q + 2 * kv) + q * d_model
        if flag(config, self.qkv_bias):
            total += q + kv + (kv if self.key_bias else 0)
        if flag(config, self.output_bias):
            total += d_model
        if flag(config, self.qk_norm):
            total += (q + kv if self.qk_norm_per_head else 2 * head_dim) * (2 if self.qk_norm_bias else 1)
        if self.sinks:
            total += heads
        if self.gate is not None:
            total += (d_model + flag(config, self.gate)) * q
        if self.buckets and not cross:
            total += heads * int(config.integer(*self.buckets))
        return total

    def _sizes(self, config: Fields, d_model: int) -> tuple[int, int, int]:
        """Heads, key-value heads, width of one head."""
        if self.heads is None:
            return 1, 1, d_model
        heads: int = config.integer(self.heads)
        narrow = d_model // heads if self.head_dim_default is None else self.head_dim_default
        head_dim: int = config.integer(self.head_dim, narrow) if self.head_dim else narrow
        if not isinstance(self.kv_heads, str):
            return heads, self.kv_heads or heads, head_dim
        absent = self.kv_default and not any(name in config.values for name in self.kv_heads.split("|"))
        return heads, config.integer(self.kv_heads, self.kv_default if absent else heads), head_dim


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 §2.1): keys and values through a narrow latent.

    `bias` is for the three projections that read or write the residual stream. A null q_lora_rank projects queries
    directly. `indexer`: a small attention that chooses the tokens to attend to (DeepSeek Sparse Attention).
    """

    heads: str = "num_attention_heads"
    bias: Flag = ("attention_bias", False)
    gate: Flag = False  # a gate of the output, as wide as the values
    head_gate: bool = False  # a gate with one number per head
    sinks: bool = False  # one learned logit per head
    indexer: bool = False
    pooled: bool = False  # the indexer's keys are those of some tokens together (`index_kpool`)

    @property
    def needs(self) -> Sequence[str]:
        """The fields that counting requires."""
        return (self.heads, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    @property
    def fields(self) -> Sequence[str]:
        """The fields that give its widths."""
        return (*self.needs, "q_lora_rank")

    def params(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Weights, biases and the norms of the latents of one attention."""
        heads, rank, nope, rope, value = (int(config.integer(name, low=0)) for name in self.needs)
        bias = flag(config, self.bias)
        q_rank: int = config.integer("q_lora_rank", 0)
        q = heads * (nope + rope)
        queries = (d_model + bias + 1) * q_rank + q_rank * q if q_rank else d_model * q  # + 1: its norm
        keys_values = (d_model + bias) * (rank + rope) + rank + rank * heads * (nope + value)
        gates = d_model * heads * (flag(config, self.gate) * value + self.head_gate) + heads * self.sinks
        chosen = self._indexer(config, d_model, q_rank) if self.indexer else 0
        return queries + keys_values + heads * value * d_model + bias * d_model + gates + chosen

    def _indexer(self, config: Fields, d_model: int, q_rank: int) -> int:
        """Queries from the latent, one key with its layer norm, a weight for each head."""
        heads, width = int(config.integer("index_n_heads")), int(config.integer("index_head_dim"))
        pools = (int(config.integer("index_kpool", 16)) + d_model) * width if self.pooled else 0
        return q_rank * heads * width + d_model * width + 2 * width + d_model * heads + pools
