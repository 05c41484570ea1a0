"""From a request to a runnable layer: its steps, weights, inputs and mode."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.block.recipe import final_layer, route_of, steps
from ffncli.block.steps import (
    Dropout,
    Step,
    block_inputs,
    feature_axis,
    ffn_span,
    ffn_steps,
    id_inputs,
    input_shapes,
    of_norm,
    parameters,
    state_inputs,
    tables,
    walk,
)
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.models.examples import Example
from ffncli.models.model import Layer, Resolved
from ffncli.models.runnable import require_runnable
from ffncli.run.engine.execute import Mode
from ffncli.run.engine.inputs import InputSource, make_input
from ffncli.run.engine.weights import located_weights, packed_formats, random_weights, read_located, require_memory
from ffncli.system.gpu import use_device

RANDOM = "random weights"


@dataclass(frozen=True)
class LayerRequest:
    """The choices of a run. None means the source's default: its example's input and mask, 4 tokens, fp32, eval.

    `vocab` adds a final layer of that width after the block; its weights are random.
    """

    layer: int | str | None = None
    input: InputSource | None = None
    leading: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str = "cpu"
    seed: int | None = None
    train: bool | None = None
    vocab: int | None = None


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


def prepare(resolved: Resolved, request: LayerRequest = LayerRequest(), example: Example | None = None) -> Prepared:
    """Weights first, then inputs, from one generator seeded with `request.seed` (0): so torch users can reproduce it.

    Raises FFNError for an impossible layer, dtype, device or input.
    """
    layer = resolved.model.layer(request.layer)
    block = steps(layer.spec) if example is None or example.block is None else example.block
    dtype, device = dtype_of(request.dtype), device_of(request.device)
    require_runnable(resolved)
    generator = torch.Generator().manual_seed(request.seed or 0)
    notes: list[str] = []
    weights, origin, doubts = _weights(resolved, layer, block, example, generator, dtype, device)
    block, lost = steps_with_weights(block, weights)
    notes += [*doubts, *lost]
    if resolved.from_tensors and not resolved.model.model_type and layer.spec.moe:
        notes.append("assumed, because the files do not say: softmax over all experts, the chosen weights normalised")
    if example and example.weights and not _fits(example, block):
        notes.append("the example's weights do not fit these dimensions: random weights instead")
    layer_steps = block
    if (vocab := request.vocab or (example.vocab if example else 0)) and block[-1].output != "probs":
        final = final_layer(block[-1].output, layer.spec.d_model, vocab, bool(layer.spec.bias))
        weights = {**weights, **random_weights(final, generator, dtype, device)}
        block = (*block, *final)
        origin += "" if "random" in origin else f"; the final layer's are random, seed {generator.initial_seed()}"
    leading = request.leading or (example.shape[:-1] if example and request.input is None else None)
    default = example.input if example else "randn"
    given = default if request.input is None else request.input
    _require_working_memory(prod(leading or (4,)), block, dtype)
    names = block_inputs(block)
    first = make_input(given, leading, layer.spec.d_model, dtype, generator).to(device)
    _require_working_memory(prod(first.shape[:-1]), block, dtype)  # a file may have more tokens than expected
    if example and request.input is None:
        first = _example_input(example, first)
    inputs = {names[0]: first}
    for name, vocab in id_inputs(block).items():
        inputs[name] = torch.arange(prod(first.shape[:-1]), device=device).reshape(*first.shape[:-1], 1) % vocab
        notes.append(f"'{name}', which choose the experts, are 0, 1, 2, ...; with a prompt they are its own")
    for name, shape in input_shapes(block, tuple(first.shape[:-1])).items():  # what other parts of a model compute
        if name in inputs:
            continue
        inputs[name] = torch.randn(shape, generator=generator).to(device, dtype)
        of = "router in the layer before" if name in state_inputs(block) else "layer's other branch"
        notes.append(f"'{name}', the output of the {of}, is random")
    train = bool(example and example.dropped) if request.train is None else request.train
    if request.train and not any(isinstance(step.op, Dropout) for _, step in walk(block)):
        notes.append("--train has no effect: the block has no dropout")
    mode = Mode(train, _masks(example, request, layer_steps, first), generator)
    return Prepared(layer, block, weights, inputs, mode, origin, tuple(notes))


def _require_working_memory(tokens: int, block: tuple[Step, ...], dtype: torch.dtype) -> None:
    """FFNError if memory is too small for two of the widest intermediates at once and three tensors of d_model."""
    axis = feature_axis(block)
    widest = max(axis.size for axes in parameters(block).values() for axis in axes)
    size = tokens * (2 * widest + 3 * (axis.size if axis else widest)) * dtype.itemsize
    require_memory(size, "the input and its intermediates", "give fewer tokens")


def steps_with_weights(
    block: tuple[Step, ...], weights: Mapping[str, Tensor]
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """(the steps that have weights, notes): the block, or its rest without the norms that have no weights.

    Without the norm before the FFN only the FFN remains, because its input would be that norm's output.
    """
    lost = [s.output for s in block if of_norm(s) and s.parameters().keys() - weights.keys()]
    if not lost:
        return block, ()
    start, end = ffn_span(block)
    names = [step.output for step in block]
    if {*lost} & {*names[: names.index(start) + 1 if start in names else 0]}:
        where = f"the trace begins at ffn_input, which is '{start}', and ends at ffn_output"
        return ffn_steps(block), (f"this file does not describe the norm before the FFN: {where}",)
    where = f"the trace ends at ffn_output, which is '{end}'"
    return block[: names.index(end) + 1], (f"this file does not describe the norm after the FFN: {where}",)


def _weights(
    resolved: Resolved, layer: Layer, block: tuple[Step, ...], example: Example | None, generator: torch.Generator,
    dtype: torch.dtype, device: str,
) -> tuple[Mapping[str, Tensor], str, tuple[str, ...]]:  # fmt: skip
    """(the weights, where they come from, what was assumed about them)."""
    if example and _fits(example, block):
        exact = {name: torch.tensor(values, dtype=torch.float64) for name, values in example.weights.items()}
        return {name: tensor.to(device, dtype) for name, tensor in exact.items()}, "fixed weights", ()
    if resolved.weights is not None:
        tensors = resolved.weights[layer.stack, layer.index]
        return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}, "the module's own weights", ()
    stored = stored_layer(resolved, layer, dtype, device)
    if stored is not None:
        return stored
    return random_weights(block, generator, dtype, device), f"{RANDOM}, seed {generator.initial_seed()}", ()


def stored_layer(
    resolved: Resolved, layer: Layer, dtype: torch.dtype, device: str
) -> tuple[Mapping[str, Tensor], str, tuple[str, ...]] | None:
    """(one layer's weights from the model's files, their origin, what was assumed about them); None without files."""
    located = located_weights(resolved, layer)
    if located is None or resolved.checkpoint is None:
        return None
    assumed = tuple(dict.fromkeys(item.slice.assumed for item in located if item.slice.assumed))
    doubts = tuple(f"assumed, because the files do not say: {text}" for text in assumed)
    packed = " and ".join(packed_formats(located))
    origin = f"weights of {layer.stack} layer {layer.index}" + (f", unpacked from {packed}" if packed else "")
    weights = read_located(resolved.checkpoint, located, dtype, device, resolved.quantization)
    for name in tables(steps(layer.spec)):
        least, most, experts = int(weights[name].min()), int(weights[name].max()), route_of(layer.spec).experts.size
        if not 0 <= least <= most < experts:
            what = f"{shown(resolved.source)}: the table of {layer.stack} layer {layer.index} lists experts {least} to"
            raise FFNError(f"{what} {most}", f"the layer has experts 0 to {experts - 1}")
    return weights, origin, doubts


def _example_input(example: Example, first: Tensor) -> Tensor:
    """The random input, with the example's values in place."""
    if example.scale == 1 and not example.given:
        return first
    out = first * example.scale
    for (token, unit), value in example.given.items():
        out.flatten(0, -2)[token, unit] = value
    return out


def _fits(example: Example, block: tuple[Step, ...]) -> bool:
    """Whether the example's weights are exactly the block's parameters, shapes included."""
    shapes = {name: tuple(torch.tensor(values).shape) for name, values in example.weights.items()}
    return shapes == {name: tuple(axis.size for axis in axes) for name, axes in parameters(block).items()}


def _masks(example: Example | None, request: LayerRequest, block: tuple[Step, ...], first: Tensor) -> dict[str, Tensor]:
    """The example's own dropout masks, if probability, input and seed are the example's too."""
    if not example or request.seed is not None or tuple(first.shape) != example.shape:
        return {}
    spec = example.model.model.main.spec
    masks: dict[str, Tensor] = {}
    for step in block:
        if step.output in example.dropped and step.op == Dropout(spec.dropout) and _fits(example, block):
            keep = torch.ones(*example.shape[:-1], spec.d_ff, dtype=torch.bool)
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
