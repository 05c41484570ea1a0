"""How torch's threads wait, and how many compute: set here for every command and call that computes.

torch is imported inside the functions: OpenMP reads how to wait once, when torch loads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_POLICY = "OMP_WAIT_POLICY"


@contextmanager
def sleep_while_waiting() -> Iterator[None]:
    """Make torch's threads, if torch is first imported inside, sleep while they wait.

    On a busy machine spinning takes four times as long. A user's OMP_WAIT_POLICY is kept. The variable is restored
    afterwards, so that processes started later do not inherit it.
    """
    ours = "torch" not in sys.modules and _POLICY not in os.environ
    if ours:
        os.environ[_POLICY] = "passive"
    try:
        yield
    finally:
        if ours:
            os.environ.pop(_POLICY, None)


def set_threads(count: int | None = None) -> None:
    """Import torch, let its threads sleep while they wait, and compute with `count` of them (None: torch's number)."""
    with sleep_while_waiting():
        import torch

        torch.get_num_threads()  # LLVM's OpenMP (macOS) reads how to wait at its first call
    if count:
        torch.set_num_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread inside; restore the number afterwards, even after an error."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
