"""Whole models that transformers builds on the meta device: the part of the model to which each parameter belongs.

Nothing is allocated, so real sizes take no more memory than tiny ones. Tied weights are counted once.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

# The prefix of a layer: `encoder.layer.3.`, `h.3.`, `decoder.block.3.` ...; the stack is the decoder by default.
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_ATTENTION = re.compile(
    r"(?:^|\.)(?:self_attn|self_attention|attention|attn|SelfAttention|EncDecAttention|encoder_attn)\."
)
_IN_ATTENTION = re.compile(r"attention\.output\.LayerNorm\.")  # BERT's layer norm lies inside its attention module
_NORM = re.compile(r"(?i)norm|(?:^|\.)ln_")


@dataclass(frozen=True)
class Built:
    """A model's parameters by name, each once, and its choice corrections, which are buffers."""

    model: nn.Module
    encoder: bool  # whether the only stack is an encoder

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        buffers = (item for item in self.model.named_buffers() if item[0].endswith("e_score_correction_bias"))
        return {name: tensor.numel() for name, tensor in (*self.model.named_parameters(), *buffers)}

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def stack_of(self, name: str) -> str:
        return "encoder" if self.encoder or re.search(r"(^|\.)encoder\.", name) else "decoder"

    def layer(self, stack: str, index: int) -> dict[str, int]:
        """Return the parameters of one layer by name."""
        return {name: size for name, size, i in self._layered() if i == index and self.stack_of(name) == stack}

    def attention(self, stack: str, index: int) -> int:
        return sum(size for name, size in self.layer(stack, index).items() if _belongs(name) == "attention")

    def norms(self, stack: str, index: int) -> int:
        return sum(size for name, size in self.layer(stack, index).items() if _belongs(name) == "norm")

    def layers(self, stack: str) -> int:
        return len({i for name, _, i in self._layered() if self.stack_of(name) == stack})

    @property
    def outside(self) -> int:
        """The parameters outside the layers, including differences of layer 0 (T5's positions, ModernBERT's norm)."""
        parts = [part(stack, i) for part in (self.attention, self.norms) for stack in STACKS for i in (0, 1)]
        extra = sum(parts[0::2]) - sum(parts[1::2])
        return self.total - sum(size for _, size, _ in self._layered()) + extra

    def _layered(self) -> Iterator[tuple[str, int, int]]:
        for name, size in self.sizes.items():
            if found := _LAYER.search(name):
                yield name, size, int(found[1])


def _belongs(name: str) -> str:
    inside = name[_LAYER.search(name).end() :]  # type: ignore[union-attr]
    if _ATTENTION.search(inside) and not _IN_ATTENTION.search(inside):
        return "attention"
    return "norm" if _NORM.search(inside) else "ffn"


STACKS = ("encoder", "decoder")
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "vit", "distilbert", "modernbert")


def build(values: Mapping[str, Any]) -> Built:
    """Build the model of a config: with its language-model head, or the bare encoder if it has none."""
    import transformers
    from transformers.models.auto import configuration_auto

    transformers.logging.set_verbosity_error()
    model_type = values["model_type"]
    given = {name: value for name, value in values.items() if name != "model_type"}
    config = configuration_auto.CONFIG_MAPPING[model_type](**given)
    more = {"add_pooling_layer": False} if model_type == "vit" else {}
    with torch.device("meta"):
        model = getattr(transformers, _class_name(model_type))(config, **more)
        if values.get("tie_word_embeddings") is False and model.lm_head.weight is model.get_input_embeddings().weight:
            # T5 v1.1's checkpoints have an untied head, as their configs say, but transformers 5 ties it.
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return Built(model, model_type in ENCODERS)


def _class_name(model_type: str) -> str:
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    pair = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if model_type in ("whisper", "bart", "mbart"):  # their causal class is the decoder alone
        return f"{model_type.capitalize() if model_type != 'mbart' else 'MBart'}ForConditionalGeneration"
    if model_type in ENCODERS:
        return str(modeling_auto.MODEL_MAPPING_NAMES[model_type])
    return str(causal.get(model_type) or pair[model_type])
