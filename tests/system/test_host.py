"""What the machine has, from made-up /proc and /sys, and from this machine beside what others say of it."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ffncli.system import cgroup, host


def put(root: Path, name: str, content: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n")
    return root


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(host, "affinity", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(host.sys, "platform", "linux")


@pytest.mark.parametrize(("said", "quota"), [("250000 100000", 2.5), ("max 100000", None), ("50000 100000", 0.5)])
def test_quota_of_v2(tmp_path, said, quota):
    put(tmp_path, "proc/self/cgroup", "0::/a/b")
    put(tmp_path, "sys/fs/cgroup/a/b/cpu.max", said)
    assert cgroup.cpu_quota(tmp_path) == quota


def test_the_least_quota_above_counts(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/a/b")
    put(tmp_path, "sys/fs/cgroup/a/b/cpu.max", "400000 100000")
    put(tmp_path, "sys/fs/cgroup/a/cpu.max", "150000 100000")
    assert cgroup.cpu_quota(tmp_path) == 1.5


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3.0), ("-1", None)])
def test_quota_of_v1_in_a_container(tmp_path, quota, expected):
    """The path is the host's and is not there; the group's own files lie at the top."""
    put(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc")
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", quota)
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert cgroup.cpu_quota(tmp_path) == expected


def test_memory_left_counts_clean_file_cache_as_free(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/a")
    put(tmp_path, "sys/fs/cgroup/a/memory.max", "1000")
    put(tmp_path, "sys/fs/cgroup/a/memory.current", "700")
    put(tmp_path, "sys/fs/cgroup/a/memory.stat", "anon 500\ninactive_file 150\nactive_file 50")
    put(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable: 2 kB")
    assert cgroup.memory_left(tmp_path) == 450
    assert host.available_memory(tmp_path) == 450
    put(tmp_path, "sys/fs/cgroup/a/memory.max", "max")
    assert host.available_memory(tmp_path) == 2048


def test_memory_left_of_v1(tmp_path):
    put(tmp_path, "proc/self/cgroup", "4:memory:/")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "5000")
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "4000")
    put(tmp_path, "sys/fs/cgroup/memory/memory.stat", "cache 900\ntotal_inactive_file 300")
    assert cgroup.memory_left(tmp_path) == 1300
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(9223372036854771712))
    assert cgroup.memory_left(tmp_path) is None


def test_throttled_seconds(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/")
    put(tmp_path, "sys/fs/cgroup/cpu.stat", "usage_usec 9\nthrottled_usec 2500000")
    assert cgroup.throttled(tmp_path) == 2.5
    assert cgroup.throttled(tmp_path / "nowhere") is None


def test_without_a_list_of_groups_the_limits_at_the_root_hold(tmp_path):
    put(tmp_path, "sys/fs/cgroup/memory.max", "1000")
    put(tmp_path, "sys/fs/cgroup/memory.current", "700")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    assert cgroup.memory_left(tmp_path) == 300
    assert cgroup.cpu_quota(tmp_path) == 1.5


def test_hardware_threads_of_a_core_count_once(tmp_path, four_cpus):
    for cpu in range(4):
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}")
    assert host.physical_cores(range(4), tmp_path) == 2
    assert host.physical_cores([0, 2], tmp_path) == 1
    assert host.default_threads(tmp_path) == 2


def test_without_a_topology_every_cpu_is_a_core(tmp_path, four_cpus):
    assert host.default_threads(tmp_path) == 4


@pytest.mark.parametrize(("quota", "threads"), [(None, 3), (2.9, 2), (0.4, 1), (8.0, 3)])
def test_threads_are_the_least_of_three(quota, threads):
    assert host.Cores(affinity=4, quota=quota, physical=3).threads == threads
    assert host.Cores(affinity=1, quota=quota, physical=3).threads == 1


def chip(root: Path, shared: dict[str, str]) -> Path:
    """Four CPUs: L1 of their own, L3 as shared."""
    for cpu in range(4):
        first = {"level": "1", "type": "Data", "size": "48K", "shared_cpu_list": str(cpu)}
        last = {"level": "3", "type": "Unified", "size": "32M" if cpu < 2 else "96M"}
        for index, cache in (("index0", first), ("index3", {**last, "shared_cpu_list": shared[str(cpu)]})):
            for name, value in cache.items():
                put(root, f"sys/devices/system/cpu/cpu{cpu}/cache/{index}/{name}", value)
    return root


def test_one_last_level_cache(tmp_path, four_cpus):
    chip(tmp_path, dict.fromkeys("0123", "0-3"))
    every = host.caches(tmp_path)
    assert [c.level for c in every] == [1, 1, 1, 1, 3]
    assert every[-1].cpus == (0, 1, 2, 3)
    put(tmp_path, "sys/devices/system/cpu/cpu3/cache/index3/size", "32M")
    assert host.cpu_llc(tmp_path) == (32 << 20, "")


def test_several_dies_have_a_cache_each(tmp_path, four_cpus):
    chip(tmp_path, {"0": "0-1", "1": "0-1", "2": "2-3", "3": "2-3"})
    assert host.cpu_llc(tmp_path) == (128 << 20, "2 of 2 L3 caches combined")
    put(tmp_path, "proc/self/cgroup", "0::/")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000")  # one thread fills one of them
    assert host.cpu_llc(tmp_path) == (96 << 20, "1 of 2 L3 caches combined")


def test_a_cache_of_unknown_size_is_assumed_and_said(tmp_path, four_cpus):
    size, note = host.cpu_llc(tmp_path)
    assert size == 32 << 20
    assert "assumed" in note


def test_instructions_and_names(tmp_path, monkeypatch):
    monkeypatch.setattr(host.sys, "platform", "linux")
    intel = "model name\t: Intel(R)  Xeon(R)\nflags\t\t: fpu avx2 avx512f amx_bf16 bogus"
    assert host.isa(put(tmp_path, "proc/cpuinfo", intel)) == ("avx2", "avx512f", "amx_bf16")
    assert host.cpu_name(tmp_path) == "Intel(R) Xeon(R)"
    arm = "Features\t: fp asimd bf16 sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f"
    assert host.isa(put(tmp_path, "proc/cpuinfo", arm)) == ("neon", "bf16", "sve")
    assert host.cpu_name(tmp_path) == "Neoverse V2"


def test_steal_governor_and_nodes(tmp_path, four_cpus):
    assert host.steal(tmp_path) is None
    assert host.numa_nodes(tmp_path) is None
    assert host.governor(tmp_path) == ""
    put(tmp_path, "proc/stat", "cpu  50 0 20 20 5 0 0 5 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1")
    assert host.steal(tmp_path) == 0.05  # the guests' 7 are in user already
    put(tmp_path, "sys/devices/system/node/node0/cpulist", "0-1")
    put(tmp_path, "sys/devices/system/node/node1/cpulist", "2-3")
    put(tmp_path, "sys/devices/system/node/node2/cpulist", "4-7")
    assert host.numa_nodes(tmp_path) == 2
    for cpu in range(4):
        put(
            tmp_path, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "powersave" if cpu else "performance"
        )
    assert host.governor(tmp_path) == "mixed: performance powersave"


@pytest.mark.parametrize(("said", "cpus"), [("0-2,7", (0, 1, 2, 7)), ("5", (5,)), ("", ()), ("x-y", ()), ("1-x", ())])
def test_lists_of_cpus(said, cpus):
    assert host.cpu_list(said) == cpus


def test_macos_asks_sysctl(tmp_path, monkeypatch):
    said = {
        "machdep.cpu.brand_string": "Apple M2", "hw.physicalcpu": "8", "hw.memsize": "17179869184",
        "hw.perflevel0.l2cachesize": "16777216", "hw.optional.arm.FEAT_BF16": "1",
    }  # fmt: skip
    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(host, "sysctl", lambda name: said.get(name, ""))
    monkeypatch.setattr(host, "affinity", lambda: tuple(range(10)))
    assert host.cpu_name(tmp_path) == "Apple M2"
    assert host.isa(tmp_path) == ("neon", "bf16")
    assert host.default_threads(tmp_path) == 8
    assert host.cpu_llc(tmp_path) == (16 << 20, "")
    assert host.memory_total(tmp_path) == 16 << 30
    assert host.available_memory(tmp_path) == 8 << 30


@pytest.fixture
def printed():
    """What code prints in a process whose malloc gives nothing back by itself."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("malloc does not say what it keeps")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
    return lambda code: (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    )


