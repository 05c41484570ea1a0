"""A layer ready to run: its steps, weights, inputs and mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.block.recipe import final_layer
from ffncli.block.steps import Dropout, Step, walk
from ffncli.errors import option
from ffncli.models.model import Layer, Resolved
from ffncli.models.runnable import require_runnable
from ffncli.run.engine.execute import Mode
from ffncli.run.engine.inputs import InputSource, block_tensors
from ffncli.run.engine.weights import fits, layer_weights, random_weights
from ffncli.system.gpu import use_device


@dataclass(frozen=True)
class Token:
    """One token of a model's input. `text` is None without a tokenizer."""

    position: int
    id: int
    text: str | None = None


@dataclass(frozen=True)
class Prepared:
    """Everything `trace` needs. `layer` is the chosen one; `origin` says where the weights come from.

    If a model was run to get the input, `tokens` are the selected tokens, one per row of the flattened input, and
    `reference` is the output of the model's own FFN for them, shaped as ffn_output, and `stream` [tokens, d_model] the
    residual stream after the layer.
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
) -> Prepared:
    """A layer of a model, ready to run. None is the default: an example's input and mask, else 4 tokens, fp32, eval.

    Weights are drawn first, then inputs, from one generator seeded with `seed` (0): so torch users can reproduce them.
    `vocab` adds a final layer of that width with random weights. Raises FFNError for an impossible layer, dtype, device
    or input.
    """
    layer = layer if isinstance(layer, Layer) else resolved.model.layer(layer)
    example, computed, device = resolved.example, dtype_of(dtype), device_of(device)
    require_runnable(resolved)
    generator = torch.Generator().manual_seed(seed or 0)
    weights = layer_weights(resolved, layer, generator, computed, device)
    block, tensors, origin = weights.steps, weights.tensors, weights.origin
    vocab = vocab or (example.vocab if example else 0)
    if vocab and block[-1].output != "probs":
        final = final_layer(block[-1].output, layer.spec.d_model, vocab, bool(layer.spec.bias))
        tensors = {**tensors, **random_weights(final, generator, computed, device)}
        block = (*block, *final)
        origin += "" if "random" in origin else f"; the final layer's are random, seed {generator.initial_seed()}"
    inputs, notes = block_tensors(block, layer.spec.d_model, input, leading, example, generator, computed, device)
    notes = (*weights.notes, *notes)
    if train and not any(isinstance(step.op, Dropout) for _, step in walk(block)):
        notes += (f"{option('train', True)} has no effect: the block has no dropout",)
    masks = {} if seed is not None else _masks(resolved, layer, weights.steps, next(iter(inputs.values())))
    on = bool(example and example.dropped) if train is None else train
    return Prepared(layer, block, tensors, inputs, Mode(on, masks, generator), origin, notes)


def _masks(resolved: Resolved, layer: Layer, block: tuple[Step, ...], first: Tensor) -> dict[str, Tensor]:
    """The example's own dropout masks, if weights, probability and input are the example's too."""
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
    """torch's dtype of a name (None: fp32). Raises FFNError for an unknown name."""
    torch_dtype: torch.dtype = getattr(torch, dtypes.dtype("fp32" if text is None else text).torch)
    return torch_dtype


def device_of(text: str) -> str:
    """`cpu`, `cuda` or `cuda:1`, now the current device. Raises FFNError (exit 3) if torch cannot compute there."""
    return use_device(text, torch)
