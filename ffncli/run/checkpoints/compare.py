"""Comparing two checkpoints: their layers are paired, and every matrix is read once, measured and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import torch
from torch import Tensor

from ffncli.errors import FFNError, option, shown
from ffncli.models.model import Layer
from ffncli.models.tensors.layout import Located
from ffncli.run.checkpoints.findings import ALIKE, FIRST, Evidence, find, listed_in_words, unit_order
from ffncli.run.checkpoints.lattice import Lattices
from ffncli.run.checkpoints.measure import Pair, distance, measured, nearest
from ffncli.run.checkpoints.outside import outside
from ffncli.run.checkpoints.results import ChangedPart, CheckpointComparison, ParameterRow
from ffncli.run.checkpoints.sides import SideFile, bundles, open_side
from ffncli.show.text import seconds_text

_PROBED = 8  # stored rows of each layer that are read to pair the layers of unequal depths
_UNITS = 5  # units of each layer in the answer
_VALUES_PER_S = 1e7  # on one core, of both sides
_PRODUCTS_PER_S = 2.5e10  # multiply-adds for the spectra
_WORTH_A_NOTE = 10.0  # seconds

Note = Callable[[str], None]
Advance = Callable[[int], None]


@dataclass
class CheckpointPair:
    """Two opened checkpoints with their layers paired, (NEW's, BASE's), and perhaps a third, C."""

    base: SideFile
    new: SideFile
    third: SideFile | None
    layers: list[tuple[Layer, Layer]]
    notes: list[str] = field(default_factory=list)

    @property
    def values(self) -> int:
        """The number of values that will be compared."""
        return sum(_size(item) for layer, _ in self.layers for item in self.new.located(layer).values())

    @property
    def seconds(self) -> float:
        """A rough estimate of the time that the comparison takes if everything changed."""
        products = 0.0
        for layer, _ in self.layers:
            for item in self.new.located(layer).values():
                if len(item.axes) > 1:
                    short, long = sorted(axis.size for axis in item.axes[-2:])
                    products += _size(item) * (short + 8 * short**2 / (long or 1))
        return self.values / _VALUES_PER_S + products / _PRODUCTS_PER_S


def _size(item: Located) -> int:
    size = 1
    for axis in item.axes:
        size *= axis.size
    return size


def open_pair(base: str, new: str, third: str | None = None) -> CheckpointPair:
    """Open both checkpoints, and C, and pair their layers. Raises FFNError for checkpoints of different blocks."""
    one = open_side(base, "BASE")
    other = open_side(new, "NEW", one)
    notes = list(dict.fromkeys((*one.resolved.notes, *other.resolved.notes)))
    layers = [_described(*pair, one, other) for pair in _paired(one, other)]
    for layer, origin in layers:
        _check_alike(one, other, origin, layer)
    extra = None
    if third is not None:
        extra = open_side(third, "C", one)
        if [(a.stack, a.index) for a in extra.layers()] != [(a.stack, a.index) for a in one.layers()]:
            raise FFNError(f"{option('with_')}: C has other layers than BASE", "give three checkpoints of one model")
        for layer in extra.layers():
            _check_alike(one, extra, layer, layer)
    return CheckpointPair(one, other, extra, layers, notes)


# --- which layers belong together -------------------------------------------------------------------------------------


def _paired(base: SideFile, new: SideFile) -> list[tuple[Layer, Layer]]:
    """Pair NEW's layers with BASE's: by stack and index, or in order; if the depths differ, by their first rows."""
    ours, theirs = base.layers(), new.layers()
    by_key = {(layer.stack, layer.index): layer for layer in ours}
    if {(layer.stack, layer.index) for layer in theirs} == by_key.keys():
        return [(layer, by_key[layer.stack, layer.index]) for layer in theirs]
    if len(ours) == len(theirs):
        return list(zip(theirs, ours, strict=True))
    _check_alike(base, new, ours[0], theirs[0])
    probes = [[_probe(side, layer) for layer in side.layers()] for side in (base, new)]
    out, lost = [], 0
    for layer, probe in zip(theirs, probes[1], strict=True):
        apart = [distance(one, probe) if one.shape == probe.shape else float("inf") for one in probes[0]]
        best = min(range(len(ours)), key=apart.__getitem__)
        lost += apart[best] > ALIKE
        out.append((layer, ours[best]))
    if lost:
        what = f"BASE has {len(ours)} layers and NEW {len(theirs)}, and {lost} of these are not among BASE's"
        raise FFNError(what, "compare checkpoints of one depth, or of which one was cut from the other")
    return out


def _described(layer: Layer, origin: Layer, base: SideFile, new: SideFile) -> tuple[Layer, Layer]:
    """Return both layers; one whose file says nothing of its norms and activation is described like the other."""
    if base.resolved.from_tensors == new.resolved.from_tensors:
        return layer, origin
    known, side, other = (origin, new, layer) if new.resolved.from_tensors else (layer, base, origin)
    alike = replace(other, spec=replace(known.spec, d_ff=other.spec.d_ff))
    try:
        side.located(alike)
    except FFNError:
        return layer, origin
    return (alike, origin) if side is new else (layer, alike)


def _probe(side: SideFile, layer: Layer) -> Tensor:
    """Read the first stored rows of a layer's W1 or W3."""
    return side.read([side.located(layer)["up.weight"]], 0, layer, _PROBED)[0].flatten()


