"""Compare two files of routes of the same tokens: who went elsewhere, by what margin, and what a replay would leave."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.frames import Tabular
from ffncli.run.corpus.routes import LayerRoutes, Routes

CONVENTIONS = {
    "flips": "choices of BASE that NEW does not make; a token's order of choices does not count",
    "margin_base": "BASE's logit of the expert that only BASE chose, minus that of the expert that only NEW chose; "
    "margin_new: NEW's, the other way round; with groups or a correction a margin may be negative",
    "weights_error": "‖new − base‖ / ‖base‖ over the router weights of all tokens",
    "ids_replayed_error": "the same, if NEW's router weighs the experts that BASE chose; 0 if it gets the weights, too",
}
_MOST_FLIPS = 1000


@dataclass(frozen=True)
class Flip:
    """A choice that differs: `token` went to `base_expert` in BASE and to `new_expert` in NEW (None: to fewer)."""

    stack: str
    layer: int
    token: int
    base_expert: int | None
    new_expert: int | None
    margin_base: float | None
    margin_new: float | None


@dataclass(frozen=True)
class RoutesRow:
    """The routes of one layer in both files.

    `tokens` are compared; `padding` are tokens that have no choices in at least one file. `flips` of the `choices` of
    BASE differ, at `tokens_touched` tokens. `largest_margin` and `median_margin` are over the flips' larger margins,
    None without logits. `weights_error` and `ids_replayed_error` need weights, and the latter logits of NEW.
    """

    stack: str
    layer: int
    tokens: int
    padding: int
    choices: int
    flips: int
    tokens_touched: int
    median_margin: float | None
    largest_margin: float | None
    weights_error: float | None
    ids_replayed_error: float | None


@dataclass(frozen=True)
class RoutesComparison(Tabular):
    """Two files of routes: a row for each layer that both have; `flips` are the first 1000 in order of layers.

    `tokens_touched` of the `tokens` have a flip in at least one layer. `mismatches` say what only one file has.
    """

    base: str
    new: str
    tokens: int
    tokens_touched: int
    flips: tuple[Flip, ...]
    rows: tuple[RoutesRow, ...]
    mismatches: tuple[str, ...]


def compare_routes(base: Routes, new: Routes) -> RoutesComparison:
    """Compare the layers that both files have. Raises FFNError if they have none, or different tokens."""
    ours, theirs = ({(one.stack, one.index): one for one in routes.layers} for routes in (base, new))
    names = [name for name in ours if name in theirs]
    if not names:
        raise FFNError(f"{base.where} and {new.where} have no layer in common")
    rows, flips, touched = [], list[Flip](), torch.zeros(0, dtype=torch.bool)
    for name in names:
        a, b = ours[name], theirs[name]
        where = f"layer {a.index}"
        if a.counts is not None or b.counts is not None:
            raise FFNError(
                f"{(base if a.counts is not None else new).where} counts choices, it has no routes of tokens"
            )
        if len(a.ids) != len(b.ids):
            raise FFNError(f"{where} has {len(a.ids):,} tokens in {base.where}, {len(b.ids):,} in {new.where}")
        row, some, at = _compared(a, b)
        rows.append(row)
        flips += some[: _MOST_FLIPS - len(flips)]
        touched = at if not touched.numel() else touched | at
    unlike = [f"{stack}.{index} is only in {base.where}" for stack, index in ours if (stack, index) not in theirs]
    unlike += [f"{stack}.{index} is only in {new.where}" for stack, index in theirs if (stack, index) not in ours]
    return RoutesComparison(
        base.where, new.where, len(touched), int(touched.sum()), tuple(flips), tuple(rows), tuple(unlike)
    )


def _compared(a: LayerRoutes, b: LayerRoutes) -> tuple[RoutesRow, list[Flip], Tensor]:
    """Return a layer's row, its flips, and which tokens [tokens] they touch."""
    both = (a.ids >= 0).any(-1) & (b.ids >= 0).any(-1)
    lost, gained = _only(a.ids, b.ids) & both[:, None], _only(b.ids, a.ids) & both[:, None]
    touched = (lost.any(-1)) | (gained.any(-1))
    flips = []
    for token in touched.nonzero().flatten().tolist():
        left, taken = a.ids[token][lost[token]].tolist(), b.ids[token][gained[token]].tolist()
        for at in range(max(len(left), len(taken))):
            old, other = (some[at] if at < len(some) else None for some in (left, taken))
            flips.append(Flip(a.stack, a.index, token, old, other, *(
                _margin(logits, token, first, second)
                for logits, first, second in ((a.logits, old, other), (b.logits, other, old))
            )))  # fmt: skip
    margins = [max(m) for f in flips if (m := [x for x in (f.margin_base, f.margin_new) if x is not None])]
    replayed = b.weights_of(a.ids)
    old, now = _dense(a, a.weights), _dense(b, b.weights)
    row = RoutesRow(
        a.stack, a.index, int(both.sum()), int((~both).sum()), int((a.ids[both] >= 0).sum()), int(lost.sum()),
        int(touched.sum()), float(torch.tensor(margins).double().median()) if margins else None,
        max(margins, default=None), _error(now, old, both),
        _error(_dense(a, replayed, b), old, both) if replayed is not None else None,
    )  # fmt: skip
    return row, flips, touched


def _only(ids: Tensor, others: Tensor) -> Tensor:
    """Return which ids [tokens, top_k] are not among the others of the same token."""
    return (ids >= 0) & ~(ids[:, :, None] == others[:, None, :]).any(-1)


def _margin(logits: Tensor | None, token: int, first: int | None, second: int | None) -> float | None:
    known = logits is not None and first is not None and second is not None and max(first, second) < logits.shape[-1]
    return float(logits[token, first].double() - logits[token, second].double()) if known else None  # type: ignore[index]


def _dense(routes: LayerRoutes, weights: Tensor | None, wider: LayerRoutes | None = None) -> Tensor | None:
    """Return the weights [tokens, experts] in float64, zero for experts not chosen."""
    if weights is None:
        return None
    columns = max(routes.columns, wider.columns if wider else 0, int(routes.ids.max()) + 1)
    values = weights.double().masked_fill(routes.ids < 0, 0)
    return torch.zeros(len(values), columns, dtype=torch.float64).scatter_add_(1, routes.ids.clamp_min(0), values)


def _error(new: Tensor | None, base: Tensor | None, tokens: Tensor) -> float | None:
    if new is None or base is None or new.shape != base.shape:
        return None
    size = float(base[tokens].norm())
    return float((new - base)[tokens].norm()) / size if size else None
