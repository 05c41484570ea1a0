"""FFNs found by their tensors' names and shapes alone, whatever the model calls itself.

Families differ in what they call their layers; the matrices of an FFN have few names. NAMINGS lists those. Two matrices
that go by one of its rows and fit each other are an FFN: up takes d_model to d_ff and down takes it back. Twice d_ff in
the first one means that gate and up are stored in one. This is a second opinion: of a config it takes d_model alone,
and only to tell how a matrix lies where nothing in the file does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ffncli.block import activations
from ffncli.errors import FFNError, shown
from ffncli.models.files.inventory import shared_name
from ffncli.models.tensors.ffns import FFNLocation, Projections, ffn_locations, is_norm, members, projections, role
from ffncli.models.tensors.shapes import Hints, Item, Misfit, unlike, widths

MOST_FFNS = 256  # in one layer; where names nest, a layer is what the first number says
_LAYER = re.compile(r"(?:^|\.)(\d{1,6})\.")  # the first number between dots
_ONLY_LAYER = re.compile(r"cross_attention()\.(?=mlp\.)")  # Perceiver's, which has no number
_NOT_TEXT = re.compile(
    r"vis(?:ion|ual)|image|audio|speech|video_|siglip|clip_model|patch(?!er\.)|codec|vq", re.IGNORECASE
)
_NOT_FFN = re.compile(r"att(?:n|ention)|adapter", re.IGNORECASE)
_NOT_PARAMETER = re.compile(r"lora_|_integer$|scaling_factor$|\.(?:x_min|x_max|beta|eps|tid2eid)$")
_LEARNED = {frozenset(row.learned): name for name, row in activations.TABLE.items() if row.learned}


@dataclass(frozen=True)
class Found:
    """One FFN: its widths by the shapes (None where those do not show), what it holds, how much that is.

    `gated` is None where a file that would show it is not here; `whole` False where any tensor's is not. `params` are
    all numbers of the FFN without norms, `bytes` what they take in the file. `tensor` decided gatedness.
    `latent` is the narrower width that its experts read and write, 0 where that is d_model.
    `loose` names tensors inside the FFN that fit no role and are counted all the same. `activation` is the function
    whose learned parameters are among them, None where there are none. `misfit` are matrices, name and shape, that do
    not fit one another. `uneven` says which matrix some experts lack; empty where none does.
    """

    tensor: str
    d_model: int | None
    d_ff: int | None
    gated: bool | None
    bias: bool
    down_bias: bool
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
    activation: str | None = None
    misfit: Misfit = ()
    uneven: str = ""


Layers = Mapping[str, Mapping[int, tuple[Found, ...]]]  # prefix → layer → its FFNs


def recognise(items: Mapping[str, Item], d_model: int | None = None, where: str = "") -> Layers:
    """Every FFN of the text model in a checkpoint. `d_model` settles how a matrix lies where nothing in the file does.

    Raises FFNError, naming `where`, for a layer of more FFNs than any has.
    """
    return recognise_all(items, d_model, where)[0]


def recognise_all(items: Mapping[str, Item], d_model: int | None, where: str) -> tuple[Layers, Layers]:
    """(The FFNs of the text model, those of other text). Towers that are not text (vision, audio) are in neither.

    Raises FFNError as `recognise`.
    """
    known: dict[tuple[tuple[str, Item], ...], tuple[Found, ...]] = {}
    out: dict[str, dict[int, tuple[Found, ...]]] = {}
    for prefix, numbered in _by_layer(items).items():
        for layer, held in numbered.items():
            signature = tuple(held.items())
            if signature not in known:
                known[signature] = tuple(_ffns(held, d_model, f"{where}: {shown(prefix, 80)}, layer {layer}"))
            if known[signature]:
                out.setdefault(prefix, {})[layer] = known[signature]
    text, others = _text(out)
    return {p: found for p, found in out.items() if p in text}, {p: found for p, found in out.items() if p in others}


def layer_numbers(names: Iterable[str]) -> Mapping[str, set[int]]:
    """Prefix → the numbers of all layers under it, whatever they hold."""
    out: dict[str, set[int]] = {}
    for name in names:
        if match := _LAYER.search(name):
            out.setdefault(name[: match.start(1)].removesuffix("."), set()).add(int(match[1]))
    return out


def _by_layer(items: Mapping[str, Item]) -> Mapping[str, Mapping[int, Mapping[str, Item]]]:
    """Prefix → layer → what lies there, but attention and what is no parameter."""
    layers: dict[str, dict[int, dict[str, Item]]] = {}
    for name, item in items.items():
        match = _LAYER.search(name) or _ONLY_LAYER.search(name)
        if match and (rest := _in_layer(name, match.end())):
            prefix = name[: match.start(1)].removesuffix(".")
            layers.setdefault(prefix, {}).setdefault(int(match[1] or 0), {})[rest] = item
    return layers


def _in_layer(name: str, start: int) -> str:
    """The name inside the layer; empty for attention's and for what is no parameter."""
    rest = name[start:].replace(".base_layer.", ".")
    return "" if _NOT_PARAMETER.search(name) or (_NOT_FFN.search(rest) and not is_norm(rest)) else rest


