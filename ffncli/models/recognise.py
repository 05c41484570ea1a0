"""FFNs found by their tensors' names and shapes alone, whatever the model calls itself.

Families differ in what they call their layers; the matrices of an FFN have few names. WAYS lists those. Two matrices
that go by one of its rows and fit each other are an FFN: up takes d_model to d_ff and down takes it back. Twice d_ff in
the first one means that gate and up are stored in one. This is a second opinion: it reads no config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """The names that one kind of FFN gives its matrices; `up` may hold the gate too where `gate` is empty."""

    up: str
    down: str
    gate: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.gate, self.up, self.down) if self.gate else (self.up, self.down)


WAYS: Sequence[Way] = (
    Way("up_proj", "down_proj", "gate_proj"),  # Llama and most others
    Way("up_proj", "down_proj", "linear_gate"),
    Way("w3", "w2", "w1"),  # Meta's and Mistral's own files, Mixtral, LFM2
    Way("v1", "w2", "w1"),  # DBRX
    Way("wi_1", "wo", "wi_0"),  # T5 v1.1
    Way("w_in.w_1", "w_out", "w_in.w_0"),  # CPM-Ant
    Way("fc11", "fc2", "fc12"),  # Nomic BERT
    Way("proj_up", "proj_down", "proj_up_gate"),  # xLSTM
    Way("ffn_up", "ffn_down", "ffn_gate"),  # GGUF
    Way("ffn_up_exps", "ffn_down_exps", "ffn_gate_exps"),
    Way("ffn_up_shexp", "ffn_down_shexp", "ffn_gate_shexp"),
    Way("up_proj", "down_proj"),  # Nemotron, Arcee, Apertus
    Way("gate_up_proj", "down_proj"),  # Phi-3, GLM, 3-D experts
    Way("up_gate_proj", "down_proj"),  # GTE
    Way("Wi", "Wo"),  # ModernBERT
    Way("input_linear", "output_linear"),  # Granite's MoE, JetMoE
    Way("ff_proj", "ff_out"),  # Molmo
    Way("w13_weight", "w2_weight"),
    Way("mlp1_weight", "mlp2_weight"),  # OpenAI's own gpt-oss files
    Way("fc1", "fc2"),  # OPT, Whisper, BART, CLIP
    Way("c_fc", "c_proj"),  # GPT-2
    Way("dense_h_to_4h", "dense_4h_to_h"),  # BLOOM, GPT-NeoX, Falcon
    Way("fc_in", "fc_out"),  # GPT-J
    Way("wi", "wo"),  # T5
    Way("lin1", "lin2"),  # DistilBERT, XLM
    Way("linear1", "linear2"),  # torch's own TransformerEncoderLayer
    Way("linear_1", "linear_2"),  # Funnel
    Way("layer_1", "layer_2"),  # XLNet
    Way("intermediate.dense", "output.dense"),  # BERT
    Way("dense.dense", "output.dense"),  # Reformer
    Way("intermediate", "output"),  # ProphetNet
    Way("ffn", "ffn_output"),  # ALBERT
    Way("ffn.0", "ffn.2"),  # CTRL
    Way("dense1", "dense2"),  # Perceiver
    Way("ffn_up", "ffn_down"),
)
_DOWNS = {way.down: [w for w in WAYS if w.down == way.down] for way in WAYS}
_LAYER = re.compile(r"(?:^|\.)(\d{1,6})\.")  # the first number between dots
_ONLY_LAYER = re.compile(r"cross_attention()\.(?=mlp\.)")  # Perceiver's, which has no number
_NORM = re.compile(r"(?:^|[._])(?:layer_?norm|norm\d?|ln\w*|layernorm\w*|ffn_sub_norm)(?:[._]|$)", re.IGNORECASE)
_NOT_TEXT = re.compile(
    r"vis(?:ion|ual)|image|audio|speech|video|siglip|clip_model|patch(?!er\.)|codec|vq", re.IGNORECASE
)
_NOT_FFN = re.compile(r"att(?:n|ention)|adapter", re.IGNORECASE)
_NOT_PARAMETER = re.compile(r"lora_|_integer$|scaling_factor$|\.(?:x_min|x_max|beta|eps|tid2eid)$")
_SHARED = re.compile(r"(?:^|\.)(?:shared_\w+|shared)\.$|_shexp$")
_BESIDE = re.compile(
    r"(?:moe\.)?(?:router|gate|shared_expert_gate|ffn_gate_inp\w*|exp_probs_b)\."
)  # beside their experts
_ROUTER = re.compile(r"(?:^|\.)(?:router|gate|ffn_gate_inp)(?:\.(?:layer|wg|gate|classifier))?\.weight$")
_SHARED_GATE = re.compile(r"shared_expert_gate\.weight$|ffn_gate_inp_shexp\.weight$")
_LATENT = re.compile(r"(?:^|\.)fc[12]_latent_proj\.weight$")  # around Nemotron-H's experts, the narrow side first
_CORRECTION = re.compile(r"correction_bias$|expert_bias$|exp_probs_b\.bias$")


@dataclass(frozen=True)
class Item:
    """One tensor of a layer, or `count` alike: logical shape (None where only the number is known), numbers
    of one, bytes of all.

    `params` 0: the tensor is named in an index, and its file is not here.
    """

    shape: tuple[int, ...] | None
    params: int
    bytes: int
    count: int = 1
    format: str = ""


@dataclass(frozen=True)
class Found:
    """One FFN: its widths by the shapes (None where those do not show), what it holds, how much that is.

    `gated` is None where a file that would show it is not here; `whole` False where any tensor's is not. `params` are
    all numbers of the FFN without norms, `bytes` what they take in the file. `tensor` decided gatedness.
    `latent` is the narrower width that its experts read and write, 0 where that is d_model.
    `loose` names tensors inside the FFN that fit no role and are counted all the same.
    """

    tensor: str
    d_model: int | None
    d_ff: int | None
    gated: bool | None
    bias: bool
    experts: int
    shared_d_ff: int
    router_bias: bool
    correction: bool
    shared_gate: bool
    params: int
    bytes: int
    formats: tuple[str, ...]
    loose: tuple[str, ...]
    fused: bool
    whole: bool
    latent: int = 0


Layers = Mapping[str, Mapping[int, tuple[Found, ...]]]  # prefix → layer → its FFNs


def recognise(items: Mapping[str, Item], d_model: int | None = None) -> Layers:
    """Every FFN in a checkpoint. `d_model` settles how a matrix lies where nothing in the file does.

    Towers that are not text (vision, audio) are left out where there is another.
    """
    layers: dict[str, dict[int, dict[str, Item]]] = {}
    for name, item in items.items():
        if (match := _LAYER.search(name) or _ONLY_LAYER.search(name)) and not _NOT_PARAMETER.search(name):
            rest = name[match.end() :].replace(".base_layer.", ".")
            if _NOT_FFN.search(rest) and not _NORM.search(rest):
                continue
            prefix = name[: match.start(1)].removesuffix(".")
            layers.setdefault(prefix, {}).setdefault(int(match[1] or 0), {})[rest] = item
    known: dict[tuple[tuple[str, Item], ...], tuple[Found, ...]] = {}
    out: dict[str, dict[int, tuple[Found, ...]]] = {}
    for prefix, numbered in layers.items():
        for layer, held in numbered.items():
            signature = tuple(held.items())
            if signature not in known:
                known[signature] = tuple(_ffns(held, d_model))
            if known[signature]:
                out.setdefault(prefix, {})[layer] = known[signature]
    text = _text(out)
    return {prefix: found for prefix, found in out.items() if prefix in text}


def _text(prefixes: Iterable[str]) -> set[str]:
    """Those of a text model: what is called so, else whatever is not called otherwise, else all."""
    every = set(prefixes)
    text = {p for p in every if "language_model" in p} or {p for p in every if not _NOT_TEXT.search(p)}
    if any(p.startswith("decoder.") for p in text):  # MusicGen's text encoder conditions a decoder of audio tokens
        text = {p for p in text if not p.startswith("text_encoder.")}
    return text or every


def looked_for() -> str:
    """The names that `recognise` knows, for a message that nothing was found."""
    return ", ".join("/".join(way.names) for way in WAYS[:6]) + ", ..."


# --- one layer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Projections:
    """The matrices of one FFN, or of one FFN's experts: where they lie in the layer and how they are named there."""

    parent: str
    way: Way
    suffix: str  # ".weight", or "" for a parameter without a module

    def name(self, leaf: str) -> str:
        return self.parent + leaf + self.suffix


