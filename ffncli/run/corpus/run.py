"""Run a corpus through a model that is loaded once, in batches within a memory limit; add up figures of every unit."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffncli.errors import FFNError, option, shown_path, spelled
from ffncli.models.model import Layer
from ffncli.run.corpus.likeness import similar_units
from ffncli.run.corpus.listen import (
    Batch,
    BatchLimits,
    Listener,
    Receiver,
    Tokenized,
    batch_of,
    batches,
    inputs_of,
    windows,
)
from ffncli.run.corpus.question import BATCH_SIZE, CorpusQuestion, ReadingModel, ReadingQuestion
from ffncli.run.corpus.results import CorpusResults, CorpusSurvey, survey_of
from ffncli.run.corpus.sums import (
    BYTES_OF_UNIT,
    BYTES_OF_VALUE,
    LayerSums,
    Progress,
    identity,
    read_progress,
    save_progress,
)
from ffncli.run.corpus.texts import Corpus, opened
from ffncli.run.engine.locate import live_weights
from ffncli.run.engine.prepare import device_of, dtype_of
from ffncli.run.engine.weights import require_memory
from ffncli.run.pretrained.capture import load_up_to, model_files
from ffncli.run.pretrained.loading import Pretrained, context_length, known_tokens, loading_notes, offline, read_config
from ffncli.run.pretrained.tokens import tokenizer_of
from ffncli.system.host import available_memory


def corpus_of(
    question: CorpusQuestion, reading: ReadingModel, note: Callable[[str], None], advance: Callable[[int], Any]
) -> CorpusSurvey:
    """Answer a question about a corpus. `note` receives every note immediately; `advance` receives the number of bytes
    read since its last call."""
    top = question.top_contexts or 0
    with reader_of(question, reading, note) as reader:
        sums = {layer: LayerSums(layer, top, question.outlier_limit) for layer in reading.layers}
        about, progress, resume = identity(question, reading, reader.corpus), Progress(), question.resume_path
        if resume is not None:
            progress = read_progress(resume, about, sums)
        if progress.done:
            reader.remark(f"resuming after {progress.done:,} texts")
        advance(progress.end)
        units = sum(layer.spec.d_ff * (layer.spec.moe.experts if layer.spec.moe else 1) for layer in reading.layers)
        needed = units * (BYTES_OF_UNIT + top * BYTES_OF_VALUE)
        require_memory(needed, "the figures of all units", "keep fewer contexts")
        reader.load()

        def save() -> None:
            if resume is not None:
                save_progress(resume, about, progress, sums)

        reader.read(sums, progress, advance, save)
        results = CorpusResults(
            question, reading.model, reader.corpus, progress, sums, reader.tokenizer, reader.limits.length
        )
        survey = survey_of(results, tuple(reader.notes))
        if question.similar is None:
            return survey
        pairs = {
            (layer.stack, layer.index): similar_units(layer, reader.weights_of(layer), question.similar)
            for layer in reading.layers
        }
        rows = (replace(row, similar_pairs=pairs[row.stack, row.layer]) for row in survey.rows)
        return replace(survey, rows=tuple(rows))


@contextmanager
def reader_of(
    question: ReadingQuestion, reading: ReadingModel, note: Callable[[str], None]
) -> "Iterator[CorpusReader]":
    """Open the corpus for the model, and immediately send the notes that precede loading to `note`."""
    path = model_files(reading.model, reading.layers, option("prompts"), states=True)
    before = loading_notes(reading.model, max(layer.index for layer in reading.layers), question.dtype)
    notes: list[str] = []

    def remark(text: str) -> None:
        notes.append(spelled(text))
        note(text)

    for text in (*before, *reading.model.notes):
        remark(text)
    with opened(question.prompts or ()) as corpus, offline() as transformers:
        corpus = replace(corpus, most=question.limit)
        yield CorpusReader(question, reading, corpus, transformers, path, remark, notes)


_SAVE_EVERY = 5.0  # seconds: an interruption loses at most this much work plus one window of texts
_MOST_MEMORY = 512 << 20  # limit in bytes for a batch's intermediates; never more than a quarter of free memory
# Maps bytes per value to the maximum relative distance between a text's results alone and in a batch.
_ALIKE = {8: 1e-6, 4: 1e-3, 2: 0.05}


class CorpusReader:
    """A model's tokenizer and, after `load`, the model with its FFNs. `remark` adds to the run's `notes`."""

    def __init__(
        self, question: ReadingQuestion, reading: ReadingModel, corpus: Corpus, transformers: Any, path: Path,
        remark: Callable[[str], None], notes: list[str],
    ) -> None:  # fmt: skip
        self._question, self.reading, self.corpus = question, reading, corpus
        self.transformers, self.path, self.remark, self.notes = transformers, path, remark, notes
        self.device, self._dtype = device_of(question.device), dtype_of(question.dtype)
        self.config, self.tokenizer = read_config(transformers, path), tokenizer_of(transformers, path)
        if self.tokenizer is None:
            raise FFNError(
                f"{option('prompts')}: {shown_path(path)} has no tokenizer", "give a directory with tokenizer.json"
            )
        self._special: tuple[int, ...] = ()
        if question.skip_special:
            unknown = getattr(self.tokenizer, "unk_token_id", None)  # stands for a word of the text
            self._special = tuple(one for one in getattr(self.tokenizer, "all_special_ids", ()) if one != unknown)
            remark("special tokens are read but left out of all figures")
        if next(iter(corpus), None) is None:
            raise FFNError(f"{option('prompts')}: {corpus.where} has no text")

    def load(self, in_order: bool = False) -> None:
        """Load the model up to the last layer to examine. If a text's results depend on its batch, add a note and run
        texts one by one. Texts run sorted by length unless `in_order`."""
        self.loaded, self.live = load_up_to(
            self.transformers, self.reading.model, self.reading.layers, self.path, self.config, self._dtype,
            self.device,
        )  # fmt: skip
        self._padding, self._known = _padding(self.loaded, self.tokenizer), known_tokens(self.loaded.module)
        self.limits = replace(_limits(self._question, self.reading, self.loaded, self._dtype), in_order=in_order)
        if self.limits.texts > 1 and not self._batches_alike():
            self.remark("this model's result for a text depends on other texts in the batch, so texts run one by one")
            self.limits = replace(self.limits, texts=1)

    def weights_of(self, layer: Layer) -> dict[str, Tensor]:
        """Return the canonical weights of a layer's FFN, as views of the loaded model's tensors if possible."""
        return live_weights(self.loaded.module, self.live[layer].located)

    def read(
        self, receivers: Mapping[Layer, Receiver], progress: Progress, advance: Callable[[int], Any],
        save: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Run all remaining texts. `save` is called from time to time and at the end, `advance` with the number of
        bytes read since its last call."""
        listener, saved = Listener(self.loaded, self.live, receivers), time.monotonic()
        left = dropwhile(lambda text: text.number < progress.done, self.corpus)
        with listener.listening():
            for window, last in windows(left, self.tokenizer, self.limits):
                self._read(window, last.end, listener, progress, advance)
                progress.done = last.number + 1
                if time.monotonic() - saved > _SAVE_EVERY:
                    save()
                    saved = time.monotonic()
        save()
        if not progress.texts:
            raise FFNError(
                f"{option('prompts')}: no text of {self.corpus.where} has a token", "is it this model's tokenizer?"
            )
        if progress.cut:
            self.remark(f"{progress.cut:,} of {progress.texts:,} texts were cut to {self.limits.length:,} tokens")

    def _read(
        self, window: Sequence[Tokenized], end: int, listener: Listener, progress: Progress,
        advance: Callable[[int], Any],
    ) -> None:  # fmt: skip
        """Run the texts of a window whose last text ends at byte `end` of the corpus."""
        started, begin, read = time.monotonic(), progress.end, 0
        tokens = sum(len(text.ids) for text in window)
        for batch in batches(window, self.limits):
            listener.run(self._batch(batch))
            read += sum(len(text.ids) for text in batch)
            now = begin + (end - begin) * read // tokens
            advance(now - progress.end)
            progress.end = now
        progress.seconds += time.monotonic() - started
        progress.end = end
        progress.texts += len(window)
        progress.tokens += tokens
        progress.cut += sum(text.cut for text in window)

    def _batch(self, texts: Sequence[Tokenized]) -> Batch:
        """Put these texts on the model's device; refuse tokens outside the model's vocabulary."""
        for text in texts:
            if max(text.ids) >= self._known:
                what = f"text {text.number}: token {max(text.ids)} is out of range"
                raise FFNError(what, f"the model has {self._known:,} tokens")
        return batch_of(texts, self._padding, self.device, self._special)

    def _batches_alike(self) -> bool:
        """Return whether a text's results are the same alone and in a batch with a longer text, which adds padding."""
        window = next((some for some, _ in windows(self.corpus, self.tokenizer, self.limits) if some), [])
        short, long = (pick(window, key=lambda text: len(text.ids), default=None) for pick in (min, max))
        if short is None or long is None or short is long:
            return True
        alone = [inputs_of(self.loaded, self.live, self._batch([text])) for text in (long, short)]
        try:
            both = inputs_of(self.loaded, self.live, self._batch([long, short]))
        except FFNError:
            return False
        return all(
            _distance(together, torch.cat(apart)) <= _ALIKE[together.dtype.itemsize]
            for together, apart in zip(both, zip(*alone, strict=True), strict=True)
        )


def _limits(question: ReadingQuestion, reading: ReadingModel, loaded: Pretrained, dtype: torch.dtype) -> BatchLimits:
    """Return a batch's limits, from the requested sizes, the model's number of positions and the free memory."""
    positions = context_length(loaded.module, loaded.config)
    length = min((n for n in (question.max_tokens, positions) if n is not None), default=None)
    spec = max((layer.spec for layer in reading.layers), key=lambda spec: spec.d_ff)
    chosen = spec.moe.top_k if spec.moe else 1
    bytes_per_token = dtype.itemsize * (6 * spec.d_ff * chosen + 16 * spec.d_model)
    memory = min(_MOST_MEMORY, (available_memory() or _MOST_MEMORY) // 4)
    return BatchLimits(question.batch_size or BATCH_SIZE, max(1, memory // bytes_per_token), length)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return ‖a − b‖ / ‖b‖."""
    return float((a - b).double().norm() / b.double().norm().clamp_min(1e-300))


def _padding(loaded: Pretrained, tokenizer: Any) -> int:
    """Return the padding token; RoBERTa counts positions from this token's id."""
    for number in (getattr(loaded.config, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None)):
        if isinstance(number, int) and number >= 0:
            return number
    return 0
