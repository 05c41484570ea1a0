"""One command line in this process, and what is wrong with its answer: a traceback, a bug, an escape code, no end."""

import contextlib
import io
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.oracles.checkpoints import harmful

SECONDS = 20
CODES = (0, 1, 2, 3, 4)


class TooLate(BaseException):
    """No answer in time; no `except Exception` takes it for an error of the command."""


@dataclass(frozen=True)
class FuzzAnswer:
    """What a command line came to; `wrong` is empty where the answer is one that a user may get."""

    code: int
    seconds: float
    wrong: str
    text: str


def answer(words: Sequence[str], stdin: str = "") -> FuzzAnswer:
    """Run `ffn` with these words."""
    from ffncli.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    before, start = sys.stdin, time.monotonic()
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode("utf-8", "surrogateescape")))
    code, failure, told = 0, "", []
    try:
        with limited(), _as_shown() as told, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(words))
            except SystemExit as stop:
                code = int(stop.code or 0)
    except TooLate:
        failure = overdue()
    except BaseException as error:
        failure = f"{type(error).__name__} came out of main: {error}"
    finally:
        sys.stdin = before
    text = out.getvalue() + err.getvalue()
    failure = failure or (f"a library's warning: {told[0].message}" if told else "")
    return FuzzAnswer(code, time.monotonic() - start, failure or wrong_with(code, text), text)


@contextlib.contextmanager
def _as_shown() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings that Python would print on stderr."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        yield told


def overdue() -> str:
    """What is wrong with an answer that did not come."""
    return f"no answer in {SECONDS} s"


def wrong_with(code: int, text: str) -> str:
    """What no answer may be or hold; empty where there is nothing of it."""
    if code not in CODES:
        return f"exit {code}"
    if "a bug in ffn" in text or "Traceback (most recent" in text:
        return "a bug in ffn"
    if bad := harmful(text):
        return f"characters that act on a terminal: {bad[:3]!r}"
    return ""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise TooLate where the body takes longer than SECONDS."""

    def late(number: int, frame: Any) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
