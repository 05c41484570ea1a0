"""Where the threads of numpy's BLAS run in a process like a benchmark's worker: OpenMP binds it, and it forks."""

import os
import subprocess
import sys

import numpy  # noqa: F401, so that its BLAS is seen
import pytest
from threadpoolctl import threadpool_info

from ffncli.bench.launch import environment
from ffncli.system import host

SCRIPT = """
import os
import numpy as np

cores = os.sched_getaffinity(0)
import torch

torch.randn(256, 256) @ torch.randn(256, 256)
if os.fork() == 0:
    os._exit(0)
os.wait()
from ffncli.bench.timing.worker import start_blas_threads

bound = os.sched_getaffinity(0)
start_blas_threads(cores)
assert os.sched_getaffinity(0) == bound
np.ones((256, 256), np.float32) @ np.ones((256, 256), np.float32)
own = os.getpid()
places = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task") if int(task) != own]
print(sum(place == cores for place in places))
"""


def blas_has_threads_of_its_own() -> bool:
    """As OpenBLAS in pip's numpy; not those of an OpenMP, which are bound."""
    return any(one["user_api"] == "blas" and one.get("threading_layer") == "pthreads" for one in threadpool_info())


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads can be bound on Linux alone")
@pytest.mark.skipif(len(host.affinity()) < 2, reason="one core")
@pytest.mark.skipif(not blas_has_threads_of_its_own(), reason="a BLAS without threads of its own")
def test_threads_of_blas_are_not_bound_to_the_core_of_the_main_thread():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(2, "fixed"), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 0
