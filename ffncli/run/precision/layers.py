"""Rounding inside a model: the error that a layer adds, the error that it inherits, that of the model's output."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from ffncli.block.formats import Format
from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_span, ffn_steps, id_inputs, parameters
from ffncli.models.model import Layer
from ffncli.run.engine.execute import run
from ffncli.run.engine.locate import LiveFFN, live_ffn, live_weights
from ffncli.run.engine.prepare import device_of
from ffncli.run.precision.budget import Mix, formats_by_layer
from ffncli.run.precision.question import PrecisionQuestion, PrecisionSubject
from ffncli.run.precision.results import PrecisionRow, WholeModel
from ffncli.run.precision.rounding import ExactLayer, RoundedLayer, mixed_output
from ffncli.run.pretrained.capture import ForwardInput, forward_arguments, model_files
from ffncli.run.pretrained.loading import Pretrained, load_for_logits, offline, read_config
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import tokenizer_of, tokens_of
from ffncli.run.pretrained.what_if import output_of, replaced_ffn
from ffncli.system.host import available_memory

Compute = Callable[[Layer, ExactLayer], Tensor]
_MOST_AT_ONCE = 512  # tokens whose logits and outputs of all layers are in memory at once
_ROWS = 64  # tokens whose distributions are


def in_model(
    question: PrecisionQuestion, subject: PrecisionSubject, prompts: Sequence[Prompt], rows: Sequence[PrecisionRow]
) -> tuple[tuple[WholeModel, ...], list[PrecisionRow]]:
    """Return each format's figures of the whole model on the prompts, and the rows with `added`, `inherited`, `kl` and
    `output_error`.

    For each prompt, the model runs once unrounded, and for each format once with all layers rounded and once with each
    layer alone.
    """
    every = {name: ModelErrors() for name, _ in question.formats}
    alone = {(name, layer): ModelErrors() for name, _ in question.formats for layer in subject.layers}
    with loaded_model(question, subject, prompts) as model:
        for runs in model.runs():
            for name, form in question.formats:
                rounding = _Rounding(form, question, subject.layers)
                runs.all_rounded(rounding, every[name])
                for layer in subject.layers:
                    runs.rounded([layer], rounding, alone[name, layer])
    out = []
    for name, _ in question.formats:
        for layer in subject.layers:
            row = next(r for r in rows if (r.stack, r.layer, r.format) == (layer.stack, layer.index, name))
            inherited, total = every[name].errors(layer)
            added = None if inherited is None or total is None else total - inherited
            one = alone[name, layer]
            out.append(replace(row, inherited=inherited, added=added, kl=one.kl, output_error=one.output_error))
    return tuple(WholeModel(name, sums.kl, sums.output_error) for name, sums in every.items()), out


@contextmanager
def loaded_model(
    question: PrecisionQuestion, subject: PrecisionSubject, prompts: Sequence[Prompt]
) -> Iterator["LoadedModel"]:
    """Load the model with all prompts tokenized."""
    path, device = model_files(subject.model, subject.layers, prompts[0].option), device_of(question.device)
    with offline() as transformers:
        config, tokenizer = read_config(transformers, path), tokenizer_of(transformers, path)
        texts = [tokens_of(prompt, tokenizer, path) for prompt in prompts]
        loaded, head = load_for_logits(transformers, path, config, device)
        live = {layer: live_ffn(loaded.module, subject.model, layer) for layer in subject.layers}
        inputs = [forward_arguments(loaded, tokens, tokenizer, subject.layers) for tokens in texts]
        yield LoadedModel(loaded, head, inputs, live)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory with the texts that it reads; `head` says whether it predicts tokens."""

    loaded: Pretrained
    head: bool
    texts: Sequence[ForwardInput]
    live: Mapping[Layer, LiveFFN]

    def runs(self) -> Iterator["ModelRuns"]:
        """Run the model unrounded on a group of texts after the other."""
        return (ModelRuns(self.loaded, self.head, group, self.live) for group in _grouped(self.texts))

    def mixed(self, mixes: Sequence[Mix], question: PrecisionQuestion) -> list[float]:
        """Return the mean divergence of the next token with the formats of each mix; without a head, the squared error
        of the model's output."""
        every = [(formats_by_layer(mix, question), ModelErrors()) for mix in mixes]
        for runs in self.runs():
            for formats, sums in every:

                def compute(layer: Layer, exact: ExactLayer, formats: Any = formats) -> Tensor:
                    return mixed_output(exact, formats[layer], question.what == "both")

                runs.rounded([*formats], compute, sums)
        return [sums.kl if sums.kl is not None else (sums.output_error or 0.0) ** 2 for _, sums in every]


def _grouped(inputs: Iterable[ForwardInput]) -> Iterator[list[ForwardInput]]:
    """Yield the inputs in groups of at most 512 tokens, or of one input."""
    group: list[ForwardInput] = []
    for one in inputs:
        if group and sum(len(other.of("")) for other in (*group, one)) > _MOST_AT_ONCE:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