def stem_of(prefix: str, layer: int) -> str:
    """What the names of one layer begin with."""
    if _ONLY_LAYER.search(f"{prefix}.mlp."):
        return f"{prefix}."
    return f"{prefix}.{layer}." if prefix else f"{layer}."


def inside(names: Iterable[str], stem: str) -> dict[str, str]:
    """The names inside one layer, as `recognise` cuts them → the whole ones."""
    out: dict[str, str] = {}
    for name in names:
        if name.startswith(stem):
            rest = name[len(stem) :]  # a norm's may be called beta, as an activation's constant is
            out |= {rest: name} if is_norm(rest) else {cut: name} if (cut := _in_layer(name, len(stem))) else {}
    return out


def _text(prefixes: Iterable[str]) -> tuple[set[str], set[str]]:
    """(Those of the text model, other text): what is called so, else whatever is not called otherwise, else all."""
    every = set(prefixes)
    plain = {p for p in every if not _NOT_TEXT.search(p)}
    text = {p for p in every if "language_model" in p} or plain
    if any(p.startswith("decoder.") for p in text):  # MusicGen's text encoder conditions a decoder of audio tokens
        text = {p for p in text if not p.startswith("text_encoder.")}
    return text or every, plain - text


# --- one layer --------------------------------------------------------------------------------------------------------


def _ffns(held: Mapping[str, Item], d_model: int | None, where: str) -> Iterator[Found]:
    """The FFNs of one layer."""
    seen = list(islice(projections(held), MOST_FFNS + 1))
    if len(seen) > MOST_FFNS:
        raise FFNError(f"{where} has more than {MOST_FFNS} FFNs", "experts alike count as one, whatever their number")
    if seen:
        locations = ffn_locations(held, seen)
        hints = Hints(_norm_widths(held), d_model)
        for location, own in zip(locations, members(held, locations), strict=True):
            yield _found(held, location, own, hints)


