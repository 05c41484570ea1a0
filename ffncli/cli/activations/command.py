"""`ffn activations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffncli.block.activations import TABLE
from ffncli.block.analysis.facts import facts
from ffncli.block.analysis.gated import UNITS, split
from ffncli.cli.activations.data_options import DataOptions
from ffncli.cli.activations.expect import ExpectOptions, judge, with_checked
from ffncli.cli.activations.gated_options import GatedOptions
from ffncli.cli.activations.iso_options import IsoOptions
from ffncli.cli.activations.page import answer
from ffncli.cli.activations.points import points
from ffncli.cli.activations.rounding_options import RoundingOptions
from ffncli.cli.common import values
from ffncli.cli.common.option import option
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.parsers import above_zero, joined
from ffncli.cli.common.plot_options import PlotOptions
from ffncli.cli.common.spread import spread
from ffncli.errors import FFNError
from ffncli.run.user.time_limit import LoadOptions
from ffncli.show.output import Output
from ffncli.show.parts import Answer

if TYPE_CHECKING:
    from ffncli.block.analysis.difference import RoundedDifference
    from ffncli.block.analysis.facts import Checked
    from ffncli.models.counting.iso_params import IsoUnit
    from ffncli.run.activations.rounding import RoundingError

_Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME",
        autocompletion=values.activations,
        help="Activations or gated units, as in gelu or swiglu. [default: those in common use]",
    ),
]
_values = partial(option, "Values and curves")
IN_USE = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "xielu")
DEFAULT_AT = "-3:3:1"
BEYOND_LIMITS = "-12:12:4"  # what shows two gated units' difference by default: their limits are from 7 to 25
_Plain = tuple[Sequence[str], Sequence[float], str | None]
_Gated = tuple[Sequence[str], Sequence[float], Sequence[float]]


_Std = Annotated[
    float,
    _values(
        "--std", metavar="X", parser=above_zero("--std"), daily=True, help="Standard deviation of the normal input."
    ),
]


@spread
def command(
    *,
    names: _Names = None,
    places: Annotated[
        list[str] | None,
        _values(
            "--at",
            metavar="X,...|A:B:STEP",
            daily=True,
            help=f"Inputs to show. [default: {DEFAULT_AT}; for differences of gated units {BEYOND_LIMITS}]",
        ),
    ] = None,
    std: _Std = 1.0,
    everything: Annotated[bool, _values("--all", daily=True, help="Show every activation.")] = False,
    expected: ExpectOptions,
    gated: GatedOptions,
    iso: IsoOptions,
    precision: RoundingOptions,
    plot: PlotOptions,
    data: DataOptions,
    load_limit: LoadOptions,
    show: OutputOptions,
) -> None:
    """Compare activations: values, slopes, extremes, differences, statistics for a normal input.

    Examples:
      ffn activations gelu silu --plot                     # values and curves
      ffn activations gelu_tanh --against gelu             # largest difference
      ffn activations swiglu --iso-params --d-model 512    # d_ff for equal size
      ffn activations --source ./my-model -p "Hello world" # on real inputs
    """
    output, at = show.output(), joined(places)
    load_limit.apply()
    chosen, units = chosen_names(names, everything)
    precision.check(chosen, units, data.source)
    functions = {"--at": at, "--std": std != 1.0, "--expect": expected.expect, "--up": gated.up}
    compared = {"--iso-params": iso.iso_params, "--against": precision.against, "--rounding": precision.rounding}
    data.check({**functions, **compared, "--plot": plot.plot, "--plot-file": plot.plot_file}, precision.rounding)
    if data.source is not None:
        _no_units(units)
        data.run(chosen, output, precision.dtype)
        return
    if units and expected.expect:
        raise FFNError("--expect is about functions of one number, not gated units", f"leave out {', '.join(units)}")
    plot.check(show.force, show.out)
    claims = expected.checked(chosen)
    xs = points(at) if at is not None else _default_points(claims, precision)
    ups, widths = gated.ups(units, xs, compared=precision.unit is not None), iso.iso_units(units)
    plain_facts = [facts(name, xs, std) for name in chosen]
    page = with_checked(answer(plain_facts, _rows(units, xs, ups, std, widths), ratios=at is not None), claims)
    differences = precision.differences(chosen, std)
    page = _with_precision(page, differences, precision.errors(chosen, std, data.device), std)
    page = _with_gated(page, precision, units, std)
    output.show(_pictured(page, plot, output, (chosen, xs, precision.reference()), (units, xs, ups)))
    precision.judge(differences, page.body["rows"])
    judge(claims)


def _default_points(claims: Sequence[Checked], precision: RoundingOptions) -> tuple[float, ...]:
    """Where functions are shown without --at: at what --expect names, else over the usual range."""
    return tuple(dict.fromkeys(one.x for one in claims)) or points(BEYOND_LIMITS if precision.unit else DEFAULT_AT)


def _with_gated(page: Answer, precision: RoundingOptions, units: Sequence[str], std: float) -> Answer:
    """The page with how far the gated units are from that of --against."""
    if apart := precision.gated_differences(units, std):
        from ffncli.cli.activations.gated_against_page import with_gated_differences

        return with_gated_differences(page, apart, std)
    return page


def _no_units(units: Sequence[str]) -> None:
    """Raises FFNError for a gated unit: with --source, functions replace the gate's."""
    if units:
        function = UNITS[units[0]].gate.function
        raise FFNError(f"--source: {units[0]} is a gated unit", f"name the function of its gate, {function}")


def _rows(
    units: Sequence[str], at: Sequence[float], ups: Sequence[float], std: float, widths: Mapping[str, IsoUnit]
) -> list[dict[str, Any]]:
    """The rows of gated units; nothing is loaded if there are none."""
    if not units:
        return []
    from ffncli.block.analysis.gated import gated_report
    from ffncli.cli.activations.gated_page import rows

    return rows([gated_report(UNITS[name], at, ups, std) for name in units], widths)


def _with_precision(
    page: Answer, differences: Sequence[RoundedDifference], errors: Sequence[RoundingError], std: float
) -> Answer:
    """The page with the differences and the rounding errors of its rows, in their order; nothing is loaded for none."""
    if differences:
        from ffncli.cli.activations.against_page import with_differences

        page = with_differences(page, differences, std)
    if errors:
        from ffncli.cli.activations.rounding_page import with_rounding

        page = with_rounding(page, errors, std)
    return page


def _pictured(page: Answer, plot: PlotOptions, output: Output, plain: _Plain, gated: _Gated) -> Answer:
    """The page with the requested curves, in it or in a file."""
    if not plot.wanted:
        return page
    from ffncli.cli.activations.curves_page import curve_plots, unit_plots

    return plot.extended(page, [*curve_plots(*plain), *unit_plots(*gated)], output)


def chosen_names(names: list[str] | None, everything: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Canonical names of plain functions, and of gated units: the named ones, all of them, or those in use.

    Raises FFNError for an unknown name.
    """
    if everything and names:
        raise FFNError("--all and a NAME contradict each other", "give one or the other")
    if everything:
        return tuple(TABLE), ()
    return split(names or IN_USE)
