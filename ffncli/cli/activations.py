"""`ffn activations`."""

from __future__ import annotations

from typing import Annotated

import typer

from ffncli.block.analysis.facts import facts
from ffncli.block.analysis.gated import split
from ffncli.cli import gated_page
from ffncli.cli.activations_page import answer
from ffncli.cli.gated_options import GatedOptions
from ffncli.cli.iso_options import IsoOptions
from ffncli.cli.options import OutputOptions, above_zero, spread
from ffncli.cli.points import points

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
    gated: GatedOptions,
    iso: IsoOptions,
    show: OutputOptions,
) -> None:
    """Compare activation functions: values, slopes, extremes, what they do to a normal input.

    Try: ffn activations gelu silu --at -3:3:0.5
    """
    output = show.output()
    plain, units = split(names or IN_USE)
    xs = points(DEFAULT_AT if at is None else at)
    widths = iso.found(units)
    ups = gated.ups(units, xs)
    found = [facts(name, xs, std) for name in plain]
    output.show(answer(found, gated_page.rows(units, xs, ups, std, widths), ratios=at is not None))
