"""A process and all that it started, from Linux's /proc. Elsewhere there is none of it: no descendants, no memory."""

from __future__ import annotations

import os
from pathlib import Path

from ffncli.system.cgroup import ROOT, text

# What a process takes from others; files can be dropped and read again. Shared pages: whole, or the process's share.
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")
_SHARES = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def descendants(pid: int, root: Path = ROOT) -> list[int]:
    """The processes below this one, those of all its threads; a zombie has none left."""
    found: list[int] = []
    left = [pid]
    while left:
        for process in _children(left.pop(), root):
            if process not in found:
                found.append(process)
                left.append(process)
    return found


def used_memory(pid: int, root: Path = ROOT, *, shared_once: bool = False) -> int | None:
    """Bytes of memory that a process and those below it use; None where the system does not say.

    Memory that a fork still shares counts for both, unless `shared_once`, which takes the system far longer to say.
    """
    if not (root / f"proc/{pid}/status").exists():
        return None
    return sum(_used(process, root, shared_once) for process in (pid, *descendants(pid, root)))


def _children(pid: int, root: Path) -> list[int]:
    folder = root / f"proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return []
    return [int(word) for thread in threads for word in text(folder / thread / "children").split() if word.isdigit()]


def _used(pid: int, root: Path, shared_once: bool) -> int:
    exact = text(root / f"proc/{pid}/smaps_rollup") if shared_once else ""
    source, names = (exact, _SHARES) if exact else (text(root / f"proc/{pid}/status"), _COUNTED)
    lines = (line.split() for line in source.splitlines() if line.startswith(names))
    return sum(int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit())
