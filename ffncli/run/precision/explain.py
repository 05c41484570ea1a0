"""How one value of a weight, of x or of hidden is rounded, and what its error becomes at each step after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.formats import Format
from ffncli.block.steps import Experts, Step
from ffncli.errors import FFNError, option, shown
from ffncli.run.engine.changes import weight_at
from ffncli.run.engine.execute import Mode, execute
from ffncli.run.explain.place import StepIndex
from ffncli.run.precision.rounding import INPUTS, ExactLayer, for_inputs, read_by
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
    layer: ExactLayer, read: Mapping[str, Sequence[Tensor]], place: StepIndex, text: str, name: str, form: Format
) -> RoundedValue:
    """Explain the value at a place of a layer, given what its matrices read. Raises FFNError if there is no such value,
    or if the format does not fit."""
    if place[0] in INPUTS:
        matrix, index = _read(layer, read, place, text)
        tensor, form, within = place[0], for_inputs(form), index
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


def _read(
    layer: ExactLayer, read: Mapping[str, Sequence[Tensor]], place: StepIndex, text: str
) -> tuple[Tensor, tuple[int, ...]]:
    """Return what the matrices read as [tokens, channels], and the index in it."""
    name, index = place
    if any(isinstance(step.op, Experts) for step in layer.steps):
        what = f"{option('explain', text)}: each expert of a mixture rounds its own {name}"
        raise FFNError(what, "explain a weight, such as experts.0.W1[0,3]")
    x = read[name][0].flatten(0, -2)
    if len(index) != 2 or not all(-n <= i < n for i, n in zip(index, x.shape, strict=True)):
        raise FFNError(f"{option('explain')} {shown(text)}: the index is out of range", f"{name} is {[*x.shape]}")
    return x, index


@torch.no_grad()
def _changes(layer: ExactLayer, tensor: str, index: tuple[int, ...], stored: float) -> tuple[StepChange, ...]:
    """Return the changes of all steps that differ if one value is replaced by its rounded value."""
    weights = dict(layer.weights)
    if tensor not in INPUTS:
        weights[tensor] = weights[tensor].clone()
        weights[tensor][index] = stored

    def linear(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if read_by(step) == tensor:
            x = x.clone()
            x.flatten(0, -2)[index] = stored
        return functional.linear(x, weight, bias)

    old, new = (
        execute(layer.steps, layer.weights, layer.inputs),
        execute(layer.steps, weights, layer.inputs, Mode(linear=linear)),
    )
    changes = (step_change(a.name, a.tensor, b.tensor) for a, b in zip(old, new, strict=True) if a.expert is None)
    return tuple(change for change in changes if change.changed)