def _check_alike(base: SideFile, new: SideFile, ours: Layer, theirs: Layer) -> None:
    """Raise FFNError if two layers have blocks of different kinds or sizes; NEW may have fewer units."""
    a, b = ours.spec, theirs.spec
    facts = [("d_model", a.d_model, b.d_model), ("d_ff", a.d_ff, b.d_ff)]
    facts += [("experts", a.moe.experts if a.moe else 0, b.moe.experts if b.moe else 0)]
    facts += [("the number of matrices", 2 + bool(a.gated), 2 + bool(b.gated))]
    for name, one, other in facts:
        one, other = one or 0, other or 0
        if one != other and not (name == "d_ff" and other < one and not a.moe):
            what = f"{name} is {one} in {base.label} {shown(base.source, 80)}"
            what += f", {other} in {new.label} {shown(new.source, 80)} ({theirs.stack} layer {theirs.index})"
            raise FFNError(what, "checkpoints of one architecture are compared")


# --- one pass ---------------------------------------------------------------------------------------------------------


def compare_checkpoints(
    pair: CheckpointPair, tolerance: float = 0.0, exact: bool = False, note: Note = lambda text: None,
    advance: Advance = lambda count: None,
) -> CheckpointComparison:  # fmt: skip
    """Compare two checkpoints; `exact` takes spectra from torch's svdvals. Calls `advance` with numbers of values."""
    if pair.seconds > _WORTH_A_NOTE:
        note(f"{pair.values:,} values on each side: up to about {seconds_text(pair.seconds)}, if all of them changed")
    evidence = Evidence(base_layers=pair.base.layers(), adapter=_adapter(pair.new))
    evidence.third = pair.third is not None
    evidence.one_stack = len({layer.stack for layer, _ in pair.layers}) == 1
    lattices, units, experts = Lattices(), list[ChangedPart](), list[ChangedPart]()
    used: tuple[set[str], set[str]] = (set(), set())
    alone: dict[str, list[str]] = {"BASE": [], "NEW": []}
    size = 0
    for layer, origin in pair.layers:
        evidence.base_of[layer.stack, layer.index] = origin
        located = [pair.base.located(origin), pair.new.located(layer)]
        for side, items, tensors in zip((pair.base, pair.new), located, used, strict=True):
            tensors.update(name for item in items.values() for name in item.names)
            size += sum(_stored_bytes(side, item) for item in items.values())
        alone["BASE"] += [name for name in located[0] if name not in located[1]]
        alone["NEW"] += [name for name in located[1] if name not in located[0]]
        for group in _groups(pair, layer, origin, located, evidence, lattices, exact, advance):
            parts = _parts(layer, group)
            units += parts[1:][:_UNITS]
            experts += parts[:1] if parts and parts[0].expert is not None else []
    findings = find(evidence)
    notes = [*pair.notes]
    for label, lone in alone.items():
        if lone:
            kinds = listed_in_words(list(dict.fromkeys(lone)))
            notes.append(f"only {label} has {kinds}, which is not compared")
    rows = _rows(evidence)
    groups = outside(pair.base, pair.new, used, size)
    notes += [f"outside the FFNs, {one.group}: {one.detail}" for one in groups if "resized" in one.detail]
    within = all(row.relative_change <= tolerance for row in rows) and findings[0].finding not in FIRST
    return CheckpointComparison(
        pair.base.source, pair.new.source, pair.base.resolved.model.name, findings, tuple(rows),
        tuple(_largest(units)), tuple(experts), tuple(groups), tuple(notes), tolerance, within,
    )  # fmt: skip


