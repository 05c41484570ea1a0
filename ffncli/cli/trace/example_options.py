"""--example and --vocab: the founding texts' blocks with their facts, and the final layer after a block."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ffncli.cli.common import values
from ffncli.cli.common.option import SOURCE, option
from ffncli.cli.common.options import Count, Text
from ffncli.cli.common.parsers import positive, share
from ffncli.dataclass import dataclass
from ffncli.models.examples import EXAMPLES
from ffncli.run.trace.question import TOP_K, TOP_P

_final = partial(option, "Final layer")


@dataclass(frozen=True)
class ExampleOptions:
    """A text's block, and the final layer over a vocabulary."""

    example: Annotated[
        Text,
        option(
            SOURCE, "--example", metavar="NAME", daily=True, values=values.examples,
            help=f"Built-in block with checked facts: {', '.join(EXAMPLES)}.",
        ),
    ] = None  # fmt: skip
    vocab: Annotated[
        Count,
        _final(
            "--vocab", metavar="N", parser=positive("--vocab"),
            help="Add a final layer over N tokens: logits and probabilities.",
        ),
    ] = None  # fmt: skip
    sample_top_k: Annotated[
        Count,
        _final(
            "--sample-top-k", metavar="N", parser=positive("--sample-top-k"),
            help=f"Mark the N most probable tokens. [default: {TOP_K}]",
        ),
    ] = None  # fmt: skip
    sample_top_p: Annotated[
        float | None,
        _final(
            "--sample-top-p",
            metavar="P",
            parser=share("--sample-top-p"),
            help=f"Mark the most probable tokens up to a total of P. [default: {TOP_P}]",
        ),
    ] = None
