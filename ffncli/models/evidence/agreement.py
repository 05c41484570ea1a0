"""Check a config's model against its checkpoint's tensors, which confirm, override or contradict it.

Blocks are compared one by one. Outside the FFNs, we compare every layer's attention and the vocabulary, if the family
has a row in `config.non_ffn` and the tensors are unambiguous (`non_ffn.measure`): layers with adapters or with several
FFNs are skipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any

from ffncli.block import dtypes
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.inventory import Inventory, take_inventory
from ffncli.models.model import (
    IN_ALL,
    MORE_TOKENS,
    OTHER_TOWERS,
    UNEVEN,
    Disagreement,
    Group,
    Layer,
    Model,
    NonFFN,
    NotCounted,
    Resolved,
    Spot,
    StoredSize,
    grouped,
)
from ffncli.models.tensors import layout
from ffncli.models.tensors.ffns import Item, looked_for
from ffncli.models.tensors.matching import Spotted, block_tensors, blocks, items_of, pairs, prefixes, side_by_side
from ffncli.models.tensors.non_ffn import MeasuredNonFFN, measure
from ffncli.models.tensors.recognise import Layers, StoredFFN, recognise
from ffncli.models.tensors.slices import EXPERT_NORMS

_MOST_LOOKS = 16  # each check scans all names once


def with_evidence(resolved: Resolved) -> Resolved:
    """Correct the model according to its tensors, if it has any, and list the differences from its config."""
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        return _config_alone(resolved)
    compared = with_inventory(resolved, take_inventory(checkpoint))
    for difference in islice(filter(_may_be_the_files, compared.differences), _MOST_LOOKS):
        _require_all(compared, checkpoint, difference)
        if difference.name == UNEVEN:
            raise FFNError(f"{checkpoint.where}: {difference.where} has {difference.tensors}", NOT_WHOLE)
    return compared


def _may_be_the_files(difference: Disagreement) -> bool:
    """Return whether a missing or misshapen tensor could cause this difference."""
    none = (difference.name, difference.tensors) == ("experts", "0")
    return none or difference.name in ("layers", "gated", "bias", IN_ALL, UNEVEN)


def _config_alone(resolved: Resolved) -> Resolved:
    """Return the model with a note that there are no tensors to compare it with."""
    if resolved.location is None or resolved.source.endswith(".json"):  # the source is the config itself
        return resolved
    pickled = any(any(resolved.location.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    also = " (pickled weights are not read: save them as safetensors)" if pickled else ""
    return resolved.noted(
        f"no safetensors in {shown_path(resolved.location)}{also}: the model is read from the config alone"
    )


def _require_all(resolved: Resolved, checkpoint: Checkpoint, difference: Disagreement) -> None:
    """Raise FFNError if a block differs only because a tensor is missing or has another shape."""
    alike = [g.spec for g in resolved.model.groups if g.stack == difference.stack]
    spec = next(g.spec for g in resolved.model.groups if g.stack == difference.stack and difference.index in g.layers)
    name = difference.name
    if name in ("gated", "bias") and any(getattr(other, name) != getattr(spec, name) for other in alike):
        config: dict[str, Any] = {name: not getattr(spec, name)}
        spec = replace(spec, **config)  # other layers match the config
    spec = replace(spec, norm="none", sub_norm=False)  # norms matter only to a trace
    layer = block_tensors(resolved, checkpoint, difference.stack, difference.index)
    if layer is not None and layout.torn(layer, spec):
        located = layout.locate(layer, spec)
        layout.check_shapes(checkpoint, tuple(item for item in located if {*item.names} <= checkpoint.files.keys()))


def with_inventory(resolved: Resolved, inventory: Inventory) -> Resolved:
    """Correct the model as in `with_evidence`, for an inventory that was already taken."""
    items, complete = items_of(inventory, resolved.quantization), not inventory.missing
    tensors = recognised(items, resolved.model.main.spec.d_model, inventory.where, absent_files(inventory), complete)
    if tensors.layers:
        blocks = agree(resolved.model, tensors.layers, tensors.others, tensors.where, complete)
        resolved = with_tensors(resolved, blocks, tensors, complete)
    note = f"{tensors.where}: {tensors.absent}: their tensors are inferred from the config"
    return resolved if complete else resolved.noted(note)


NOT_WHOLE = "every expert needs all of its matrices; is the file complete?"


@dataclass(frozen=True)
class RecognisedTensors:
    """A checkpoint's logical tensors, its FFNs, and the FFNs of other text models; `absent` describes missing files."""

    where: str
    items: Mapping[str, Item]
    layers: Layers
    others: Layers
    absent: str = ""


