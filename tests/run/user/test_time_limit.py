"""A user's file that does not load in time: interrupted in Python code, in waits and in C, and nothing of it stays."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ffncli.errors import ExitCode, FFNError
from ffncli.run.user.time_limit import OutOfTime, ProcessEnd, limited_loading, loading, set_load_time
from tests import ROOT
from tests.oracles.checkpoints import expect_refusal

PATH = Path("slow.py")


def spin():
    while True:
        pass


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def keep_trying():
    while True:
        with suppress(Exception):
            time.sleep(10)


def swallow_the_first():
    """Twice, and then it has loaded; the exceptions that came."""
    swallowed = []
    for _ in range(2):
        try:
            time.sleep(10)
        except BaseException as error:
            swallowed.append(type(error))
    return swallowed


@pytest.fixture
def guards(monkeypatch):
    """The guards that were started."""
    started, popen = [], subprocess.Popen

    def recorded(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return started


@pytest.mark.parametrize("load", [spin, wait_for_a_lock, keep_trying, lambda: time.sleep(10)])
def test_what_returns_to_python_is_interrupted_and_all_is_as_before(load, guards):
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGQUIT)
    began = time.monotonic()
    line = "^slow.py did not load within 50.0 ms; load_time allows more$"
    with pytest.raises(FFNError, match=line) as caught, limited_loading(0.05), loading(PATH):
        load()
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert time.monotonic() - began < 5
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGQUIT)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert [guard.poll() for guard in guards] == [-signal.SIGKILL]


def test_an_alarm_that_was_swallowed_comes_again(monkeypatch):
    monkeypatch.setattr("ffncli.run.user.time_limit._AGAIN", 0.05)
    with limited_loading(0.05), loading(PATH):
        assert swallow_the_first() == [OutOfTime, OutOfTime]


def test_a_load_within_its_time_and_one_inside_another(guards):
    with limited_loading(60), loading(PATH):
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        with loading(Path("inner.py")):
            pass
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0  # the inner one has not stopped it
    assert [guard.poll() for guard in guards] == [-signal.SIGKILL]


def test_without_a_limit_and_in_a_thread_nothing_is_started(guards):
    with loading(PATH):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    errors = []

    def load():
        try:
            with limited_loading(0.01), loading(PATH):
                time.sleep(0.05)
        except FFNError as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert (errors, guards) == ([], [])


def test_the_limit_of_an_option_lasts_as_long_as_the_command(guards):
    with limited_loading(60):
        set_load_time(None)
        set_load_time(7)
        with loading(PATH):
            assert 6 < signal.getitimer(signal.ITIMER_REAL)[0] <= 7
    with loading(PATH):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


IN_C = """
from pathlib import Path
from ffncli.run.user import time_limit
time_limit._GRACE = 0.1
with time_limit.limited_loading(0.1), time_limit.loading(Path("slow.py")):
    sum(range(10**15))  # one call of C: it holds Python's lock for days
"""


def test_c_code_that_never_returns_to_python_is_ended_with_the_same_line_and_code():
    done = subprocess.run(
        [sys.executable, "-c", IN_C], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (ExitCode.ENVIRONMENT, "")
    assert done.stderr == "error: slow.py did not load within 100 ms; --load-time allows more\n"


@pytest.mark.parametrize(
    "words",
    [
        "trace slow.py:Slow", "params slow.py:Slow", "verify 4x8 --kernel slow.py:f", "bench slow.py:Slow",
        "activations relu --source slow.py:Slow",
    ],
)  # fmt: skip
def test_every_command_that_loads_a_file_has_the_limit(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text("import time\nfrom torch import nn\nclass Slow(nn.Module): pass\ntime.sleep(30)\n")
    refused = call(*words.split(), "--load-time", "50ms")
    expect_refusal(refused, "slow.py did not load within 50.0 ms", "--load-time allows more", code=3)


def test_a_constructor_that_never_ends(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "from torch import nn\nclass Slow(nn.Module):\n    def __init__(self, d_model=4):\n        while True: pass\n"
    )
    Path("slow.py").write_text(text)
    expect_refusal(call("params", "slow.py", "--load-time", "50ms"), "did not load within 50.0 ms", code=3)


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "ctypes.string_at(0)", "os.abort()"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.runs
def test_code_that_ends_the_process_is_named(ffn, tmp_path: Path, ending: str, inside: bool):
    """A signal leaves the process no time for a line; its exit code is the signal's."""
    inner = f"    {ending}\n" if inside else f"    return x\n{ending}\n"
    (tmp_path / "ends.py").write_text(f"import ctypes, os\ndef f(x, up, down):\n{inner}")
    done = ffn("verify", "8x16:relu", "--no-bias", "--check", "kernels", "-k", "ends.py:f", cwd=tmp_path)
    assert done.returncode < 0
    assert re.search(r"error: the process ended while \S*ends\.py(:f)? ran\n", done.stderr)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.runs
def test_code_that_exits_fails(ffn, tmp_path: Path, inside: bool):
    inner = "    os._exit(0)\n" if inside else "    return x\nos._exit(0)\n"
    (tmp_path / "ends.py").write_text(f"import os\ndef f(x, up, down):\n{inner}")
    done = ffn("verify", "8x16:relu", "--no-bias", "--check", "kernels", "-k", "ends.py:f", cwd=tmp_path)
    assert done.returncode == (1 if inside else 2)
    assert "ends its process, with exit code 0" in done.stderr


def test_a_fork_of_the_code_may_exit(tmp_path: Path):
    """And loads of two threads, of which the first to begin is the first to end, leave `os._exit` as it was."""
    ends, first, second = os._exit, loading("first"), loading("second")
    first.__enter__()
    second.__enter__()
    with pytest.raises(ProcessEnd, match="exit code 7"):
        os._exit(7)
    fork = os.fork()
    if not fork:
        try:
            os._exit(7)
        finally:  # never a second process of pytest
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
    first.__exit__(None, None, None)
    with pytest.raises(ProcessEnd):
        os._exit(7)
    second.__exit__(None, None, None)
    assert os._exit == ends


@pytest.mark.runs
def test_a_kernel_that_never_returns_is_stopped(ffn, tmp_path: Path):
    (tmp_path / "loops.py").write_text("def f(x, up, down):\n    while True:\n        pass\n")
    words = ("verify", "8x16:relu", "--no-bias", "--check", "kernels", "-k", "loops.py:f", "--load-time", "3")
    done = ffn(*words, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.endswith("error: loops.py:f did not return within 3 s; --load-time allows more\n")
