"""Decide how to read the tensors of one layer: derive every canonical parameter's slice from names and shapes.

Canonical matrices are [out, in], as in torch. A file's matrix may be transposed (GPT-2's Conv1D), may hold gate and up
concatenated (Phi-3) or interleaved (gpt-oss), and may be one tensor per expert, one tensor for all experts, or one
matrix with all experts' rows. If names and shapes are not sufficient (which half is first, how square matrices are
stored, which norm is meant), the family's Arrangement decides; without one, the usual layout is assumed and noted.
Facts: the modeling code of transformers 5.23; a test reads every architecture and compares.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Op, of_norm, walk
from ffncli.models.config.families import BY_TYPE, family_of
from ffncli.models.files import inventory
from ffncli.models.tensors.ffns import (
    FFNLocation,
    Item,
    Naming,
    Projections,
    ffn_locations,
    matrix,
    members,
    projections,
    role,
)


@dataclass(frozen=True)
class StoredSlice:
    """The location of one canonical parameter: `tensor` is relative to the layer, and `{e}` stands for every expert.

    The stored matrix holds `parts` parameters along its output axis, concatenated or `interleaved`; this parameter has
    the index `part`. `transposed`: stored as `[in, out]`. `stacked`: one matrix contains the rows of all experts.
    `rows`: a vector is the first of `rows` rows. `format` is the stored format (`F32`, `gptq-4bit`), and `evidence` is
    the reason for reading the tensor this way. `assumed` names a usual property that neither the file nor its family
    confirms.
    """

    tensor: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    interleaved: bool = False
    stacked: bool = False
    rows: int = 1
    format: str = field(default="", compare=False)
    evidence: str = field(default="", compare=False)
    assumed: str = field(default="", compare=False)

    @property
    def per_expert(self) -> bool:
        """Return whether each expert has its own tensor."""
        return "{e}" in self.tensor

    @property
    def words(self) -> str:
        """Describe the layout in words."""
        how = [] if self.parts == 1 else ["interleaved" if self.interleaved else "concatenated"]
        how = [f"{h} {self.part + 1} of {self.parts}" for h in how]
        how += ["experts stacked as rows"] if self.stacked else []
        how += [f"row 1 of {self.rows}"] if self.rows > 1 else []
        return ", ".join(
            (["transposed"] if self.transposed else []) + how + (["per expert"] if self.per_expert else [])
        )


@dataclass(frozen=True)
class LayerTensors:
    """The tensors in which one layer's parameters are looked up, for FFN `number` of the layer.

    `items` are the layer's tensors by their names inside the layer, with `#` for an expert's number; `full` maps these
    names to full names. The name of a tensor outside the layer starts with `../` (XLM's norms). `stored` has all names
    in the file `where`; `alike` returns another layer of the stack, for tensors that this layer lacks. `family` is the
    model_type, if there is one.
    """

    stem: str
    items: Mapping[str, Item]
    full: Mapping[str, str]
    stored: Collection[str]
    family: str
    where: str
    number: int = 0
    alike: "Callable[[], LayerTensors | None]" = lambda: None

    def spelled(self, tensor: str) -> str:
        """Return the name with `{e}` for `#`, in the form that this file uses: `experts.3` or `experts.expert_3`."""
        full = self.stem + tensor
        plain = full.replace("#", "0") in self.stored or full.replace("#", "expert_0") not in self.stored
        return tensor.replace("#", "{e}" if plain else "expert_{e}")

    def slice(self, tensor: str, how: StoredSlice, evidence: str, assumed: str = "") -> StoredSlice:
        """Return the slice that reads one of the layer's tensors as described by `how`."""
        form = self.items[tensor].format
        return replace(how, tensor=self.spelled(tensor), format=form, evidence=evidence, assumed=assumed)


def slices(layer: LayerTensors, spec: FFNSpec) -> dict[str, StoredSlice]:
    """Return the slice of every canonical parameter of one FFN; empty if the layer has no FFN with that index."""
    items = layer.items
    locations = ffn_locations(items, [*projections(items)])
    kind = [n for n, location in enumerate(locations) if bool(location.experts) == bool(spec.moe)]
    number = layer.number if layer.number < len(locations) else 0
    if number not in kind:
        if not kind:
            return {}
        number = kind[0]
    location, inner = locations[number], members(items, locations)[number]
    if spec.gated and not location.projections.naming.gate and not _fused(items, location.projections):
        return {}  # its gate is missing
    rules = arrangement(layer.family)
    out = dict(_matrices(layer, location.projections, spec, rules))
    routed = spec.moe is not None and spec.moe.shared_routed  # then each shared expert is d_ff wide
    shared = replace(spec, d_ff=spec.d_ff if routed else spec.shared_width or spec.d_ff, moe=None)
    for several in location.shared:
        out |= {f"shared.{name}": part for name, part in _matrices(layer, several, shared, rules)}
    out |= _vectors(layer, location, inner)
    out |= _norms(layer, location, spec, rules)
    return out


def _fused(items: Mapping[str, Item], p: Projections) -> bool:
    """Return whether gate and up are in one matrix, judging by the known shapes."""
    up, down = (matrix(items[p.name(leaf)]) for leaf in (p.naming.up, p.naming.down))
    return up is None or down is None or up[0] * up[1] == 2 * down[0] * down[1]


def _matrices(
    layer: LayerTensors, p: Projections, spec: FFNSpec, rules: "Arrangement"
) -> Iterator[tuple[str, StoredSlice]]:
    """Yield gate, up and down with their biases, for one naming."""
    items, naming = layer.items, p.naming
    fused = bool(spec.gated and not naming.gate)
    lie = _orientation(items[p.name(naming.up)], items[p.name(naming.down)], 2 if fused else 1, spec, rules)
    leaves = {"gate": naming.gate or naming.up} if spec.gated else {}
    for step, leaf in {**leaves, "up": naming.up, "down": naming.down}.items():
        why, assumed, half = [f"named {leaf}", lie.because], lie.assumed, StoredSlice("")
        if fused and step != "down":
            order = rules.order(naming, spec.moe is not None and not p.suffix and p.bias(leaf) in items)
            half = StoredSlice("", False, int((step == "gate") != order.gate_first), 2, order.interleaved)
            why.append(order.because)
            assumed = "; ".join(filter(None, (assumed, order.assumed)))
        turned = lie.down_turned if step == "down" else lie.turned
        weight = replace(half, transposed=turned, stacked=lie.stacked)
        yield f"{step}.weight", layer.slice(p.name(leaf), weight, ", ".join(why), assumed)
        if p.bias(leaf) in items:
            yield f"{step}.bias", layer.slice(p.bias(leaf), half, ", ".join([why[0], *why[2:]]), assumed)


@dataclass(frozen=True)
class Orientation:
    """The stored form of up (with gate) and down: whether they are transposed, whether experts are stacked, the reason,
    and any assumption."""

    turned: bool = False
    down_turned: bool = False
    stacked: bool = False
    because: str = ""
    assumed: str = ""


def _orientation(up: Item, down: Item, parts: int, spec: FFNSpec, rules: "Arrangement") -> Orientation:
    """Decide the orientation by both shapes together. If both orientations fit, use the family's, else nn.Linear's."""
    d_model = (spec.moe.latent if spec.moe else None) or spec.d_model
    width, experts = parts * spec.d_ff, spec.moe.experts if spec.moe else 0
    a, b = matrix(up), matrix(down)
    if a is None or b is None:
        return Orientation(because="as in nn.Linear, since its shape is unknown")
    if experts and len(up.shape or ()) == 2 and up.count == 1 and a == b == (experts * spec.d_ff, d_model):
        return Orientation(False, True, True, "[experts · d_ff, d_model] according to its shape")
    # the number of matrices that fit each orientation: a square matrix fits both
    linear = (a == (width, d_model)) + (b == (d_model, spec.d_ff))
    turned = (a == (d_model, width)) + (b == (spec.d_ff, d_model))
    if linear != turned:
        way = "[in, out]" if turned > linear else "[out, in]"
        return Orientation(
            turned > linear, turned > linear, False, f"{way} according to the shapes {list(a)} and {list(b)}"
        )
    way = "[in, out]" if rules.transposed else "[out, in]"
    because = f"{way} as in {rules.family or 'nn.Linear'}: the shapes {list(a)} and {list(b)} fit both ways"
    assumed = "" if rules.family or linear < 2 else "square matrices are read as nn.Linear's [out, in]"
    return Orientation(rules.transposed, rules.transposed, False, because, assumed)


_PARAMETERS = {
    "router": "router.weight", "shared_gate": "shared_gate.weight", "correction": "route.correction",
    "latent": "latent.weight", "widened": "widened.weight", "mixed_bias": "biased.bias",
    "router_in": "router_in.weight", "router_carried": "router_carried.factor", "router_fc1": "router_fc1.weight",
    "router_fc2": "router_fc2.weight",
}  # fmt: skip
# Stored next to a router for image tokens.
_ABOVE_IMAGES = {"router.weight": StoredSlice("", transposed=True), "route.correction": StoredSlice("", rows=2)}


def _vectors(layer: LayerTensors, location: FFNLocation, inner: Mapping[str, Item]) -> dict[str, StoredSlice]:
    """Locate the router's tensors, the shared experts' gate, the latent pair, and activation parameters."""
    matrices = {p.name(leaf) for p in location.all for leaf in p.naming.names}
    out: dict[str, StoredSlice] = {}
    with_images = any(f"{layer.stem}{root}{inventory.ROUTER}" in layer.stored for root in location.roots)

    def add(parameter: str, tensor: str) -> None:
        how = _ABOVE_IMAGES.get(parameter, StoredSlice("")) if with_images else StoredSlice("")
        out.setdefault(parameter, layer.slice(tensor, how, f"named {tensor}"))

    for name in inner:
        if name in matrices:
            continue
        if role(name) == "factor":
            add("route.factor" if location.experts else "scaled.factor", name)
        elif kind := _PARAMETERS.get(role(name)):
            add(kind, name)
            bias = name.removesuffix("weight") + "bias"
            if kind.startswith("router") and bias != name and bias in inner and not role(bias):
                add(kind.replace("weight", "bias"), bias)
        elif inner[name].params == 1:
            add("act." + name.rpartition(".")[2], name)
    return out


def _norms(layer: LayerTensors, location: FFNLocation, spec: FFNSpec, rules: "Arrangement") -> dict[str, StoredSlice]:
    """Locate the block's norms: for each norm, the first of its usual names that exists with the right width."""
    out: dict[str, StoredSlice] = {}
    inside = location.projections.parent.removesuffix("#.").split(".")[:-1]
    number = next((part for part in inside[::-1] if part.isdigit()), "0")
    around = [".".join(inside[:n]) + "." if n else "" for n in range(len(inside), -1, -1)]
    for _, step in walk(steps(spec)):
        if not of_norm(step):
            continue
        for name in norm_modules(step.output, spec, rules):
            module = name.replace("{n}", number)
            stems = [module] if module.startswith("../") else [at + module for at in around]
            for stem in stems:
                parts = _norm(layer.items, stem, step.output, step.op)
                if parts and not out.keys() & parts.keys():
                    out |= parts
    return out


def _norm(items: Mapping[str, Item], stem: str, step: str, op: Op) -> dict[str, StoredSlice]:
    """Locate the weight and the bias of a norm op in one module; older files call these gamma and beta."""
    out: dict[str, StoredSlice] = {}
    for parameter, endings in (("weight", ("weight", "gamma", "scale")), ("bias", ("bias", "beta"))):
        tensor = next((t for e in endings if (t := f"{stem}.{e}") in items), None)
        if tensor and parameter not in op.parameters():
            return {}  # a different kind of norm
        if tensor and items[tensor].shape in (tuple(axis.size for axis in op.parameters()[parameter]), None):
            out[f"{step}.{parameter}"] = StoredSlice(tensor, format=items[tensor].format, evidence=f"named {stem}")
    return out if len(out) == len(op.parameters()) else {}


@dataclass(frozen=True)
class Order:
    """The arrangement of gate and up in one matrix: concatenated or interleaved, and which of the two comes first."""

    gate_first: bool
    interleaved: bool
    because: str
    assumed: str = ""


@dataclass(frozen=True)
class Arrangement:
    """A family's row. `transposed` applies to matrices whose shapes fit both orientations. In a matrix that contains
    gate and up, the two are `interleaved`, or up comes first (`up_first`). `norms` maps a step to the modules that are
    tried before the usual modules; in the modules' names, `../` is the parent of the layers' prefix, `{i}` the layer's
    number, `{n}` the FFN's number in its layer."""

    family: str = ""
    transposed: bool = False
    interleaved: bool = False
    up_first: bool = False
    norms: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def order(self, naming: Naming, biased_experts: bool = False) -> Order:
        """Return the order of gate and up in `naming`'s matrix; `biased_experts` means that the matrix contains all
        experts and has a bias."""
        if self.interleaved or naming.up in _INTERLEAVED:
            return Order(True, True, f"gate and up interleaved, as in {self.family or naming.up}")
        if naming.up in _INKLING:
            why = "" if self.family else f"{naming.up} is read as Inkling's, with gate and up interleaved"
            return Order(True, True, f"gate and up interleaved, as in Inkling's {naming.up}", why)
        if biased_experts and not self.family:
            why = "experts with biases"
            return Order(
                True,
                True,
                f"gate and up interleaved: {why}",
                f"{why} are read as gpt-oss's, with gate and up interleaved",
            )
        if self.up_first or naming.up in _UP_FIRST:
            return Order(False, False, f"up before gate, as in {self.family or naming.up}")
        if naming.up in _GATE_FIRST or self.family:
            return Order(True, False, f"gate before up, as in {self.family or naming.up}")
        return Order(True, False, "gate before up", f"{naming.up}: the first half is read as the gate")


_GATE_FIRST = {"gate_up_proj", "ffn_up"}  # as the names say; llama.cpp agrees (Phi-3)
_UP_FIRST = {"up_gate_proj", "ff_proj", "fc1.proj", "net.0.proj"}  # GTE, Molmo, CLVP, diffusers
_INKLING = {"w13_weight", "shared_w13_weight", "w13_dn"}
_INTERLEAVED = {"mlp1_weight"}  # OpenAI's own gpt-oss files
# The usual names of the norms around an FFN, most specific first.
_PRE = (
    "pre_feedforward_layernorm", "pre_mlp_layernorm", "pre_mlp_norm", "post_sa_norm", "final_layernorm",
    "pre_ff_layernorm", "feedforward_layernorm", "feedforward_layer_norm", "ff_norm", "ffn_layer_norm",
    "ff_layer_norm", "layernorm_before_ffn", "ffn_norm", "norm_ffn", "mlp_norm", "channel_pre_norm",
    "intermediate.LayerNorm", "post_attention_layernorm",
    "post_attention_rmsnorm", "norm_attn_norm.norm_2", "ln_mlp", "ln_2", "layernorm_2", "norm_2",
    "norm2", "rms_norm2", "layer_norm2", "layernorm2", "layernorm_after", "final_layer_norm",
    "layer_norm", "LayerNorm", "layernorm", "ln", "norm",
)  # fmt: skip
_POST = (
    "post_feedforward_layernorm", "post_mlp_layernorm", "post_ffn_norm", "post_ffw_norm", "post_norm2",
    "output.LayerNorm", "output.layer_norm", "lang_output.LayerNorm", "output_layer_norm",
    "full_layer_layer_norm", "feed_forward_layer_norm", "mlp_ln",
    "final_layer_norm", "ln_2", "norm2", "layer_norm2", "layer_norm", "LayerNorm",
)  # fmt: skip
_SHARED = ("input_layernorm", "ln_1")  # for a parallel block, whose norm is also read by the attention
_SUB = ("ffn_sub_norm", "ffn_layernorm")
_ROUTER = ("gate.router_mlp.norm",)
# Norms among the experts: a tensor with one of these names is part of the block, regardless of the config.
EXPERT_NORMS: Mapping[str, Sequence[str]] = {
    "latent_norm": ("pre_expert_norm",), "expert_norm": ("post_expert_norm",), "mixed_norm": ("routed_expert_norm",),
}  # fmt: skip
_ROWS: Mapping[str, Arrangement] = {
    **{name: Arrangement(name, transposed=True) for name in
       ("gpt2", "openai-gpt", "clvp_decoder", "decision_transformer", "imagegpt")},  # Conv1D
    "axk2": Arrangement("axk2", norms={  # in files, then in memory
        "norm": ("post_attention_layernorm.norm",),
        "norm_gate.narrow": ("post_attention_layernorm.W_down", "post_attention_layernorm.mlp.fc1"),
        "norm_gate.widen": ("post_attention_layernorm.W_up", "post_attention_layernorm.mlp.fc2"),
    }),
    "gpt_oss": Arrangement("gpt_oss", interleaved=True),
    "openai_privacy_filter": Arrangement("openai_privacy_filter", transposed=True),
    **{name: Arrangement(name, norms={"norm": ("../layer_norm2.{i}",), "post_norm": ("../layer_norm2.{i}",)})
       for name in ("xlm", "flaubert")},
    "chameleon": Arrangement("chameleon", norms={"post_norm": ("post_attention_layernorm",)}),  # for its Swin variant
    "gguf": Arrangement(  # llama.cpp's names, equal for all families; gpt-oss has no ffn_norm
        "GGUF", norms={"norm": ("ffn_norm", "post_attention_norm"), "post_norm": ("post_ffw_norm",)}
    ),
    "canary_decoder": Arrangement("canary_decoder", norms={"norm": ("final_layernorm", "layer_norm_3")}),
    **{name: Arrangement(name, up_first=True) for name in ("moonshine", "moonshine_streaming")},
    "longcat_flash": Arrangement("longcat_flash", norms={"norm": ("post_attention_layernorm.{n}",)}),
}  # fmt: skip


def arrangement(model_type: str) -> Arrangement:
    """Return a family's row or, if it has no row, the usual arrangement with the family's name (empty if unknown)."""
    if row := _row(model_type):
        return row
    return Arrangement(model_type if family_of(model_type) is not None else "")


def norm_modules(step: str, spec: FFNSpec, rules: Arrangement) -> Sequence[str]:
    """Return the names that a norm's module may have, most likely first."""
    pre = _SHARED if spec.shared_norm else _PRE
    usual = {"norm": pre, "post_norm": _POST, "sub_norm": _SUB, "router_norm": _ROUTER, **EXPERT_NORMS}
    return (*rules.norms.get(step, ()), *usual.get(step, ()))


def outside(model_type: str) -> Sequence[str]:
    """Return a family's norms that are outside its layers, with `../` for the parent of the layers' prefix."""
    row = _row(model_type)
    return [name for names in (row.norms.values() if row else ()) for name in names if name.startswith("../")]


def _row(model_type: str) -> Arrangement | None:
    return _ROWS.get(model_type) or _ROWS.get(BY_TYPE.get(model_type, ""))
