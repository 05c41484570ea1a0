"""--format, -o and related options, which every command has, and the sink that they make."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

from ffncli.errors import FFNError, shown
from ffncli.options import shared
from ffncli.options.opt import Opt, Options
from ffncli.run.ranks.environment import follows
from ffncli.show.color import ColorChoice, color_choice
from ffncli.show.output import Output


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