@dataclass
class ModelErrors:
    """What a run differs by from the unrounded run, added up over tokens: the divergence in nats, [‖e‖², ‖output‖²] of
    the model's output, and for each layer [‖inherited error‖², ‖whole error‖², ‖output‖²]."""

    tokens: int = 0
    divergence: float | None = None
    output: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    layers: dict[Layer, Tensor] = field(default_factory=dict)

    @property
    def kl(self) -> float | None:
        """The mean divergence per token; None for a model without a head."""
        return None if self.divergence is None else self.divergence / self.tokens

    @property
    def output_error(self) -> float | None:
        """‖e‖ / ‖output‖ of the model's output, None if that is 0."""
        return _ratio(*self.output.tolist())

    def add(self, old: Tensor, new: Tensor, head: bool) -> None:
        """Add the output of some tokens, unrounded and rounded, in float64; logits if the model has a head."""
        self.tokens += len(old)
        self.output += torch.stack([(new - old).square().sum(), old.square().sum()]).cpu()
        if head:
            p, q = old.log_softmax(-1), new.log_softmax(-1)
            divergence = float((p.exp() * (p - q)).nan_to_num(0.0).sum())
            self.divergence = (self.divergence or 0.0) + max(0.0, divergence)

    def errors(self, layer: Layer) -> tuple[float | None, float | None]:
        """Return the relative errors of a layer's output: inherited, and whole."""
        inherited, whole, size = self.layers[layer].tolist()
        return _ratio(inherited, size), _ratio(whole, size)


def _ratio(error: float, size: float) -> float | None:
    return sqrt(error / size) if size else None


class _Rounding:
    """Computes layers in a format; the rounded weights are kept for the next text if memory allows."""

    def __init__(self, form: Format, question: PrecisionQuestion, layers: Iterable[Layer]) -> None:
        self._form, self._what = form, question.rounds(form)
        every = (parameters(ffn_steps(steps(layer.spec))).values() for layer in layers)
        count = sum(prod(axis.size for axis in axes) for shapes in every for axes in shapes)
        self._keeps = 4 * count < (available_memory() or 0) // 2
        self._kept: dict[Layer, RoundedLayer] = {}

    def __call__(self, layer: Layer, exact: ExactLayer) -> Tensor:
        rounded = self._kept.get(layer) or RoundedLayer(exact, self._form, exact.tensors(self._what))
        if self._keeps:
            self._kept[layer] = rounded
        return rounded.output(rounded.names, inputs=exact.inputs)


class ModelRuns:
    """A loaded model on some texts, and its unrounded runs: its output, and the output of each layer's FFN."""

    def __init__(
        self, loaded: Pretrained, head: bool, texts: Sequence[ForwardInput], live: Mapping[Layer, LiveFFN]
    ) -> None:
        self._loaded, self._head, self._texts, self._live = loaded, head, texts, live
        self._layers: dict[tuple[Layer, int], Tensor] = {}
        self._now = 0  # the text that runs

        def keep(layer: Layer, exact: ExactLayer) -> Tensor:
            out = self._layers[layer, self._now] = unrounded(layer, exact)
            return out

        with self._replaced(keep):
            self._outputs = [*self._each()]

    def all_rounded(self, rounding: Compute, sums: ModelErrors) -> None:
        """Add what changes if all layers are rounded, with each layer's inherited error."""

        def compute(layer: Layer, exact: ExactLayer) -> Tensor:
            out, base = rounding(layer, exact), self._layers[layer, self._now].double()
            errors = (unrounded(layer, exact).double() - base, out.double() - base, base)
            squares = torch.stack([one.square().sum().cpu() for one in errors])
            sums.layers[layer] = sums.layers.get(layer, torch.zeros(3, dtype=torch.float64)) + squares
            return out

        self._run(compute, sums)

    def rounded(self, layers: Sequence[Layer], rounding: Compute, sums: ModelErrors) -> None:
        """Add what changes if only these layers are rounded; the others run as in the unrounded run."""

        def compute(layer: Layer, exact: ExactLayer) -> Tensor:
            return (rounding if layer in layers else unrounded)(layer, exact)

        self._run(compute, sums)

    def _run(self, compute: Compute, sums: ModelErrors) -> None:
        """Run every text with each layer's FFN replaced by `compute`, and compare the outputs."""
        with self._replaced(compute):
            for old, new in zip(self._outputs, self._each(), strict=True):
                for at in range(0, len(old), _ROWS):
                    sums.add(old[at : at + _ROWS].double(), new[at : at + _ROWS].double(), self._head)

    def _each(self) -> Iterator[Tensor]:
        """Yield each text's logits [positions, vocab], or the last hidden state of a model without a head."""
        for at, text in enumerate(self._texts):
            self._now = at
            yield output_of(self._loaded, text)

    @contextmanager
    def _replaced(self, compute: Compute) -> Iterator[None]:
        """Replace the FFN of each layer by `compute(layer, its FFN on its present input)`."""
        with ExitStack() as stack:
            for layer, live in self._live.items():
                stack.enter_context(replaced_ffn(self._loaded.module, live, self._of(layer, compute)))
            yield

    def _of(self, layer: Layer, compute: Compute) -> Callable[[Tensor], Tensor]:
        block = ffn_steps(steps(layer.spec))

        def ffn(x: Tensor) -> Tensor:
            ids = torch.tensor([[token.id] for token in self._texts[self._now].of(layer.stack)], device=x.device)
            given = {ffn_span(block)[0]: x, **dict.fromkeys(id_inputs(block), ids)}
            weights = live_weights(self._loaded.module, self._live[layer].located)
            return compute(layer, ExactLayer(block, weights, given))

        return ffn


def unrounded(layer: Layer, exact: ExactLayer) -> Tensor:
    """Return the output of a layer as it is."""
    return run(exact.steps, exact.weights, exact.inputs)
