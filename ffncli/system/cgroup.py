"""The CPU quota and the memory limit that a container or a service manager sets for this process, and how long the
process was throttled. Linux, cgroups v1 and v2.

The limits of a process's group and of all groups above it apply, so the lowest limit counts. `root` is the root of the
file system; tests pass another folder. https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html
and https://docs.kernel.org/scheduler/sched-bwc.html.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # v1 expresses "no limit" as the largest multiple of a page


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the group's quota as a number of CPUs; None if it is unlimited."""
    quotas = [
        *(text(folder / "cpu.max").partition(" ")[::2] for folder in _unified(root)),
        *((text(f / "cpu.cfs_quota_us"), text(f / "cpu.cfs_period_us")) for f in _legacy(root, "cpu")),
    ]
    # without a quota, v2 contains `max` and v1 -1
    known = [(int(q), int(p)) for q, p in quotas if q.isdigit() and p.isdigit()]
    return min((quota / period for quota, period in known if period), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that the group may still allocate; file cache that the kernel can reclaim counts as free."""
    left = []
    for folder, limit, usage, cache in (
        *((f, "memory.max", "memory.current", "inactive_file") for f in _unified(root)),
        *(
            (f, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for f in _legacy(root, "memory")
        ),
    ):
        most, used = text(folder / limit), text(folder / usage)
        if most.isdigit() and used.isdigit() and int(most) < _UNLIMITED:
            reclaimable = _field(text(folder / "memory.stat"), cache)
            left.append(max(0, int(most) - int(used) + reclaimable))
    return min(left, default=None)


def throttled(root: Path = ROOT) -> float | None:
    """Return the seconds for which the quota has stopped this group; None if the kernel does not count them."""
    for folder in _unified(root):
        if "throttled_usec" in (stat := text(folder / "cpu.stat")):
            return _field(stat, "throttled_usec") / 1e6
    for folder in _legacy(root, "cpu"):
        if "throttled_time" in (stat := text(folder / "cpu.stat")):
            return _field(stat, "throttled_time") / 1e9
    return None


def text(path: Path) -> str:
    """Return a file's content without surrounding whitespace; "" if the file cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except (OSError, ValueError):
        return ""


def _unified(root: Path) -> Iterator[Path]:
    """Yield the folders of the process's group in cgroup v2: its own folder, then every parent up to the root."""
    base = root / "sys/fs/cgroup"
    for number, controllers, path in _groups(root):
        if number == "0" and not controllers:
            yield from _upwards(base, path)
            yield from _upwards(base / "unified", path)


def _legacy(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the v1 group of this controller; such folders are named after one or several controllers."""
    base = root / "sys/fs/cgroup"
    for _, controllers, path in _groups(root):
        if controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller)):
                yield from _upwards(base / name, path)


def _groups(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the process's groups as (hierarchy, controllers, path), for example from `4:cpu,cpuacct:/a/b`.

    If none are listed (/proc is hidden), v2's root is used, which has the limits of a container.
    """
    for line in (text(root / "proc/self/cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield number, controllers, path


def _upwards(base: Path, path: str) -> Iterator[Path]:
    """Yield `base`/`path` and the folders above it, up to `base`; in a container `path` may not exist below `base`."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for length in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:length])
        if folder.is_dir():
            yield folder


def _field(stat: str, name: str) -> int:
    """Return the value after `name` in a file whose lines are `name value`; 0 if `name` is missing."""
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0
