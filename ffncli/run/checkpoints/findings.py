"""What was done to a checkpoint: each function takes the evidence of the changed parameters that no function before it
has explained, and returns findings with the parameters that they explain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import acos, sin, sqrt
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ffncli.block.formats import FORMATS
from ffncli.models.model import Layer
from ffncli.run.checkpoints.measure import Pair, distance, nearest, same_units
from ffncli.run.checkpoints.results import CheckpointFinding
from ffncli.show.text import percent, plural

ALIKE = 0.25  # relative distance up to which two matrices are the same one, perhaps rounded to few bits
_TUNED = 0.5  # relative change up to which a matrix may have been trained further
_EDITED = 1e-3  # share of changed values up to which single values were edited
_MOST_OF_PATTERN = 0.6  # share of zeros up to which the pattern 2:4 is a choice; above, it is there by chance
_PRUNED = 0.02  # share of values set to 0 from which a matrix counts as pruned although its other values changed
_ERROR = {"fp32": 2.0**-20, "fp16": 2.0**-10, "bf16": 2.0**-7}  # largest relative error of rounding, with a margin
_MOST_LISTED = 16_384  # numbers of permutations in the evidence
_MOST_FACTORS = 4  # scales that have a finding each
FIRST = ("dropped", "shifted", "copied")
_LAST = ("finetuned", "none")
_EXPERTS = {"permuted": "permutation", "copied": "of"}  # findings on experts: the name of BASE's experts in evidence


@dataclass
class UnitOrder:
    """The units of one group of matrices (of an expert, if there are several) in another order: `kind` is `swapped`,
    `interleaved` or `permuted`, `units` maps NEW's units to BASE's if permuted."""

    layer: Layer
    expert: int | None
    prefix: str
    kind: str
    detail: str = ""
    units: Tensor | None = None


@dataclass
class Evidence:
    """All that is known about two checkpoints. `base_of` maps NEW's layers to the layers of BASE that they are compared
    with; `removed` are the numbers of units of which NEW lacks some, by layer: (BASE's, NEW's)."""

    pairs: list[Pair] = field(default_factory=list)
    orders: list[UnitOrder] = field(default_factory=list)
    base_of: dict[tuple[str, int], Layer] = field(default_factory=dict)
    base_layers: list[Layer] = field(default_factory=list)
    removed: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    one_stack: bool = True
    third: bool = False

    def where(self, pairs: Iterable[Pair]) -> str:
        """Name some parameters: `gate, up and down of layers 0 to 11`."""
        pairs = [*pairs]
        names = list(dict.fromkeys(pair.matrix for pair in pairs))
        layers: list[str] = []
        for stack, several in groupby(
            dict.fromkeys((p.layer.stack, p.layer.index) for p in pairs), key=lambda at: at[0]
        ):
            numbers = [index for _, index in several]
            label = "" if self.one_stack else f"{stack} "
            layers.append(f"{label}{plural('layer', len(numbers))} {spans(numbers)}")
        experts = {pair.expert for pair in pairs if pair.expert is not None}
        which = f" of {plural('expert', len(experts))} {spans(sorted(experts))} in" if experts else " of"
        return f"{listed_in_words(names)}{which} {' and '.join(layers)}"


def spans(numbers: Sequence[int]) -> str:
    """Return text such as `0 to 3, 7` for whole numbers in ascending order."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][-1] + 1:
            out[-1].append(number)
        else:
            out.append([number])
    if len(out) == 1 and len(out[0]) == 2:
        return f"{out[0][0]} and {out[0][1]}"
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in out]
    return ", ".join(texts if len(texts) < 7 else [*texts[:6], "..."])


def listed_in_words(names: Sequence[str]) -> str:
    """Return text such as `gate, up and down`."""
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last


