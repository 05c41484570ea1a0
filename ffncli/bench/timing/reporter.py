"""REPORTER: a worker's reports to its parent while the worker measures; in any other process, reports are discarded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ffncli.bench.activity import Activity
from ffncli.bench.records import Doing


class Reporter(Activity):
    """Records the activity of this process, and reports its stages as messages; only a worker sends these."""

    def __init__(self) -> None:
        super().__init__()
        self._send: Callable[[tuple[str, Doing, str]], object] = _nowhere
        self._stage: tuple[str, Doing, str] | None = None

    @contextmanager
    def speaking(self, send: Callable[[tuple[str, Doing, str]], object]) -> Iterator[None]:
        """Send the stages reported inside the `with` block."""
        self._send = send
        try:
            yield
        finally:
            self._send, self._stage = _nowhere, None

    def stage(self, doing: Doing, kernel: str = "") -> None:
        """Report what the process does from now on, and with which kernel. Called before the kernel's code runs."""
        self._stage = "stage", doing, kernel
        self._send(self._stage)

    def stage_again(self) -> None:
        """Report the same stage again, for example when the next of several kernels is tried under one name."""
        if self._stage is not None:
            self._send(self._stage)


def _nowhere(message: object) -> None:
    """Discard the message."""


REPORTER = Reporter()
