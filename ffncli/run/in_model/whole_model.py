"""A whole model from a directory, as transformers runs it, and inputs of any length for its forward."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.models.model import Resolved
from ffncli.models.runnable import folder_of
from ffncli.run.pretrained.capture import ForwardInput, forward_arguments
from ffncli.run.pretrained.layers import layers_of
from ffncli.run.pretrained.loading import Pretrained, load, offline, read_config
from ffncli.run.pretrained.tokens import with_texts


def load_whole(resolved: Resolved, dtype: torch.dtype, device: str) -> Pretrained:
    """The model with all layers and its language-model head, if transformers has one for it.

    Its experts are computed as transformers does by default. Raises FFNError for a source that transformers cannot
    load, and for parameters that its files do not have.
    """
    path = folder_of(resolved, "--in-model")
    with offline() as transformers:
        config = read_config(transformers, path)
        try:
            loaded = load(transformers, path, config, dtype, device, _keep, with_head=True)
        except FFNError as error:
            if "no language-model head" not in error.message:
                raise
            loaded = load(transformers, path, config, dtype, device, _keep)
    module: Any = loaded.module
    if dtype != torch.float64:  # which the default for experts refuses
        with suppress(Exception):  # where this model has no choice
            module.set_experts_implementation(module.get_correct_experts_implementation(None))
    return loaded


def _keep(module: Any, lean: bool) -> None:
    """Removes nothing from the model."""


def random_tokens(loaded: Pretrained, resolved: Resolved, count: int, seed: int) -> ForwardInput:
    """The arguments of a forward pass on one sequence of random tokens. Raises FFNError if it is too long, or the model
    takes no tokens."""
    try:
        vocab = int(loaded.module.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        raise FFNError(f"{loaded.config.model_type}: its table of tokens is not known") from None
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (count,), generator=generator).tolist()
    return forward_arguments(loaded, with_texts(ids, None), None, layers_of(resolved))


def answer_of(output: Any) -> Tensor:
    """What a forward's output is compared by: the logits, or the last hidden state of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    first = output[0] if isinstance(output, (tuple, list)) else output
    if isinstance(first, Tensor):
        return first
    raise FFNError(f"a {type(output).__name__} has no logits")
