"""Kernels that misbehave while they are timed, with real workers: each costs its own row, and all others are timed.

Not in `make test`, since every kernel that ends its worker costs another one; `make test-cheats` runs it.
"""

import sys

import pytest

from ffncli import benchmark
from ffncli.bench.records import Method
from tests import ROOT
from tests.oracles.processes import expect_end

pytestmark = pytest.mark.cheats

FILE = """
import os, signal, sys, time
import torch

calls, kept = 0, []
WARM = 40  # calls, after which it is timed

def right(x, up, down, up_bias, down_bias):
    global calls
    calls += 1
    return (x @ up.T + up_bias).relu() @ down.T + down_bias

def never_returns(x, up, down, up_bias, down_bias):
    while calls > WARM:
        pass
    return right(x, up, down, up_bias, down_bias)

def never_builds(x, up, down, up_bias, down_bias):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

def stops(x, up, down, up_bias, down_bias):
    if calls > WARM:
        os.kill(os.getpid(), signal.SIGSTOP)
    return right(x, up, down, up_bias, down_bias)

def exits(x, up, down, up_bias, down_bias):
    if calls > WARM:
        os._exit(0)
    return right(x, up, down, up_bias, down_bias)

def leaves_a_child(x, up, down, up_bias, down_bias):
    if calls > WARM and not os.fork():
        os.setsid()
        open(__file__ + ".pid", "w").write(str(os.getpid()))
        time.sleep(600)
    while calls > WARM:
        time.sleep(1)
    return right(x, up, down, up_bias, down_bias)

def forks(x, up, down, up_bias, down_bias):
    if calls == 3 and os.fork():
        os._exit(0)
    return right(x, up, down, up_bias, down_bias)

def closes_all(x, up, down, up_bias, down_bias):
    if calls > WARM:
        os.closerange(0, 100)
        time.sleep(600)
    return right(x, up, down, up_bias, down_bias)

def eats(x, up, down, up_bias, down_bias):
    if calls > WARM:
        kept.append(torch.ones(25_000_000))
    return right(x, up, down, up_bias, down_bias)

def eats_in_a_child(x, up, down, up_bias, down_bias):
    if calls == 2:
        if not os.fork():
            held = [b"x" * 1_500_000_000]
            time.sleep(600)
        time.sleep(5)
    return right(x, up, down, up_bias, down_bias)

def divides(x, up, down, up_bias, down_bias):
    return right(x, up, down, up_bias, down_bias) if calls <= WARM else 1 / 0

def quits(x, up, down, up_bias, down_bias):
    if calls > WARM:
        sys.exit(0)
    return right(x, up, down, up_bias, down_bias)

def interrupts(x, up, down, up_bias, down_bias):
    if calls > WARM:
        raise KeyboardInterrupt
    return right(x, up, down, up_bias, down_bias)

def floods(x, up, down, up_bias, down_bias):
    print("flood " * 2000)
    return right(x, up, down, up_bias, down_bias)
"""
TIMED = "timed out: a call took more than 2 s while it was timed"
NOTES = {
    "never_returns": ("failed", TIMED),
    "never_builds": ("failed", "timed out: building it and its first call took more than 10 s"),
    "stops": ("failed", TIMED),
    "exits": ("failed", "the worker ended with exit code 0: a kernel's code ended its process"),
    "leaves_a_child": ("failed", TIMED),
    "forks": ("failed", "the worker ended with exit code 0"),
    "closes_all": ("failed", "the worker closed its connection"),
    "eats": ("oom", "the worker used more than 1.200 GB of memory (--memory-limit allows more)"),
    "eats_in_a_child": ("oom", "the worker used more than 1.200 GB of memory (--memory-limit allows more)"),
    "divides": ("failed", "hostile.py, line 66: ZeroDivisionError: division by zero"),
    "quits": ("failed", "hostile.py, line 70: SystemExit: 0"),
    "interrupts": ("failed", "KeyboardInterrupt"),
    "floods": ("ok", ""),
}
METHOD = Method(
    processes=1, max_time=0.1, placements=2, rounds=2, block=1e-3, call_time=2.0, memory_limit=1_200_000_000
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", NOTES)
def test_it_costs_its_own_row(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "hostile.py"
    file.write_text(FILE)
    kernels = ["eager", f"mine={file}:{name}"]
    rows = benchmark("32x64:relu", tokens=[4], cache="warm", threads=1, kernel=kernels, method=METHOD)
    eager, mine = rows
    assert (eager.kernel, eager.status, eager.ratio) == ("eager", "ok", 1.0)
    status, note = NOTES[name]
    assert (mine.status, note in mine.note) == (status, True), mine.note
    printed = capfd.readouterr().err
    assert len(printed) < 3 * (64 << 10)
    assert ("was cut after 64 KiB" in printed) == (name == "floods")
    if (left := tmp_path / "hostile.py.pid").exists():
        expect_end(int(left.read_text()), 10)
