"""The referee's checks at numbers that are drawn for each certificate: token counts, scales of x, call numbers.

A kernel that knows the numbers of the other checks, which are fixed, can be right there and wrong elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.run.user.hosted import same_bits
from ffncli.run.verify.checks.case import CheckRow
from ffncli.run.verify.checks.judged import off_by_subnormals
from ffncli.run.verify.checks.trial import KernelTrial
from ffncli.show.text import counted

_SECONDS = 3.0  # limit of each of the two checks, so that slow kernels are tried less often
_LEAST = 4  # calls that are made in any case
_LOG2_SCALES = (-6.0, 5.0)  # of x; `special` tries the largest and the smallest numbers
_LOG2_CALLS = (6.0, 11.0)  # of the number of calls
_INPUTS, _MOST = 8, 127


def drawn(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check the output for the trial's further token counts, then for every smaller one, in a drawn order and at drawn
    scales, as long as there is time."""
    judge, numbers = trial.judge("drawn"), torch.finfo(trial.block.dtype)
    spent, rows = 0.0, list[CheckRow]()
    for x, reference, scale in _inputs(trial):
        if len(rows) >= _LEAST and spent > _SECONDS:
            break
        if not float(reference.abs().max()) <= numbers.max / 4:
            continue
        subject = f"{counted(len(x), 'token')}, {scale:.3g} times as large"
        start = time.monotonic()
        row = off_by_subnormals(judge.equal(subject, trial.call(x), reference), numbers)
        spent += time.monotonic() - start
        rows.append(row)
        if row.passed is False:
            yield row
            return
    if not rows:
        yield judge.skips("token counts and scales", "the output would be too large for the dtype")
        return
    worst = max(rows, key=lambda row: row.relative_error or 0.0)
    note = f"up to {counted(max(trial.further_counts), 'token')}; the worst: {worst.subject}"
    yield replace(worst, subject=f"{counted(len(rows), 'token count')} and scales", note=note)


def _inputs(trial: KernelTrial) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield inputs of drawn token counts with their references and scales; the smaller ones are parts of a few."""

    def at_a_scale(count: int) -> tuple[Tensor, Tensor, float]:
        scale = 2.0 ** _between(_LOG2_SCALES, trial.generator)
        x = trial.draw(count, scale)
        return x, trial.reference(x), scale

    yield from map(at_a_scale, trial.further_counts)
    most = min(_MOST, trial.most_tokens)
    whole = [at_a_scale(most) for _ in range(_INPUTS)]
    for at, count in enumerate(1 + torch.randperm(most, generator=trial.generator)):
        x, reference, scale = whole[at % _INPUTS]
        start = int(torch.randint(most - int(count) + 1, (), generator=trial.generator))
        part = slice(start, start + int(count))
        yield x[part], reference[part], scale


def calls(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check a drawn number of calls, each of a drawn one of a few inputs: an input gives the same bits in every
    call."""
    most = round(2.0 ** _between(_LOG2_CALLS, trial.generator))
    until = time.monotonic() + _SECONDS
    counts = torch.randint(1, 1 + min(_INPUTS, trial.most_tokens), (_INPUTS,), generator=trial.generator)
    inputs = [trial.draw(count) for count in counts.tolist()]
    firsts = [trial.call(x) for x in inputs]
    judge, made = trial.judge("calls"), _INPUTS
    for x, first in zip(inputs, firsts, strict=True):
        if (row := judge.equal("the first calls", first, trial.reference(x))).passed is False:
            yield row
            return
    for at in torch.randint(_INPUTS, (most,), generator=trial.generator).tolist():
        if time.monotonic() > until:
            break
        made += 1
        again = trial.call(inputs[at])
        if not same_bits(again, firsts[at]):
            yield replace(judge.equal(f"call {made}", again, firsts[at].double()), tolerance=0.0, passed=False)
            return
    yield CheckRow("calls", counted(made, "call"), 0.0, 0.0, 0.0, 0.0, True)


def _between(limits: tuple[float, float], generator: torch.Generator) -> float:
    low, high = limits
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))
