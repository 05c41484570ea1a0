"""Locate a block's parameters among the tensors of a file or of a model in memory, and report missing and misshapen
tensors.

A file could be misread: `misreadings` lists all other ways of reading its tensors that fit the tensors' shapes equally
well. Each has a descriptive name ("gate and up swapped") and gives the resulting location of each parameter. No values
are read here; `run/verify/checks/layouts.py` computes the effect of each misreading.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Axis, Step, of_norm, parameters, tables, walk
from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.checkpoint import PLAIN, Checkpoint
from ffncli.models.tensors.slices import LayerTensors, StoredSlice, slices

if TYPE_CHECKING:
    from torch import Tensor


_TABLE = ".tid2eid"  # the experts of each token id, in DeepSeek-V4


@dataclass(frozen=True)
class Located:
    """One located canonical parameter: `names` are the full tensor names (one, or one per expert), without the endings
    of a packed matrix's pieces."""

    parameter: str
    axes: tuple[Axis, ...]
    slice: StoredSlice
    names: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        """Return whether this is a table of integers by token id instead of a parameter."""
        return self.axes[0].name == "vocab" and self.parameter == "route.lookup"

    @property
    def output_axis(self) -> int:
        """Return the axis, counted from the end, along which the parts of a stored tensor are joined."""
        return -1 if len(self.axes) == 1 or self.parameter.endswith(".bias") else -2

    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of each tensor on disk."""
        shape = [axis.size for axis in (self.axes[1:] if self.slice.per_expert else self.axes)]
        shape[self.output_axis] *= self.slice.parts
        if self.slice.transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        if self.slice.stacked:
            shape[:2] = [shape[0] * shape[1]]
        return (self.slice.rows, *shape) if self.slice.rows > 1 else tuple(shape)


def locate(layer: LayerTensors, spec: FFNSpec) -> tuple[Located, ...]:
    """Locate every parameter of `spec`, except norms with unknown names. Raises FFNError if a tensor is missing."""
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
    """Locate the block's tables of integers by name alone, since they are not counted as parameters."""
    for table, axes in tables(block).items():
        name = next((n for n in layer.stored if n.startswith(layer.stem) and n.endswith(_TABLE)), None)
        if name is None:
            raise FFNError(f"{layer.where}: no tensor {_TABLE[1:]} under {shown(layer.stem, 120)}", "it lists experts")
        yield Located(table, axes, StoredSlice(name.removeprefix(layer.stem), evidence=f"named {name}"), (name,))


def torn(layer: LayerTensors, spec: FFNSpec) -> bool:
    """Return whether some of the FFN's tensors exist; if so, an absent tensor is missing from the file."""
    norms = _norms(steps(spec))
    tensors = [part.tensor for name, part in _slices(layer, spec).items() if name not in norms]
    return any(_full(layer, tensor).replace("{e}", "0") in layer.stored for tensor in tensors)


def _norms(block: tuple[Step, ...]) -> set[str]:
    return {name for _, step in walk(block) if of_norm(step) for name in step.parameters()}


def _slices(layer: LayerTensors, spec: FFNSpec) -> dict[str, StoredSlice]:
    """Return the layer's slices; slices that it lacks are taken from another layer of its stack."""
    parts = slices(layer, spec)
    if parameters(steps(spec)).keys() <= parts.keys():
        return parts
    alike = layer.alike()
    return (slices(replace(alike, number=layer.number), spec) if alike else {}) | parts


def _located(layer: LayerTensors, parameter: str, axes: tuple[Axis, ...], part: StoredSlice) -> Located:
    full = _full(layer, part.tensor)
    names = tuple(full.replace("{e}", str(e)) for e in range(axes[0].size if part.per_expert else 1))
    first = next((name for name in names if name not in layer.stored), None)
    item = layer.items.get(_inside(part.tensor))
    # the stored tensors of a packed matrix have other names, so its item is counted instead
    if first is not None and (item is None or item.count < len(names) or any(name in layer.stored for name in names)):
        raise FFNError(f"{layer.where}: tensor {shown(first, 120)} is missing", f"it is needed for {parameter}")
    return Located(parameter, axes, part, names)


