"""Where FFNs lie in a layer, by names and shapes: matrices of one naming, shared experts and routers beside them.

An FFNLocation is one FFN: its own matrices, or its experts', with the shared experts' beside them. What the other
tensors are (a router, a correction, a gate for the shared experts) their names say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ffncli.models.tensors.names import BY_LAST, Naming, last
from ffncli.models.tensors.shapes import Item

_NORM = re.compile(r"(?:^|[._])(?:layer_?norm|norm\d?|ln\w*|layernorm\w*|ffn_sub_norm)(?:[._]|$)", re.IGNORECASE)
_SHARED = re.compile(r"(?:^|\.)(?:shared_\w+|shared)\.$|_shexp$")
_BESIDE = re.compile(
    r"(?:moe\.)?(?:router|gate|shared_expert_gate|ffn_gate_inp\w*|exp_probs_b)\."
)  # beside their experts
_ROUTER = re.compile(r"(?:^|\.)(?:router|gate|ffn_gate_inp)(?:\.(?:layer|wg|gate|classifier))?\.weight$")
_SHARED_GATE = re.compile(r"shared_expert_gate\.weight$|ffn_gate_inp_shexp\.weight$")
_LATENT = re.compile(r"(?:^|\.)fc[12]_latent_proj\.weight$")  # around Nemotron-H's experts, the narrow side first
_ONE_EXPERT = re.compile(r"(?:^|\.)experts\.(?:expert_)?\d+\.")  # one that is unlike its neighbours
_CORRECTION = re.compile(r"correction_bias$|expert_bias$|router_bias$|exp_probs_b\.bias$")
_ROLES = {"latent": _LATENT, "router": _ROUTER, "shared_gate": _SHARED_GATE, "correction": _CORRECTION}


@dataclass(frozen=True)
class Projections:
    """The matrices of one FFN, or of one FFN's experts: where they lie in the layer and how they are named there."""

    parent: str
    naming: Naming
    suffix: str  # ".weight", or "" for a parameter without a module

    def name(self, leaf: str) -> str:
        """The tensor of a matrix that the naming calls `leaf`."""
        return self.parent + leaf + self.suffix

    def bias(self, leaf: str) -> str:
        """That of its bias."""
        return self.parent + leaf + (".bias" if self.suffix else "_bias")

    def matrices(self, held: Mapping[str, Item]) -> dict[str, Item]:
        """Gate, up and down, in this order."""
        return {self.name(leaf): held[self.name(leaf)] for leaf in self.naming.names}

    @property
    def is_shared(self) -> bool:
        """Whether these are shared experts' by their names."""
        return bool(_SHARED.search(self.parent) or _SHARED.search(self.naming.down))


@dataclass(frozen=True)
class FFNLocation:
    """One FFN of a layer: its matrices, those of the shared experts beside them, how many experts (0: dense)."""

    own: Projections
    shared: Sequence[Projections]
    experts: int

    @property
    def all(self) -> tuple[Projections, ...]:
        """Its own matrices, then those of the shared experts."""
        return (self.own, *self.shared)

    @property
    def roots(self) -> set[str]:
        """The modules that are the FFN's own, if it has any."""
        out = {p.parent for p in self.all}
        if self.experts and (at := re.search(r"(?:^|\.)experts\.", self.own.parent)):
            out.add(self.own.parent[: at.start() + (self.own.parent[at.start()] == ".")])
        return out - {""}


def is_norm(name: str) -> bool:
    """Whether a tensor is called like a norm's."""
    return bool(_NORM.search(name))


def role(name: str) -> str:
    """What a tensor beside the matrices is, by its name: router, shared_gate, correction, latent; empty for another."""
    return next((kind for kind, pattern in _ROLES.items() if pattern.search(name)), "")


