"""Run layers with and without rounding, on a chosen input or on their real inputs in a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from ffncli.block.formats import Format
from ffncli.block.recipe import steps
from ffncli.block.steps import id_inputs
from ffncli.errors import FFNError, option, spelled
from ffncli.models.model import Layer
from ffncli.run.corpus.listen import Receiver, tokenized
from ffncli.run.corpus.question import ReadingModel, ReadingQuestion
from ffncli.run.corpus.run import CorpusReader, reader_of
from ffncli.run.corpus.sums import Progress
from ffncli.run.engine.prepare import Prepared, Token, dtype_name, prepare
from ffncli.run.measure.statistics import where_not_finite
from ffncli.run.precision.attribution import attribution, relative_errors
from ffncli.run.precision.budget import Mix, PricedMatrix, budget_of, formats_by_layer, left_out, matrices_of
from ffncli.run.precision.diagnosis import Diagnosis, diagnose
from ffncli.run.precision.explain import RoundedValue, explained_value
from ffncli.run.precision.layers import in_model, loaded_model
from ffncli.run.precision.question import PrecisionQuestion, PrecisionSubject
from ffncli.run.precision.recipe import recipe_writer
from ffncli.run.precision.results import Budget, Precision, PrecisionRow, Score, SumError
from ffncli.run.precision.rounding import (
    INPUTS,
    ExactLayer,
    RoundedLayer,
    exact_layer,
    exact_output,
    for_inputs,
    matrices,
    matrices_in,
    mixed_output,
    quantized,
)
from ffncli.run.pretrained.capture import prepared, run_model
from ffncli.run.pretrained.loading import loading_notes
from ffncli.run.pretrained.prompt import Prompt
from ffncli.show.text import counted

Note = Callable[[str], None]


def precision_of(question: PrecisionQuestion, subject: PrecisionSubject, note: Note = lambda text: None) -> Precision:
    """Answer the question; `note` is called with every remark as it arises."""
    notes: list[str] = []

    def remark(*texts: str) -> None:
        for text in texts:
            notes.append(spelled(text))
            note(text)

    rows: list[PrecisionRow] = []
    explained: list[RoundedValue] = []
    tokens: dict[str, tuple[Token, ...]] = {}
    origins: dict[str, None] = {}
    every: list[PricedMatrix] = []

    def measure(ready: Prepared) -> None:
        origins[ready.origin], tokens[ready.layer.stack] = None, ready.tokens
        layer = exact_layer(ready)
        exact, read = exact_output(layer)
        try:
            _check(layer, exact, read)
            if question.budget is not None:
                every.extend(matrices_of(ready.layer, layer, question))
                return
            rows.extend(_row(question, ready.layer, layer, exact, read, name, form) for name, form in question.formats)
        except FFNError as error:
            one = len(subject.layers) == 1
            raise error if one else error.within(f"{ready.layer.stack} layer {ready.layer.index}") from None
        explained.extend(
            explained_value(layer, read, place, text, name, form)
            for text, place in subject.places for name, form in question.formats
        )  # fmt: skip

    write = recipe_writer(question, subject)
    described, prompts = each_layer(question, subject, measure, remark)
    if any(", unpacked from " in origin for origin in origins):
        remark("the source is packed: the errors are measured from its own format, and do not contain that format's")
    whole, ranked = in_model(question, subject, prompts, rows) if question.in_model else ((), rows)
    budget = None if question.budget is None else _budget(question, subject, prompts, every, remark)
    if budget and write:
        remark(*write(budget))
    if len(subject.layers) > 1:
        names = [name for name, _ in question.formats]
        ranked.sort(key=lambda row: (names.index(row.format), *(-(one or 0.0) for one in _worst(row))))
    origin = next(iter(origins)) if len(origins) == 1 else f"weights of {counted(len(subject.layers), 'layer')}"
    text = subject.prompt.text if subject.prompt else None
    given = tokens if subject.prompt else {}
    return Precision(
        subject.model, tuple(ranked), given, tuple(notes), origin, described, text, tuple(explained), whole, budget
    )  # fmt: skip


def _worst(row: PrecisionRow) -> tuple[float | None, ...]:
    """Return what ranks a row, the first figure first."""
    return row.kl, row.output_error, row.error_rel


def each_layer(
    question: PrecisionQuestion, subject: PrecisionSubject, measure: Callable[[Prepared], None],
    remark: Callable[..., None],
) -> tuple[str | None, list[Prompt]]:  # fmt: skip
    """Call `measure` with every layer, ready to run. Return a description of the input, None if it is a prompt's, and
    what a model reads, if any: the prompt, or its first texts."""
    model, device, described = subject.model, question.device, None
    prompts = [subject.prompt] if subject.prompt else []
    remark(*subject.notes)
    if subject.prompt is not None:
        remark(*loading_notes(model, max(layer.index for layer in subject.layers), None))

        def seen(layer: Layer, given: tuple[Token, ...], entering: Tensor, leaving: Tensor) -> None:
            measure(prepared(model, layer, given, entering, leaving, (), None, device))

        after = run_model(model, subject.layers, subject.prompt, seen, device=device)
    elif subject.reading is not None:
        after, described, prompts = _read(subject, subject.reading, measure)
    else:
        for layer in subject.layers:
            ready = prepare(
                model, layer, input=question.input, leading=question.leading, device=device, seed=question.seed,
                train=False,
            )  # fmt: skip
            measure(ready)
        after, described = ready.notes, _described(question, ready)
    remark(*model.notes, *map(str, model.differences), *after)
    return described, prompts


MOST_TOKENS = 4096  # of a corpus


class _Entering(Receiver):
    """Keeps the input of a layer's FFN for the first tokens of a corpus."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def entering(self, x: Tensor, places: Tensor) -> None:
        left = MOST_TOKENS - sum(map(len, self.parts))
        self.parts.append(x[:left].clone())


