"""Coverage in every Python process of a run of the tests, also in those that a test starts.

It is the first thing that such a process runs (a sitecustomize, see `measure.py`), so it imports little.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# A folder for what is measured, and a file that says which test runs now: variables, so that they reach all processes.
FOLDER, NOW = "FFN_REACHED_FOLDER", "FFN_REACHED_NOW"
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "ffncli")
SITE = "from benchmarks.mutations.follow import follow\nfollow()\n"


def follow() -> None:
    """Start coverage in this process, under the name of the test that runs now."""
    if FOLDER not in os.environ:
        return
    import atexit

    from coverage import Coverage

    context = ""
    if os.path.isfile(now := os.environ.get(NOW, "")):
        with open(now, encoding="utf-8") as file:
            context = file.read()
    measured = Coverage(
        data_file=f"{os.environ[FOLDER]}/coverage", data_suffix=True, include=[f"{PACKAGE}/*"], context=context or None,
        config_file=False, messages=False,
    )  # fmt: skip
    measured._warn_no_data = False
    measured.start()
    atexit.register(_stop, measured)
    if any(word.endswith(".worker") for word in sys.orig_argv):
        _save_before_each_message(measured)


def _stop(measured: Any) -> None:
    measured.stop()
    measured.save()


def _save_before_each_message(measured: Any) -> None:
    """A worker is killed as soon as it has said its last word: what it ran is on the disk before each."""
    from multiprocessing import connection

    Connection: Any = connection.Connection
    send = Connection.send

    def saved(self: Any, message: object) -> None:
        measured.save()
        send(self, message)

    Connection.send = saved
