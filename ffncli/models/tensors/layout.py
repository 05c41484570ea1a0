"""Where every parameter of a block is among the tensors of a file, or of a model in memory, and its canonical view.

`slices` describes how a layer's tensors are read; here their names are looked up, and a missing tensor, or one of
another shape than its parameter needs, is reported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Axis, Step, of_norm, parameters, tables, walk
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.checkpoint import PLAIN, Checkpoint
from ffncli.models.tensors.slices import LayerTensors, StoredSlice, slices

if TYPE_CHECKING:
    from torch import Tensor

_TABLE = ".tid2eid"  # the experts of each token id, in DeepSeek-V4


@dataclass(frozen=True)
class Located:
    """One located canonical parameter: `names` are the full tensor names (one, or one per expert).

    Names are logical: a packed matrix's name has no endings of its pieces.
    """

    parameter: str
    axes: tuple[Axis, ...]
    slice: StoredSlice
    names: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        """Whether it holds integers: a table of token ids, not a parameter."""
        return self.axes[0].name == "vocab" and self.parameter == "route.lookup"

    @property
    def output_axis(self) -> int:
        """Which axis, counted from the end, the parts of a stored tensor share: rows of a matrix, a bias's only one."""
        return -1 if len(self.axes) == 1 or self.parameter.endswith(".bias") else -2

    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each tensor on disk."""
        shape = [axis.size for axis in (self.axes[1:] if self.slice.per_expert else self.axes)]
        shape[self.output_axis] *= self.slice.parts
        if self.slice.transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        if self.slice.stacked:
            shape[:2] = [shape[0] * shape[1]]
        return (self.slice.rows, *shape) if self.slice.rows > 1 else tuple(shape)


def locate(layer: LayerTensors, spec: FFNSpec) -> tuple[Located, ...]:
    """Where every parameter of `spec` is; norms whose tensors are not known are left out.

    Raises FFNError naming the first missing tensor.
    """
    block = steps(spec)
    norms, parts = _norms(block), _slices(layer, spec)
    if not parts.keys() - norms:
        kind = "experts" if spec.moe else "FFN tensors"
        checkpoint = f"a {layer.family} checkpoint" if layer.family else "this checkpoint"
        advice = f"drop the option that needs them if {checkpoint} has no such layers; otherwise, is the file complete?"
        raise FFNError(f"{layer.where}: no {kind} under {shown(layer.stem, 120)}", advice)
    out: list[Located] = []
    for parameter, axes in parameters(block).items():
        if parameter in parts:
            out.append(_located(layer, parameter, axes, parts[parameter]))
        elif parameter not in norms:
            raise FFNError(
                f"{layer.where}: no tensor under {shown(layer.stem, 120)} is known to contain {parameter}",
                "`ffn params` counts the tensors in the file",
            )
    return (*out, *_tables(layer, block))


def _tables(layer: LayerTensors, block: tuple[Step, ...]) -> Iterator[Located]:
    """Where the block's tables of integers are: by name alone, since no count knows them."""
    for table, axes in tables(block).items():
        name = next((n for n in layer.stored if n.startswith(layer.stem) and n.endswith(_TABLE)), None)
        if name is None:
            raise FFNError(f"{layer.where}: no tensor {_TABLE[1:]} under {shown(layer.stem, 120)}", "it lists experts")
        yield Located(table, axes, StoredSlice(name.removeprefix(layer.stem), evidence=f"named {name}"), (name,))


def torn(layer: LayerTensors, spec: FFNSpec) -> bool:
    """Whether some of the FFN's tensors exist, so that an absent one is missing rather than another model's."""
    norms = _norms(steps(spec))
    tensors = [part.tensor for name, part in _slices(layer, spec).items() if name not in norms]
    return any(_full(layer, tensor).replace("{e}", "0") in layer.stored for tensor in tensors)


def _norms(block: tuple[Step, ...]) -> set[str]:
    return {name for _, step in walk(block) if of_norm(step) for name in step.parameters()}


