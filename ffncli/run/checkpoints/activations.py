"""What a change does to a text: both models run on it, and their FFNs are compared layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import Step, ffn_span, ffn_steps, id_inputs
from ffncli.errors import FFNError, option
from ffncli.models.model import Layer
from ffncli.run.checkpoints.sides import SideFile
from ffncli.run.corpus.texts import opened
from ffncli.run.engine.execute import EVAL, execute, run
from ffncli.run.engine.locate import live_ffn, live_weights
from ffncli.run.engine.prepare import Token
from ffncli.run.pretrained.capture import forward_arguments, model_files
from ffncli.run.pretrained.loading import load_for_logits, offline, read_config
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import token_text, tokenizer_of, tokens_of, with_texts
from ffncli.run.pretrained.what_if import output_of, replaced_ffn

MOST_TOKENS = 512  # of all texts together, whose activations are in memory
_APART = 1e-6  # relative change from which a step departs
_TOP = 3


@dataclass(frozen=True)
class LayerActivations:
    """The change of a layer's FFN output, relative to BASE's: `total`; `inherited`, with BASE's weights on NEW's input;
    and `added`, the difference of both."""

    stack: str
    layer: int
    total: float | None
    inherited: float | None
    added: float | None


@dataclass(frozen=True)
class LikelyToken:
    """A token that one of the models finds likely after a text, with its probability in both."""

    prompt: int
    id: int
    text: str | None
    base_probability: float
    new_probability: float


@dataclass(frozen=True)
class ActivationComparison:
    """Both models on the same tokens. `first_layer` and `first_step` are where they part, None if they do not; `kl` is
    the mean divergence of the next token's distribution from BASE's, in nats, and `top_tokens_differ` the number of
    positions with another most likely token (None without a language-model head)."""

    prompts: int
    tokens: int
    first_layer: str | None
    first_step: str | None
    kl: float | None
    top_tokens_differ: int | None
    rows: tuple[LayerActivations, ...]
    top: tuple[LikelyToken, ...]
    notes: tuple[str, ...]


@dataclass
class _TextRun:
    """A model's runs: the input and the steps of each layer's FFN, the logits, and the tokens of each text."""

    inputs: dict[tuple[str, int], Tensor]
    outputs: dict[tuple[str, int], Tensor]
    weights: dict[tuple[str, int], Mapping[str, Tensor]]
    logits: list[Tensor]
    tokens: list[tuple[Token, ...]]
    tokenizer: Any


def compare_activations(
    base: SideFile, new: SideFile, layers: Sequence[tuple[Layer, Layer]], texts: Sequence[str]
) -> ActivationComparison:
    """Run both models on the texts; `layers` pairs NEW's layers with BASE's. Raises FFNError if one cannot run on
    text."""
    notes: list[str] = []
    ours = _run(base, texts, None, notes)
    theirs = _run(new, texts, ours.tokens, notes)
    if (count := len(ours.tokens)) < len(texts):
        verb = "is" if count == 1 else "are"
        notes.append(f"{count} of {len(texts)} texts {verb} run: together they have more than {MOST_TOKENS} tokens")
    rows, first = [], None
    for layer, origin in layers:
        a, b = (origin.stack, origin.index), (layer.stack, layer.index)
        if a not in ours.inputs or b not in theirs.inputs:
            continue
        block = ffn_steps(steps(origin.spec))
        ids = torch.tensor([[token.id] for tokens in theirs.tokens for token in tokens])
        inherited = run(block, ours.weights[a], _given(block, theirs.inputs[b], ids))
        size, before = float(ours.outputs[a].norm()), ours.outputs[a]
        errors = [float((one - before).norm()) / size if size else None for one in (theirs.outputs[b], inherited)]
        total, carried = errors
        added = total - carried if total is not None and carried is not None else None
        rows.append(LayerActivations(*b, total, carried, added))
        if first is None:
            first = _departs(block, ffn_steps(steps(layer.spec)), (ours, a), (theirs, b), ids)
    kl, differ = _divergence(ours.logits, theirs.logits, notes)
    name = f"{first[0][0]} layer {first[0][1]}" if first else None
    return ActivationComparison(
        count, sum(map(len, ours.tokens)), name, first[1] if first else None, kl, differ, tuple(rows),
        tuple(_top(ours, theirs)) if kl is not None else (), tuple(notes),
    )  # fmt: skip


def texts_of(prompt: str | Sequence[str] | None, prompts: Any) -> list[str]:
    """Return the texts to run: those of `--prompt` and, up to some number of tokens, those of `--prompts`."""
    texts = [prompt] if isinstance(prompt, str) else list(prompt or ())
    if prompts is not None:
        with opened(prompts) as corpus:
            texts += [one.text for _, one in zip(range(64), corpus, strict=False)]
    if not all(text.strip() for text in texts) or not texts:
        raise FFNError(f"{option('prompt')} is empty", "give a text")
    return texts


def _run(side: SideFile, texts: Sequence[str], given: list[tuple[Token, ...]] | None, notes: list[str]) -> _TextRun:
    """Run a model on the texts; with `given`, on these tokens, after a note if its own tokenizer splits otherwise."""
    layers = side.layers()
    path = model_files(side.resolved, layers, option("prompt"))
    with offline() as transformers:
        config, tokenizer = read_config(transformers, path), tokenizer_of(transformers, path)
        tokens = given
        if given is None or tokenizer is not None:
            split = _limited([tokens_of(Prompt(text), tokenizer, path) for text in texts])
            if given is not None and [[t.id for t in one] for one in split] != [[t.id for t in one] for one in given]:
                what = f"NEW has a different tokenizer, which gives {sum(map(len, split))} other tokens"
                notes.append(f"{what}; both models run on BASE's")
            tokens = given or split
        assert tokens is not None
        loaded, head = load_for_logits(transformers, path, config, "cpu")
        if side.adapter is not None:
            side.adapter.merge_into(loaded.module)
        out = _TextRun({}, {}, {}, [], tokens, tokenizer)
        for one in tokens:
            arguments = forward_arguments(loaded, with_texts([t.id for t in one], tokenizer), tokenizer, layers)
            parts: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
            with ExitStack() as stack:
                for layer in layers:
                    live = live_ffn(loaded.module, side.resolved, layer)
                    key = (layer.stack, layer.index)
                    if key not in out.weights:
                        out.weights[key] = live_weights(loaded.module, live.located)
                    compute = _recorded(layer, out.weights[key], arguments.of(layer.stack), parts)
                    stack.enter_context(replaced_ffn(loaded.module, live, compute))
                logits = output_of(loaded, arguments)
            out.logits.append(logits if head else logits[:0])
            for key, (x, y) in parts.items():
                for kept, part in ((out.inputs, x), (out.outputs, y)):
                    kept[key] = torch.cat([kept[key], part]) if key in kept else part
    return out


def _limited(texts: list[tuple[Token, ...]]) -> list[tuple[Token, ...]]:
    """Return the first texts with together at most MOST_TOKENS tokens, at least one text."""
    total, out = 0, list[tuple[Token, ...]]()
    for tokens in texts:
        total += len(tokens)
        if out and total > MOST_TOKENS:
            break
        out.append(tokens[:MOST_TOKENS])
    return out


def _given(block: Sequence[Step], x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {ffn_span(block)[0]: x, **dict.fromkeys(id_inputs(block), ids)}


def _recorded(layer: Layer, weights: Mapping[str, Tensor], tokens: Sequence[Token], parts: Any) -> Any:
    """Return a function that computes a layer's FFN as it is, and keeps its input and output."""
    block = ffn_steps(steps(layer.spec))
    ids = torch.tensor([[token.id] for token in tokens])

    def compute(x: Tensor) -> Tensor:
        y = run(block, weights, _given(block, x, ids))
        parts[layer.stack, layer.index] = (x.detach().clone(), y.detach().clone())
        return y

    return compute


