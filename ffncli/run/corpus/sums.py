"""A layer's figures over a corpus, accumulated batch by batch, and the file from which an interrupted run resumes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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

Places = NDArray[np.int64]  # [..., 2]: text index, position
Values = NDArray[Any]


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
        self.inputs = self.inputs or Exceeding(x.shape[-1], self.limit)
        self.inputs.add(x, places)

    def units(self, of: UnitGroup, values: Tensor, active: Tensor, places: Tensor) -> None:
        """Add a group's hidden units."""
        if of.part not in self.parts:
            self.parts[of.part] = UnitSums(values.shape[-1], of.experts, self.top)
        self.parts[of.part].add(values, places, None if active is values else active, of.expert)

    def leaving(self, stream: Tensor, batch: Batch) -> None:
        """Find massive activations text by text; skip batches without a large value."""
        low, high = stream.aminmax()
        if not max(float(high), -float(low)) > MASSIVE:
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

    def restore(self, tensors: Mapping[str, Tensor], massive: "MassiveFigures") -> None:
        """Restore what `state` returned. Raise KeyError, ValueError or RuntimeError for any other tensors."""
        if "inputs.count" in tensors:
            self.inputs = Exceeding(tensors["inputs.count"].numel(), self.limit)
            self.inputs.restore({name: tensors[f"inputs.{name}"] for name in self.inputs.state()})
        for part in (name.split(".")[1] for name in tensors if name.startswith("units.") and name.endswith(".high")):
            figures = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.startswith(f"units.{part}.")}
            groups, units = figures["tokens"].numel(), figures["high"].numel()
            self.parts[part] = UnitSums(units // max(1, groups), groups, self.top)
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

    All of them lie on the CPU, and are updated by numpy, of which a small operation costs a fifth of torch's.
    """

    def __init__(self, columns: int, groups: int = 1, top: int = 0) -> None:
        size = columns * groups
        self.columns, self.groups, self.top = columns, groups, top
        self.tokens = torch.zeros(groups, dtype=torch.int64)
        self.not_finite = torch.zeros(groups, dtype=torch.int64)
        self.active = torch.zeros(size, dtype=torch.float64)
        self.total = torch.zeros(size, dtype=torch.float64)
        self.powers = torch.zeros(3, dtype=torch.float64)
        self.high = torch.full((size,), -inf, dtype=torch.float64)
        self.low = torch.full((size,), inf, dtype=torch.float64)
        self.high_at = torch.full((size, 2), NOWHERE, dtype=torch.int64)
        self.low_at = self.high_at.clone()
        self.largest = torch.full((size, top), -inf, dtype=torch.float64)
        self.largest_at = torch.full((size, top, 2), NOWHERE, dtype=torch.int64)

    def add(self, values: Tensor, places: Tensor, active: Tensor | None = None, group: int = 0) -> None:
        """Add tokens [tokens, columns] of a group at `places` [tokens, 2]. A unit is active for a token if `active`,
        shaped like `values` (default: `values`), is above zero."""
        at = places.cpu().numpy()
        if (np.diff(_in_order(at)) < 0).any():
            order = torch.from_numpy(_in_order(at).argsort()).to(values.device)
            values, active = values[order], None if active is None else active[order]
            at = at[order.cpu().numpy()]
        self.tokens[group] += len(values)
        part = slice(group * self.columns, (group + 1) * self.columns)
        rows = max(1, chunk_size(values) // max(1, self.columns))
        pieces = []
        for start in range(0, len(values), rows):
            piece = slice(start, start + rows)
            pieces.append(
                self._add(values[piece], values[piece] if active is None else active[piece], at[piece], group, part)
            )
        if pieces:
            _take(self.high[part].numpy(), self.high_at[part].numpy(), [(one, one.high) for one in pieces], at, 1)
            _take(self.low[part].numpy(), self.low_at[part].numpy(), [(one, one.low) for one in pieces], at, -1)

    def _add(self, values: Tensor, active: Tensor, at: Places, group: int, part: slice) -> "_Piece":
        exact = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        # NaN, Inf and float32 overflow all show in the sums, which are cheaper to check than every value.
        total = exact.sum(0).cpu().numpy()
        if not np.isfinite(total).all():
            self.not_finite[group] += int((~values.isfinite()).sum())
            values = exact = exact.nan_to_num(0.0, 0.0, 0.0)
            total = exact.sum(0, dtype=torch.float64).cpu().numpy()
        self.total.numpy()[part] += total
        piece = _Piece(values, exact.amax(0).cpu().numpy(), exact.amin(0).cpu().numpy())
        most = max(piece.high.max(), -piece.low.min())
        flat = (exact.double() if most > _MOST_FOURTH else exact).flatten()
        square = flat * flat
        self.powers += torch.stack([square.sum(), square.dot(flat), square.dot(square)]).cpu()
        # numbers instead of truth values are added up 7 times as fast; the squares' memory is no longer needed
        self.active.numpy()[part] += torch.gt(active, 0, out=square.view_as(active)).sum(0).cpu().numpy()
        if self.top:
            self._keep_largest(exact, at, piece.high, part)
        return piece

    def _keep_largest(self, values: Tensor, at: Places, high: Values, part: slice) -> None:
        largest, largest_at = self.largest[part].numpy(), self.largest_at[part].numpy()
        # an equal value counts only before the last place kept, which a later text rarely is
        equal = (high == largest[:, -1]) & (_in_order(at[0]) < _in_order(largest_at[:, -1]))
        better = np.flatnonzero((high > largest[:, -1]) | equal)
        if not better.size:
            return
        some = values.index_select(1, torch.from_numpy(better).to(values.device))
        new, rows = some.topk(min(self.top + 1, len(some)), 0)
        if len(new) > self.top and (tied := (new[-1] == new[-2]).nonzero().flatten()).numel():
            # topk may choose any of several equal values; a sort of every column would take 10 times as long
            first = torch.sort(some.index_select(1, tied), dim=0, descending=True, stable=True).indices
            rows[:, tied] = first[: len(new)]
        every = np.concatenate([largest[better], new.t().double().cpu().numpy()], 1)
        everywhere = np.concatenate([largest_at[better], at[rows.t().cpu().numpy()]], 1)
        order = np.lexsort((_in_order(everywhere), -every))[:, : self.top]
        largest[better] = np.take_along_axis(every, order, 1)
        largest_at[better] = np.take_along_axis(everywhere, order[..., None], 1)


def _in_order(at: Places) -> Places:
    """Return a number [...] for each place [..., 2] (text, position); the numbers have the order of the places."""
    return at[..., 0] << 32 | at[..., 1]


@dataclass(frozen=True)
class _Piece:
    """Some tokens' values [tokens, columns], in the order of their places, and each column's maximum and minimum."""

    values: Tensor
    high: Values
    low: Values


def _take(best: Values, best_at: Places, pieces: Sequence[tuple[_Piece, Values]], at: Places, sign: int) -> None:
    """Update each column's maximum (`sign` 1) or minimum (-1) `best`, and its places `best_at`, by that of each piece;
    the pieces' tokens are at the places `at`. Of equal values, the first by text and position counts."""
    every = sign * np.stack([extreme for _, extreme in pieces])
    new, piece = every.max(0), every.argmax(0)  # of equal values, argmax returns the first
    # an equal value counts only before the place kept, which a later text rarely is
    columns = np.flatnonzero((new > sign * best) | ((new == sign * best) & (_in_order(at[0]) < _in_order(best_at))))
    start = 0
    for number, (one, _) in enumerate(pieces):
        here = columns[piece[columns] == number]
        if here.size:
            values = one.values.index_select(1, torch.from_numpy(here).to(one.values.device))
            rows = (values.max(0) if sign > 0 else values.min(0)).indices.cpu().numpy()  # the first of equal values
            places = at[start + rows]
            later = (new[here] == sign * best[here]) & (_in_order(best_at[here]) < _in_order(places))
            best[here], best_at[here] = sign * new[here], np.where(later[:, None], best_at[here], places)
        start += len(one.values)


SHARE_OF_TOKENS, SHARE_OF_LAYERS = 0.06, 0.25
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
_MOST_KEPT = 100  # the largest massive activations of a layer


class Exceeding(RunningFigures):
    """Figures of each dimension of tensors [tokens, dimensions]: `count` of the `tokens` have |x| ≥ `limit`; `largest`
    is the value of largest magnitude, at the place `largest_at` [dimensions, 2]. They lie on the CPU."""

    def __init__(self, dimensions: int, limit: float) -> None:
        self.limit = limit
        self.tokens = torch.zeros((), dtype=torch.int64)
        self.count = torch.zeros(dimensions, dtype=torch.int64)
        self.largest = torch.zeros(dimensions, dtype=torch.float64)
        self.largest_at = torch.full((dimensions, 2), -1, dtype=torch.int64)

    def add(self, values: Tensor, places: Tensor) -> None:
        """Add tokens [tokens, dimensions] at `places` [tokens, 2]. NaN never reaches the limit."""
        self.tokens += len(values)
        rows = max(1, chunk_size(values) // max(1, values.shape[1]))
        for start in range(0, len(values), rows):
            self._add(values[start : start + rows], places[start : start + rows])

    def _add(self, values: Tensor, places: Tensor) -> None:
        high, low = (one.double().cpu().numpy() for one in (values.amax(0), values.amin(0)))
        most = np.maximum(high, -low)
        if np.isnan(most).any():
            values = values.nan_to_num(0.0, torch.inf, -torch.inf)
            most = values.abs().amax(0).double().cpu().numpy()
        count, largest, largest_at = self.count.numpy(), self.largest.numpy(), self.largest_at.numpy()
        over, larger = np.flatnonzero(most >= self.limit), np.flatnonzero(most > np.abs(largest))
        if over.size:
            size = values.index_select(1, torch.from_numpy(over).to(values.device)).abs()
            count[over] += (size >= self.limit).sum(0).cpu().numpy()
        if larger.size:
            some = values.index_select(1, torch.from_numpy(larger).to(values.device))
            row = some.abs().max(0).indices
            largest[larger] = some.gather(0, row[None])[0].double().cpu().numpy()
            largest_at[larger] = places[row].cpu().numpy()

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


def read_progress(path: Path, about: Mapping[str, Any], layers: Mapping[Layer, LayerSums]) -> Progress:
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
            sums.restore(figures, record.layers[name])
        return record.progress
    except (KeyError, ValueError, RuntimeError) as error:
        raise FFNError(f"{option('resume')}: {shown_path(path)} is damaged: {error}", hint) from None
