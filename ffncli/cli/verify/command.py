"""`ffn verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from ffncli.cli.common.options import DimensionOptions, OutputOptions, PlaceOptions, Source, TokenOptions
from ffncli.cli.common.parsers import from_zero
from ffncli.cli.common.spread import spread
from ffncli.cli.verify.page import answer, failure
from ffncli.run.verify.call import verify

_Texts = list[str] | None
Checks = Annotated[
    _Texts, typer.Option("--check", metavar="NAME,...", help="Only these: module, tokens, layout, kernels, ...")
]
Kernels = Annotated[
    _Texts,
    typer.Option(
        "--kernel", metavar="NAME,...", help="eager, packed, compiled, ..., or yours: [label=]file.py:name (runs it)."
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="X",
        parser=from_zero("--tolerance"),
        help="Relative error that passes; default: dtype's.",
    ),
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show every row of every check, and its figures.")]
Against = Annotated[
    str | None, typer.Option("--against", metavar="SOURCE", help="The same layer of this model is the reference.")
]


@spread
def command(
    *,
    source: Source = None,
    checks: Checks = None,
    kernels: Kernels = None,
    against: Against = None,
    tolerance: Tolerance = None,
    verbose: Verbose = False,
    place: PlaceOptions,
    tokens: TokenOptions,
    dimensions: DimensionOptions,
    show: OutputOptions,
) -> None:
    """Prove that ways of computing a block agree, and how a file was read; exit 1 where they do not.

    Try: ffn verify 512x2048:swiglu, ffn verify ./my-model --layer 1, ffn verify --kernel mine.py:mlp
    """
    output = show.output()
    verdict = verify(
        source, **vars(place), **vars(tokens), check=checks or (), kernel=kernels or (), against=against,
        tolerance=tolerance, **vars(dimensions.dimensions()),
    )  # fmt: skip
    output.notes(*verdict.notes)
    output.show(answer(verdict, verbose))
    if verdict.failed:
        raise failure(verdict)
