"""The figures of a run on a corpus, as records and as a table: layers, units, outliers, tokens and their positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffncli.models.model import Layer, Resolved
from ffncli.run.corpus.likeness import SimilarPair
from ffncli.run.corpus.listen import tokenized
from ffncli.run.corpus.question import CorpusQuestion
from ffncli.run.corpus.sums import Exceeding, LayerSums, MassiveActivation, Progress, UnitSums, in_many_layers
from ffncli.run.corpus.texts import Corpus, Text
from ffncli.run.pretrained.tokens import token_text
from ffncli.show.plots.image import figure
from ffncli.show.plots.layers import layer_plots
from ffncli.system.files import written_whole
from ffncli.system.notebook import Shown
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped]


@dataclass(frozen=True)
class TokenPlace:
    """A token of the corpus: its text's index, its position in that text, and its string (None if unknown)."""

    text: int
    token: int
    token_text: str | None = None


@dataclass(frozen=True)
class Context:
    """One of a unit's largest values, and the text around its token, which is marked by « and »."""

    value: float
    at: TokenPlace
    context: str


@dataclass(frozen=True)
class UnitFigures:
    """A hidden unit over the tokens of the corpus; for a unit of a routed expert, over the tokens routed to the expert.

    `active_share` is the share of tokens with an activation above zero; `mean`, `min` and `max` describe the down
    projection's input; they are None if there are no tokens. `part` is "", "experts" or "shared". `top` are the unit's
    largest values, if requested.
    """

    stack: str
    layer: int
    part: str
    expert: int | None
    unit: int
    tokens: int
    active_share: float | None
    mean: float | None
    min: float | None
    min_at: TokenPlace | None
    max: float | None
    max_at: TokenPlace | None
    top: tuple[Context, ...] = ()

    @property
    def name(self) -> str:
        """The unit's name: `3`, `7:3` inside expert 7, or `shared:3`."""
        where = self.part if self.expert is None else self.expert
        return f"{where}:{self.unit}" if where != "" else str(self.unit)


@dataclass(frozen=True)
class OutlierDimension:
    """An outlier dimension: the share of tokens that reach the limit, and the largest value by magnitude."""

    dimension: int
    share: float
    value: float
    at: TokenPlace


@dataclass(frozen=True)
class CorpusLayer:
    """The figures of one layer over the tokens of the corpus.

    `units` counts its hidden units (of all experts), `dead_units` the units that no token activated, `unused_units` the
    dead units of experts that received no token. `active_share` is the mean over the units that are not dead. `min` and
    `max` are the smallest and largest values of all units. `not_finite` counts values that are NaN or infinite.
    `top_units` are the units with the largest maxima. `outliers` are the outlier dimensions of the FFN's input;
    `massive` counts the massive activations in the layer's output; `largest_massive` are the largest by magnitude.
    `mean`, `std` (divisor n) and `kurtosis` (3 for a normal distribution) are over all values of all units.
    `near_dead_units` are within 0.001 of 0 for every token, those without tokens left out; `similar_pairs` are the
    units with similar weights, if requested.
    """

    stack: str
    layer: int
    tokens: int
    units: int
    active_share: float | None
    dead_units: int
    unused_units: int
    min: float | None
    min_at: TokenPlace | None
    min_unit: str | None
    max: float | None
    max_at: TokenPlace | None
    max_unit: str | None
    not_finite: int
    top_units: tuple[UnitFigures, ...]
    outliers: tuple[OutlierDimension, ...]
    massive: int
    largest_massive: tuple[MassiveActivation, ...]
    mean: float | None = None
    std: float | None = None
    kurtosis: float | None = None
    near_dead_units: int = 0
    similar_pairs: tuple[SimilarPair, ...] = ()