def find(evidence: Evidence) -> tuple[CheckpointFinding, ...]:
    """Return what was done, the likeliest first."""
    left = [pair for pair in evidence.pairs if pair.changed]
    findings: list[tuple[CheckpointFinding, int]] = []
    for name, function in _FUNCTIONS.items():
        for detail, numbers, explained in function(evidence, left):
            gone = set(map(id, explained))
            left = [pair for pair in left if id(pair) not in gone]
            weights = sum(pair.size for pair in explained)
            called = numbers.pop("finding", name)
            findings.append((CheckpointFinding(called, detail, {**numbers, "weights": weights}), weights))
    if not findings:
        count = sum(pair.size for pair in evidence.pairs)
        return (CheckpointFinding("same", "the same: all values of the FFNs are equal", {"weights": count}),)
    rounded = sum(weights for one, weights in findings if one.finding == "rounding")
    error = max((one.evidence["relative_change"] for one, _ in findings if one.finding == "rounding"), default=0.0)

    def order(item: tuple[CheckpointFinding, int]) -> tuple[int, int]:
        one, weights = item
        trained = one.finding == "finetuned" and one.evidence["layers"][0]["relative_change"] > 4 * error
        late = one.finding == "rounding" or (one.finding in _LAST and weights < rounded and not trained)
        return (0 if one.finding in FIRST else 2 if late else 1, -weights)

    return tuple(one for one, _ in sorted(findings, key=order))


Explanations = Iterable[tuple[str, dict[str, Any], list[Pair]]]


