"""--set and --ablate of `ffn trace`: what if a weight were another, or a part of the block were gone."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ffncli.cli.common.option import option
from ffncli.dataclass import dataclass

_change = partial(option, "What if")


@dataclass(frozen=True)
class ChangeOptions:
    """--set and --ablate."""

    set: Annotated[
        list[str] | None,
        _change("--set", metavar="W[i,j]=VALUE",
                help="Set a weight, as the formula has it, and show what changes at each step; repeatable."),
    ] = None  # fmt: skip
    ablate: Annotated[
        list[str] | None,
        _change("--ablate", metavar="PART",
                help="Take out unit:358, unit:7:3 (of expert 7), expert:5 or gate (act := 1); show what changes."),
    ] = None  # fmt: skip
