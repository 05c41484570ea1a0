"""A checkpoint as one side of a comparison: its blocks, and their parameters in canonical form, a matrix at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import Norm, walk
from ffncli.errors import FFNError, shown
from ffncli.models.files.checkpoint import PLAIN, Checkpoint
from ffncli.models.model import Layer, Resolved
from ffncli.models.source import is_user_module, load
from ffncli.models.tensors.layout import Located
from ffncli.models.tensors.read_weights import read_apart, read_matrices
from ffncli.run.checkpoints.adapters import Adapter, LowRank, is_adapter, open_adapter
from ffncli.run.engine.weights import located_weights

_BLOCK = 1 << 17  # values of a block; its float64 copies take 1 MB each


@dataclass(frozen=True)
class SideFile:
    """One of the checkpoints: `label` is BASE, NEW or C in messages, `source` is what was typed.

    An `adapter` is merged into the matrices that are read; `adapted` maps the names of tensors to its changes.
    """

    label: str
    source: str
    resolved: Resolved
    checkpoint: Checkpoint
    adapter: Adapter | None = None
    adapted: Mapping[str, LowRank] = field(default_factory=dict)

    def layers(self) -> list[Layer]:
        """Return all layers that have an FFN, stack by stack."""
        groups = self.resolved.model.groups
        order = list(dict.fromkeys(group.stack for group in groups))
        every = [Layer(group.stack, index, group.spec) for group in groups for index in group.layers]
        return sorted(every, key=lambda layer: (order.index(layer.stack), layer.index))

    def located(self, layer: Layer) -> dict[str, Located]:
        """Locate a layer's parameters. Raises FFNError if a tensor is missing."""
        items = located_weights(self.resolved, layer) or ()
        return {item.parameter: item for item in items if not item.is_table}

    def read(self, items: Sequence[Located], expert: int, layer: Layer, first: int | None = None) -> list[Tensor]:
        """Read some parameters of one expert, float32; a norm's weight w that multiplies by 1 + w is read as 1 + w.

        Raises FFNError for values that are not finite. `first` is as in `read_matrices`.
        """
        out = read_matrices(self.checkpoint, items, expert, self.resolved.quantization, first)
        for at, item in enumerate(items):
            if change := self.adapted.get(item.names[expert if item.slice.per_expert else 0]):
                assert self.adapter is not None
                out[at] = self.adapter.applied(out[at], item, change)
            if item.parameter in _one_plus(layer):
                out[at] += 1
            if first is None:
                self._check_finite(out[at], item, layer, expert)
        return out

    def _check_finite(self, values: Tensor, item: Located, layer: Layer, expert: int) -> None:
        rows = values.view(-1, values.shape[-1])
        for part in blocks(rows):
            if bool(torch.isfinite(rows[part]).all()):
                continue
            row, column = (~torch.isfinite(rows[part])).nonzero()[0].tolist()
            at = [part.start + row, column] if values.dim() > 1 else [column]
            which = f" of expert {expert}" if len(item.axes) > 2 else ""
            where = f"{item.parameter.removesuffix('.weight')}{which} of {layer.stack} layer {layer.index}"
            what = f"{self.label} {shown(self.source, 120)}: {where} holds {float(rows[part][row, column])} at {at}"
            raise FFNError(what, "no change is measured")

    def packed(self, item: Located) -> str:
        """Return the name of a parameter's packed format, empty for plain floats."""
        return "" if item.slice.format in ("", *PLAIN) else item.slice.format.lower()


def blocks(values: Tensor) -> Iterator[slice]:
    """Yield blocks of rows, so that no temporary copy is large."""
    step = max(1, _BLOCK // max(1, values.shape[-1]))
    for start in range(0, len(values), step):
        yield slice(start, min(start + step, len(values)))


def _one_plus(layer: Layer) -> set[str]:
    """Return the weights of the layer's norms that multiply by 1 + weight."""
    norms = (step for _, step in walk(steps(layer.spec)) if isinstance(step.op, Norm))
    return {f"{step.output}.weight" for step in norms if isinstance(step.op, Norm) and step.op.weight == "one_plus"}


def bundles(*sides: Mapping[str, Located]) -> list[tuple[str, ...]]:
    """Return the parameters to read at a time: gate and up together where one side stores them in the same rows."""
    names = [name for name in sides[0] if all(name in side for side in sides)]
    out: list[tuple[str, ...]] = []
    for name in names:
        pair = name.replace("gate.", "up.")
        fused = any(
            not read_apart(side[name]) and pair in side and side[pair].names == side[name].names for side in sides
        )
        if name != pair and fused and pair in names:
            out.append((name, pair))
        elif not any(name in several for several in out):
            out.append((name,))
    return out


# --- opening ----------------------------------------------------------------------------------------------------------


def open_side(text: str, label: str, base: SideFile | None = None) -> SideFile:
    """Open a source with weights: a model's directory or file, `hf://org/name`, or `BASE+ADAPTER`; an adapter alone is
    merged into `base`. Raises FFNError for a source without weights."""
    path = Path(os.path.expanduser(text))
    if is_adapter(path):
        if base is None:
            raise FFNError(f"{label} {shown(text, 120)} is an adapter, without the matrices that it changes",
                           "write it as BASE+ADAPTER")  # fmt: skip
        return _adapted(replace(base, label=label, source=text), path)
    if "+" in text and not os.path.exists(path):
        for plus in (match.start() for match in re.finditer(r"\+", text)):
            folder = Path(os.path.expanduser(text[plus + 1 :]))
            if is_adapter(folder):
                return _adapted(replace(open_side(text[:plus], label), source=text), folder)
    if is_user_module(text):
        raise FFNError(f"{label} {shown(text, 120)} is a Python file", "give a checkpoint: a directory or a file")
    resolved = load(text)
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        hint = "give a directory, a .safetensors, .gguf or .pt file, or hf://org/name"
        raise FFNError(f"{label} {shown(text, 120)} has no weights", hint)
    if checkpoint.remote:
        from ffncli.models.files.hub import files_of

        checkpoint = replace(checkpoint, fetched=files_of(text, checkpoint.commit))
        resolved = replace(resolved, checkpoint=checkpoint)
    return SideFile(label, text, resolved, checkpoint)


def _adapted(side: SideFile, folder: Path) -> SideFile:
    adapter = open_adapter(folder)
    return replace(side, adapter=adapter, adapted=adapter.match(_logical(side.checkpoint)))


def _logical(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the tensors, with a packed matrix's pieces under the matrix's name."""
    endings = re.compile(r"\.(?:qweight|weight_packed|weight_scale|weight_scale_inv)$|_(?:blocks|scales)$")
    return [endings.sub(".weight", name) for name in checkpoint.files]
