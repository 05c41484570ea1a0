"""Another job on the machine: numpy computes matrix products on one core, until the process that started it ends.

with other_job(): ...
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.script import ROOT, environment

ONE = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")


@contextmanager
def other_job() -> Iterator[None]:
    """Start the job, wait a second until it is running, and end it at the end of the block."""
    words = [sys.executable, "-m", "benchmarks.other_job", str(os.getpid())]
    job = subprocess.Popen(words, cwd=ROOT, env=environment() | ONE)
    try:
        time.sleep(1.0)
        yield
    finally:
        job.kill()
        job.wait()


def main() -> None:
    """Multiply matrices until the parent process has ended."""
    import numpy as np

    parent = int(sys.argv[1])
    a = np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)
    while os.getppid() == parent:
        for _ in range(20):
            a @ a


if __name__ == "__main__":
    main()
