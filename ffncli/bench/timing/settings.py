"""settle: what this process computes with, for a case and a method."""

from __future__ import annotations

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
