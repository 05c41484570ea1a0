"""Rounding errors of activations as JSON, as CSV and to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ffncli.cli.activations.against_page import widened
from ffncli.show.parts import Answer, Cell, Line, Part, Table
from ffncli.show.text import percent

if TYPE_CHECKING:
    from ffncli.run.activations.rounding import RoundingError

CONVENTIONS = {
    "rounding": "an activation computed in dtype, against its exact value at the same x; native: torch's own call, "
    "formula: its formula operation by operation, each rounded to dtype; an error's ulp is the distance from the exact "
    "value to the next larger number of dtype",
}
_COLUMNS = ("max_ulps", "at", "value", "exact", "max_error", "max_error_at", "correctly_rounded_share", "infinite_from")


def with_rounding(page: Answer, errors: Sequence[RoundingError], std: float) -> Answer:
    """The page with every error: `rounding` in JSON, columns `bf16_native_max_ulps` ... in CSV, two tables to read."""
    names = [row["name"] for row in page.body["rows"]]
    columns: dict[str, dict[str, Cell]] = {name: {} for name in names}
    for e in errors:
        columns[e.name] |= {f"{e.dtype}_{e.way}_{key}": getattr(e, key) for key in _COLUMNS}
    page = widened(page, [{} for _ in names], [columns[name] for name in names], _parts(errors, std))
    body = {**page.body, "rounding": [asdict(e) for e in errors]}
    return replace(page, body=body, conventions={**page.conventions, **CONVENTIONS})


def _parts(errors: Sequence[RoundingError], std: float) -> list[Part]:
    worst = [(e.name, e.dtype, e.way, _figure(e.max_ulps), e.at, e.value + 0.0, e.exact) for e in errors]
    sizes = [
        (e.name, e.dtype, e.way, e.max_error, e.max_error_at, percent(e.correctly_rounded_share, 4)) for e in errors
    ]
    note = "ulp: from the exact value to the next number · native: torch's own call · formula: operation by operation"
    return [
        Table(("name", "dtype", "way", "ulps", "at x", "is", "exact"), worst, "Rounding: the worst error in ulps"),
        Line(note, quiet=True),
        Table(("name", "dtype", "way", "error", "at x", "right"), sizes, "Rounding: the largest error"),
        Line(f"|x| ≤ {10 * std:g} · right: within half an ulp, for normal inputs of std {std:g}", quiet=True),
        *_overflows(errors),
    ]


def _overflows(errors: Sequence[RoundingError]) -> list[Part]:
    """A line per activation and format that overflows, or loses a value that the format could hold."""
    out: list[Part] = []
    for e in errors:
        who = f"{e.name} in {e.dtype}, {e.way}"
        if e.lost_at is not None:
            out.append(Line(f"{who}: infinite or NaN from x = {e.lost_at:.4g} on, though {e.dtype} can hold the value"))
        elif e.infinite_from is not None:
            out.append(Line(f"{who}: overflows from |x| = {e.infinite_from:.4g} on", quiet=True))
    return out


def _figure(ulps: float) -> float | int:
    return round(ulps) if ulps >= 1000 else float(f"{ulps:.3g}")
