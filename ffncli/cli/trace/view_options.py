"""What `ffn trace` shows of a run, and when it fails: --expert, --show, -v, --digits, --keep, --top-units."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.common.option import option
from ffncli.cli.common.options import Count
from ffncli.cli.common.parsers import natural, positive
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError

if TYPE_CHECKING:
    from ffncli.run.trace.question import Question
    from ffncli.show.output import Output

_view = partial(option, "What to show")


@dataclass(frozen=True)
class ViewOptions:
    """--expert, --show, --verbose, --digits, --heatmap and --keep."""

    expert: Annotated[
        list[str] | None, _view("--expert", metavar="N,...|all", help="Show the steps inside these experts.")
    ] = None
    show: Annotated[
        str | None, _view("--show", metavar="N|all", daily=True, help="Values to show per axis. [default: 8]")
    ] = None
    verbose: Annotated[
        bool,
        _view("-v", "--verbose", help="With --unembed, --promotes, --set, --ablate, --tp, --ep, show the steps too."),
    ] = False
    digits: Annotated[int, _view("--digits", metavar="N", parser=natural("--digits", 17), help="Digits to show.")] = 4

    heatmap: Annotated[bool, _view("--heatmap", help="Show each step as a picture in place of its values.")] = False
    keep: Annotated[bool, _view("--keep", help="Keep every intermediate tensor in memory until the end.")] = False

    def values(self) -> int | None:
        """Values per axis, None for all."""
        return None if self.show == "all" else positive("--show")("8" if self.show is None else self.show)

    def steps(self, question: Question) -> bool:
        """Whether the page has the steps: not where --unembed shows tokens, --promotes units, --tp ranks, and --set or
        --ablate changes, unless an option about steps is given."""
        lens = question.unembed or question.promotes is not None
        steps = self.verbose or self.expert is not None
        steps = steps or (question.top_units is not None and question.promotes is None)
        if question.ranks:
            return steps
        return steps or self.show is not None or not (lens or question.set or question.ablate)

    def kept(self) -> frozenset[str] | None:
        """The steps whose complete tensors are kept: all (None), or only those that the answer needs."""
        return None if self.keep or self.heatmap else frozenset()


@dataclass(frozen=True)
class InsightOptions:
    """--top-units and --fail-on-nonfinite."""

    top_units: Annotated[
        Count,
        _view("--top-units", metavar="N", parser=natural("--top-units", 1000), daily=True,
              help="Show the N largest hidden units of each token, and over all tokens."),
    ] = None  # fmt: skip
    fail_on_nonfinite: Annotated[
        bool, _view("--fail-on-nonfinite", help="Exit 1 if the input, a weight or a step has NaN or Inf.")
    ] = False

    def judge(self, not_finite: Sequence[str], output: Output) -> None:
        """After the answer: a note each, or, if requested, FFNError (exit 1) with all of them."""
        if not_finite and self.fail_on_nonfinite:
            raise FFNError(f"not finite: {'; '.join(not_finite)}", code=ExitCode.FAILED)
        output.notes(*not_finite)
