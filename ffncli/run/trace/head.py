"""The way from a vector to logits: the norms of an FFN's branch, the model's final norm and its head."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import Add, Norm, Step, ffn_sum
from ffncli.errors import ExitCode, FFNError
from ffncli.models.model import Layer, Resolved, folder_of
from ffncli.run.engine.execute import norm
from ffncli.run.engine.locate import live_ffn
from ffncli.run.engine.prepare import Prepared, device_of, dtype_of
from ffncli.run.engine.weights import stored_layer
from ffncli.run.pretrained.capture import cut, stand_in
from ffncli.run.pretrained.loading import Pretrained, cannot, demanding, load, offline, read_config
from ffncli.run.pretrained.tokens import tokenizer_of

_AT_ONCE = 64  # vectors per forward pass, to limit the memory for logits
_ROUNDING = 1e-3  # relative to the largest value: far above float32 rounding, far below a wrong formula's error


class Head:
    """The final norm and head of a model with d_model `width`, loaded with only one layer, named `first`.

    `like` is the norm before the layers' FFNs; a final norm, if there is one, is of the same kind. Methods raise
    FFNError if the model does not run this way, or if its head reads more than the output of its layers.
    """

    def __init__(self, loaded: Pretrained, first: str, width: int, like: Norm | None, tokenizer: Any, option: str):
        self._loaded, self._first, self._width, self._like = loaded, first, width, like
        self.tokenizer, self._option = tokenizer, option

    def logits(self, vectors: Tensor) -> Iterator[Tensor]:
        """Yield the logits [vocabulary] of each of the vectors [n, d_model], in float64."""
        with torch.no_grad():
            for some in torch.split(vectors, _AT_ONCE):
                yield from self._forward(some)

    @cached_property
    def norm(self) -> Norm | None:
        """The final norm, if the logits before any cap are linear in its output; only then does each part of the
        residual stream contribute a separate term to the logits. None for post-norm models and for BERT's head, which
        has an activation."""
        if self._like is None:
            return None
        pair = torch.randn(2, self._width, generator=torch.Generator().manual_seed(0))
        pair = pair.to(self._loaded.module.device, self._loaded.module.dtype)
        one, other, both = (self._above_nothing(v, self._like) for v in (*pair, pair.sum(0)))
        return self._like if (one + other - both).abs().max() <= _ROUNDING * both.abs().max() else None

    def part(self, vector: Tensor, size: float) -> Tensor:
        """Return the contribution of a vector [d_model] to the logits [vocabulary] before any cap. The vector is part
        of a residual stream that the final norm divides by `size`; `norm` must not be None."""
        assert self.norm is not None
        return self._above_nothing(vector, self.norm) / size

    def direction(self, token: int) -> Tensor:
        """Return the direction [d_model], in float64, in which a vector raises a token's logit: `part` of a vector, for
        this token, is vector · direction / size."""
        assert self.norm is not None
        # `_above_nothing` is linear in the vector, so its gradient is the same at every vector.
        vector = torch.randn(self._width, generator=torch.Generator().manual_seed(1))
        vector = vector.to(self._loaded.module.device, self._loaded.module.dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(self._above_nothing(vector, self.norm, token), vector)
        return gradient.double()

    def token_logits(self, token: int) -> Callable[[Tensor], Tensor]:
        """Return a map of vectors [n, d_model], each normalised on its own, to the token's uncapped logits [n]."""
        if (op := self.norm) is None:
            return lambda vectors: torch.stack([row[token] for row in self.logits(vectors)])
        direction = self.direction(token)
        nothing = next(self.logits(torch.zeros(1, self._width).to(direction.device, self._loaded.module.dtype)))[token]
        return lambda vectors: vectors.double() @ direction / divisor(vectors, op) + nothing

    def _above_nothing(self, vector: Tensor, op: Norm, token: int | slice = slice(None)) -> Tensor:
        """Return (logits(v) - logits(0)) times the final norm's divisor, from uncapped logits."""
        with _without_caps(self._loaded.module.config), torch.set_grad_enabled(vector.requires_grad):
            above = self._forward(torch.stack([vector, torch.zeros_like(vector)]))[:, token]
            return (above[0] - above[1]) * divisor(vector, op)

    def _forward(self, vectors: Tensor) -> Tensor:
        """Return the logits [n, vocabulary], in float64, of the model's forward pass with `vectors` in place of its
        layers' output.

        The last vector is passed twice, with different input tokens: if its logits differ, the head also reads
        something else.
        """
        vectors = torch.cat([vectors, vectors[-1:]])
        count, module, kind = vectors.shape[0], self._loaded.module, self._loaded.config.model_type

        def put(_: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, (tuple, list)) else output
            places = (vectors[:, None], vectors[None])  # the second layout is XLNet's, with time before batch
            placed = next((place for place in places if place.shape == first.shape), None)
            if placed is None:
                raise FFNError(
                    f"{self._option}: the layers of {kind} return {list(first.shape)}, not a vector per token"
                )
            inner = placed.to(first.dtype)
            if isinstance(output, list):  # GPT-1
                return [inner, *output[1:]]
            return (inner, *output[1:]) if isinstance(output, tuple) else inner

        arguments = stand_in(self._loaded, count)
        for name in ("input_ids", "decoder_input_ids"):
            if name in arguments:
                arguments[name] = arguments[name].clone()
                arguments[name][-1] = 1
        handle = module.get_submodule(self._first).register_forward_hook(put)
        try:
            with demanding(self._loaded):
                logits: Tensor = module(**arguments).logits
        except (FFNError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"{self._option}: {kind} does not run with only its first layer and vectors in place of its output"
            raise cannot(what, error, ExitCode.ENVIRONMENT) from None
        finally:
            handle.remove()
        if logits.numel() != count * logits.shape[-1]:
            raise FFNError(f"{self._option}: {kind} has several heads: {[*logits.shape]} logits for {count} vectors")
        logits = logits.reshape(count, -1).double()
        if (logits[-1] - logits[-2]).abs().max() > _ROUNDING * logits[-1].abs().max():
            raise FFNError(f"{self._option}: the head of {kind} reads more than the output of its layers")
        return logits[:-1]


def divisor(x: Tensor, op: Norm) -> Tensor:
    """Return a norm's divisor for x in float64: √(mean(x²) + eps), or √(variance + eps) for LayerNorm."""
    x = x.double()
    centred = x - x.mean(-1, keepdim=True) if op.kind == "layernorm" else x
    return (centred.square().mean(-1) + op.eps).sqrt()


@contextmanager
def head_of(resolved: Resolved, layer: Layer, dtype: str | None, device: str, option: str) -> Iterator[Head]:
    """Load the head that reads the residual stream of `layer`; error messages name `option`, the option that needs the
    head."""
    path = folder_of(resolved, option)
    stacks = {group.stack for group in resolved.model.groups}
    if not stacks <= {"encoder", "decoder"}:
        names = ", ".join(sorted(stacks))
        raise FFNError(
            f"{option}: {resolved.model.name} has the stacks {names}, and it is unknown which stack the head reads"
        )
    with offline() as transformers:
        config = read_config(transformers, path)
        tokenizer = tokenizer_of(transformers, path)
        where: list[str] = []

        def shrink(module: Any, lean: bool) -> None:
            # Cut even if not `lean`, because an extra layer would change the result.
            where.append(_first_alone(module, resolved, layer))

        loaded = load(transformers, path, config, dtype_of(dtype), device_of(device), shrink, with_head=True)
        yield Head(loaded, where[-1], layer.spec.d_model, _norm_before(layer), tokenizer, option)


def _norm_before(layer: Layer) -> Norm | None:
    """Return the layer's norm on the residual stream; None in a post-norm layer."""
    norms = [step.op for step in steps(layer.spec) if isinstance(step.op, Norm) and step.op.axis.name == "d_model"]
    return norms[0] if norms and layer.spec.norm_position != "post" else None


@contextmanager
def _without_caps(config: Any) -> Iterator[None]:
    """Temporarily remove logit caps from a config, because a capped logit is not a sum of parts."""
    capped = [
        (values, name, value)
        for values in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values()
        for name, value in values.to_dict().items()
        if "logit" in name and "cap" in name and "att" not in name and isinstance(value, (int, float)) and value
    ]
    for values, name, _ in capped:
        setattr(values, name, None)
    try:
        yield
    finally:
        for values, name, value in capped:
            setattr(values, name, value)


def _first_alone(module: Any, resolved: Resolved, layer: Layer) -> str:
    """Cut the model down to one layer, the first in the stack that the head reads, and return its name. All layers of
    an encoder before this stack are removed."""
    first = min((g for g in resolved.model.groups if g.stack == layer.stack), key=lambda group: min(group.layers))
    live = live_ffn(module, resolved, Layer(layer.stack, min(first.layers), first.spec))
    encoder = next((g for g in resolved.model.groups if g.stack != layer.stack), None)
    if encoder is not None:
        cut(module, live_ffn(module, resolved, Layer(encoder.stack, min(encoder.layers), encoder.spec)).layer, 0)
    cut(module, live.layer, 1)
    return live.layer


def to_stream(ready: Prepared, vectors: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Carry vectors, parts of the FFN's `outputs` (both [n, d_model]), to the residual stream: Gemma-2 and OLMo-2
    normalise an FFN's output before adding it, Granite scales it.

    Return (the vectors after the norms of their branch, each normalised on its own; their factors [n]). A vector times
    its factor is its part of the residual stream; a factor is NaN if a norm is not a pure scaling.
    """
    block = steps(ready.layer.spec)
    name = ffn_sum(block)
    factors = torch.ones(len(vectors), dtype=torch.float64)
    for step in block[[s.output for s in block].index(name) + 1 :]:
        match step.op:
            case Norm() as op if step.inputs == (name,):
                factors = factors * (divisor(vectors, op) / divisor(outputs, op)).cpu()
                factors = factors * torch.nan if op.bias or op.weigh == "input" else factors
                vectors, outputs = (normed(step, ready.weights, x) for x in (vectors, outputs))
                name = step.output
            case Add(scale=scale) if step.inputs[-1] == name:
                factors = factors * scale
                break
            case _:
                break
    return vectors, factors


def last_norm(resolved: Resolved, layer: Layer, vectors: Tensor, dtype: str | None, device: str) -> Tensor:
    """Apply the last layer's output norm, which the head of a post-norm model (BERT) reads; else return `vectors`."""
    last = max((g for g in resolved.model.groups if g.stack == layer.stack), key=lambda g: max(g.layers))
    if last.spec.norm_position != "post" or last.spec.norm == "none":
        return vectors
    at = Layer(layer.stack, max(last.layers), last.spec)
    stored, step = stored_layer(resolved, at, dtype_of(dtype), device), last.steps[-1]
    return normed(step, stored[0] if stored else {}, vectors) if isinstance(step.op, Norm) else vectors


def normed(step: Step, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of a norm step for the input x."""
    assert isinstance(step.op, Norm)
    return norm(step.op, {name.rpartition(".")[2]: weights[name] for name in step.parameters()}, x)
