"""Explaining how one value of a trace was computed from its operands, or why a router chose an expert."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ffncli.block import steps as ops
from ffncli.block.symbols import right_hand_side
from ffncli.run.engine.execute import function, one_by_one
from ffncli.run.explain import arithmetic
from ffncli.run.explain.arithmetic import Choice, Derivation, Quantity, Term, op_of, origin_of
from ffncli.run.explain.scene import Read, Scene, TensorPlace, checked, find
from ffncli.run.measure.gap import ulps
from ffncli.show.tensors import written


def route(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain an expert's weight: its score, divided by the sum of the chosen experts' scores if renormalised, times
    the scale.

    The choice is read from the traced weights. `experts` lists the chosen experts by weight, and the requested expert.
    A softmax over the whole axis chooses no experts; at most `most` experts, those of largest weight, are then listed.
    """
    op, expert = op_of(place, ops.Route), index[-1]
    read = scene.read(place, 0, index[:-1])
    weights = scene.tensors[place.name][index[:-1]].double()
    chosen = [e for e in weights.argsort(descending=True, stable=True).tolist() if weights[e] != 0]
    scores, choice = _scores(scene, place, op, read.row, chosen)
    listed = chosen if op.chooses else chosen[:most]
    listed = [*listed, *([] if expert in listed else [expert])]
    took = {*chosen}
    made = tuple(
        Choice(e, read.row[e].item(), _number(scores[e]), choice[e].item(), _group(op, weights, e), e in took,
               weights[e].item())
        for e in listed
    )  # fmt: skip
    quantities = [Quantity("logit", read.row[expert].item(), read.at(expert))]
    if scores[expert].isfinite():
        quantities.append(Quantity(f"{op.score} score", scores[expert].item()))
    correction = scene.weight(place, "correction")
    if correction and expert < len(correction[1]):
        value = correction[1][expert].item()
        quantities.append(Quantity("correction", value, written(correction[0], (expert,))))
        quantities.append(Quantity("chosen by", choice[expert].item()))
    total = 0.0
    if expert in chosen:
        total = scores[expert].item()
        if op.order == "score_first" and op.renormalise:
            together = scores[chosen].sum().item()
            quantities.append(Quantity("sum of the chosen scores", together))
            if op.eps:
                quantities.append(Quantity("added to the sum", op.eps))
            total /= together + op.eps
        if op.scale != 1:
            quantities.append(Quantity("scale", op.scale))
        total *= op.scale
        if factor := scene.weight(place, "factor"):
            quantities.append(Quantity("learned scale", factor[1].item(), written(factor[0], (0,))))
            total *= factor[1].item()
    notes = tuple(
        _listed(scene.read(place, 1, index[:-1]), expert, chosen) if op.lookup else _notes(op, expert, chosen, choice)
    )
    return Derivation(total, quantities=tuple(quantities), experts=made, notes=notes, origin=origin_of(read, expert))


_ARMS: dict[type[ops.Op], Callable[[Scene, TensorPlace, tuple[int, ...], int], Derivation]] = {
    ops.Linear: arithmetic.linear,
    ops.Activation: arithmetic.activation,
    ops.Multiply: arithmetic.multiply,
    ops.Add: arithmetic.add,
    ops.Norm: arithmetic.norm,
    ops.Dropout: arithmetic.dropout,
    ops.Route: route,
    ops.Experts: arithmetic.experts,
    ops.AllReduce: arithmetic.all_reduce,
}


@dataclass(frozen=True)
class Explanation:
    """The explanation of one value of a trace: `value` is the traced value at `index`, `computed` the same value in
    float64.

    `terms` are the largest summands; `others` is the number of unlisted summands and `others_sum` their sum;
    `quantities` are the intermediate values (bias, mean square, slope ...); `experts` is a router's choice. `rounding`
    is value - computed, and `ulps` its size in units in the last place of the step's `dtype`. Inside an expert, `token`
    is the flat index of the row's token. `origin` is the operand that contributes most (`x[0,3]`); None for an input of
    the block.
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
    """Explain `name[index]` with its largest terms (at most `most`), then the origin of its largest term, and so on for
    `depth` steps.

    `scene` must contain the tensors listed by `needed` in `scene.py`. Negative indices count from the end. Error
    messages begin with `option`.
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


def _scores(
    scene: Scene, place: TensorPlace, op: ops.Route, logits: Tensor, chosen: list[int]
) -> tuple[Tensor, Tensor]:
    """Return (each expert's score, NaN if it has no score; the values by which experts are chosen)."""
    correction = scene.weight(place, "correction")
    shift = torch.zeros_like(logits)
    if correction:
        shift[: len(correction[1])] = correction[1].double()
    score = function(op.score) if op.score != "softmax" else partial(torch.softmax, dim=-1)
    if op.order == "score_first":
        scores = score(logits)
        return scores, scores + shift
    scores = torch.full_like(logits, torch.nan)
    if op.order == "one_by_one":
        experts, values = one_by_one(op, logits)
        return scores.scatter(-1, experts, values), logits
    scores[chosen] = score(logits[chosen])
    return scores, logits + shift


def _listed(ids: Read, expert: int, chosen: list[int]) -> list[str]:
    """Return a note on whether the table of token ids lists the expert."""
    return [f"{'' if expert in chosen else 'not '}chosen: the table's experts of token id {int(ids.row[0])} are "
            + ", ".join(map(str, sorted(chosen)))]  # fmt: skip


def _notes(op: ops.Route, expert: int, chosen: list[int], choice: Tensor) -> list[str]:
    """Return notes on why the expert was chosen or not."""
    out = []
    if op.groups > 1 and op.top_groups < op.groups:
        best = choice.reshape(op.groups, -1).topk(min(op.group_best, choice.numel() // op.groups), -1).values.sum(-1)
        mine = expert // (choice.numel() // op.groups)
        rank = int((best > best[mine]).sum()) + 1
        verdict = "can be chosen" if rank <= op.top_groups else "are left out"
        out.append(f"group {mine} ranks {rank} of {op.groups} (score {best[mine].item():.6g}): its experts {verdict}")
    by = "score" if op.order == "score_first" else "logit"
    by += " + correction" if op.correction else ""
    if expert >= choice.numel() - op.always:
        return [*out, "a shared expert: every token goes to it"]
    chosen = [e for e in chosen if e < choice.numel() - op.always]
    if expert in chosen:
        rank = int((choice[chosen] > choice[expert]).sum()) + 1
        if not op.chooses:
            return [*out, f"number {rank} of {len(chosen):,} by {by}"]
        return [*out, f"chosen: rank {rank} of the {op.top_k} best by {by}"]
    least = min((choice[e].item() for e in chosen), default=0.0)
    return [*out, f"not chosen: its {by} is {choice[expert].item():.6g}, but the last chosen expert has {least:.6g}"]


def _group(op: ops.Route, weights: Tensor, expert: int) -> int | None:
    return expert // (weights.numel() // op.groups) if op.groups > 1 else None


def _number(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None
