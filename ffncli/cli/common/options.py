"""Options that several commands share: --format and -o, which determine how and where to write; --plot; and --prompt,
with the rules for one prompt and for many."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ffncli.errors import ExitCode, FFNError, option, shown
from ffncli.options import shared
from ffncli.options.conflicts import Conflict
from ffncli.options.opt import Opt, Options
from ffncli.run.ranks.environment import follows
from ffncli.show.color import ColorChoice, color_choice
from ffncli.show.output import Output
from ffncli.show.parts import Answer
from ffncli.show.plots.plot import IntervalPlot, Plot
from ffncli.system.files import check_writable, open_to_read


def format_of(path: str | None, hint: str) -> str | None:
    """Return the format that the suffix of `-o` stands for; None if there is no suffix, or for .txt.

    Raises FFNError for any other suffix: a file with such a name should not contain plain text.
    """
    suffix = os.path.splitext(path or "")[1].lower()
    if suffix in ("", ".txt"):
        return None
    if suffix not in (".json", ".csv", ".md", ".html", ".htm"):
        raise FFNError(f"-o {shown(path)}: cannot write {suffix} files", hint)
    return "html" if suffix == ".htm" else suffix[1:]


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """--format and related options."""

    suffix_hint: ClassVar = "use .html, .json, .csv, .md, .txt or no suffix"
    format: Annotated[
        str | None,
        Opt("--format", metavar="NAME", completes="formats", help="table, json, csv, md or html. [default: table]"),
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
    # main.py reads this option directly from argv
    debug: Annotated[bool, Opt("--debug", help="Print the traceback of an error.")] = False

    def output(self) -> Output:
        """Return the output for these options. Raises FFNError if they contradict each other, or if the file exists."""
        formats = [name for name, on in (("json", self.json), ("csv", self.csv)) if on]
        formats += [self.format] if self.format is not None else []
        if len(set(formats)) > 1:
            raise FFNError(f"--format: {' and '.join(dict.fromkeys(formats))} contradict each other", "give one")
        implied = format_of(self.out, self.suffix_hint)
        if formats and implied and formats[0] != implied:
            raise FFNError(
                f"-o {shown(self.out)} contradicts --format {formats[0]}", f"a .{implied} file is written as {implied}"
            )
        chosen: Any = formats[0] if formats else implied or "table"
        path = None if self.out is None else os.path.expanduser(self.out)
        if follows():
            return Output(chosen, quiet=True)  # only rank 0 writes
        return Output(chosen, path, self.force, self.color_choice(), self.quiet)

    def color_choice(self) -> ColorChoice:
        """Return when to use colours."""
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
        """Whether a plot was requested, on the page or in a file."""
        return self.plot or self.plot_file is not None

    @property
    def path(self) -> str:
        """The file to draw into; "" if there is none."""
        return os.path.expanduser(self.plot_file or "")

    def check(self, force: bool, out: str | None = None) -> None:
        """Raise FFNError for wrong options before anything is computed.

        Wrong options are an unknown suffix, a file that may not be written, the same file as -o (`out`), and a plot
        file if matplotlib is missing (exit 3).
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
        """Return `page` with the plots appended if --plot is given. Also write the plots, followed by those in
        `file_only`, to --plot-file, and print a note about the file.

        Raises FFNError (exit 3) if the file cannot be written.
        """
        if self.plot_file is not None:
            from ffncli.show.plots.image import write

            write(Path(self.path), [*plots, *file_only])
            output.wrote(self.plot_file)
        if output.format == "html":
            return replace(page, parts=[*page.parts, *plots])
        if not self.plot:
            return page
        if output.format in ("json", "csv"):
            output.note(f"--plot draws no picture in {output.format.upper()}, which contains only the values")
        return replace(page, parts=[*page.parts, *plots])


# --- the prompt -------------------------------------------------------------------------------------------------------

_MOST_BYTES = 10_000_000  # maximum size of a prompt in a file, larger than any model's context

CORPUS = (
    "prompts",
    "batch_size",
    "max_tokens",
    "limit",
    "skip_special",
    "top_contexts",
    "outliers",
    "similar",
    "resume",
)
ONE_OR_MANY = (
    Conflict("prompt", contradicts="prompts", why="give one"),
    Conflict(" ".join(CORPUS[1:]), needs="prompts prompt"),
)


def prompt_text(text: str) -> str:
    """Return the prompt of `--prompt`: `-` stands for standard input, `@FILE` for the contents of a file (without the
    final newline).

    Raises FFNError for a file that cannot be read or is not UTF-8 text.
    """
    if text != "-" and not text.startswith("@"):
        return text
    where = "standard input" if text == "-" else shown(text[1:])
    try:
        if text == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open_to_read(Path(os.path.expanduser(text[1:])), pipe=True) as file:
                data = file.read(_MOST_BYTES + 1)
        read = data[:_MOST_BYTES].decode(errors="strict" if len(data) <= _MOST_BYTES else "ignore")
    except (OSError, AttributeError, ValueError) as error:  # stdin is closed (None has no buffer), or not UTF-8
        why = error.strerror if isinstance(error, OSError) else "it is closed" if not sys.stdin else "not UTF-8 text"
        hint = "--prompt @FILE reads a file; for a prompt that starts with @, pipe it to --prompt -"
        raise FFNError(f"--prompt: cannot read {where}: {why}", "" if text == "-" else hint) from None
    if len(data) > _MOST_BYTES:
        raise FFNError(f"--prompt: {where} is longer than {_MOST_BYTES:,} bytes")
    return read.removesuffix("\n").removesuffix("\r")


def lines_note(typed: str, text: str) -> tuple[str, ...]:
    """Return a note if a file or standard input has several lines, which are read as a single prompt."""
    lines = len(text.splitlines()) if text != typed else 0
    return (f"{option('prompt', typed)}: its {lines:,} lines are read as one prompt",) if lines > 1 else ()


def corpus_size(prompts: shared.Path | Sequence[str] | None) -> int:
    """Return the corpus's size in bytes, for a progress bar; 0 if it is unknown."""
    if prompts is None or isinstance(prompts, str | os.PathLike):
        try:
            return os.path.getsize(os.path.expanduser(prompts or "-")) if prompts != "-" else 0
        except OSError:  # reading it raises a better error later
            return 0
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in prompts)
