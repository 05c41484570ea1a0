"""Turn the exceptions that end a kernel (raised by the kernel or by ffncli) into a status and one line."""

from dataclasses import replace

import torch

from ffncli.bench.records import Outcome, Status
from ffncli.bench.timing.clock import Clock
from ffncli.bench.verdict import WrongResult, ruled
from ffncli.errors import FFNError

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "Unable to allocate")


class Skipped(Exception):
    """A kernel cannot run here; the message is the reason."""


class BrokenArm(Exception):
    """An arm (a timed call) raised while it was placed or timed. `name` is the arm, `__cause__` the exception."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class DeviceLost(Exception):
    """A kernel has made its GPU unusable for this process, by an out-of-bounds access or a failed assertion.

    `kernel` is empty if the kernel is unknown; the message says what was raised.
    """

    def __init__(self, kernel: str, text: str) -> None:
        super().__init__(text)
        self.kernel = kernel


def first_cause(error: BaseException) -> BaseException:
    """Return the exception that a kernel raised, without our wrapper."""
    return error.__cause__ if isinstance(error, BrokenArm) and error.__cause__ is not None else error


def require_device(clock: Clock, kernel: str, error: BaseException) -> None:
    """Raise DeviceLost if the device is unusable after this error, which came from `kernel`.

    Errors such as an illegal address are permanent: every later operation on that GPU raises until the process ends.
    """
    finish = getattr(clock, "finish", None)  # a kernel may have put another object there; that is detected elsewhere
    try:
        if finish is not None:
            finish()
    except Exception:
        raise DeviceLost(kernel, verdict_of(first_cause(error))[1]) from error


def after_breaking(before: Outcome, raised: BaseException) -> Outcome:
    """Return the outcome of a kernel that raised this exception.

    Clears the tracebacks of the exception and its causes, because their frames would keep the kernel's tensors alive.
    """
    cause = first_cause(raised)
    chain: BaseException | None = raised
    while chain is not None:
        chain.__traceback__, chain = None, chain.__cause__ or chain.__context__
    if isinstance(cause, WrongResult):
        return ruled(before, cause.ruling)
    status, note = verdict_of(cause)
    return replace(before, status=status, note=note)


def noted(before: Outcome, *remarks: str) -> Outcome:
    """Return the outcome with these remarks appended to its note; empty remarks are skipped."""
    return replace(before, note="; ".join(filter(None, (before.note, *remarks))))


def verdict_of(error: BaseException) -> tuple[Status, str]:
    """Return (status, one line) for an exception that a kernel raised."""
    text = error.message if isinstance(error, FFNError) else str(error)
    line = " ".join(text.split())
    line = line if len(line) <= 200 else line[:199] + "…"
    if isinstance(error, WrongResult):
        return "wrong", error.ruling.note
    if isinstance(error, Skipped):
        return "skipped", line
    if out_of_memory(error):
        return "oom", line or "out of memory"
    if isinstance(error, NotImplementedError) or "not implemented for" in text:
        return "skipped", f"torch does not support it here: {line}"
    if isinstance(error, FFNError):
        return "failed", f"{line.rstrip('.')}; {error.hint}" if error.hint else line
    return "failed", f"{type(error).__name__}: {line}" if line else type(error).__name__


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if memory ran out, either directly or as the cause of another error."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, (RuntimeError, FFNError)) and any(word in str(error) for word in _OUT_OF_MEMORY):
            return True
        if isinstance(error, FFNError) and "of memory is free" in error.message:
            return True
        error = error.__cause__
    return False
