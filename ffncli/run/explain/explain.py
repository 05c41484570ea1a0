"""explain: how one number of a trace was computed, from the step that computed it; it ends with the traced value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ffncli.block.steps import (
    Activation,
    Add,
    AllReduce,
    Dropout,
    Experts,
    Linear,
    Multiply,
    Norm,
    Op,
    Route,
    right_hand_side,
)
from ffncli.dataclass import dataclass
from ffncli.run.explain import arithmetic
from ffncli.run.explain.arithmetic import Choice, Derivation, Quantity, Term
from ffncli.run.explain.router import route
from ffncli.run.explain.scene import Scene, TensorPlace, checked, find
from ffncli.run.measure.gap import ulps
from ffncli.show.tensors import written

_ARMS: dict[type[Op], Callable[[Scene, TensorPlace, tuple[int, ...], int], Derivation]] = {
    Linear: arithmetic.linear,
    Activation: arithmetic.activation,
    Multiply: arithmetic.multiply,
    Add: arithmetic.add,
    Norm: arithmetic.norm,
    Dropout: arithmetic.dropout,
    Route: route,
    Experts: arithmetic.experts,
    AllReduce: arithmetic.all_reduce,
}


@dataclass(frozen=True)
class Explanation:
    """One number of a trace: `value` is exactly the step's at `index`, `computed` the same in float64.

    `terms` are the largest summands, `others` the number not listed and `others_sum` their sum, `quantities` the
    intermediate numbers (bias, mean square, slope ...), `experts` a router's choice. `rounding` is value - computed,
    `ulps` its size in units in the last place of the step's `dtype`. Inside an expert, `token` is the flat index of the
    row's token. `origin` is the number it mostly comes from (`x[0,3]`), None for an input of the block.
    """

    place: str
    name: str
    index: tuple[int, ...]
    op: str
    formula: str
    dtype: str
    token: int | None
    terms: tuple[Term, ...]
    others: int
    others_sum: float
    quantities: tuple[Quantity, ...]
    experts: tuple[Choice, ...]
    notes: tuple[str, ...]
    origin: str | None
    computed: float
    rounding: float
    ulps: float
    value: float


def explain(
    scene: Scene, name: str, index: tuple[int, ...], most: int = 8, depth: int = 1, option: str = "explain"
) -> list[Explanation]:
    """How `name[index]` was computed, with its `most` largest terms; then its largest term's origin, `depth` steps
    deep.

    `scene` must have the tensors that `scene.needed` names. Negative indices count from the end. Raises FFNError for an
    unknown step and for an index that does not fit; messages begin with `option`.
    """
    place = find(scene.steps, name)
    at = checked(scene, place, index, option)
    out: list[Explanation] = []
    while len(out) < depth:
        made = _made(scene, place, at, most)
        out.append(_explanation(scene, place, at, made))
        if made.origin is None:
            break
        place, at = find(scene.steps, made.origin[0]), made.origin[1]
    return out


def _made(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    if place.step is None:
        value = scene.tensors[place.name][index].double().item()
        return Derivation(value, notes=("an input of the block, not computed by it",))
    return _ARMS[type(place.step.op)](scene, place, index, most)


def _explanation(scene: Scene, place: TensorPlace, index: tuple[int, ...], made: Derivation) -> Explanation:
    tensor = scene.tensors[place.name]
    value = tensor[index].double().item()
    same = value == made.computed or (value != value and made.computed != made.computed)
    formula = place.name
    if place.step:
        printed = replace(place.step, inputs=tuple(map(place.printed, place.step.inputs)))
        formula = right_hand_side(printed, place.program)
    return Explanation(
        place=written(place.name, index),
        name=place.name,
        index=index,
        op=place.step.op.name if place.step else "input",
        formula=formula,
        dtype=str(tensor.dtype).removeprefix("torch."),
        token=scene.tokens(place)[index[0]] if place.outer else None,
        terms=made.terms,
        others=made.others,
        others_sum=made.others_sum,
        quantities=made.quantities,
        experts=made.experts,
        notes=made.notes,
        origin=written(*made.origin) if made.origin else None,
        computed=made.computed,
        rounding=0.0 if same else value - made.computed,
        ulps=0.0 if same else ulps(made.computed, value, tensor.dtype),
        value=value,
    )
