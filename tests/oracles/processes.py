"""Whether a process still runs, according to the system."""

import time
from pathlib import Path


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def expect_end(pid: int, seconds: float) -> None:
    """Check that the process ends within `seconds`."""
    until = time.monotonic() + seconds
    while runs(pid):
        assert time.monotonic() < until
        time.sleep(0.02)