@dataclass(frozen=True)
class CorpusSurvey(Shown):
    """The results for a corpus: `rows` has a record for each layer, `frame()` a row for each unit.

    `texts` and `tokens` count what was read, `cut` the texts that were read only in part; `seconds` is the time that
    the model ran. `outlier_dimensions` are the dimensions that are outliers (magnitude at least `limit`) in at least a
    quarter of the layers.
    """

    model: Resolved
    where: str
    texts: int
    tokens: int
    cut: int
    limit: float
    rows: tuple[CorpusLayer, ...]
    outlier_dimensions: tuple[int, ...]
    seconds: float
    notes: tuple[str, ...]
    sums: Mapping[Layer, LayerSums] = field(repr=False, compare=False)

    @package_errors()
    def frame(self) -> DataFrame:
        """Return a row for each unit of each layer, as a pandas DataFrame with the fields of `UnitFigures`.

        Places are in the columns `min_text`, `min_token`, `max_text` and `max_token`; top contexts, if requested, are
        lists in `top_values`, `top_texts` and `top_tokens`.
        """

        return units_frame(self.sums)

    def plot(self) -> Figure:
        """Return a matplotlib figure of curves over the layers. Raises FFNError (exit 3) without matplotlib."""
        return figure(layer_plots([vars(row) for row in self.rows]))

    def __repr__(self) -> str:
        lines = [f"<CorpusSurvey of {self.model.model.name}: {self.texts:,} texts, {self.tokens:,} tokens"]
        for row in self.rows[:7]:
            share = "" if row.active_share is None else f"{100 * row.active_share:.1f} % active, "
            lines.append(f"  {row.stack} {row.layer}: {share}{row.dead_units:,} of {row.units:,} units dead")
        return "\n".join(lines) + ("\n  …>" if len(self.rows) > 7 else ">")


TOP_UNITS = 3
NEAR_ZERO = 1e-3
_BEFORE, _AFTER = 8, 4  # tokens before and after the token in a context
_MOST_MASSIVE = 10


@dataclass(frozen=True)
class CorpusResults:
    """A finished run over a corpus, and the tokenizer that converts its texts to token ids and back."""

    question: CorpusQuestion
    model: Resolved
    corpus: Corpus
    progress: Progress
    sums: Mapping[Layer, LayerSums]
    tokenizer: Any
    length: int | None


def survey_of(results: CorpusResults, notes: tuple[str, ...]) -> CorpusSurvey:
    """Build the records of a run."""
    question, progress, sums = results.question, results.progress, results.sums
    most = TOP_UNITS if question.top_units is None else question.top_units
    top = {layer: _top_units(one, most) for layer, one in sums.items()}
    named = [at for layer, one in sums.items() for at in _named_texts(one, top[layer])]
    places = Places(results.corpus, results.tokenizer, results.length, named)
    rows = tuple(_row(layer, one, top[layer], places) for layer, one in sums.items())
    inputs = [one.inputs for one in sums.values() if one.inputs is not None]
    return CorpusSurvey(
        results.model, results.corpus.where, progress.texts, progress.tokens, progress.cut, question.outlier_limit,
        rows, in_many_layers(inputs), progress.seconds, notes, sums,
    )  # fmt: skip


# --- choosing units ---------------------------------------------------------------------------------------------------


def _top_units(sums: LayerSums, most: int) -> list[tuple[str, int]]:
    """Return (part, column) of the units of a layer with the largest maxima."""
    largest: list[tuple[float, str, int]] = []
    for part, columns in sums.parts.items():
        values, order = columns.high.topk(min(most, columns.high.numel()))
        largest += [(value, part, at) for value, at in zip(values.tolist(), order.tolist(), strict=True)]
    return [(part, at) for value, part, at in sorted(largest, key=lambda one: -one[0])[:most] if value > -torch.inf]


def _extreme(sums: LayerSums, largest: bool) -> tuple[str, int] | None:
    """Return (part, column) of the unit with the layer's largest or smallest value; None if there are no tokens."""
    ends = []
    for part, columns in sums.parts.items():
        at = int(columns.high.argmax() if largest else columns.low.argmin())
        value = float(columns.high[at] if largest else -columns.low[at])
        ends += [(value, part, at)] if value > -torch.inf else []
    return max(ends)[1:] if ends else None


def _named_texts(sums: LayerSums, units: Sequence[tuple[str, int]]) -> Iterator[int]:
    """Yield the indices of all texts to which the layer's records refer."""
    ends = [end for end in (_extreme(sums, True), _extreme(sums, False)) if end is not None]
    for part, at in [*units, *ends]:
        columns = sums.parts[part]
        yield from (int(columns.high_at[at, 0]), int(columns.low_at[at, 0]))
    for part, at in units:
        yield from sums.parts[part].largest_at[at, :, 0].tolist()
    if sums.inputs is not None:
        yield from sums.inputs.largest_at[sums.inputs.outliers, 0].tolist()


