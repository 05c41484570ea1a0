"""Locate the FFNs of a layer by names and shapes: matrices that match a naming (NAMINGS), with their shared experts and
routers.

Shapes show which axis is d_model, which is d_ff, and which matrices do not fit. A matrix may have either orientation:
torch's [out, in], or a convolution's [in, out]. Other tensors (a router, a correction, a gate for the shared experts)
are recognised by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
# Projections around experts in a narrower space: Nemotron-H's, Kimi-K3's, Muse-Spark's.
_LATENT = re.compile(r"(?:^|\.)(?:fc1_latent_proj|routed_expert_down_proj|pre_expert_proj)\.weight$")
_WIDENED = re.compile(r"(?:^|\.)(?:fc2_latent_proj|routed_expert_up_proj|post_expert_proj)\.weight$")
_MIXED_BIAS = re.compile(r"(?:^|\.)mlp\.bias$")  # JetMoE's
_ONE_EXPERT = re.compile(r"(?:^|\.)experts\.(?:expert_)?\d+\.")  # an expert that differs from the others
_CORRECTION = re.compile(  # DeepSeek's and Inkling's files call it the gate's bias
    r"correction_bias$|expert_bias$|balancing_biases$|router_bias$|exp_probs_b\.bias$|(?:^|\.)(?:ffn|mlp)\.gate\.bias$"
)
_FACTOR = re.compile(r"(?:^|\.)global_scale$")  # one learned factor for the whole FFN (Inkling)
# A router that is an MLP (ZAYA's): the projection that narrows its input, the factors for its carried state, its two
# layers.
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
    """The matrices of one FFN or of its experts: their location in the layer, and their naming."""

    parent: str
    naming: Naming
    suffix: str  # ".weight", or "" for a parameter without a module

    def name(self, leaf: str) -> str:
        """Return the name of the tensor for the matrix that the naming calls `leaf`."""
        return self.parent + leaf + self.suffix

    def bias(self, leaf: str) -> str:
        """Return the name of the matrix's bias.

        `b_in` of a gated block of TransformerLens is added to the product of gate and up, so it is not a bias of up.
        """
        if leaf.startswith("W_") and not (self.suffix or self.naming.gate):
            return f"{self.parent}b_{leaf[2:]}"
        return f"{self.parent}{leaf}.bias" if self.suffix else f"{self.parent}{leaf.removesuffix('_weight')}_bias"

    def matrices(self, items: Mapping[str, Item]) -> dict[str, Item]:
        """Return gate, up and down, in this order."""
        return {self.name(leaf): items[self.name(leaf)] for leaf in self.naming.names}

    @property
    def is_shared(self) -> bool:
        """Return whether these are shared experts, judging by their names."""
        return bool(_SHARED.search(self.parent) or _SHARED.search(self.naming.down))


@dataclass(frozen=True)
class FFNLocation:
    """One FFN of a layer: its matrices, its shared experts' matrices, and the number of experts (0: dense)."""

    projections: Projections
    shared: Sequence[Projections]
    experts: int

    @property
    def all(self) -> tuple[Projections, ...]:
        """Return its matrices, followed by the shared experts' matrices."""
        return (self.projections, *self.shared)

    @property
    def roots(self) -> set[str]:
        """Return the names of the modules that belong only to this FFN."""
        out = {p.parent for p in self.all}
        if self.experts and (at := re.search(r"(?:^|\.)(?:(?:local_)?experts|switch_\w+)\.", self.projections.parent)):
            out.add(self.projections.parent[: at.start() + (self.projections.parent[at.start()] == ".")])
        return out - {""}


def is_norm(name: str) -> bool:
    """Return whether a tensor has a norm's name."""
    return bool(_NORM.search(name))


def role(name: str) -> str:
    """Return the role that a tensor's name shows, as a key of _ROLES; empty for other names and for gate, up, down."""
    return next((kind for kind, pattern in _ROLES.items() if pattern.search(name)), "")


