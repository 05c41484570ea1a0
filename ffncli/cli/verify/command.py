"""`ffn verify`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ffncli.cli.common import values
from ffncli.cli.common.load_options import LoadOptions
from ffncli.cli.common.option import OUTPUT, SOURCE, option
from ffncli.cli.common.options import DimensionOptions, OutputOptions, PlaceOptions, Source, TokenOptions
from ffncli.cli.common.parsers import from_zero
from ffncli.cli.common.spread import spread
from ffncli.cli.verify.page import answer, failure
from ffncli.run.verify.call import verify
from ffncli.run.verify.names import CHECK_STATEMENTS

_verify = partial(option, "What to verify")
_Texts = list[str] | None
Checks = Annotated[
    _Texts,
    _verify(
        "--check",
        metavar="NAME,...",
        daily=True,
        values=values.checks,
        help=f"Run only these checks: {', '.join(CHECK_STATEMENTS)}. [default: all]",
    ),
]
Kernels = Annotated[
    _Texts,
    _verify(
        "-k",
        "--kernel",
        metavar="NAME,...",
        daily=True,
        values=values.kernels,
        help="Kernels to check: eager, packed, ..., all, or your [label=]file.py:name (runs that file);"
        " main:file.py:name is the file at a git commit.",
    ),
]
Tolerance = Annotated[
    float | None,
    _verify(
        "--tolerance",
        metavar="X",
        parser=from_zero("--tolerance"),
        daily=True,
        help="Largest relative error that passes. [default: by dtype]",
    ),
]
Verbose = Annotated[
    bool, option(OUTPUT, "-v", "--verbose", daily=True, help="Show every row of every check, and its figures.")
]
Against = Annotated[
    str | None,
    option(
        SOURCE,
        "--against",
        metavar="SOURCE",
        daily=True,
        values=values.models,
        help="Compare with the same layer of this model.",
    ),
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
    load_limit: LoadOptions,
    show: OutputOptions,
) -> None:
    """Prove that ways of computing a block agree, and that a file was read correctly; exit 1 if not.

    Examples:
      ffn verify 512x2048:swiglu               # every check
      ffn verify ./my-model -l 1               # a checkpoint, and how it was read
      ffn verify 64x256:swiglu -k mine.py:mlp  # your kernel
      ffn verify 64x256:gelu --check module,kernels --json
    """
    output = show.output()
    load_limit.apply()
    verdict = verify(
        source, **vars(place), **vars(tokens), check=checks or (), kernel=kernels or (), against=against,
        tolerance=tolerance, **vars(dimensions.dimensions()),
    )  # fmt: skip
    output.notes(*verdict.notes)
    output.show(answer(verdict, verbose))
    if verdict.failed:
        raise failure(verdict)
