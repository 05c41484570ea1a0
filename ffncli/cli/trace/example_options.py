"""--example and --vocab: the founding texts' blocks with their facts, and the final layer behind a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ffncli.cli.common.options import Count, Text
from ffncli.cli.common.parsers import positive, share
from ffncli.models.examples import EXAMPLES
from ffncli.run.trace.question import TOP_K, TOP_P

_example = partial(typer.Option, rich_help_panel="Texts and final layer")


@dataclass(frozen=True)
class ExampleOptions:
    """A text's block, and what follows a block over a vocabulary."""

    example: Annotated[
        Text, _example("--example", metavar="NAME", help=f"A text's block and facts: {', '.join(EXAMPLES)}.")
    ] = None
    vocab: Annotated[
        Count, _example("--vocab", metavar="V", parser=positive("--vocab"), help="Final layer: logits and probs.")
    ] = None
    sample_top_k: Annotated[
        Count,
        _example(
            "--sample-top-k", metavar="K", parser=positive("--sample-top-k"),
            help=f"Mark the K most probable, default {TOP_K}.",
        ),
    ] = None  # fmt: skip
    sample_top_p: Annotated[
        float | None,
        _example(
            "--sample-top-p",
            metavar="P",
            parser=share("--sample-top-p"),
            help=f"Mark the likeliest that make up P, default {TOP_P}.",
        ),
    ] = None
