"""What counters say of a block, and that they are quiet where a system has no such counts."""

import os
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import pytest

from ffncli.bench.machine import counters
from ffncli.bench.machine.counters import Snapshot, SystemCounters, flags
from ffncli.bench.timing.clock import CpuClock

ZERO = Snapshot(throttled=0, stolen=0.0)


def test_quiet_block() -> None:
    assert flags(ZERO, Snapshot(cpu_seconds=0.0096, throttled=0, stolen=0.0), 5e-3, 2) == ()
    assert flags(Snapshot(), Snapshot(), 5e-3, 0) == ()


@pytest.mark.parametrize(
    ("after", "flag"),
    [
        (Snapshot(preemptions=1), "preempted"),
        (Snapshot(throttled=1), "throttled"),
        (Snapshot(stolen=0.11), "stolen"),
        (Snapshot(faults=12), "faults=12"),
        (Snapshot(load=3.14), "load=3.1"),
        (Snapshot(clock=0.7), "clock=0.70"),
    ],
)
def test_flags(after: Snapshot, flag: str) -> None:
    assert flags(ZERO, after, 5e-3, 0) == (flag,)


def test_at_the_edges() -> None:
    assert flags(ZERO, Snapshot(stolen=0.1), 5e-3, 0) == ()
    assert flags(ZERO, Snapshot(clock=0.75), 5e-3, 0) == ()
    assert flags(ZERO, Snapshot(cpu_seconds=0.9), 0.5, 2) == ()
    assert flags(ZERO, Snapshot(cpu_seconds=0.8), 0.5, 2) == ("cpu=0.80",)
    assert flags(ZERO, Snapshot(cpu_seconds=0.8), 0.5, 0) == ()  # on a GPU the processor may well wait


def test_other_threads_that_compute() -> None:
    alone = Snapshot(cpu_seconds=0.52, thread_seconds=0.5)
    assert flags(ZERO, alone, 0.5, 1) == ()
    assert flags(ZERO, replace(alone, cpu_seconds=0.75), 0.5, 1) == ("others=0.50",)
    assert flags(ZERO, replace(alone, cpu_seconds=0.99), 0.5, 2) == ()  # on two threads that is the point


def test_a_long_block_may_be_switched_now_and_then() -> None:
    assert flags(ZERO, Snapshot(preemptions=3), 0.2, 0) == ()
    assert flags(ZERO, Snapshot(preemptions=20), 0.2, 0) == ("preempted",)


def test_switches_that_cost_nothing_are_none() -> None:
    before = Snapshot(waited=1.0)
    assert flags(before, Snapshot(preemptions=2, waited=1.00004), 5e-3, 0) == ()
    assert flags(before, Snapshot(preemptions=2, waited=1.00006), 5e-3, 0) == ("preempted", "waited=0.000060")
    assert flags(before, Snapshot(preemptions=0, waited=1.00006), 5e-3, 0) == ()
    assert flags(before, Snapshot(preemptions=1, waited=1.00006), 0.2, 0) == ()


def test_without_a_count_of_switches_waiting_is_enough() -> None:
    before = Snapshot(waited=1.0)
    busy = Snapshot(preemptions=None, cpu_seconds=None, faults=7, waited=1.00006)
    assert flags(before, busy, 5e-3, 2) == flags(busy, replace(busy, waited=1.00012), 5e-3, 2)
    assert flags(before, busy, 5e-3, 2) == ("preempted", "waited=0.000060")
    assert flags(before, replace(busy, waited=1.00004), 5e-3, 2) == ()
    assert flags(before, replace(busy, waited=None), 5e-3, 2) == ()


def test_several_threads_that_wait_for_cores_are_not_asked_for_their_processor_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The scheduler may take the core of a thread that asks."""
    monkeypatch.setattr(counters, "Path", lambda *parts: tmp_path.joinpath(*(p.lstrip("/") for p in parts)))
    schedstat, now = write(tmp_path / "proc/self/task/10/schedstat", "0 0 7\n"), [100.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: now[0])

    def asked(found: SystemCounters, seconds: float, waited: float) -> bool:
        now[0] += seconds
        schedstat.write_text(f"0 {int(1e9 * waited)} 7\n")
        snapshot = found.read()
        assert snapshot.waited == pytest.approx(waited)
        assert (snapshot.preemptions is None) == (snapshot.cpu_seconds is None)
        return snapshot.cpu_seconds is not None

    both = SystemCounters(threads=2)
    assert [asked(both, 1.0, waited) for waited in (0.0, 0.05, 0.2, 0.6, 0.65)] == [True, True, False, False, True]
    assert not asked(both, 1.0, 0.9)
    assert not asked(both, 0.05, 0.9)  # too soon for another look
    assert asked(both, 0.06, 0.9)
    alone = SystemCounters(threads=1)
    assert all(asked(alone, 1.0, waited) for waited in (1.0, 1.5, 2.0))


def test_waiting_of_all_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "Path", lambda *parts: tmp_path.joinpath(*(p.lstrip("/") for p in parts)))
    write(tmp_path / "proc/self/task/10/schedstat", "5000 2000000000 7\n")
    other = write(tmp_path / "proc/self/task/11/schedstat", "5000 500000000 7\n")
    found = SystemCounters()
    assert found.read().waited == pytest.approx(2.5)
    other.write_text("")  # as if its thread had ended
    assert found.read().waited == pytest.approx(2.5)
    write(tmp_path / "proc/self/task/12/schedstat", "0 250000000 1\n")
    found._slow_read = -1.0  # a while later
    assert found.read().waited == pytest.approx(2.75)


def test_of_a_gpus_process_only_the_threads_that_launch_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On 128 cores asking every thread of the pool takes 0.4 ms for each block of 1 ms."""
    monkeypatch.setattr(counters, "Path", lambda *parts: tmp_path.joinpath(*(p.lstrip("/") for p in parts)))
    monkeypatch.setattr(counters.os, "getpid", lambda: 10)
    for thread, name in [(10, "python"), *((n, "python") for n in range(11, 138)), (138, "pt_autograd_0")]:
        write(tmp_path / f"proc/self/task/{thread}/schedstat", "5000 1000000000 7\n")
        write(tmp_path / f"proc/self/task/{thread}/comm", f"{name}\n")
    read, pread = [], os.pread
    monkeypatch.setattr(counters.os, "pread", lambda *given: read.append(given) or pread(*given))
    assert SystemCounters(launching=True).read().waited == pytest.approx(2)
    assert len(read) == 2
    assert SystemCounters().read().waited == pytest.approx(129)


