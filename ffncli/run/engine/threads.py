"""How torch's threads wait, and how many compute: asked here, by every command that computes.

torch is imported inside the functions: OpenMP reads how to wait once, when torch loads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def sleep_while_waiting() -> None:
    """Threads that spin take four times as long on a busy machine; has an effect before torch is imported only.

    A user who has set OMP_WAIT_POLICY is obeyed.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def set_threads(count: int | None = None) -> None:
    """Import torch, let its threads sleep while they wait, and compute with `count` of them; None: torch's number."""
    sleep_while_waiting()
    import torch

    if count:
        torch.set_num_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread within; afterwards in as many as before, whatever happened."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
