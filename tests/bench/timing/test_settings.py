"""Where the threads of numpy's BLAS run in a process like a benchmark's worker: OpenMP binds it, and it forks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ffncli.bench.launch import environment

SCRIPT = """
import os, sys
import numpy as np

cores = os.sched_getaffinity(0)
import torch

torch.randn(256, 256) @ torch.randn(256, 256)
if os.fork() == 0:
    os._exit(0)
os.wait()
if sys.argv[1] == "started":
    from ffncli.bench.timing.settings import start_blas_threads

    bound = os.sched_getaffinity(0)
    start_blas_threads(cores)
    assert os.sched_getaffinity(0) == bound
np.ones((256, 256), np.float32) @ np.ones((256, 256), np.float32)
own = os.getpid()
places = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task") if int(task) != own]
print(sum(place == cores for place in places))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads can be bound on Linux alone")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize(("how", "everywhere"), [("started", True), ("left", False)])
def test_threads_of_blas_are_not_bound_to_the_core_of_the_main_thread(how: str, everywhere: bool):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=environment(2, "fixed"), capture_output=True, text=True, check=True
    )
    if not everywhere and done.stdout.strip() != "0":
        pytest.skip("this BLAS is none whose threads end at a fork")
    assert (int(done.stdout) > 0) == everywhere
