"""A process, what is below it and what it prints: from a made-up /proc, and from real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffncli.system import child
from ffncli.system.child import MOST_OUTPUT, PrintedBytes, descendants, passed_on, used_memory
from tests.oracles.processes import expect_end

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def process(root: Path, pid: int, status: str, **children: str) -> None:
    """A process in a made-up /proc, with the children of its threads."""
    folder = root / f"proc/{pid}"
    for thread, line in (children or {"t0": ""}).items():
        (folder / "task" / thread).mkdir(parents=True)
        (folder / "task" / thread / "children").write_text(line)
    (folder / "status").write_text(status)


def test_the_memory_of_all_threads_children(tmp_path):
    process(
        tmp_path, 1, "Name:\tx\nVmRSS:\t999 kB\nRssAnon:\t10 kB\nRssFile:\t500 kB\nRssShmem:\t3 kB\n", t1="2 ", t2="3 "
    )
    process(tmp_path, 2, "RssAnon:\t100 kB\nVmSwap:\t7 kB\n", t1="4 ")
    process(tmp_path, 3, "Name:\tzombie\nState:\tZ\n")
    process(tmp_path, 4, "RssAnon:\t1000 kB\n")
    process(tmp_path, 5, "RssAnon:\t77777 kB\n")
    assert sorted(descendants(1, tmp_path)) == [2, 3, 4]
    assert used_memory(1, tmp_path) == (13 + 107 + 1000) * 1024
    assert used_memory(6, tmp_path) is None


@pytest.mark.parametrize("by", ["the current folder", "PYTHONPATH", "a relative PYTHONPATH"])
def test_no_file_of_the_user_takes_the_place_of_a_module(tmp_path, monkeypatch, by):
    """Modules of Python and of ffn, which a process loads before it watches what a user's file does, and in the current
    folder those of packages too. PYTHONPATH may have the torch to use, so its packages count."""
    packages = ("typer.py",) if by == "the current folder" else ()
    for name in ("statistics.py", "dataclasses.py", *packages, "ffncli/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the file of the user')")
    monkeypatch.setenv("PYTHONPATH", {"PYTHONPATH": str(tmp_path), "a relative PYTHONPATH": "."}.get(by, ""))
    command = [*child.module_command("ffncli"), "params", "4x8:relu", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_afterwards_the_folders_of_the_user_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/one", "", "/two", "/one"]))
    monkeypatch.setattr(sys, "path", ["/lib"])
    child.see_users_folders()
    assert sys.path == [str(tmp_path), "/one", "/two", "/lib"]


HOLDER = """
import os, sys, time
if os.fork() == 0:
    os.setsid()  # out of the group
    held = b"x" * 50_000_000
    open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""


def test_shared_memory_may_count_once(tmp_path):
    """Where the system says it; a process that has just ended says nothing."""
    process(tmp_path, 1, "RssAnon:\t100 kB\n", t1="2 3 ")
    process(tmp_path, 2, "RssAnon:\t100 kB\n")
    process(tmp_path, 3, "RssAnon:\t5 kB\n")
    for pid in (1, 2):
        rollup = "Rss: 900 kB\nPss: 300 kB\nPss_Anon: 50 kB\nPss_File: 200 kB\nPss_Shmem: 1 kB\nSwapPss: 2 kB\n"
        (tmp_path / f"proc/{pid}/smaps_rollup").write_text(rollup)
    assert used_memory(1, tmp_path) == 205 * 1024
    assert used_memory(1, tmp_path, shared_once=True) == (53 + 53 + 5) * 1024


@LINUX
def test_a_child_that_left_the_group_is_seen_counted_and_ended(tmp_path):
    file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-S", "-c", HOLDER, str(file)], process_group=0)
    until = time.monotonic() + 30
    while not file.exists() or not file.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    pid = int(file.read_text())
    assert descendants(parent.pid) == [pid]
    held = used_memory(parent.pid)
    assert held is not None
    assert 50_000_000 < held < 100_000_000
    child.end(parent)
    expect_end(pid, 30)
    assert descendants(parent.pid) == []


@LINUX
def test_a_copy_of_a_process_does_not_speak_for_it():
    pid = os.getpid()
    child.require_original(pid)
    copied = os.fork()
    if not copied:
        try:
            child.require_original(pid)
        finally:  # never a second process of pytest
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(copied, 0)[1]) == 1


def printed(code: str, most: PrintedBytes | None = None) -> None:
    with passed_on(most or PrintedBytes()) as output:
        subprocess.run([sys.executable, "-S", "-c", code], stdout=output, stderr=output, check=True)


def test_prints_appear_on_stderr(capfd):
    printed("import sys; print('one ü'); print('two', file=sys.stderr)")
    out, err = capfd.readouterr()
    assert (out, sorted(err.splitlines())) == ("", ["one ü", "two"])


def test_a_flood_is_cut_and_does_not_wait(capfd):
    printed("for n in range(2000): print('x' * 999)")
    _, err = capfd.readouterr()
    assert (
        err
        == ("x" * 999 + "\n") * 65
        + "x" * 536
        + f"\nnote: the output of the worker was cut after {MOST_OUTPUT >> 10} KiB\n"
    )


def test_every_source_has_its_share_and_is_cut_once(capfd):
    most = PrintedBytes("mine", most=2048)
    for source in ("mine", "mine", "yours"):
        most.source = source
        printed("print('y' * 3000)", most)
    _, err = capfd.readouterr()
    note = "\nnote: the output of {} was cut after 2 KiB\n"
    assert err == "y" * 2048 + note.format("mine") + "y" * 2048 + note.format("yours")


def test_a_process_that_keeps_the_pipe_is_not_waited_for(capfd):
    start = time.monotonic()
    with passed_on(PrintedBytes()) as output:
        holder = subprocess.Popen(["sleep", "60"], stdout=output)
        os.write(output, b"the last words\n")
    assert time.monotonic() - start < 30
    holder.kill()
    holder.wait()
    assert capfd.readouterr().err == "the last words\n"


def test_no_stderr_is_no_reason_to_stop(monkeypatch):
    """More than a pipe holds is read all the same, so the child ends by itself."""
    monkeypatch.setattr(sys, "stderr", None)
    most = PrintedBytes()
    printed("for n in range(200): print('x' * 999)", most)
    assert most.counts == {"the worker": 200 * 1000}
