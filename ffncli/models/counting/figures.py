"""All that `ffn params` reports about one source: counts, costs against tokens, a split over ranks, a ridge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ffncli.errors import FFNError
from ffncli.models.counting.count import ModelCount, count
from ffncli.models.counting.traffic import TokenCost, ridge_tokens, token_costs
from ffncli.models.counting.weight_format import storage_of
from ffncli.models.model import Resolved

if TYPE_CHECKING:
    from ffncli.models.counting.tensor_parallel import Split  # imported only for a requested split

_ADDED = ("model_weight_bytes",)  # new columns go at the end, where readers of older files do not expect others
_OF_COUNT = tuple(f.name for f in fields(ModelCount) if f.name not in ("groups", *_ADDED))
_OF_COST = (
    "experts_touched", "weight_bytes_read", "activation_bytes", "activation_bytes_fused", "flops_per_byte",
    "flops_per_byte_fused",
)  # fmt: skip
_OF_SPLIT = (
    "ranks", "rank_0_params_total", "other_rank_params_total", "rank_0_weight_bytes_total",
    "other_rank_weight_bytes_total", "ring_all_reduce_bytes_per_token", "all_gather_bytes_per_token",
)  # fmt: skip
_OF_RIDGE = ("ridge_tokens", "ridge_tokens_fused")
KEYS = (
    *(name for name in _OF_COUNT if name not in ("evidence", "citation")), *_OF_COST, *_OF_SPLIT, *_OF_RIDGE, *_ADDED,
)  # fmt: skip


@dataclass(frozen=True)
class Ridge:
    """The least tokens at which the FFNs reach `flops_per_byte`, unfused and fused; None if never."""

    flops_per_byte: float
    ridge_tokens: int | None
    ridge_tokens_fused: int | None


@dataclass(frozen=True)
class CostReport:
    """One source. `costs` has a record for each number of tokens; none if the number of active experts is unknown.

    `counts` are the counts for each number of tokens, the first of which is the row's.
    """

    counts: tuple[ModelCount, ...]
    costs: tuple[TokenCost, ...]
    split: Split | None
    ridge: Ridge | None

    @property
    def count(self) -> ModelCount:
        """The row: for the first number of tokens."""
        return self.counts[0]

    def row(self) -> dict[str, Any]:
        """The JSON form: counts and costs, and the split and the ridge if requested."""
        more: dict[str, Any] = {"costs": [asdict(cost) for cost in self.costs]}
        more |= {"tensor_parallel": asdict(self.split)} if self.split else {}
        more |= {name: getattr(self.ridge, name) for name in _OF_RIDGE} if self.ridge else {}
        return {**asdict(self.count), **more}

    def lines(self) -> list[dict[str, Any]]:
        """The CSV form: one line for each number of tokens."""
        fixed = {name: getattr(self.split, name) for name in _OF_SPLIT} if self.split else {}
        fixed |= {name: getattr(self.ridge, name) for name in _OF_RIDGE} if self.ridge else {}
        return [
            {name: getattr(counted, name) for name in _OF_COUNT}
            | {name: getattr(self.costs[i], name) if self.costs else None for name in _OF_COST}
            | fixed
            | {name: getattr(counted, name) for name in _ADDED}
            for i, counted in enumerate(self.counts)
        ]


@dataclass(frozen=True)
class FigureQuestion:
    """What is requested besides the counts. Defaults: the stored format, 1 token; ranks and ridge as in `figures`."""

    formats: tuple[str | None, ...] = (None,)
    tokens: tuple[int, ...] = ()
    ranks: int | None = None
    ridge: float | None = None

    def reports(self, models: Sequence[Resolved]) -> list[CostReport]:
        """Every model's figures in each format; errors name the model if there are several."""
        reports = []
        for model in models:
            try:
                reports += [self.report(model, name) for name in self.formats]
            except FFNError as error:
                who = f"{model.name}: " if len(models) > 1 else ""
                raise FFNError(f"{who}{error.message}", error.hint, error.code) from None
        return reports

    def report(self, model: Resolved, format: str | None = None, tokens: int | None = None) -> CostReport:
        """One model's figures in one format, for other `tokens` if they are given."""
        return figures(model, format, (tokens,) if tokens else self.tokens or (1,), self.ranks, self.ridge)


def figures(
    resolved: Resolved, dtype: str | None = None, tokens: tuple[int, ...] = (1,), ranks: int | None = None,
    ridge: float | None = None,
) -> CostReport:  # fmt: skip
    """The figures of a source, its weights in `dtype` (None: as stored, else fp32), over `ranks` ranks.

    Raises FFNError for a dtype whose blocks do not fit, and for ranks that do not divide d_ff, with the nearest
    that would.
    """
    model, weights = resolved.model, storage_of(resolved, dtype)
    known = "top_k" not in model.unknown  # else the number of active experts is unknown
    over = None
    if ranks:
        from ffncli.models.counting.tensor_parallel import split

        over = split(model, ranks, weights, tokens[0])
    reached = None
    if ridge is not None and known:
        both = (ridge_tokens(model, weights, ridge, ranks or 1, fused) for fused in (False, True))
        reached = Ridge(ridge, *both)
    return CostReport(
        tuple(count(resolved, dtype, number) for number in tokens),
        token_costs(model, weights, tokens, ranks or 1) if known else (),
        over,
        reached if known or ridge is None else Ridge(ridge, None, None),
    )
