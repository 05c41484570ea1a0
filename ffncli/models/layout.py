"""Where a layer's FFN lies among its tensors, and how: names and shapes → the canonical weights of `block/`.

The matrices are found as `recognise` finds them. A Piece says where one canonical parameter is and how it is stored.
Canonical is torch's `[out, in]`; a file's matrix may be transposed (GPT-2's Conv1D), hold gate and up one after the
other (Phi-3) or interleaved (gpt-oss), be one tensor per expert, one for all, or all experts' rows in one matrix. What
names and shapes do not say is in `arrangement.py`, family by family; what nothing says is taken as usual, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Axis, Norm, parameters
from ffncli.errors import FFNError, shown
from ffncli.models.arrangement import Arrangement, arrangement, norm_modules, outside
from ffncli.models.matrices import Item, matrix
from ffncli.models.model import Spot
from ffncli.models.places import Place, Projections, members, places, projections, role
from ffncli.models.recognise import inside

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """`tensor` is relative to the layer; `{e}` stands for every expert.

    The stored matrix holds `parts` parameters along its output axis, of which this is number `part`, either one after
    the other or `interleaved`; `transposed` means stored as `[in, out]`; `stacked`: the experts' matrices lie one below
    the other in a single one.
    """

    tensor: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    interleaved: bool = False
    stacked: bool = False

    @property
    def per_expert(self) -> bool:
        """One tensor per expert, to be stacked."""
        return "{e}" in self.tensor

    @property
    def words(self) -> str:
        """How the layout reads to a person."""
        how = [] if self.parts == 1 else ["interleaved" if self.interleaved else "concatenated"]
        how = [f"{h} {self.part + 1} of {self.parts}" for h in how]
        how += ["experts one below the other"] if self.stacked else []
        return ", ".join(
            (["transposed"] if self.transposed else []) + how + (["per expert"] if self.per_expert else [])
        )


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


@dataclass(frozen=True)
class Held:
    """One layer's tensors: `items` by their names inside it, `#` for an expert's number; `full` are their whole names.

    `../` begins the name of a tensor outside of the layer (XLM's norms).
    """

    stem: str
    items: Mapping[str, Item]
    full: Mapping[str, str]


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


@dataclass(frozen=True)
class Names:
    """The tensors among which one layer's parameters are looked for, FFN `number` of those that the layer has.

    `stored` are all names of the file; `alike` gives another layer of the same stack, which tells what this one lacks.
    `family` is the model_type, "" where there is none.
    """

    here: Held
    stored: Collection[str]
    family: str
    where: str
    number: int = 0
    alike: Callable[[], Held | None] = lambda: None


@dataclass(frozen=True)
class _Found:
    piece: Piece
    format: str = ""
    evidence: str = ""
    assumed: str = ""


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


def _found(names: Names, spec: FFNSpec) -> dict[str, _Found]:
    """The layer's own pieces; what it lacks, as another layer of its stack has it."""
    found = _pieces(names.here, names, spec)
    if parameters(steps(spec)).keys() <= found.keys():
        return found
    alike = names.alike()
    return (_pieces(alike, names, spec) if alike else {}) | found


def _located(names: Names, parameter: str, axes: tuple[Axis, ...], found: _Found) -> Located:
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


# --- the pieces of one layer ------------------------------------------------------------------------------------------


def _pieces(held: Held, names: Names, spec: FFNSpec) -> dict[str, _Found]:
    """Canonical parameter → its piece, for one FFN of a layer; empty where the layer has no such FFN."""
    items = held.items
    here = places(items, [*projections(items)])
    kind = [n for n, place in enumerate(here) if bool(place.experts) == bool(spec.moe)]
    number = names.number if names.number < len(here) else 0
    if number not in kind:
        if not kind:
            return {}
        number = kind[0]
    place, own = here[number], members(items, here)[number]
    if spec.gated and not place.own.way.gate and not _fused(items, place.own):
        return {}  # its gate is missing
    rules = arrangement(names.family)
    out = dict(_matrices(items, place.own, spec, rules, names))
    shared = replace(spec, d_ff=spec.shared_width, moe=None) if spec.shared_width else spec
    for several in place.shared:
        out |= {f"shared.{n}": found for n, found in _matrices(items, several, shared, rules, names)}
    out |= _beside(items, place, own, names)
    out |= _norms(items, place, spec, rules)
    return out


def _fused(items: Mapping[str, Item], p: Projections) -> bool:
    """Whether gate and up are in one matrix, as far as shapes that are here can say."""
    up, down = (matrix(items[p.name(leaf)]) for leaf in (p.way.up, p.way.down))
    return up is None or down is None or up[0] * up[1] == 2 * down[0] * down[1]


def _matrices(
    items: Mapping[str, Item], p: Projections, spec: FFNSpec, rules: Arrangement, names: Names
) -> Iterator[tuple[str, _Found]]:
    """Gate, up and down with their biases, as one way has them."""
    up, down = items[p.name(p.way.up)], items[p.name(p.way.down)]
    fused = spec.gated and not p.way.gate
    lie = _lie(up, down, 2 if fused else 1, spec, rules)
    order = rules.order(p.way) if fused else None
    leaves = {"gate": p.way.gate or p.way.up, "up": p.way.up, "down": p.way.down}
    if not spec.gated:
        del leaves["gate"]
    for step, leaf in leaves.items():
        halves: dict[str, int | bool] = {}
        because, assumed = [f"named {leaf}", lie.because], lie.assumed
        if order and step != "down":
            part = 0 if (step == "gate") == order.gate_first else 1
            halves = {"part": part, "parts": 2, "interleaved": order.interleaved}
            because.append(order.because)
            assumed = "; ".join(filter(None, (assumed, order.assumed)))
        turned = lie.down_turned if step == "down" else lie.turned
        for tensor, ending, across in ((p.name(leaf), "weight", turned), (p.bias(leaf), "bias", False)):
            if tensor in items:
                piece = Piece(_spelled(tensor, names), across, stacked=lie.stacked and ending == "weight", **halves)  # type: ignore[arg-type]
                why = ", ".join(filter(None, because if ending == "weight" else because[:1] + because[2:]))
                yield f"{step}.{ending}", _Found(piece, items[tensor].format, why, assumed)


def _spelled(tensor: str, names: Names) -> str:
    """The name with `{e}` for an expert's number, as this file writes it: `experts.3`, or `experts.expert_3`."""
    full = names.here.stem + tensor
    plain = full.replace("#", "0") in names.stored or full.replace("#", "expert_0") not in names.stored
    return tensor.replace("#", "{e}" if plain else "expert_{e}")


@dataclass(frozen=True)
class _Lie:
    """How up (and gate) and down lie."""

    turned: bool = False
    down_turned: bool = False
    stacked: bool = False
    because: str = ""
    assumed: str = ""


def _lie(up: Item, down: Item, parts: int, spec: FFNSpec, rules: Arrangement) -> _Lie:
    """By both shapes together; where they fit both ways, as the family has it, else as nn.Linear has it."""
    d_model = (spec.moe.latent if spec.moe else None) or spec.d_model
    wide, experts = parts * spec.d_ff, spec.moe.experts if spec.moe else 0
    a, b = matrix(up), matrix(down)
    if a is None or b is None:
        return _Lie(because="as nn.Linear: the file does not say the shape")
    if experts and len(up.shape or ()) == 2 and up.count == 1 and a == b == (experts * spec.d_ff, d_model):
        return _Lie(False, True, True, f"shape {list(a)} = [experts · d_ff, d_model], down too")
    linear = (a, b) == ((wide, d_model), (d_model, spec.d_ff))
    turned = (a, b) == ((d_model, wide), (spec.d_ff, d_model))
    if linear and turned:
        way = "[in, out]" if rules.transposed else "[out, in]"
        because = f"square; {way} as {rules.family or 'nn.Linear'} has it"
        assumed = "" if rules.family else "square matrices are read as nn.Linear's [out, in]"
        return _Lie(rules.transposed, rules.transposed, False, because, assumed)
    if turned or (rules.transposed and not linear):
        return _Lie(True, True, False, f"shape [..., in, out] = {list(a)}")
    return _Lie(because=f"shape [..., out, in] = {list(a)}")


_PARAMETERS = {
    "router": "router.weight", "shared_gate": "shared_gate.weight", "correction": "route.correction",
}  # fmt: skip


def _beside(items: Mapping[str, Item], place: Place, own: Mapping[str, Item], names: Names) -> dict[str, _Found]:
    """The router with its bias, the correction, the gate of shared experts, the latent pair, what activations learn."""
    matrices = {q.name(leaf) for q in place.all for leaf in q.way.names}
    out: dict[str, _Found] = {}

    def add(parameter: str, tensor: str) -> None:
        found = _Found(Piece(_spelled(tensor, names)), items[tensor].format, f"named {tensor}")
        out.setdefault(parameter, found)

    latent = sorted(name for name in own if role(name) == "latent")
    for parameter, tensor in zip(("latent.weight", "widened.weight"), latent, strict=False):
        add(parameter, tensor)
    for name in own:
        if name in matrices:
            continue
        if kind := _PARAMETERS.get(role(name)):
            add(kind, name)
            bias = name.removesuffix("weight") + "bias"
            if kind == "router.weight" and bias in own:
                add("router.bias", bias)
        elif own[name].params == 1:
            add("act." + name.rpartition(".")[2], name)
    return out


def _norms(items: Mapping[str, Item], place: Place, spec: FFNSpec, rules: Arrangement) -> dict[str, _Found]:
    """The norms of the block, by the first of their usual names that is there in the width they need."""
    out: dict[str, _Found] = {}
    inside = place.own.parent.removesuffix("#.").split(".")[:-1]
    around = [".".join(inside[:n]) + "." if n else "" for n in range(len(inside), -1, -1)]
    for step in steps(spec):
        if not isinstance(step.op, Norm):
            continue
        for module in norm_modules(step.output, spec, rules):
            stems = [module] if module.startswith("../") else [at + module for at in around]
            for stem in stems:
                pieces = _norm(items, stem, step.output, step.op)
                if pieces and not out.keys() & pieces.keys():
                    out |= pieces
    return out


def _norm(items: Mapping[str, Item], stem: str, step: str, op: Norm) -> dict[str, _Found]:
    """Weight and bias of one norm module, all that the op needs; older files call them gamma and beta."""
    out: dict[str, _Found] = {}
    for parameter, endings in (("weight", ("weight", "gamma", "scale")), ("bias", ("bias", "beta"))):
        tensor = next((t for e in endings if (t := f"{stem}.{e}") in items), None)
        if tensor and parameter not in op.parameters():
            return {}  # a norm of another kind
        if tensor and items[tensor].shape in ((op.axis.size,), None):
            out[f"{step}.{parameter}"] = _Found(Piece(tensor), items[tensor].format, f"named {stem}")
    return out if len(out) == len(op.parameters()) else {}
