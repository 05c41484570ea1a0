"""How the tensors of one layer are read: names and shapes → the Piece of every canonical parameter.

The matrices are found as `recognise` finds them. A Piece says where one canonical parameter is and how it is stored.
Canonical is torch's `[out, in]`; a file's matrix may be transposed (GPT-2's Conv1D), hold gate and up one after the
other (Phi-3) or interleaved (gpt-oss), be one tensor per expert, one for all, or all experts' rows in one matrix. What
names and shapes do not say is in `arrangement.py`, family by family; what nothing says is taken as usual, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Norm
from ffncli.models.arrangement import Arrangement, arrangement, norm_modules
from ffncli.models.matrices import Item, matrix
from ffncli.models.places import Place, Projections, members, places, projections, role


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
class Held:
    """One layer's tensors: `items` by their names inside it, `#` for an expert's number; `full` are their whole names.

    `../` begins the name of a tensor outside of the layer (XLM's norms).
    """

    stem: str
    items: Mapping[str, Item]
    full: Mapping[str, str]


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
class Reading:
    """A piece, the format of its tensor, why it is read so, and what of that was assumed; as `Located` has them."""

    piece: Piece
    format: str = ""
    evidence: str = ""
    assumed: str = ""


def pieces(held: Held, names: Names, spec: FFNSpec) -> dict[str, Reading]:
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
) -> Iterator[tuple[str, Reading]]:
    """Gate, up and down with their biases, as one way has them."""
    fused = bool(spec.gated and not p.way.gate)
    lie = _lie(items[p.name(p.way.up)], items[p.name(p.way.down)], 2 if fused else 1, spec, rules)
    leaves = {"gate": p.way.gate or p.way.up} if spec.gated else {}
    for step, leaf in {**leaves, "up": p.way.up, "down": p.way.down}.items():
        why, assumed, halves = [f"named {leaf}", lie.because], lie.assumed, Piece("")
        if fused and step != "down":
            order = rules.order(p.way, spec.moe is not None and not p.suffix and p.bias(leaf) in items)
            halves = Piece("", False, int((step == "gate") != order.gate_first), 2, order.interleaved)
            why.append(order.because)
            assumed = "; ".join(filter(None, (assumed, order.assumed)))
        turned = lie.down_turned if step == "down" else lie.turned
        weight = replace(halves, tensor=_spelled(p.name(leaf), names), transposed=turned, stacked=lie.stacked)
        yield f"{step}.weight", Reading(weight, items[p.name(leaf)].format, ", ".join(why), assumed)
        if p.bias(leaf) in items:
            bias = replace(halves, tensor=_spelled(p.bias(leaf), names))
            yield f"{step}.bias", Reading(bias, items[p.bias(leaf)].format, ", ".join([why[0], *why[2:]]), assumed)


def _spelled(tensor: str, names: Names) -> str:
    """The name with `{e}` for an expert's number, as this file writes it: `experts.3`, or `experts.expert_3`."""
    full = names.here.stem + tensor
    plain = full.replace("#", "0") in names.stored or full.replace("#", "expert_0") not in names.stored
    return tensor.replace("#", "{e}" if plain else "expert_{e}")


@dataclass(frozen=True)
class _Lie:
    """How up (and gate) and down lie: transposed or not, experts one below the other; why, and what was assumed."""

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
        return _Lie(because="as nn.Linear has it: its shape is not known")
    if experts and len(up.shape or ()) == 2 and up.count == 1 and a == b == (experts * spec.d_ff, d_model):
        return _Lie(False, True, True, "[experts · d_ff, d_model] by its shape")
    linear = (a == (wide, d_model)) + (b == (d_model, spec.d_ff))
    turned = (a == (d_model, wide)) + (b == (spec.d_ff, d_model))
    if linear != turned:
        way = "[in, out]" if turned > linear else "[out, in]"
        return _Lie(turned > linear, turned > linear, False, f"{way} by the shapes {list(a)} and {list(b)}")
    way = "[in, out]" if rules.transposed else "[out, in]"
    because = f"{way} as {rules.family or 'nn.Linear'} has it: the shapes {list(a)} and {list(b)} do not tell"
    assumed = "" if rules.family or linear < 2 else "square matrices are read as nn.Linear's [out, in]"
    return _Lie(rules.transposed, rules.transposed, False, because, assumed)


_PARAMETERS = {
    "router": "router.weight", "shared_gate": "shared_gate.weight", "correction": "route.correction",
}  # fmt: skip


def _beside(items: Mapping[str, Item], place: Place, own: Mapping[str, Item], names: Names) -> dict[str, Reading]:
    """The router with its bias, the correction, the gate of shared experts, the latent pair, what activations learn."""
    matrices = {q.name(leaf) for q in place.all for leaf in q.way.names}
    out: dict[str, Reading] = {}

    def add(parameter: str, tensor: str) -> None:
        found = Reading(Piece(_spelled(tensor, names)), items[tensor].format, f"named {tensor}")
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


def _norms(items: Mapping[str, Item], place: Place, spec: FFNSpec, rules: Arrangement) -> dict[str, Reading]:
    """The norms of the block, by the first of their usual names that is there in the width they need."""
    out: dict[str, Reading] = {}
    inside = place.own.parent.removesuffix("#.").split(".")[:-1]
    number = next((part for part in inside[::-1] if part.isdigit()), "0")
    around = [".".join(inside[:n]) + "." if n else "" for n in range(len(inside), -1, -1)]
    for step in steps(spec):
        if not isinstance(step.op, Norm):
            continue
        for name in norm_modules(step.output, spec, rules):
            module = name.replace("{n}", number)
            stems = [module] if module.startswith("../") else [at + module for at in around]
            for stem in stems:
                pieces = _norm(items, stem, step.output, step.op)
                if pieces and not out.keys() & pieces.keys():
                    out |= pieces
    return out


def _norm(items: Mapping[str, Item], stem: str, step: str, op: Norm) -> dict[str, Reading]:
    """Weight and bias of one norm module, all that the op needs; older files call them gamma and beta."""
    out: dict[str, Reading] = {}
    for parameter, endings in (("weight", ("weight", "gamma", "scale")), ("bias", ("bias", "beta"))):
        tensor = next((t for e in endings if (t := f"{stem}.{e}") in items), None)
        if tensor and parameter not in op.parameters():
            return {}  # a norm of another kind
        if tensor and items[tensor].shape in ((op.axis.size,), None):
            out[f"{step}.{parameter}"] = Reading(Piece(tensor), items[tensor].format, f"named {stem}")
    return out if len(out) == len(op.parameters()) else {}