def _read(
    subject: PrecisionSubject, reading: ReadingQuestion, measure: Callable[[Prepared], None]
) -> tuple[tuple[str, ...], str, list[Prompt]]:
    """Call `measure` with every layer on its inputs in a corpus; return (notes, a description of the input, the first
    texts)."""
    for layer in subject.layers:
        if id_inputs(steps(layer.spec)):
            raise FFNError(f"{option('prompts')}: token ids choose this layer's experts", f"use {option('prompt')}")
    notes: list[str] = []
    inputs, progress = {layer: _Entering() for layer in subject.layers}, Progress()
    with reader_of(reading, ReadingModel(subject.model, subject.layers), notes.append) as reader:
        reader.load(in_order=True)
        reader.read(inputs, progress, lambda size: None)
        where, first = reader.corpus.where, [*_first(reader)]
    for layer, one in inputs.items():
        x = torch.cat(one.parts)
        measure(prepared(subject.model, layer, (), x, x, (), None, reading.device))
    described = f"{where}: {counted(progress.texts, 'text')}, {counted(progress.tokens, 'token')}"
    measured = f", the first {len(x):,} of which are measured" if len(x) < progress.tokens else ""
    return tuple(notes), described + measured, first


def _first(reader: CorpusReader) -> Iterator[Prompt]:
    """Yield the texts of a corpus up to its first MOST_TOKENS tokens."""
    left = MOST_TOKENS
    for text in reader.corpus:
        for one in tokenized([text], reader.tokenizer, reader.limits.length):
            yield Prompt(ids=one.ids[:left])
            left -= len(one.ids)
        if left <= 0:
            return


def _described(question: PrecisionQuestion, ready: Prepared) -> str:
    count = next(iter(ready.inputs.values())).shape[:-1].numel()
    given = "randn" if question.input is None else question.input
    return f"{given if isinstance(given, str) else 'an array'}, {counted(count, 'token')}"


