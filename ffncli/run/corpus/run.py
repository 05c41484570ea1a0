"""A corpus through a model: one load, and figures of every layer and unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ffncli.run.corpus.figures import CorpusSurvey
from ffncli.run.corpus.layer import LayerSums
from ffncli.run.corpus.progress import Progress, identity, read_progress, save_progress
from ffncli.run.corpus.question import CheckedCorpusQuestion
from ffncli.run.corpus.reader import CorpusReader
from ffncli.run.corpus.results import CorpusResults, survey_of
from ffncli.run.corpus.sums import BYTES_OF_UNIT, BYTES_OF_VALUE
from ffncli.run.corpus.texts import OPTION, opened
from ffncli.run.engine.weights import require_memory
from ffncli.run.pretrained.capture import model_files
from ffncli.run.pretrained.loading import loading_notes, offline


def corpus_of(
    checked: CheckedCorpusQuestion, note: Callable[[str], None], advance: Callable[[int], Any]
) -> CorpusSurvey:
    """What a question about a corpus asks. `note` gets every remark at once, `advance` the bytes of the corpus that
    have been read since its last call.

    Raises FFNError for everything that keeps the model from running, and for a corpus without a text.
    """
    question, model, notes = checked.question, checked.model, list[str]()

    def remark(text: str) -> None:
        notes.append(text)
        note(text)

    path = model_files(model, checked.layers, OPTION)
    last = max(layer.index for layer in checked.layers)
    for text in (*loading_notes(model, last, question.dtype), *model.notes):
        remark(text)
    with opened(question.prompts) as corpus, offline() as transformers:
        reader = CorpusReader(checked, corpus, transformers, path)
        sums = {layer: LayerSums(layer, question.top_contexts or 0, question.limit) for layer in checked.layers}
        about, progress, resume = identity(checked, corpus), Progress(), question.resume_path
        if resume is not None:
            progress = read_progress(resume, about, sums, reader.device)
        if progress.done:
            remark(f"going on after {progress.done:,} texts")
        advance(progress.end)
        _require_room(checked)
        reader.load(remark)

        def save() -> None:
            if resume is not None:
                save_progress(resume, about, progress, sums)

        reader.read(sums, progress, advance, save)
        if progress.cut:
            remark(f"{progress.cut:,} of {progress.texts:,} texts were cut to {reader.limits.length:,} tokens")
        results = CorpusResults(checked, corpus, progress, sums, reader.tokenizer, reader.limits.length)
        return survey_of(results, tuple(notes))


def _require_room(checked: CheckedCorpusQuestion) -> None:
    """Raises FFNError (exit 3) if memory is too small for the figures of all units."""
    top = checked.question.top_contexts or 0
    units = sum(layer.spec.d_ff * (layer.spec.moe.experts if layer.spec.moe else 1) for layer in checked.layers)
    require_memory(units * (BYTES_OF_UNIT + top * BYTES_OF_VALUE), "the figures of all units", "keep fewer contexts")