def test_what_is_freed_is_room_for_more(printed):
    """A block below malloc's limit for separate ones, with another behind it, stays in the heap when it is freed."""
    code = (
        "from ffncli.system.host import freed_memory\n"
        "blocks = [bytearray(50_000_000) for _ in range(4)]\n"
        "before = freed_memory()\n"
        "del blocks[:3]\n"
        "print(freed_memory() - before)\n"
    )
    assert 149_000_000 <= int(printed(code)) <= 151_000_000


def test_what_is_freed_goes_back_where_it_is_much(printed):
    code = (
        "from ffncli.system import host\n"
        "blocks = [bytearray(50_000_000) for _ in range(4)]\n"
        "del blocks[:3]\n"
        "host.available_memory = lambda: 10**9\n"
        "few = host.return_freed_memory()\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = resident()\n"
        "host.available_memory = lambda: 2 * 10**8\n"
        "print(few, host.return_freed_memory(), before - resident())\n"
    )
    few, much, given = printed(code).split()
    assert (few, much) == ("False", "True")
    assert int(given) > 140_000_000


def test_this_machine():
    assert host.affinity() == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= host.default_threads() <= len(os.sched_getaffinity(0))
    assert host.memory_total() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host.available_memory() < host.memory_total()
    if shutil.which("getconf") and host.caches():  # glibc asks the processor, not the kernel
        said = subprocess.run(["getconf", "LEVEL3_CACHE_SIZE"], capture_output=True, text=True, check=False).stdout
        if said.strip().isdigit() and int(said):
            sizes = sorted((host.cpu_llc()[0], int(said)))  # a virtual machine may have a part of what glibc is told
            assert sizes[1] % sizes[0] == 0
