"""The page of `ffn activations` on functions and gated units: one answer, as JSON, CSV and readable tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ffncli.block.analysis import gated as gated_units
from ffncli.block.analysis.curve import Shape
from ffncli.block.analysis.difference import SHOWN, Difference, Meeting, RoundedDifference, Survival
from ffncli.block.analysis.facts import CONVENTIONS, Checked, Facts
from ffncli.block.analysis.operations import CONVENTION, operations
from ffncli.block.value import NEAR_ZERO
from ffncli.cli.activations import gated_page
from ffncli.cli.activations.gated_page import point
from ffncli.run.activations.comparison import Comparison
from ffncli.show.parts import Answer, Fixed, Line, Part, Table
from ffncli.show.text import finite, in_percent, interval, percent, plural

if TYPE_CHECKING:
    from ffncli.run.activations.rounding import RoundingError

_AT_0 = 1e-3  # kinks this close to 0 are shown in the column "at 0"; xielu has its kink at -1e-6
DIFFERENCE_CONVENTIONS = {
    "max_difference": "the least upper bound of |f - g| for all x, where g is --against; null if there is none",
    "ulps": "steps from one number of a format to another: 0 the same, 1 neighbours; +0 and -0 are the same",
    "rounded": "f and g, exact at every x of the format, each rounded once to the nearest number",
}
ROUNDING_CONVENTIONS = {
    "rounding": "an activation computed in dtype, compared with its exact value at the same x; native: torch's own "
    "call, formula: its formula operation by operation, each rounded to dtype; an error's ulp is the distance from the "
    "exact value to the next larger number of dtype",
}
_ROUNDING_COLUMNS = (
    "max_ulps",
    "at",
    "value",
    "exact",
    "max_error",
    "max_error_at",
    "correctly_rounded_share",
    "infinite_from",
)


_OF_DIFFERENCE = (
    "against", "max_difference", "max_difference_at", "max_difference_symmetric", "max_difference_towards",
    "mean_difference", "rms_difference",
)  # fmt: skip


def answer(comparison: Comparison) -> Answer:
    """Build one row per function, then one per gated unit, with additional keys that depend on the options."""
    c = comparison
    rows = [_row(c, at) for at in range(len(c.functions))]
    units = gated_page.rows(c)
    lines = [*map(_flat, rows), *map(gated_page.flat, units)]
    for line in lines:
        for e in c.rounding:
            if e.name == line["name"]:
                line |= {f"{e.dtype}_{e.way}_{key}": getattr(e, key) for key in _ROUNDING_COLUMNS}
    columns = tuple(dict.fromkeys(key for line in lines for key in line))
    table = Table(columns, [tuple(line.get(key) for key in columns) for line in lines])
    body: dict[str, Any] = {"rows": [*rows, *units]}
    if c.checked:
        body["expected"] = [{key: value for key, value in asdict(one).items() if key != "text"} for one in c.checked]
    if c.rounding:
        body["rounding"] = [asdict(e) for e in c.rounding]
    parts: list[Part] = []
    if c.checked:
        parts.append(_checked(c.checked))
    if c.functions:
        parts.append(Table(("name", "formula"), [(one.name, one.formula) for one in c.functions]))
        parts += [_shapes(c.functions), *_normal(c.functions), *_values(c.functions, c.question.at is not None)]
        parts += _about(c.functions)
    parts += gated_page.parts(units)
    if c.differences:
        parts += [_differences(c.differences), *_survivals(c.differences, c.question.std)]
    if c.rounding:
        parts += _rounding(c.rounding, c.question.std)
    parts += gated_page.against_parts(c)
    conventions = {**CONVENTIONS, "operations": CONVENTION}
    conventions |= gated_units.CONVENTIONS if c.units else {}
    conventions |= DIFFERENCE_CONVENTIONS if c.differences else {}
    conventions |= ROUNDING_CONVENTIONS if c.rounding else {}
    conventions |= gated_page.AGAINST_CONVENTIONS if c.unit_differences else {}
    return Answer("activations", body, table, parts, conventions)


def _row(comparison: Comparison, at: int) -> dict[str, Any]:
    """Return a function's row with the keys of docs/commands/activations.md."""
    one = comparison.functions[at]
    s = one.shape
    row = {
        "name": one.name,
        "formula": one.formula,
        "values": [{"x": v.x, "value": v.value, "slope": v.slope, "ratio": v.ratio} for v in one.values],
        "minimum": finite(s.minimum), "minimum_at": s.minimum_at,
        "maximum": finite(s.maximum), "maximum_at": s.maximum_at,
        "lipschitz": finite(s.lipschitz), "steepest_at": s.steepest_at,
        "monotone": s.monotone, "smoothness_at_0": one.smoothness_at_0, "kinks": list(one.kinks),
        "std": one.std, "zero_share": one.zero_share, "exact_zero_share": one.exact_zero_share,
        "mean": one.mean, "variance": one.variance, "gain": one.gain, "gradient_gain": one.gradient_gain,
        "operations": operations(one.name).record(), "slope_operations": operations(one.name, slope=True).record(),
        "used_by": one.used_by or None, "source": one.source or None,
    }  # fmt: skip
    return row | (_difference(comparison.differences[at]) if comparison.differences else {})


