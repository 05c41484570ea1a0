"""What a kernel's calls leave behind: threads that run on, an input or weights that are not what they were."""

from __future__ import annotations

from collections.abc import Iterator

from ffncli.run.verify.checks.row import CheckRow
from ffncli.run.verify.checks.trial import KernelTrial

_CALLS, _TOKENS = 8, 17


def threads(trial: KernelTrial) -> Iterator[CheckRow]:
    """The threads of its process before and after several calls. It has been called before: pools are there."""
    judge, x = trial.judge("threads"), trial.draw(_TOKENS)
    trial.call(x)
    before = trial.host.threads()
    for _ in range(_CALLS):
        trial.call(x)
    after = trial.host.threads()
    if before is None or after is None:
        yield judge.skips("its process", "this system does not show the threads of a process")
        return
    more = after - before
    note = f"{more} more threads after {_CALLS} calls" if more > 0 else f"{after} threads, as before"
    yield CheckRow("threads", "its process", passed=more <= 0, note=note)


def untouched(trial: KernelTrial) -> Iterator[CheckRow]:
    """Its input after every call, its weights after all of them."""
    trial.host.inspect()
    changed = sorted(trial.host.changed)
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    yield CheckRow("untouched", "input and weights", passed=not changed, note=f"changes {names}" if changed else "")