def test_own_counts_of_this_process() -> None:
    found = SystemCounters()
    before = found.read()
    with mmap(-1, 64 << 20) as memory:  # not from the allocator, which may have pages to reuse
        for at in range(0, len(memory), 4096):
            memory[at] = 1
        after = found.read()
    assert after.cpu_seconds > before.cpu_seconds
    assert after.faults > before.faults
    assert any(flag.startswith("faults=") for flag in found.flags(before, after, 1.0, 0))


def test_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS: no /proc, no affinity."""
    monkeypatch.setattr(counters, "Path", lambda *parts: tmp_path.joinpath(*(p.lstrip("/") for p in parts)))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    found = SystemCounters()
    snapshot = found.read()
    assert (snapshot.stolen, snapshot.throttled, snapshot.clock) == (None, None, None)
    assert snapshot.waited is None
    assert not set(found.flags(snapshot, found.read(), 1.0, 0)) & {"throttled", "stolen"}


def test_without_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "resource", None)
    monkeypatch.delattr(os, "getloadavg")
    assert SystemCounters().read().faults == 0


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "Path", lambda *parts: tmp_path.joinpath(*(p.lstrip("/") for p in parts)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    stat = write(tmp_path / "proc/stat", "cpu  100 10 20 1000 5 1 2 7 50 0\ncpu0 1 2\n")
    write(tmp_path / "proc/self/cgroup", "0::/jobs/mine\n")
    throttle = write(tmp_path / "sys/fs/cgroup/jobs/mine/cpu.stat", "usage_usec 5\nnr_periods 9\nnr_throttled 4\n")
    rated = write(tmp_path / "sys/devices/system/cpu/cpu1/cpufreq/base_frequency", "2000000\n")
    write(rated.with_name("scaling_cur_freq"), "1400000\n")
    found = SystemCounters()
    before = found.read()
    assert (before.stolen, before.throttled, before.clock) == (None, 4, 0.7)
    throttle.write_text("nr_throttled 5\n")
    stat.write_text("cpu  100 10 20 1000 5 1 2 17 50 0\n")
    found._stat_read = -1.0  # a while later
    after = found.read()
    assert after.stolen == pytest.approx(10 / 10)  # user to softirq as they were: all that passed was stolen
    assert {"throttled", "stolen", "clock=0.70"} <= set(found.flags(before, after, 1.0, 0))
    again = found.read()  # not read again yet: it still tells of these blocks
    assert "stolen" in found.flags(after, again, 2e-3, 0)
    found._stat_read = -1.0
    assert found.read().stolen is None  # nothing has passed
    stat.write_text("cpu rubbish\n")
    throttle.unlink()
    found._stat_read = -1.0
    assert (found.read().stolen, found.read().throttled) == (None, None)


def test_version_1_of_cgroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "Path", lambda *parts: tmp_path.joinpath(*(p.lstrip("/") for p in parts)))
    write(tmp_path / "proc/self/cgroup", "3:cpuset:/x\n4:cpu,cpuacct:/jobs\n")
    write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.stat", "nr_periods 3\nnr_throttled 2\nthrottled_time 0\n")
    assert SystemCounters().read().throttled == 2


def test_no_quota_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "Path", lambda *parts: tmp_path.joinpath(*(p.lstrip("/") for p in parts)))
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.stat", "usage_usec 1\nnr_periods 0\nnr_throttled 0\n")
    assert SystemCounters().read().throttled is None


def test_clock_counts_calls_and_leaves_out_what_runs_ahead() -> None:
    calls: list[str] = []
    clock = CpuClock()
    start = clock.now()
    seconds = clock.time(lambda: calls.append("call"), 3)
    assert calls == ["call"] * 3
    assert 0 < seconds <= clock.now() - start
    start, calls[:] = clock.now(), []
    seconds = clock.time(lambda: calls.append("call"), 2, lambda: calls.append("before"))
    assert calls == ["before", "call"] * 2
    assert 0 < seconds <= clock.now() - start


def test_clock_on_a_counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    def passes(nanoseconds: int) -> None:
        now[0] += nanoseconds

    monkeypatch.setattr("ffncli.bench.timing.clock._READ", lambda: now[0])  # fixed when the worker starts
    assert CpuClock().time(lambda: passes(7), 3) == pytest.approx(21e-9)
    assert CpuClock().time(lambda: passes(7), 3, lambda: passes(1000)) == pytest.approx(21e-9)
