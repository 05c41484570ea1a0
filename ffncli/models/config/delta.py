"""Linear attention that updates its state by the delta rule: Gated DeltaNet and Kimi Delta Attention.

Facts: transformers 5.23 `modeling_*.py`. Kimi-K3's gates are from its checkpoint's tensor names and shapes, as listed
by implementations (ggml-org/llama.cpp#26185, lablup/mlxcel#1334).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ffncli.models.config.attention import Attention
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import Projection


@dataclass(frozen=True)
class GatedDelta(Attention):
    """Gated DeltaNet (arXiv:2412.06464), in which values and gates may have more heads than queries and keys."""

    fused: bool = False  # one projection for queries, keys, values and gates, one for beta and decay (Qwen3-Next)
    needs: Sequence[str] = (
        "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"
    )  # fmt: skip

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer; beta and decay have a value for each value head."""
        key_heads, key_dim, heads, value_dim = self.sizes(config, d_model)
        keys, values = key_heads * key_dim, heads * value_dim
        parts = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        if self.fused:
            parts = {"qkvz": parts["qkv"] + values, "ba": 2 * heads}
        for name, rows in parts.items():
            yield Projection(f"linear_attn.in_proj_{name}", rows, d_model)
        yield Projection("linear_attn.out_proj", d_model, values)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the convolution, dt_bias and A_log, and the gated norm."""
        key_heads, key_dim, heads, value_dim = self.sizes(config, d_model)
        convolved = 2 * key_heads * key_dim + heads * value_dim
        return config.integer("linear_conv_kernel_dim", 4) * convolved + 2 * heads + value_dim

    def sizes(self, config: Fields, d_model: int) -> tuple[int, int, int, int]:
        """Return the heads of keys and their width, and those of values."""
        key_heads, key_dim, heads, value_dim = (config.integer(name) for name in self.needs)
        return key_heads, key_dim, heads, value_dim


@dataclass(frozen=True)
class KimiDelta(Attention):
    """Kimi Delta Attention (arXiv:2510.26692), with a decay per channel and an output gate, each computed by two narrow
    matrices. Kimi-K3 has a full-rank output gate, and one log-decay per channel of a head. With `full_rank`, both the
    decay and the output gate have full rank (Ling-3)."""

    full_rank: bool = False
    heads: str = "linear_attn_config.num_heads|linear_num_heads"
    width: str = "linear_attn_config.head_dim|linear_head_dim"
    kernel: str = "linear_attn_config.short_conv_kernel_size|linear_conv_kernel_dim"

    @property
    def needs(self) -> Sequence[str]:
        """The config fields required for counting."""
        return (self.heads, self.width)

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer; `b_proj` computes beta, `f` the decay, and `g` the output gate."""
        heads, width = config.integer(self.heads), config.integer(self.width)
        inner = heads * width
        for name in "qkv":
            yield Projection(f"self_attn.{name}_proj", inner, d_model)
        yield Projection("self_attn.o_proj", d_model, inner)
        yield Projection("self_attn.b_proj", heads, d_model)
        full = self.full_rank or config.flag("linear_attn_config.use_full_rank_gate", False)
        for at, whole in (("forget_gate.f", self.full_rank), ("g", full)):
            if whole:
                yield Projection(f"self_attn.{at}_proj", inner, d_model)
            else:
                yield Projection(f"self_attn.{at}_a_proj", width, d_model)
                yield Projection(f"self_attn.{at}_b_proj", inner, width)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the convolutions, dt_bias and A_log, and the gated norm."""
        heads, width = config.integer(self.heads), config.integer(self.width)
        decays = width if config.flag("linear_attn_config.use_full_rank_gate", False) else heads
        return heads * width * (3 * config.integer(self.kernel, 4) + 1) + decays + width
