"""--explain, --terms and --depth of `ffn trace`: which numbers to explain, and how far."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ffncli.cli.common.option import option
from ffncli.cli.common.parsers import positive
from ffncli.dataclass import dataclass

_explain = partial(option, "How a number was computed")


@dataclass(frozen=True)
class ExplainOptions:
    """--explain and related options."""

    explain: Annotated[
        list[str] | None,
        _explain("--explain", metavar="NAME[i,j]", daily=True, help="Show how this number was computed; repeatable."),
    ] = None
    terms: Annotated[
        int | None,
        _explain("--terms", metavar="N", parser=positive("--terms"), help="Terms to show, largest first. [default: 8]"),
    ] = None
    depth: Annotated[
        int | None,
        _explain(
            "--depth",
            metavar="N",
            parser=positive("--depth", 99),
            help="Follow the largest term back N steps. [default: 1]",
        ),
    ] = None
