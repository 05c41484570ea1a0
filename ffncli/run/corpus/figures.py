"""What a corpus says of each layer and each unit: records, and the same as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from ffncli.dataclass import dataclass
from ffncli.models.model import Layer, Resolved
from ffncli.run.corpus.outliers import MassiveActivation
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

    from ffncli.run.corpus.layer import LayerSums


@dataclass(frozen=True)
class TokenPlace:
    """A token of the corpus: the number of its text, its position there, and its own text, if that is known."""

    text: int
    token: int
    token_text: str | None = None


@dataclass(frozen=True)
class Context:
    """One of the tokens for which a unit is largest: `value` there, and the text around it with the token marked by
    « and »."""

    value: float
    at: TokenPlace
    context: str


@dataclass(frozen=True)
class UnitFigures:
    """A hidden unit over the tokens of the corpus (a routed expert's: over those routed to it).

    `active_share` is the share of tokens for which the activation's output is above zero; `mean`, `min` and `max` are
    of the value that the down projection reads, None without any token. `part` is "", "experts" or "shared". `top` are
    its largest values, where they were requested.
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


@dataclass(frozen=True)
class OutlierDimension:
    """A dimension of what enters an FFN: the share of tokens for which it reaches the limit by size, and its largest
    value by size with its place."""

    dimension: int
    share: float
    value: float
    at: TokenPlace


@dataclass(frozen=True)
class CorpusLayer:
    """One layer over the tokens of the corpus.

    Of its `units` (of all experts) `dead_units` were never active, for any of the tokens they got; `unused_units`
    belong to experts that got no token and count among the dead ones. `active_share` is the mean over the other units.
    `min` and `max` are the extreme values of `units`' values. `not_finite` counts values that are NaN or infinite.
    `top_units` have the largest maxima. `outliers` are the outlier dimensions of what enters the FFN; `massive` counts
    the massive activations in what leaves the layer, `largest_massive` are the first of them by size.
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


@dataclass(frozen=True)
class CorpusSurvey:
    """Every layer over a corpus: `rows`; and every unit of it, by `frame()`.

    `texts` and `tokens` were read, `cut` of the texts only in part; `seconds` is the time of the model's runs.
    `outlier_dimensions` are outliers in at least a quarter of the layers, for a limit of `limit`.
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
        """A row for each unit of each layer, as a pandas DataFrame with the fields of `UnitFigures`.

        The places are columns `min_text`, `min_token`, `max_text`, `max_token`; the top contexts, if requested, are
        lists in `top_values`, `top_texts`, `top_tokens`. Raises FFNError (exit 3) without pandas.
        """
        from ffncli.run.corpus.frame import units_frame

        return units_frame(self.sums)

    def __repr__(self) -> str:
        lines = [f"<CorpusSurvey of {self.model.model.name}: {self.texts:,} texts, {self.tokens:,} tokens"]
        for row in self.rows[:7]:
            share = "" if row.active_share is None else f"{100 * row.active_share:.1f} % active, "
            lines.append(f"  {row.stack} {row.layer}: {share}{row.dead_units:,} of {row.units:,} units dead")
        return "\n".join(lines) + ("\n  …>" if len(self.rows) > 7 else ">")