def _ffns(held: Mapping[str, Item], d_model: int | None) -> Iterator[Found]:
    """The FFNs of one layer. Shared experts belong to the experts beside them."""
    all_of = list(_projections(held))
    norms = _norm_widths(held)
    shared = [p for p in all_of if _SHARED.search(p.parent) or _SHARED.search(p.way.down)]
    own = [p for p in all_of if p not in shared]
    experts = [p for p in own if _expert_count(held, p)]
    if not experts:
        own, shared = [*own, *shared], []  # what is called shared beside no experts is an FFN like another
    for projections in own:
        mine = shared if projections in experts[:1] else []
        yield _found(held, projections, mine, d_model, norms, projections in experts)


def _projections(held: Mapping[str, Item]) -> Iterator[_Projections]:
    """The best way (with most matrices) at every place that has a down projection."""
    for name in held:
        if _NORM.search(name):  # a norm whose scale a small MLP makes (Voxtral)
            continue
        suffix = ".weight" if name.endswith(".weight") else ""
        stem = name.removesuffix(suffix) if suffix else name
        for down, ways in _DOWNS.items():
            if stem != down and not stem.endswith("." + down):
                continue
            places = [_Projections(stem[: len(stem) - len(down)], way, suffix) for way in ways]
            whole = [p for p in places if all(p.name(leaf) in held for leaf in p.way.names) and _fits(held, p)]
            if whole:
                yield max(whole, key=lambda p: len(p.way.names))


