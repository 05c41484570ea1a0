"""`ffn report`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from ffncli.cli.common.option import option
from ffncli.cli.common.options import OutputOptions, Text
from ffncli.cli.common.spread import spread
from ffncli.dataclass import dataclass
from ffncli.options.opt import Opt
from ffncli.show.output import Output

_page = partial(option, "Page")

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
        help="Results of ffn bench (.csv), saved traces (ffn trace --save), or JSON of ffn verify, ffn compare, ffn "
        "experts and ffn trace --layer all.",
    ),
]
Title = Annotated[
    Text, _page("--title", metavar="WORDS", daily=True, help="The page's title. [default: the files' names]")
]


@dataclass(frozen=True, kw_only=True)
class PageOptions(OutputOptions):
    """The same, with the page in the place of a copy of the answer."""

    out: Annotated[
        str | None,
        Opt(
            "-o", "--output", metavar="FILE.html", daily=True,
            help="The page to write, or a .json for Perfetto. [default: report.html]",
        ),
    ] = None  # fmt: skip

    def output(self) -> Output:
        """The sink for what was written."""
        return OutputOptions.output(replace(self, out=None))


@spread
def command(*, files: Files, title: Title = None, show: PageOptions) -> None:
    """Write a page of HTML from results, saved traces, comparisons and certificates; it opens from disk and loads
    nothing.

    Examples:
      ffn report run.csv                               # writes report.html
      ffn report before.csv after.csv -o change.html   # compared first
      ffn report trace.safetensors -o trace.html       # from ffn trace --save
      ffn report steps.csv -o steps.json               # of --by-step, for Perfetto
    """
    from ffncli.cli.report.page import answer
    from ffncli.pages.call import report

    output = show.output()
    output.show(answer(report(files, show.out or "report.html", title=title, force=show.force)))
