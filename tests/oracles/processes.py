"""Whether a process still runs, as the system says it."""

import time
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def expect_end(pid: int, seconds: float) -> None:
    """It ends within so many seconds."""
    until = time.monotonic() + seconds
    while runs(pid):
        assert time.monotonic() < until
        time.sleep(0.02)