def ffn_locations(items: Mapping[str, Item], projections: Sequence[Projections]) -> list[FFNLocation]:
    """Build FFNs from these projections. Shared experts belong to the first routed experts."""
    rows = next((i.shape[0] for name, i in items.items() if _ROUTER.search(name) and i.shape), 0)
    counts = {p: _expert_count(items, p, rows) for p in projections if not p.is_shared}
    first = next((p for p, experts in counts.items() if experts), None)
    shared = [p for p in projections if p.is_shared]
    if first is None:  # without routed experts, an FFN called shared is an ordinary FFN
        counts |= dict.fromkeys(shared, 0)
    return [FFNLocation(p, shared if p is first else (), experts) for p, experts in counts.items()]


def projections(items: Mapping[str, Item]) -> Iterator[Projections]:
    """Yield the best naming (with the most matrices) for every module that has a down projection."""
    for name in items:
        suffix = ".weight" if name.endswith(".weight") else ""
        stem = name.removesuffix(suffix)
        for down, namings in BY_LAST.get(last(stem), ()):
            if role(name) in _ROUTER_MLP:
                continue
            if not f".{stem}".endswith(f".{down}") or is_norm(name):  # a norm's scale may use an MLP (Voxtral)
                continue
            possible = [Projections(stem[: len(stem) - len(down)], naming, suffix) for naming in namings]
            whole = [p for p in possible if all(p.name(leaf) in items for leaf in p.naming.names) and _fits(items, p)]
            if whole:
                yield max(whole, key=lambda p: len(p.naming.names))


