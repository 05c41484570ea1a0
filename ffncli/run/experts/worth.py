"""What each expert is worth to the whole model: its predictions on a few texts with the expert silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps
from ffncli.errors import FFNError
from ffncli.models.model import Layer, Resolved
from ffncli.run.corpus.batches import Tokenized, batch_of
from ffncli.run.corpus.question import ReadingQuestion
from ffncli.run.engine.locate import live_ffn
from ffncli.run.engine.prepare import device_of, dtype_of
from ffncli.run.pretrained.capture import batch_arguments
from ffncli.run.pretrained.loading import Pretrained, demanding, load
from ffncli.run.what_if.changes import changes_of
from ffncli.run.what_if.prediction import changed_model


@dataclass(frozen=True)
class ExpertWorth:
    """Over the tokens of the texts: the mean divergence of the prediction without the expert, in nats, and the share of
    tokens for which another token becomes the likeliest."""

    divergence: float
    argmax_changed: float


def head_model(transformers: Any, question: ReadingQuestion, path: Any, config: Any) -> Pretrained:
    """The whole model with its language-model head, its experts computed one by one. Raises FFNError without a head."""
    dtype, device = dtype_of(question.dtype), device_of(question.device)
    return load(transformers, path, config, dtype, device, lambda module, lean: None, with_head=True)


def expert_worths(
    loaded: Pretrained, model: Resolved, device: str, texts: Sequence[Tokenized],
    used: Mapping[Layer, Sequence[int]],
) -> dict[tuple[Layer, int], ExpertWorth]:  # fmt: skip
    """The worth of each used expert, on texts that run alone."""
    out: dict[tuple[Layer, int], ExpertWorth] = {}
    before = [*_predictions(loaded, texts, device)]
    for layer, experts in used.items():
        live, block = live_ffn(loaded.module, model, layer), ffn_steps(steps(layer.spec))
        for expert in experts:
            changes = changes_of(block, (), (f"expert:{expert}",))
            with changed_model(loaded.module, layer, live, None, changes):
                after = _predictions(loaded, texts, device)
                out[layer, expert] = _worth(before, after)
    return out


def _predictions(loaded: Pretrained, texts: Sequence[Tokenized], device: str) -> Iterator[Tensor]:
    """Log probabilities [tokens, vocabulary] of each text, in float64."""
    for text in texts:
        batch = batch_of([text], 0, device)
        with torch.no_grad(), demanding(loaded):
            logits: Tensor = loaded.module(**batch_arguments(loaded, batch.ids, batch.mask)).logits
        if logits.dim() != 3:
            raise FFNError(f"the logits of {loaded.config.model_type} are {list(logits.shape)}")
        yield logits[0].double().log_softmax(-1)


def _worth(before: Sequence[Tensor], after: Iterator[Tensor]) -> ExpertWorth:
    total, changed, tokens = 0.0, 0, 0
    for old, new in zip(before, after, strict=True):
        total += float((old.exp() * (old - new)).nan_to_num(0.0).sum())
        changed += int((old.argmax(-1) != new.argmax(-1)).sum())
        tokens += len(old)
    return ExpertWorth(max(0.0, total / tokens), changed / tokens)
