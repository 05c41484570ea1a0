"""A worker as its parent sees it: a process, a connection, messages."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from ffncli.bench.activity import SIZE
from ffncli.bench.launch import environment
from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Job, Method
from ffncli.bench.timing import measure_case as measuring
from ffncli.bench.timing import worker
from ffncli.bench.timing.measure_case import measure_case
from ffncli.bench.timing.outcomes import DeviceLost, require_device
from ffncli.bench.timing.reporter import REPORTER
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels.choice import choices
from ffncli.system.host import affinity
from tests import ROOT
from tests.bench.faulty_cuda import FaultyCuda, LaunchingClock
from tests.bench.timing.test_measure_case import ROOF, Clock, Counters
from tests.bench.timing.test_settings import blas_has_threads_of_its_own
from tests.system import fake_gpu

pytestmark = pytest.mark.runs

USER = """
import os
print("loaded")
calls = iter(range(100))  # more would fill the pipe, which is read at the end
def loud(x, up, down, up_bias, down_bias):
    if next(calls, None) is not None:
        os.write(1, b"called")
    return (x @ up.T + up_bias).relu() @ down.T + down_bias
"""


def job(*kernels: str) -> Job:
    cases = tuple(Case("8x16", "8x16:relu", FFNSpec(8, 16), tokens) for tokens in (1, 4))
    method = Method(processes=2, block=1e-4, max_time=1.0, placements=2, rounds=2)
    return Job(1, cases, choices(kernels), None, method)


def start(stdout: int = subprocess.PIPE) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    reports = os.open(os.devnull, os.O_WRONLY)
    command = [sys.executable, "-m", "ffncli.bench.timing.worker", str(theirs.fileno()), str(reports)]
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, pass_fds=(theirs.fileno(), reports))
    theirs.close()
    os.close(reports)
    return process, Connection(ours.detach())


def until_closed(connection: Connection) -> Iterator[tuple]:
    """All messages."""
    with suppress(EOFError):
        while True:
            yield connection.recv()


def test_end_to_end(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(USER)
    asked = job("eager", f"mine={file}:loud")
    process, connection = start()
    with process, connection:
        connection.send(asked)
        messages = [connection.recv()]
        os.kill(process.pid, signal.SIGINT)  # Ctrl-C in a terminal goes to all; the parent decides
        while messages[-1] != ("finished",):
            messages.append(connection.recv())
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == b""
    assert b"loaded" in err
    assert b"called" in err
    stages = [m[1:] for m in messages if m[0] == "stage"]  # who is at work, should it die
    assert list(dict.fromkeys(stages)) == [
        ("loading", "mine"), ("starting", ""), ("checking", "eager"), ("checking", "mine"), ("timing", ""),
    ]  # fmt: skip
    assert messages[0] == ("ready",)
    messages = [m for m in messages[1:] if m[0] != "stage"]
    assert [m[0] for m in messages] == ["began", "unit", "began", "unit", "finished"]
    for case, began, (_, unit) in zip(asked.cases, messages[::2], messages[1::2], strict=False):
        assert began == ("began", case.key)
        assert (unit.process, unit.case, unit.baseline, unit.cache) == (1, case.key, "eager", "warm")
        assert [(o.kernel, o.status) for o in unit.outcomes] == [("eager", "ok"), ("mine", "ok")]
        assert {b.kernel for b in unit.blocks} == {"eager", "mine", TWIN, GEMM, ANCHOR}
        assert len([b for b in unit.blocks if b.kernel in ("eager", "mine", TWIN)]) >= 2 * 2 * 3
        assert {"start", "verify", "warm_up", "blocks", "lead_in", "placing", "rest"} <= set(unit.spent)
        assert unit.environment["torch"]
    first, second = messages[1][1], messages[3][1]
    assert first.spent["start"] > 0.0
    assert second.spent["start"] == 0.0


@pytest.mark.parametrize(("text", "why"), [(fake_gpu.BUSY, "the GPU is busy"), (fake_gpu.FULL, "no memory is left")])
def test_a_gpu_that_cannot_be_used_is_refused_before_a_case_begins(text, why, monkeypatch):
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch(text))
    asked = job("eager")
    on_gpu = replace(asked, cases=tuple(replace(case, device="cuda") for case in asked.cases))
    with pytest.raises(FFNError, match=f"--device cuda: {why}") as caught:
        worker.serve(SimpleNamespace(recv=lambda: on_gpu, send=lambda message: None), None)
    assert caught.value.code == 3


def test_nobody_asks():
    process, connection = start()
    connection.close()
    assert process.wait(60) == 0
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_it_dies_with_its_parent(tmp_path):
    """The middle process starts a worker, keeps the line open elsewhere, and is killed."""
    code = f"""
