"""Model: what a source describes, its layers in groups of equal steps, and its parameters outside the FFN blocks
(attention, norms, embeddings, head); Resolved: a Model and how it is known, and whether it can be run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Step
from ffncli.errors import FFNError, option, shown, shown_path

if TYPE_CHECKING:
    from torch import Tensor

    from ffncli.models.files.checkpoint import Checkpoint


@dataclass(frozen=True)
class Group:
    """Layers of one stack (`encoder`, `decoder`, or `block` for bare dimensions) that share one spec.

    `runs` is how often each of them runs in one forward pass (ALBERT stores one layer and runs it twelve times).
    `layers` number FFN blocks; where a layer has several, `per_layer` says how many.
    """

    stack: str
    layers: tuple[int, ...]
    spec: FFNSpec
    runs: int = 1
    per_layer: int = 1

    @property
    def steps(self) -> tuple[Step, ...]:
        """The block as assignments."""
        return steps(self.spec)


@dataclass(frozen=True)
class Layer:
    """One layer: `decoder.3`, with its spec; one FFN block of it where it has several, numbered through its stack."""

    stack: str
    index: int
    spec: FFNSpec


IN_ALL = "parameters per layer"  # what differs where no width does
UNEVEN = "tensors per expert"  # not all experts have all matrices


@dataclass(frozen=True)
class Disagreement:
    """A field's value in a config, and by the tensors; `where` names a tensor.

    `name` is ours for what differs, `field` the config's; `stack` and `index` are the first block's, `layers` says how
    many layers differ in this way. `teller` names the side compared with, for example a GGUF file's metadata.
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
    """A part of a model that is in none of its numbers: what it is, why, and its parameters, None if unknown."""

    what: str
    why: str
    parameters: int | None = None

    def __str__(self) -> str:
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        return f"{self.what}{size}: {self.why}"


@dataclass(frozen=True)
class Spot:
    """Where a block's tensors are: the prefix of its stack, its layer's number there, and which FFN of that layer."""

    prefix: str
    layer: int
    number: int = 0


@dataclass(frozen=True)
class StoredSize:
    """The FFNs of a checkpoint by its headers: logical parameters, bytes in the file, formats.

    `file_params` and `file_bytes` are those of everything in its files; None where a file is missing.
    """

    params: int
    bytes: int
    formats: tuple[str, ...]
    file_params: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True)
class Model:
    """What a model is. `bare`: one block, no layers. `dtype` is the stored one where known,
    `non_ffn_dtype` that of all but the FFNs where it is known to be another.

    `names` are the config's names of our fields, `extra_layers` how many layers it has beyond its count
    (multi-token prediction), `tied` its tie_word_embeddings. `non_ffn` are the parameters outside the FFN blocks, None
    where unknown. `unknown` names fields of its specs that the source does not give (`activation`, `top_k`) and that
    hold a placeholder; `refused` is why its blocks are counted but cannot be run.
    """

    name: str
    groups: tuple[Group, ...]
    model_type: str = ""
    dtype: str | None = None
    non_ffn_dtype: str | None = None
    bare: bool = False
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    extra_layers: int = 0
    tied: bool | None = None
    non_ffn: NonFFN | None = None
    unknown: frozenset[str] = frozenset()
    refused: str = ""

    @property
    def main(self) -> Group:
        """The group with most layers, ties to the first: what "per layer" means for the model."""
        return max(self.groups, key=lambda group: len(group.layers))

    @property
    def layer_count(self) -> int | None:
        """FFN blocks, encoder and decoder together; None for bare dimensions."""
        return None if self.bare else sum(len(group.layers) for group in self.groups)

    def per_layer(self, stack: str) -> int:
        """How many FFN blocks each layer of a stack has."""
        return next(group.per_layer for group in self.groups if group.stack == stack)

    def layer(self, text: int | str | None) -> Layer:
        """The layer for `3` or `decoder.3` (None: the first one). Raises FFNError if there is no such layer."""
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
        """The same layers with other specs, one per group."""
        return replace(self, groups=tuple(replace(g, spec=s) for g, s in zip(self.groups, change, strict=True)))


