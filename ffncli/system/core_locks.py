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
from ffncli.system.host import affinity, one_cpu_per_core


@contextmanager
def locked_cores(count: int, folder: Path | None = None) -> Iterator[tuple[int, ...]]:
    """Run on `count` physical cores (all, if there are not more) that nobody else has locked; one CPU of each.

    The children inherit the restriction. Where the system cannot restrict a process, nothing is locked. Raises FFNError
    (exit 3) if too few cores are free.
    """
    allowed = affinity()
    if not hasattr(os, "sched_setaffinity"):
        yield allowed
        return
    firsts = one_cpu_per_core(allowed)
    needed = min(count, len(firsts))
    with ExitStack() as locks:
        cpus = _locked(firsts, needed, folder or _folder(), locks)
        os.sched_setaffinity(0, cpus)
        try:
            yield tuple(sorted(cpus))
        finally:
            os.sched_setaffinity(0, allowed)


def _locked(firsts: Sequence[int], needed: int, folder: Path, locks: ExitStack) -> list[int]:
    """The first CPUs whose cores are free; their locks are entered into `locks`."""
    from filelock import FileLock, Timeout

    cpus: list[int] = []
    for cpu in firsts:
        if len(cpus) == needed:
            break
        try:
            locks.enter_context(FileLock(folder / f"core-{cpu}.lock", timeout=0))
        except Timeout:
            continue
        cpus.append(cpu)
    if len(cpus) < needed:
        why = f"{needed} cores are needed and {len(cpus)} are free: other slots of ffn bench have the rest"
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
