"""Cores of one machine for one process: several benchmarks next to each other must not share a core.

Each core has a lock file in a folder of the user's; the system releases a lock when its process ends, however it ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ffncli.errors import ExitCode, FFNError
from ffncli.system.host import affinity, core_groups


@contextmanager
def locked_cores(count: int, folder: Path | None = None) -> Iterator[tuple[int, ...]]:
    """Run on `count` physical cores (all, if there are not more) that nobody else has locked; the CPUs of them.

    The children inherit the restriction. Where the system cannot restrict a process, nothing is locked. Raises FFNError
    (exit 3) if too few cores are free.
    """
    allowed = affinity()
    if not hasattr(os, "sched_setaffinity"):
        yield allowed
        return
    groups = core_groups(allowed)
    needed = min(count, len(groups))
    with ExitStack() as locks:
        cpus = _locked(groups, needed, folder or _folder(), locks)
        os.sched_setaffinity(0, cpus)
        try:
            yield tuple(sorted(cpus))
        finally:
            os.sched_setaffinity(0, allowed)


def _locked(groups: Sequence[tuple[int, ...]], needed: int, folder: Path, locks: ExitStack) -> list[int]:
    """The CPUs of the first free cores, whose locks are entered into `locks`."""
    from filelock import FileLock, Timeout

    cpus: list[int] = []
    free = 0
    for group in groups:
        if free == needed:
            break
        lock = FileLock(folder / f"core-{group[0]}.lock", timeout=0)
        try:
            locks.enter_context(lock)
        except Timeout:
            continue
        cpus += group
        free += 1
    if free < needed:
        why = f"{needed} cores are needed and {free} are free: other slots of ffn bench have the rest"
        raise FFNError(why, "use fewer --slots or --threads", ExitCode.ENVIRONMENT)
    return cpus


def _folder() -> Path:
    """The folder of the locks. Raises FFNError if it cannot be made, or belongs to somebody else."""
    folder = Path(tempfile.gettempdir(), f"ffn-cores-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        theirs = folder.lstat().st_uid != os.getuid() or folder.is_symlink()
    except OSError as error:
        raise FFNError(f"cannot create {folder}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
    if theirs:
        raise FFNError(f"{folder} belongs to another user", "set TMPDIR to a folder of yours", ExitCode.ENVIRONMENT)
    return folder
