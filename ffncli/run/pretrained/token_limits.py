"""How many different tokens a transformers model knows, and how many of them a text may have."""

from __future__ import annotations

from typing import Any

from torch import nn


def known_tokens(module: Any) -> int:
    """The rows of the table of tokens: token ids are below."""
    try:
        return int(module.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return 2**31


def context_length(module: Any, config: Any) -> int | None:
    """How many tokens of a text the config has positions for, or the table of learned positions rows; None: any."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # it has several
        text = config
    limits = [limit for limit in (getattr(text, "max_position_embeddings", None),) if type(limit) is int and limit > 0]
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding) and name.endswith("embeddings.position_embeddings") and part.padding_idx:
            limits.append(part.num_embeddings - part.padding_idx - 1)  # RoBERTa counts from after the padding
    return min(limits, default=None)
