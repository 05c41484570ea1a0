"""Differences of activations as JSON, as CSV and to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ffncli.block.analysis.difference import SHOWN, Difference, Meeting, RoundedDifference, Survival
from ffncli.show.parts import Answer, Cell, Fixed, Line, Part, Table
from ffncli.show.text import percent, plural

CONVENTIONS = {
    "max_difference": "the least upper bound of |f - g| for all x, g being --against; null if there is none",
    "ulps": "steps from one number of a format to another: 0 the same, 1 neighbours; +0 and -0 are the same",
    "rounded": "f and g, exact at every x of the format, each rounded once to the nearest number",
}


def with_differences(page: Answer, compared: Sequence[RoundedDifference], std: float) -> Answer:
    """The page with the keys, the columns and the parts of `compared`, which has the rows' names and order."""
    rows = [row(one) for one in compared]
    parts: list[Part] = [_table(compared), *_survivals(compared, std)]
    conventions = {**page.conventions, **CONVENTIONS}
    return replace(widened(page, rows, [_flat(line) for line in rows], parts), conventions=conventions)


def widened(
    page: Answer, rows: Sequence[Mapping[str, Any]], columns: Sequence[Mapping[str, Cell]], parts: Sequence[Part]
) -> Answer:
    """The page with more keys in each of its rows, more columns in its CSV (both in its order) and more parts."""
    body = {**page.body, "rows": [{**old, **new} for old, new in zip(page.body["rows"], rows, strict=True)]}
    names = dict.fromkeys(name for line in columns for name in line)
    cells = [(*old, *map(new.get, names)) for old, new in zip(page.rows.rows, columns, strict=True)]
    table = replace(page.rows, columns=(*page.rows.columns, *names), rows=cells)
    return replace(page, body=body, rows=table, parts=[*page.parts, *parts])


def row(one: RoundedDifference) -> dict[str, Any]:
    """The additions to a row of the answer, under the keys of docs/json.md."""
    d = one.difference
    return {
        "against": d.against,
        "max_difference": d.maximum,
        "max_difference_at": d.at,
        "max_difference_symmetric": d.symmetric,
        "max_difference_towards": None if d.towards is None else "inf" if d.towards > 0 else "-inf",
        "max_difference_within": None
        if d.within is None
        else {"low": -SHOWN, "high": SHOWN, "x": d.within[0], "value": d.within[1]},
        "mean_difference": d.mean,
        "rms_difference": d.rms,
        "rounded": [_rounded(s) for s in one.rounded],
    }


def _rounded(s: Survival) -> dict[str, Any]:
    return {
        "dtype": s.dtype,
        "inputs": s.inputs,
        "survives": s.verdict,
        "differing_share": s.differ,
        "over_one_ulp_share": s.beyond_neighbours,
        "rounding_rms": s.noise,
        "ratio": s.ratio,
        "at_max_difference": [asdict(m) for m in s.at_difference],
        "max_ulps": s.largest.ulps if s.largest else 0,
        "max_ulps_at": s.largest.x if s.largest else None,
        "max_ulps_value": s.largest.value if s.largest else None,
        "max_ulps_reference": s.largest.reference if s.largest else None,
    }


def _flat(line: Mapping[str, Any]) -> dict[str, Cell]:
    """A row for CSV: one column per number, those of a format under its name."""
    out = {key: value for key, value in line.items() if key not in ("max_difference_within", "rounded")}
    within = line["max_difference_within"] or {}
    out |= {f"max_difference_within_{key}": within.get(key) for key in ("low", "high", "x", "value")}
    for s in line["rounded"]:
        out |= {f"{s['dtype']}_{key}": value for key, value in s.items() if key not in ("dtype", "at_max_difference")}
        out[f"{s['dtype']}_ulps_at_max_difference"] = [m["ulps"] for m in s["at_max_difference"]]
    return out


# --- for people -------------------------------------------------------------------------------------------------------


def place_text(d: Difference) -> str:
    """Where a difference is largest: `±2.6989`, `towards -∞`; a dash if it is nowhere or everywhere."""
    if d.towards is not None:
        return "towards -∞" if d.towards < 0 else "towards ∞"
    if not d.places:
        return "-"
    return f"{'±' if len(d.places) == 2 else ''}{_short(d.places[0])}"


def excess_text(d: Difference) -> str:
    """A difference that is too large, for an error: `silu by 0.193 at x = ±1.965`."""
    if d.maximum is None:
        return f"{d.name} without bound"
    return f"{d.name} by {d.maximum:.3g} {'' if d.towards else 'at x = '}{place_text(d)}"


def _table(compared: Sequence[RoundedDifference]) -> Table:
    against = compared[0].difference.against
    differences = [one.difference for one in compared]
    rows = [(d.name, _size(d), place_text(d), Fixed(d.mean), Fixed(d.rms)) for d in differences]
    return Table(("name", "max |f - g|", "at x", "mean |f - g|", "rms"), rows, f"Difference from g = {against}")


def _size(d: Difference) -> Fixed | str:
    if d.maximum is not None:
        return Fixed(d.maximum)
    return f"unbounded; {d.within[1]:.4g} in [{-SHOWN:g}, {SHOWN:g}]" if d.within else "unbounded"


def _survivals(compared: Sequence[RoundedDifference], std: float) -> list[Part]:
    """A sentence per activation and format; none for one that is the reference itself."""
    others = [one for one in compared if one.difference.name != one.difference.against]
    if not others:
        return []
    pairs = [(one.difference, s) for one in others for s in one.rounded]
    against = others[0].difference.against
    note = (
        f"yes: its rms is above that of rounding {against} itself; in part: below it, but some numbers differ · "
        "1 ulp: from a number of the format to the next · x: where the exact difference is largest, then where the "
        f"ulps are most, with both numbers · inputs are normal, of std {std:g}"
    )
    rows = [(f"{d.name} in {s.dtype}", _sentence(d, s)) for d, s in pairs]
    return [Table(("", ""), rows, "Does the difference survive rounding?"), Line(note, quiet=True)]


def _sentence(d: Difference, s: Survival) -> str:
    if s.largest is None:
        return f"no: the same number for each of {s.inputs:,} inputs"
    parts = [f"{percent(s.differ)} of inputs differ, {percent(s.beyond_neighbours)} by more than 1 ulp"]
    parts += [f"{s.ratio:.3g} × the error of rounding" if s.ratio is not None else f"{d.against} is exact in {s.dtype}"]
    if s.at_difference:
        parts += [", ".join(f"{_ulps(m)} at x = {_short(m.x)}" for m in s.at_difference)]
    m = s.largest
    if m not in s.at_difference:
        parts += [f"at most {_ulps(m)} at x = {_short(m.x)} ({_short(m.value)}, {_short(m.reference)})"]
    return f"{s.verdict}: " + "; ".join(parts)


def _ulps(m: Meeting) -> str:
    return f"{m.ulps:,} {plural('ulp', m.ulps)}"


def _short(x: float) -> str:
    return "0" if x == 0 else "inf" if math.isinf(x) else f"{x:.4g}"