def _inside(tensor: str) -> str:
    return tensor.replace("expert_{e}", "#").replace("{e}", "#")


def _full(layer: LayerTensors, tensor: str) -> str:
    """Return the full name, with `{e}` left in it."""
    spelled = _inside(tensor)
    full = layer.full.get(spelled, layer.stem + spelled)
    return full.replace("#", "expert_{e}" if "expert_{e}" in tensor else "{e}")


# --- shapes -----------------------------------------------------------------------------------------------------------


def check_shapes(checkpoint: Checkpoint, located: tuple[Located, ...]) -> None:
    """Raise FFNError for a stored shape that contradicts the config's widths. Skips missing shards, and packed formats,
    whose tensors do not have the matrices' shapes."""
    for item in located:
        expected = item.stored_shape()
        for name in item.names:
            if name not in checkpoint.files or not os.path.exists(path := checkpoint.path(name)):
                continue
            info = checkpoint.info(name)
            if info.dtype in PLAIN and squeezed(info.shape) != squeezed(expected):
                raise wrong_shape(path, name, info.shape, item)


def squeezed(shape: Iterable[int]) -> list[int]:
    """Drop axes of size one, since a correction may be [1, experts] and a convolution [out, in, 1]."""
    return [size for size in shape if size != 1]


def wrong_shape(path: Path, name: str, shape: tuple[int, ...], item: Located) -> FFNError:
    """Build the error for a tensor whose shape does not match its parameter."""
    sizes = ", ".join(f"{axis.name} = {axis.size}" for axis in item.axes)
    expected = f"{list(item.stored_shape())} ({sizes})"
    return FFNError(f"{shown_path(path)}: tensor {shown(name, 120)} has shape {list(shape)}, expected {expected}")


def canonical(stored: Tensor, item: Located) -> Tensor:
    """Return a stored tensor as a view of its parameter: oriented, then cut on the output axis."""
    part = item.slice
    shape = item.stored_shape()
    if stored.dim() == len(shape) == 3 and stored.shape[0] > shape[0]:
        stored = stored[: shape[0]]  # in memory, LongCat's identity experts have unused rows
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


Readings = tuple[Located, ...]
_Change = Callable[[Readings], Readings | None]  # None if it does not apply


@dataclass(frozen=True)
class Misreading:
    """A way to misread a file: `name` completes "read with"; `located` is where the parameters would be. `exchanged`
    lists the parameters whose experts axis would be mistaken for another axis."""

    name: str
    located: Readings
    exchanged: tuple[tuple[str, int], ...] = ()


def misreadings(located: Sequence[Located]) -> list[Misreading]:
    """Return every misreading with exactly one mistake that is compatible with the shapes."""
    items = tuple(located)
    single = [Misreading(name, changed) for name, change in _changes(items) if (changed := change(items)) is not None]
    return [*single, *_experts_elsewhere(items)]


def mixed_misreadings(located: Sequence[Located]) -> Iterator[Misreading]:
    """Yield the misreadings with one mistake, then those with two and with three mistakes."""
    items = tuple(located)
    yield from misreadings(items)
    changes = list(_changes(items))
    earlier = {items, *(single for _, change in changes if (single := change(items)) is not None)}
    for several in (2, 3):
        for chosen in combinations(changes, several):
            made: Readings | None = items
            for _, change in chosen:
                made = change(made) if made is not None else None
            if made is not None and made not in earlier:
                earlier.add(made)
                yield Misreading(" and ".join(name for name, _ in chosen), made)


