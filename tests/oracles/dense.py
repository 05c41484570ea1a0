"""Tiny models of dense families in float64, with the modules of their FFNs by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.oracles.prompted import built, made

Function = Callable[[Tensor], Tensor]
_GELU_TANH: Function = lambda x: functional.gelu(x, approximate="tanh")  # noqa: E731
_LLAMA = ("model.layers.{i}.mlp.down_proj", "model.layers.{i}.mlp.gate_proj", functional.silu)
_GEMMA = (*_LLAMA[:2], _GELU_TANH)
_FUSED = ("model.layers.{i}.mlp.down_proj", "model.layers.{i}.mlp.gate_up_proj/0", functional.silu)
# The module that the units enter, and for gated blocks what the activation reads: `/0`, the first half of an output.
DENSE: Mapping[str, tuple[str, str | None, Function | None]] = {
    **dict.fromkeys(("llama", "mistral", "smollm3", "qwen3", "olmo2", "granite", "cohere", "stablelm"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("phi3", "glm", "glm4"), _FUSED),
    "gpt2": ("transformer.h.{i}.mlp.c_proj", None, None),
    "gpt_neo": ("transformer.h.{i}.mlp.c_proj", None, None),
    **dict.fromkeys(("gptj", "codegen"), ("transformer.h.{i}.mlp.fc_out", None, None)),
    **dict.fromkeys(("bloom", "falcon"), ("transformer.h.{i}.mlp.dense_4h_to_h", None, None)),
    "gpt_neox": ("gpt_neox.layers.{i}.mlp.dense_4h_to_h", None, None),
    "phi": ("model.layers.{i}.mlp.fc2", None, None),
    "opt": ("model.decoder.layers.{i}.fc2", None, None),
    "xglm": ("model.layers.{i}.fc2", None, None),
    "biogpt": ("biogpt.layers.{i}.fc2", None, None),
    "starcoder2": ("model.layers.{i}.mlp.c_proj", None, None),
    "nemotron": ("model.layers.{i}.mlp.down_proj", None, None),
    "mpt": ("transformer.blocks.{i}.ffn.down_proj", None, None),
    "bert": ("bert.encoder.layer.{i}.output.dense", None, None),
    "roberta": ("roberta.encoder.layer.{i}.output.dense", None, None),
    "electra": ("electra.encoder.layer.{i}.output.dense", None, None),
    "distilbert": ("distilbert.transformer.layer.{i}.ffn.lin2", None, None),
    "xlnet": ("transformer.layer.{i}.ff.layer_2", None, None),
    "t5-gated-gelu": ("encoder.block.{i}.layer.1.DenseReluDense.wo", "encoder.block.{i}.layer.1.DenseReluDense.wi_0",
                      _GELU_TANH),
    "t5-relu": ("encoder.block.{i}.layer.1.DenseReluDense.wo", None, None),
}  # fmt: skip
SINGLE = {"xglm", "xlnet"}  # whose code refuses float64
_MADE = {"llama", "gemma2", "olmo2", "gpt2", "opt", "gpt_neox", "bert", "t5-gated-gelu", "t5-relu"}


@cache
def in_double(name: str) -> tuple[Path, Any]:
    """(a model's directory, the model in float64, where its code allows that)."""
    if name in _MADE:
        path, model = made(name).path, made(name).model
    else:
        path = Path(mkdtemp(prefix=f"ffn-{name}-"))
        model = built(name, path)
    dtype = torch.float32 if name in SINGLE else torch.float64
    return path, type(model).from_pretrained(path, dtype=dtype).eval()
