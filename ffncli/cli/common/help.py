"""The two help pages of a command: `-h` shows the options for daily use, `--help` shows all options in groups."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from inspect import cleandoc
from typing import Annotated, Any

import typer

from ffncli.options.opt import COMPUTE, HELP, INPUT, OUTPUT, SOURCE
from ffncli.show.color import ColorChoice, Paint, color_choice, is_colored, painted, unpainted
from ffncli.show.text import encodable

_FIRST, _LAST = (SOURCE, INPUT), (COMPUTE, OUTPUT, HELP)  # a command's own groups come between _FIRST and _LAST
_WIDEST, _NAMES = 100, 28  # columns of a line; columns of an option's names, beyond which the text starts on a new line
_NAME = re.compile(r"(?<![\w-])--?[\w\[][\w\]-]*")  # examples: -n, --tokens, --[no-]bias
_Row = tuple[str, str]


class Daily(str):
    """The help group of an option for daily use."""


def help_page(command: Any, program: str, whole: bool, columns: int, paint: Paint) -> str:
    """Return the help page of a Typer command; `program` is the command's name, `paint` adds colours."""
    page = [f"{paint('Usage:', 'bold')} {_usage(command, program)}", ""]
    summary, examples = _described(command.help)
    page += [*_wrapped(summary, columns), ""]
    sections = dict(_sections(command, whole))
    widest = min(_NAMES, max(len(names) for rows in sections.values() for names, _ in rows))
    blocks = [
        (title, [line for row in rows for line in _lines(row, widest, columns, paint)])
        for title, rows in sections.items()
    ]
    if examples:
        blocks.insert(0 if not whole else len(blocks), ("Examples", [f"  {line}" for line in examples]))
    for title, lines in blocks:
        page += [paint(f"{title}:", "bold"), *lines, ""]
    return "\n".join(page).rstrip() + "\n"


def _usage(command: Any, program: str) -> str:
    """Return a usage line such as `ffn trace [SOURCE] [OPTIONS]`."""
    words = [program]
    for argument in _of_kind(command, "argument"):
        name = argument.metavar + (" ..." if argument.nargs == -1 else "")
        words.append(name if argument.required else f"[{name}]")
    return " ".join([*words, "[OPTIONS]", *(["COMMAND ..."] if hasattr(command, "commands") else [])])


def _described(docstring: str | None) -> tuple[str, list[str]]:
    """Split a command's docstring into its description and the lines below `Examples:`."""
    summary, _, examples = cleandoc(docstring or "").partition("\n\nExamples:\n")
    return " ".join(summary.split()), [line.strip() for line in examples.splitlines() if line.strip()]


def _sections(command: Any, whole: bool) -> Iterator[tuple[str, list[_Row]]]:
    """Yield titles and rows: commands, arguments, then all options in groups if `whole`, else those for daily use."""
    if commands := getattr(command, "commands", None):
        yield "Commands", [(name, sub.short_help) for name, sub in commands.items()]
    if arguments := _of_kind(command, "argument"):
        yield "Arguments", [(argument.metavar, argument.help or "") for argument in arguments]
    options = _of_kind(command, "option")
    groups = list(dict.fromkeys(str(o.rich_help_panel or OUTPUT) for o in options))
    order = [*_FIRST, *(group for group in groups if group not in (*_FIRST, *_LAST)), *_LAST]
    listed = [option for option in options if whole or isinstance(option.rich_help_panel, Daily)]
    rows = {group: [_row(o) for o in listed if (o.rich_help_panel or OUTPUT) == group] for group in order}
    if whole:
        yield from ((group, rows[group]) for group in order if rows[group])
    else:
        yield "Options", [row for group in order for row in rows[group]]


def _of_kind(command: Any, kind: str) -> list[Any]:
    return [param for param in command.params if param.param_type_name == kind and not param.hidden]


def _row(param: Any) -> _Row:
    """Return an option's names with its metavar, and its help text with the default."""
    *short, long = sorted(param.opts, key=len)
    if param.secondary_opts:
        opposite = param.secondary_opts[0]
        long = f"--[no-]{long[2:]}" if opposite == f"--no-{long[2:]}" else f"{long}, {opposite}"
    indent = "" if short or len(long) == 2 else "    "
    names = indent + ", ".join([*short, long]) + (f" {param.metavar}" if param.metavar and not param.is_flag else "")
    default = param.default
    shown = f" [default: {default}]" if default is not None and not isinstance(default, bool) else ""
    return names, (param.help or "") + shown


def _lines(row: _Row, widest: int, columns: int, paint: Paint) -> list[str]:
    """Return a row as lines; if the names are long, the help text starts below them."""
    names, text = row
    wrapped = _wrapped(text, columns - widest - 4) or [""]
    styled = _NAME.sub(lambda match: paint(match[0], "cyan"), names) if "-" in names else paint(names, "cyan")
    if len(names) > widest:
        wrapped.insert(0, "")
    first = "  " + styled + " " * (widest - len(names) + 2) + wrapped[0]
    return [first.rstrip(), *(" " * (widest + 4) + line for line in wrapped[1:])]


def _wrapped(text: str, columns: int) -> list[str]:
    """Break `text` into lines at spaces, but not inside `[default: 1]`."""
    # textwrap does not break at a no-break space; hyphens stay, since options must be copied whole.
    lines = textwrap.wrap(text.replace("[default: ", "[default:\xa0"), columns, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def print_help(command: Any, program: str, whole: bool, choice: ColorChoice = "auto", stream: Any = None) -> None:
    """Write a command's help, at most 100 columns wide; exactly 100 in a pipe."""
    stream = stream or sys.stdout
    columns = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    paint = painted if is_colored(stream, choice) else unpainted
    stream.write(encodable(help_page(command, program, whole, columns, paint), stream.encoding or "utf-8"))


# --- the options themselves -------------------------------------------------------------------------------------------


def _short(ctx: typer.Context, value: bool) -> None:
    _print(ctx, value, whole=False)


def _whole(ctx: typer.Context, value: bool) -> None:
    _print(ctx, value, whole=True)


def _print(ctx: typer.Context, value: bool, whole: bool) -> None:
    if value and not ctx.resilient_parsing:
        choice = color_choice("never" if ctx.params.get("no_color") else ctx.params.get("color") or "auto")
        print_help(ctx.command, ctx.command_path, whole, choice)
        raise typer.Exit


_eager = partial(typer.Option, is_eager=True, expose_value=False)
HELP_OPTIONS: dict[str, Any] = {
    "short_help": Annotated[
        bool, _eager("-h", rich_help_panel=HELP, callback=_short, help="Show the most common options.")
    ],
    "whole_help": Annotated[
        bool, _eager("--help", rich_help_panel=Daily(HELP), callback=_whole, help="Show all options, in groups.")
    ],
}