def _difference(one: RoundedDifference) -> dict[str, Any]:
    """Return the keys that a row has only if it is compared with a reference."""
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


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a row for CSV: values as one list per key, operations as a total, a format's keys after its name."""
    values, nested = row["values"], ("values", "max_difference_within", "rounded")
    out = {key: value for key, value in row.items() if key not in nested}
    out |= {key: row[key]["total"] for key in ("operations", "slope_operations")}
    out = {key: value for key, value in out.items() if key not in _OF_DIFFERENCE} | {
        key: [v[key] for v in values] for key in ("x", "value", "slope", "ratio")
    }
    if "against" not in row:
        return out
    out |= {key: row[key] for key in _OF_DIFFERENCE}
    within = row["max_difference_within"] or {}
    out |= {f"max_difference_within_{key}": within.get(key) for key in ("low", "high", "x", "value")}
    for s in row["rounded"]:
        out |= {f"{s['dtype']}_{key}": value for key, value in s.items() if key not in ("dtype", "at_max_difference")}
        out[f"{s['dtype']}_ulps_at_max_difference"] = [m["ulps"] for m in s["at_max_difference"]]
    return out


# --- functions --------------------------------------------------------------------------------------------------------


def _shapes(facts: Sequence[Facts]) -> Table:
    columns = ["name", "range", "lowest at", "Lipschitz", "steepest at", "monotone", "at 0"]
    rows: list[list[Any]] = [
        [
            one.name, _range(one.shape), _place(one.shape.minimum_at),
            "unbounded" if math.isinf(one.shape.lipschitz) else Fixed(one.shape.lipschitz),
            _place(one.shape.steepest_at), one.shape.monotone, _smoothness(one.smoothness_at_0),
        ]
        for one in facts
    ]  # fmt: skip
    if any(abs(x) > _AT_0 for one in facts for x in one.kinks):
        columns.append("kinks at")
        for line, one in zip(rows, facts, strict=True):
            line.append(", ".join(f"{x:g}" for x in one.kinks) or "-")
    return Table(tuple(columns), [tuple(line) for line in rows], "Shape")


def _range(s: Shape) -> str:
    low, high = (None if math.isinf(bound) else _bound(bound) for bound in (s.minimum, s.maximum))
    return interval(low, high, (s.minimum_at is not None, s.maximum_at is not None))


def _bound(value: float) -> str:
    return f"{value:g}" if value == int(value) else str(Fixed(value))


def _place(x: float | None) -> Fixed | str:
    return "-" if x is None else Fixed(x)


def _smoothness(order: int | None) -> str:
    return "smooth" if order is None else {-1: "jumps", 0: "kink"}.get(order, f"C{order}")


def _normal(facts: Sequence[Facts]) -> list[Part]:
    columns = ("name", "zero %", "near zero %", "mean", "variance", "gain", "gradient gain")
    rows = [
        (
            one.name, in_percent(one.exact_zero_share), in_percent(one.zero_share),
            *map(Fixed, (_mean(one), one.variance, one.gain, one.gradient_gain)),
        )
        for one in facts
    ]  # fmt: skip
    note = f"near zero: |f(x)| ≤ {NEAR_ZERO:g} · gain: weights of std gain / √fan_in keep the second moment"
    return [Table(columns, rows, f"A normal input of mean 0 and std {facts[0].std:g}"), Line(note, quiet=True)]


def _mean(one: Facts) -> float:
    """Return the mean, or 0 if the mean is just rounding error compared with the spread: 1e-17 for tanh.

    A fixed limit would be wrong, because a narrow input has a small mean that is not rounding error.
    """
    return one.mean if abs(one.mean) > 1e-12 * math.sqrt(one.variance) else 0.0


def _values(facts: Sequence[Facts], ratios: bool) -> list[Part]:
    """Show f, slope and f / x: one table each, or a single table if there is only one activation."""
    xs = [v.x for v in facts[0].values]
    if not xs:
        return []
    if len(facts) == 1:
        lines = [(point(v.x), *map(_number, (v.value, v.slope, v.ratio))) for v in facts[0].values]
        return [Table(("x", "f(x)", "slope", "f(x)/x"), lines, facts[0].name)]
    kinds = [("f(x)", "value"), ("Slope", "slope"), *([("f(x)/x", "ratio")] if ratios else [])]
    return [
        Table(
            ("x", *(one.name for one in facts)),
            [(point(x), *(_number(getattr(one.values[i], key)) for one in facts)) for i, x in enumerate(xs)],
            title,
            side_by_side=True,
        )
        for title, key in kinds
    ]


def _number(value: float | None) -> Fixed | None:
    return None if value is None else Fixed(value)


def _about(facts: Sequence[Facts]) -> list[Part]:
    """Show cost, users and source, each in a table of two columns, which fits any terminal."""
    return [
        Table(("name", "operations per element"), [(one.name, operations(one.name).text) for one in facts]),
        Table(("name", "used by"), [(one.name, one.used_by or "-") for one in facts]),
        Table(("name", "source"), [(one.name, one.source or "-") for one in facts]),
    ]


