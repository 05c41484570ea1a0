"""Where FFNs are in a layer, by names and shapes: matrices of one naming, with their shared experts and routers.

An FFNLocation is one FFN: its matrices, or its experts', and those of its shared experts. The other tensors (a router,
a correction, a gate for the shared experts) are recognised by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ffncli.dataclass import dataclass
from ffncli.models.tensors.names import BY_LAST, Naming, last
from ffncli.models.tensors.shapes import Item

_NORM = re.compile(
    r"(?:^|[._])(?:layer_?norm|rmsnorm|norm\d?|ln\w*|layernorm\w*|ffn_sub_norm)(?:[._]|$)", re.IGNORECASE
)
_SHARED = re.compile(r"(?:^|\.)(?:shared?_\w+|shared)\.$|_shexp$")
_ROUTING = re.compile(
    r"(?:moe\.)?(?:router|gate|shared_expert_gate|ffn_gate_inp\w*|exp_probs_b)\."
)  # next to the experts, not inside their module
_ROUTER = re.compile(
    r"(?:^|\.)(?:router|gate|ffn_gate_inp)(?:\.(?:layer|wg|gate|classifier|router_mlp\.out_proj))?\.weight$"
)
_SHARED_GATE = re.compile(r"shared_expert_gate\.weight$|ffn_gate_inp_shexp\.weight$")
# Around experts in a narrower space: Nemotron-H's, Kimi-K3's, Muse-Spark's.
_LATENT = re.compile(r"(?:^|\.)(?:fc1_latent_proj|routed_expert_down_proj|pre_expert_proj)\.weight$")
_WIDENED = re.compile(r"(?:^|\.)(?:fc2_latent_proj|routed_expert_up_proj|post_expert_proj)\.weight$")
_MIXED_BIAS = re.compile(r"(?:^|\.)mlp\.bias$")  # JetMoE's
_ONE_EXPERT = re.compile(r"(?:^|\.)experts\.(?:expert_)?\d+\.")  # one that differs from the others
_CORRECTION = re.compile(  # of a gate, the bias is one in DeepSeek's files and Inkling's
    r"correction_bias$|expert_bias$|balancing_biases$|router_bias$|exp_probs_b\.bias$|(?:^|\.)(?:ffn|mlp)\.gate\.bias$"
)
_FACTOR = re.compile(r"(?:^|\.)global_scale$")  # one learned number for the whole FFN (Inkling)
# A router that is an MLP (ZAYA's): what narrows its input, the factors of the state that it gets, its two layers.
_ROUTER_MLP = {
    "router_in": re.compile(r"(?:^|\.)gate\.down_proj\.weight$"),
    "router_carried": re.compile(r"(?:^|\.)gate\.router_states_scale$"),
    "router_fc1": re.compile(r"(?:^|\.)gate\.router_mlp\.fc1\.weight$"),
    "router_fc2": re.compile(r"(?:^|\.)gate\.router_mlp\.fc2\.weight$"),
}
_ROLES = {
    **_ROUTER_MLP,
    "factor": _FACTOR, "latent": _LATENT, "widened": _WIDENED, "mixed_bias": _MIXED_BIAS, "router": _ROUTER,
    "shared_gate": _SHARED_GATE, "correction": _CORRECTION,
}  # fmt: skip


@dataclass(frozen=True)
class Projections:
    """The matrices of one FFN, or of one FFN's experts: where they are in the layer and how they are named there."""

    parent: str
    naming: Naming
    suffix: str  # ".weight", or "" for a parameter without a module

    def name(self, leaf: str) -> str:
        """The tensor of a matrix that the naming calls `leaf`."""
        return self.parent + leaf + self.suffix

    def bias(self, leaf: str) -> str:
        """The name of its bias."""
        return self.parent + leaf + (".bias" if self.suffix else "_bias")

    def matrices(self, items: Mapping[str, Item]) -> dict[str, Item]:
        """Gate, up and down, in this order."""
        return {self.name(leaf): items[self.name(leaf)] for leaf in self.naming.names}

    @property
    def is_shared(self) -> bool:
        """Whether these belong to shared experts, by their names."""
        return bool(_SHARED.search(self.parent) or _SHARED.search(self.naming.down))


