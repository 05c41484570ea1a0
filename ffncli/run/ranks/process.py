"""How a process behaves as one of several ranks: rank 0 prints, and of an error that several have, one line is seen."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from ffncli.run.ranks.environment import Place
from ffncli.system.child import end_with_parent
from ffncli.system.files import remove_process_folders

_HEAD_START = 1.0  # s that rank 0 has to report an error that every rank has
_PATIENCE = 5.0  # s to reach the common store


def follow(place: Place) -> None:
    """Before torch is loaded: only rank 0 has a standard output, and no rank outlives the agent that started it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings about every try to reach another rank
    if place.has_agent:
        end_with_parent()
    if not place.first:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def error_line(place: Place, text: str) -> str | None:
    """An error's line as this rank prints it; None where another rank reports it, and for Ctrl-C, which the launcher
    does. Where the ranks never met, rank 0 alone prints.
    """
    if text == "interrupted":
        return None
    if not place.first:
        time.sleep(_HEAD_START)
    from ffncli.run.ranks.store import open_store

    try:
        mine = open_store(place, 1.0 if place.first else _PATIENCE, opens=False).may_report()
    except Exception:
        mine = place.first
    if not mine or place.first or text.startswith("error: rank"):
        return text if mine else None
    return text.replace("error: ", f"error: rank {place.rank}: ", 1)


def leave(code: int) -> NoReturn:
    """End this rank at once: torch's threads of a process group can abort an interpreter that ends in order."""
    sys.stdout.flush()
    sys.stderr.flush()
    remove_process_folders(os.getpid())
    os._exit(code)