def _check(layer: ExactLayer, exact: Tensor, read: Mapping[str, Tensor]) -> None:
    """Raise FFNError for a layer without an error to measure, given its output and what its matrices read."""
    if not bool(exact.isfinite().all()):
        first = [*where_not_finite("input", layer.inputs), *where_not_finite("weight", layer.weights)][:1]
        what = ": ".join(["the layer's output has NaN or infinite values", *map(str, first)])
        raise FFNError(what, "ffn trace shows where they come from")
    if not read:
        raise FFNError("no token reaches a matrix of this layer", "give more tokens")


def _budget(
    question: PrecisionQuestion,
    subject: PrecisionSubject,
    prompts: Sequence[Prompt],
    every: Sequence[PricedMatrix],
    remark: Callable[..., None],
) -> Budget:
    """Choose a format for each matrix by the model's KL divergence, or without a model by the layers' errors."""
    remark(*left_out(every))
    if question.in_whole_model:
        with loaded_model(question, subject, prompts) as loaded:
            score: Score = "kl" if loaded.head else "output_error"
            return budget_of(question, every, lambda mixes: loaded.mixed(mixes, question), score, remark)

    def in_layers(mixes: Sequence[Mix]) -> list[float]:
        errors, every_mix = [0.0] * len(mixes), [formats_by_layer(mix, question) for mix in mixes]

        def measure(ready: Prepared) -> None:
            layer = exact_layer(ready)
            exact, _ = exact_output(layer)
            size = float(exact.square().sum()) * len(subject.layers)
            for at, by_layer in enumerate(every_mix):
                formats = by_layer.get(ready.layer)
                if formats and size:
                    error = mixed_output(layer, formats, question.what == "both") - exact
                    errors[at] += float(error.square().sum().nan_to_num(inf)) / size

        each_layer(question, subject, measure, lambda *texts: None)
        return errors

    return budget_of(question, every, in_layers, "error_rel", remark)


def _row(
    question: PrecisionQuestion, of: Layer, layer: ExactLayer, exact: Tensor, read: Mapping[str, Tensor],
    name: str, form: Format,
) -> PrecisionRow:  # fmt: skip
    what = question.rounds(form)
    names = layer.tensors(what)
    in_format = RoundedLayer(layer, form, names)
    rounded = in_format.output(names)
    alone = {tensor: in_format.output([tensor]) - exact for tensor in names}
    parts = attribution(rounded - exact, alone)
    diagnoses = tuple(diagnosis_of(layer, tensor, read, form) for tensor in names)
    error_rel, error_max = relative_errors(rounded, exact)
    return PrecisionRow(
        of.stack, of.index, name, what, error_rel, error_max, parts.by_tensor, parts.by_pair, parts.rest,
        min((one.headroom for one in diagnoses if one.headroom is not None), default=None),
        max((one.underflow for one in diagnoses if one.underflow is not None), default=None),
        sum(one.saturated for one in diagnoses), sum(one.zero_scales for one in diagnoses), diagnoses,
        _sums(in_format, exact) if question.sums else (),
    )  # fmt: skip


def _sums(layer: RoundedLayer, exact: Tensor) -> tuple[SumError, ...]:
    every = ((dtype_name(dtype), layer.output(layer.names, dtype)) for dtype in (torch.float32, torch.bfloat16))
    return tuple(SumError(name, *relative_errors(output, exact)) for name, output in every)


@torch.no_grad()
def diagnosis_of(layer: ExactLayer, name: str, read: Mapping[str, Tensor], form: Format) -> Diagnosis:
    """Quantize one of a layer's tensors, and say how well its values fit the format."""
    if name in INPUTS:
        every = (x for place, x in read.items() if place.rpartition(".")[2] == name)
        whole, form = [x.flatten(0, -2) for x in every], for_inputs(form)
    else:
        stacks = [layer.weights[parameter] for parameter, label in matrices(layer.steps).items() if label == name]
        whole = [one for stack in stacks for one in matrices_in(stack)]
    return diagnose(name, [(one, quantized(one, form)[0]) for one in whole])
