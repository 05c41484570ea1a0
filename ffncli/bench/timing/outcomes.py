"""How a kernel can end: its own and our exceptions, as a status and one line."""

from __future__ import annotations

from dataclasses import replace

import torch

from ffncli.bench.records import Outcome, Status
from ffncli.bench.timing.clock import Clock
from ffncli.bench.verdict import WrongResult, ruled
from ffncli.errors import FFNError

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "Unable to allocate")


class Skipped(Exception):
    """Why a kernel cannot run here, in words."""


class BrokenArm(Exception):
    """An arm raised something while it was placed or timed. `name` is the arm, `__cause__` the exception."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class DeviceLost(Exception):
    """A kernel has left its GPU unusable for this process, by an access out of bounds or a failed assertion.

    `kernel` is empty if it is not known which; the text says what was raised.
    """

    def __init__(self, kernel: str, text: str) -> None:
        super().__init__(text)
        self.kernel = kernel


def first_cause(error: BaseException) -> BaseException:
    """What a kernel raised, without what we wrapped it in."""
    return error.__cause__ if isinstance(error, BrokenArm) and error.__cause__ is not None else error


def require_device(clock: Clock, kernel: str, error: BaseException) -> None:
    """Raises DeviceLost if the device is unusable after this error, which came from that kernel.

    Errors such as an illegal address stay: until the process ends, everything on that GPU raises.
    """
    finish = getattr(clock, "finish", None)  # a kernel may have put another object there, which is found elsewhere
    try:
        if finish is not None:
            finish()
    except Exception:
        raise DeviceLost(kernel, verdict_of(first_cause(error))[1]) from error


def after_breaking(before: Outcome, raised: BaseException) -> Outcome:
    """The outcome of a kernel that raised this.

    The exception and all that it came from lose their tracebacks, whose frames would keep the kernel's tensors alive.
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
    """The outcome with these remarks, empty ones left out, at the end of its note."""
    return replace(before, note="; ".join(filter(None, (before.note, *remarks))))


def verdict_of(error: BaseException) -> tuple[Status, str]:
    """(status, one line) for what a kernel raised."""
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
    """Whether memory ran out, directly or as the cause of another error."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, (RuntimeError, FFNError)) and any(word in str(error) for word in _OUT_OF_MEMORY):
            return True
        if isinstance(error, FFNError) and "of memory is free" in error.message:
            return True
        error = error.__cause__
    return False
