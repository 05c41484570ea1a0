"""`ffn merge`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from ffncli.cli.common.option import option
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError
from ffncli.options.opt import Opt
from ffncli.show.output import Output

_merging = partial(option, "Merging")

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE.csv", help="Results of ffn bench, or of ffn merge; other files next to them are skipped."
    ),
]
AllowMismatch = Annotated[
    bool, _merging("--allow-mismatch", help="Merge results of different versions of ffncli or torch.")
]


@dataclass(frozen=True, kw_only=True)
class MergedOutputOptions(OutputOptions):
    """The same, with the merged result in the place of a copy of the page."""

    out: Annotated[
        str | None,
        Opt(
            "-o", "--output", metavar="FILE.csv", daily=True,
            help="The merged result; its rounds and its grid are written next to it.",
        ),
    ] = None  # fmt: skip

    def output(self) -> Output:
        """The sink for the page."""
        return OutputOptions.output(replace(self, out=None))


@spread
def command(*, files: Files, allow_mismatch: AllowMismatch = False, show: MergedOutputOptions) -> None:
    """Merge results of ffn bench into one, such as the parts of a grid that ran on several machines. Exit 1 if cases of
    the grid are missing: the others are merged.

    Examples:
      ffn merge part-1.csv part-2.csv -o all.csv          # or part-*.csv
      ffn merge part-1.csv part-2.csv -o all.csv --force  # replaces all.csv
      ffn merge all.csv part-2.csv -o new.csv             # what was merged too
      ffn merge part-1.csv part-2.csv -o a.csv --json     # for a script
    """
    from ffncli.bench.results.merge import merge
    from ffncli.cli.merge.page import answer, missing_text

    output = show.output()
    if show.out is None:
        raise FFNError("Missing option '-o'", "name the merged result: -o all.csv")
    merged = merge(files, show.out, force=show.force, allow_mismatch=allow_mismatch)
    output.notes(*merged.notes)
    output.show(answer(merged))
    if merged.missing:
        raise FFNError(*missing_text(merged), ExitCode.FAILED)
