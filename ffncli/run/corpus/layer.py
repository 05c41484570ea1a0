"""One layer's figures over a corpus, added up batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ffncli.models.model import Layer
from ffncli.run.corpus.batches import Batch
from ffncli.run.corpus.listen import Receiver
from ffncli.run.corpus.outliers import MASSIVE, Exceeding, Massive, MassiveFigures
from ffncli.run.corpus.sums import UnitSums
from ffncli.run.engine.unit_events import UnitGroup


class LayerSums(Receiver):
    """Receives what a layer does: `units` by part of the block, `inputs` the dimensions that enter it, `massive` of its
    output. `top` values of every unit are kept; `limit` is that of an outlier dimension."""

    def __init__(self, layer: Layer, top: int, limit: float) -> None:
        self.layer, self.top, self.limit = layer, top, limit
        self.parts: dict[str, UnitSums] = {}
        self.inputs: Exceeding | None = None
        self.massive = Massive()

    def entering(self, x: Tensor, places: Tensor) -> None:
        """What enters the FFN."""
        self.inputs = self.inputs or Exceeding(x.shape[-1], self.limit, x.device)
        self.inputs.add(x, places)

    def units(self, of: UnitGroup, values: Tensor, active: Tensor, places: Tensor) -> None:
        """A group's hidden units."""
        if of.part not in self.parts:
            self.parts[of.part] = UnitSums(values.shape[-1], of.experts, self.top, values.device)
        self.parts[of.part].add(values, places, None if active is values else active, of.expert)

    def leaving(self, stream: Tensor, batch: Batch) -> None:
        """The residual stream: text by text where any value of the batch is large enough."""
        if not bool((stream.abs().amax() > MASSIVE).item()):
            return
        rows = torch.split(batch.tokens_of(stream), list(batch.lengths))
        for number, values in zip(batch.numbers, rows, strict=True):
            self.massive.add(number, values)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors by name, the rest as JSON) of all figures so far."""
        inputs = {} if self.inputs is None else self.inputs.state()
        tensors = {f"inputs.{name}": tensor for name, tensor in inputs.items()}
        for part, columns in self.parts.items():
            tensors |= {f"units.{part}.{name}": tensor for name, tensor in columns.state().items()}
        return tensors, {"count": self.massive.count, "kept": [asdict(one) for one in self.massive.kept]}

    def restore(self, tensors: Mapping[str, Tensor], massive: MassiveFigures, device: str) -> None:
        """Go on from such figures. Raises KeyError, ValueError or RuntimeError for tensors of something else."""
        if "inputs.count" in tensors:
            self.inputs = Exceeding(tensors["inputs.count"].numel(), self.limit, device)
            self.inputs.restore({name: tensors[f"inputs.{name}"] for name in self.inputs.state()})
        for part in (name.split(".")[1] for name in tensors if name.startswith("units.") and name.endswith(".high")):
            figures = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.startswith(f"units.{part}.")}
            groups, units = figures["tokens"].numel(), figures["high"].numel()
            self.parts[part] = UnitSums(units // max(1, groups), groups, self.top, device)
            self.parts[part].restore(figures)
        self.massive.count, self.massive.kept = massive.count, list(massive.kept)
