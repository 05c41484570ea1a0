"""Whether a kernel keeps its answers: right ones, so that only the work of a call shows it.

What its process has computed is read from the system, by the process that judges: no clock of the kernel's is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ffncli.run.verify.checks.row import CheckRow
from ffncli.run.verify.checks.trial import KernelTrial, counted_tokens
from ffncli.show.text import percent, time_text
from ffncli.system.host import busy_threads

_CALLS = 4  # of a series, on other inputs and on the same one; the least counts
_SERIES = 5  # a finding counts if it comes in all of them: disturbances do not
_LEAST = 2e-3  # s of a call; of less, much is passing numbers from process to process
_KEPT = 0.7  # of the work for another input: a part of the answer is kept
_NEAR = 2.0**-6  # how far other inputs are apart: the same experts are chosen, whose weights are as near


def replay(trial: KernelTrial) -> Iterator[CheckRow]:
    """The processor time of calls on inputs that are new, and of calls on one that was there before."""
    judge, subject = trial.judge("replay"), counted_tokens(trial.most_tokens)
    x = trial.draw(trial.most_tokens)
    if trial.host.device != "cpu" or _work(trial, x) is None:
        yield judge.skips(subject, "the work of a call is not known here")
        return
    share = 0.0
    for _ in range(_SERIES):
        other = min(_work(trial, _near(trial, x)) or 0.0 for _ in range(_CALLS))
        same = min(_work(trial, x) or 0.0 for _ in range(1 + _CALLS))
        if other < _LEAST:
            yield judge.skips(subject, f"a call takes {time_text(other)}, too short to see whether answers are kept")
            return
        share = max(share, same / other)
        if share >= _KEPT:
            break
    note = f"an input that it has had takes {percent(share)} of the work of another one"
    yield CheckRow("replay", subject, passed=share >= _KEPT, note=note)


def _near(trial: KernelTrial, x: Tensor) -> Tensor:
    return x + _NEAR * x * torch.randn(x.shape, generator=trial.generator).to(x.dtype)


def _work(trial: KernelTrial, x: Tensor) -> float | None:
    """Seconds of all threads of its process for one call; None where the system does not say."""
    number = str(trial.host.process.pid)
    before = busy_threads(number)
    trial.call(x)
    after = busy_threads(number)
    if not before:
        return None
    return 1e-9 * sum(time - before.get(thread, 0) for thread, time in after.items())
