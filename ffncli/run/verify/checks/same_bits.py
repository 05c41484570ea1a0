"""A kernel against itself, bit by bit: called again, in another order, from other buffers, in other batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ffncli.run.verify.checks.row import CheckRow
from ffncli.run.verify.checks.trial import KernelTrial, counted_tokens, equal_bits

_AGAIN = 2  # calls after the first
_SOME = 17  # tokens where their number does not matter


def repeats(trial: KernelTrial) -> Iterator[CheckRow]:
    """The same input several times in a row."""
    for count in (1, _SOME, trial.most_tokens):
        x = trial.draw(count)
        first = trial.call(x)
        rows = [equal_bits("repeats", counted_tokens(count), trial.call(x), first) for _ in range(_AGAIN)]
        yield next((row for row in rows if not row.passed), rows[0])


def state(trial: KernelTrial) -> Iterator[CheckRow]:
    """Other contents in a buffer that was used, the same contents in another, and the calls in another order."""
    judge = trial.judge("state")
    x, y = trial.draw(_SOME), trial.draw(_SOME)
    first, second = trial.call(x), trial.call(y)
    yield judge.equal("other numbers in the same buffer", second, trial.reference(y))
    yield equal_bits("state", "the same numbers in another buffer", trial.call(x, place=1), first)
    inputs = [trial.draw(count) for count in trial.token_counts]
    outputs = [trial.call(tensor) for tensor in inputs]
    for count, tensor, output in reversed(list(zip(trial.token_counts, inputs, outputs, strict=True))):
        yield equal_bits("state", f"in another order, {counted_tokens(count)}", trial.call(tensor), output)


def batch(trial: KernelTrial) -> Iterator[CheckRow]:
    """The tokens of a large batch, alone and in smaller batches, at several places, and in another order.

    A figure, unless it is demanded: torch's own products round a token differently in batches of other sizes.
    """
    most = trial.most_tokens
    x = trial.draw(most)
    whole = trial.call(x)
    for count in trial.token_counts[:-1]:
        starts = sorted({0, most // 3, most - count})
        parts = [slice(start, start + count) for start in starts]
        outputs = torch.cat([trial.call(x[part]) for part in parts])
        there = torch.cat([whole[part] for part in parts])
        yield _reported(trial, equal_bits("batch", f"{counted_tokens(count)} of {most}", outputs, there))
    order = torch.randperm(most, generator=trial.generator)
    yield _reported(trial, equal_bits("batch", f"all {most} in another order", trial.call(x[order]), whole[order]))


def _reported(trial: KernelTrial, row: CheckRow) -> CheckRow:
    """The row; where batch invariance is not demanded, other bits are a figure and no failure."""
    return row if row.passed or trial.batch_invariant else replace(row, passed=None)
