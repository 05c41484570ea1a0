"""Compute all results of `ffn activations` for functions and gated units; they are shown only afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffncli.block.analysis.difference import RoundedDifference, rounded_differences
from ffncli.block.analysis.facts import Checked, Facts, check, claim, facts
from ffncli.block.analysis.gated import UNITS, GatedDifference, GatedReport, gated_difference, gated_report
from ffncli.errors import FFNError, option
from ffncli.models.dimensions import whole, width
from ffncli.run.activations.question import (
    BEYOND_LIMITS,
    COMPARED_UP,
    D_FF,
    D_MODEL,
    DEFAULT_AT,
    DEFAULT_UP,
    MOST,
    FunctionsQuestion,
    points,
)
from ffncli.run.engine.threads import set_threads

if TYPE_CHECKING:
    from ffncli.models.counting.iso_params import IsoUnit
    from ffncli.run.activations.rounding import RoundingError


@dataclass(frozen=True)
class Comparison:
    """The computed results for functions and gated units, in the order of their names.

    `differences` has one entry per function and `unit_differences` one per unit; both are empty without a matching
    reference. `value_differences` holds, for each unit, y minus the reference's y at each value in the unit's report.
    `rounding` has several entries per function. `iso` maps a unit's name to the block of equal size. Plots have `at` on
    the x axis and a curve for each of `ups`.
    """

    question: FunctionsQuestion
    functions: tuple[Facts, ...]
    units: tuple[GatedReport, ...]
    checked: tuple[Checked, ...]
    differences: tuple[RoundedDifference, ...]
    rounding: tuple[RoundingError, ...]
    unit_differences: tuple[GatedDifference, ...]
    value_differences: tuple[tuple[float, ...], ...]
    iso: Mapping[str, IsoUnit]
    at: tuple[float, ...]
    ups: tuple[float, ...]


def compared(question: FunctionsQuestion, device: str = "cpu") -> Comparison:
    """Compute everything that the question requests for its functions and units; torch rounds on `device`."""
    functions, units = question.chosen_names()
    std, unit, reference = question.std, question.unit, question.reference()
    claims = [claim(pair) for pair in question.expect]
    checked = tuple(one for name in functions for one in check(name, claims)) if claims else ()
    if question.at is not None:
        at = points(question.at)
    else:
        at = tuple(dict.fromkeys(one.x for one in checked)) or points(BEYOND_LIMITS if unit else DEFAULT_AT)
    ups = points(question.up) if question.up is not None else (COMPARED_UP if unit else DEFAULT_UP)
    if units and len(ups) * len(at) > MOST:
        raise FFNError(
            f"{option('up')}: {len(at):,} points at {len(ups):,} values of up exceed the limit of {MOST:,}",
            "choose fewer of either",
        )
    iso: dict[str, IsoUnit] = {}
    if question.iso_params:
        from ffncli.models.counting.iso_params import iso_unit

        d_model = whole(option("d_model"), question.d_model or D_MODEL)
        d_ff = width(option("d_ff"), question.d_ff or ("4x" if question.d_model else D_FF), d_model)
        iso = {name: iso_unit(UNITS[name], d_model, d_ff, question.multiple_of or 1) for name in units}
    reports = tuple(gated_report(UNITS[name], at, ups, std) for name in units)
    return Comparison(
        question,
        tuple(facts(name, at, std) for name in functions),
        reports,
        checked,
        rounded_differences(functions, reference, question.formats(), std) if reference else (),
        _rounding(question, functions, device),
        tuple(gated_difference(name, unit, std) for name in units) if unit else (),
        tuple(tuple(v.value - UNITS[unit].value(v.x, v.up) for v in one.values) for one in reports) if unit else (),
        iso,
        at,
        ups,
    )


def _rounding(question: FunctionsQuestion, names: Sequence[str], device: str) -> tuple[RoundingError, ...]:
    """Compute torch's rounding errors in the requested formats; return an empty tuple if rounding was not requested."""
    if not question.rounding:
        return ()
    set_threads()
    from ffncli.run.activations.rounding import rounding_errors
    from ffncli.run.engine.prepare import device_of

    forms = [form.name for form in question.formats()]
    return tuple(rounding_errors(names, forms, question.std, device_of(device)))