def _fits(items: Mapping[str, Item], p: Projections) -> bool:
    """Return whether up and down fit together: they have the same number of values, or up has twice as many because it
    contains the gate."""
    up, down = items[p.name(p.naming.up)], items[p.name(p.naming.down)]
    if not up.params or not down.params:
        return True  # only their names are known
    matrices = all(item.shape is None or len(item.shape) > 1 for item in (up, down))
    # if one tensor contains all experts, the size of one expert
    up_size, down_size = (i.params // i.shape[0] if i.shape and _is_stack(i.shape) else i.params for i in (up, down))
    plain = [] if p.naming.gate_inside else [down_size]
    return matrices and up_size in (*plain, *([] if p.naming.gate else [2 * down_size]))


def _is_stack(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is a stack of matrices; [out, in, 1] is a convolution of width 1."""
    return len(shape) == 3 and shape[-1] > 1


def _expert_count(items: Mapping[str, Item], p: Projections, rows: int) -> int:
    """Return the number of experts that the matrices belong to (0: dense); the router has `rows` rows."""
    down = items[p.name(p.naming.down)]
    if "experts.#." in p.parent:
        return max(item.count for item in p.matrices(items).values())
    if down.shape and _is_stack(down.shape):
        return down.shape[0]
    if _ONE_EXPERT.search(p.parent):
        return 1
    return rows if re.search(r"(?:^|\.)experts\.", p.parent) else 0  # experts stacked in one matrix (DBRX)


def members(items: Mapping[str, Item], locations: Sequence[FFNLocation]) -> list[dict[str, Item]]:
    """Collect each FFN's tensors except norms: its matrices, the other tensors in its modules, and the router."""
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
    # in sorted order, a module's name precedes all names in it, so one pass assigns each name to its innermost module,
    # and no name is counted twice
    for name in sorted({*items, *roots}):
        while inside and not name.startswith(inside[-1]):
            inside.pop()
        if name in roots:
            inside.append(name)
        mine = owner.get(name, roots[inside[-1]] if inside else moe if _ROUTING.match(name) else None)
        if mine is not None and name in items and not is_norm(name):
            out[mine][name] = items[name]
    return out


@dataclass(frozen=True)
class Naming:
    """The names of the matrices of one kind of FFN; without `gate`, `up` may also contain the gate. `gate_inside`: it
    does, since otherwise these are the names of an image encoder."""

    up: str
    down: str
    gate: str = ""
    gate_inside: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the matrices."""
        return (self.gate, self.up, self.down) if self.gate else (self.up, self.down)


def last(name: str) -> str:
    """Return the last component of a dotted name."""
    return name.rpartition(".")[2]


NAMINGS: Sequence[Naming] = (
    Naming("up_proj", "down_proj", "gate_proj"),  # Llama and most others
    Naming("up_proj", "down_proj", "linear_gate"),
    Naming("w3", "w2", "w1"),  # Meta's and Mistral's own files, Mixtral, LFM2
    Naming("v1", "w2", "w1"),  # DBRX
    Naming("wi_1", "wo", "wi_0"),  # T5 v1.1
    Naming("w_in.w_1", "w_out", "w_in.w_0"),  # CPM-Ant
    Naming("w1", "c_proj", "w2"),  # Qwen v1: w2 is the gate
    Naming("c_fc_1", "c_proj", "c_fc_0"),  # EXAONE 3
    Naming("c_fc", "c_proj", "c_fc2"),  # Jais, BTLM
    Naming("up_proj", "ff_out", "ff_proj"),  # LLaDA
    Naming("fc_2", "proj", "fc_1"),  # LitGPT
    Naming("fc1_x", "fc2", "fc1_g"),  # timm's SwiGLU
    Naming("fc11", "fc2", "fc12"),  # Nomic BERT
    Naming("proj_up", "proj_down", "proj_up_gate"),  # xLSTM
    Naming("W_in", "W_out", "W_gate"),  # TransformerLens
    Naming("W_in", "W_out"),
    Naming("ffn_up", "ffn_down", "ffn_gate"),  # GGUF
    Naming("ffn_up_exps", "ffn_down_exps", "ffn_gate_exps"),
    Naming("ffn_up_shexp", "ffn_down_shexp", "ffn_gate_shexp"),
    Naming("ffn_gate_up_exps", "ffn_down_exps"),  # GGUF files with gate and up in one tensor
    Naming("ffn_gate_up", "ffn_down"),
    Naming("up_proj", "down_proj"),  # Nemotron, Arcee, Apertus
    Naming("gate_up_proj", "down_proj"),  # Phi-3, GLM, 3-D experts
    Naming("up_gate_proj", "down_proj"),  # GTE
    Naming("Wi", "Wo"),  # ModernBERT
    Naming("input_linear", "output_linear"),  # Granite's MoE, JetMoE
    Naming("ff_proj", "ff_out"),  # Molmo
    Naming("w13_weight", "w2_weight"),  # Inkling's own files, for these three rows
    Naming("shared_w13_weight", "shared_w2_weight"),
    Naming("w13_dn", "w2_md"),
    Naming("mlp1_weight", "mlp2_weight"),  # OpenAI's own gpt-oss files
    Naming("w12", "w3"),  # timm's and DINOv2's packed SwiGLU
    Naming("fc", "proj"),  # LitGPT
    Naming("w_1", "w_2"),  # ESPnet
    Naming("fc1.proj", "fc2"),  # CLVP
    Naming("net.0.proj", "net.2"),  # diffusers
    Naming("fc1", "fc2"),  # OPT, Whisper, BART, CLIP
    Naming("c_fc", "c_proj"),  # GPT-2
    Naming("dense_h_to_4h", "dense_4h_to_h"),  # BLOOM, GPT-NeoX, Falcon
    Naming("fc_in", "fc_out"),  # GPT-J
    Naming("linear_fc1", "linear_fc2", gate_inside=True),  # Megatron-core
    Naming("wi", "wo"),  # T5
    Naming("lin1", "lin2"),  # DistilBERT, XLM
    Naming("mlp.in_proj", "mlp.out_proj"),  # Bark; a Mamba mixer has these too
    Naming("linear1", "linear2"),  # torch's own TransformerEncoderLayer
    Naming("linear_1", "linear_2"),  # Funnel
    Naming("layer_1", "layer_2"),  # XLNet
    Naming("intermediate.dense", "output.dense"),  # BERT
    Naming("lang_inter.dense", "lang_output.dense"),  # LXMERT's layers of both streams
    Naming("intermediate_dense", "output_dense"),  # wav2vec 2.0
    Naming("dense.dense", "output.dense"),  # Reformer
    Naming("intermediate", "output"),  # ProphetNet
    Naming("ffn", "ffn_output"),  # ALBERT
    Naming("ffn.0", "ffn.2"),  # CTRL
    *(Naming(f"{at}.0", f"{at}.{n}") for at in ("layers", "net", "mlp", "ff", "feed_forward") for n in (2, 3)),  # lists
    Naming("dense_in", "dense_out"),  # Cohere ASR
    Naming("dense1", "dense2"),  # Perceiver
    Naming("ffn_up", "ffn_down"),
)
_BY_DOWN = {naming.down: [n for n in NAMINGS if n.down == naming.down] for naming in NAMINGS}
# Maps the last component of a name to the down projections that end in it, each with its namings.
BY_LAST = {leaf: [(d, n) for d, n in _BY_DOWN.items() if last(d) == leaf] for leaf in map(last, _BY_DOWN)}


def looked_for() -> str:
    """Return the first rows of the table, for the error that no FFN was recognised."""
    return ", ".join("/".join(naming.names) for naming in NAMINGS[:6]) + ", ..."


# The name and the shape of each matrix, for matrices that do not fit together.
Misfit: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Item:
    """One tensor of a layer, or `count` identical tensors: logical shape (None if only the size is known), number of
    values in one tensor, bytes of all tensors. `params` is 0 if an index names the tensor but its file is missing."""

    shape: tuple[int, ...] | None
    params: int
    bytes: int
    count: int = 1
    format: str = ""


@dataclass(frozen=True)
class Hints:
    """The evidence used if both orientations of a matrix fit: the norms' lengths, and a `hint` for d_model."""

    norms: Counter[int]
    hint: int | None

    def d_model(self) -> int | None:
        """Return the hint, else the most common norm length."""
        return self.hint or max(self.norms, key=self.norms.__getitem__, default=None)


def widths(
    up: Item, down: Item, parts: int, hints: Hints, bias: Item | None = None, experts: int = 0
) -> tuple[int | None, int | None]:
    """Return (d_model, d_ff) of up [parts·d_ff, d_model] and down [d_model, d_ff]; both matrices may be transposed.

    If both orientations fit, up's bias decides, else the layer's norms, else the hint. None if no evidence decides.
    """
    a, b = matrix(up), matrix(down)
    if a is None or b is None:
        hint = hints.d_model()
        return (hint, down.params // hint) if hint and down.params and down.params % hint == 0 else (hint, None)
    if a == b and experts and up.shape and len(up.shape) == 2 and a[0] % experts == 0 and up.count == 1:
        return a[1], a[0] // experts  # up and down are both [experts · d_ff, d_model]: down is used as stored
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
    """Return the last two axes of a matrix or a stack of matrices; a width-1 convolution's last axis is ignored."""
    if item.shape is None:
        return None
    shape = item.shape[:-1] if len(item.shape) == 3 and item.shape[-1] == 1 else item.shape
    return (shape[-2], shape[-1]) if len(shape) >= 2 else None


def unlike(matrices: Mapping[str, Item], d_ff: int | None) -> Misfit:
    """Return the matrices among gate, up and down that do not fit together; a missing shape fits everything.

    `d_ff` is None if up and down do not agree on a width.
    """
    shapes = [(name, item.shape) for name, item in matrices.items() if item.shape]
    if len(shapes) < len(matrices):
        return ()
    if d_ff is None:
        return tuple(shapes[-2:])
    return tuple(shapes[:1]) if len(shapes) == 3 and shapes[0][1] != shapes[1][1] else ()
