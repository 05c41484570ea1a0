"""Model: what a source describes. Resolved: a Model with its evidence, notes and, if available, weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Step
from ffncli.errors import FFNError, option, shown, shown_path

if TYPE_CHECKING:
    from torch import Tensor

    from ffncli.models.files.checkpoint import Checkpoint


@dataclass(frozen=True)
class Group:
    """Layers of one stack (`encoder`, `decoder`, or `block` for bare dimensions) that share a spec.

    `layers` holds the indices of FFN blocks; each layer of the model has `per_layer` FFN blocks. `runs` is how often
    each block runs in one forward pass (ALBERT stores one layer and runs it twelve times).
    """

    stack: str
    layers: tuple[int, ...]
    spec: FFNSpec
    runs: int = 1
    per_layer: int = 1

    @property
    def steps(self) -> tuple[Step, ...]:
        """The block as named assignments."""
        return steps(self.spec)


@dataclass(frozen=True)
class Layer:
    """One FFN block, such as `decoder.3`, and its spec; `index` counts the blocks of a stack, not its layers."""

    stack: str
    index: int
    spec: FFNSpec


IN_ALL = "parameters per layer"  # the parameter counts differ although all widths agree
UNEVEN = "tensors per expert"  # some experts lack a matrix


@dataclass(frozen=True)
class Disagreement:
    """A field with different values in a config and in the tensors; `where` is the name of a tensor.

    `name` is our name for the field, `field` is the config's name. `stack` and `index` locate the first block that
    differs; `layers` is the number of layers with the same difference. `teller` is the phrase that introduces the
    config's value or, for a GGUF file, the metadata's value.
    """

    name: str
    field: str
    config: str
    tensors: str
    where: str
    stack: str = ""
    index: int = 0
    layers: int = 1
    teller: str = "the config says"

    def __str__(self) -> str:
        several = f" and {self.layers - 1} more" if self.layers > 1 else ""
        return f"{self.field}: {self.teller} {self.config}, the tensors {self.tensors} ({self.where}{several})"


@dataclass(frozen=True)
class NotCounted:
    """A part of a model that we do not count: its name, the reason, and its parameters (None if unknown)."""

    what: str
    why: str
    parameters: int | None = None

    def __str__(self) -> str:
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        return f"{self.what}{size}: {self.why}"


@dataclass(frozen=True)
class Spot:
    """The location of a block's tensors: the stack's prefix, the layer's index below this prefix, and the FFN's index
    in the layer."""

    prefix: str
    layer: int
    number: int = 0


@dataclass(frozen=True)
class StoredSize:
    """The size of a checkpoint's FFNs according to its headers: logical parameters, bytes in the file, formats.

    `file_params` and `file_bytes` count everything in the checkpoint's files; both are None if a file is missing.
    """

    params: int
    bytes: int
    formats: tuple[str, ...]
    file_params: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True)
class Model:
    """A model: its layers, grouped by spec, and its parameters outside the FFN blocks.

    `bare` marks a single block that is not part of a model. `dtype` is the stored format if known. `names` maps our
    field names to the config's; `extra_layers` is the number of layers beyond the config's layer count (multi-token
    prediction); `tied` is tie_word_embeddings. `unknown` lists the fields of the specs (`activation`, `top_k`) that
    hold a placeholder because the source does not specify them; `refused` is the reason why the blocks cannot be run
    although they are counted.
    """

    name: str
    groups: tuple[Group, ...]
    model_type: str = ""
    dtype: str | None = None
    bare: bool = False
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    extra_layers: int = 0
    tied: bool | None = None
    non_ffn: NonFFN | None = None
    unknown: frozenset[str] = frozenset()
    refused: str = ""

    @property
    def main(self) -> Group:
        """The group with the most layers (the first if several tie); figures "per layer" are for this group."""
        return max(self.groups, key=lambda group: len(group.layers))

    @property
    def layer_count(self) -> int | None:
        """The number of FFN blocks in all stacks; None for bare dimensions."""
        return None if self.bare else sum(len(group.layers) for group in self.groups)

    def per_layer(self, stack: str) -> int:
        """Return the number of FFN blocks in each layer of a stack."""
        return next(group.per_layer for group in self.groups if group.stack == stack)

    def layer(self, text: int | str | None) -> Layer:
        """Return the layer that `3` or `decoder.3` names; the first layer if `text` is None."""
        counts: dict[str, list[int]] = {}
        for group in self.groups:
            counts[group.stack] = sorted([*counts.get(group.stack, []), *group.layers])
        layers = " and ".join(_layers(s, n) for s, n in counts.items()) if not self.bare else "only layer 0"
        stack, _, number = str(next(iter(counts.values()))[0] if text is None else text).rpartition(".")
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            example = next(iter(counts)) + ".0" if len(counts) > 1 else "0"
            advice = f"there is {layers}" if self.bare else f"{self.name} has {layers}"
            raise FFNError(
                f"{option('layer')} must be a whole number from 0, as in {example}, got {shown(text)}", advice
            )
        if stack and stack not in counts:
            raise FFNError(f"{option('layer')} {shown(text)}: no stack '{stack}'", f"{self.name} has {layers}")
        if not stack and len(counts) > 1 and text is not None:
            names = [f"{s}.{number}" for s, n in counts.items() if int(number) in n]
            if names:
                raise FFNError(f"{option('layer')} {shown(text)} is ambiguous", "write " + " or ".join(names))
        stack = stack or next(iter(counts))
        for group in self.groups:
            if group.stack == stack and int(number) in group.layers:
                return Layer(stack, int(number), group.spec)
        raise FFNError(f"{option('layer')} {text or 0} is out of range", f"{self.name} has {layers}")

    def with_specs(self, change: Sequence[FFNSpec]) -> Model:
        """Return the model with these specs, one for each group."""
        return replace(self, groups=tuple(replace(g, spec=s) for g, s in zip(self.groups, change, strict=True)))


@dataclass(frozen=True)
class Example:
    """The data of a built-in block: weights as nested lists (random if empty), and the name and shape of its input.

    `dropped` lists, for each dropout step, the (token, unit) pairs dropped by a mask with probability `dropout`. A
    random input is multiplied by `scale`, then `given` sets individual values by (token, unit). `block` holds the steps
    if the spec cannot express them; `vocab` is the width of a final layer that follows (0: no final layer); `aliases`
    maps our names to those in the published text. `fixed`: that text specifies the whole input, so no option may choose
    another input.
    """

    weights: dict[str, Any]
    input: str
    shape: tuple[int, ...]
    dropped: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    dropout: float = 0.0
    scale: float = 1.0
    given: Mapping[tuple[int, int], float] = field(default_factory=dict)
    block: tuple[Step, ...] | None = None
    vocab: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: bool = False


@dataclass(frozen=True)
class Resolved:
    """A model with its source and the evidence for its properties.

    `source` is what the user typed, `location` is the path at which weights may be found, and `checkpoint` holds the
    stored tensors. `weights` holds a module's canonical tensors in memory, by stack and layer. `evidence` says where
    gatedness and widths come from; `notes` are shown to the user. `differences` are disagreements between config and
    tensors; `stored` is the size of the tensors (None if no headers were read). `from_tensors`: the blocks were read
    from the tensors, so there is nothing to compare with them. `quantization` is the config's quantization_config.
    `spots` locates each block's tensors by stack and index. `not_counted` lists the parts that the source shows but
    that are not counted (`counting.not_counted` adds parts that follow from the model). `published_as` quotes the
    publisher's numbers of parameters, each with what it counts, and the page that has them unless the name does.
    `kept` holds what is loaded to run on texts, for further questions; None if nothing is kept.
    """

    model: Model
    source: str
    citation: str = ""
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    differences: tuple[Disagreement, ...] = ()
    stored: StoredSize | None = None
    from_tensors: bool = False
    not_counted: tuple[NotCounted, ...] = ()
    published_as: str | None = None
    location: Path | None = None
    quantization: Mapping[str, Any] | None = field(default=None, compare=False)
    checkpoint: Checkpoint | None = field(default=None, compare=False, repr=False)
    spots: Mapping[tuple[str, int], Spot] = field(default_factory=dict, compare=False, repr=False)
    weights: Mapping[tuple[str, int], Mapping[str, Tensor]] | None = field(default=None, compare=False, repr=False)
    example: Example | None = field(default=None, compare=False, repr=False)
    kept: dict[Any, Any] | None = field(default=None, compare=False, repr=False)

    def block(self, layer: Layer) -> tuple[Step, ...]:
        """Return the steps of a layer's FFN block, without any final layer. An example may define its own steps."""
        return steps(layer.spec) if self.example is None or self.example.block is None else self.example.block

    def noted(self, *notes: str) -> Resolved:
        """Return the model with more notes for the user."""
        return replace(self, notes=(*self.notes, *notes))

    def without(self, *parts: NotCounted) -> Resolved:
        """Return the model with more parts that are not counted, and with a note for each of them."""
        # new parts replace earlier parts with the same reason: tensors are read after the config and describe the parts
        # better
        reasons = {part.why for part in parts}
        kept = [part for part in self.not_counted if part.why not in reasons]
        gone = {_left_out(part) for part in self.not_counted} - {_left_out(part) for part in kept}
        notes = (*(note for note in self.notes if note not in gone), *map(_left_out, parts))
        return replace(self, notes=notes, not_counted=(*kept, *parts))