# --- stated values ----------------------------------------------------------------------------------------------------


def _checked(checks: Sequence[Checked]) -> Table:
    """Show the stated values, with wrong values in bold."""
    several = len({one.name for one in checks}) > 1
    columns = ("name", "x", "stated", "f(x)", "f(x)/x", "verdict")
    rows = [
        (one.name, one.x, _Written(one.stated, one.text), stated_value(one),
         None if one.ratio is None else Fixed(one.ratio), "right" if one.right else "wrong")
        for one in checks
    ]  # fmt: skip
    wrong = frozenset(i for i, one in enumerate(checks) if not one.right)
    start = 0 if several else 1
    title = "As stated" if several else f"{checks[0].name} as stated"
    return Table(columns[start:], [row[start:] for row in rows], title, wrong)


class _Written(Fixed):
    """A number that is printed exactly as it was written."""

    text: str

    def __new__(cls, value: float, text: str) -> _Written:
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text


def stated_value(one: Checked) -> Fixed:
    """Return f(x) with at least one more decimal than the stated value."""
    decimals = 1 - int(Decimal(one.text).as_tuple().exponent)
    return _Written(one.value, f"{one.value:.{decimals}f}") if 4 < decimals <= 17 else Fixed(one.value)


# --- differences ------------------------------------------------------------------------------------------------------


def place_text(d: Difference) -> str:
    """Return where a difference is largest: `±2.6989`, `towards -∞`, or `-` if there is no such point."""
    if d.towards is not None:
        return "towards -∞" if d.towards < 0 else "towards ∞"
    if not d.places:
        return "-"
    return f"{'±' if len(d.places) == 2 else ''}{_short(d.places[0])}"


def excess_text(d: Difference) -> str:
    """Return an excessive difference for an error message: `silu by 0.193 at x = ±1.965`."""
    if d.maximum is None:
        return f"{d.name} without bound"
    return f"{d.name} by {d.maximum:.3g} {'' if d.towards else 'at x = '}{place_text(d)}"


def _differences(compared: Sequence[RoundedDifference]) -> Table:
    against = compared[0].difference.against
    differences = [one.difference for one in compared]
    rows = [(d.name, _size(d), place_text(d), Fixed(d.mean), Fixed(d.rms)) for d in differences]
    return Table(("name", "max |f - g|", "at x", "mean |f - g|", "rms"), rows, f"Difference from g = {against}")


def _size(d: Difference) -> Fixed | str:
    if d.maximum is not None:
        return Fixed(d.maximum)
    return f"unbounded; {d.within[1]:.4g} in [{-SHOWN:g}, {SHOWN:g}]" if d.within else "unbounded"


def _survivals(compared: Sequence[RoundedDifference], std: float) -> list[Part]:
    """Show one sentence per activation and format, except for the reference itself."""
    others = [one for one in compared if one.difference.name != one.difference.against]
    if not others:
        return []
    pairs = [(one.difference, s) for one in others for s in one.rounded]
    against = others[0].difference.against
    note = (
        f"yes: its rms exceeds the rounding error of {against} itself; in part: it does not, but some values differ · "
        "1 ulp: the step to the next number of the format · x: where the exact difference is largest, then where the "
        f"difference in ulps is, with both values · inputs: normal, std {std:g}"
    )
    rows = [(f"{d.name} in {s.dtype}", _sentence(d, s)) for d, s in pairs]
    return [Table(("", ""), rows, "Does the difference survive rounding?"), Line(note, quiet=True)]


def _sentence(d: Difference, s: Survival) -> str:
    if s.largest is None:
        return f"no: the same number for each of {s.inputs:,} inputs"
    parts = [f"{percent(s.differ)} of inputs differ, {percent(s.beyond_neighbours)} by more than 1 ulp"]
    parts += [f"{s.ratio:.3g}× the rounding error" if s.ratio is not None else f"{d.against} is exact in {s.dtype}"]
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


# --- rounding ---------------------------------------------------------------------------------------------------------


def _rounding(errors: Sequence[RoundingError], std: float) -> list[Part]:
    worst = [(e.name, e.dtype, e.way, _figure(e.max_ulps), e.at, e.value + 0.0, e.exact) for e in errors]
    sizes = [
        (e.name, e.dtype, e.way, e.max_error, e.max_error_at, percent(e.correctly_rounded_share, 4)) for e in errors
    ]
    note = "ulp: step from the exact value to the next number · native: torch's call · formula: each operation rounded"
    return [
        Table(("name", "dtype", "way", "ulps", "at x", "is", "exact"), worst, "Rounding: the worst error in ulps"),
        Line(note, quiet=True),
        Table(("name", "dtype", "way", "error", "at x", "right"), sizes, "Rounding: the largest error"),
        Line(f"|x| ≤ {10 * std:g} · right: within half an ulp, for normal inputs of std {std:g}", quiet=True),
        *_overflows(errors),
    ]


def _overflows(errors: Sequence[RoundingError]) -> list[Part]:
    """Show one line per activation and format that overflows, or that loses a value which the format can represent."""
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
