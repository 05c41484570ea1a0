"""Preparing a layer to run (its steps, weights, inputs and mode), and describing the block that ran."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.block.recipe import final_layer
from ffncli.block.steps import Dropout, Linear, Route, Step, walk
from ffncli.errors import option
from ffncli.models.model import Layer, Resolved, require_runnable
from ffncli.run.engine.execute import Mode, execute
from ffncli.run.engine.inputs import InputSource, block_tensors
from ffncli.run.engine.weights import RANDOM, fits, layer_weights, random_weights, small_integers
from ffncli.system.gpu import use_device


@dataclass(frozen=True)
class Token:
    """One token of a model's input. `text` is None if there is no tokenizer."""

    position: int
    id: int
    text: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A layer that is ready to run. `layer` is the chosen layer; `origin` describes the source of the weights.

    If a model was run to compute the input, `tokens` are the selected tokens, one per row of the flattened input;
    `reference` is the output of the model's own FFN for these tokens, with the shape of ffn_output; `stream` [tokens,
    d_model] is the residual stream after the layer.
    """

    layer: Layer
    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    mode: Mode
    origin: str
    notes: tuple[str, ...]
    tokens: tuple[Token, ...] = ()
    reference: Tensor | None = None
    stream: Tensor | None = None


def prepare(
    resolved: Resolved,
    layer: Layer | int | str | None = None,
    *,
    input: InputSource | None = None,
    leading: tuple[int, ...] | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    train: bool | None = None,
    vocab: int | None = None,
    integers: bool = False,
) -> Prepared:
    """Prepare a layer of a model to run. By default, an example runs on its own input, and in train mode if it has a
    dropout mask; any other model runs on 4 tokens, in eval mode. The default dtype is fp32.

    Weights are drawn first, then inputs, from one generator seeded with `seed` (default 0), so torch users can
    reproduce them. `vocab` adds a final layer of that width with random weights. `integers` draws both from -3 to 3,
    again and again until every choice of experts is clear.
    """
    layer = layer if isinstance(layer, Layer) else resolved.model.layer(layer)
    example, computed, device = resolved.example, dtype_of(dtype), device_of(device)
    require_runnable(resolved)
    generator = torch.Generator().manual_seed(seed or 0)
    steps, tensors, origin, assumed = layer_weights(resolved, layer, generator, computed, device, integers)
    block = steps
    vocab = vocab or (example.vocab if example else 0)
    if vocab and block[-1].output != "probs":
        final = final_layer(block[-1].output, layer.spec.d_model, vocab, bool(layer.spec.bias))
        tensors = {**tensors, **random_weights(final, generator, computed, device)}
        block = (*block, *final)
        origin += (
            "" if "random" in origin else f"; the final layer's weights are random, seed {generator.initial_seed()}"
        )
    if integers and input is None:
        first = leading or (example.shape[:-1] if example else (4,))
        input = _different_rows((*first, layer.spec.d_model), generator)
    inputs, notes = block_tensors(block, layer.spec.d_model, input, leading, example, generator, computed, device)
    for _ in range(_MOST_DRAWS if integers else 0):
        if not _is_tied(block, tensors, inputs):
            break
        tensors = layer_weights(resolved, layer, generator, computed, device, integers)[1]
    notes = (*assumed, *notes)
    if train and not any(isinstance(step.op, Dropout) for _, step in walk(block)):
        notes += (f"{option('train', True)} has no effect: the block has no dropout",)
    masks = {} if seed is not None else _masks(resolved, layer, steps, next(iter(inputs.values())))
    on = bool(example and example.dropped) if train is None else train
    return Prepared(layer, block, tensors, inputs, Mode(on, masks, generator), origin, notes)


_MOST_DRAWS = 1000


def _different_rows(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw small integers, again and again until no two tokens are equal."""
    for _ in range(_MOST_DRAWS):
        rows = small_integers(shape, 0, generator)
        if len({*map(tuple, rows.flatten(0, -2).tolist())}) == rows[..., 0].numel():
            break
    return rows


