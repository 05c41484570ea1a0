"""Options of `ffn compare` for results: what fails, and which differences count."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.common.option import option
from ffncli.cli.common.parsers import percentage
from ffncli.dataclass import dataclass

if TYPE_CHECKING:
    from ffncli.bench.judge.comparison_records import Rules

_results = partial(option, "Results of ffn bench")


@dataclass(frozen=True)
class CompareResultOptions:
    """--fail-if-slower, --margin, --allow-mismatch and --strict."""

    fail_if_slower: Annotated[
        float | None,
        _results(
            "--fail-if-slower", metavar="X%", parser=percentage("--fail-if-slower", zero=True), daily=True,
            help="Exit 1 if a kernel is certainly slower by more than X%, or no longer correct.",
        ),
    ] = None  # fmt: skip
    margin: Annotated[
        float | None,
        _results(
            "--margin", metavar="X%", parser=percentage("--margin", zero=True), daily=True,
            help="Differences up to X% count as the same. [default: 2%]",
        ),
    ] = None  # fmt: skip
    allow_mismatch: Annotated[
        bool,
        _results(
            "--allow-mismatch",
            daily=True,
            help="Compare results of different machines or versions; then nothing fails.",
        ),
    ] = False
    strict: Annotated[bool, _results("--strict", daily=True, help="Exit 4 if a row is inconclusive.")] = False

    def rules(self) -> Rules:
        """The same for `bench/judge/compare.py`."""
        from ffncli.bench.judge.comparison_records import Rules

        margin = {} if self.margin is None else {"margin": self.margin}
        return Rules(threshold=self.fail_if_slower, allow_mismatch=self.allow_mismatch, **margin)

    def first_set(self) -> str:
        """The first given one of these options; empty if none was."""
        name = next((f.name for f in fields(self) if getattr(self, f.name) != f.default), "")
        return name and "--" + name.replace("_", "-")