def _left_out(part: NotCounted) -> str:
    return f"not counted: {part}"


_UNKNOWN = {
    "norm": "norms and residuals",
    "activation": "the activation",
    "top_k": "top_k (and with it the active parameters)",
}


def unknown_note(unknown: Collection[str]) -> str:
    """Return a note on what is unknown about a model's blocks (`Model.unknown`)."""
    return "unknown from this source, so not counted: " + ", ".join(
        _UNKNOWN[name] for name in _UNKNOWN if name in unknown
    )


def _layers(stack: str, layers: Sequence[int]) -> str:
    """Return text such as `decoder layers 0 to 31` or `decoder layers 1, 3, 6, ..., 51` for layers with an FFN."""
    if len(layers) == layers[-1] + 1:
        return f"{stack} layers 0 to {layers[-1]}"
    shown_ones = [*map(str, layers)] if len(layers) < 5 else [*map(str, layers[:3]), "...", str(layers[-1])]
    return f"{stack} layers {', '.join(shown_ones)}"


def block_model(spec: FFNSpec, source: str, name: str | None = None, notes: tuple[str, ...] = ()) -> Resolved:
    """Build a bare block: dimensions without layers."""
    return Resolved(Model(name or source, (Group("block", (0,), spec),), bare=True), source, notes=notes)


