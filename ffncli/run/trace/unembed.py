"""The logit lens on an FFN: which tokens a vector promotes, through the model's own final norm and head.

The vector replaces the last layer's output, and the model's own forward does the rest: its final norm,
its projection (OPT-350m), its head with any scaling or capping of the logits (Granite, Cohere, Gemma-2). Only the
first layer is loaded, and its result is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import Norm, Step, ffn_span
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError
from ffncli.models.model import Layer, Resolved
from ffncli.models.runnable import folder_of
from ffncli.run.engine.execute import norm
from ffncli.run.engine.prepare import LayerRequest, Prepared, device_of, dtype_of
from ffncli.run.engine.weights import stored_weights
from ffncli.run.pretrained.capture import cut, stand_in
from ffncli.run.pretrained.loading import Pretrained, cannot, demanding, load, offline, read_config
from ffncli.run.pretrained.locate import live_ffn
from ffncli.run.pretrained.tokens import token_text, tokenizer_of
from ffncli.run.trace.sampling import sampling

_AT_ONCE = 64  # vectors whose logits are in memory together


@dataclass(frozen=True)
class Promoted:
    """A token with its logit for the vector, and the probability after a softmax over the vocabulary.

    `cumulative` is the mass of all tokens at least as probable, itself included.
    """

    id: int
    text: str | None
    logit: float
    probability: float
    cumulative: float
    in_top_k: bool
    in_top_p: bool


@dataclass(frozen=True)
class TokenLogit:
    """A token with a logit."""

    id: int
    text: str | None
    logit: float


@dataclass(frozen=True)
class DirectLogits:
    """What a vector adds to the logits as a part of the residual stream after the layer, with the size of that stream:
    the final norm divides the vector by the stream's `residual_rms` (of a LayerNorm: its standard deviation), not by
    its own. `promoted` and `suppressed` are the tokens of the largest and of the smallest sums.
    """

    residual_rms: float
    promoted: tuple[TokenLogit, ...]
    suppressed: tuple[TokenLogit, ...]


@dataclass(frozen=True)
class TokenLimits:
    """How many tokens are listed, and the sampler's sets: the `top_k` likeliest, and those that make up `top_p`."""

    top: int
    top_k: int
    top_p: float


@dataclass(frozen=True)
class PromotedTokens:
    """The tokens promoted by the FFN's output for an input `row`, or by a unit (`neuron`, of `expert`, times `sign`).

    The sets are as in `Sampling`, of a vocabulary of `vocab` tokens; `promoted` are sorted by logit, the largest first.
    The vector is normalised alone, as if it were the whole residual stream; `direct` has it as a part of that, if a
    prompt gives one, the head does not cap its logits and the final norm is like the layers'. `suppressed` are the
    tokens of smallest logit, the smallest first. If a logit is not a number, nothing is promoted or picked.
    """

    row: int | None
    neuron: int | None
    expert: int | None
    sign: int | None
    vocab: int
    argmax: int | None
    top_k: int
    top_k_mass: float | None
    top_p: float
    top_p_count: int | None
    top_p_mass: float | None
    promoted: tuple[Promoted, ...]
    suppressed: tuple[TokenLogit, ...] = ()
    direct: DirectLogits | None = None


@dataclass(frozen=True)
class Added:
    """A vector [d_model] from an FFN: its output for a `row` of the input, or the vector that one hidden unit writes.

    For a unit it is the column `neuron` of the down projection (of `expert`'s, if there are several) times `sign`.
    `stream` is the residual stream after the layer [d_model], if the vector is a part of it.
    """

    vector: Tensor
    row: int | None = None
    neuron: int | None = None
    expert: int | None = None
    sign: int | None = None
    stream: Tensor | None = None


def of_rows(output: Tensor, rows: Sequence[int], stream: Tensor | None = None) -> list[Added]:
    """The FFN's output vectors for some rows of [tokens, d_model], with the residual stream after the layer there."""
    return [Added(output[row], row, stream=None if stream is None else stream[row]) for row in rows]


def of_unit(ready: Prepared, neuron: int, experts: frozenset[int] | None) -> list[Added]:
    """The vectors that a hidden unit writes for a positive and a negative activation, in each of `experts`."""
    down = ready.weights["down.weight"]
    numbers = sorted(experts or ()) if ready.layer.spec.moe else (None,)
    columns = [(expert, (down if expert is None else down[expert])[:, neuron]) for expert in numbers]
    return [Added(sign * column, None, neuron, expert, sign) for expert, column in columns for sign in (1, -1)]


