"""A run that is killed at any moment, its parent or its worker, and resumed: no row is lost, doubled or damaged.

The worker measures nothing and answers the same every time, so that the result must be that of a run that nobody
stopped. `make test-kills` draws a hundred moments.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from ffncli.bench import suite
from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import TimedUnit
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.results.journal import Journal, ResultFiles, begin
from ffncli.bench.results.row import ResultRow
from ffncli.bench.suite import new_run, resumed, run
from ffncli.errors import FFNError
from tests import ROOT
from tests.bench.stored import blocks_in
from tests.bench.test_suite import RUN, hear_signals, in_process, request, worker_with, workers
from tests.fuzz.results import no_workers

pytestmark = pytest.mark.runs

COUNT = int(os.environ.get("FFN_KILLS", "4"))
SOFTWARE = {"host": "here", "torch": "2.x", "cpu": "fake", "numpy": "2"}
TOKENS = tuple(range(1, 7))
UNITS = 2 * len(TOKENS)
PAUSE = 0.04  # s, of the worker at each case
_PARENT = f"""
import sys
from ffncli.bench import suite
suite.software = lambda: {SOFTWARE}
suite.run.__defaults__ = (suite.run.__defaults__[0], tuple(sys.argv[1].split(",")))
from ffncli.cli.main import main
sys.argv = ["ffn", *sys.argv[2:]]
main()
"""


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(suite, "software", lambda: SOFTWARE)


def unstopped(tmp_path: Path) -> tuple[dict[tuple[str, str], ResultRow], Counter]:
    """(case and kernel → row, how often each block is there) of a run that nobody stopped."""
    path = tmp_path / "unstopped.csv"
    journal = begin(path, request(TOKENS), RUN, SOFTWARE, summarise, False)
    in_process(journal)
    journal.finish()
    return {(row.case, row.kernel): row for row in map(unnamed, read_rows(path))}, blocks(path)


def unnamed(row: ResultRow) -> ResultRow:
    """Without what differs between runs; `unstopped` has no parent that says who the referee was."""
    return replace(row, run_id="", started_utc="", commit="", referee="")


def blocks(path: Path) -> Counter:
    return Counter(repr(block) for _, block in blocks_in(ResultFiles(path).rounds))


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", range(COUNT))
def test_a_run_that_is_killed_is_resumed_to_the_same_result(number: int, tmp_path: Path):
    draw = Random(number)
    sent = draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    at_worker, begun_cases, moment = draw.random() < 0.4, draw.randrange(UNITS + 1), draw.uniform(0, 2 * PAUSE)
    command, log = worker_with(tmp_path, "tokens 0 pause", "tokens 1 pause")
    path = tmp_path / "a.csv"
    options = ("--kernel", "eager,packed", "--tokens", ",".join(map(str, TOKENS)), "--processes", "2", "--threads", "1")
    running = subprocess.Popen(
        [sys.executable, "-c", _PARENT, ",".join(command), "bench", "8x16:swiglu", *options, "--device", "cpu",
         "--save", str(path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=hear_signals,
    )  # fmt: skip
    _wait(running, log, begun_cases, moment)
    killed = _send(running, sent, log if at_worker else None)
    _, err = running.communicate(timeout=60)
    assert "a bug in ffn" not in err, err
    state = "complete" if path.exists() else "not begun"
    if ResultFiles(path).journal.exists():
        with resumed(path) as journal:
            state = f"{journal.count} of {journal.request.units} units kept"
            run(journal, command=command)
    elif not path.exists():  # it had not begun
        with new_run(path, request(TOKENS)) as journal:
            run(journal, command=command)
    print(f"KILL {signal.Signals(sent).name} to the {'worker' if killed else 'parent'}: {state}")  # pytest -s
    _check(path, tmp_path, killed if at_worker else "")
    until = time.monotonic() + 10
    while workers(log) and time.monotonic() < until:
        time.sleep(0.02)
    assert workers(log) == []


def _wait(running: subprocess.Popen[str], log: Path, begun_cases: int, moment: float) -> None:
    """Until the worker has begun so many cases, and a moment longer."""
    while running.poll() is None and (len(log.read_text().splitlines()) if log.exists() else 0) < begun_cases:
        time.sleep(0.005)
    time.sleep(moment if begun_cases else 10 * moment)


def _send(running: subprocess.Popen[str], sent: int, log: Path | None) -> str:
    """Send the signal to the parent, or to the worker whose log this is; how a dead worker's note begins."""
    while log is not None and running.poll() is None:
        for worker in workers(log):
            try:
                os.kill(worker, sent)
            except ProcessLookupError:
                continue
            return "the worker "
        time.sleep(0.01)
    if running.poll() is None:
        running.send_signal(sent)
    return ""


def _check(path: Path, tmp_path: Path, died: str) -> None:
    """The rows and blocks are those of a run that nobody stopped, but for the one case whose worker was killed."""
    expected, there = unstopped(tmp_path)
    rows = [unnamed(row) for row in read_rows(path)]
    assert Counter((row.case, row.kernel) for row in rows) == Counter(expected.keys())
    odd = {row.case for row in rows if row != expected[row.case, row.kernel]}
    assert len(odd) <= bool(died)
    assert all(row.note.startswith(died) and row.status in ("oom", "failed") for row in rows if row.case in odd)
    whole = Counter({text: n for text, n in blocks(path).items() if not any(repr(case) in text for case in odd)})
    assert whole == Counter({text: n for text, n in there.items() if not any(repr(case) in text for case in odd)})
    left = {one.name for one in tmp_path.iterdir() if one.name.startswith("a.")}
    assert left - {"a.csv.lock"} == {"a.csv", "a.rounds.csv"}


def test_a_disk_that_is_full_keeps_what_was_finished(tmp_path: Path):
    """A small file system in memory; with more room the run goes on to the same result."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        path = folder / "a.csv"
        with (
            new_run(path, request(TOKENS)) as journal,
            pytest.raises(FFNError, match="No space left on device") as error,
        ):
            in_process(journal)
        assert error.value.code == 3
        subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True, capture_output=True)
        with resumed(path) as journal:
            assert 0 < journal.count < journal.request.units
            in_process(journal)
            journal.finish()
        expected, there = unstopped(tmp_path)
        assert {(row.case, row.kernel): unnamed(row) for row in read_rows(path)} == expected
        assert blocks(path) == there
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("when", [0, 2, 6], ids=["before the first unit", "between units", "after the last one"])
def test_a_folder_that_is_removed_is_no_success(when: int, tmp_path: Path, call, monkeypatch: pytest.MonkeyPatch):
    folder, add, done = tmp_path / "there", Journal.add, []
    folder.mkdir()

    def added(journal: Journal, unit: TimedUnit, died: bool = False) -> None:
        if len(done) == when:
            shutil.rmtree(folder)
        add(journal, unit, died)
        done.append(unit)
        if len(done) == when == journal.request.units:
            shutil.rmtree(folder)

    monkeypatch.setattr(Journal, "add", added)
    options = ("--kernel", "eager,packed", "--tokens", "1,2,3", "--processes", "2", "--threads", "1", "--device", "cpu")
    with no_workers():
        code, out, err = call("bench", "8x16:swiglu", *options, "--save", str(folder / "a.csv"))
    assert (code, out) == (3, ""), err
    assert "resume with" not in err
    assert "a bug in ffn" not in err
    assert ("was removed" if when == 6 else "cannot write") in err
