"""Encoder-decoders: two stacks, each with its own depth and often its own d_ff."""

from __future__ import annotations

from collections.abc import Mapping

from ffncli.models.family import Extra, Family, Stack
from ffncli.models.fields import Fields


def _t5(config: Fields) -> Extra:
    newer = config.values.get("model_type") in ("mt5", "umt5")
    form = config.text("feed_forward_proj", "gated-gelu" if newer else "relu")
    gated, name = form.startswith("gated-"), form.removeprefix("gated-")
    # T5 v1.1 means the tanh approximation when it says gated-gelu (transformers' T5Config turns it into gelu_new).
    return {"gated": gated, "activation": "gelu_tanh" if form == "gated-gelu" else name, "bias": False}


_PAIR = (Stack("encoder", "num_layers"), Stack("decoder", "num_decoder_layers|num_layers"))
_TWO_WIDTHS = (
    Stack("encoder", "encoder_layers", "encoder_ffn_dim"),
    Stack("decoder", "decoder_layers", "decoder_ffn_dim"),
)

ROWS: Mapping[str, Family] = {
    "t5": Family(
        gated=None, d_model="d_model", d_ff="d_ff", activation="feed_forward_proj", default_activation="relu",
        eps=("layer_norm_epsilon", 1e-6), stacks=_PAIR, adjust=_t5, aliases=("mt5", "umt5"),
    ),
    "whisper": Family(
        gated=False, d_model="d_model", d_ff=None, activation="activation_function", default_activation="gelu",
        bias=True, norm="layernorm", eps=(None, 1e-5), stacks=_TWO_WIDTHS,
    ),
}  # fmt: skip