import os, signal, socket, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # or it is ignored already, where tests run in the background
ours, theirs = socket.socketpair()
fd, spare = theirs.fileno(), os.open(os.devnull, os.O_WRONLY)
command = [sys.executable, "-m", "ffncli.bench.timing.worker", str(fd), str(spare)]
w = subprocess.Popen(command, pass_fds=(fd, ours.fileno(), spare))
open({str(tmp_path / "pid")!r}, "w").write(str(w.pid))
print("started", flush=True)
time.sleep(60)
"""
    middle = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    middle.stdout.readline()
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 50
    while b"ffncli.bench.timing.worker" not in _command(pid) or not _ignores_interrupts(pid):  # its settings are made
        assert time.monotonic() < until
        time.sleep(0.05)
    middle.kill()
    middle.communicate()
    while _alive(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


CHILD = """
import os, signal, time
(referee,) = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
open(__file__ + ".pid", "w").write(str(referee))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a referee's process")
def test_a_referee_that_dies_costs_its_case_and_the_worker_ends_in_peace(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CHILD + "os.kill(referee, signal.SIGKILL)\n" + USER)
    process, connection = start()
    with process, connection:
        connection.send(job("eager", f"mine={file}:loud"))
        messages = [message for message in until_closed(connection) if message[0] not in ("ready", "stage")]
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert [m[0] for m in messages] == ["began", "unit"]  # of two cases; the next worker has the other one
    assert {o.status for o in messages[1][1].outcomes} == {"failed"}
    assert {o.note for o in messages[1][1].outcomes} == {
        "the referee's process was killed (signal 9), probably for lack of memory"
    }


