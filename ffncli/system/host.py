"""The machine's hardware and load, read without torch: CPU, instructions, cores, caches, memory, load. Also reserves
cores for one process.

Read from /proc and /sys on Linux, through sysctl on macOS, and from Python's standard library elsewhere. `root` is the
root of the file system; tests pass another folder. Benchmarks that run at the same time must not share a core: each
core has a lock file in a folder of the user, and the system releases a lock when its process ends, for whatever reason.
"""

import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from math import floor
from pathlib import Path

from ffncli.errors import ExitCode, FFNError
from ffncli.system.cgroup import ROOT, cpu_quota, memory_left, text

_LLC_FALLBACK = 32 << 20  # if no cache size is known: most server and desktop chips have at most this much per thread
# The instructions that determine how fast a GEMM can be, by their flag in /proc/cpuinfo (or sysctl).
_ISA = {
    "avx2": "avx2", "fma": "fma", "avx512f": "avx512f", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16", "amx_tile": "amx_tile", "amx_bf16": "amx_bf16", "amx_int8": "amx_int8",
    "asimd": "neon", "asimddp": "dotprod", "bf16": "bf16", "i8mm": "i8mm", "sve": "sve", "sve2": "sve2", "sme": "sme",
    "FEAT_DotProd": "dotprod", "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "FEAT_SME": "sme",
}  # fmt: skip


@dataclass(frozen=True)
class Cores:
    """Three counts: the CPUs that the process may run on, the quota of its group in CPUs (None: no quota), and the
    physical cores that those CPUs belong to."""

    affinity: int
    quota: float | None
    physical: int

    @property
    def threads(self) -> int:
        """How many threads can run at once without sharing a core: the default for `ffn bench`."""
        bounds = [self.affinity, self.physical] + ([max(1, floor(self.quota))] if self.quota is not None else [])
        return max(1, min(bounds))


@dataclass(frozen=True)
class ProcessorCache:
    """One cache that the process can use; `cpus` are the CPUs that share it."""

    level: int
    kind: str  # Data, Instruction, Unified
    bytes: int
    cpus: tuple[int, ...]


def affinity() -> tuple[int, ...]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores(root: Path = ROOT) -> Cores:
    """Return affinity, quota and physical cores."""
    allowed = affinity()
    return Cores(len(allowed), cpu_quota(root), physical_cores(allowed, root))


def default_threads(root: Path = ROOT) -> int:
    """Return the smallest of the affinity, the quota (rounded down, at least 1) and the physical cores."""
    return cores(root).threads


def physical_cores(cpus: Iterable[int], root: Path = ROOT) -> int:
    """Return the number of physical cores of these CPUs; hardware threads of the same core count once."""
    cpus = tuple(cpus)
    if sys.platform == "darwin" and (number := sysctl("hw.physicalcpu")).isdigit():
        return min(int(number), len(cpus))
    return max(1, len(one_cpu_per_core(cpus, root)))


def one_cpu_per_core(cpus: Iterable[int], root: Path = ROOT) -> tuple[int, ...]:
    """Return the first of these CPUs on each physical core."""
    first: dict[str, int] = {}
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = text(topology / "core_cpus_list") or text(topology / "thread_siblings_list")
        first.setdefault(siblings or f"cpu {cpu}", cpu)
    return tuple(first.values())


def cpu_name(root: Path = ROOT) -> str:
    """Return the CPU's name as its maker gives it; on ARM this is often just an implementer and a part number."""
    info = _cpuinfo(root)
    for key in ("model name", "Model", "cpu model", "Hardware", "cpu"):
        if info.get(key):
            return " ".join(info[key].split())
    if "CPU part" in info:
        part = _ARM_PARTS.get((info.get("CPU implementer", ""), info["CPU part"]))
        return part or f"ARM implementer {info.get('CPU implementer', '?')} part {info['CPU part']}"
    if sys.platform == "darwin" and (brand := sysctl("machdep.cpu.brand_string")):
        return brand
    return platform.processor() or platform.machine() or "unknown"


_ARM_PARTS = {
    ("0x41", "0xd0c"): "Neoverse N1", ("0x41", "0xd40"): "Neoverse V1", ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2", ("0xc0", "0xac3"): "Ampere-1", ("0xc0", "0xac4"): "Ampere-1a",
}  # fmt: skip