def recognised(
    items: Mapping[str, Item], d_model: int | None, where: str, absent: str = "", needed: bool = True
) -> RecognisedTensors:
    """Recognise the FFNs among some tensors. Raises FFNError if none is found, unless `needed` is false."""
    layers, others = recognise(items, d_model, where)
    if needed and not layers:
        if items and all("lora_" in name or "adapter" in name for name in items):
            raise FFNError(f"{where} is an adapter, without the matrices that it changes", "give its model")
        raise FFNError(f"{where}: no FFN among {len(items):,} tensor names", f"looked for {looked_for()}")
    return RecognisedTensors(where, items, layers, others, absent)


def absent_files(inventory: Inventory) -> str:
    """Describe the missing files of an index; empty if no file is missing."""
    absent = inventory.missing
    return f"{len(absent)} of {inventory.files} files are missing ({absent[0]})" if absent else ""


def with_tensors(
    resolved: Resolved, blocks: "TensorBlocks", tensors: RecognisedTensors, outside: bool = True
) -> Resolved:
    """Return the model with these blocks and its stored sizes; if `outside`, also count what is outside the FFNs."""
    model, stored = replace(resolved.model, groups=blocks.groups), blocks.stored
    if stored:
        row = dtypes.find(stored.formats[0])
        model = replace(model, dtype=row.name if row else stored.formats[0])
    if stored and not tensors.absent:
        params = sum(item.params * item.count for item in tensors.items.values())
        stored = replace(stored, file_params=params, file_bytes=sum(item.bytes for item in tensors.items.values()))
    resolved = replace(
        resolved.noted(*blocks.notes).without(*blocks.not_counted),
        model=model,
        evidence=(*blocks.evidence, *resolved.evidence),
        differences=blocks.differences,
        stored=stored,
        spots=blocks.spots,
    )
    return with_non_ffn(resolved, tensors) if outside else resolved


# Fields of a spec, and of its MoE, that tensors can reveal.
_OF_SPEC = ("d_model", "d_ff", "gated", "bias", "activation", "learned_scale")
_OF_MOE = (
    "experts", "latent", *EXPERT_NORMS, "mixed_bias", "router_bias", "correction", "shared_gate", "shared_routed",
    "shared_experts", "router_width", "router_carries", "skip_experts",
)  # fmt: skip
_DENSE = MoE(experts=0, top_k=0)
_BY_TENSORS = ("gated", "bias")  # the tensors decide these fields; a block with any other difference cannot be run
_MOST_NOTES = 3


@dataclass(frozen=True)
class TensorBlocks:
    """A model's FFN blocks according to its tensors: locations, size (None if a file is missing), and notes."""

    groups: tuple[Group, ...]
    spots: Mapping[tuple[str, int], Spot]
    stored: StoredSize | None = None
    differences: tuple[Disagreement, ...] = ()
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    not_counted: tuple[NotCounted, ...] = ()