def _found(held: Mapping[str, Item], location: FFNLocation, members: Mapping[str, Item], hints: Hints) -> Found:
    """The record of one FFN, its shared experts included."""
    p, matrices = location.own, location.own.matrices(held)
    up, down = held[p.name(p.naming.up)], held[p.name(p.naming.down)]
    fused = not p.naming.gate and 0 < up.params == 2 * down.params
    shown_here = bool(up.params and down.params)  # their shapes are
    d_model, d_ff = widths(up, down, 2 if fused else 1, hints, held.get(p.bias(p.naming.up)), location.experts)
    misfit = unlike(matrices, d_ff)
    shared = [(q.matrices(held), _shared_width(held, q, d_model)) for q in location.shared]
    for theirs, width in shared:
        misfit = misfit or unlike(theirs, width)
    others = set(members).difference(matrices, *(theirs for theirs, _ in shared))
    others -= {q.bias(leaf) for q in location.all for leaf in q.naming.names}
    roles = {name: kind for name in sorted(others) if (kind := role(name))}
    around = [name for name, kind in roles.items() if kind == "latent"]
    latent = held[around[0]].shape if around else None
    if around:  # d_model as seen so far is theirs
        d_model = latent[1] if latent and len(latent) == 2 else hints.hint
    known = set(roles) - set(around)
    biases = {name for name in others - known if name.removesuffix("bias") + "weight" in known}
    uneven, alone = _uneven(p, matrices, members)
    activation, learned = _learned(members, others - known - biases)
    return Found(
        tensor=p.name(p.naming.gate or p.naming.up),
        d_model=d_model,
        d_ff=d_ff,
        gated=True if p.naming.gate else (fused if shown_here else None),
        bias=p.bias(p.naming.up) in held,
        down_bias=p.bias(p.naming.down) in held,
        experts=location.experts,
        shared_d_ff=sum(width or 0 for _, width in shared),
        router_bias=bool(biases),
        correction="correction" in roles.values(),
        shared_gate="shared_gate" in roles.values(),
        params=sum(item.params * item.count for item in members.values()),
        bytes=sum(item.bytes for item in members.values()),
        formats=tuple(dict.fromkeys(item.format for theirs in (matrices, *(t for t, _ in shared))
                                    for item in theirs.values())),
        loose=tuple(sorted(others - known - biases - learned - set(around))),
        fused=fused,
        whole=all(item.params for item in members.values()),
        latent=latent[0] if latent else 0,
        activation=activation,
        misfit=misfit or alone,
        uneven=uneven,
    )  # fmt: skip


def _learned(members: Mapping[str, Item], names: Iterable[str]) -> tuple[str | None, set[str]]:
    """(The activation, its tensors) whose learned numbers, one each, are among these: xielu's `act_fn.alpha_p`, ..."""
    leaves: dict[str, set[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if members[name].params == 1 and "act" in parent:
            leaves.setdefault(parent, set()).add(leaf)
    for parent, held in leaves.items():
        if activation := _LEARNED.get(frozenset(held)):
            return activation, {f"{parent}.{leaf}" for leaf in held}
    return None, set()


def _uneven(p: Projections, matrices: Mapping[str, Item], members: Mapping[str, Item]) -> tuple[str, Misfit]:
    """(`up_proj for 7 of 8 experts`, nothing), or (nothing, what is shaped as no other expert's is)."""
    counts = {leaf: item.count for leaf, item in zip(p.naming.names, matrices.values(), strict=True)}
    fewest, most = min(counts, key=counts.__getitem__), max(counts.values())
    if counts[fewest] == most or "experts.#." not in p.parent:
        return "", ()
    for name, item in members.items():
        if name != p.name(fewest) and shared_name(name) == p.name(fewest):
            return "", ((name, item.shape or ()),)
    return f"{fewest} for {counts[fewest]:,} of {most:,} experts", ()


def _shared_width(held: Mapping[str, Item], q: Projections, d_model: int | None) -> int | None:
    """d_ff of shared experts, all together; None where their shapes do not show it."""
    up, down = held[q.name(q.naming.up)], held[q.name(q.naming.down)]
    parts = 2 if not q.naming.gate and up.params == 2 * down.params else 1
    several = down.shape[0] if down.shape and len(down.shape) == 3 else 1
    width = widths(up, down, parts, Hints(Counter(), d_model))[1]
    return None if width is None else several * width


def _norm_widths(held: Mapping[str, Item]) -> Counter[int]:
    """The lengths of the layer's norms, most of which are d_model."""
    norms = (item.shape for name, item in held.items() if is_norm(name))
    return Counter(shape[0] for shape in norms if shape and len(shape) == 1)


# --- names, for what lies outside the FFN ---------------------------------------------------------------------------


def placed(name: str) -> tuple[str, int, str] | None:
    """(prefix, layer, the name inside the layer) as `recognise` cuts it; None for what is in no layer."""
    match = _LAYER.search(name) or _ONLY_LAYER.search(name)
    if match is None:
        return None
    return name[: match.start(1)].removesuffix("."), int(match[1] or 0), name[match.end() :]


def is_parameter(name: str) -> bool:
    """Whether a tensor of an FFN is a parameter of it: no adapter, no constant."""
    return not _NOT_PARAMETER.search(name)


def of_other_tower(name: str) -> bool:
    """Whether a name speaks of images, sound or their tokens."""
    return bool(_NOT_TEXT.search(name))