def _dropped(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    """Layers of BASE that no layer of NEW is compared with."""
    used = {(layer.stack, layer.index) for layer in evidence.base_of.values()}
    gone = [layer.index for layer in evidence.base_layers if (layer.stack, layer.index) not in used]
    if gone:
        count = len(evidence.base_layers)
        yield f"{plural('layer', len(gone))} {spans(gone)} of BASE's {count} dropped", {"layers": gone}, []


def _copied(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    """Layers that are another layer of BASE, judged by the sketches of all their matrices."""
    mapped = dict(evidence.base_of)
    changed = {(p.layer.stack, p.layer.index) for p in left if p.is_matrix and p.relative_change > ALIKE}
    base: dict[tuple[str, int], dict[Any, Tensor]] = {}
    new: dict[tuple[str, int], dict[Any, Tensor]] = {}
    for pair in evidence.pairs:
        if pair.sketches is not None:
            key, origin = (pair.layer.stack, pair.layer.index), evidence.base_of[pair.layer.stack, pair.layer.index]
            base.setdefault((origin.stack, origin.index), {})[pair.parameter, pair.expert] = pair.sketches[0]
            new.setdefault(key, {})[pair.parameter, pair.expert] = pair.sketches[1]
    explained: dict[tuple[str, int], tuple[tuple[str, int], float]] = {}
    for key in sorted(changed):
        distances = {at: _apart(sketches, new[key]) for at, sketches in base.items() if at[0] == key[0]}
        best = min(distances, key=distances.__getitem__)
        origin_layer = evidence.base_of[key]
        if distances[best] < ALIKE and best != (origin_layer.stack, origin_layer.index):
            explained[key] = (best, distances[best])
    pairs = {key: [p for p in left if (p.layer.stack, p.layer.index) == key] for key in explained}
    by_index = {(layer.stack, layer.index): layer for layer in evidence.base_layers}
    mapped |= {key: by_index[best] for key, (best, _) in explained.items()}
    moves = {key: best[1] - key[1] for key, (best, _) in explained.items()}
    twice = len({(layer.stack, layer.index) for layer in mapped.values()}) < len(mapped)
    numbers = [{"layer": key[1], "of": best[1], "distance": apart} for key, (best, apart) in explained.items()]
    every = [pair for several in pairs.values() for pair in several]
    kind, text = "", ""
    if len(moves) > 1 and len(set(moves.values())) == 1:
        here, there = ([at[1] for at in some] for some in (moves, [best for best, _ in explained.values()]))
        kind, text = "shifted", f"layers shifted: {spans(here)} are BASE's {spans(there)}"
    elif explained and not twice:
        kind, text = "permuted", f"layers in another order: {_arrows(explained)}"
    elif explained:
        kind, text = "copied", f"layers copied: {_arrows(explained)}"
    repeats = [(key[1], layer.index) for key, layer in evidence.base_of.items()
               if any(same == layer and other < key for other, same in evidence.base_of.items())]  # fmt: skip
    if not kind and repeats:
        kind = "copied"
        text = "layers copied: " + ", ".join(f"{to} is BASE's {of}" for to, of in repeats)
        numbers = [{"layer": to, "of": of, "distance": 0.0} for to, of in repeats]
    if kind:
        yield text, {"finding": kind, "layers": numbers}, every


def _arrows(explained: Mapping[tuple[str, int], tuple[tuple[str, int], float]]) -> str:
    texts = [f"{key[1]} is BASE's {best[1]}" for key, (best, _) in explained.items()]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")


def _apart(base: Mapping[Any, Tensor], new: Mapping[Any, Tensor]) -> float:
    """Return the relative distance of two layers, over all of their sketches."""
    shared = [key for key in new if key in base and base[key].shape == new[key].shape]
    size = sum(float(base[key].square().sum()) for key in shared)
    change = sum(float((base[key] - new[key]).square().sum()) for key in shared)
    return sqrt(change / size) if size and len(shared) == len(new) else float("inf")


# --- units and experts in another order -------------------------------------------------------------------------------


def unit_order(layer: Layer, expert: int | None, prefix: str, pairs: Sequence[Pair]) -> UnitOrder | None:
    """Return how the units of a group of matrices (gate, up, down, or one expert's) were put in another order."""
    prints: dict[str, tuple[Tensor, Tensor]] = {
        pair.matrix.removeprefix(prefix): pair.prints for pair in pairs if pair.prints is not None
    }
    if all(distance(*pair) <= ALIKE for pair in prints.values()):
        return None
    for pair in pairs:  # biases of units change places with them
        if pair.small is not None and pair.matrix.endswith(("gate.bias", "up.bias")):
            prints[pair.matrix.removeprefix(prefix)] = tuple(  # type: ignore[assignment]
                (one if expert is None else one[expert]).view(-1, 1) for one in pair.small
            )
    base = {name: pair[0] for name, pair in prints.items()}
    for kind, detail, change in _CHANGES:
        made = change(base) if {"gate", "up"} <= base.keys() else None
        if made and all(distance(one, prints[name][1]) <= ALIKE for name, one in made.items()):
            return UnitOrder(layer, expert, prefix, kind, detail)
    order = same_units({name: pair for name, pair in prints.items() if "bias" not in name}, ALIKE)
    if order is None or torch.equal(order, torch.arange(len(order))):
        return None
    good = all(distance(pair[0][order], pair[1]) <= ALIKE for pair in prints.values())
    return UnitOrder(layer, expert, prefix, "permuted", units=order) if good else None


_Units = Mapping[str, Tensor]


def _exchanged(base: _Units) -> dict[str, Tensor]:
    other = {"gate": "up", "up": "gate", "gate.bias": "up.bias", "up.bias": "gate.bias"}
    return {name: base[other.get(name, name)] for name in base}


def _fused(base: _Units, split: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    out = dict(base)
    for end in ("", ".bias"):
        if f"gate{end}" in base:
            out[f"gate{end}"], out[f"up{end}"] = split(base[f"gate{end}"], base[f"up{end}"])
    return out


def _as_halves(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([gate, up], 1).flatten(0, 1)
    return both[: len(gate)], both[len(gate) :]


def _in_turn(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([gate, up])
    return both[::2], both[1::2]


_CHANGES: Sequence[tuple[str, str, Callable[[_Units], dict[str, Tensor]]]] = (
    ("swapped", "gate and up are swapped", _exchanged),
    ("interleaved", "gate and up are interleaved where NEW has halves", lambda base: _fused(base, _as_halves)),
    ("interleaved", "gate and up are halves where NEW has them interleaved", lambda base: _fused(base, _in_turn)),
)


def _reordered(kind: str) -> Callable[[Evidence, Sequence[Pair]], Explanations]:
    def function(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
        for detail in dict.fromkeys(one.detail for one in evidence.orders if one.kind == kind):
            orders = [one for one in evidence.orders if (one.kind, one.detail) == (kind, detail)]
            pairs = [pair for pair in left if any(_belongs(pair, one) for one in orders)]
            if pairs:
                yield f"{detail}, in {evidence.where(pairs)}", {"groups": len(orders)}, pairs

    return function


def _belongs(pair: Pair, order: UnitOrder) -> bool:
    here = (pair.layer.stack, pair.layer.index) == (order.layer.stack, order.layer.index)
    names = [f"{order.prefix}{name}" for name in ("gate", "up", "down", "gate.bias", "up.bias")]
    return here and pair.matrix in names and pair.expert in (order.expert, None)


def _permuted(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    """Units in another order."""
    orders = [one for one in evidence.orders if one.kind == "permuted" and one.units is not None]
    pairs = [pair for pair in left if any(_belongs(pair, one) for one in orders)]
    if pairs:
        numbers, room = [], _MOST_LISTED
        for one in orders:
            units = one.units.tolist() if one.units is not None else []
            moved = sum(at != unit for at, unit in enumerate(units))
            shown = units if len(units) <= room else units[:16]
            room -= len(shown)
            numbers.append({"layer": one.layer.index, "expert": one.expert, "moved": moved, "permutation": shown})
        first = numbers[0]["permutation"]
        start = ", ".join([f"{at} is BASE's {unit}" for at, unit in enumerate(first) if at != unit][:3])
        text = f"hidden units in another order, in {evidence.where(pairs)} (unit {start}, ...)"
        yield text, {"orders": numbers}, pairs


def _moved_experts(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    """Experts in another order, or copied over others."""
    orders: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _EXPERTS}
    moved: dict[str, list[Pair]] = {kind: [] for kind in _EXPERTS}
    for key in dict.fromkeys((p.layer.stack, p.layer.index) for p in left if p.experts > 1):
        mine = [pair for pair in evidence.pairs if (pair.layer.stack, pair.layer.index) == key]
        if order := _expert_order(mine):
            experts, covered = order
            kind = "permuted" if len(set(experts)) == len(experts) else "copied"
            here = [pair for pair in covered if any(pair is one for one in left)]
            moved[kind] += here
            orders[kind] += [{"layer": key[1], _EXPERTS[kind]: experts}] if here else []
    for kind, pairs in moved.items():
        if pairs:
            first = orders[kind][0][_EXPERTS[kind]]
            texts = [f"{at} is BASE's {of}" for at, of in enumerate(first) if at != of]
            text = ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")
            what = "experts" if any(pair.expert is not None for pair in pairs) else "rows of the router"
            how = "in another order" if kind == "permuted" else "copied"
            layers = [one["layer"] for one in orders[kind]]
            where = f"{plural('layer', len(layers))} {spans(layers)}"
            yield f"{what} {how}, in {where} ({text})", {"finding": kind, "orders": orders[kind]}, pairs


def _expert_order(pairs: Sequence[Pair]) -> tuple[list[int], list[Pair]] | None:
    """Return the expert of BASE that each expert of NEW is, and the parameters that moved with the experts."""
    routed = [pair for pair in pairs if pair.expert is not None and pair.sketches is not None]
    router = next((pair for pair in pairs if pair.matrix == "router" and pair.small is not None), None)
    if router is not None and router.small is not None and not any(pair.changed for pair in routed):
        order = nearest(*router.small, ALIKE)  # its rows alone
        same = order is None or torch.equal(order, torch.arange(len(order)))
        return None if order is None or same else (order.tolist(), [router])
    names = list(dict.fromkeys(pair.parameter for pair in routed))
    base, new = (
        torch.cat([
            torch.stack([p.sketches[side] for p in routed if p.parameter == name and p.sketches]) for name in names
        ], 1) for side in (0, 1)
    )  # fmt: skip
    order = nearest(base, new, ALIKE, distinct=False)
    if order is None:
        return None
    # Experts of one dense FFN are all alike: one that is still like itself has not moved.
    here = (new - base).square().sum(1) <= ALIKE**2 * base.square().sum(1)
    order = torch.where(here, torch.arange(len(order)), order)
    if bool(here.all()):
        return None
    moved = [pair for pair in pairs if pair.small is not None and pair.small[0].shape[:1] == (len(order),)
             and distance(pair.small[0][order], pair.small[1]) <= ALIKE]  # fmt: skip
    return order.tolist(), [*(pair for pair in routed if pair.expert is not None and not here[pair.expert]), *moved]


# --- a parameter at a time --------------------------------------------------------------------------------------------


def _transposed(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    pairs = [p for p in left if p.turned is not None and p.turned < ALIKE < p.relative_change]
    if pairs:
        residual = max(pair.turned or 0.0 for pair in pairs)
        yield f"transposed: {evidence.where(pairs)}", {"largest_distance": residual}, pairs


def _norm_plus_one(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    for sign, word in ((1, "larger"), (-1, "smaller")):
        pairs = [p for p in left if p.small is not None and p.small[0].dim() == 1 and "norm" in p.parameter
                 and p.parameter.endswith("weight")
                 and float((p.small[1] - p.small[0] - sign).abs().max()) < 0.02]  # fmt: skip
        if pairs:
            text = (
                f"weights of norms are {word} by 1: {evidence.where(pairs)}; one side stores w where w + 1 multiplies"
            )
            yield text, {"added": sign, "norms": len(pairs)}, pairs


def _scaled(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    """Parameters that are c times BASE's; those with the same c belong together."""
    factors: dict[float, list[tuple[Pair, float]]] = {}
    for pair in left:
        (base, both), new = pair.gram[0, :2].tolist(), float(pair.gram[1, 1])
        if not base or not new or pair.size < 2:
            continue
        factor = both / base
        residual = sqrt(max(0.0, new - both * both / base) / new)
        if residual <= _ERROR[pair.plain[1]] and abs(factor - 1) > 2 * residual:
            near = next((c for c in factors if abs(c - factor) <= 1e-3 * abs(c)), factor)
            factors.setdefault(near, []).append((pair, factor))
    if len(factors) > _MOST_FACTORS:
        every = [item for several in factors.values() for item in several]
        pairs, values = [pair for pair, _ in every], [c for _, c in every]
        text = f"scaled by {len(factors)} factors from {min(values):.6g} to {max(values):.6g}: {evidence.where(pairs)}"
        of = {f"{pair.layer.index} {pair.matrix}": c for pair, c in every[:_MOST_LISTED]}
        yield text, {"factor": median(values), "factors": of}, pairs
        return
    for several in factors.values():
        pairs, factor = [pair for pair, _ in several], median(c for _, c in several)
        factor = round(factor, 6) if abs(round(factor, 6) / factor - 1) < 1e-5 else factor
        yield f"scaled by {factor:.6g}: {evidence.where(pairs)}", {"factor": factor}, pairs


def _merged(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    """Parameters between BASE's and C's: (1 - t) · base + t · c, or the spherical form, weights sin((1 - t)θ) / sin θ
    and sin(tθ) / sin θ at the angle θ between both (Shoemake, 1985)."""
    merges: dict[str, list[tuple[Pair, float, float]]] = {"linear": [], "slerp": []}
    for pair in left:
        gram = pair.gram
        step = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
        change = torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float64)
        length = float(step @ gram @ step)
        if length <= 0 or not evidence.third:
            continue
        limit = max(1e-6, _ERROR[pair.plain[1]]) * sqrt(float(gram[1, 1]))
        t = float(step @ gram @ change) / length
        linear = _left(gram, 1 - t, t)
        if linear <= limit and linear <= 0.2 * abs(t) * sqrt(length):
            merges["linear"].append((pair, t, linear))
            continue
        t, residual = _slerp(gram)
        if residual <= limit and residual <= 0.2 * abs(t) * sqrt(length):
            merges["slerp"].append((pair, t, residual))
    for kind, several in merges.items():
        if not several:
            continue
        pairs, values = [pair for pair, *_ in several], [t for _, t, _ in several]
        t, spread = median(values), max(values) - min(values)
        word = "linear merge" if kind == "linear" else "SLERP merge"
        much = f"t = {t:.4f}" if spread < 2e-3 else f"t from {min(values):.4f} to {max(values):.4f}"
        by_layer: dict[int, list[float]] = {}
        for pair, value, _ in several:
            by_layer.setdefault(pair.layer.index, []).append(value)
        numbers = {
            "kind": kind,
            "t": t,
            "spread": spread,
            "by_layer": {str(at): median(v) for at, v in by_layer.items()},
        }
        yield f"{word} of BASE and C with {much}: {evidence.where(pairs)}", numbers, pairs


def _left(gram: Tensor, a: float, c: float) -> float:
    """Return ‖new - a · base - c · C‖."""
    at = torch.tensor([-a, 1.0, -c], dtype=torch.float64)
    return sqrt(max(0.0, float(at @ gram @ at)))


def _slerp(gram: Tensor) -> tuple[float, float]:
    """Return the t of the nearest spherical merge and its distance, by golden-section search from -1 to 2."""
    size = sqrt(float(gram[0, 0] * gram[2, 2]))
    angle = acos(max(-1.0, min(1.0, float(gram[0, 2]) / size))) if size else 0.0
    if sin(angle) < 1e-6:
        return 0.0, float("inf")

    def left(t: float) -> float:
        return _left(gram, sin((1 - t) * angle) / sin(angle), sin(t * angle) / sin(angle))

    low, high, ratio = -1.0, 2.0, (sqrt(5) - 1) / 2
    starts = [low + 0.1 * at for at in range(31)]
    best = min(starts, key=left)
    low, high = best - 0.1, best + 0.1
    for _ in range(60):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if left(a) < left(b) else (a, high)
    t = (low + high) / 2
    return t, left(t)


def _pruned(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    pairs, removed = [], []
    for pair in left:
        share = (pair.zeros[1] - pair.zeros[0]) / pair.size
        if (pair.layer.stack, pair.layer.index) in evidence.removed and not pair.kept:
            removed.append(pair)
        elif share > 0 and (not pair.kept or share >= _PRUNED) and _closer_without_zeros(pair):
            pairs.append(pair)
    if removed:
        before, after = max(evidence.removed.values())
        numbers = {"units": before - after, "of": before, "share": 1 - after / before}
        yield f"pruned: {before - after} of {before} units removed, in {evidence.where(removed)}", numbers, removed
    if pairs:
        share = sum(p.zeros[1] - p.zeros[0] for p in pairs) / sum(p.size for p in pairs)
        pattern = share < _MOST_OF_PATTERN and all(p.two_of_four for p in pairs if p.is_matrix)
        units = max(p.zeroed_units for p in pairs) if all(p.zeroed_units for p in pairs) else 0
        kept = sum(p.kept for p in pairs)
        text = f"pruned: {percent(share)} of the values set to 0"
        text += " in the pattern 2:4" if pattern else f", which are {units} whole units" if units else ""
        text += f", {kept:,} other values changed" if kept else ""
        numbers = {"share": share, "two_of_four": pattern, "units": units, "others_changed": kept}
        yield f"{text}, in {evidence.where(pairs)}", numbers, pairs


def _closer_without_zeros(pair: Pair) -> bool:
    """Return whether the values that are left, if any, are near BASE's, so that the change is mostly what was set to
    0."""
    return not pair.kept if pair.cosine is None else pair.cosine > 0.4


def _rounding(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    pairs = [pair for pair in left if pair.rounding is not None]
    if not pairs:
        return
    sizes: dict[tuple[str, str, bool], int] = {}
    for pair in pairs:
        assert pair.rounding is not None
        key = (_without_rule(pair.rounding.format), pair.rounding.side, pair.rounding.stored)
        sizes[key] = sizes.get(key, 0) + pair.size
    order = sorted(sizes, key=lambda key: -sizes[key])
    name, side, stored = order[0]
    error = sqrt(sum(p.squared_change for p in pairs) / (sum(float(p.gram[0, 0]) for p in pairs) or 1.0))
    others = list(dict.fromkeys(form for form, *_ in order[1:] if form != name))
    exact = sum((p.rounding.exact if p.rounding else 0.0) * p.size for p in pairs) / sum(p.size for p in pairs)
    what = {"NEW": "NEW is BASE rounded to", "BASE": "BASE is NEW rounded to", "both": "both are rounded, NEW to"}[side]
    text = f"the same but for rounding: {what} {listed_in_words([name, *others])}"
    text += f", whose error explains a relative change of {error:.3g}" if stored else f" (relative change {error:.3g})"
    numbers = {
        "format": name,
        "rule": pairs[0].rounding.format if pairs[0].rounding else name,
        "others": others,
        "side": side,
        "relative_change": error,
        "exact_share": exact,
    }
    yield f"{text}, in {evidence.where(pairs)}", numbers, pairs


def _without_rule(form: str) -> str:
    """Return a format's name without the rule of rounding: several rules often give the same values."""
    name, *words = form.split(":")
    return ":".join([name, *(word for word in words if name not in FORMATS or word not in FORMATS[name].rules)])


def _lora(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    pairs = [p for p in left if p.spectrum and p.spectrum.rank and p.changed > 0.1 * p.size]
    if not pairs:
        return
    ranks = [p.spectrum.rank for p in pairs if p.spectrum and p.spectrum.rank]
    most = max(ranks)
    usual = "rank" if min(ranks) == most else f"rank up to {most}, most often"
    text = f"LoRA of {usual} {max(set(ranks), key=ranks.count)} on {evidence.where(pairs)}"
    numbers: dict[str, Any] = {
        "rank": most,
        "ranks": {str(r): ranks.count(r) for r in sorted(set(ranks))},
        "least_over_noise": min(p.spectrum.smallest or 0.0 for p in pairs if p.spectrum),
    }
    yield text + _adapter_text(evidence.adapter), numbers | dict(evidence.adapter or {}), pairs


def _adapter_text(adapter: Mapping[str, Any] | None) -> str:
    """Say what the adapter's config says: r, alpha, and the factor of the product."""
    if not adapter:
        return ""
    kind = "DoRA" if adapter["dora"] else "rsLoRA" if adapter["rslora"] else "LoRA"
    factor = f"alpha / {'√r' if adapter['rslora'] else 'r'} = {adapter['scaling']:g}"
    return f"; the adapter is a {kind} of rank {adapter['r']} with alpha {adapter['alpha']:g}, {factor}"


def _adapter(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    """What an adapter changes, where its spectrum alone does not show its rank (DoRA scales rows as well)."""
    about = evidence.adapter
    pairs = [pair for pair in left if about and pair.parameter in about["parameters"]]
    if about and pairs and about["dora"]:
        numbers = {"finding": "lora", "rank": about["r"], **about}
        text = f"LoRA of rank {about['r']} on {evidence.where(pairs)}, with rescaled rows{_adapter_text(about)}"
        yield text, numbers, pairs


def _finetuned(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    pairs = [p for p in left if p.relative_change <= _TUNED and p.changed > _EDITED * p.size]
    matrices = [pair for pair in pairs if pair.is_matrix]
    if not pairs or (not matrices and any(pair.is_matrix for pair in left)):
        return
    by_layer: dict[int, list[float]] = {}
    for pair in pairs:
        sums = by_layer.setdefault(pair.layer.index, [0.0, 0.0])
        sums[0] += pair.squared_change
        sums[1] += float(pair.gram[0, 0])
    ranked = sorted(((sqrt(c / s) if s else 0.0, at) for at, (c, s) in by_layer.items()), reverse=True)
    most = ", ".join(f"{at} ({percent(change)})" for change, at in ranked[:3])
    text = f"fine-tuned: {evidence.where(pairs)} changed, most in {plural('layer', min(3, len(ranked)))} {most}"
    blurred = [p for p in matrices if p.spectrum and (p.spectrum.blurred or p.spectrum.rank == 0)]
    if blurred:
        text += f"; whether the change has a low rank is not resolvable from rounding to {blurred[0].plain[1]}"
    numbers = {
        "layers": [{"layer": at, "relative_change": change} for change, at in ranked],
        "low_rank_resolvable": not blurred,
    }
    yield text, numbers, pairs


def _none(evidence: Evidence, left: Sequence[Pair]) -> Explanations:
    if not left:
        return
    pairs = [*left]
    worst = max(pairs, key=lambda pair: pair.relative_change)
    cosine = "" if worst.cosine is None else f", cosine {worst.cosine:.2f}"
    change = f"{worst.relative_change:.3g}" if worst.base_size else "from 0"
    few = sum(pair.changed for pair in pairs)
    detail = f"{few:,} {plural('value', few)} changed, " if all(p.changed <= _EDITED * p.size for p in pairs) else ""
    text = f"none of these: {detail}{evidence.where(pairs)} (relative change up to {change}{cosine})"
    yield text, {"relative_change": worst.relative_change, "cosine": worst.cosine, "changed": few}, pairs


_FUNCTIONS: Mapping[str, Callable[[Evidence, Sequence[Pair]], Explanations]] = {
    "dropped": _dropped, "copied": _copied, "swapped": _reordered("swapped"),
    "interleaved": _reordered("interleaved"), "transposed": _transposed, "norm_plus_one": _norm_plus_one,
    "permuted": _permuted, "experts": _moved_experts, "merged": _merged, "scaled": _scaled,
    "rounding": _rounding, "pruned": _pruned, "lora": _lora, "adapter": _adapter, "finetuned": _finetuned,
    "none": _none,
}  # fmt: skip
