"""The waiting policy and the number of torch's threads, set here for every command and call that computes.

torch is imported inside the functions, because OpenMP reads the policy only once, when torch loads it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_POLICY = "OMP_WAIT_POLICY"


@contextmanager
def sleep_while_waiting() -> Iterator[None]:
    """A context in which a first import of torch makes torch's threads sleep while they wait.

    On a busy machine, spinning threads take four times as long. A user's OMP_WAIT_POLICY is kept. The variable is
    restored afterwards, so that processes started later do not inherit it.
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
    """Import torch, make its threads sleep while they wait, and set their number to `count` (None: torch's default)."""
    with sleep_while_waiting():
        import torch

        torch.get_num_threads()  # LLVM's OpenMP (macOS) reads the policy at its first call
    if count:
        torch.set_num_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes in one thread; the thread count is restored afterwards, even after an error."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