def isa(root: Path = ROOT) -> tuple[str, ...]:
    """Return the CPU's vector and matrix instructions: avx2, avx512f, amx_bf16, neon, ..."""
    info = _cpuinfo(root)
    flags = (info.get("flags") or info.get("Features") or "").split()
    if not flags and sys.platform == "darwin":
        if platform.machine() == "arm64":
            optional = ("FEAT_DotProd", "FEAT_BF16", "FEAT_I8MM", "FEAT_SME")
            flags = ["asimd", *(name for name in optional if sysctl(f"hw.optional.arm.{name}") == "1")]
        else:
            flags = (sysctl("machdep.cpu.features") + " " + sysctl("machdep.cpu.leaf7_features")).lower().split()
    return tuple(dict.fromkeys(name for flag, name in _ISA.items() if flag in flags))


def caches(root: Path = ROOT) -> tuple[ProcessorCache, ...]:
    """Return every cache of the CPUs that this process may run on, without duplicates, sorted by level."""
    by_key: dict[tuple[int, str, str], ProcessorCache] = {}
    for cpu in affinity():
        for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")):
            level, size = text(index / "level"), _size(text(index / "size"))
            shared, kind = text(index / "shared_cpu_list") or str(cpu), text(index / "type") or "Unified"
            if level.isdigit() and size:
                by_key[int(level), kind, shared] = ProcessorCache(int(level), kind, size, cpu_list(shared))
    if not by_key and sys.platform == "darwin":
        for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize"):
            if (number := sysctl(name)).isdigit() and int(number):
                return (ProcessorCache(int(name.split("cachesize")[0][-1]), "Unified", int(number), affinity()),)
    return tuple(by_key[key] for key in sorted(by_key))


def cpu_llc(root: Path = ROOT) -> tuple[int, str]:
    """Return the bytes of last-level cache that the default threads can fill, and a note if the size is assumed or a
    sum.

    Chips with several dies have one last-level cache per die. Only as many caches are added up as there are default
    threads, the largest first.
    """
    every = [cache for cache in caches(root) if cache.kind != "Instruction"]
    if not every:
        return _LLC_FALLBACK, f"the cache size is unknown here, {_LLC_FALLBACK >> 20} MiB assumed"
    last = max(cache.level for cache in every)
    sizes = sorted((cache.bytes for cache in every if cache.level == last), reverse=True)
    used = sizes[: default_threads(root)]
    note = f"{len(used)} of {len(sizes)} L{last} caches combined" if len(sizes) > 1 else ""
    return sum(used), note


def memory_total(root: Path = ROOT) -> int | None:
    """Return the machine's bytes of memory."""
    if (kibibytes := _meminfo("MemTotal", root)) is not None:
        return kibibytes * 1024
    if sys.platform == "darwin" and (number := sysctl("hw.memsize")).isdigit():
        return int(number)
    return None


def available_memory(root: Path = ROOT) -> int | None:
    """Return the bytes that fit without swapping: the machine's free memory, or what the group has left if less."""
    free = _meminfo("MemAvailable", root)
    bounds = [free * 1024] if free is not None else []
    if (left := memory_left(root)) is not None:
        bounds.append(left)
    if not bounds and (total := memory_total(root)) is not None:
        bounds.append(total // 2)  # macOS counts free pages differently
    return min(bounds, default=None)


_MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


def freed_memory() -> int:
    """Return the bytes that this process has freed but its malloc keeps for later blocks, so that the system counts
    them as used; 0 if malloc does not report them."""
    return malloc_statistics().get("fordblks", 0)


def malloc_statistics() -> dict[str, int]:
    """Return the fields of glibc's struct mallinfo2; none if malloc does not report them (only glibc does, from
    2.33)."""
    import ctypes

    class Statistics(ctypes.Structure):  # struct mallinfo2
        _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2)

    try:
        read = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library; or Windows, where this library does not exist
        return {}
    read.restype, read.argtypes = Statistics, ()
    statistics = read()
    return {name: int(getattr(statistics, name)) for name in _MALLINFO2}


def return_freed_memory() -> bool:
    """Give freed memory back to the system if malloc keeps more than half of the free memory; return whether it was
    given back. Kept memory is fragmented and of little use for larger blocks, so the next case would take as much
    again."""
    import ctypes

    free = available_memory()
    if free is None or freed_memory() <= free // 2:
        return False
    return bool(ctypes.CDLL(None).malloc_trim(0))


