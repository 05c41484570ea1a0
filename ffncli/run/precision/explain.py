"""How one value of a weight, of x or of hidden is rounded, and what its error becomes at each step after it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.formats import Format
from ffncli.block.steps import Step
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.run.engine.changes import weight_at
from ffncli.run.engine.execute import Mode, execute
from ffncli.run.explain.place import StepIndex
from ffncli.run.precision.rounding import INPUTS, ExactLayer, for_inputs, is_input, read_in
from ffncli.run.pretrained.what_if import StepChange, step_change
from ffncli.run.quantize.quantized import quantize


@dataclass(frozen=True)
class RoundedValue:
    """A value at `place` (as typed) in a format: `value` is stored as `code` times `scale`, which is `rounded`; `error`
    = rounded − value.

    `tensor` and `index` are the tensor and the index in torch's order. `block` is the position of the value's block
    among the blocks of the tensor, which have `block_shape` values each; `largest` is the block's largest magnitude.
    `code` is the stored bit pattern or integer, `unscaled` what it means before scaling; `scale` is None for formats
    without scales. `steps` says how each later step changes if this value alone is rounded.
    """

    place: str
    format: str
    tensor: str
    index: tuple[int, ...]
    value: float
    block: tuple[int, ...]
    block_shape: tuple[int, ...]
    largest: float
    scale: float | None
    code: int
    unscaled: float
    rounded: float
    error: float
    steps: tuple[StepChange, ...]


def explained_value(
    layer: ExactLayer, read: Mapping[str, Tensor], place: StepIndex, text: str, name: str, form: Format
) -> RoundedValue:
    """Explain the value at a place of a layer, given what its matrices read. Raises FFNError if there is no such value,
    or if the format does not fit."""
    if is_input(place[0]):
        matrix, index = _read(read, place, text)
        tensor, form, within = place[0], for_inputs(form), index
    elif near := did_you_mean(place[0], [*INPUTS], "", cutoff=0.75):
        raise FFNError(f"{option('explain')} {shown(text)}: there is no {place[0]}", near)
    else:
        tensor, index = weight_at(layer.steps, place[0], place[1], option("explain"), text)
        whole = layer.weights[tensor]
        matrix, within = (whole[index[0]], index[1:]) if whole.dim() > 2 else (whole, index)
    within = tuple(i % n for i, n in zip(within, matrix.shape, strict=True))
    try:
        quantized = quantize(matrix, form)
    except FFNError as error:
        raise error.within(text) from None
    at, values = quantized.blocks.at(within), quantized.blocks.split(matrix)
    stored, value = float(quantized.dequantize()[within]), float(matrix[within])
    return RoundedValue(
        text, name, tensor, index, value, at, quantized.blocks.block, float(values[at].abs().max()),
        None if quantized.factors is None else float(quantized.factors[at]), int(quantized.codes[within]),
        float(quantized.values()[within]), stored, stored - value, _changes(layer, tensor, index, stored),
    )  # fmt: skip


def _read(read: Mapping[str, Tensor], place: StepIndex, text: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return what the matrices read under a name as [tokens, channels], and the index in it."""
    (name, index), asked = place, f"{option('explain')} {shown(text)}"
    if name not in read:
        if parts := [other for other in read if other.endswith(f".{name}")]:
            what = f"{asked}: each expert of a mixture rounds its own {name}"
            raise FFNError(what, f"give {parts[0]}[i,j], with a row for each token that it gets")
        raise FFNError(f"{asked}: no matrix reads {name} on this input", did_you_mean(name, [*read], ""))
    x = read[name].flatten(0, -2)
    if len(index) != 2 or not all(-n <= i < n for i, n in zip(index, x.shape, strict=True)):
        raise FFNError(f"{asked}: the index is out of range", f"{name} is {[*x.shape]}")
    return x, index


@torch.no_grad()
def _changes(layer: ExactLayer, tensor: str, index: tuple[int, ...], stored: float) -> tuple[StepChange, ...]:
    """Return the changes of all steps that differ if one value is replaced by its rounded value."""
    weights, now = dict(layer.weights), ""
    if tensor in weights:
        weights[tensor] = weights[tensor].clone()
        weights[tensor][index] = stored

    def linear(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if read_in(now, step) == tensor:
            x = x.clone()
            x.flatten(0, -2)[index] = stored
        return functional.linear(x, weight, bias)

    changes, changed = [], execute(layer.steps, weights, layer.inputs, Mode(linear=linear))
    for event in execute(layer.steps, layer.weights, layer.inputs):
        now = event.name  # the changed run computes the same step next
        changes.append(step_change(now, event.tensor, next(changed).tensor))
    return tuple(change for change in changes if change.changed)