@dataclass
class BlockComparison:
    """A model's blocks compared with its tensors, layer by layer; `specs` holds the blocks according to the tensors.

    If the checkpoint is not `complete`, layers may be missing.
    """

    model: Model
    complete: bool
    specs: dict[str, dict[int, FFNSpec]]
    differences: dict[tuple[str, str, str], Disagreement] = field(default_factory=dict)
    evidence: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    not_counted: list[NotCounted] = field(default_factory=list)
    params: int = 0
    stored_bytes: int = 0
    formats: dict[str, None] = field(default_factory=dict)
    whole: bool = True
    explained: set[StoredFFN] = field(default_factory=set)
    spots: dict[tuple[str, int], Spot] = field(default_factory=dict)

    def differ(self, new: Disagreement) -> None:
        """Record a difference; layers with the same difference share one record."""
        key = (new.name, new.config, new.tensors)
        earlier = self.differences.get(key)
        self.differences[key] = replace(earlier, layers=earlier.layers + 1) if earlier else new

    def stack(self, prefix: str, blocks: Sequence[Layer], under: Mapping[int, Sequence[StoredFFN]]) -> None:
        """Compare the blocks that share a prefix with the FFNs under it."""
        by_layer, ffns = side_by_side(self.model, blocks, prefix, under)
        last = max(by_layer)
        beyond = {f"{prefix}.{i}": {i: tuple(item for _, item in ffns[i])} for i in sorted(ffns) if i > last}
        if len(beyond) <= self.model.extra_layers:
            self.not_counted += not_counted(beyond, MORE_TOKENS)
            ffns = {i: items for i, items in ffns.items() if i <= last}
        self._numbers(prefix, by_layer, ffns)
        for layer, several in by_layer.items():
            if layer in ffns:
                self._layer(f"{prefix}.{layer}", several, ffns[layer])

    def _numbers(self, prefix: str, by_layer: Mapping[int, Sequence[Layer]], ffns: Mapping[int, object]) -> None:
        """Record the first layer that the tensors lack or, if the tensors lack no layer, the first layer that the
        config lacks."""
        lacking = sorted(set(by_layer) - set(ffns)) if self.complete else []
        extra = sorted(set(ffns) - set(by_layer))
        for layer in (lacking or extra)[:1]:
            at = by_layer.get(layer, next(iter(by_layer.values())))[0]
            where = f"{prefix}.{layer} has {'no FFN' if lacking else 'an FFN'}"
            there = len(by_layer) - len(lacking) if lacking else len(ffns)
            name = self.model.names.get("layers", "layers")
            self.differ(Disagreement("layers", name, str(len(by_layer)), str(there), where, at.stack, at.index))

    def _layer(self, at: str, blocks: Sequence[Layer], ffns: Sequence[Spotted]) -> None:
        """Compare the FFNs of one layer in order."""
        if len(blocks) != len(ffns):
            self.differ(Disagreement("FFNs per layer", "FFNs per layer", str(len(blocks)), str(len(ffns)), at))
        for block, (spot, item) in pairs(blocks, ffns):
            self.params += item.params
            self.stored_bytes += item.bytes
            self.formats |= dict.fromkeys(item.formats)
            self.whole &= item.whole
            self.spots[block.stack, block.index] = spot
            self.specs[block.stack][block.index] = self._block(block, item, at)

    def _block(self, block: Layer, item: StoredFFN, at: str) -> FFNSpec:
        """Return the spec with the gate and the biases that the tensors have, and record every difference."""
        spec, tensor = block.spec, f"{at}.{item.tensor}".replace("#", "0")
        item = self._without_leftovers(spec, item)
        if item.uneven:
            self.differ(Disagreement(UNEVEN, UNEVEN, "all", item.uneven, at, block.stack, block.index))
            return spec
        stated = {name: getattr(spec, name) for name in _OF_SPEC}
        if item.whole:  # a missing file may contain the router or the shared experts
            moe = spec.moe or _DENSE
            stated |= {"shared_d_ff": spec.shared_width, **{name: getattr(moe, name) for name in _OF_MOE}}
        shown_here = ((name, stored) for name, stored in item.shows.items() if name in stated)
        differ = [(name, stated[name], stored, tensor) for name, stored in shown_here if stored != stated[name]]
        decided: dict[str, Any] = {name: stored for name, _, stored, _ in differ if name in _BY_TENSORS}
        corrected = replace(spec, **decided) if decided else spec
        counted = params_of(corrected)
        if item.whole and counted != item.params and all(name in _BY_TENSORS for name, *_ in differ):
            differ.append((IN_ALL, counted, item.params, f"{at}.{item.loose[0]}" if item.loose else tensor))
        for name, was, stored, where in differ:
            was, stored = ("none" if value is None else shown(value) for value in (was, stored))
            field = self._config_name(name, spec)
            self.differ(Disagreement(name, field, was, stored, where, block.stack, block.index))
        if item.misfit:
            self.differ(replace(misfit(item, spec, at), stack=block.stack, index=block.index))
        if item not in self.explained:  # one layer of each kind is enough evidence
            self.explained.add(item)
            self.evidence |= dict.fromkeys(_evidence(self.model, spec, item, tensor))
        return corrected

    def _without_leftovers(self, spec: FFNSpec, item: StoredFFN) -> StoredFFN:
        """Return the FFN without what writers add and loaders skip: zero biases in GPTQ's files, and the gate and up
        matrices that transformers writes for LongCat's identity experts."""
        packed = bool(item.formats) and all(form.startswith("gptq") for form in item.formats)
        if not spec.bias and item.shows["bias"] and packed:
            biases = params_of(replace(spec, bias=True)) - params_of(spec)
            note = "biases stored with GPTQ's matrices are left out: the model has no biases"
            return self._without(biases, note, replace(item, shows={**item.shows, "bias": False}))
        moe = spec.moe
        if moe and moe.identity_experts:
            every = moe.experts + moe.identity_experts
            if item.shows["experts"] == every and item.uneven == f"down_proj for {moe.experts:,} of {every:,} experts":
                unused = moe.identity_experts * 2 * spec.d_ff * spec.d_model
                note = "matrices of identity experts are left out: nothing reads them"
                shows = {**item.shows, "experts": moe.experts}
                return self._without(unused, note, replace(item, shows=shows, uneven=""))
        return item

    def _without(self, params: int, note: str, item: StoredFFN) -> StoredFFN:
        self.notes += [] if note in self.notes else [note]
        self.params -= params
        return replace(item, params=item.params - params)

    def _config_name(self, name: str, spec: FFNSpec) -> str:
        """Return the config's name for one of our names; if there is no field, the value follows from model_type."""
        label = self.model.names.get(f"moe.{name}" if spec.moe else name) or self.model.names.get(name)
        return label or (name if name == IN_ALL else f"{name} (by model_type {self.model.model_type})")

    def blocks(self) -> TensorBlocks:
        """Return the model's groups with the specs of the tensors; groups change only if the tensors change a spec."""
        groups: list[Group] = []
        for group in self.model.groups:
            if group.stack in self.specs:
                specs = {index: self.specs[group.stack][index] for index in group.layers}
                groups += grouped(group.stack, specs, group.runs, group.per_layer)
        whole = self.whole and self.complete and self.params > 0
        stored = StoredSize(self.params, self.stored_bytes, tuple(self.formats)) if whole else None
        return TensorBlocks(
            tuple(groups), self.spots, stored, tuple(self.differences.values()), tuple(self.evidence),
            tuple(self.notes), tuple(self.not_counted),
        )  # fmt: skip


