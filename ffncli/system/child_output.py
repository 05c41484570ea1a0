"""What a child process prints, passed on to stderr up to a limit: a flood fills no terminal, no disk, and no pipe."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import field

from ffncli.dataclass import dataclass

MOST_OUTPUT = 64 << 10  # bytes of one source
_CHUNK = 1 << 16
_LAST_CHUNKS = 16  # read at the end, of what is still in the pipe; a process that escaped may go on writing
_PATIENCE = 1.0  # s, for stderr to take the rest


@dataclass
class PrintedBytes:
    """How much each source has printed; `source` is whose output arrives now, as a note about it says it."""

    source: str = "the worker"
    most: int = MOST_OUTPUT
    counts: dict[str, int] = field(default_factory=dict)

    def passed(self, chunk: bytes) -> tuple[bytes, str]:
        """(what of a chunk is to be shown, a note if this is where it is cut)."""
        source, before = self.source, self.counts.get(self.source, 0)
        self.counts[source] = before + len(chunk)
        if before > self.most:
            return b"", ""
        if before + len(chunk) <= self.most:
            return chunk, ""
        return chunk[: self.most - before], f"note: the output of {source} was cut after {self.most >> 10} KiB\n"


@contextmanager
def passed_on(printed: PrintedBytes) -> Iterator[int]:
    """A descriptor for a child's stdout and stderr. What it prints appears on our stderr, until it was enough.

    All is read, so that the child never waits; on leaving, what is in the pipe is passed on, and no process that still
    holds the descriptor is waited for.
    """
    reading, writing = os.pipe()
    waiting, stopping = os.pipe()
    os.set_blocking(reading, False)
    thread = threading.Thread(target=_pass_on, args=(reading, waiting, printed), daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(stopping)  # ends the thread
        thread.join(_PATIENCE)


def _pass_on(reading: int, waiting: int, printed: PrintedBytes) -> None:
    """Until the other end of `waiting` is closed; then the rest. Both descriptors are closed here."""
    try:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        poll.register(waiting, select.POLLIN)
        over = False
        while not over:
            over = any(number == waiting for number, _ in poll.poll())
            for _ in range(_LAST_CHUNKS if over else 1):
                if not _pass_chunk(reading, printed):
                    break
    finally:
        os.close(reading)
        os.close(waiting)


def _pass_chunk(reading: int, printed: PrintedBytes) -> bool:
    """Pass on what is in the pipe; whether there may be more."""
    try:
        chunk = os.read(reading, _CHUNK)
    except OSError:  # nothing is there
        return False
    shown, note = printed.passed(chunk)
    text = shown.decode("utf-8", "replace")
    if note and text and not text.endswith("\n"):
        text += "\n"
    if text or note:
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
            sys.stderr.write(text + note)
            sys.stderr.flush()
    return bool(chunk)
