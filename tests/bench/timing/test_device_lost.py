"""Errors that stay with a GPU: the kernel that made them is named, and nobody else pays for it."""

import subprocess
import sys

import pytest

from ffncli.bench.activity import SIZE
from ffncli.bench.records import Case, Job, Method
from ffncli.bench.timing import measure_case as measuring
from ffncli.bench.timing.measure_case import measure_case
from ffncli.bench.timing.outcomes import DeviceLost, require_device
from ffncli.bench.timing.reporter import REPORTER
from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import choices
from tests import ROOT
from tests.bench.faulty_cuda import FaultyCuda, LaunchingClock
from tests.bench.timing.test_measure_case import ROOF, Clock, Counters

pytestmark = pytest.mark.runs

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
    method = Method(processes=2, block=1e-3, max_time=0.0, placements=2, rounds=2)
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
    os.write(sys.__stderr__.fileno(), repr([line.recv(), line.recv()]).encode())
    os.write(sys.__stderr__.fileno(), b" heard")
thread = threading.Thread(target=show)
worker.os._exit, leave = (lambda code: (thread.start(), thread.join(), leave(code))), os._exit
worker.main([str(theirs.detach()), str(reports.detach())])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr.endswith("('lost', 'eager', 'CUDA error: an illegal memory access')] heard")
    assert "torn down" not in done.stdout