def grouped(stack: str, specs: Mapping[int, FFNSpec], runs: int = 1, per_layer: int = 1) -> list[Group]:
    """Group blocks by equal spec, in order of first appearance; `specs` maps each block's index to its spec."""
    alike: dict[FFNSpec, list[int]] = {}
    for index, spec in specs.items():
        alike.setdefault(spec, []).append(index)
    return [Group(stack, tuple(layers), spec, runs, per_layer) for spec, layers in alike.items()]


def ranges(layers: tuple[int, ...]) -> str:
    """Return layer indices as text such as `layer 4`, `layers 0-2, 5` or `layers 0-46 by 2`."""
    step = layers[1] - layers[0] if len(layers) > 3 else 1
    if step > 1 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        return f"layers {layers[0]}-{layers[-1]} by {step}"
    out: list[list[int]] = []
    for layer in layers:
        if out and layer == out[-1][1] + 1:
            out[-1][1] = layer
        else:
            out.append([layer, layer])
    return ("layer " if len(layers) == 1 else "layers ") + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in out)


# Reasons for a NotCounted that can come from a config or from tensors.
OTHER_TOWERS = "the counts cover only the text model"
MORE_TOKENS = "multi-token prediction, which a forward pass does not need"


class Projection(NamedTuple):
    """The weight of a projection: the module's name within its layer (`self_attn.q_proj`), its outputs and inputs."""

    name: str
    rows: int
    columns: int

    @property
    def params(self) -> int:
        """Return the number of weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class LayerParams:
    """The parameters of one layer without its FFN: attention or another mixer (including cross-attention), all norms
    (including the FFN's), and other parts (residual streams, per-layer embeddings). `projections` are the mixer's."""

    attention: int
    norms: int
    other: int = 0
    projections: tuple[Projection, ...] = ()

    @property
    def params(self) -> int:
        """Return the sum of all parameters."""
        return self.attention + self.norms + self.other

    def ffn_share(self, ffn_params: int) -> float:
        """Return the FFN's share of the layer's parameters."""
        return ffn_params / (ffn_params + self.params)


@dataclass(frozen=True)
class NonFFN:
    """The parameters of a model outside its FFN blocks; `layers[stack][block]` are those of the block's layer, if
    known.

    `parts` maps (stack, name of the part) to a parameter count, with the stack "" for parts outside every stack
    (embeddings, an untied head); it is None if the total is unknown. `lookup` is the number of parameters that are
    looked up instead of multiplied: tables, and the input embedding unless it is tied to a head; it is None if
    uncertain. `vocabulary` is 0 if the config has no vocabulary size; `names` are the config's names for `vocabulary`
    and `attention`. `between` are the layers without an FFN (Nemotron-H). `named`: the projections of the layers have
    the names of the family's checkpoints; `listed`: outside the FFNs there are no other projections, except a head.
    """

    layers: Mapping[str, Mapping[int, LayerParams]]
    parts: Mapping[tuple[str, str], int] | None = None
    lookup: int | None = None
    vocabulary: int = 0
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    between: Mapping[int, LayerParams] = field(default_factory=dict)
    named: bool = False
    listed: bool = False

    def layer(self, stack: str, blocks: Iterable[int]) -> LayerParams | None:
        """Return the parameters of each of these blocks' layers if all are known and equal, else None."""
        layers = self.layers.get(stack, {})
        alike = {(layer.attention, layer.norms, layer.other) if (layer := layers.get(i)) else None for i in blocks}
        one = alike.pop() if len(alike) == 1 else None
        return LayerParams(*one) if one else None

    def params(self, stacks: Collection[str]) -> int | None:
        """Return the number of parameters outside the FFNs of a model with just these stacks; None if unknown."""
        if self.parts is None:
            return None
        return sum(params for (stack, _), params in self.parts.items() if not stack or stack in stacks)


_HINT = "give a directory with config.json and safetensors, or a GGUF file"


def require_runnable(resolved: Resolved) -> None:
    """Raise FFNError, with the options to add, if the source does not fully describe the blocks."""
    if resolved.model.refused:
        raise FFNError(f"{shown(resolved.source)} cannot be run: {resolved.model.refused}", "`ffn params` counts it")
    options = {"activation": option("activation", "silu"), "top_k": option("top_k", 2)}
    if lacking := [name for name in options if name in resolved.model.unknown]:
        flags = " ".join(options[name] for name in lacking)
        raise FFNError(
            f"{shown(resolved.source)} does not specify its {' and '.join(lacking)}, so it cannot be run",
            f"pass {flags}, for example",
        )


def is_runnable(resolved: Resolved) -> bool:
    """Return whether transformers can load the model, as a run on a prompt requires."""
    try:
        folder_of(resolved, option("prompt"))
    except FFNError:
        return False
    return True


def folder_of(resolved: Resolved, reader: str) -> Path:
    """Return the directory or GGUF file that transformers loads for the option `reader`.

    Raises FFNError for a known model without weights, for pickled weights, and if only headers were fetched.
    """
    from ffncli.models.files.checkpoint import PICKLED

    name, checkpoint, path = shown(resolved.source), resolved.checkpoint, Path(resolved.source)
    if checkpoint is None:
        if resolved.weights is not None:
            what = f"{reader}: {resolved.model.name} is a module in memory, without a tokenizer"
            raise FFNError(what, "give the directory it was loaded from; input=x [tokens, d_model] needs no tokenizer")
        if resolved.location and any(any(resolved.location.glob(f"*{end}")) for end in (".bin", ".pt", ".pth")):
            where = shown_path(resolved.location)
            raise FFNError(f"{reader}: {where} has only pickled weights, which are never loaded", "use safetensors")
        if resolved.location:
            raise FFNError(f"{reader}: {shown_path(resolved.location)} has no safetensors", _HINT)
        if resolved.source and path.is_dir():  # a catalog name takes precedence over a directory
            raise FFNError(f"{reader}: {name} is the known model, which has no weights", f"the directory is ./{path}")
        raise FFNError(f"{reader}: {name if resolved.source else 'the block'} is not a directory with weights", _HINT)
    if checkpoint.remote:
        raise FFNError(f"{reader}: only the headers of {name} are fetched", "download the model and give its path")
    if checkpoint.gguf:
        files = sorted({*checkpoint.files.values()})
        if len(files) > 1:
            hint = f"join them: llama-gguf-split --merge {shown_path(checkpoint.folder / files[0])} joined.gguf"
            raise FFNError(
                f"{reader}: {name} consists of {len(files)} GGUF files, but transformers loads a single file", hint
            )
        return checkpoint.folder / files[0]
    if any(file.endswith(PICKLED) for file in {*checkpoint.files.values()}):
        raise FFNError(f"{reader}: {name} is pickled, but transformers is given only safetensors", _HINT)
    if not (checkpoint.folder / "config.json").is_file():
        raise FFNError(f"{reader}: {shown_path(checkpoint.folder / 'config.json')} is missing", _HINT)
    return checkpoint.folder


def is_gguf(path: Path) -> bool:
    """Return whether the path is a GGUF file."""
    return path.suffix == ".gguf" and not path.is_dir()


def loaded_parameters(checkpoint: Checkpoint, last_layer: int) -> int:
    """Return the number of a GGUF file's parameters that a run up to `last_layer` needs: no later layers, no head."""
    total = 0
    for name in checkpoint.files:
        layer = re.match(r"blk\.(\d+)\.", name)
        if (layer and int(layer[1]) > last_layer) or name == "output.weight":
            continue
        total += prod(checkpoint.info(name).shape)
    return total