@dataclass(frozen=True)
class FFNLocation:
    """One FFN of a layer: its matrices, those of its shared experts, the number of experts (0: dense)."""

    projections: Projections
    shared: Sequence[Projections]
    experts: int

    @property
    def all(self) -> tuple[Projections, ...]:
        """Its matrices, then those of the shared experts."""
        return (self.projections, *self.shared)

    @property
    def roots(self) -> set[str]:
        """The modules that belong to this FFN alone, if it has any."""
        out = {p.parent for p in self.all}
        if self.experts and (at := re.search(r"(?:^|\.)experts\.", self.projections.parent)):
            out.add(self.projections.parent[: at.start() + (self.projections.parent[at.start()] == ".")])
        return out - {""}


def is_norm(name: str) -> bool:
    """Whether a tensor has a norm's name."""
    return bool(_NORM.search(name))


def role(name: str) -> str:
    """The role of a tensor other than gate, up and down, by its name: a key of _ROLES; else empty."""
    return next((kind for kind, pattern in _ROLES.items() if pattern.search(name)), "")


def ffn_locations(items: Mapping[str, Item], projections: Sequence[Projections]) -> list[FFNLocation]:
    """The FFNs that these projections form. Shared experts belong to the first routed experts."""
    rows = next((i.shape[0] for name, i in items.items() if _ROUTER.search(name) and i.shape), 0)
    counts = {p: _expert_count(items, p, rows) for p in projections if not p.is_shared}
    first = next((p for p, experts in counts.items() if experts), None)
    if first is None:  # without routed experts, an FFN called shared is an ordinary one
        counts |= dict.fromkeys((p for p in projections if p.is_shared), 0)
    shared = [p for p in projections if p.is_shared]
    return [FFNLocation(p, shared if p is first else (), experts) for p, experts in counts.items()]


def projections(items: Mapping[str, Item]) -> Iterator[Projections]:
    """The best naming (with most matrices) at every place that has a down projection."""
    for name in items:
        suffix = ".weight" if name.endswith(".weight") else ""
        stem = name.removesuffix(suffix)
        for down, namings in BY_LAST.get(last(stem), ()):
            if role(name) in _ROUTER_MLP:
                continue
            if not f".{stem}".endswith(f".{down}") or is_norm(name):  # the scale of a norm may be an MLP's (Voxtral)
                continue
            possible = [Projections(stem[: len(stem) - len(down)], naming, suffix) for naming in namings]
            whole = [p for p in possible if all(p.name(leaf) in items for leaf in p.naming.names) and _fits(items, p)]
            if whole:
                yield max(whole, key=lambda p: len(p.naming.names))


def _fits(items: Mapping[str, Item], p: Projections) -> bool:
    """Whether up and down can follow each other: equally many numbers, or twice as many in a fused one."""
    up, down = items[p.name(p.naming.up)], items[p.name(p.naming.down)]
    if not up.params or not down.params:
        return True  # only their names decide
    matrices = all(item.shape is None or len(item.shape) > 1 for item in (up, down))
    up_size, down_size = (_of_one(item) for item in (up, down))
    return matrices and up_size in (down_size, *([] if p.naming.gate else [2 * down_size]))


def _of_one(item: Item) -> int:
    """How many numbers one expert's matrix has, if all experts share one tensor."""
    return item.params // item.shape[0] if item.shape and _is_stack(item.shape) else item.params


def _is_stack(shape: tuple[int, ...]) -> bool:
    """Whether these are several matrices; [out, in, 1] is a convolution of width 1."""
    return len(shape) == 3 and shape[-1] > 1


def _expert_count(items: Mapping[str, Item], p: Projections, rows: int) -> int:
    """How many experts the matrices belong to; 0 for an FFN without experts. `rows` are the router's."""
    down = items[p.name(p.naming.down)]
    if "experts.#." in p.parent:
        return max(item.count for item in p.matrices(items).values())
    if down.shape and _is_stack(down.shape):
        return down.shape[0]
    if _ONE_EXPERT.search(p.parent):
        return 1
    return rows if re.search(r"(?:^|\.)experts\.", p.parent) else 0  # stacked in one matrix (DBRX)


def members(items: Mapping[str, Item], locations: Sequence[FFNLocation]) -> list[dict[str, Item]]:
    """The tensors of each FFN except norms: its matrices, everything else in its modules, its experts' router.

    A name belongs to the innermost module, so nothing counts twice. In sorted order all names in a module follow it, so
    that one walk is enough: the time is linear in the number of names.
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
    for name in sorted({*items, *roots}):
        while inside and not name.startswith(inside[-1]):
            inside.pop()
        if name in roots:
            inside.append(name)
        mine = owner.get(name, roots[inside[-1]] if inside else moe if _ROUTING.match(name) else None)
        if mine is not None and name in items and not is_norm(name):
            out[mine][name] = items[name]
    return out