def agree(model: Model, layers: Layers, others: Layers, where: str, complete: bool = True) -> TensorBlocks:
    """Derive a model's blocks from its tensors, with every difference from its config.

    `others` are FFNs that belong to no layer of the model and are noted. `where` names the checkpoint.
    """
    by_stack, under = blocks(model), prefixes(model, layers)
    specs = {stack: {block.index: block.spec for block in by_stack[stack]} for stack in by_stack}
    comparison = BlockComparison(model, complete, specs)
    if under and complete:
        absent = [stack for stack in by_stack if stack not in under]
        comparison.notes += [f"no {stack} tensors in {where}: the {stack} is left out" for stack in absent]
        comparison.specs = {stack: several for stack, several in specs.items() if stack in under}
    for prefix in dict.fromkeys(under.values()):
        mine = [block for stack in by_stack if under.get(stack) == prefix for block in by_stack[stack]]
        comparison.stack(prefix, mine, layers[prefix])
    left = {prefix: by_layer for prefix, by_layer in layers.items() if prefix not in under.values()}
    comparison.not_counted += not_counted({**left, **others})
    return comparison.blocks()


def misfit(item: StoredFFN, spec: FFNSpec, at: str) -> Disagreement:
    """Report matrices that do not fit together: the first matrix with an unexpected width, else the last matrix."""
    widths = [{spec.d_model, parts * d_ff} for d_ff in (spec.d_ff, spec.shared_width) for parts in (1, 2)]
    wrong = [(name, shape) for name, shape in item.misfit if {*shape[-2:]} not in widths]
    name, shape = (wrong or item.misfit[-1:])[0]
    config = f"d_model {spec.d_model}, d_ff {spec.d_ff}"
    return Disagreement("shape", "shape", config, shown(list(shape)), f"{at}.{name}".replace("#", "0"))


@cache
def params_of(spec: FFNSpec) -> int:
    """Count a block's parameters. Cached, since most layers of a model are equal."""
    return cost(steps(spec)).params


