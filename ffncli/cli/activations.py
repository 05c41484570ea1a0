"""`ffn activations`."""

from __future__ import annotations

from typing import Annotated

import typer

from ffncli.block.activations import TABLE, resolve
from ffncli.cli.activations_page import answer
from ffncli.cli.data_options import DataOptions
from ffncli.cli.options import OutputOptions, above_zero, spread
from ffncli.cli.points import points

_Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="gelu, silu, swiglu, ...; default: what known models use.")
]
IN_USE = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "xielu")


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
    data: DataOptions,
    show: OutputOptions,
) -> None:
    """Compare activation functions: values, slopes, extremes, what they do to a normal input.

    Try: ffn activations gelu silu --at -3:3:0.5
    """
    output = show.output()
    data.check({"--at": at, "--std": None if std == 1.0 else std})
    if data.source is not None:
        data.run(list(dict.fromkeys(resolve(name, "NAME")[0] for name in names or IN_USE)), output)
        return
    output.show(answer([TABLE[name].name for name in names or IN_USE], points(at or "-3:3:1"), std))
