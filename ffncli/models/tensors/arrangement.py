"""What names and shapes do not show of a family's FFN tensors: which half is first, how squares are stored, which norm.

Facts: the modeling code of transformers 5.23; a test reads every architecture and compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from ffncli.block.recipe import FFNSpec
from ffncli.dataclass import dataclass
from ffncli.models.config.families import BY_TYPE, family_of
from ffncli.models.tensors.names import Naming


@dataclass(frozen=True)
class Order:
    """How gate and up share a matrix: which comes first, and whether concatenated or interleaved."""

    gate_first: bool
    interleaved: bool
    because: str
    assumed: str = ""


@dataclass(frozen=True)
class Arrangement:
    """A family's row: `transposed` matrices are `[in, out]` where shapes fit both ways, `interleaved` gate and up
    in one matrix, `up_first` the up projection in its first half. `norms` are modules by step, tried before the usual
    ones.

    In their names `../` is the parent of the layers' prefix, `{i}` the layer's number, `{n}` the FFN's in its layer.
    """

    family: str = ""
    transposed: bool = False
    interleaved: bool = False
    up_first: bool = False
    norms: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def order(self, naming: Naming, biased_experts: bool = False) -> Order:
        """How the two are arranged in the matrix of `naming`; `biased_experts`: it holds all experts and has a bias."""
        if self.interleaved or naming.up in _INTERLEAVED:
            return Order(True, True, f"gate and up by turns, as {self.family or naming.up} has them")
        if naming.up in _INKLING:
            why = "" if self.family else f"{naming.up} is read as Inkling's, gate and up by turns"
            return Order(True, True, f"gate and up by turns, as Inkling's {naming.up} has them", why)
        if biased_experts and not self.family:
            why = "experts with biases"
            return Order(
                True, True, f"gate and up by turns: {why}", f"{why} are read as gpt-oss's, gate and up by turns"
            )
        if self.up_first or naming.up in _UP_FIRST:
            return Order(False, False, f"up before gate, as {self.family or naming.up} has them")
        if naming.up in _GATE_FIRST or self.family:
            return Order(True, False, f"gate before up, as {self.family or naming.up} has them")
        return Order(True, False, "gate before up", f"{naming.up}: the gate's half is read as the first")


_GATE_FIRST = {"gate_up_proj", "ffn_up"}  # as the names say; the same in llama.cpp (Phi-3)
_UP_FIRST = {"up_gate_proj", "ff_proj", "fc1.proj"}  # GTE, Molmo, CLVP
_INKLING = {"w13_weight", "shared_w13_weight", "w13_dn"}
_INTERLEAVED = {"mlp1_weight"}  # OpenAI's own gpt-oss files

# The usual names of the norms around an FFN, those that say most first.
_PRE = (
    "pre_feedforward_layernorm", "pre_mlp_layernorm", "pre_mlp_norm", "post_sa_norm", "final_layernorm",
    "pre_ff_layernorm", "feedforward_layernorm", "feedforward_layer_norm", "ff_norm", "ffn_layer_norm",
    "ff_layer_norm", "layernorm_before_ffn", "ffn_norm", "norm_ffn", "mlp_norm", "channel_pre_norm",
    "intermediate.LayerNorm", "post_attention_layernorm",
    "post_attention_rmsnorm", "norm_attn_norm.norm_2", "ln_mlp", "ln_2", "layernorm_2", "norm_2",
    "norm2", "rms_norm2", "layer_norm2", "layernorm2", "layernorm_after", "final_layer_norm",
    "layer_norm", "LayerNorm", "layernorm", "ln", "norm",
)  # fmt: skip
_POST = (
    "post_feedforward_layernorm", "post_mlp_layernorm", "post_ffn_norm", "post_ffw_norm", "post_norm2",
    "output.LayerNorm", "output.layer_norm", "lang_output.LayerNorm", "output_layer_norm",
    "full_layer_layer_norm", "feed_forward_layer_norm", "mlp_ln",
    "final_layer_norm", "ln_2", "norm2", "layer_norm2", "layer_norm", "LayerNorm",
)  # fmt: skip
_SHARED = ("input_layernorm", "ln_1")  # a parallel block's, which the attention reads too
_SUB = ("ffn_sub_norm", "ffn_layernorm")
_ROUTER = ("gate.router_mlp.norm",)
# Norms among the experts; one by such a name is part of the block, whatever the config says.
EXPERT_NORMS: Mapping[str, Sequence[str]] = {
    "latent_norm": ("pre_expert_norm",), "expert_norm": ("post_expert_norm",), "mixed_norm": ("routed_expert_norm",),
}  # fmt: skip

_ROWS: Mapping[str, Arrangement] = {
    **{name: Arrangement(name, transposed=True) for name in
       ("gpt2", "openai-gpt", "clvp_decoder", "decision_transformer", "imagegpt")},  # Conv1D
    "axk2": Arrangement("axk2", norms={  # in files, then in memory
        "norm": ("post_attention_layernorm.norm",),
        "norm_gate.narrow": ("post_attention_layernorm.W_down", "post_attention_layernorm.mlp.fc1"),
        "norm_gate.widen": ("post_attention_layernorm.W_up", "post_attention_layernorm.mlp.fc2"),
    }),
    "gpt_oss": Arrangement("gpt_oss", interleaved=True),
    "openai_privacy_filter": Arrangement("openai_privacy_filter", transposed=True),
    **{name: Arrangement(name, norms={"norm": ("../layer_norm2.{i}",), "post_norm": ("../layer_norm2.{i}",)})
       for name in ("xlm", "flaubert")},
    "chameleon": Arrangement("chameleon", norms={"post_norm": ("post_attention_layernorm",)}),  # for its Swin variant
    "gguf": Arrangement(  # llama.cpp's names, the same for all families; gpt-oss has no ffn_norm
        "GGUF", norms={"norm": ("ffn_norm", "post_attention_norm"), "post_norm": ("post_ffw_norm",)}
    ),
    "canary_decoder": Arrangement("canary_decoder", norms={"norm": ("final_layernorm", "layer_norm_3")}),
    **{name: Arrangement(name, up_first=True) for name in ("moonshine", "moonshine_streaming")},
    "longcat_flash": Arrangement("longcat_flash", norms={"norm": ("post_attention_layernorm.{n}",)}),
}  # fmt: skip


def arrangement(model_type: str) -> Arrangement:
    """The row of a family; without a row, the usual arrangement under its name; nameless for an unknown family."""
    if row := _row(model_type):
        return row
    return Arrangement(model_type if family_of(model_type) is not None else "")


def norm_modules(step: str, spec: FFNSpec, rules: Arrangement) -> Sequence[str]:
    """The names that a norm's module may have, the likeliest first."""
    pre = _SHARED if spec.shared_norm else _PRE
    usual = {"norm": pre, "post_norm": _POST, "sub_norm": _SUB, "router_norm": _ROUTER, **EXPERT_NORMS}
    return (*rules.norms.get(step, ()), *usual.get(step, ()))


def outside(model_type: str) -> Sequence[str]:
    """The norms of a family that lie outside of its layers, `../` for the parent of the layers' prefix."""
    row = _row(model_type)
    return [name for names in (row.norms.values() if row else ()) for name in names if name.startswith("../")]


def _row(model_type: str) -> Arrangement | None:
    return _ROWS.get(model_type) or _ROWS.get(BY_TYPE.get(model_type, ""))