def _adapter(new: SideFile) -> dict[str, object] | None:
    """Describe NEW's adapter for the evidence, by its first matrix in an FFN."""
    if new.adapter is None or not new.adapted:
        return None
    first = max(new.adapted.values(), key=lambda change: change.rank)
    parameters = {
        item.parameter for layer in new.layers() for item in new.located(layer).values()
        if any(name in new.adapted for name in item.names)
    }  # fmt: skip
    return {
        "r": first.rank, "alpha": first.alpha, "scaling": first.scaling, "rslora": new.adapter.rslora,
        "dora": new.adapter.dora, "parameters": sorted(parameters),
    }  # fmt: skip


def _stored_bytes(side: SideFile, item: Located) -> int:
    """Return a rough number of bytes that a parameter takes in its file."""
    return sum(
        side.checkpoint.info(name).bytes // item.slice.parts for name in item.names if name in side.checkpoint.files
    )


def _groups(
    pair: CheckpointPair, layer: Layer, origin: Layer, located: Sequence[dict[str, Located]], evidence: Evidence,
    lattices: Lattices, exact: bool, advance: Advance,
) -> Iterator[list[Pair]]:  # fmt: skip
    """Measure a layer, expert by expert, and yield the pairs of each expert, or of the whole layer without experts."""
    sides = [(pair.base, origin, located[0]), (pair.new, layer, located[1])]
    if pair.third is not None:
        sides.append((pair.third, origin, pair.third.located(origin)))
    several = bundles(*(items for *_, items in sides))
    counts = {names: _experts(located[1][names[0]]) for names in several}
    of_layer: list[Pair] = []
    for expert in range(max(counts.values(), default=0) or 1):
        mine: list[Pair] = []
        like: Tensor | None = None
        for names in (names for names, count in counts.items() if expert < max(1, count)):
            tensors = [side.read([items[name] for name in names], expert, its) for side, its, items in sides]
            for at, name in enumerate(names):
                three = [several_tensors[at] for several_tensors in tensors]
                for several_tensors in tensors:
                    several_tensors[at] = torch.empty(0)
                if three[0].shape != three[1].shape:
                    like = _kept_units(name, three, like, layer, origin, evidence)
                    three = three[:2]
                packed = (pair.base.packed(located[0][name]), pair.new.packed(located[1][name]))
                number = expert if counts[names] else None
                cut = like if three[0].shape != three[1].shape else None
                one = measured(layer, name, number, three, packed, lattices, exact, cut)
                one.experts = max(counts.values())
                mine.append(one)
                advance(one.size)
        evidence.pairs += mine
        of_layer += mine if expert == 0 else []
        for prefix in dict.fromkeys(one.matrix.rpartition(".")[0] for one in mine if one.prints is not None):
            start = f"{prefix}." if prefix else ""
            group = [one for one in mine if one.prints is not None and one.matrix.rpartition(".")[0] == prefix]
            biases = [one for one in of_layer if one.matrix in (f"{start}gate.bias", f"{start}up.bias")]
            number = group[0].expert
            if order := unit_order(layer, number, start, [*group, *biases]):
                evidence.orders.append(order)
            yield group
            for one in group:
                one.prints = one.units = None


def _experts(item: Located) -> int:
    return item.axes[0].size if len(item.axes) > 2 else 0