def promoted(
    model: Resolved, ready: Prepared, added: Sequence[Added], request: LayerRequest, limits: TokenLimits
) -> tuple[PromotedTokens, ...]:
    """The tokens that each vector promotes, after the norm that it passes first, if any.

    Raises FFNError as `unembed` does.
    """
    vectors = to_stream(ready, torch.stack([one.vector for one in added]))
    normed = [replace(one, vector=vector) for one, vector in zip(added, vectors, strict=True)]
    return unembed(model, ready.layer, normed, request, limits)


def unembed(
    model: Resolved, layer: Layer, added: Sequence[Added], request: LayerRequest, limits: TokenLimits
) -> tuple[PromotedTokens, ...]:
    """The tokens that every vector promotes; each is added to the residual stream by `layer`'s FFN.

    Raises FFNError if no head reads that stream, and for models without a vocabulary.
    """
    path = folder_of(model, "--unembed")
    stacks = {group.stack for group in model.groups}
    if not stacks <= {"encoder", "decoder"}:
        names = ", ".join(sorted(stacks))
        raise FFNError(
            f"--unembed: {model.name} has the stacks {names}, and it is not known which of them the head reads"
        )
    vectors = _last_norm(model, layer, torch.stack([one.vector for one in added]), request)
    with offline() as transformers:
        config = read_config(transformers, path)
        tokenizer = tokenizer_of(transformers, path)
        where: list[str] = []

        def shrink(module: Any, lean: bool) -> None:  # lean or not: an extra layer would change the answer
            where.append(_first_alone(module, model, layer))

        dtype, device = dtype_of(request.dtype), device_of(request.device)
        loaded = load(transformers, path, config, dtype, device, shrink, with_head=True)
        nothing = _logits(loaded, where[-1], torch.zeros_like(vectors[:1]))[0]
        rows = (row for some in torch.split(vectors, _AT_ONCE) for row in _logits(loaded, where[-1], some))
        last = None if _capped(config) else _final_norm(layer)
        return tuple(
            replace(_best(one, row, tokenizer, limits), direct=_direct(one, row - nothing, last, tokenizer, limits))
            for one, row in zip(added, rows, strict=True)
        )


def _capped(config: Any) -> bool:
    """Whether the head caps its logits, which are then no sum of parts."""
    values = {**config.to_dict(), **config.get_text_config(decoder=True).to_dict()}
    return any("logit" in name and "cap" in name and "att" not in name and value for name, value in values.items())


def _final_norm(layer: Layer) -> Norm | None:
    """The norm between the last layer and the head, if it is like the one before the layers' FFNs."""
    norms = [step.op for step in steps(layer.spec) if isinstance(step.op, Norm) and step.op.axis.name == "d_model"]
    return norms[0] if norms and layer.spec.norm_position.startswith("pre") else None


def _size(x: Tensor, op: Norm) -> float:
    """What a norm divides by."""
    x = x.double()
    centred = x - x.mean() if op.kind == "layernorm" else x
    return float((centred.square().mean() + op.eps).sqrt())


def _direct(one: Added, logits: Tensor, last: Norm | None, tokenizer: Any, limits: TokenLimits) -> DirectLogits | None:
    """`logits` are those of the vector normalised alone, less those of nothing."""
    if one.stream is None or last is None:
        return None
    size = _size(one.stream, last)
    logits = logits * (_size(one.vector, last) / size)
    return DirectLogits(size, _ends(logits, True, tokenizer, limits.top), _ends(logits, False, tokenizer, limits.top))


def _ends(logits: Tensor, largest: bool, tokenizer: Any, most: int) -> tuple[TokenLogit, ...]:
    """The tokens of the largest logits, or of the smallest."""
    if logits.isnan().any():
        return ()
    values, ids = logits.topk(min(most, len(logits)), largest=largest)
    return tuple(
        TokenLogit(i, token_text(tokenizer, i), value) for i, value in zip(ids.tolist(), values.tolist(), strict=True)
    )


def to_stream(ready: Prepared, vectors: Tensor) -> Tensor:
    """The FFN's output as it is added to the residual stream: Gemma-2 and OLMo-2 normalise it first."""
    block = steps(ready.layer.spec)
    _, name = ffn_span(block)
    for step in block[[s.output for s in block].index(name) + 1 :]:
        if not (isinstance(step.op, Norm) and step.inputs == (name,)):
            break
        vectors, name = _normed(step, ready.weights, vectors), step.output
    return vectors


