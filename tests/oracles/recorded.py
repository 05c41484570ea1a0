"""transformers' own activations, listened to and replaced: what enters each of them, and what another one does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracles.huggingface import Made
from tests.oracles.prompted import ids, through

Function = Callable[[Tensor], Tensor]

# Where a family's FFN has its activation: modules of a layer and the attribute that holds it, "" as the layer itself.
ACTS = {
    "llama": ("mlp.act_fn",), "gemma2": ("mlp.act_fn",), "gpt2": ("mlp.act",), "opt": ("activation_fn",),
    "bert": ("intermediate.intermediate_act_fn",), "t5-gated-gelu": ("DenseReluDense.act",),
    "mixtral": ("mlp.experts.act_fn",), "deepseek_v3": ("mlp.experts.act_fn", "mlp.shared_experts.act_fn"),
    "qwen2_moe": ("mlp.experts.act_fn", "mlp.shared_expert.act_fn"), "gpt_oss": ("mlp.experts",),
}  # fmt: skip


class Recorder(nn.Module):
    """An activation that remembers what entered it and what it gave, call by call (an expert each)."""

    def __init__(self, f: Function) -> None:
        super().__init__()
        self.f, self.entered, self.left = f, list[Tensor](), list[Tensor]()

    def forward(self, z: Tensor) -> Tensor:
        """f(z), noted."""
        out = self.f(z)
        self.entered.append(z.detach().clone().flatten(0, -2))
        self.left.append(out.detach().clone().flatten(0, -2))
        return out


def ffn_input(made: Made, stack: str, index: int) -> Tensor:
    """What enters the FFN of a layer when the model reads the tokens of the tests' prompt, [tokens, d_model]."""
    name = f"{made.case.at[stack].format(i=index)}.{made.case.ffn[0]}"
    given: dict[str, Any] = {"input_ids": ids()}
    if made.model.config.is_encoder_decoder:  # type: ignore[union-attr]
        given["decoder_input_ids"] = torch.tensor([[0]])
    return through(made.model, {"input": name}, **given)["input"]


def run(made: Made, acts: tuple[str, ...], stack: str, index: int, other: Function | None = None) -> tuple[Any, Tensor]:
    """([a Recorder per activation], the FFN's output) of one layer, with `other` in the place of its own activation."""
    model = copy.deepcopy(made.model)
    layer = model.get_submodule(made.case.at[stack].format(i=index))
    found = []
    for path in acts:
        owner, _, name = path.rpartition(".")
        module = layer.get_submodule(path)
        if hasattr(module, "_apply_gate"):  # gpt-oss has no module for it
            found.append(_listen(module, other))
            continue
        found.append(Recorder(other or module))
        setattr(layer.get_submodule(owner) if owner else layer, name, found[-1])
    x = ffn_input(made, stack, index)
    with torch.no_grad():
        return found, replace(made, model=model).ffn(stack, index, x)


def _listen(experts: Any, other: Function | None) -> Recorder:
    recorder = Recorder(other or (lambda z: z * torch.sigmoid(experts.alpha * z)))

    def gate(self: Any, both: Tensor) -> Tensor:
        z, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        out: Tensor = (up + 1) * recorder(z)
        return out

    experts._apply_gate = MethodType(gate, experts)
    return recorder