class Places:
    """Builds records of places in the corpus; the texts of these places are read and tokenized again."""

    def __init__(self, corpus: Corpus, tokenizer: Any, length: int | None, numbers: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        texts = [Text(n, text, 0) for n, text in corpus.texts([n for n in numbers if n >= 0]).items()]
        again = tokenized(texts, tokenizer, length) if texts else []
        self._ids = {one.number: one.ids for one in again}

    def place(self, at: Tensor) -> TokenPlace:
        """Return the record of a place, given as (text, token)."""
        text, token = at.tolist()
        ids = self._ids.get(text, ())
        return TokenPlace(text, token, token_text(self._tokenizer, ids[token]) if token < len(ids) else None)

    def context(self, value: float, at: Tensor) -> Context:
        """Return a value at a place, with the text around it."""
        place = self.place(at)
        ids = self._ids.get(place.text, ())[: place.token + 1 + _AFTER]
        start = max(0, place.token - _BEFORE)
        # Decode growing prefixes, because a token that is decoded by itself may lose its leading space.
        left, to_token, whole = (self._text(ids[start:end]) for end in (place.token, place.token + 1, len(ids)))
        token = to_token.removeprefix(left)
        space = token[: len(token) - len(token.lstrip())]
        return Context(value, place, f"{left}{space}«{token.strip()}»{whole.removeprefix(to_token)}")

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# --- records ----------------------------------------------------------------------------------------------------------


def _row(layer: Layer, sums: LayerSums, top: Sequence[tuple[str, int]], places: Places) -> CorpusLayer:
    parts = sums.parts.values()
    tokens = [columns.tokens.repeat_interleave(columns.columns) for columns in parts]
    used = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    active = torch.cat([columns.active.cpu() for columns in parts]) if tokens else torch.zeros(0)
    alive = active > 0
    shares = active[alive] / used[alive]
    low, high = _extreme(sums, False), _extreme(sums, True)
    of_low = None if low is None else unit_figures(layer, sums, low, places)
    of_high = None if high is None else unit_figures(layer, sums, high, places)
    massive = sums.massive
    return CorpusLayer(
        stack=layer.stack,
        layer=layer.index,
        tokens=0 if sums.inputs is None else int(sums.inputs.tokens),
        units=used.numel(),
        active_share=float(shares.mean()) if shares.numel() else None,
        dead_units=int((~alive).sum()),
        unused_units=int((used == 0).sum()),
        min=None if of_low is None else of_low.min,
        min_at=None if of_low is None else of_low.min_at,
        min_unit=None if of_low is None else of_low.name,
        max=None if of_high is None else of_high.max,
        max_at=None if of_high is None else of_high.max_at,
        max_unit=None if of_high is None else of_high.name,
        not_finite=sum(int(columns.not_finite.sum()) for columns in parts),
        top_units=tuple(unit_figures(layer, sums, one, places) for one in top),
        outliers=_outliers(sums.inputs, places),
        massive=massive.count,
        largest_massive=tuple(massive.kept[:_MOST_MASSIVE]),
        **_moments(sums),
        near_dead_units=sum(
            int(((columns.high <= NEAR_ZERO) & (columns.low >= -NEAR_ZERO)).sum()) for columns in parts
        ),
    )


def _moments(sums: LayerSums) -> dict[str, Any]:
    """Return the mean, standard deviation and kurtosis of all values of a layer, from the sums of their powers."""
    count = sum(int(columns.tokens.sum()) * columns.columns for columns in sums.parts.values())
    if not count:
        return {}
    total = sum(float(columns.total.sum()) for columns in sums.parts.values())
    second, third, fourth = (
        torch.stack([columns.powers.cpu() for columns in sums.parts.values()]).sum(0) / count
    ).tolist()
    mean = total / count
    variance = max(0.0, second - mean**2)
    moment = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
    return {"mean": mean, "std": variance**0.5, "kurtosis": moment / variance**2 if variance else None}


def unit_figures(layer: Layer, sums: LayerSums, unit: tuple[str, int], places: Places) -> UnitFigures:
    """Build the record of one unit of a layer, given as (part, column)."""
    part, at = unit
    columns = sums.parts[part]
    group, number = divmod(at, columns.columns)
    tokens = int(columns.tokens[group])
    expert = group if columns.groups > 1 else None
    if not tokens:
        unknown = (None, None, None, None, None, None)
        return UnitFigures(layer.stack, layer.index, part, expert, number, 0, *unknown)
    top = tuple(
        places.context(value, where)
        for value, where in zip(columns.largest[at].tolist(), columns.largest_at[at], strict=True)
        if value > -torch.inf
    )
    return UnitFigures(
        layer.stack, layer.index, part, expert, number, tokens, float(columns.active[at]) / tokens,
        float(columns.total[at]) / tokens, float(columns.low[at]), places.place(columns.low_at[at]),
        float(columns.high[at]), places.place(columns.high_at[at]), top,
    )  # fmt: skip


def _outliers(inputs: Exceeding | None, places: Places) -> tuple[OutlierDimension, ...]:
    if inputs is None:
        return ()
    tokens = max(1, int(inputs.tokens))
    every = [
        OutlierDimension(
            at, int(inputs.count[at]) / tokens, float(inputs.largest[at]), places.place(inputs.largest_at[at])
        )
        for at in inputs.outliers
    ]
    return tuple(sorted(every, key=lambda one: -abs(one.value)))


@package_errors()
def units_frame(sums: Mapping[Layer, LayerSums]) -> DataFrame:
    """Return the table of `CorpusSurvey.frame`."""
    import pandas

    parts = [pandas.DataFrame(dict(_columns(layer, part, columns)))
             for layer, one in sums.items() for part, columns in one.parts.items()]  # fmt: skip
    return pandas.concat(parts, ignore_index=True) if parts else pandas.DataFrame()


def _columns(layer: Layer, part: str, columns: UnitSums) -> Iterator[tuple[str, Any]]:
    """Yield the table's columns for a part of a layer; figures of units without tokens are missing values."""
    from pandas.arrays import FloatingArray, IntegerArray  # type: ignore[import-untyped]

    size, tokens = columns.high.numel(), columns.tokens.repeat_interleave(columns.columns)
    unknown, counted = (tokens == 0).numpy(), tokens.clamp_min(1).double()
    group = torch.arange(columns.groups).repeat_interleave(columns.columns)

    def numbers(values: Tensor) -> IntegerArray:
        return IntegerArray(values.cpu().numpy().copy(), unknown.copy())

    def figures(values: Tensor) -> FloatingArray:
        return FloatingArray(values.cpu().numpy().copy(), unknown.copy())

    yield "stack", [layer.stack] * size
    yield "layer", layer.index
    yield "part", [part] * size
    expert = torch.full((size,), columns.groups == 1)
    yield "expert", IntegerArray(group.numpy().copy(), expert.numpy().copy())
    yield "unit", torch.arange(columns.columns).repeat(columns.groups).numpy()
    yield "tokens", tokens.numpy()
    yield "active_share", figures(columns.active.cpu() / counted)
    yield "mean", figures(columns.total.cpu() / counted)
    for name in ("low", "high"):
        value, at = getattr(columns, name), getattr(columns, f"{name}_at")
        column = {"low": "min", "high": "max"}[name]
        yield column, figures(value)
        yield f"{column}_text", numbers(at[:, 0])
        yield f"{column}_token", numbers(at[:, 1])
    if columns.top:
        there = (columns.largest > -torch.inf).cpu()
        every = (
            ("values", columns.largest),
            ("texts", columns.largest_at[..., 0]),
            ("tokens", columns.largest_at[..., 1]),
        )
        for name, largest in every:
            yield f"top_{name}", [row[kept].tolist() for row, kept in zip(largest.cpu(), there, strict=True)]


def save_table(frame: DataFrame, path: Path) -> None:
    """Write the table as CSV, with lists joined by `;`, or as Parquet."""
    if path.suffix.lower() == ".parquet":
        with written_whole(path) as file:
            frame.to_parquet(file, index=False, engine="pyarrow")
        return
    joined = frame.copy()
    for name in (name for name in frame.columns if name.startswith("top_")):
        joined[name] = [";".join(map(repr, values)) for values in frame[name]]
    with written_whole(path) as file:
        file.write(joined.to_csv(index=False, lineterminator="\n").encode())