def _changes(items: Readings) -> Iterator[tuple[str, _Change]]:
    """Yield every mistake with its name. Combinations are unordered, so the order of application must not matter."""
    for prefix in ("", "shared."):
        where = f" in the {prefix.rstrip('.')} experts" if prefix else ""
        for one, two in (("gate", "up"), ("up", "down"), ("gate", "down")):
            yield f"{one} and {two} swapped{where}", partial(_swapped, one=prefix + one, two=prefix + two)
    for how, interleaved in (("as halves", True), ("interleaved", False)):
        yield f"gate and up {how}", partial(_regrouped, interleaved=interleaved)
        fused = {item.parameter.startswith("shared.") for item in items if item.slice.parts > 1}
        for shared in (False, True) if len(fused) > 1 else ():
            where = "shared" if shared else "routed"
            yield f"gate and up {how} in the {where} experts", partial(_regrouped, interleaved=interleaved, only=shared)
    square = [item.parameter for item in items if _turned(item) is not None]
    if len(square) > 1:
        yield "all square matrices transposed", partial(_transposed, names=square)
    for name in square:
        yield f"{name.removesuffix('.weight')} transposed", partial(_transposed, names=[name])
    yield "experts sorted by name as text", partial(_sorted_as_text, written=False)
    yield "experts written sorted by name as text", partial(_sorted_as_text, written=True)


def _swapped(items: Readings, one: str, two: str) -> Readings | None:
    """Return the readings with two parameters swapped; None if their matrices differ in size."""
    by, other = {item.parameter: item for item in items}, {one: two, two: one}
    out = []
    for item in items:
        step, _, kind = item.parameter.rpartition(".")
        there = by.get(f"{other.get(step)}.{kind}")
        moved = item if there is None else replace(there, parameter=item.parameter, axes=item.axes)
        if there is not None and moved.stored_shape() != there.stored_shape():
            return None
        out.append(moved)
    return tuple(out) if {f"{one}.weight", f"{two}.weight"} <= by.keys() else None


def _regrouped(items: Readings, interleaved: bool, only: bool | None = None) -> Readings | None:
    """Return readings that take interleaved rows as halves, or halves as interleaved rows; `only` limits this to the
    shared experts (true) or to the other experts (false)."""

    def fused(item: Located) -> bool:
        shared = item.parameter.startswith("shared.")
        return item.slice.parts > 1 and item.slice.interleaved == interleaved and only in (None, shared)

    if not any(map(fused, items)):
        return None
    return tuple(
        replace(item, slice=replace(item.slice, interleaved=not interleaved)) if fused(item) else item for item in items
    )


def _turned(item: Located) -> Located | None:
    """Return the matrix read as its transpose; None if its shape would change."""
    if item.parameter.endswith(".bias") or len(item.axes) < 2 or item.slice.stacked:
        return None
    turned = replace(item, slice=replace(item.slice, transposed=not item.slice.transposed))
    return turned if turned.stored_shape() == item.stored_shape() else None


def _transposed(items: Readings, names: Sequence[str]) -> Readings | None:
    out = [_turned(item) if item.parameter in names else item for item in items]
    return None if None in out else tuple(item for item in out if item is not None)


def _sorted_as_text(items: Readings, written: bool) -> Readings | None:
    """Return readings in which experts.10 comes before experts.2; with `written`, they undo a writer that had sorted
    the experts in this order."""

    def sort(names: tuple[str, ...]) -> tuple[str, ...]:
        order = sorted(names)
        return tuple(names[order.index(name)] for name in names) if written else tuple(order)

    out = [replace(item, names=sort(item.names)) if item.slice.per_expert else item for item in items]
    return tuple(out) if tuple(out) != items else None


def _experts_elsewhere(items: Readings) -> Iterator[Misreading]:
    """Yield misreadings that take the experts axis of a tensor with all experts for another axis of that length."""
    together = [item for item in items if item.axes[0].name == "experts" and len(item.axes) == 3]
    together = [item for item in together if not item.slice.per_expert and not item.slice.stacked]
    for width in ("d_model", "d_ff", "latent"):
        exchanged = [
            (item.parameter, at)
            for item in together
            for at, axis in enumerate(item.axes)
            if axis.name == width and axis.size == item.axes[0].size and (item.slice.parts == 1 or at == 2)
        ]
        if exchanged:
            yield Misreading(f"the experts axis mistaken for {width}", items, tuple(exchanged))
