"""`ffn` without a command: --version, --debug and the help options; and the class of all commands.

In an `OnceCommand` repeated list options accumulate, and repeating any other option is an error, so that no value is
silently dropped.
"""

import sys
from collections import Counter
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from ffncli.cli.common.help import Daily
from ffncli.cli.common.spread import spread
from ffncli.errors import FFNError
from ffncli.options.opt import HELP, Opt
from ffncli.version import __version__


def _version(wanted: bool) -> None:
    """Print the versions of ffn and of the packages that affect its results, without importing torch."""
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "missing"
    python = ".".join(map(str, sys.version_info[:3]))
    sys.stdout.write(f"ffn {__version__} (torch {torch}, Python {python})\n")
    raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version", rich_help_panel=Daily(HELP), callback=_version, is_eager=True,
        help="Show the versions of ffn, torch and Python.",
    ),
]  # fmt: skip


# main.py reads --debug directly from the command line
_Debug = Annotated[bool, Opt("--debug", help="Print the traceback of an error.")]


@spread
def root(*, version: _Version = False, debug: _Debug = False) -> None:
    """Inspect the transformer's feed-forward network (FFN).

    Examples:
      ffn explain                         # new here? start with this
      ffn trace 4x8:relu --input 1,2,3,4  # every value of a small block
      ffn params llama-2-7b mixtral-8x7b  # what models cost, side by side
      ffn trace -h                        # the options of a command
    """


class OnceCommand(TyperCommand):
    """A command in which only options of type `list[...]`, and flags that cannot contradict themselves, may repeat."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does. Raises FFNError if an option that takes one value is given several."""
        if not ctx.resilient_parsing:  # skipped in completion, where the line is unfinished
            # A separate parse, because Typer's keeps only the last value and would silently drop the first.
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            for option, times in Counter(order).items():
                if times > 1 and isinstance(option, TyperOption) and not _may_repeat(option):
                    long = [name for name in option.opts if name.startswith("--")]
                    typed = {word.partition("=")[0] for word in args}
                    name = next((name for name in long if name in typed), long[0])
                    raise FFNError(f"{'/'.join([name, *option.secondary_opts])} takes one value, got {times}")
        return super().parse_args(ctx, args)


def _may_repeat(option: TyperOption) -> bool:
    """Return True for a list option, or a flag that can only be switched on."""
    return option.multiple or (option.is_flag and not option.secondary_opts)
