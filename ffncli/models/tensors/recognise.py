"""Recognise FFNs by their tensors' names and shapes alone, for any model_type.

Families name their layers in many ways, but the matrices of an FFN in only a few (NAMINGS). Two matrices that match a
row of NAMINGS and fit together are an FFN: up maps d_model to d_ff, down maps d_ff back to d_model. If up has twice
d_ff, gate and up are stored together. The result is independent of the config, except that the config's d_model is used
if the file does not show a matrix's orientation.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ffncli.block import activations
from ffncli.errors import FFNError, shown
from ffncli.models.files.inventory import shared_name
from ffncli.models.tensors.ffns import (
    FFNLocation,
    Hints,
    Item,
    Misfit,
    Projections,
    ffn_locations,
    is_norm,
    last,
    members,
    projections,
    role,
    unlike,
    widths,
)
from ffncli.models.tensors.slices import EXPERT_NORMS

BARE = "*"  # the prefix for a file whose names contain no layer: `fc1.weight`, `mlp.fc1.weight`
MOST_FFNS = 256  # in one layer; if names nest, their first number is the layer
_LAYER = re.compile(r"(?:^|\.)(\d{1,6})\.")  # the first number between dots
_ONLY_LAYER = re.compile(r"cross_attention()\.(?=mlp\.)")  # Perceiver's, without a number
_NOT_TEXT = re.compile(
    r"vis(?:ion|ual)|image|audio|speech|video_|siglip|clip_model|patch(?!er\.)|codec|vq|(?:^|\.)(?:vit|mit)\."
    r"|sam_model|prompts_generator|qwen2_model|multimodal_model|perceiver_resampler|detr_|geometry_|protein_",
    re.IGNORECASE,
)
# An encoder that begins with image patches or audio; its layers may be named like a text encoder's.
_SENSES = re.compile(
    r"^(.*\bencoder\.)(?:embeddings\.)?(?:patch_(?:embed|projection)|subsampling|feature_(?:extractor|encoder))"
)
# Inside a text layer: FFNs for tokens that are not text (models/config/read.py).
_OTHER_TOKENS = re.compile(r"(?:^|\.)(?:audio_mlp|vision_moe|layout_(?:intermediate|output)|visn_(?:inter|output)"
                           r"|(?:intermediate|output)_query)\.|(?:^|\.)(?:r_layers\b|gate\.weight_1$)")  # fmt: skip
_NOT_FFN = re.compile(r"att(?:n|ention)|adapter", re.IGNORECASE)
_NOT_PARAMETER = re.compile(r"lora_|_integer$|scaling_factor$|\.(?:x_min|x_max|beta|eps|tid2eid)$")
_LEARNED = {frozenset(row.learned): name for name, row in activations.TABLE.items() if row.learned}


@dataclass(frozen=True)
class StoredFFN:
    """One FFN according to its tensors. `shows` maps names of fields of FFNSpec and MoE to the values that the tensors
    reveal.

    `shows` lacks d_model and d_ff if a shape is unknown, and `gated` if the file that would show it is missing; it
    includes `activation` if the function's learned parameters are stored. `shared_d_ff` is the total width of the
    shared experts (0: no shared experts); `shared_experts` is how many there are, if the router has rows for them.

    `params` counts the FFN without norms, `bytes` is its size in the file; `whole` means that no file of the FFN is
    missing. `tensor` is the tensor that determined gatedness. `loose` lists tensors inside the FFN that are counted
    although they have no known role. `misfit` lists matrices (name and shape) that do not fit together. `uneven` names
    a matrix that some experts lack.
    """

    tensor: str
    shows: Mapping[str, Any] = field(hash=False)
    params: int
    bytes: int
    formats: tuple[str, ...]
    loose: tuple[str, ...]
    fused: bool
    whole: bool
    misfit: Misfit = ()
    uneven: str = ""

    @property
    def experts(self) -> int:
        """Return the number of routed experts; 0 if it is dense."""
        return int(self.shows["experts"])


Layers = Mapping[str, Mapping[int, tuple[StoredFFN, ...]]]  # prefix → layer → its FFNs


def recognise(items: Mapping[str, Item], d_model: int | None = None, where: str = "") -> tuple[Layers, Layers]:
    """Return (the FFNs of the text model, the FFNs of other text models); FFNs of vision and audio towers are left out.

    `d_model` decides a matrix's orientation if the file does not; `where` names the file in errors.
    """
    cache: dict[tuple[tuple[str, Item], ...], tuple[StoredFFN, ...]] = {}
    out: dict[str, dict[int, tuple[StoredFFN, ...]]] = {}
    for prefix, numbered in _by_layer(items).items():
        for layer, tensors in numbered.items():
            signature = tuple(tensors.items())
            if signature not in cache:
                cache[signature] = tuple(_ffns(tensors, d_model, f"{where}: {shown(prefix, 80)}, layer {layer}"))
            if cache[signature]:
                out.setdefault(prefix, {})[layer] = cache[signature]
    text, others = _text(out, {match[1] for name in items if (match := _SENSES.search(name))})
    return {p: out[p] for p in out if p in text}, {p: out[p] for p in out if p in others}


def layer_numbers(names: Iterable[str]) -> Mapping[str, set[int]]:
    """Return the layer indices under each prefix, including layers without an FFN."""
    out: dict[str, set[int]] = {}
    for name in names:
        if match := _LAYER.search(name):
            out.setdefault(name[: match.start(1)].removesuffix("."), set()).add(int(match[1]))
    return out


def _by_layer(items: Mapping[str, Item]) -> Mapping[str, Mapping[int, Mapping[str, Item]]]:
    """Return a mapping from prefix and layer to tensors, excluding attention and tensors that are not parameters."""
    layers: dict[str, dict[int, dict[str, Item]]] = {}
    if not any(_LAYER.search(name) or _ONLY_LAYER.search(name) for name in items):
        return {BARE: {0: {rest: item for name, item in items.items() if (rest := _in_layer(name, 0))}}}
    for name, item in items.items():
        match = _LAYER.search(name) or _ONLY_LAYER.search(name)
        if match and (rest := _in_layer(name, match.end())):
            prefix = name[: match.start(1)].removesuffix(".")
            layers.setdefault(prefix, {}).setdefault(int(match[1] or 0), {})[rest] = item
    return layers


def _in_layer(name: str, start: int) -> str:
    """Return the name inside the layer; empty for attention and for tensors that are not parameters."""
    rest = name[start:].replace(".base_layer.", ".")
    if _NOT_PARAMETER.search(name) or _OTHER_TOKENS.search(name):
        return ""
    return "" if _NOT_FFN.search(rest) and not is_norm(rest) else rest


def stem_of(prefix: str, layer: int) -> str:
    """Return the prefix shared by all names in a layer."""
    if prefix == BARE:
        return ""
    if _ONLY_LAYER.search(f"{prefix}.mlp."):
        return f"{prefix}."
    return f"{prefix}.{layer}." if prefix else f"{layer}."


def inside(names: Iterable[str], stem: str) -> dict[str, str]:
    """Return a mapping from names inside one layer, shortened as in `recognise`, to full names."""
    out: dict[str, str] = {}
    for name in names:
        if name.startswith(stem):
            rest = name[len(stem) :]  # a norm's bias may be called beta, like an activation's constant
            out |= {rest: name} if is_norm(rest) else {cut: name} if (cut := _in_layer(name, len(stem))) else {}
    return out


def _text(prefixes: Iterable[str], senses: Collection[str]) -> tuple[set[str], set[str]]:
    """Return (prefixes of the text model, prefixes of other text): the text model has the prefixes that contain
    `language_model`, else the prefixes without vision or audio names, else all.

    A prefix that starts with an element of `senses` is an image or audio encoder.
    """
    every = set(prefixes)
    plain = {p for p in every if not _NOT_TEXT.search(p) and not p.startswith(tuple(senses))}
    text = {p for p in every if "language_model" in p} or plain
    if any(p.startswith("decoder.") for p in text):  # MusicGen's text encoder conditions a decoder for audio tokens
        text = {p for p in text if not p.startswith("text_encoder.")}
    return text or every, plain - text


# --- one layer --------------------------------------------------------------------------------------------------------


def _ffns(items: Mapping[str, Item], d_model: int | None, where: str) -> Iterator[StoredFFN]:
    """Yield the FFNs of one layer."""
    candidates = list(islice(projections(items), MOST_FFNS + 1))
    if len(candidates) > MOST_FFNS:
        raise FFNError(f"{where} has more than {MOST_FFNS} FFNs", "identical experts count as one")
    if candidates:
        locations = ffn_locations(items, candidates)
        hints = Hints(_norm_widths(items), d_model)
        for location, tensors in zip(locations, members(items, locations), strict=True):
            yield _record(items, location, tensors, hints)


def _record(items: Mapping[str, Item], location: FFNLocation, members: Mapping[str, Item], hints: Hints) -> StoredFFN:
    """Build the record of one FFN, including its shared experts."""
    p, matrices = location.projections, location.projections.matrices(items)
    up, down = items[p.name(p.naming.up)], items[p.name(p.naming.down)]
    fused = not p.naming.gate and 0 < up.params == 2 * down.params
    shown_here = bool(up.params and down.params)  # their shapes are known
    d_model, d_ff = widths(up, down, 2 if fused else 1, hints, items.get(p.bias(p.naming.up)), location.experts)
    shared = [(q.matrices(items), _shared_width(items, q, d_model)) for q in location.shared]
    of_all = [(matrices, d_ff), *shared]
    misfit = next((wrong for theirs, width in of_all if (wrong := unlike(theirs, width))), ())
    others = set(members).difference(*(theirs for theirs, _ in of_all))
    others -= {q.bias(leaf) for q in location.all for leaf in q.naming.names}
    roles = {name: kind for name in sorted(others) if (kind := role(name))}
    roles = {name: kind for name, kind in roles.items() if kind != "mixed_bias" or location.experts}
    routing = {name for name, kind in roles.items() if kind not in ("latent", "widened")}
    biases = {name for name in others.difference(roles) if name.removesuffix("bias") + "weight" in routing}
    uneven, alone = _uneven(p, matrices, members)
    activation, learned = _learned(members, others.difference(roles, biases))
    around = _around(items, location, roles, bool(biases))
    if "latent" in roles.values():  # so far, `d_model` is the latent width
        d_model = around.pop("d_model") or hints.hint
    bias, down_bias = (p.bias(leaf) in items for leaf in (p.naming.up, p.naming.down))
    if_shown = {
        "d_model": d_model,
        "d_ff": d_ff,
        "gated": True if p.naming.gate else (fused if shown_here else None),
        "down_bias": None if down_bias == bias else down_bias,
        "activation": activation,
        "shared_experts": around["shared_routed"] or None,
    }
    shows = {name: value for name, value in if_shown.items() if value is not None} | {
        "bias": bias,
        "experts": location.experts,
        "shared_d_ff": sum(width or 0 for _, width in shared),
        **around,
        "shared_routed": bool(around["shared_routed"]),
    }
    return StoredFFN(
        tensor=p.name(p.naming.gate or p.naming.up),
        shows=shows,
        params=sum(item.params * item.count for item in members.values()),
        bytes=sum(item.bytes for item in members.values()),
        formats=tuple(dict.fromkeys(item.format for theirs, _ in of_all for item in theirs.values())),
        loose=tuple(sorted(others.difference(roles, biases, learned))),
        fused=fused,
        whole=all(item.params for item in members.values()),
        misfit=misfit or alone,
        uneven=uneven,
    )


def _around(items: Mapping[str, Item], location: FFNLocation, roles: Mapping[str, str], biased: bool) -> dict[str, Any]:
    """Return what the tensors around the experts' matrices show, by their `roles`: of the router, the latent
    projections, which show `d_model` too, and the norms. `shared_routed` is the number of experts."""
    kinds, experts = set(roles.values()), location.experts
    mlp = next((items[name].shape for name, kind in roles.items() if kind == "router_in"), None)
    rows = next((s[0] for name, kind in roles.items() if kind == "router" and (s := items[name].shape)), 0)
    latent = next((items[name].shape for name, kind in roles.items() if kind == "latent"), None)
    leaves = {last(name.removesuffix(".weight")) for name in items} if experts else set()
    return {
        **({"d_model": latent[1] if latent and len(latent) == 2 else None} if "latent" in kinds else {}),
        "latent": latent[0] if latent else None,
        **{name: not leaves.isdisjoint(names) for name, names in EXPERT_NORMS.items()},
        "mixed_bias": "mixed_bias" in kinds,
        "router_bias": biased and not mlp,
        "correction": "correction" in kinds,
        "shared_gate": "shared_gate" in kinds,
        "learned_scale": "factor" in kinds,
        "shared_routed": _shared_rows(items, location, rows),
        "router_width": mlp[0] if mlp else None,
        "router_carries": "router_carried" in kinds,
        "skip_experts": max(0, rows - experts) if mlp else 0,
    }


def _shared_rows(items: Mapping[str, Item], location: FFNLocation, rows: int) -> int:
    """Return the number of stacked shared experts if the router's `rows` include them, else 0."""
    stacks = [items[p.name(p.naming.down)].shape or () for p in location.shared]
    several = sum(shape[0] for shape in stacks if len(shape) == 3)
    return several if several and rows == location.experts + several else 0