def ffn_locations(held: Mapping[str, Item], projections: Sequence[Projections]) -> list[FFNLocation]:
    """The FFNs that they make. Shared experts belong to the experts beside them."""
    rows = next((i.shape[0] for name, i in held.items() if _ROUTER.search(name) and i.shape), 0)
    counts = {p: _expert_count(held, p, rows) for p in projections if not p.is_shared}
    first = next((p for p, experts in counts.items() if experts), None)
    if first is None:  # what is called shared beside no experts is an FFN like another
        counts |= dict.fromkeys((p for p in projections if p.is_shared), 0)
    shared = [p for p in projections if p.is_shared]
    return [FFNLocation(p, shared if p is first else (), experts) for p, experts in counts.items()]


def projections(held: Mapping[str, Item]) -> Iterator[Projections]:
    """The best naming (with most matrices) at every place that has a down projection."""
    for name in held:
        suffix = ".weight" if name.endswith(".weight") else ""
        stem = name.removesuffix(suffix)
        for down, namings in BY_LAST.get(last(stem), ()):
            if not f".{stem}".endswith(f".{down}") or is_norm(name):  # the scale of a norm may be an MLP's (Voxtral)
                continue
            possible = [Projections(stem[: len(stem) - len(down)], naming, suffix) for naming in namings]
            whole = [p for p in possible if all(p.name(leaf) in held for leaf in p.naming.names) and _fits(held, p)]
            if whole:
                yield max(whole, key=lambda p: len(p.naming.names))


def _fits(held: Mapping[str, Item], p: Projections) -> bool:
    """Whether up and down can follow each other: as many numbers, or twice as many in a fused one."""
    up, down = held[p.name(p.naming.up)], held[p.name(p.naming.down)]
    if not up.params or not down.params:
        return True  # their names alone decide
    matrices = all(item.shape is None or len(item.shape) > 1 for item in (up, down))
    up_size, down_size = (_of_one(item) for item in (up, down))
    return matrices and up_size in (down_size, *([] if p.naming.gate else [2 * down_size]))


def _of_one(item: Item) -> int:
    """How many numbers one expert's matrix has, where all experts' are in one tensor."""
    return item.params // item.shape[0] if item.shape and _is_stack(item.shape) else item.params


def _is_stack(shape: tuple[int, ...]) -> bool:
    """Whether these are several matrices; [out, in, 1] is a convolution of width 1."""
    return len(shape) == 3 and shape[-1] > 1


def _expert_count(held: Mapping[str, Item], p: Projections, rows: int) -> int:
    """How many experts the matrices belong to; 0 for an FFN without. `rows` are the router's."""
    down = held[p.name(p.naming.down)]
    if "experts.#." in p.parent:
        return max(item.count for item in p.matrices(held).values())
    if down.shape and _is_stack(down.shape):
        return down.shape[0]
    if _ONE_EXPERT.search(p.parent):
        return 1
    return rows if re.search(r"(?:^|\.)experts\.", p.parent) else 0  # one below the other in one matrix (DBRX)


def members(held: Mapping[str, Item], locations: Sequence[FFNLocation]) -> list[dict[str, Item]]:
    """What belongs to each FFN, norms apart: its matrices, all else in its modules, routers beside its experts.

    A name belongs to the innermost module, so that nothing counts twice. Names and modules are walked in order, in
    which all that lies in a module follows it: the time grows with the names, whatever they are.
    """
    owner: dict[str, int] = {}
    roots: dict[str, int] = {}
    for number, location in enumerate(locations):
        for p in location.all:
            owner |= {name: number for leaf in p.naming.names for name in (p.name(leaf), p.bias(leaf))}
        for root in location.roots:
            roots.setdefault(root, number)
    moe = next((number for number, location in enumerate(locations) if location.experts), None)
    out: list[dict[str, Item]] = [{} for _ in locations]
    inside: list[str] = []
    for name in sorted({*held, *roots}):
        while inside and not name.startswith(inside[-1]):
            inside.pop()
        if name in roots:
            inside.append(name)
        mine = owner.get(name, roots[inside[-1]] if inside else moe if _BESIDE.match(name) else None)
        if mine is not None and name in held and not is_norm(name):
            out[mine][name] = held[name]
    return out