def _fits(held: Mapping[str, Item], p: _Projections) -> bool:
    """Whether up and down can follow each other: as many numbers, or twice as many in a fused one."""
    up, down = held[p.name(p.way.up)], held[p.name(p.way.down)]
    if not up.params or not down.params:
        return True  # their names alone decide
    matrices = all(item.shape is None or len(item.shape) > 1 for item in (up, down))
    return matrices and up.params * up.count in (down.params * down.count, *([] if p.way.gate else [_twice(down)]))


def _twice(down: Item) -> int:
    return 2 * down.params * down.count


def _expert_count(held: Mapping[str, Item], p: _Projections) -> int:
    """How many experts the matrices belong to; 0 for an FFN without."""
    down = held[p.name(p.way.down)]
    if "experts.#." in p.parent:
        return down.count
    if down.shape and len(down.shape) == 3 and down.shape[-1] > 1:  # [..., 1] is a convolution of width 1
        return down.shape[0]
    if re.search(r"(?:^|\.)experts\.", p.parent):  # all experts below one another in one matrix (DBRX)
        return next((i.shape[0] for n, i in held.items() if _ROUTER.search(n) and i.shape), 0)
    return 0


def _found(
    held: Mapping[str, Item], p: _Projections, shared: Sequence[_Projections], hint: int | None,
    norms: Sequence[int], moe: bool,
) -> Found:  # fmt: skip
    """The record of one FFN, its shared experts included."""
    up, down = held[p.name(p.way.up)], held[p.name(p.way.down)]
    experts = _expert_count(held, p) if moe else 0
    fused = not p.way.gate and 0 < up.params * up.count == _twice(down)
    shown = bool(up.params and down.params)  # their shapes are here
    d_model, d_ff = _widths(up, down, 2 if fused else 1, hint, norms, held.get(_bias(p, p.way.up)), experts)
    members = _members(held, p, shared, moe)
    matrices = {q.name(leaf) for q in (p, *shared) for leaf in q.way.names}
    others = set(members) - matrices - {_bias(q, leaf) for q in (p, *shared) for leaf in q.way.names}
    around = sorted(filter(_LATENT.search, others))
    latent = _matrix(held[around[0]]) if around else None
    if around:  # d_model as seen so far is theirs
        d_model = latent[1] if latent else hint
    known = {name for name in others if _ROUTER.search(name) or _SHARED_GATE.search(name) or _CORRECTION.search(name)}
    biases = {name for name in others - known if name.removesuffix("bias") + "weight" in known}
    return Found(
        tensor=p.name(p.way.gate or p.way.up),
        d_model=d_model,
        d_ff=d_ff,
        gated=True if p.way.gate else (fused if shown else None),
        bias=_bias(p, p.way.up) in held,
        experts=experts,
        shared_d_ff=sum(_shared_width(held, q, d_model) for q in shared),
        router_bias=bool(biases),
        correction=any(map(_CORRECTION.search, others)),
        shared_gate=any(map(_SHARED_GATE.search, others)),
        params=sum(item.params * item.count for item in members.values()),
        bytes=sum(item.bytes for item in members.values()),
        formats=tuple(dict.fromkeys(members[name].format for name in matrices)),
        loose=tuple(sorted(others - known - biases - set(around))),
        fused=fused,
        whole=all(item.params for item in members.values()),
        latent=latent[0] if latent else 0,
    )


