"""Another job on the machine: matrix products of numpy on one core, for as long as the process that asked for it lives.

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
    """Start it, give it a second to reach its stride, and end it."""
    words = [sys.executable, "-m", "benchmarks.other_job", str(os.getpid())]
    job = subprocess.Popen(words, cwd=ROOT, env=environment() | ONE)
    try:
        time.sleep(1.0)
        yield
    finally:
        job.kill()
        job.wait()


def main() -> None:
    """Multiply until the parent is gone."""
    import numpy as np

    parent = int(sys.argv[1])
    a = np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)
    while os.getppid() == parent:
        for _ in range(20):
            a @ a


if __name__ == "__main__":
    main()
