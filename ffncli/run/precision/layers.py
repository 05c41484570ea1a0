"""Rounding inside a model: the error that a layer adds, the error that it inherits, the change of the next token."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ffncli.block.formats import Format
from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_span, ffn_steps, id_inputs
from ffncli.models.model import Layer
from ffncli.run.engine.execute import run
from ffncli.run.engine.locate import LiveFFN, live_ffn, live_weights
from ffncli.run.engine.prepare import device_of
from ffncli.run.precision.attribution import relative_errors
from ffncli.run.precision.question import PrecisionQuestion, PrecisionSubject
from ffncli.run.precision.results import PrecisionRow, WholeModel
from ffncli.run.precision.rounding import ExactLayer, RoundedLayer
from ffncli.run.pretrained.capture import ForwardInput, forward_arguments, model_files
from ffncli.run.pretrained.loading import Pretrained, load, offline, read_config
from ffncli.run.pretrained.tokens import tokenizer_of, tokens_of
from ffncli.run.pretrained.what_if import logits, replaced_ffn


def in_model(
    question: PrecisionQuestion, subject: PrecisionSubject, rows: Sequence[PrecisionRow]
) -> tuple[tuple[WholeModel, ...], list[PrecisionRow]]:
    """Return each format's figures of the whole model, and the rows with `added`, `inherited` and `kl`.

    The model runs once unrounded, and for each format once with all layers rounded and once with each layer alone.
    """
    model, prompt = subject.model, subject.prompt
    assert prompt is not None  # in_model needs a prompt
    path, device = model_files(model, subject.layers, prompt.option), device_of(question.device)
    with offline() as transformers:
        config, tokenizer = read_config(transformers, path), tokenizer_of(transformers, path)
        tokens = tokens_of(prompt, tokenizer, path)
        loaded = load(transformers, path, config, torch.float32, device, with_head=True)
        inputs = forward_arguments(loaded, tokens, tokenizer, subject.layers)
        live = {layer: live_ffn(loaded.module, model, layer) for layer in subject.layers}
        of_model = _Unrounded(loaded, inputs, live)
        whole, out = [], []
        for name, form in question.formats:
            errors, kl = of_model.all_rounded(form, question)
            whole.append(WholeModel(name, kl))
            for layer in subject.layers:
                row = next(r for r in rows if (r.stack, r.layer, r.format) == (layer.stack, layer.index, name))
                inherited, total = errors[layer]
                added = None if inherited is None or total is None else total - inherited
                alone = of_model.divergence([layer], form, question)
                out.append(replace(row, inherited=inherited, added=added, kl=alone))
    return tuple(whole), out


class _Unrounded:
    """A loaded model, and its unrounded run: the output of each layer's FFN, and the next tokens' distributions."""

    def __init__(self, loaded: Pretrained, inputs: ForwardInput, live: Mapping[Layer, LiveFFN]) -> None:
        self._loaded, self._inputs, self._live = loaded, inputs, live
        self._outputs: dict[Layer, Tensor] = {}

        def keep(layer: Layer, exact: ExactLayer) -> Tensor:
            self._outputs[layer] = _exact(exact)
            return self._outputs[layer]

        with self._replaced([*live], keep):
            self._exact = logits(loaded, inputs).double().log_softmax(-1)

    def all_rounded(
        self, form: Format, question: PrecisionQuestion
    ) -> tuple[dict[Layer, tuple[float | None, float | None]], float]:
        """Return (for each layer the error that it inherits and its whole error, the divergence of the next token)."""
        errors: dict[Layer, tuple[float | None, float | None]] = {}

        def compute(layer: Layer, exact: ExactLayer) -> Tensor:
            rounded = _rounded(exact, form, question)
            unrounded = self._outputs[layer]
            inherited, _ = relative_errors(_exact(exact), unrounded)
            total, _ = relative_errors(rounded, unrounded)
            errors[layer] = (inherited, total)
            return rounded

        with self._replaced([*self._live], compute):
            return errors, self._kl()

    def divergence(self, layers: Sequence[Layer], form: Format, question: PrecisionQuestion) -> float:
        """Return the divergence of the next token if only these layers are rounded; the others run as in the unrounded
        run."""

        def compute(layer: Layer, exact: ExactLayer) -> Tensor:
            return _rounded(exact, form, question) if layer in layers else _exact(exact)

        with self._replaced([*self._live], compute):
            return self._kl()

    def _kl(self) -> float:
        """Run the model; return the mean of Σ p · ln(p / q) over the positions, p being the unrounded run's."""
        new = logits(self._loaded, self._inputs).double().log_softmax(-1)
        old = self._exact
        return max(0.0, float((old.exp() * (old - new)).nan_to_num(0.0).sum(-1).mean()))

    @contextmanager
    def _replaced(self, layers: Sequence[Layer], compute: Any) -> Iterator[None]:
        """Replace the FFNs of these layers by `compute(layer, its FFN on its present input)`."""
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(replaced_ffn(self._loaded.module, self._live[layer], self._of(layer, compute)))
            yield

    def _of(self, layer: Layer, compute: Any) -> Any:
        block = ffn_steps(steps(layer.spec))
        ids = torch.tensor([[token.id] for token in self._inputs.of(layer.stack)])

        def ffn(x: Tensor) -> Tensor:
            given = {ffn_span(block)[0]: x, **dict.fromkeys(id_inputs(block), ids.to(x.device))}
            weights = live_weights(self._loaded.module, self._live[layer].located)
            out: Tensor = compute(layer, ExactLayer(block, weights, given))
            return out

        return ffn


def _exact(layer: ExactLayer) -> Tensor:
    return run(layer.steps, layer.weights, layer.inputs)


def _rounded(layer: ExactLayer, form: Format, question: PrecisionQuestion) -> Tensor:
    """Return the output of a layer in a format, in the dtype of its input."""
    names = layer.tensors(question.rounds(form))
    return RoundedLayer(layer, form, names).output(names)