def load() -> float | None:
    """Return the mean number of processes running or waiting for a CPU in the last minute, or None."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def busy_threads(process: str = "self") -> dict[str, int]:
    """Return a mapping from the ids of a process's threads to the nanoseconds that each has run; empty if unknown."""
    folder, times = Path("/proc") / process / "task", {}
    with suppress(OSError):
        for thread in os.listdir(folder):
            with suppress(OSError, ValueError, IndexError):  # the thread has ended
                times[thread] = int((folder / thread / "schedstat").read_text().split()[0])
    return times


def steal(root: Path = ROOT) -> float | None:
    """Return the share of CPU time since boot that the hypervisor gave to other machines; None if it is not counted."""
    fields = text(root / "proc/stat").partition("\n")[0].split()
    if len(fields) < 9 or fields[0] != "cpu" or not all(map(str.isdigit, fields[1:9])):
        return None
    # user nice system idle iowait irq softirq steal; user includes the guests' time
    ticks = [int(field) for field in fields[1:9]]
    return ticks[7] / sum(ticks) if sum(ticks) else None


def governor(root: Path = ROOT) -> str:
    """Return the frequency governor of the CPUs in use, `mixed: ...` if there are several; "" if none is reported."""
    folder = root / "sys/devices/system/cpu"
    governors = {text(folder / f"cpu{cpu}/cpufreq/scaling_governor") for cpu in affinity()} - {""}
    return governors.pop() if len(governors) == 1 else "mixed: " + " ".join(sorted(governors)) if governors else ""


def numa_nodes(root: Path = ROOT) -> int | None:
    """Return the number of memory nodes that the CPUs in use belong to; None if the system does not show it."""
    allowed = set(affinity())
    nodes = [cpu_list(text(node / "cpulist")) for node in (root / "sys/devices/system/node").glob("node[0-9]*")]
    return sum(bool(allowed & set(cpus)) for cpus in nodes) if nodes else None


def cpu_list(shown: str) -> tuple[int, ...]:
    """Parse a list of CPUs such as `0-3,8`; parts that are neither an index nor a range are ignored."""
    numbers: list[int] = []
    for part in shown.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            numbers += range(int(low), int(high or low) + 1)
    return tuple(numbers)


@cache
def sysctl(name: str) -> str:
    """Return a value that macOS reports; "" if it reports none."""
    return program_output("sysctl", "-n", name)


def program_output(*command: str) -> str:
    """Return what a program prints; "" if it is missing, fails or takes too long."""
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the fields of /proc/cpuinfo: the first processor's, and on some ARM kernels those after all processors."""
    fields: dict[str, str] = {}
    for line in text(root / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _meminfo(name: str, root: Path) -> int | None:
    for line in text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == name and value.split() and value.split()[0].isdigit():
            return int(value.split()[0])
    return None


def _size(shown: str) -> int:
    """Return the bytes of a size such as `36608K`; 0 for anything else."""
    number, unit = shown.rstrip("KMG"), shown[-1:]
    return int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit, 1) if number.isdigit() else 0


@contextmanager
def locked_cores(count: int, folder: Path | None = None) -> Iterator[tuple[int, ...]]:
    """Keep this process on `count` physical cores (or all, if there are fewer) that no other process has locked; yield
    one CPU of each.

    Children inherit the restriction. If the system cannot restrict a process, nothing is locked. Raises FFNError (exit
    3) if too few cores are free.
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
    """Return the first CPUs whose cores are free; their locks are entered into `locks`."""
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
        why = f"{needed} cores are needed and {len(cpus)} are free: other slots of ffn bench use the others"
        raise FFNError(why, "use fewer --slots or --threads", ExitCode.ENVIRONMENT)
    return cpus


def _folder() -> Path:
    """Return the folder of the locks. Raises FFNError if it cannot be created, or belongs to another user."""
    folder = Path(tempfile.gettempdir(), f"ffn-cores-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        theirs = folder.lstat().st_uid != os.getuid() or folder.is_symlink()
    except OSError as error:
        raise FFNError(f"cannot create {folder}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
    if theirs:
        raise FFNError(f"{folder} belongs to another user", "set TMPDIR to a folder of yours", ExitCode.ENVIRONMENT)
    return folder
