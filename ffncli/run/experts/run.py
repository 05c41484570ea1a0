"""A mixture reads a corpus: the routes of every layer, and its predictions without each expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from math import log2
from typing import Any

import torch

from ffncli.errors import FFNError, option, spelled
from ffncli.models.model import Layer
from ffncli.run.corpus.batches import Tokenized, tokenized
from ffncli.run.corpus.progress import Progress
from ffncli.run.corpus.question import ReadingModel
from ffncli.run.corpus.reader import CorpusReader
from ffncli.run.corpus.texts import opened
from ffncli.run.experts.figures import Coverage, ExpertFigures, ExpertPair, ExpertsSurvey, LayerExperts
from ffncli.run.experts.question import ExpertsQuestion
from ffncli.run.experts.routes import save_routes
from ffncli.run.experts.sums import RouteSums
from ffncli.run.experts.worth import ExpertWorth, expert_worths, head_model
from ffncli.run.pretrained.capture import model_files
from ffncli.run.pretrained.loading import loading_notes, offline

_MOST_PAIRS = 10
Worths = Mapping[tuple[Layer, int], ExpertWorth]


def experts_of(
    question: ExpertsQuestion, reading: ReadingModel, note: Callable[[str], None], advance: Callable[[int], Any]
) -> ExpertsSurvey:
    """What a question about experts asks. `note` gets every remark at once, `advance` the bytes of the corpus that have
    been read since its last call.

    Raises FFNError for everything that keeps the model from running, and for a corpus without a text.
    """
    model, layers, notes = reading.model, reading.layers, list[str]()

    def remark(text: str) -> None:
        notes.append(spelled(text))
        note(text)

    path = model_files(model, layers, option("prompts"))
    for text in (*loading_notes(model, max(layer.index for layer in layers), question.dtype), *model.notes):
        remark(text)
    keep = question.routes_path is not None
    with opened(question.prompts or ()) as corpus, offline() as transformers:
        reader = CorpusReader(question, reading, corpus, transformers, path)
        sums = {layer: RouteSums(layer.spec.moe.experts, keep) for layer in layers if layer.spec.moe}
        reader.load(remark, in_order=True)
        progress = Progress()
        reader.read(sums, progress, advance)
        if progress.cut:
            remark(f"{progress.cut:,} of {progress.texts:,} texts were cut to {reader.limits.length:,} tokens")
        if question.routes_path is not None:
            (layer,) = layers
            remark(save_routes(question.routes_path, layer, torch.cat(sums[layer].routes)))
        texts, worths = _ablated(question, reader, sums, transformers, remark)
        figures = tuple(_layer(layer, one, worths) for layer, one in sums.items())
        return ExpertsSurvey(
            model, corpus.where, progress.texts, progress.tokens, progress.cut, len(texts),
            sum(len(text.ids) for text in texts), progress.seconds, figures, tuple(notes),
        )  # fmt: skip


def _ablated(
    question: ExpertsQuestion, reader: CorpusReader, sums: Mapping[Layer, RouteSums], transformers: Any,
    remark: Callable[[str], None],
) -> tuple[list[Tokenized], Worths]:  # fmt: skip
    """(the first texts, what each expert that was chosen is worth on them); nothing if none were requested, or the
    model has no head."""
    first = [*islice(reader.corpus, question.ablate_texts)]
    if not first:
        return [], {}
    texts = tokenized(first, reader.tokenizer, reader.limits.length)
    used = {layer: one.chosen.nonzero().flatten().tolist() for layer, one in sums.items()}
    del reader.loaded
    try:
        loaded = head_model(transformers, question, reader.path, reader.config)
    except FFNError as error:
        if "no language-model head" not in error.message:
            raise
        remark(f"{error.message}: what an expert is worth to its predictions is not known")
        return [], {}
    return texts, expert_worths(loaded, reader.reading.model, question.device, texts, used)


def _layer(layer: Layer, sums: RouteSums, worths: Worths) -> LayerExperts:
    load: list[int] = sums.chosen.tolist()
    choices, most = sum(load), max(load)
    shares = [tokens / choices for tokens in load if tokens]
    return LayerExperts(
        stack=layer.stack,
        layer=layer.index,
        tokens=sums.tokens,
        choices=choices,
        even_load=choices / len(load),
        idle_experts=tuple(expert for expert, tokens in enumerate(load) if not tokens),
        busiest_expert=load.index(most) if choices else None,
        busiest_share=most / choices if choices else None,
        entropy_bits=sum(-share * log2(share) for share in shares) if choices else None,
        max_entropy_bits=log2(len(load)),
        identity_choices=sums.identity,
        experts=tuple(_expert(layer, sums, expert, choices, worths) for expert in range(len(load))),
        pairs=_pairs(sums),
        coverage=tuple(Coverage(*one) for one in dict([*sums.coverage, (sums.tokens, sums.covered)]).items()),
        hit_rates=tuple(sums.hit_rates()),
    )


def _expert(layer: Layer, sums: RouteSums, expert: int, choices: int, worths: Worths) -> ExpertFigures:
    tokens, worth = int(sums.chosen[expert]), worths.get((layer, expert))
    return ExpertFigures(
        layer.stack, layer.index, expert, tokens, tokens / choices if choices else 0.0,
        tokens * sums.experts / choices if choices else 0.0,
        float(sums.weight[expert]) / tokens if tokens else None,
        float(sums.change[expert]) / tokens if tokens else None,
        worth.divergence if worth else None, worth.argmax_changed if worth else None,
    )  # fmt: skip


def _pairs(sums: RouteSums) -> tuple[ExpertPair, ...]:
    """The pairs that are chosen together most often."""
    upper = torch.triu(sums.pairs, 1).flatten()
    counts, order = upper.topk(min(_MOST_PAIRS, upper.numel()))
    out = []
    for count, at in zip(counts.tolist(), order.tolist(), strict=True):
        first, second = divmod(at, sums.experts)
        if count:
            expected = float(sums.chosen[first]) * float(sums.chosen[second]) / sums.tokens
            out.append(ExpertPair(first, second, int(count), count / expected))
    return tuple(out)
