"""settle: what this process computes with, for a case and a method; start_blas_threads: where numpy's threads run."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import torch

from ffncli.bench.machine.math_mode import set_math_mode
from ffncli.bench.records import Case, Job


def settle(case: Case, job: Job) -> None:
    """Set the threads of torch and every other library, arithmetic and seed, for the case and the method."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    torch.set_num_threads(case.threads)
    threadpool_limits(case.threads)
    set_math_mode(job.method.math_mode, case.device)
    torch.manual_seed(job.method.seed)


def start_blas_threads(cores: Iterable[int]) -> None:
    """Start the threads of numpy's BLAS so that they may run on all of these cores.

    OpenBLAS ends its threads when the process forks, and starts them at its next product, on the cores of the thread
    that asks for it. OpenMP has bound that one to a single core by then, which all of them would share: a product of
    two threads took twenty times as long.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    bound, some = os.sched_getaffinity(0), np.ones((256, 256), np.float32)
    os.sched_setaffinity(0, cores)
    try:
        some @ some
    finally:
        os.sched_setaffinity(0, bound)
