"""Mixers without attention that keep a state of fixed size (Mamba, Mamba-2) or see a few tokens (short convolutions),
and the rules that give a hybrid's layers such a mixer or attention.

Facts: transformers 5.23 `modeling_*.py` of Bamba, Granite 4 hybrid, Jamba, LFM2, LFM3, Nemotron-H and OLMo Hybrid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ffncli.models.config.attention import Attention, Flag, Heads, flag
from ffncli.models.config.delta import GatedDelta
from ffncli.models.config.families.hybrids import nemotron_kinds
from ffncli.models.config.mixers import FULL, LINEAR, SLIDING, layer_kinds
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import Projection

_CONV = "conv"
_ATTENDS = (FULL, SLIDING, "attention")
_KINDS = (*_ATTENDS, LINEAR, "mamba", _CONV)
_BIAS = ("attention_bias", False)


@dataclass(frozen=True)
class Absent(Attention):
    """No mixer: the layer has only an FFN."""

    needs: Sequence[str] = ()
    fields: Sequence[str] = ()


@dataclass(frozen=True)
class Mamba(Attention):
    """Mamba (arXiv:2312.00752) with norms on the step, B and C, as in Jamba."""

    needs: Sequence[str] = ()
    fields: Sequence[str] = ("mamba_expand", "mamba_d_state", "mamba_dt_rank")

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer; `x_proj` computes step, B and C, `dt_proj` widens the step."""
        inner, state, rank = self._sizes(config, d_model)
        yield Projection("mamba.in_proj", 2 * inner, d_model)
        yield Projection("mamba.x_proj", rank + 2 * state, inner)
        yield Projection("mamba.dt_proj", inner, rank)
        yield Projection("mamba.out_proj", d_model, inner)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases, the convolution, the norms of step, B and C, and A and D."""
        inner, state, rank = self._sizes(config, d_model)
        biases = flag(config, ("mamba_proj_bias", False)) * (2 * inner + d_model) + inner
        convolution = inner * (config.integer("mamba_d_conv", 4) + flag(config, ("mamba_conv_bias", True)))
        return biases + convolution + rank + 2 * state + inner * (state + 1)

    def _sizes(self, config: Fields, d_model: int) -> tuple[int, int, int]:
        """Return the inner width, the width of the state, and the rank of the step."""
        inner, state = config.integer("mamba_expand", 2) * d_model, config.integer("mamba_d_state", 16)
        return inner, state, _automatic(config, "mamba_dt_rank", -(-d_model // 16))


@dataclass(frozen=True)
class Mamba2(Attention):
    """Mamba-2 (arXiv:2405.21060) with a gated norm; the strings are names of the config's fields. The width of a head
    may be `auto`: `mamba_expand` · d_model / heads."""

    heads: str = "mamba_n_heads"
    width: str | None = "mamba_d_head"
    groups: tuple[str, int] = ("mamba_n_groups", 1)
    state: tuple[str, int] = ("mamba_d_state", 256)
    kernel: str = "mamba_d_conv"
    conv_bias: Flag = ("mamba_conv_bias", True)
    bias: Flag = ("mamba_proj_bias", False)
    head_default: int = 128
    at: str = "mamba"  # the module's name
    needs: Sequence[str] = ()

    @property
    def fields(self) -> Sequence[str]:
        """The config fields that determine its widths."""
        return (self.heads, self.groups[0], self.state[0])

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        heads, inner, convolved = self._sizes(config, d_model)
        yield Projection(f"{self.at}.in_proj", inner + convolved + heads, d_model)
        yield Projection(f"{self.at}.out_proj", d_model, inner)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases, the convolution, the step's bias with A and D, and the gated norm."""
        heads, inner, convolved = self._sizes(config, d_model)
        biases = flag(config, self.bias) * (inner + convolved + heads + d_model)
        kernel = config.integer(self.kernel, 4) + flag(config, self.conv_bias)
        return biases + convolved * kernel + 3 * heads + inner

    def _sizes(self, config: Fields, d_model: int) -> tuple[int, int, int]:
        """Return the heads, the inner width, and the width of the convolution."""
        heads = config.integer(self.heads, self.head_default)
        width = _automatic(config, self.width, max(1, config.integer("mamba_expand", 2) * d_model // heads))
        inner = heads * width
        return heads, inner, inner + 2 * config.integer(*self.groups) * config.integer(*self.state)


@dataclass(frozen=True)
class ShortConvolution(Attention):
    """LFM2's gated convolution over `conv_L_cache` tokens."""

    tokens: int = 3
    needs: Sequence[str] = ()
    fields: Sequence[str] = ("conv_L_cache",)

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        yield Projection("conv.in_proj", 3 * d_model, d_model)
        yield Projection("conv.out_proj", d_model, d_model)

    def others(self, config: Fields, d_model: int, cross: bool = False) -> int:
        """Count the biases and the convolution of one layer."""
        bias = flag(config, ("conv_bias", False))
        return d_model * (5 * bias + config.integer("conv_L_cache", self.tokens))


def _automatic(config: Fields, name: str | None, default: int) -> int:
    """Read a size that may be absent, null or `auto`."""
    if name is None or config.get(name, None) in (None, "auto"):
        return default
    return config.integer(name)


# --- which layer has which mixer --------------------------------------------------------------------------------------


def _hybrid(
    other: Attention, full: Attention, default: Callable[[Fields], Callable[[int], bool]]
) -> Callable[[Fields], Callable[[int], Attention]]:
    """Build the rule of a hybrid: attention in the layers that the config names so (by default in those for which
    `default` is true), `other` in its other layers."""

    def mixers(config: Fields) -> Callable[[int], Attention]:
        attends = default(config)
        kinds = layer_kinds(config, lambda i, layers: FULL if attends(i) else LINEAR, _KINDS)
        return lambda i: full if kinds[i] in _ATTENDS else other

    return mixers


def _listed(name: str, otherwise: bool) -> Callable[[Fields], Callable[[int], bool]]:
    """Build a rule that reads the numbers of the layers with attention from a field; without the field, all layers or
    none have attention."""

    def rule(config: Fields) -> Callable[[int], bool]:
        listed = None if config.get(name, None) is None else frozenset(config.integers(name))
        return lambda i: otherwise if listed is None else i in listed

    return rule


def _periodic(config: Fields) -> Callable[[int], bool]:
    period = config.integer("attn_layer_period", 8)
    offset = config.integer("attn_layer_offset", 4, low=0)
    return lambda i: i % period == offset


_NORMED = Heads(qk_norm=True, kv_default=8)
_JAMBA = Heads(head_dim=None, kv_default=8)
_BIASED = Heads(head_dim=None, qkv_bias=_BIAS, output_bias=_BIAS)
bamba = _hybrid(Mamba2(), replace(_BIASED, kv_default=8), _listed("attn_layer_indices", otherwise=False))
granite = _hybrid(Mamba2(), _BIASED, _listed("attn_layer_indices", otherwise=False))
jamba = _hybrid(Mamba(), _JAMBA, _periodic)
lfm2 = _hybrid(ShortConvolution(), replace(_NORMED, head_dim=None), _listed("full_attn_idxs", otherwise=True))


def lfm3(config: Fields) -> Callable[[int], Attention]:
    """Return LFM3's mixers by layer; its attention may have an output gate with one value per head."""
    heads = Heads(
        qk_norm=True,
        kv_default=4,
        head_dim_default=128,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        head_gate=("use_attention_gate", True),
    )
    return _hybrid(ShortConvolution(7), heads, lambda config: lambda i: i % 2 == 0 and i > 0)(config)


@dataclass(frozen=True)
class _SeparateDelta(GatedDelta):
    """OLMo Hybrid's Gated DeltaNet, whose sizes follow from those of its attention unless the config has them."""

    needs: Sequence[str] = ("num_attention_heads",)

    def sizes(self, config: Fields, d_model: int) -> tuple[int, int, int, int]:
        """Return the heads of keys and their width, and those of values."""
        heads = config.integer("num_attention_heads")
        key_heads = _automatic(config, "linear_num_key_heads", heads)
        key_dim = _automatic(config, "linear_key_head_dim", 3 * d_model // (4 * key_heads))
        values = _automatic(config, "linear_num_value_heads", heads)
        return key_heads, key_dim, values, _automatic(config, "linear_value_head_dim", 2 * key_dim)

    def matrices(self, config: Fields, d_model: int) -> Iterator[Projection]:
        """Yield the projections of one layer."""
        key_heads, key_dim, heads, value_dim = self.sizes(config, d_model)
        keys, values = key_heads * key_dim, heads * value_dim
        for name, rows in {"q": keys, "k": keys, "v": values, "a": heads, "b": heads, "g": values}.items():
            yield Projection(f"linear_attn.{name}_proj", rows, d_model)
        yield Projection("linear_attn.o_proj", d_model, values)


OLMO_HEADS = Heads(head_dim=None, qkv_bias=_BIAS, output_bias=_BIAS, qk_norm=True, qk_norm_per_head=True)


def olmo(config: Fields) -> Callable[[int], Attention]:
    """Return OLMo Hybrid's mixers by layer: every fourth has attention, as has the last of fewer than four."""
    count = config.integer("num_hidden_layers")
    return _hybrid(_SeparateDelta(), OLMO_HEADS, lambda config: lambda i: i % 4 == 3 or i == count - 1 < 3)(config)


# --- Nemotron-H: a layer is a mixer or an FFN -------------------------------------------------------------------------

_NEMOTRON: Mapping[str, Attention] = {
    **dict.fromkeys((LINEAR, "mamba"), Mamba2(
        "mamba_num_heads", "mamba_head_dim", ("n_groups|mamba_n_groups", 8), ("ssm_state_size", 128),
        "conv_kernel|mamba_d_conv", ("use_conv_bias", True), ("use_bias", False), at="mixer")),
    **dict.fromkeys((FULL, "attention"), Heads(head_dim="head_dim|attention_head_dim", kv_default=8,
                                               head_dim_default=128, at="mixer")),
}  # fmt: skip


def nemotron(config: Fields) -> Mapping[int, Attention]:
    """Return the mixers of the layers without an FFN, by layer."""
    return {i: _NEMOTRON[kind] for i, kind in enumerate(nemotron_kinds(config)) if kind in _NEMOTRON}
