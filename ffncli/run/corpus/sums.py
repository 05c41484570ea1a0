"""A layer's figures over a corpus, accumulated batch by batch, and the file from which an interrupted run resumes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffncli.errors import FFNError, option, shown_path
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.json_records import Count, record_of
from ffncli.models.model import Layer
from ffncli.run.corpus.listen import Batch, Receiver
from ffncli.run.corpus.question import CorpusQuestion, ReadingModel
from ffncli.run.corpus.texts import Corpus
from ffncli.run.engine.trace import UnitGroup
from ffncli.run.measure.statistics import chunk_size
from ffncli.run.saved.containers import open_container, write
from ffncli.system.files import open_to_read, written_whole


class LayerSums(Receiver):
    """Accumulates a layer's figures: `parts` for its hidden units, `inputs` for the dimensions of its input, `massive`
    for its output. The `top` largest values of every unit are kept; `limit` is the magnitude from which a dimension is
    an outlier."""

    def __init__(self, layer: Layer, top: int, limit: float) -> None:
        self.layer, self.top, self.limit = layer, top, limit
        self.parts: dict[str, UnitSums] = {}
        self.inputs: Exceeding | None = None
        self.massive = Massive()

    def entering(self, x: Tensor, places: Tensor) -> None:
        """Add to the counts of outlier dimensions in the FFN's input."""
        self.inputs = self.inputs or Exceeding(x.shape[-1], self.limit, x.device)
        self.inputs.add(x, places)

    def units(self, of: UnitGroup, values: Tensor, active: Tensor, places: Tensor) -> None:
        """Add a group's hidden units."""
        if of.part not in self.parts:
            self.parts[of.part] = UnitSums(values.shape[-1], of.experts, self.top, values.device)
        self.parts[of.part].add(values, places, None if active is values else active, of.expert)

    def leaving(self, stream: Tensor, batch: Batch) -> None:
        """Find massive activations text by text; skip batches without a large value."""
        if not bool((stream.abs().amax() > MASSIVE).item()):
            return
        rows = torch.split(batch.tokens_of(stream), list(batch.lengths))
        positions = torch.split(batch.places[:, 1], list(batch.lengths))
        for number, values, at in zip(batch.numbers, rows, positions, strict=True):
            self.massive.add(number, values, at)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all figures so far: (tensors by name, the other figures as JSON values)."""
        inputs = {} if self.inputs is None else self.inputs.state()
        tensors = {f"inputs.{name}": tensor for name, tensor in inputs.items()}
        for part, columns in self.parts.items():
            tensors |= {f"units.{part}.{name}": tensor for name, tensor in columns.state().items()}
        return tensors, {"count": self.massive.count, "kept": [asdict(one) for one in self.massive.kept]}

    def restore(self, tensors: Mapping[str, Tensor], massive: "MassiveFigures", device: str) -> None:
        """Restore what `state` returned. Raise KeyError, ValueError or RuntimeError for any other tensors."""
        if "inputs.count" in tensors:
            self.inputs = Exceeding(tensors["inputs.count"].numel(), self.limit, device)
            self.inputs.restore({name: tensors[f"inputs.{name}"] for name in self.inputs.state()})
        for part in (name.split(".")[1] for name in tensors if name.startswith("units.") and name.endswith(".high")):
            figures = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.startswith(f"units.{part}.")}
            groups, units = figures["tokens"].numel(), figures["high"].numel()
            self.parts[part] = UnitSums(units // max(1, groups), groups, self.top, device)
            self.parts[part].restore(figures)
        self.massive.count, self.massive.kept = massive.count, list(massive.kept)


NOWHERE = -1
BYTES_OF_UNIT, BYTES_OF_VALUE = 64, 24  # bytes for a unit's figures; for one of its largest values and its place


_MOST_FOURTH = 1e6  # a larger value's fourth power leaves too little of float32's range for a sum


class RunningFigures:
    """Figures kept as tensors, which an interrupted run can restore."""

    def state(self) -> dict[str, Tensor]:
        """Return a mapping from the name of each figure to its value so far."""
        return {name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the figures that `state` returned. Raise KeyError or RuntimeError for any other tensors."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                value.copy_(state[name])


class UnitSums(RunningFigures):
    """Figures for each column of tensors [tokens, columns]. The columns form `groups`, one for the units of each
    expert.

    `high` and `low` are the maximum and minimum of each column, `high_at` and `low_at` [columns, 2] their places (text
    index, position), of equal values the first. `largest` [columns, top] are each column's largest values in descending
    order, with their places in `largest_at`; equal values are in the order of their places. `not_finite` counts values
    that are not finite; the other figures count such values as zero. `powers` are the sums of the second, third and
    fourth powers of all values.
    """

    def __init__(self, columns: int, groups: int = 1, top: int = 0, device: torch.device | str = "cpu") -> None:
        size = columns * groups
        self.columns, self.groups, self.top = columns, groups, top
        self.tokens = torch.zeros(groups, dtype=torch.int64)
        self.not_finite = torch.zeros(groups, dtype=torch.int64)
        self.active = torch.zeros(size, dtype=torch.float64, device=device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.powers = torch.zeros(3, dtype=torch.float64, device=device)
        self.high = torch.full((size,), -inf, device=device, dtype=torch.float64)
        self.low = torch.full((size,), inf, device=device, dtype=torch.float64)
        self.high_at = torch.full((size, 2), NOWHERE, device=device, dtype=torch.int64)
        self.low_at = self.high_at.clone()
        self.largest = torch.full((size, top), -inf, device=device, dtype=torch.float64)
        self.largest_at = torch.full((size, top, 2), NOWHERE, device=device, dtype=torch.int64)

    def add(self, values: Tensor, places: Tensor, active: Tensor | None = None, group: int = 0) -> None:
        """Add tokens [tokens, columns] of a group at `places` [tokens, 2]. A unit is active for a token if `active`,
        shaped like `values` (default: `values`), is above zero."""
        self.tokens[group] += values.shape[0]
        part = slice(group * self.columns, (group + 1) * self.columns)
        rows = max(1, chunk_size(values) // max(1, self.columns))
        for start in range(0, values.shape[0], rows):
            piece = slice(start, start + rows)
            self._add(values[piece], places[piece], values[piece] if active is None else active[piece], group, part)

    def _add(self, values: Tensor, places: Tensor, active: Tensor, group: int, part: slice) -> None:
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        # NaN, Inf and float32 overflow all show in the sums, which are cheaper to check than every value.
        total = values.sum(0)
        if not torch.isfinite(total).all():
            self.not_finite[group] += int((~values.isfinite()).sum())
            values = values.nan_to_num(0.0, 0.0, 0.0)
            total = values.sum(0, dtype=torch.float64)
        self.total[part] += total
        high, low = values.amax(0), values.amin(0)
        most = max(float(high.max()), -float(low.min()))
        flat = (values.double() if most > _MOST_FOURTH else values).flatten()
        square = flat * flat
        self.powers += torch.stack([square.sum(), square.dot(flat), square.dot(square)])
        # numbers instead of truth values are added up 7 times as fast; the squares' memory is no longer needed
        self.active[part] += torch.gt(active, 0, out=square.view_as(active)).sum(0)
        _take(self.high[part], self.high_at[part], high, high > self.high[part], values, places)
        _take(self.low[part], self.low_at[part], low, low < self.low[part], values, places)
        if self.top:
            self._keep_largest(values, places, high, part)

    def _keep_largest(self, values: Tensor, places: Tensor, high: Tensor, part: slice) -> None:
        kept, at = self.largest[part], self.largest_at[part]
        # an equal value counts only before the last place kept, which a later text rarely is
        equal = (high == kept[:, -1]) & (_in_order(places).amin() < _in_order(at[:, -1]))
        better = ((high > kept[:, -1]) | equal).nonzero().flatten()
        if not better.numel():
            return
        new, rows = values[:, better].topk(min(self.top + 1, values.shape[0]), 0)
        if len(new) > self.top and (tied := (new[-1] == new[-2]).nonzero().flatten()).numel():
            # topk may choose any of several equal values; a sort of every column would take 10 times as long
            order = _in_order(places).argsort()
            first = torch.sort(values[order][:, better[tied]], dim=0, descending=True, stable=True).indices
            rows[:, tied] = order[first[: len(new)]]
        every = torch.cat([kept[better], new.t().double()], 1)
        everywhere = torch.cat([at[better], places[rows.t()]], 1)
        by_place = _in_order(everywhere).argsort(1)
        by_value = every.gather(1, by_place).sort(dim=1, descending=True, stable=True).indices[:, : self.top]
        order = by_place.gather(1, by_value)
        kept[better] = every.gather(1, order)
        at[better] = everywhere.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))


def _in_order(places: Tensor) -> Tensor:
    """Return a number [...] for each place [..., 2] (text, position); the numbers have the order of the places."""
    return places[..., 0] << 32 | places[..., 1]


def _take(best: Tensor, at: Tensor, new: Tensor, better: Tensor, values: Tensor, places: Tensor) -> None:
    """Update `best` and its places `at` in the columns where `new`, the maximum or minimum of `values`, is `better`.
    Of equal values, the first by text and position counts."""
    numbers = _in_order(places)
    # an equal value counts only before the place kept, which a later text rarely is
    columns = (better | ((new == best) & (numbers.amin() < _in_order(at)))).nonzero().flatten()
    if columns.numel():
        order = numbers.argsort()
        rows = order[(values[:, columns] == new[columns])[order].byte().argmax(0)]
        old, found = at[columns], places[rows]
        before = _in_order(found) < _in_order(old)
        at[columns] = torch.where(((best[columns] != new[columns]) | before).unsqueeze(1), found, old)
        best[columns] = new[columns].double()


SHARE_OF_TOKENS, SHARE_OF_LAYERS = 0.06, 0.25
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
_MOST_KEPT = 100  # the largest massive activations of a layer


class Exceeding(RunningFigures):
    """Figures of each dimension of tensors [tokens, dimensions]: `count` of the `tokens` have |x| ≥ `limit`; `largest`
    is the value of largest magnitude, at the place `largest_at` [dimensions, 2]."""

    def __init__(self, dimensions: int, limit: float, device: torch.device | str = "cpu") -> None:
        self.limit = limit
        self.tokens = torch.zeros((), dtype=torch.int64)
        self.count = torch.zeros(dimensions, dtype=torch.int64, device=device)
        self.largest = torch.zeros(dimensions, dtype=torch.float64, device=device)
        self.largest_at = torch.full((dimensions, 2), -1, dtype=torch.int64, device=device)

    def add(self, values: Tensor, places: Tensor) -> None:
        """Add tokens [tokens, dimensions] at `places` [tokens, 2]. NaN never reaches the limit."""
        self.tokens += values.shape[0]
        rows = max(1, chunk_size(values) // max(1, values.shape[1]))
        for start in range(0, values.shape[0], rows):
            self._add(values[start : start + rows], places[start : start + rows])

    def _add(self, values: Tensor, places: Tensor) -> None:
        size = values.abs()
        most = size.amax(0)
        if most.isnan().any():
            size = size.nan_to_num(0.0, torch.inf)
            most = size.amax(0)
        over = (most >= self.limit).nonzero().flatten()
        if over.numel():
            self.count[over] += (size[:, over] >= self.limit).sum(0)
        larger = (most > self.largest.abs()).nonzero().flatten()
        if larger.numel():
            rows = size[:, larger].argmax(0)
            self.largest[larger] = values[rows, larger].double()
            self.largest_at[larger] = places[rows]

    @property
    def outliers(self) -> list[int]:
        """The dimensions that reach the limit for a sufficient share of the tokens."""
        least = SHARE_OF_TOKENS * int(self.tokens)
        return (self.count >= max(1.0, least)).nonzero().flatten().tolist()


def in_many_layers(layers: Sequence[Exceeding]) -> tuple[int, ...]:
    """Return the dimensions that are outliers in at least a quarter of the layers."""
    counts: dict[int, int] = {}
    for layer in layers:
        for dimension in layer.outliers:
            counts[dimension] = counts.get(dimension, 0) + 1
    return tuple(sorted(d for d, count in counts.items() if count >= SHARE_OF_LAYERS * len(layers)))


@dataclass(frozen=True)
class MassiveActivation:
    """A value of the residual stream after a layer; `ratio` is its magnitude divided by its text's `median`."""

    text: int
    token: int
    dimension: int
    value: float
    median: float
    ratio: float | None


