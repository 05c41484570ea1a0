"""What is looked at between blocks, at random moments: here, after every block or after none."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from ffncli.bench.records import Case, Job, Method
from ffncli.bench.timing.cheating import inspector as looking
from ffncli.bench.timing.cheating import probes
from ffncli.bench.timing.cheating.inspector import Inspector
from ffncli.bench.timing.cheating.probes import CallTimes, Probes
from ffncli.bench.timing.outcomes import BrokenArm
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.verdict import WrongCode, WrongResult
from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import choices
from ffncli.system.child import processor_times

SPIN = [sys.executable, "-c", "while True: pass"]


CHANCE = [0.0]  # what is drawn, as a share of the largest number


@pytest.fixture
def inspector(tmp_path, monkeypatch):
    """An inspector of one file's kernel that looks after every block."""
    monkeypatch.setattr(looking, "drawn", lambda below: int(CHANCE[0] * (below - 1)))
    CHANCE[0] = 0.0
    (tmp_path / "mine.py").write_text("def mlp(x, up, down): ...\n")
    case = Case("s", "s", FFNSpec(8, 16, "relu"), 4)
    found = Inspector(Job(0, (case,), choices(["eager", f"mine={tmp_path}/mine.py:mlp"]), None, Method()))
    found.accept_settings()
    yield found
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def arms(inspector, after=None):
    return inspector.watched([Arm(name, lambda: None, after_block=after) for name in ("eager", "mine")], {"mine": None})


def test_a_change_that_is_there_between_two_blocks_ends_the_kernel(inspector):
    done = []
    eager, _ = arms(inspector, lambda: done.append(True))
    eager.after_block()
    assert done == [True]
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with pytest.raises(BrokenArm) as broken:
        eager.after_block()
    assert broken.value.name == "mine"
    assert broken.value.__cause__.ruling.code == WrongCode.ENVIRONMENT_CHANGED
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # put back
    eager.after_block()


def test_most_blocks_are_not_looked_at(inspector):
    eager, _ = arms(inspector)
    CHANCE[0] = 1.0
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    eager.after_block()


def test_processes_are_counted_during_the_blocks_of_the_packages_kernels_alone(inspector):
    eager, mine = arms(inspector)
    eager.after_block()
    with subprocess.Popen(SPIN) as process:
        try:
            time.sleep(0.2)
            mine.after_block()
            assert inspector._beside == [0.0, 0.0]
            time.sleep(0.2)
            eager.after_block()
        finally:
            process.kill()
    cpu, seconds = inspector._beside
    assert seconds >= 0.2
    assert 0 < cpu <= seconds * (os.cpu_count() or 1)


def test_a_process_counts_while_it_runs_and_after_its_end():
    before = processor_times()
    with subprocess.Popen([sys.executable, "-c", "input(sum(range(10**6)))"], stdin=subprocess.PIPE) as process:
        key = f"process {process.pid}"
        while processor_times().get(key, 0) < 1_000_000:
            time.sleep(0.01)
        during = processor_times()
        process.communicate(b"\n")
    after = processor_times()
    assert key not in before | after
    assert key in during
    assert after["ended processes"] - before["ended processes"] >= 1_000_000
    assert str(os.getpid()) in after
    assert str(os.getpid()) not in processor_times(threads=False)


@pytest.mark.parametrize(("threads", "short", "accused"), [(1, 4, False), (1, 5, True), (2, 24, False), (2, 25, True)])
def test_a_kept_answer_is_one_that_is_fast_every_time(monkeypatch, threads, short, accused):
    """On several threads of a busy machine, an honest kernel's calls on a known input took less time five times in a
    row in about 1 of 200 runs."""
    shares = iter([*[0.5] * short, 1.0])
    monkeypatch.setattr(probes, "call_times", lambda *_: CallTimes(1000, int(1000 * next(shares))))
    case = Case("s", "s", FFNSpec(8, 16, "relu"), 4, threads=threads)
    asked = Probes(SimpleNamespace(case=case), None, frozenset(), None, ())
    if accused:
        with pytest.raises(WrongResult, match="on an input that it has seen before"):
            asked._require_no_kept_answers(None)
    else:
        asked._require_no_kept_answers(None)