def _departs(
    block: Sequence[Step],
    other: Sequence[Step],
    ours: tuple[_TextRun, Any],
    theirs: tuple[_TextRun, Any],
    ids: Tensor,
) -> tuple[tuple[str, int], str] | None:
    """Return (NEW's layer, the first step at which the two FFNs depart), the FFN's input included; None if nowhere."""
    given = [_given(steps, one.inputs[key], ids) for steps, (one, key) in ((block, ours), (other, theirs))]
    events = [
        [(e.name, e.tensor.clone()) for e in execute(steps, one.weights[key], inputs, EVAL) if e.expert is None]
        for steps, (one, key), inputs in ((block, ours, given[0]), (other, theirs, given[1]))
    ]
    for (name, a), (_, b) in zip(*events, strict=False):
        size = float(a.double().norm())
        if float((a.double() - b).norm()) > _APART * (size or 1.0):
            return theirs[1], name
    return None


def _divergence(base: Sequence[Tensor], new: Sequence[Tensor], notes: list[str]) -> tuple[float | None, int | None]:
    """Return (the mean divergence over all positions, the number of positions with another most likely token)."""
    total, differ, count = 0.0, 0, 0
    for a, b in zip(base, new, strict=True):
        if not len(a) or not len(b):
            return None, None
        width = min(a.shape[1], b.shape[1])
        if a.shape[1] != b.shape[1] and count == 0:
            notes.append(
                f"the vocabularies have {a.shape[1]:,} and {b.shape[1]:,} tokens: the first {width:,} are compared"
            )
        p, q = (one[:, :width].double().log_softmax(-1) for one in (a, b))
        total += max(0.0, float((p.exp() * (p - q)).nan_to_num(0.0).sum()))
        differ += int((p.argmax(-1) != q.argmax(-1)).sum())
        count += len(a)
    return total / count, differ


def _top(ours: _TextRun, theirs: _TextRun) -> Iterator[LikelyToken]:
    """Yield the most likely next tokens after each text, with both probabilities."""
    for number, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        width = min(a.shape[1], b.shape[1])
        p, q = (one[-1, :width].double().softmax(-1) for one in (a, b))
        for i in dict.fromkeys([*p.topk(_TOP).indices.tolist(), *q.topk(_TOP).indices.tolist()]):
            yield LikelyToken(number, i, token_text(ours.tokenizer, i), float(p[i]), float(q[i]))
