"""Encoders: BERT and its kin, vision transformers."""

from __future__ import annotations

from collections.abc import Mapping

from ffncli.models.family import Family, Stack

_ENCODER = (Stack("encoder"),)

ROWS: Mapping[str, Family] = {
    "bert": Family(
        gated=False, default_activation="gelu", bias=True, norm="layernorm", position="post", stacks=_ENCODER,
        eps=("layer_norm_eps", 1e-12), aliases=("roberta", "xlm-roberta", "electra", "camembert"),
    ),
    "vit": Family(
        gated=False, default_activation="gelu", bias=True, norm="layernorm", eps=("layer_norm_eps", 1e-12),
        stacks=_ENCODER,
    ),
}  # fmt: skip