def _is_tied(steps: tuple[Step, ...], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> bool:
    """Return True if the last expert that a token goes to and the first that it does not go to have the same logit."""
    routes = {step.inputs[0]: step.op.top_k for step in steps if isinstance(step.op, Route)}
    for event in execute(steps, weights, inputs, keep=frozenset(routes)) if routes else ():
        if (top := routes.get(event.name)) and top < event.tensor.shape[-1]:
            ordered = event.tensor.sort(-1, descending=True).values
            if bool((ordered[..., top - 1] == ordered[..., top]).any()):
                return True
    return False


def _masks(resolved: Resolved, layer: Layer, block: tuple[Step, ...], first: Tensor) -> dict[str, Tensor]:
    """Return the example's dropout masks if the weights, the probability and the input shape are also the example's."""
    example = resolved.example
    if example is None or tuple(first.shape) != example.shape or not fits(example, block):
        return {}
    masks: dict[str, Tensor] = {}
    for step in block:
        if step.output in example.dropped and step.op == Dropout(example.dropout):
            keep = torch.ones(*example.shape[:-1], layer.spec.d_ff, dtype=torch.bool)
            for token, unit in example.dropped[step.output]:
                keep.flatten(0, -2)[token, unit] = False
            masks[step.output] = keep.to(first.device)
    return masks


def dtype_of(text: str | None) -> torch.dtype:
    """Return the torch dtype for a name (None: fp32)."""
    torch_dtype: torch.dtype = getattr(torch, dtypes.dtype("fp32" if text is None else text).torch)
    return torch_dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return ffncli's name of a dtype, such as `bf16`; torch's own name if ffncli has none."""
    row = dtypes.find(str(dtype))
    return row.name if row else str(dtype).removeprefix("torch.")


def device_of(text: str) -> str:
    """Make `cpu`, `cuda` or `cuda:1` the current device; raise FFNError (exit 3) if torch cannot compute on it."""
    return use_device(text, torch)


@dataclass(frozen=True)
class BlockSummary:
    """A description of a block, as under the key `block` in docs/commands/trace.md. For a final layer alone, `d_ff`,
    `activation`, `gated` and `norm` are None."""

    name: str
    source: str
    layer: int | None
    stack: str | None
    d_model: int
    d_ff: int | None
    activation: str | None
    gated: bool | None
    bias: bool
    vocab: int | None
    weights: str
    mode: str
    mask: str | None
    device: str
    evidence: tuple[str, ...]
    random_weights: bool
    norm: str | None
    experts: int
    top_k: int
    shared_experts: int


def block_summary(resolved: Resolved, ready: Prepared, device: str) -> BlockSummary:
    """Summarise a layer that was prepared to run on a device."""
    spec = ready.layer.spec
    alone, moe = ready.steps[0].output == "logits", spec.moe  # `alone`: a final layer without a block
    return BlockSummary(
        name=resolved.model.name
        if resolved.model.bare
        else f"{resolved.model.name}, {ready.layer.stack} layer {ready.layer.index}",
        source=resolved.source,
        layer=None if resolved.model.bare else ready.layer.index,
        stack=None if resolved.model.bare else ready.layer.stack,
        d_model=spec.d_model,
        d_ff=None if alone else spec.d_ff,
        activation=None if alone else spec.activation,
        gated=None if alone else spec.gated,
        bias=bool(spec.bias),
        vocab=next((s.op.out.size for s in ready.steps if s.output == "logits" and isinstance(s.op, Linear)), None),
        weights=ready.origin,
        mode="train" if ready.mode.train else "eval",
        mask=_mask(ready),
        device=device,
        evidence=_evidence(resolved, ready.layer),
        random_weights=ready.origin.startswith(RANDOM),
        norm=None if alone or spec.norm == "none" else spec.norm,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        shared_experts=moe.shared_experts if moe else 0,
    )


def _evidence(model: Resolved, layer: Layer) -> tuple[str, ...]:
    """Return the evidence for the model, with cited tensor names replaced by the corresponding names of this layer."""
    spot = model.spots.get((layer.stack, layer.index))
    if spot is None or model.checkpoint is None:
        return tuple(model.evidence)
    files = model.checkpoint.files
    cited = re.compile(rf"'({re.escape(spot.prefix)}\.)\d+(\.[^']+)'")

    def of_this_layer(match: re.Match[str]) -> str:
        name = f"{match[1]}{spot.layer}{match[2]}"
        return f"'{name}'" if name in files else match[0]

    return tuple(cited.sub(of_this_layer, text) for text in model.evidence)


def _mask(ready: Prepared) -> str | None:
    """Return the origin of the masks of active dropouts; None if no dropout is active."""
    dropouts = [s.output for _, s in walk(ready.steps) if isinstance(s.op, Dropout)] if ready.mode.train else []
    if not dropouts:
        return None
    if all(name in ready.mode.masks for name in dropouts):
        return "the notebook's"
    return f"drawn, seed {0 if ready.mode.generator is None else ready.mode.generator.initial_seed()}"