@pytest.mark.skipif(sys.platform != "linux", reason="a referee's process")
def test_a_referee_dies_with_its_worker(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CHILD + "time.sleep(60)\n" + USER)
    process, connection = start()
    with process, connection:
        connection.send(job("eager", f"mine={file}:loud"))
        while connection.recv()[:2] != ("stage", "loading"):
            pass
        until = time.monotonic() + 50
        while not (tmp_path / "mine.py.pid").exists() or not (tmp_path / "mine.py.pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        referee = int((tmp_path / "mine.py.pid").read_text())
        assert _alive(referee)
        process.kill()
        process.communicate()
    while _alive(referee):
        assert time.monotonic() < until
        time.sleep(0.05)


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def _ignores_interrupts(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        mask = next(line.split()[1] for line in file if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_memory_is_given_back_before_the_next_case(monkeypatch):
    """Otherwise, what one case has left decides the cache mode of the next; the last one ends with the process."""
    done: list[object] = []

    class Line:
        def recv(self):
            return job("eager")

        def send(self, message):
            done.append(message[0])

    monkeypatch.setattr("ffncli.bench.referee.process.referee_process", lambda *_: nullcontext())
    monkeypatch.setattr("ffncli.bench.timing.measure_case.measure_case", lambda *_, **__: None)
    monkeypatch.setattr("ffncli.bench.machine.machine.release", done.append)
    worker.serve(Line(), None)  # type: ignore[arg-type]
    assert done == ["ready", "began", "unit", "cpu", "began", "unit", "finished"]


PLACES = """
import os

def mlp(x, up, down, up_bias, down_bias):
    tasks = os.listdir("/proc/self/task")
    assert any(len(os.sched_getaffinity(int(task))) > 1 for task in tasks), "all threads are bound to one core"
    return (x @ up.T + up_bias).relu() @ down.T + down_bias
"""


@pytest.mark.skipif(len(affinity()) < 2 or not sys.platform.startswith("linux"), reason="needs two cores on Linux")
def test_workers_that_start_at_once_do_not_share_a_core():
    """OpenMP binds the thread to the first core when torch loads it; without `on_any_core`, the import runs there."""
    code = """
import os, sys
from ffncli.bench.timing.worker import on_any_core
cores = os.sched_getaffinity(0)
with on_any_core(cores):
    import torch
    inside = os.sched_getaffinity(0)
print(len(cores), len(inside), len(os.sched_getaffinity(0)))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(1, "fixed"), capture_output=True, text=True)
    assert done.stdout.split() == [str(len(affinity())), str(len(affinity())), "1"], done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads can be bound on Linux alone")
@pytest.mark.skipif(len(affinity()) < 2, reason="one core")
@pytest.mark.skipif(not blas_has_threads_of_its_own(), reason="a BLAS without threads of its own")
def test_threads_of_numpys_blas_may_run_on_every_core(tmp_path, monkeypatch):
    """torch's are bound, and the worker's main thread with them; OpenBLAS's are started after the referee is forked."""
    file = tmp_path / "mine.py"
    file.write_text(PLACES)
    for name, value in environment(2, "fixed").items():
        monkeypatch.setenv(name, value)
    asked = job("eager", f"mine={file}:mlp")
    asked = replace(asked, cases=tuple(replace(case, threads=2) for case in asked.cases))
    process, connection = start()
    with process, connection:
        connection.send(asked)
        units = [message[1] for message in until_closed(connection) if message[0] == "unit"]
        process.communicate(timeout=60)
    assert len(units) == 2
    for unit in units:
        assert {outcome.kernel: outcome.status for outcome in unit.outcomes} == {"eager": "ok", "mine": "ok"}


# --- a GPU that a kernel has spoilt for the process -------------------------------------------------------------------


FILE = """
from tests.bench import faulty_cuda
calls = 0
def mlp(x, up, down, up_bias, down_bias):
    global calls
    calls += 1
    if calls == {at}:
        faulty_cuda.current().spoil()
    return (x @ up.T + up_bias).relu() @ down.T + down_bias
"""
CASE = Case("s", "s", FFNSpec(8, 16), tokens=4)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(measuring, "_roof", lambda *_: ROOF)
    monkeypatch.setattr(measuring, "gpu_probe", lambda device: (None, ""))
    monkeypatch.setattr(measuring, "neighbours", lambda device: "")
    REPORTER.share(bytearray(SIZE), ("eager", "mine", "conv1x1"))
    yield
    REPORTER.share(bytearray(SIZE), ())


def measured(tmp_path, at: int, stages: list | None = None):
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(at=at))
    method = Method(processes=2, block=1e-3, max_time=1.0, placements=2, rounds=2)
    job = Job(0, (CASE,), choices(["eager", f"mine={file}:mlp", "conv1x1"]), "eager", method)
    with REPORTER.speaking(lambda message: None if stages is None else stages.append(message[1:])):
        return measure_case(CASE, job, LaunchingClock(FaultyCuda()), Counters())


def test_without_a_fault_all_are_timed(tmp_path):
    assert [outcome.status for outcome in measured(tmp_path, at=-1).outcomes] == ["ok"] * 3


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_fault_while_it_is_checked_is_its_own(tmp_path, at):
    """The fifth call is the last one before the next kernel's, and nothing is read from the GPU after it."""
    stages: list = []
    with pytest.raises(DeviceLost, match="CUDA error: an illegal memory access") as lost:
        measured(tmp_path, at, stages)
    assert lost.value.kernel == "mine"
    assert ("checking", "conv1x1") not in stages


@pytest.mark.parametrize("at", [7, 12, 20])
def test_a_fault_while_all_are_timed_is_that_of_the_arm_whose_block_runs(tmp_path, at):
    stages: list = []
    with pytest.raises(DeviceLost, match="CUDA error: an illegal memory access") as lost:
        measured(tmp_path, at, stages)
    assert (lost.value.kernel, stages[-1]) == ("mine", ("timing", ""))


def test_an_error_that_does_not_stay_is_none_of_the_devices():
    clock = LaunchingClock(cuda := FaultyCuda())
    require_device(clock, "mine", RuntimeError("out of memory"))
    require_device(Clock(), "mine", RuntimeError("out of memory"))
    cuda.spoil()
    with pytest.raises(DeviceLost, match="ValueError: no"):
        require_device(clock, "mine", ValueError("no"))


def test_the_worker_tells_its_parent_and_ends_at_once(tmp_path):
    """Nothing is torn down on such a GPU: what torch does when a process ends would raise, or never return."""
    code = """
import atexit, socket, sys
from multiprocessing.connection import Connection
from ffncli.bench.timing import measure_case, worker
from ffncli.bench.timing.outcomes import DeviceLost
from tests.bench.timing.test_worker import job
def lost(*_, **__):
    raise DeviceLost("eager", "CUDA error: an illegal memory access")
measure_case.measure_case = lost
atexit.register(print, "torn down")
(ours, theirs), (spare, reports) = socket.socketpair(), socket.socketpair()
line = Connection(ours.detach())
line.send(job("eager"))
import os, threading
def show():
    os.write(sys.__stderr__.fileno(), repr([line.recv() for _ in range(3)]).encode())
    os.write(sys.__stderr__.fileno(), b" heard")
thread = threading.Thread(target=show)
worker.os._exit, leave = (lambda code: (thread.start(), thread.join(), leave(code))), os._exit
worker.main([str(theirs.detach()), str(reports.detach())])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr.endswith("('lost', 'eager', 'CUDA error: an illegal memory access')] heard")
    assert "torn down" not in done.stdout
