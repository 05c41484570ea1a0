"""`ffn report`."""

from dataclasses import asdict, replace
from typing import Annotated

from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.options.opt import Opt
from ffncli.pages.call import Report, ReportQuestion, write_report
from ffncli.show.parts import Answer, Line, Table

# -o names the page itself here, not a copy of the answer
_Page = Annotated[
    str | None,
    Opt(
        "-o", "--output", metavar="FILE.html", daily=True,
        help="The page to write, or a .json for Perfetto. [default: report.html]",
    ),
]  # fmt: skip


@spread
def command(*, question: ReportQuestion, out: _Page = None, show: OutputOptions) -> None:
    """Write an HTML page from results, saved traces, comparisons and certificates; it opens from disk and fetches
    nothing.

    Examples:
      ffn report run.csv                               # writes report.html
      ffn report before.csv after.csv -o change.html   # with a comparison
      ffn report trace.safetensors -o trace.html       # from ffn trace --save
      ffn report steps.csv -o steps.json               # --by-step, for Perfetto
    """
    output = replace(show, out=None).output()
    report = write_report(replace(question, output=out or question.output))
    output.show(answer(report))
    output.wrote(report.path)


def answer(report: Report) -> Answer:
    """Show the page's sections and size."""
    what = (
        f"{len(report.sections)} section{'s' if len(report.sections) > 1 else ''}"
        if report.sections
        else "a trace of events"
    )
    line = Line(f"{what}, {report.bytes / 1000:,.0f} kB")
    rows = Table(("section",), [(title,) for title in report.sections])
    return Answer(
        "report", asdict(report), rows, [line], {"bytes": "size of the page, which contains everything that it shows"}
    )