@dataclass(frozen=True)
class MassiveFigures:
    """A layer's massive activations so far, as saved in a file: their count, and the largest."""

    count: Count
    kept: tuple[MassiveActivation, ...]


class Massive:
    """Collects the massive activations of a layer's output: their `count`, and the largest (`kept`); of equal ones, the
    first by text."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[MassiveActivation] = []

    def add(self, text: int, values: Tensor, positions: Tensor) -> None:
        """Add a text's values [tokens, d_model] at these positions [tokens]. NaN is not massive."""
        size = values.detach().abs()
        if not bool((size > MASSIVE).any()):
            return
        middle = size.float().flatten().sort().values[(size.numel() - 1) // 2 : size.numel() // 2 + 1]
        median = float(middle.double().mean())  # torch's own median is the lower of the two middle values
        places = (size > max(MASSIVE, MASSIVE_RATIO * median)).nonzero()
        self.count += len(places)
        activations = [
            MassiveActivation(
                text, int(positions[token]), dimension, value, median, abs(value) / median if median else None
            )
            for (token, dimension), value in zip(places.tolist(), values[tuple(places.t())].tolist(), strict=True)
        ]
        self.kept = sorted(
            [*self.kept, *activations], key=lambda one: (-abs(one.value), one.text, one.token, one.dimension)
        )[:_MOST_KEPT]


_PIECE = 1 << 20


@dataclass
class Progress:
    """The progress of a run: `done` texts of the corpus, up to byte `end`, have been processed. Of these, `texts` had
    tokens and `cut` were truncated; `seconds` is the time that the model ran."""

    done: Count = 0
    texts: Count = 0
    tokens: Count = 0
    cut: Count = 0
    end: Count = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _SavedRun:
    """The record in a run's file: the run's `identity` and progress, and each layer's massive activations."""

    run: Mapping[str, Any]
    progress: Progress
    layers: Mapping[str, MassiveFigures]


def identity(question: CorpusQuestion, reading: ReadingModel, corpus: Corpus) -> dict[str, Any]:
    """Return everything that a run's figures depend on; only a run with the same identity can resume."""
    checkpoint = reading.model.checkpoint
    return {
        "model": _fingerprint(checkpoint) if checkpoint else "",
        "corpus": corpus.sha256,
        "layers": [f"{layer.stack}.{layer.index}" for layer in reading.layers],
        "dtype": question.dtype or "fp32",
        "max_tokens": question.max_tokens,
        "top_contexts": question.top_contexts or 0,
        "outliers": question.outlier_limit,
        "limit": question.limit,
        "skip_special": question.skip_special or None,
    }


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Hash the size and the first and last bytes of a model's files; fine-tuning would keep the size alone the same."""
    digest = hashlib.sha256()
    for name in sorted({*checkpoint.files.values()}):
        path = checkpoint.folder / name
        with open_to_read(path) as file:
            size = file.seek(0, 2)
            for start in (0, max(0, size - _PIECE)):
                file.seek(start)
                digest.update(file.read(_PIECE))
        digest.update(f"{name} {size}".encode())
    return digest.hexdigest()


def save_progress(path: Path, about: Mapping[str, Any], progress: Progress, layers: Mapping[Layer, LayerSums]) -> None:
    """Write everything that a run needs to resume, atomically."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for layer, sums in layers.items():
        name = f"{layer.stack}.{layer.index}"
        figures, rest[name] = sums.state()
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in figures.items()}
    record = {"run": dict(about), "progress": asdict(progress), "layers": rest}
    with written_whole(path) as file:
        write(file, ".safetensors", tensors, record)


def _difference(name: str, before: Any) -> str:
    """Describe what differs in the earlier run: another model, other layers, or the value of an option."""
    if name in ("model", "corpus"):
        return f"another {name}"
    if name == "layers":
        return f"other layers ({', '.join(map(str, before))})" if isinstance(before, list) else "other layers"
    return option(name, before) if before else f"no {option(name)}"


def read_progress(path: Path, about: Mapping[str, Any], layers: Mapping[Layer, LayerSums], device: str) -> Progress:
    """Restore an interrupted run's figures and return its progress; start from the beginning if there is no file.

    Raise FFNError with the difference if the file belongs to another model or corpus, or to other options.
    """
    if not path.exists():
        return Progress()
    hint = "give the name of a new file, or remove this one"
    container = open_container(path, ".safetensors")
    record: _SavedRun = record_of(_SavedRun, container.record, f"{option('resume')}: {shown_path(path)}", hint)
    for name, value in about.items():
        if (before := record.run.get(name)) != value:
            raise FFNError(f"{option('resume')}: {shown_path(path)} was made with {_difference(name, before)}", hint)
    try:
        tensors = {name: container.tensor(name) for name in container.shapes}
        for layer, sums in layers.items():
            name = f"{layer.stack}.{layer.index}"
            figures = {key.partition("/")[2]: t for key, t in tensors.items() if key.startswith(f"{name}/")}
            sums.restore(figures, record.layers[name], device)
        return record.progress
    except (KeyError, ValueError, RuntimeError) as error:
        raise FFNError(f"{option('resume')}: {shown_path(path)} is damaged: {error}", hint) from None