def _normed(step: Step, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    assert isinstance(step.op, Norm)
    return norm(step.op, {name.rpartition(".")[2]: weights[name] for name in step.parameters()}, x)


def _last_norm(model: Resolved, layer: Layer, vectors: Tensor, request: LayerRequest) -> Tensor:
    """Post-norm models have no final norm: the head reads the output of the last layer's norm (BERT)."""
    last = max((g for g in model.groups if g.stack == layer.stack), key=lambda g: max(g.layers))
    if last.spec.norm_position != "post" or last.spec.norm == "none":
        return vectors
    at = Layer(layer.stack, max(last.layers), last.spec)
    weights = stored_weights(model, at, dtype_of(request.dtype), request.device)
    step = last.steps[-1]
    return _normed(step, weights or {}, vectors) if isinstance(step.op, Norm) else vectors


def _first_alone(module: Any, model: Resolved, layer: Layer) -> str:
    """Keep the first layer of the stack that the head reads, and no layer of its encoder; returns its name."""
    first = next(g for g in model.groups if g.stack == layer.stack and min(g.layers) == _lowest(model, layer.stack))
    live = live_ffn(module, model, Layer(layer.stack, min(first.layers), first.spec))
    encoder = next((g for g in model.groups if g.stack != layer.stack), None)
    if encoder is not None:
        cut(module, live_ffn(module, model, Layer(encoder.stack, min(encoder.layers), encoder.spec)).layer, 0)
    cut(module, live.layer, 1)
    return live.layer


def _lowest(model: Resolved, stack: str) -> int:
    return min(min(group.layers) for group in model.groups if group.stack == stack)


def _logits(loaded: Pretrained, layer: str, vectors: Tensor) -> Tensor:
    """[n, vocabulary], in float64: the model's forward with `vectors` in place of the output of `layer`.

    The last vector is passed twice, under two tokens: if its logits differ, something bypassed that place.
    """
    vectors = torch.cat([vectors, vectors[-1:]])
    count, _width = vectors.shape
    kind = loaded.config.model_type

    def put(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, (tuple, list)) else output
        places = (vectors[:, None], vectors[None])  # XLNet: time goes before the batch
        placed = next((place for place in places if place.shape == first.shape), None)
        if placed is None:
            raise FFNError(f"--unembed: the layers of {kind} give {list(first.shape)}, not one vector per token")
        inner = placed.to(first.dtype)
        if isinstance(output, list):  # GPT-1
            return [inner, *output[1:]]
        return (inner, *output[1:]) if isinstance(output, tuple) else inner

    given = stand_in(loaded, count)
    for name in ("input_ids", "decoder_input_ids"):
        if name in given:
            given[name] = given[name].clone()
            given[name][-1] = 1
    handle = loaded.module.get_submodule(layer).register_forward_hook(put)
    try:
        with torch.no_grad(), demanding(loaded):
            logits: Tensor = loaded.module(**given).logits
    except FFNError:
        raise
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        what = f"--unembed: {kind} does not run with only its first layer and vectors in place of its output"
        raise cannot(what, error, ExitCode.ENVIRONMENT) from None
    finally:
        handle.remove()
    if logits.numel() != count * logits.shape[-1]:
        raise FFNError(f"--unembed: {kind} has several heads: {list(logits.shape)} logits for {count} vectors")
    logits = logits.reshape(count, -1).double()
    if (logits[-1] - logits[-2]).abs().max() > 1e-3 * logits[-1].abs().max():
        raise FFNError(f"--unembed: the head of {kind} reads more than the output of its layers")
    return logits[:-1]


def _best(one: Added, logits: Tensor, tokenizer: Any, limits: TokenLimits) -> PromotedTokens:
    every = logits
    # By the logits: far below the first, probabilities are 0 and have no order.
    logits, ids = logits.sort(descending=True, stable=True)
    sets = sampling(logits.softmax(-1), limits.top_k, limits.top_p, limits.top)[0]
    rows = zip(sets.candidates[: limits.top], logits.tolist(), ids.tolist(), strict=False)
    tokens = tuple(
        Promoted(
            i,
            token_text(tokenizer, i),
            logit,
            candidate.probability,
            candidate.cumulative,
            candidate.in_top_k,
            candidate.in_top_p,
        )
        for candidate, logit, i in rows
    )
    # A position in that order is not a token's number.
    argmax = tokens[0].id if tokens else None
    return PromotedTokens(
        one.row, one.neuron, one.expert, one.sign, len(logits), argmax, sets.top_k, sets.top_k_mass, sets.top_p,
        sets.top_p_count, sets.top_p_mass, tokens, _ends(every, False, tokenizer, limits.top),
    )  # fmt: skip
