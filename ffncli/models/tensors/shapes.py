"""Matrices by their shapes: which axis is d_model, which is d_ff, and which matrices do not fit.

A matrix may have either orientation: torch's [out, in], or a convolution's [in, out].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from ffncli.dataclass import dataclass

Misfit: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]  # matrices, name and shape, that do not fit one another


@dataclass(frozen=True)
class Item:
    """One tensor of a layer, or `count` identical ones: logical shape (None if only the size is known), values
    in one, bytes of all.

    `params` 0: the tensor is named in an index, and its file is missing.
    """

    shape: tuple[int, ...] | None
    params: int
    bytes: int
    count: int = 1
    format: str = ""


@dataclass(frozen=True)
class Hints:
    """What decides a matrix's orientation if both fit: the lengths of the layer's norms, a `hint` for d_model."""

    norms: Counter[int]
    hint: int | None

    def d_model(self) -> int | None:
        """The hint, else the length that most norms have."""
        return self.hint or max(self.norms, key=self.norms.__getitem__, default=None)


def widths(
    up: Item, down: Item, parts: int, hints: Hints, bias: Item | None = None, experts: int = 0
) -> tuple[int | None, int | None]:
    """(d_model, d_ff) of up [parts·d_ff, d_model] and down [d_model, d_ff], or of both transposed.

    If both fit, up's bias decides, else the layer's norms, else the hint. None: nothing decides.
    """
    a, b = matrix(up), matrix(down)
    if a is None or b is None:
        hint = hints.d_model()
        return (hint, down.params // hint) if hint and down.params and down.params % hint == 0 else (hint, None)
    if a == b and experts and up.shape and len(up.shape) == 2 and a[0] % experts == 0 and up.count == 1:
        return a[1], a[0] // experts  # [experts · d_ff, d_model], both: down is used as stored
    as_linear = (a[1], b[1]) if a[1] == b[0] and a[0] == parts * b[1] else None
    turned = (a[0], b[0]) if a[0] == b[1] and a[1] == parts * b[0] else None
    if as_linear is None or turned is None or as_linear == turned:
        return as_linear or turned or (None, None)
    if bias is not None and bias.shape and bias.shape[-1] in (parts * as_linear[1], parts * turned[1]):
        return as_linear if bias.shape[-1] == parts * as_linear[1] else turned
    if (as_linear[0] in hints.norms) != (turned[0] in hints.norms):
        return as_linear if as_linear[0] in hints.norms else turned
    return turned if hints.hint == turned[0] else as_linear


def matrix(item: Item) -> tuple[int, int] | None:
    """The last two axes of a matrix or of a stack of them; a width-1 convolution's last axis does not count."""
    if item.shape is None:
        return None
    shape = item.shape[:-1] if len(item.shape) == 3 and item.shape[-1] == 1 else item.shape
    return (shape[-2], shape[-1]) if len(shape) >= 2 else None


def unlike(matrices: Mapping[str, Item], d_ff: int | None) -> Misfit:
    """The matrices (gate, up, down; or up, down), name and shape, that do not fit one another; none if all do.

    `d_ff` is None if up and down agree on none. Missing shapes fit everything.
    """
    shapes = [(name, item.shape) for name, item in matrices.items() if item.shape]
    if len(shapes) < len(matrices):
        return ()
    if d_ff is None:
        return tuple(shapes[-2:])
    return tuple(shapes[:1]) if len(shapes) == 3 and shapes[0][1] != shapes[1][1] else ()
