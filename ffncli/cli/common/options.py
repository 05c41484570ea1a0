"""Options of every command (--format, -o) with the sink that they make, and those of commands that draw (--plot)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from ffncli.errors import ExitCode, FFNError, option, shown
from ffncli.options import shared
from ffncli.options.opt import Opt, Options
from ffncli.run.ranks.environment import follows
from ffncli.show.color import ColorChoice, color_choice
from ffncli.show.output import Output
from ffncli.show.parts import Answer
from ffncli.show.plots.plot import IntervalPlot, Plot
from ffncli.system.files import check_writable


def format_of(path: str | None) -> str | None:
    """The format that the suffix of `-o` means; None if it means none: no suffix, or .txt.

    Raises FFNError for any other suffix: a file of that name should not contain text.
    """
    suffix = os.path.splitext(path or "")[1].lower()
    if suffix in ("", ".txt"):
        return None
    if suffix not in (".json", ".csv", ".md"):
        raise FFNError(f"-o {shown(path)}: cannot write {suffix} files", "use .json, .csv, .md, .txt or no suffix")
    return suffix[1:]


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """--format and related options."""

    format: Annotated[
        str | None,
        Opt("--format", metavar="NAME", completes="formats", help="table, json, csv or md. [default: table]"),
    ] = None
    json: Annotated[bool, Opt("--json", daily=True, help="Same as --format json.")] = False
    csv: Annotated[bool, Opt("--csv", help="Same as --format csv.")] = False
    out: shared.Output = None
    force: shared.Force = False
    color: Annotated[
        str | None,
        Opt("--color", metavar="WHEN", eager=True, completes="colors",
            help="Colours: auto (in a terminal), always or never. [default: auto]"),
    ] = None  # fmt: skip
    no_color: Annotated[bool, Opt("--no-color", eager=True, help="Same as --color never.")] = False
    quiet: Annotated[bool, Opt("-q", "--quiet", help="Print no notes on stderr.")] = False
    debug: Annotated[bool, Opt("--debug", help="Print the traceback of an error.")] = False  # main.py reads argv

    def output(self) -> Output:
        """The sink for these options; a contradiction and an existing file are refused."""
        formats = [name for name, on in (("json", self.json), ("csv", self.csv)) if on]
        formats += [self.format] if self.format is not None else []
        if len(set(formats)) > 1:
            raise FFNError(f"--format: {' and '.join(dict.fromkeys(formats))} contradict each other", "give one")
        implied = format_of(self.out)
        if formats and implied and formats[0] != implied:
            raise FFNError(f"-o {shown(self.out)} contradicts --format {formats[0]}", f"-o of .{implied} is {implied}")
        chosen: Any = formats[0] if formats else implied or "table"
        path = None if self.out is None else os.path.expanduser(self.out)
        if follows():
            return Output(chosen, quiet=True)  # rank 0 writes
        return Output(chosen, path, self.force, self.color_choice(), self.quiet)

    def color_choice(self) -> ColorChoice:
        """When to use colours."""
        choice = color_choice(self.color or "auto")
        if self.no_color and choice == "always":
            raise FFNError("--no-color contradicts --color always", "give one")
        return "never" if self.no_color else choice


@dataclass(frozen=True, kw_only=True)
class PlotOptions(Options):
    """--plot and --plot-file."""

    plot: Annotated[bool, Opt("--plot", daily=True, help="Draw the curves below the table.")] = False
    plot_file: Annotated[
        str | None,
        Opt("--plot-file", metavar="FILE", help="Draw the curves into FILE.svg, .png or .pdf (needs matplotlib)."),
    ] = None

    @property
    def wanted(self) -> bool:
        """Whether any picture was requested."""
        return self.plot or self.plot_file is not None

    @property
    def path(self) -> str:
        """The file to draw into; empty if there is none."""
        return os.path.expanduser(self.plot_file or "")

    def check(self, force: bool, out: str | None = None) -> None:
        """Raise FFNError for wrong options before anything is computed.

        These are an unknown suffix, a file that may not be written, the file of -o (`out`), and matplotlib
        missing (exit 3).
        """
        if self.plot_file is None:
            return
        from ffncli.show.plots.image import NEEDS, SUFFIXES

        if Path(self.path).suffix.lower() not in SUFFIXES:
            raise FFNError(f"--plot-file {shown(self.plot_file)}: the name must end in one of {', '.join(SUFFIXES)}")
        check_writable(self.path, force, option("plot_file"))
        if out is not None and os.path.realpath(os.path.expanduser(out)) == os.path.realpath(self.path):
            raise FFNError("--plot-file and -o name the same file", "give two names")
        if find_spec("matplotlib") is None:
            raise FFNError("--plot-file needs matplotlib", NEEDS, ExitCode.ENVIRONMENT)

    def extended(
        self, page: Answer, plots: Sequence[Plot], output: Output, file_only: Sequence[IntervalPlot] = ()
    ) -> Answer:
        """`page` with the plots at its end if --plot is given; writes them to --plot-file and notes that, followed by
        those that are `file_only`.

        Raises FFNError (exit 3) if the file cannot be written.
        """
        if self.plot_file is not None:
            from ffncli.show.plots.image import write

            write(Path(self.path), [*plots, *file_only])
            output.note(f"wrote {self.plot_file}")
        if not self.plot:
            return page
        if output.format in ("json", "csv"):
            output.note(f"--plot is a picture: {output.format.upper()} has only the numbers")
        return replace(page, parts=[*page.parts, *plots])