def _slices(layer: LayerTensors, spec: FFNSpec) -> dict[str, StoredSlice]:
    """The layer's slices; any that it lacks as in another layer of its stack."""
    parts = slices(layer, spec)
    if parameters(steps(spec)).keys() <= parts.keys():
        return parts
    alike = layer.alike()
    return (slices(replace(alike, number=layer.number), spec) if alike else {}) | parts


def _located(layer: LayerTensors, parameter: str, axes: tuple[Axis, ...], part: StoredSlice) -> Located:
    """Raises FFNError if the tensor, or one expert's tensor, is missing; a packed one has other names."""
    full = _full(layer, part.tensor)
    names = tuple(full.replace("{e}", str(e)) for e in range(axes[0].size if part.per_expert else 1))
    first = next((name for name in names if name not in layer.stored), None)
    item = layer.items.get(_inside(part.tensor))
    if first is not None and (item is None or item.count < len(names) or any(name in layer.stored for name in names)):
        raise FFNError(f"{layer.where}: tensor {shown(first, 120)} is missing", f"it is needed for {parameter}")
    return Located(parameter, axes, part, names)


def _inside(tensor: str) -> str:
    return tensor.replace("expert_{e}", "#").replace("{e}", "#")


def _full(layer: LayerTensors, tensor: str) -> str:
    """The whole name, with `{e}` left in it."""
    spelled = _inside(tensor)
    full = layer.full.get(spelled, layer.stem + spelled)
    return full.replace("#", "expert_{e}" if "expert_{e}" in tensor else "{e}")


# --- shapes -----------------------------------------------------------------------------------------------------------


def check_shapes(checkpoint: Checkpoint, located: tuple[Located, ...]) -> None:
    """Raises FFNError if a stored shape contradicts the config's widths; missing shards are skipped.

    Tensors of packed formats are skipped too: their shapes differ from the matrices'.
    """
    for item in located:
        expected = item.stored_shape()
        for name in item.names:
            if name not in checkpoint.files or not os.path.exists(path := checkpoint.path(name)):
                continue
            info = checkpoint.info(name)
            if info.dtype in PLAIN and squeezed(info.shape) != squeezed(expected):
                raise wrong_shape(path, name, info.shape, item)


def squeezed(shape: Iterable[int]) -> list[int]:
    """A shape without its axes of size one: a correction may be [1, experts], a convolution [out, in, 1]."""
    return [size for size in shape if size != 1]


def wrong_shape(path: Path, name: str, shape: tuple[int, ...], item: Located) -> FFNError:
    """The error for a tensor that does not have the shape that its parameter needs."""
    sizes = ", ".join(f"{axis.name} = {axis.size}" for axis in item.axes)
    expected = f"{list(item.stored_shape())} ({sizes})"
    return FFNError(f"{shown_path(path)}: tensor {shown(name, 120)} has shape {list(shape)}, expected {expected}")


def canonical(stored: Tensor, item: Located) -> Tensor:
    """The canonical view of a stored tensor: orientation first, then this parameter's share of the output axis."""
    part = item.slice
    shape = item.stored_shape()
    if stored.dim() == len(shape) == 3 and stored.shape[0] > shape[0]:
        stored = stored[: shape[0]]  # in memory LongCat's identity experts have unused rows
    stored = stored.reshape(shape)
    if part.rows > 1:
        return stored[0]
    if part.stacked:
        stored = stored.reshape(item.axes[0].size, -1, stored.shape[-1])
    if part.transposed:
        stored = stored.transpose(-1, -2)
    if part.parts == 1:
        return stored
    axis = item.output_axis
    if part.interleaved:
        index = [slice(None)] * stored.dim()
        index[axis] = slice(part.part, None, part.parts)
        return stored[tuple(index)]
    width = stored.shape[axis] // part.parts
    return stored.narrow(axis, part.part * width, width)