def _kept_units(
    name: str, tensors: Sequence[Tensor], like: Tensor | None, layer: Layer, origin: Layer, evidence: Evidence
) -> Tensor:
    """Return the unit of BASE that each unit of NEW is, if NEW has fewer. Raises FFNError if NEW's are not among
    them."""
    if like is not None:
        return like
    base, new = (tensor.view(len(tensor), -1) for tensor in tensors[:2])
    kept = nearest(base, new, ALIKE)
    if kept is None:
        what = f"d_ff is {origin.spec.d_ff} in BASE and {layer.spec.d_ff} in NEW"
        raise FFNError(f"{what}, and NEW's units are not among BASE's (layer {layer.index})", "are these one model?")
    evidence.removed[layer.stack, layer.index] = (origin.spec.d_ff, layer.spec.d_ff)
    return kept


# --- rows -------------------------------------------------------------------------------------------------------------


def _parts(layer: Layer, group: Sequence[Pair]) -> list[ChangedPart]:
    """Return the whole group, then its units, the most changed first; nothing if nothing changed."""
    sums = [one.units for one in group if one.units is not None]
    if not any(one.changed for one in group) or not sums:
        return []
    both = torch.stack(sums).sum(0)
    shared, expert = group[0].matrix.startswith("shared."), group[0].expert
    whole = float(both[:, 1].sum() / both[:, 0].sum()) if float(both[:, 0].sum()) else 0.0
    ratios = (both[:, 1] / both[:, 0].clamp(min=1e-300)).sqrt()
    ratios[both[:, 1] == 0] = 0
    top = ratios.topk(min(_UNITS, len(ratios)))
    out = [ChangedPart(layer.stack, layer.index, expert, None, shared, sqrt(whole))]
    return out + [
        ChangedPart(layer.stack, layer.index, expert, unit, shared, change)
        for unit, change in zip(top.indices.tolist(), top.values.tolist(), strict=True) if change
    ]  # fmt: skip


def _largest(units: Sequence[ChangedPart]) -> list[ChangedPart]:
    """Return the most changed units of each layer."""
    by_layer: dict[tuple[str, int], list[ChangedPart]] = {}
    for unit in units:
        by_layer.setdefault((unit.stack, unit.layer), []).append(unit)
    return [one for many in by_layer.values() for one in sorted(many, key=lambda u: -u.relative_change)[:_UNITS]]


def _rows(evidence: Evidence) -> list[ParameterRow]:
    """Return a row for each parameter of each layer; those of the experts are added up."""
    several: dict[tuple[str, int, str], list[Pair]] = {}
    for pair in evidence.pairs:
        several.setdefault((pair.layer.stack, pair.layer.index, pair.matrix), []).append(pair)
    return [_row(pairs, evidence.base_of[stack, index].index) for (stack, index, _), pairs in several.items()]


def _row(pairs: Sequence[Pair], base_layer: int) -> ParameterRow:
    first, size = pairs[0], sum(pair.size for pair in pairs)
    change, gram = sum(pair.squared_change for pair in pairs), torch.stack([pair.gram for pair in pairs]).sum(0)
    base, new, both = float(gram[0, 0]), float(gram[1, 1]), float(gram[0, 1])
    most = max(pairs, key=lambda pair: abs(pair.max_change))
    at = most.max_at if most.expert is None or most.max_at is None else (most.expert, *most.max_at)
    spectra = [(pair.spectrum, pair.squared_change) for pair in pairs if pair.spectrum]
    count = min((len(one.energy) for one, _ in spectra), default=0)
    energy = (
        tuple(sum(one.energy[k] * weight for one, weight in spectra) / change for k in range(count)) if change else ()
    )
    relative = sqrt(change / base) if base else float("inf") if change else 0.0
    return ParameterRow(
        first.layer.index, first.matrix, relative, sum(pair.changed for pair in pairs) / size, most.max_change, at,
        max((one.rank_90 for one, _ in spectra), default=None), energy, both / sqrt(base * new) if base * new else None,
        max((one.effective_rank for one, _ in spectra), default=None), sqrt(base), size, first.layer.stack, base_layer,
    )  # fmt: skip
