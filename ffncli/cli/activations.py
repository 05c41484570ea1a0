"""`ffn activations`."""

from __future__ import annotations

from typing import Annotated

import typer

from ffncli.block.activations import TABLE, resolve
from ffncli.block.analysis.facts import facts
from ffncli.cli.activations_page import answer
from ffncli.cli.curves_page import curve_plots
from ffncli.cli.expect_options import ExpectOptions, judge, with_checked
from ffncli.cli.options import OutputOptions, above_zero, spread
from ffncli.cli.plot_options import PlotOptions
from ffncli.cli.points import points
from ffncli.errors import FFNError

_Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="gelu, silu, swiglu, ...; default: what known models use.")
]
IN_USE = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "xielu")
DEFAULT_AT = "-3:3:1"


@spread
def command(
    *,
    names: _Names = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="X,...|A:B:STEP", help="Where to show values, default -3:3:1.")
    ] = None,
    std: Annotated[
        float, typer.Option("--std", metavar="S", parser=above_zero("--std"), help="Width of the normal input.")
    ] = 1.0,
    everything: Annotated[bool, typer.Option("--all", help="Every activation of the table.")] = False,
    expected: ExpectOptions,
    plot: PlotOptions,
    show: OutputOptions,
) -> None:
    """Compare activations: values, slopes, extremes, differences, what becomes of a normal input.

    Try: ffn activations gelu silu --at -3:3:0.5
    """
    output = show.output()
    chosen = chosen_names(names, everything)
    plot.check(show.force, show.out)
    claims = expected.checked(chosen)
    xs = points(at) if at is not None else tuple(dict.fromkeys(one.x for one in claims)) or points(DEFAULT_AT)
    found = [facts(name, xs, std) for name in chosen]
    page = with_checked(answer(found, ratios=at is not None), claims)
    output.show(plot.extended(page, curve_plots(chosen, xs), output) if plot.wanted else page)
    judge(claims)


def chosen_names(names: list[str] | None, everything: bool) -> list[str]:
    """Canonical names, each once: those asked for, all of them, or those in use. Raises FFNError for an unknown one."""
    if everything and names:
        raise FFNError("--all and a NAME contradict each other", "give one or the other")
    if everything:
        return list(TABLE)
    asked = [part for text in names or IN_USE for part in text.split(",")]
    return list(dict.fromkeys(resolve(name, "NAME")[0] for name in asked))