def _evidence(model: Model, spec: FFNSpec, item: StoredFFN, tensor: str) -> Iterator[str]:
    gated, bias = item.shows.get("gated"), item.shows["bias"]
    if gated is not None:
        fused = "gate and up in " if item.fused else ""
        yield f"{'gated' if gated else 'plain'}: {fused}tensor {shown(tensor, 120)}"
        if gated != spec.gated:
            family = f"model_type {model.model_type}, which is {'gated' if spec.gated else 'plain'}"
            yield f"gatedness: the tensors override {family}"
    if bias != spec.bias:
        yield f"bias: {'present' if bias else 'absent'} in the file, unlike the config"


def not_counted(left: Layers, why: str = "they are in no layer of the model") -> list[NotCounted]:
    """List FFNs that belong to no layer of the model, by prefix; if there are many prefixes, they share one entry."""
    params = {
        prefix: sum(item.params for items in by_layer.values() for item in items) for prefix, by_layer in left.items()
    }
    if len(left) <= _MOST_NOTES:
        return [NotCounted(f"FFNs in {shown(prefix, 80)}", why, n or None) for prefix, n in params.items()]
    first = ", ".join(shown(prefix, 80) for prefix in [*left][:_MOST_NOTES])
    return [NotCounted(f"FFNs under {len(left):,} prefixes, {first}, ...", why, sum(params.values()))]


_PADDED_TO = (8, 16, 32, 64, 128, 256, 512)  # tables are often padded to a multiple of these, which suits matrix units


def with_non_ffn(resolved: Resolved, tensors: RecognisedTensors) -> Resolved:
    """For a complete checkpoint, add the parameters outside the FFNs, and every difference between these and the
    config."""
    model, config = resolved.model, resolved.model.non_ffn
    measured = measure(model, tensors.items, tensors.layers)
    left_out = measured.left_out.items()
    towers = [NotCounted(f"module {shown(module)}", OTHER_TOWERS, params) for module, params in left_out]
    differences: list[Disagreement] = []
    notes: list[str] = []
    table = measured.embedding
    if config is not None:
        differences = [d for stack in config.layers for d in _attention(config, measured, stack)]
    # a multimodal model's image or audio tokens may have rows that its text_config does not count
    if config is not None and table and config.vocabulary and not left_out:
        padded = [-(-config.vocabulary // to) * to for to in _PADDED_TO]
        if table.rows > config.vocabulary and table.rows in padded:
            rows = f"the embedding is padded to {table.rows:,} rows"
            notes.append(f"{config.names['vocabulary']} is {config.vocabulary:,}; {rows}")
        elif table.rows != config.vocabulary:
            numbers = f"{config.vocabulary:,}", f"{table.rows:,}"
            differences.append(Disagreement("vocabulary", config.names["vocabulary"], *numbers, table.tensor))
    return replace(
        resolved.without(*towers).noted(*notes),
        model=replace(model, non_ffn=measured.record(config)),
        evidence=(*resolved.evidence, *(_non_ffn_evidence(measured) if config is None else ())),
        differences=(*resolved.differences, *differences),
    )


def _non_ffn_evidence(measured: MeasuredNonFFN) -> Iterator[str]:
    first = next((layer for stack in measured.layers.values() for layer in stack.values()), None)
    if first:
        yield f"attention and norms: from the tensors, such as {shown(first.tensor, 120)}"
    if measured.params is not None:
        yield "whole model: every text parameter in the tensors; tied parameters count once"


def _attention(config: NonFFN, measured: MeasuredNonFFN, stack: str) -> Iterator[Disagreement]:
    """Yield one difference for all layers of a stack whose attention differs from the config's attention."""
    by_config = {i: layer.attention for i, layer in config.layers[stack].items()}
    other = {
        i: layer
        for i, layer in measured.layers.get(stack, {}).items()
        if by_config[i] not in (layer.attention, layer.attention + layer.table)
        # writers of quantized files add a bias to each module, all zeros if the model has no bias
        and not (layer.packed and layer.matrices <= by_config[i] <= layer.attention)
    }
    if other:
        first = min(other)
        name = f"attention ({config.names['attention']})"
        numbers = f"{by_config[first]:,} parameters per layer", f"{other[first].attention:,}"
        yield Disagreement("attention", name, *numbers, other[first].tensor, stack, first, len(other))