def _shared_width(held: Mapping[str, Item], q: _Projections, d_model: int | None) -> int:
    """d_ff of shared experts, all together."""
    up, down = held[q.name(q.way.up)], held[q.name(q.way.down)]
    parts = 2 if not q.way.gate and up.params == 2 * down.params else 1
    several = down.shape[0] if down.shape and len(down.shape) == 3 else 1
    return several * (_widths(up, down, parts, d_model, (), None, 0)[1] or 0)


def _bias(p: _Projections, leaf: str) -> str:
    return p.parent + leaf + (".bias" if p.suffix else "_bias")


def _members(held: Mapping[str, Item], p: _Projections, shared: Iterable[_Projections], moe: bool) -> dict[str, Item]:
    """Everything that belongs to the FFN: all of its module, or its matrices and biases where it has none."""
    root = p.parent
    if moe and (place := re.search(r"(?:^|\.)experts\.", root)):
        root = root[: place.start() + (root[place.start()] == ".")]
    inside = {name for name in held if root and name.startswith(root)}
    for q in (p, *shared):
        inside |= {name for leaf in q.way.names for name in (q.name(leaf), _bias(q, leaf)) if name in held}
        inside |= {name for name in held if q.parent and name.startswith(q.parent)}
    if moe:
        inside |= {name for name in held if _BESIDE.match(name)}
    return {name: held[name] for name in inside if not _NORM.search(name)}


def _norm_widths(held: Mapping[str, Item]) -> list[int]:
    """The lengths of the layer's norms, most of which are d_model."""
    return [item.shape[0] for name, item in held.items() if _NORM.search(name) and item.shape and len(item.shape) == 1]


def _widths(up: Item, down: Item, parts: int, hint: int | None, norms: Sequence[int], bias: Item | None,
            experts: int) -> tuple[int | None, int | None]:  # fmt: skip
    """(d_model, d_ff) of up [parts·d_ff, d_model] and down [d_model, d_ff], or of both the other way round.

    Where both fit, up's bias tells them apart, else the norms beside them, else `hint`.
    """
    a, b = _matrix(up), _matrix(down)
    if a is None or b is None:
        hint = hint or max(norms, key=norms.count, default=None)
        return (hint, down.params // hint) if hint and down.params and down.params % hint == 0 else (hint, None)
    if a == b and experts and up.shape and len(up.shape) == 2 and a[0] % experts == 0 and up.count == 1:
        return a[1], a[0] // experts  # [experts · d_ff, d_model], both: down is used as it lies
    as_linear = (a[1], b[1]) if a[1] == b[0] and a[0] == parts * b[1] else None
    turned = (a[0], b[0]) if a[0] == b[1] and a[1] == parts * b[0] else None
    if as_linear is None or turned is None or as_linear == turned:
        return as_linear or turned or (None, None)
    if bias is not None and bias.shape and bias.shape[-1] in (parts * as_linear[1], parts * turned[1]):
        return as_linear if bias.shape[-1] == parts * as_linear[1] else turned
    if (as_linear[0] in norms) != (turned[0] in norms):
        return as_linear if as_linear[0] in norms else turned
    return turned if hint == turned[0] else as_linear


def _matrix(item: Item) -> tuple[int, int] | None:
    """The last two axes of a matrix or of a stack of them; a width-1 convolution's last axis does not count."""
    if item.shape is None:
        return None
    shape = item.shape[:-1] if len(item.shape) == 3 and item.shape[-1] == 1 else item.shape
    return (shape[-2], shape[-1]) if len(shape) >= 2 else None


# --- names, for what lies beside the FFN ------------------------------------------------------------------------------


def placed(name: str) -> tuple[str, int, str] | None:
    """(prefix, layer, the name inside the layer) as `recognise` cuts it; None for what is in no layer."""
    match = _LAYER.search(name) or _ONLY_LAYER.search(name)
    if match is None:
        return None
    return name[: match.start(1)].removesuffix("."), int(match[1] or 0), name[match.end() :]


def is_norm(name: str) -> bool:
    """Whether a tensor is called like a norm's."""
    return bool(_NORM.search(name))


def is_parameter(name: str) -> bool:
    """Whether a tensor of an FFN is a parameter of it: no adapter, no constant."""
    return not _NOT_PARAMETER.search(name)


def of_other_tower(name: str) -> bool:
    """Whether a name speaks of images, sound or their tokens."""
    return bool(_NOT_TEXT.search(name))