def _learned(members: Mapping[str, Item], names: Iterable[str]) -> tuple[str | None, set[str]]:
    """Return the activation (and tensors) with learned scalars among these names, such as `act_fn.alpha_p`."""
    leaves: dict[str, set[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if members[name].params == 1 and "act" in parent:
            leaves.setdefault(parent, set()).add(leaf)
    for parent, learned in leaves.items():
        if activation := _LEARNED.get(frozenset(learned)):
            return activation, {f"{parent}.{leaf}" for leaf in learned}
    return None, set()


def _uneven(p: Projections, matrices: Mapping[str, Item], members: Mapping[str, Item]) -> tuple[str, Misfit]:
    """Describe a matrix that some experts lack, as (`up_proj for 7 of 8 experts`, ()), or else return ("", the name and
    shape of one expert's matrix that differs from the matrices of all other experts)."""
    counts = {leaf: item.count for leaf, item in zip(p.naming.names, matrices.values(), strict=True)}
    fewest, most = min(counts, key=counts.__getitem__), max(counts.values())
    if counts[fewest] == most or "experts.#." not in p.parent:
        return "", ()
    for name, item in members.items():
        if name != p.name(fewest) and shared_name(name) == p.name(fewest):
            return "", ((name, item.shape or ()),)
    return f"{fewest} for {counts[fewest]:,} of {most:,} experts", ()


def _shared_width(items: Mapping[str, Item], q: Projections, d_model: int | None) -> int | None:
    """Return the total d_ff of all shared experts; None if their shapes do not show it."""
    up, down = items[q.name(q.naming.up)], items[q.name(q.naming.down)]
    parts = 2 if not q.naming.gate and up.params == 2 * down.params else 1
    several = down.shape[0] if down.shape and len(down.shape) == 3 else 1
    width = widths(up, down, parts, Hints(Counter(), d_model))[1]
    return None if width is None else several * width


def _norm_widths(items: Mapping[str, Item]) -> Counter[int]:
    """Count the lengths of the layer's norms, most of which are d_model."""
    norms = (item.shape for name, item in items.items() if is_norm(name))
    return Counter(shape[0] for shape in norms if shape and len(shape) == 1)


# --- names, for parameters outside the FFN ---------------------------------------------------------------------------


def placed(name: str) -> tuple[str, int, str] | None:
    """Split a name as `recognise` does: (prefix, layer, name inside the layer); None outside all layers."""
    match = _LAYER.search(name) or _ONLY_LAYER.search(name)
    if match is None:
        return None
    return name[: match.start(1)].removesuffix("."), int(match[1] or 0), name[match.end() :]


def is_parameter(name: str) -> bool:
    """Return whether a name is an FFN's parameter, not an adapter or a constant."""
    return not _NOT_PARAMETER.search(name)


def of_other_tower(name: str) -> bool:
    """Return whether a name refers to images, audio or their tokens."""
    return bool(_NOT_TEXT.search(name) or _OTHER_TOKENS.search(name))
