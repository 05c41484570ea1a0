"""How a file could be misread: every other way of reading its tensors that fits their shapes equally well.

A misreading has a descriptive name ("gate and up swapped") and gives the place where each parameter would be.
Nothing here reads a value; `run/verify/checks/layouts.py` computes what each would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from ffncli.dataclass import dataclass
from ffncli.models.tensors.layout import Located

Readings = tuple[Located, ...]
_Change = Callable[[Readings], Readings | None]  # None if it does not apply


@dataclass(frozen=True)
class Misreading:
    """`name` continues "read with"; `located` is where the parameters would be.

    For the `exchanged` parameters the experts axis is confused with that axis.
    """

    name: str
    located: Readings
    exchanged: tuple[tuple[str, int], ...] = ()


def misreadings(located: Sequence[Located]) -> list[Misreading]:
    """Each single mistake that the shapes allow, one at a time."""
    items = tuple(located)
    single = [Misreading(name, changed) for name, change in _changes(items) if (changed := change(items)) is not None]
    return [*single, *_experts_elsewhere(items)]


def mixed_misreadings(located: Sequence[Located]) -> Iterator[Misreading]:
    """The single mistakes first, then every two and three of them together."""
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
    """Every mistake by name. Their effects must not depend on the order in which they are applied."""
    for prefix in ("", "shared."):
        where = f" in the {prefix.rstrip('.')} experts" if prefix else ""
        for one, two in (("gate", "up"), ("up", "down"), ("gate", "down")):
            yield f"{one} and {two} swapped{where}", partial(_swapped, one=prefix + one, two=prefix + two)
    for how, interleaved in (("as halves", True), ("by turns", False)):
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
    yield "experts in the order of their names as text", partial(_sorted_as_text, written=False)
    yield "experts written in the order of their names as text", partial(_sorted_as_text, written=True)


def _swapped(items: Readings, one: str, two: str) -> Readings | None:
    """Each read in place of the other, if their matrices have the same size."""
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
    """Interleaved rows read as halves, or halves as interleaved rows; `only` in the shared experts, or the others."""

    def fused(item: Located) -> bool:
        shared = item.parameter.startswith("shared.")
        return item.slice.parts > 1 and item.slice.interleaved == interleaved and only in (None, shared)

    if not any(map(fused, items)):
        return None
    return tuple(
        replace(item, slice=replace(item.slice, interleaved=not interleaved)) if fused(item) else item for item in items
    )


def _turned(item: Located) -> Located | None:
    """A matrix read the other way round, if its shape stays the same."""
    if item.parameter.endswith(".bias") or len(item.axes) < 2 or item.slice.stacked:
        return None
    turned = replace(item, slice=replace(item.slice, transposed=not item.slice.transposed))
    return turned if turned.stored_shape() == item.stored_shape() else None


def _transposed(items: Readings, names: Sequence[str]) -> Readings | None:
    out = [_turned(item) if item.parameter in names else item for item in items]
    return None if None in out else tuple(item for item in out if item is not None)


def _sorted_as_text(items: Readings, written: bool) -> Readings | None:
    """experts.10 before experts.2, as a text sort orders them; `written`: sorted when written, so the inverse."""

    def sort(names: tuple[str, ...]) -> tuple[str, ...]:
        order = sorted(names)
        return tuple(names[order.index(name)] for name in names) if written else tuple(order)

    out = [replace(item, names=sort(item.names)) if item.slice.per_expert else item for item in items]
    return tuple(out) if tuple(out) != items else None


def _experts_elsewhere(items: Readings) -> Iterator[Misreading]:
    """Tensors of all experts in which another axis is as long as the experts axis."""
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
            yield Misreading(f"the experts axis taken for {width}", items, tuple(exchanged))