@dataclass(frozen=True)
class Example:
    """What a built-in block brings with it: weights as nested lists ({}: drawn), the input's name and shape.

    `dropped` lists, per dropout step, the (token, unit) pairs that its mask drops at the probability `dropout`. A
    random input is multiplied by `scale`, then `given` puts single numbers into it, by (token, unit). `block` are its
    steps if the model's spec cannot express them, `vocab` the width of a final layer that follows (0: none), `aliases`
    the text's names of ours. `fixed`: the text gives the whole input, so no option may choose another.
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
    """A model and how it is known. `source` is what was typed, `location` where weights may be, `checkpoint` the stored
    tensors, if any, `weights` the canonical tensors of a module in memory by stack and layer, in its dtype.

    `evidence` says, in order, what decided gatedness and widths; `notes` are for the user. `differences` are those
    between config and tensors, `stored` is the size of the tensors; None where no headers were read. `from_tensors`:
    its blocks were read from the tensors, so there is nothing to compare them with. `quantization` is the config's
    quantization_config. `spots` say, by stack and index, where the tensors of each block are. `not_counted` are
    parts of the model that are in no number here (`counting.not_counted` adds those that follow from the model).
    `example` is what a built-in block brings with it.
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
    location: Path | None = None
    quantization: Mapping[str, Any] | None = field(default=None, compare=False)
    checkpoint: Checkpoint | None = field(default=None, compare=False, repr=False)
    spots: Mapping[tuple[str, int], Spot] = field(default_factory=dict, compare=False, repr=False)
    weights: Mapping[tuple[str, int], Mapping[str, Tensor]] | None = field(default=None, compare=False, repr=False)
    example: Example | None = field(default=None, compare=False, repr=False)

    def block(self, layer: Layer) -> tuple[Step, ...]:
        """A layer's block as assignments, without any requested final layer: an example may have steps of its own."""
        return steps(layer.spec) if self.example is None or self.example.block is None else self.example.block

    def noted(self, *notes: str) -> Resolved:
        """The same model with more notes for its user."""
        return replace(self, notes=(*self.notes, *notes))

    def without(self, *parts: NotCounted) -> Resolved:
        """The same model with parts that are in no number, each of which is noted.

        They take the place of parts that were left out for the same reason: a config says less of them than tensors.
        """
        reasons = {part.why for part in parts}
        kept = [part for part in self.not_counted if part.why not in reasons]
        gone = {_left_out(part) for part in self.not_counted} - {_left_out(part) for part in kept}
        notes = (*(note for note in self.notes if note not in gone), *map(_left_out, parts))
        return replace(self, notes=notes, not_counted=(*kept, *parts))


def _left_out(part: NotCounted) -> str:
    return f"not counted: {part}"


_UNKNOWN = {"norm": "norms and residuals", "activation": "the activation", "top_k": "top_k, so what is active"}


def unknown_note(unknown: Collection[str]) -> str:
    """What is unknown of a model's blocks (`Model.unknown`), in words."""
    return "not known here, so not counted: " + ", ".join(_UNKNOWN[name] for name in _UNKNOWN if name in unknown)


def _layers(stack: str, layers: Sequence[int]) -> str:
    """`decoder layers 0 to 31`, or those that have an FFN: `decoder layers 1, 3, 6, ..., 51`."""
    if len(layers) == layers[-1] + 1:
        return f"{stack} layers 0 to {layers[-1]}"
    shown_ones = [*map(str, layers)] if len(layers) < 5 else [*map(str, layers[:3]), "...", str(layers[-1])]
    return f"{stack} layers {', '.join(shown_ones)}"


def block_model(spec: FFNSpec, source: str, name: str | None = None, notes: tuple[str, ...] = ()) -> Resolved:
    """A bare block: dimensions, no layers."""
    return Resolved(Model(name or source, (Group("block", (0,), spec),), bare=True), source, notes=notes)


def grouped(stack: str, specs: Mapping[int, FFNSpec], runs: int = 1, per_layer: int = 1) -> list[Group]:
    """Block number → spec, as groups of blocks with equal specs, in order of first appearance."""
    alike: dict[FFNSpec, list[int]] = {}
    for index, spec in specs.items():
        alike.setdefault(spec, []).append(index)
    return [Group(stack, tuple(layers), spec, runs, per_layer) for spec, layers in alike.items()]


def ranges(layers: tuple[int, ...]) -> str:
    """`layer 4`, `layers 0-2, 5`, `layers 0-46 by 2`."""
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


# Why a part of a model is in none of its numbers (`NotCounted`), where config and tensors both may say so.
OTHER_TOWERS = "the numbers are the text model's"
MORE_TOKENS = "multi-token prediction, which a forward pass does without"


@dataclass(frozen=True)
class LayerParams:
    """One layer without its FFN: parameters of its attention or other mixer (cross-attention included), of all its
    norms, also those that only the FFN uses, and of what else it has (residual streams, its part of embeddings).
    """

    attention: int
    norms: int
    other: int = 0

    @property
    def params(self) -> int:
        """All of them."""
        return self.attention + self.norms + self.other

    def ffn_share(self, ffn_params: int) -> float:
        """The FFN's share of the whole layer, by parameters."""
        return ffn_params / (ffn_params + self.params)


