"""A corpus through a model: one load, and figures of every layer and unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ffncli.errors import option, spelled
from ffncli.run.corpus.figures import CorpusSurvey
from ffncli.run.corpus.layer import LayerSums
from ffncli.run.corpus.progress import Progress, identity, read_progress, save_progress
from ffncli.run.corpus.question import CorpusQuestion, ReadingModel
from ffncli.run.corpus.reader import CorpusReader
from ffncli.run.corpus.results import CorpusResults, survey_of
from ffncli.run.corpus.sums import BYTES_OF_UNIT, BYTES_OF_VALUE
from ffncli.run.corpus.texts import opened
from ffncli.run.engine.weights import require_memory
from ffncli.run.pretrained.capture import model_files
from ffncli.run.pretrained.loading import loading_notes, offline


def corpus_of(
    question: CorpusQuestion, reading: ReadingModel, note: Callable[[str], None], advance: Callable[[int], Any]
) -> CorpusSurvey:
    """What a question about a corpus asks. `note` gets every remark at once, `advance` the bytes of the corpus that
    have been read since its last call.

    Raises FFNError for everything that keeps the model from running, and for a corpus without a text.
    """
    model, notes = reading.model, list[str]()

    def remark(text: str) -> None:
        notes.append(spelled(text))
        note(text)

    path = model_files(model, reading.layers, option("prompts"))
    last = max(layer.index for layer in reading.layers)
    for text in (*loading_notes(model, last, question.dtype), *model.notes):
        remark(text)
    with opened(question.prompts or ()) as corpus, offline() as transformers:
        reader = CorpusReader(question, reading, corpus, transformers, path)
        sums = {layer: LayerSums(layer, question.top_contexts or 0, question.limit) for layer in reading.layers}
        about, progress, resume = identity(question, reading, corpus), Progress(), question.resume_path
        if resume is not None:
            progress = read_progress(resume, about, sums, reader.device)
        if progress.done:
            remark(f"going on after {progress.done:,} texts")
        advance(progress.end)
        _require_room(question, reading)
        reader.load(remark)

        def save() -> None:
            if resume is not None:
                save_progress(resume, about, progress, sums)

        reader.read(sums, progress, advance, save)
        if progress.cut:
            remark(f"{progress.cut:,} of {progress.texts:,} texts were cut to {reader.limits.length:,} tokens")
        results = CorpusResults(question, model, corpus, progress, sums, reader.tokenizer, reader.limits.length)
        return survey_of(results, tuple(notes))


def _require_room(question: CorpusQuestion, reading: ReadingModel) -> None:
    """Raises FFNError (exit 3) if memory is too small for the figures of all units."""
    top = question.top_contexts or 0
    units = sum(layer.spec.d_ff * (layer.spec.moe.experts if layer.spec.moe else 1) for layer in reading.layers)
    require_memory(units * (BYTES_OF_UNIT + top * BYTES_OF_VALUE), "the figures of all units", "keep fewer contexts")
