"""--explain, --terms and --depth of `ffn trace`: which numbers to explain, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ffncli.cli.common.parsers import positive

_explain = partial(typer.Option, rich_help_panel="How a number came about")


@dataclass(frozen=True)
class ExplainOptions:
    """--explain and its kin."""

    explain: Annotated[
        list[str] | None,
        _explain("--explain", metavar="NAME[i,j]", help="Write out how that number came about; repeat for more."),
    ] = None
    terms: Annotated[
        int | None,
        _explain("--terms", metavar="N", parser=positive("--terms"), help="Largest terms written out, default 8."),
    ] = None
    depth: Annotated[
        int | None,
        _explain("--depth", metavar="N", parser=positive("--depth", 99), help="Go on to the largest term's origin."),
    ] = None