@dataclass(frozen=True)
class NonFFN:
    """What a model has outside its FFN blocks. `layers`: stack → FFN block → its layer, for those that are known.

    `parts`: (stack, what) → parameters, "" for what is in no stack (embeddings, an untied head); None where the total
    is unknown. `lookup` of them are only looked up and not multiplied: tables, and the input embedding unless it is
    tied to a head; None in doubt. `vocabulary` is the config's, 0 if it has none; `names` are the config's names for
    `vocabulary` and `attention`, for messages.
    """

    layers: Mapping[str, Mapping[int, LayerParams]]
    parts: Mapping[tuple[str, str], int] | None = None
    lookup: int | None = None
    vocabulary: int = 0
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    def layer(self, stack: str, blocks: Iterable[int]) -> LayerParams | None:
        """What the layers of these blocks have, if all are known and have the same."""
        layers = self.layers.get(stack, {})
        alike = {(layer.attention, layer.norms, layer.other) if (layer := layers.get(i)) else None for i in blocks}
        one = alike.pop() if len(alike) == 1 else None
        return LayerParams(*one) if one else None

    def params(self, stacks: Collection[str]) -> int | None:
        """All parameters of a model of these stacks; None where they are not known."""
        if self.parts is None:
            return None
        return sum(params for (stack, _), params in self.parts.items() if not stack or stack in stacks)


_HINT = "give a directory with config.json and safetensors, or a GGUF file"


def require_runnable(resolved: Resolved) -> None:
    """Raises FFNError if the source does not fully describe the model's blocks; an option may add what is missing."""
    if resolved.model.refused:
        raise FFNError(f"{shown(resolved.source)} cannot be run: {resolved.model.refused}", "`ffn params` counts it")
    options = {"activation": option("activation", "silu"), "top_k": option("top_k", 2)}
    if lacking := [name for name in options if name in resolved.model.unknown]:
        flags = " ".join(options[name] for name in lacking)
        raise FFNError(
            f"{shown(resolved.source)} does not say its {' and '.join(lacking)}, so it cannot be run",
            f"pass {flags}, for example",
        )


def is_runnable(resolved: Resolved) -> bool:
    """Whether transformers can load it, so that it can run a prompt."""
    try:
        folder_of(resolved, option("prompt"))
    except FFNError:
        return False
    return True


def folder_of(resolved: Resolved, reader: str) -> Path:
    """The directory, or the GGUF file, that transformers can load, for the option `reader`.

    Raises FFNError if the source is not one: a known model's dimensions, pickled weights, headers only.
    """
    from ffncli.models.files.checkpoint import PICKLED

    name, checkpoint, path = shown(resolved.source), resolved.checkpoint, Path(resolved.source)
    if checkpoint is None:
        if resolved.weights is not None:
            what = f"{reader}: {resolved.model.name} is a module in memory, without a tokenizer"
            raise FFNError(what, "give the directory it was loaded from; input=x [tokens, d_model] needs none")
        if resolved.location and any(any(resolved.location.glob(f"*{end}")) for end in (".bin", ".pt", ".pth")):
            where = shown_path(resolved.location)
            raise FFNError(f"{reader}: {where} has only pickled weights, which are never loaded", "use safetensors")
        if resolved.location:
            raise FFNError(f"{reader}: {shown_path(resolved.location)} has no safetensors", _HINT)
        if resolved.source and path.is_dir():  # a known model's name goes before a directory of that name
            raise FFNError(f"{reader}: {name} is the known model, which has no weights", f"the directory is ./{path}")
        raise FFNError(f"{reader}: {name if resolved.source else 'the block'} is not a directory with weights", _HINT)
    if checkpoint.remote:
        raise FFNError(f"{reader}: only the headers of {name} are fetched", "download the model and give its path")
    if checkpoint.gguf:
        files = sorted({*checkpoint.files.values()})
        if len(files) > 1:
            hint = f"join them: llama-gguf-split --merge {shown_path(checkpoint.folder / files[0])} joined.gguf"
            raise FFNError(f"{reader}: {name} is {len(files)} GGUF files, and transformers loads a single one", hint)
        return checkpoint.folder / files[0]
    if any(file.endswith(PICKLED) for file in {*checkpoint.files.values()}):
        raise FFNError(f"{reader}: {name} is pickled, and transformers is given safetensors alone", _HINT)
    if not (checkpoint.folder / "config.json").is_file():
        raise FFNError(f"{reader}: {shown_path(checkpoint.folder / 'config.json')} is missing", _HINT)
    return checkpoint.folder


def is_gguf(path: Path) -> bool:
    """Whether what transformers loads is a GGUF file, not a directory."""
    return path.suffix == ".gguf" and not path.is_dir()


def loaded_parameters(checkpoint: Checkpoint, last_layer: int) -> int:
    """How many parameters of a GGUF file are loaded to run its layers up to the last one: no later layer, no head."""
    total = 0
    for name in checkpoint.files:
        layer = re.match(r"blk\.(\d+)\.", name)
        if (layer and int(layer[1]) > last_layer) or name == "output.weight":
            continue
        total += prod(checkpoint.info(name).shape)
    return total
