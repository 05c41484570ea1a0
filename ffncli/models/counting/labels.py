"""The labels of a row's keys on the pages of `ffn params`, which `--assert` accepts too."""

from __future__ import annotations

import re
from collections.abc import Mapping

# key → (on the page of one source, side by side)
LABELS: Mapping[str, tuple[str, str]] = {
    name: (label, short or label)
    for name, label, short in (
        ("d_model", "d_model", ""),
        ("d_ff", "d_ff", ""),
        ("activation", "activation", ""),
        ("gated", "gated", ""),
        ("bias", "bias", ""),
        ("layers", "layers", ""),
        ("experts", "experts", ""),
        ("top_k", "top_k", ""),
        ("shared_experts", "shared experts", ""),
        ("latent", "latent width of the experts", "latent width"),
        ("ffn_params_per_layer", "parameters per layer", "parameters/layer"),
        ("ffn_params_active_per_layer", "active per layer", "active/layer"),
        ("norm_params_per_layer", "norm parameters per layer", "norm/layer"),
        ("attention_params_per_layer", "attention parameters per layer", "attention/layer"),
        ("ffn_share_of_layer", "FFN share of layer", ""),
        ("matmul_flops_per_token", "matmul FLOPs per token and layer", "matmul FLOPs/token"),
        ("elementwise_flops_per_token", "elementwise FLOPs per token and layer", "elementwise FLOPs/token"),
        ("ffn_params_total", "parameters, all layers", "parameters"),
        ("ffn_params_active", "active, all layers", "active"),
        ("tokens", "tokens", ""),
        ("matmul_flops_total", "matmul FLOPs", ""),
        ("elementwise_flops_total", "elementwise FLOPs", ""),
        ("dtype", "dtype", ""),
        ("weight_bytes", "weight bytes", ""),
        ("model_params_total", "whole model, parameters", "whole model"),
        ("model_params_active", "whole model, active", "whole model active"),
        ("model_params_active_no_embedding", "whole model, active without the input embedding", "... no embedding"),
        ("model_weight_bytes", "whole model, weight bytes", "whole model bytes"),
        ("ffn_share_of_model", "FFN's share of the model", "FFN share of model"),
        ("ffn_params_stored", "FFN parameters by the tensors", ""),
        ("ffn_stored_bytes", "FFN bytes as stored", ""),
        ("ffn_bits_per_weight", "FFN bits per weight as stored", ""),
        ("stored_params", "parameters in the files", ""),
        ("stored_bytes", "bytes of all tensors", ""),
        ("bits_per_weight", "bits per weight as stored, all tensors", "bits per weight as stored"),
    )
}


def label(key: str) -> str:
    """The label of a key on the page of one source."""
    return LABELS[key][0]


def key_of(name: str) -> str | None:
    """The key of that name: the key itself, or its label on a page, with or without the addition there.

    `weight bytes (bf16)`, `parameters per MoE layer` and `matmul FLOPs, all layers, 1 token` mean
    `weight bytes`, `parameters per layer` and `matmul FLOPs`.
    """
    text = re.sub(r"\s*\(.*\)$", "", " ".join(name.split()).lower())
    text = re.sub(r"\b(moe|dense|commonest) layer", "layer", text)
    return _KEYS.get(text) or _KEYS.get(text.partition(",")[0])


_KEYS = {text.lower(): key for key, labels in LABELS.items() for text in (key, *labels)}
_KEYS |= {
    "ffn bits per weight": "ffn_bits_per_weight",
    "bits per weight": "bits_per_weight",
}  # shorter, as one may type them
