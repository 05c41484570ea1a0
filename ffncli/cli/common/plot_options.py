"""--plot and --plot-file: curves on the terminal, curves in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from ffncli.errors import ExitCode, FFNError, option, shown
from ffncli.options.opt import Opt, Options
from ffncli.show.output import Output
from ffncli.show.parts import Answer
from ffncli.show.plots.plot import IntervalPlot, Plot
from ffncli.system.files import check_writable


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
