"""How an option is declared: with its group in `--help`, and whether `-h` shows it too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer

from ffncli.cli.common.help import Daily

SOURCE, INPUT, COMPUTE, OUTPUT, HELP = "Source and dimensions", "Input", "Compute", "Output", "Help"


def option(
    group: str,
    *names: str,
    daily: bool = False,
    values: Callable[[], Iterable[str]] | None = None,
    **settings: Any,
) -> Any:
    """A typer.Option in `group`. `values` are what a shell completes it with; they are computed when it asks."""
    panel = Daily(group) if daily else group
    completion = None if values is None else lambda: list(values())
    return typer.Option(*names, rich_help_panel=panel, autocompletion=completion, **settings)
