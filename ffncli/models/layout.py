"""Where every parameter of a block lies among the tensors of a file, or of a model in memory, and its canonical view.

How a layer's tensors are read is `pieces`; here their names are held to what is there, and what is missing is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Axis, Norm, parameters
from ffncli.errors import FFNError, shown
from ffncli.models.arrangement import outside
from ffncli.models.matrices import Item
from ffncli.models.model import Spot
from ffncli.models.pieces import Held as Held
from ffncli.models.pieces import Names as Names
from ffncli.models.pieces import Piece as Piece
from ffncli.models.pieces import Reading, pieces
from ffncli.models.recognise import inside

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Located:
    """One canonical parameter found: `names` are the full tensor names (one, or one per expert).

    Names are those of the tensors as the model means them: a packed matrix's without the endings of its pieces; its
    `format` is how it is stored (`F32`, `gptq-4bit`). `evidence` says by what the piece is read as it is, `assumed`
    what of that nothing in the file or its family says, so that the usual was taken.
    """

    parameter: str
    axes: tuple[Axis, ...]
    piece: Piece
    names: tuple[str, ...]
    format: str = ""
    evidence: str = ""
    assumed: str = ""

    @property
    def output_axis(self) -> int:
        """Which axis, counted from the end, the parts of a stored tensor share: rows of a matrix, a bias's only one."""
        return -1 if len(self.axes) == 1 or self.parameter.endswith(".bias") else -2

    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each tensor on disk."""
        shape = [axis.size for axis in (self.axes[1:] if self.piece.per_expert else self.axes)]
        shape[self.output_axis] *= self.piece.parts
        if self.piece.transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        if self.piece.stacked:
            shape[:2] = [shape[0] * shape[1]]
        return tuple(shape)


def held(items: Mapping[str, Item], stem: str, beyond: Mapping[str, str]) -> Held:
    """The layer whose names begin with `stem`; `beyond` as `beyond` gives it."""
    full = inside(items, stem)
    for begin, name in beyond.items():
        full |= {name + whole.removeprefix(begin): whole for whole in items if whole.startswith(begin)}
    return Held(stem, {rest: items[whole] for rest, whole in full.items()}, full)


def beyond(model_type: str, spot: Spot) -> dict[str, str]:
    """What the names of a layer's norms begin with that lie outside of it → the same as `Held` has it."""
    parent = spot.prefix.rpartition(".")[0]
    return {f"{parent}.{name[3:].format(i=spot.layer)}.".lstrip("."): f"{name}." for name in outside(model_type)}


def locate(names: Names, spec: FFNSpec) -> tuple[Located, ...]:
    """Where every parameter of `spec` lies; norms whose tensors are not known are left out.

    Raises FFNError naming the first tensor that is not there.
    """
    wanted = parameters(steps(spec))
    norms = {name for step in steps(spec) if isinstance(step.op, Norm) for name in step.parameters()}
    found = _found(names, spec)
    if not found.keys() - norms:
        kind = "experts" if spec.moe else "FFN tensors"
        known = f"a {names.family} checkpoint" if names.family else "this checkpoint"
        advice = f"drop the option that asks for them, if {known} has no such layers; else: is the file whole?"
        raise FFNError(f"{names.where}: no {kind} under {shown(names.here.stem, 120)}", advice)
    out: list[Located] = []
    for parameter, axes in wanted.items():
        if parameter in found:
            out.append(_located(names, parameter, axes, found[parameter]))
        elif parameter not in norms:
            raise FFNError(
                f"{names.where}: no tensor under {shown(names.here.stem, 120)} is known to hold {parameter}",
                "`ffn params` counts what is there",
            )
    return tuple(out)


def torn(names: Names, spec: FFNSpec) -> bool:
    """Whether some of the FFN's tensors are there, so that one that is not is missing, not another model's."""
    norms = {name for step in steps(spec) if isinstance(step.op, Norm) for name in step.parameters()}
    pieces = [found.piece for name, found in _found(names, spec).items() if name not in norms]
    return any(_full(names, piece.tensor).replace("{e}", "0") in names.stored for piece in pieces)


def _found(names: Names, spec: FFNSpec) -> dict[str, Reading]:
    """The layer's own pieces; what it lacks, as another layer of its stack has it."""
    found = pieces(names.here, names, spec)
    if parameters(steps(spec)).keys() <= found.keys():
        return found
    alike = names.alike()
    return (pieces(alike, names, spec) if alike else {}) | found


def _located(names: Names, parameter: str, axes: tuple[Axis, ...], found: Reading) -> Located:
    """Raises FFNError where the tensor, or that of one expert, is not there; a packed one has other names."""
    full, inside = _full(names, found.piece.tensor), _inside(found.piece.tensor)
    whole = tuple(full.replace("{e}", str(e)) for e in range(axes[0].size if found.piece.per_expert else 1))
    first = next((name for name in whole if name not in names.stored), None)
    item = names.here.items.get(inside)
    if first is not None and (item is None or item.count < len(whole) or any(name in names.stored for name in whole)):
        raise FFNError(f"{names.where}: tensor {shown(first, 120)} is missing", f"it is needed for {parameter}")
    return Located(parameter, axes, found.piece, whole, found.format, found.evidence, found.assumed)


def _inside(tensor: str) -> str:
    return tensor.replace("expert_{e}", "#").replace("{e}", "#")


def _full(names: Names, tensor: str) -> str:
    """The whole name, `{e}` left as it stands."""
    spelled = _inside(tensor)
    full = names.here.full.get(spelled, names.here.stem + spelled)
    return full.replace("#", "expert_{e}" if "expert_{e}" in tensor else "{e}")


def canonical(stored: Tensor, item: Located) -> Tensor:
    """The canonical view of a stored tensor: orientation first, then this parameter's share of the output axis."""
    piece = item.piece
    shape = item.stored_shape()
    if stored.dim() == len(shape) == 3 and stored.shape[0] > shape[0]:
        stored = stored[: shape[0]]  # in memory LongCat's identity experts have rows that nothing reads
    stored = stored.reshape(shape)
    if piece.stacked:
        stored = stored.reshape(item.axes[0].size, -1, stored.shape[-1])
    if piece.transposed:
        stored = stored.transpose(-1, -2)
    if piece.parts == 1:
        return stored
    axis = item.output_axis
    if piece.interleaved:
        index = [slice(None)] * stored.dim()
        index[axis] = slice(piece.part, None, piece.parts)
        return stored[tuple(index)]
    width = stored.shape[axis] // piece.parts
    return stored.narrow(axis, piece.part * width, width)
