"""What `ffn trace` shows of a run, and what it is strict about: --expert, --show, -v, --digits, --keep, --top-units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.cli.common.options import Count
from ffncli.cli.common.parsers import natural, positive
from ffncli.errors import ExitCode, FFNError

if TYPE_CHECKING:
    from ffncli.run.trace.question import Question
    from ffncli.show.output import Output

_insight = partial(typer.Option, rich_help_panel="Insight")


@dataclass(frozen=True)
class ViewOptions:
    """--expert, --show, --verbose, --digits and --keep."""

    expert: Annotated[
        str | None, typer.Option("--expert", metavar="I,J|all", help="Show the steps inside experts.")
    ] = None
    show: Annotated[str | None, typer.Option("--show", metavar="N|all", help="Values shown per axis, default 8.")] = (
        None
    )
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="With --unembed: the steps too.")] = False
    digits: Annotated[
        int, typer.Option("--digits", metavar="N", parser=natural("--digits", 17), help="Digits shown.")
    ] = 4

    keep: Annotated[
        bool, typer.Option("--keep", help="Keep every intermediate in memory to the end, not the two largest alone.")
    ] = False

    def values(self) -> int | None:
        """Values per axis, None for all."""
        return None if self.show == "all" else positive("--show")("8" if self.show is None else self.show)

    def steps(self, question: Question) -> bool:
        """Whether the page has the steps: --unembed asks for tokens, unless an option that shapes a step is there."""
        shaped = self.verbose or self.show is not None or self.expert is not None or question.top_units is not None
        return shaped or not question.unembed

    def kept(self) -> frozenset[str] | None:
        """The steps whose whole tensors stay: every one (None), or none beyond what the answer needs."""
        return None if self.keep else frozenset()


@dataclass(frozen=True)
class InsightOptions:
    """--top-units and --fail-on-nonfinite."""

    top_units: Annotated[
        Count,
        _insight("--top-units", metavar="K", parser=natural("--top-units", 1000),
                 help="Show the K largest-norm and most active hidden units."),
    ] = None  # fmt: skip
    fail_on_nonfinite: Annotated[
        bool, _insight("--fail-on-nonfinite", help="Exit with 1 where input, weights or steps have NaN or Inf.")
    ] = False

    def judge(self, not_finite: Sequence[str], output: Output) -> None:
        """After the answer: a note each, or, where it was asked for, FFNError (exit 1) with all of them."""
        if not_finite and self.fail_on_nonfinite:
            raise FFNError(f"not finite: {'; '.join(not_finite)}", code=ExitCode.FAILED)
        output.notes(*not_finite)
