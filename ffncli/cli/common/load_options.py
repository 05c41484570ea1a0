"""--load-time, of commands that load a user's Python file."""

from __future__ import annotations

from typing import Annotated

from ffncli.cli.common.option import SOURCE, option
from ffncli.cli.common.parsers import duration
from ffncli.dataclass import dataclass
from ffncli.run.user.time_limit import set_load_time


@dataclass(frozen=True)
class LoadOptions:
    """--load-time."""

    load_time: Annotated[
        float | None,
        option(SOURCE, "--load-time", metavar="TIME", parser=duration("--load-time"),
               help="Time limit for loading a Python file of yours. [default: 3m]"),
    ] = None  # fmt: skip

    def apply(self) -> None:
        """Set the limit for the rest of the command."""
        set_load_time(self.load_time)
