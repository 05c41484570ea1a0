"""How a process behaves as one of several ranks: rank 0 prints, and of an error that several have, one line is seen."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import NoReturn

from ffncli.run.ranks.environment import Place
from ffncli.system.child import end_with_parent
from ffncli.system.files import remove_process_folders

_HEAD_START = 1.0  # s that rank 0 has to report an error that every rank has
_PATIENCE, _LONGER = 2.0, 10.0  # s to reach the common store: an agent's, or rank 0's, which may still be starting


def follow(place: Place) -> None:
    """Before torch is loaded: only rank 0 has a standard output, and no rank outlives the agent that started it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's log of every try to reach another rank
    if place.has_agent:
        end_with_parent()
    if not place.first:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def error_line(place: Place, text: str) -> str | None:
    """An error's line as this rank prints it; None where another rank reports it, and for Ctrl-C, which the launcher
    reports. Where the ranks never met, one of each machine prints.
    """
    if text == "interrupted":
        return None
    if place.first and "MASTER_PORT" in text:  # the port is in use, by whom nobody knows: the ranks never met
        return text
    ignore_termination()
    from ffncli.run.ranks.store import open_store

    try:
        patience = _PATIENCE if place.has_agent or place.first else _LONGER
        store = open_store(place, patience, opens=False)
        if not (place.first or store.reported()):
            time.sleep(_HEAD_START)
        mine = store.may_report()
    except Exception:
        mine = place.local_rank == 0
    if not mine or place.first or text.startswith("error: rank"):
        return text if mine else None
    return text.replace("error: ", f"error: rank {place.rank}: ", 1)


def ignore_termination() -> None:
    """For a rank that is about to say why it ends: when another one ends first, the agent terminates them all."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave(code: int) -> NoReturn:
    """End this rank at once: torch's threads of a process group can abort an interpreter that ends in order."""
    sys.stdout.flush()
    sys.stderr.flush()
    remove_process_folders(os.getpid())
    os._exit(code)
