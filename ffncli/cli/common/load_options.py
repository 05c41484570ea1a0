"""--load-time, of commands that load a user's Python file."""

from __future__ import annotations

from dataclasses import dataclass

from ffncli.options import shared
from ffncli.options.opt import Options
from ffncli.run.user.time_limit import set_load_time


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """--load-time."""

    load_time: shared.LoadTime = None

    def apply(self) -> None:
        """Set the limit for the rest of the command."""
        set_load_time(self.load_time)
