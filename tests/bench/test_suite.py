"""The parent of a benchmark, with a worker that measures nothing: order, deaths, signals, and what a crash leaves."""

import errno
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ffncli.bench import launch, suite
from ffncli.bench.judge import summary
from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import CaseReport, Finding, Job, Method, Outcome
from ffncli.bench.request.grid import BenchRequest, Grid, cases, from_json, to_json
from ffncli.bench.request.machines import GridPart
from ffncli.bench.results.csv_file import read_results, read_rows
from ffncli.bench.results.journal import Journal, ResultFiles, begin
from ffncli.bench.results.journal import resume as resume_journal
from ffncli.bench.suite import RunProgress, new_run, resumed, run
from ffncli.errors import FFNError
from ffncli.kernels.choice import choices
from tests import ROOT
from tests.bench import fake_worker
from tests.bench.stored import blocks_in
from tests.oracles.processes import expect_end

pytestmark = pytest.mark.runs

FAKE = (sys.executable, "-m", "tests.bench.fake_worker")
RUN = {"run_id": "r1", "started_utc": "2026-01-01T00:00:00Z", "commit": "c0ffee"}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def request(tokens=(1, 2), kernels=("eager", "packed"), processes=2, threads=(1,), **more) -> BenchRequest:
    found = cases(Grid("8x16:swiglu", tokens=tokens, device=("cpu",), threads=threads))
    return BenchRequest(found, choices(kernels), "eager", Method(processes=processes), **more)


def worker_with(tmp_path: Path, *lines: str) -> tuple[tuple[str, ...], Path]:
    """(the command of a worker with these faults, the file that lists what it began)."""
    file = tmp_path / "faults.txt"
    file.write_text("".join(line + "\n" for line in lines))
    return (*FAKE, str(file)), tmp_path / "faults.log"


def heard(finished=lambda process, case: None, at=lambda stage, seconds: None) -> RunProgress:
    """What calls these as a run goes on."""
    progress = RunProgress()
    vars(progress).update(finished=finished, at=at)
    return progress


def in_process(journal: Journal, most: int | None = None) -> int:
    """The same work without processes: add the units that are not there, at most so many."""
    asked, done = journal.request, 0
    for process in range(asked.method.processes):
        for case in asked.cases:
            if not journal.done(process, case.key) and (most is None or done < most):
                journal.add(fake_worker.unit(case, Job(process, (), asked.kernels, asked.baseline, asked.method)))
                done += 1
    return done


# --- order, rows, files -----------------------------------------------------------------------------------------------


def test_processes_are_outermost_and_every_process_runs_every_case(tmp_path):
    command, log = worker_with(tmp_path)
    asked, path = request(tokens=(1, 2), threads=(1, 2)), tmp_path / "a.csv"
    told = []
    with new_run(path, asked) as journal:
        found = run(journal, heard(lambda process, case: told.append((process, case.tokens, case.threads))), command)
    places = [(p, n, t) for p in (0, 1) for t in (1, 2) for n in (1, 2)]
    assert told == places
    assert [int(line.split()[0]) for line in log.read_text().splitlines()] == [p for p, _, _ in places]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "a.rounds.csv", "faults.log", "faults.txt"]
    assert read_rows(path) == found.rows
    assert {(row.case, row.kernel) for row in found.rows} == {(c.key, k) for c in asked.cases for k in asked.names}
    assert len(found.rows) == 8
    ratios = [row.ratio for row in found.rows if row.kernel == "packed"]
    assert ratios == pytest.approx([0.95] * 4, rel=1e-9)  # noise is the round's, so it divides out
    assert all(row.verdict == "faster" for row in found.rows if row.kernel == "packed")


def test_a_slow_kernel_with_a_certain_verdict_is_left_out_of_later_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "_SLOW", 0.0)
    asked, path = request(tokens=(1,), kernels=("eager", "packed", "module"), processes=5), tmp_path / "a.csv"
    with new_run(path, asked) as journal:
        rows = {row.kernel: row for row in run(journal, command=FAKE).rows}
    assert (rows["packed"].status, rows["packed"].verdict) == ("ok", "faster")
    assert len(rows["packed"].process_ratios) == 3
    assert len(rows["module"].process_ratios) == 5  # the same is never certain
    timed = Counter(block.kernel for _, block in blocks_in(tmp_path / "a.rounds.csv"))
    assert timed["packed"] * 5 == timed["module"] * 3


def test_rows_can_be_made_again_from_the_rounds_file(tmp_path):
    asked, path = request(), tmp_path / "a.csv"
    with new_run(path, asked) as journal:
        found = run(journal, command=FAKE)
    blocks = [block for run_id, block in blocks_in(tmp_path / "a.rounds.csv") if run_id == found.rows[0].run_id]
    again = []
    for case in asked.cases:
        jobs = [Job(p, (), asked.kernels, "eager", asked.method) for p in range(2)]
        units = [
            replace(fake_worker.unit(case, job), referee="process",
                    blocks=tuple(b for b in blocks if b.case == case.key and b.process == job.process))
            for job in jobs
        ]  # fmt: skip
        again += summarise(case, units, asked.method, {n: getattr(found.rows[0], n) for n in RUN})
    assert tuple(again) == read_rows(path)


def test_a_request_survives_json():
    import json

    asked = replace(request(), fail_if_slower=0.03, asked={"--tokens": "1,2"}, files={"/a.py": "00"})
    assert from_json(json.loads(json.dumps(to_json(asked)))) == asked


# --- a worker that dies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        ("kill", "oom", "the worker was killed (signal 9), probably for lack of memory"),
        ("segfault", "failed", "the worker was ended by signal 11 (segmentation fault)"),
        ("exit", "failed", "the worker ended with exit code 5"),
    ],
)
@pytest.mark.parametrize("process", [0, 1])
def test_a_case_that_kills_its_worker_is_not_tried_again_and_the_rest_goes_on(tmp_path, what, status, words, process):
    command, log = worker_with(tmp_path, f" 2 tokens {process} {what}")
    asked = request(tokens=(1, 2, 3))
    with new_run(tmp_path / "a.csv", asked) as journal:
        found = run(journal, command=command)
    of = {(row.case, row.kernel): row for row in found.rows}
    for case in asked.cases:
        row = of[case.key, "packed"]
        assert (row.status, words in row.note) == ((status, True) if case.tokens == 2 else ("ok", False))
        assert row.host == "here" or case.tokens == 2
    begun_cases = [line for line in log.read_text().splitlines() if " 2 tokens" in line]
    assert len(begun_cases) == process + 1
    assert read_rows(tmp_path / "a.csv") == found.rows
    assert len(of) == len(found.rows) == 6


def test_a_kernel_that_kills_its_worker_costs_its_own_row_alone(tmp_path):
    command, log = worker_with(tmp_path, " 2 tokens 0 packed\n 2 tokens 1 packed")
    asked = request(tokens=(1, 2, 3))
    with new_run(tmp_path / "a.csv", asked) as journal:
        found = run(journal, command=command)
    of = {(row.case, row.kernel): row for row in found.rows}
    for case in asked.cases:
        assert (of[case.key, "eager"].status, of[case.key, "eager"].verdict) == ("ok", "same")
        assert of[case.key, "packed"].status == ("oom" if case.tokens == 2 else "ok")
    (killed,) = [case.key for case in asked.cases if case.tokens == 2]
    assert of[killed, "packed"].note.startswith("the worker was killed (signal 9), probably for lack of memory")
    begun_there = [line for line in log.read_text().splitlines() if " 2 tokens" in line]
    assert len(begun_there) == asked.method.processes + 1  # tried once, then left out: also in the other processes


@pytest.fixture
def minutes(monkeypatch):
    """A clock on which every look is a minute after the last one, and a parent that waits for nothing."""
    monkeypatch.setattr(suite, "_TICK", 0.01)
    return itertools.count(0.0, 60.0).__next__


def test_a_file_that_never_ends_loading_costs_its_own_rows(tmp_path, minutes):
    """It is waited for once, not in every case and process; the others are measured."""
    command, log = worker_with(tmp_path, *(f" {n} tokens {p} hangs" for n in (1, 2) for p in (0, 1)))
    asked, seen = request(tokens=(1, 2)), []
    with new_run(tmp_path / "a.csv", asked) as journal:
        found = run(journal, heard(at=lambda *stage: seen.append(stage)), command, now=minutes)
    assert {(row.kernel, row.status) for row in found.rows} == {("eager", "ok"), ("packed", "failed")}
    notes = {row.note.partition(";")[0] for row in found.rows if row.kernel == "packed"}
    assert notes == {"the worker did not load its file within 3 min (--load-time allows more)"}
    loading = [seconds for stage, seconds in seen if (stage.doing, stage.kernel) == ("loading", "packed")]
    assert 0 < max(loading) <= 180
    assert len(log.read_text().splitlines()) == asked.units + 1


def test_after_a_spoiled_capture_another_worker_launches_the_case_plainly(tmp_path):
    command, log = worker_with(tmp_path, "1 tokens 0 spoils", "1 tokens 1 spoils")
    asked, path = request(tokens=(1, 2)), tmp_path / "a.csv"
    with new_run(path, asked) as journal:
        found = run(journal, command=command).rows
    began = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    assert [(process, key.split(", ")[1]) for process, key in began] == [
        ("0", "1 tokens"), ("0", "1 tokens"), ("0", "2 tokens"), ("1", "1 tokens"), ("1", "2 tokens"),
    ]  # fmt: skip
    assert [(row.tokens, row.status, row.launch) for row in found if row.kernel == "packed"] == [
        (1, "ok", "plain"), (2, "ok", ""),
    ]  # fmt: skip
    assert "no CUDA graphs, as packed cannot be captured: it waits" in found[0].note
    assert read_rows(path) == found


def test_where_graphs_were_asked_for_a_spoiled_capture_costs_its_own_row(tmp_path):
    command, _ = worker_with(tmp_path, "1 tokens 0 spoils", "1 tokens 1 spoils")
    asked = request(tokens=(1,), kernels=("eager", "packed", "numpy"))
    asked = replace(asked, method=replace(asked.method, launch="graphs"))
    with new_run(tmp_path / "a.csv", asked) as journal:
        found = run(journal, command=command).rows
    assert [(row.kernel, row.status) for row in found] == [("eager", "ok"), ("packed", "skipped"), ("numpy", "ok")]
    assert found[1].note.startswith("cannot be captured: it waits")


def test_a_resumed_run_launches_a_case_as_it_began(tmp_path):
    """One process is finished, plainly, since a capture was spoiled: the other does not try again."""
    command, log = worker_with(tmp_path, "1 tokens 0 spoils", "1 tokens 1 spoils")
    asked, path = request(tokens=(1,)), tmp_path / "a.csv"
    with new_run(path, asked) as journal:
        plain = ((asked.cases[0].key, "packed cannot be captured: it waits"),)
        job = Job(0, (), asked.kernels, asked.baseline, asked.method, plain=plain)
        journal.add(fake_worker.unit(asked.cases[0], job))
    with resumed(path) as journal:
        found = run(journal, command=command).rows
    assert len(log.read_text().splitlines()) == 1
    assert {row.launch for row in found} == {"plain"}
    assert not any(row.warnings and "environment" in str(row.warnings) for row in found)


@pytest.mark.parametrize("ended", [False, True])
def test_a_resumed_run_leaves_out_what_ended_a_worker_whatever_a_note_says(tmp_path, ended):
    """A kernel may raise an error that reads like a note about its worker's end."""
    asked, path = request(tokens=(1,)), tmp_path / "a.csv"
    (case,) = asked.cases
    outcome = Outcome("packed", "failed", "the worker of my pool has stopped", ended_worker=ended)
    with new_run(path, asked) as journal:
        job = Job(0, (), asked.kernels, asked.baseline, asked.method, ((case.key, outcome),))
        journal.add(fake_worker.unit(case, job))
    with resumed(path) as journal:
        run(journal, command=FAKE)
        (second,) = [o for o in journal.units[case.key][1].unit.outcomes if o.kernel == "packed"]
    assert second.status == ("failed" if ended else "ok")


def test_the_limit_of_loading_is_what_was_asked_for(tmp_path, minutes):
    command, _ = worker_with(tmp_path, " 1 tokens 0 hangs")
    asked = request(tokens=(1,), processes=1)
    asked = replace(asked, method=replace(asked.method, load_time=3600.0))
    seen = []
    with new_run(tmp_path / "a.csv", asked) as journal:
        found = run(journal, heard(at=lambda stage, seconds: seen.append(seconds)), command, now=minutes)
    assert max(seen) == 3600.0
    assert "within 60 min" in found.rows[1].note


OUT_OF_TIME = "the worker timed out: a call took more than 2 min while it was timed (--call-time allows more)"
ENDINGS = {
    "never-returns": ("failed", OUT_OF_TIME),
    "stops": ("failed", OUT_OF_TIME),
    "exits": ("failed", "the worker ended with exit code 0: a kernel's code ended its process"),
    "forks": ("failed", "the worker ended with exit code 0: a kernel's code ended its process"),
    "closes-all": ("failed", "the worker closed its connection"),
    "eats": ("oom", "the worker used more than 200.0 MB of memory (--memory-limit allows more)"),
    "loses-gpu": ("failed", "the worker lost its GPU: CUDA error: an illegal memory access was encountered \\x1b[2J"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ENDINGS)
def test_what_a_timed_kernel_does_to_its_worker_costs_its_own_row(tmp_path, minutes, monkeypatch, what):
    """It is tried once; the other kernels are measured in all cases and processes, and no process is left."""
    monkeypatch.setattr(launch, "_PATIENCE", 0.1)
    command, log = worker_with(tmp_path, f" 2 tokens 0 {what}", f" 2 tokens 1 {what}")
    asked = request(tokens=(1, 2))
    asked = replace(asked, method=replace(asked.method, memory_limit=200_000_000))
    with new_run(tmp_path / "a.csv", asked) as journal:
        found = run(journal, command=command, now=minutes if "timed out" in ENDINGS[what][1] else time.monotonic)
    of = {(row.tokens, row.kernel): row for row in found.rows}
    assert [of[1, "eager"].status, of[2, "eager"].status, of[1, "packed"].status] == ["ok"] * 3
    assert of[2, "eager"].processes == 2
    assert (of[2, "packed"].status, of[2, "packed"].note) == ENDINGS[what]
    assert len(log.read_text().splitlines()) == asked.units + 1
    assert workers(log) == []


def test_a_flood_of_prints_is_cut_and_costs_nothing(tmp_path, capfd):
    command, _ = worker_with(tmp_path, " 1 tokens 0 floods", " 1 tokens 1 floods")
    with new_run(tmp_path / "a.csv", request(tokens=(1,))) as journal:
        found = run(journal, command=command)
    assert {row.status for row in found.rows} == {"ok"}
    out, err = capfd.readouterr()
    note = "\nnote: the output of the timed kernels was cut after 64 KiB\n"
    assert (out, err.count(note)) == ("", 1)  # for both processes together
    assert len(err) < 2 * (64 << 10) + 200  # the first lines may come before the stage is known


def test_a_resumed_run_leaves_out_what_killed_a_worker(tmp_path):
    command, log = worker_with(tmp_path, " 2 tokens 0 packed\n 2 tokens 1 packed")
    asked, path = request(tokens=(2,)), tmp_path / "a.csv"

    def stop(process, case):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), new_run(path, asked) as journal:
        run(journal, heard(stop), command)
    with resumed(path) as journal:
        found = run(journal, command=command)
    assert [(row.kernel, row.status) for row in found.rows] == [("eager", "ok"), ("packed", "oom")]
    assert len(log.read_text().splitlines()) == asked.method.processes + 1


def test_a_worker_that_cannot_start_is_one_line_and_leaves_nothing(tmp_path):
    with pytest.raises(FFNError, match=r"could not start .ended with exit code 3."), new_run(tmp_path / "a.csv", request()) as journal:  # fmt: skip  # noqa: E501
        run(journal, command=(sys.executable, "-c", "import sys; sys.exit(3)"))
    assert list(tmp_path.iterdir()) == []


# --- a crash at any byte ----------------------------------------------------------------------------------------------


def snapshots(path: Path, asked: BenchRequest) -> tuple[dict[str, bytes], list[dict[str, bytes]]]:
    """(the finished files, the files after each unit)."""
    files = ResultFiles(path)
    journal = begin(path, asked, RUN, {}, summarise, False)
    states = []
    for _ in range(asked.units + 1):
        there = [p for p in (files.csv, files.rounds, files.journal) if p.exists()]
        states.append({p.name: p.read_bytes() for p in there})
        in_process(journal, 1)
    journal.finish()
    return {p.name: p.read_bytes() for p in (files.csv, files.rounds)}, states


def restored(path: Path, state: dict[str, bytes]) -> None:
    files = ResultFiles(path)
    for one in (files.csv, files.rounds, files.journal):
        one.unlink(missing_ok=True)
    for name, raw in state.items():
        path.with_name(name).write_bytes(raw)


def places(raw: bytes, first: int, step: int) -> list[int]:
    """Where a file may end: at every `step`-th byte from `first`, and all around every line's end."""
    ends = [at + near for at, byte in enumerate(raw) if byte == ord("\n") for near in (-1, 0, 1, 2)]
    return sorted({n for n in [*range(first, len(raw), step), *ends, len(raw)] if first <= n <= len(raw)})


@pytest.mark.parametrize("torn", ["a.partial.jsonl", "a.rounds.csv", "a.csv"])
def test_a_crash_at_any_byte_of_a_file_is_resumed_to_the_same_result(tmp_path, torn, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # thousands of them
    path, asked = tmp_path / "a.csv", request(tokens=(1,), kernels=("eager",))
    whole, states = snapshots(path, asked)
    first = states[0]["a.partial.jsonl"].index(b"\n") + 1
    last = states[-1]
    for length in places(last[torn], first if torn == "a.partial.jsonl" else 0, 29):
        restored(path, last | {torn: last[torn][:length]})
        journal = resume_journal(path, summarise)
        in_process(journal)
        journal.finish()
        assert {name: path.with_name(name).read_bytes() for name in whole} == whole, length


def test_a_crash_between_two_files_is_resumed_to_the_same_result(tmp_path):
    path, asked = tmp_path / "a.csv", request()
    whole, states = snapshots(path, asked)
    for before, after in itertools.pairwise(states):
        for reached in (1, 2):  # the rounds are written, then the journal, then the rows
            names = ("a.rounds.csv", "a.partial.jsonl")[:reached]
            restored(path, before | {name: after[name] for name in names})
            journal = resume_journal(path, summarise)
            in_process(journal)
            journal.finish()
            assert {name: path.with_name(name).read_bytes() for name in whole} == whole


def test_what_is_finished_is_not_measured_again(tmp_path):
    path, asked = tmp_path / "a.csv", request()
    _, states = snapshots(path, asked)
    for done, state in enumerate(states):
        restored(path, state)
        assert in_process(resume_journal(path, summarise)) == asked.units - done


def test_a_journal_without_a_request_or_with_a_damaged_line_is_refused(tmp_path):
    path, asked = tmp_path / "a.csv", request()
    _, states = snapshots(path, asked)
    journal = states[-1]["a.partial.jsonl"]
    for raw, words in (
        (journal[:40], "has no request"),
        (b"{}\n", "line 1: not a request"),
        (b"[" * 100_000 + b"\n", "line 1 is nested too deeply"),
        (journal.replace(b'"outcomes"', b'"outcom', 1), "line 2 is not JSON"),
    ):
        restored(path, states[-1] | {"a.partial.jsonl": raw})
        with pytest.raises(FFNError, match=words):
            resume_journal(path, summarise)
    path.with_name("a.partial.jsonl").unlink()
    with pytest.raises(FFNError, match=r"nothing to resume.*a.csv is complete"):
        resume_journal(path, summarise)


def test_another_machine_or_version_or_kernel_file_is_not_resumed(tmp_path, monkeypatch):
    kernel, path = tmp_path / "k.py", tmp_path / "a.csv"
    kernel.write_text("def mlp(x, gate, up, down): ...")
    asked = request(files={str(kernel): suite.sha256(kernel)})
    command, _ = worker_with(tmp_path, " 1 tokens 1 other")
    with new_run(path, asked) as journal:
        in_process(journal, 2)
    with resumed(path) as journal, pytest.raises(FFNError, match=r"cannot continue: host is 'there', its run began with 'here'"):  # fmt: skip  # noqa: E501
        run(journal, command=command)
    kernel.write_text("def mlp(x, gate, up, down): return x")
    with pytest.raises(FFNError, match=r"k.py has changed since its run began"), resumed(path):
        pass
    kernel.write_text("def mlp(x, gate, up, down): ...")
    software = suite.software()
    monkeypatch.setattr(suite, "software", lambda: software | {"torch": "9.9"})
    with pytest.raises(FFNError, match=r"torch is '9.9', its run began with") as error, resumed(path):
        pass
    assert error.value.code == 3


# --- the file system --------------------------------------------------------------------------------------------------


def test_one_writer_for_each_file_and_no_lock_is_left(tmp_path):
    path = tmp_path / "a.csv"
    with new_run(path, request()) as journal:
        code = f"from tests.bench.test_suite import *\nwith new_run(Path({str(path)!r}), request()): pass"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert "another ffn bench is writing" in done.stderr
        in_process(journal)
        journal.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "a.rounds.csv"]


def test_files_that_exist_are_kept_unless_forced(tmp_path):
    path, asked = tmp_path / "a.csv", request()
    path.write_text("mine")
    with pytest.raises(FFNError, match="exists already"), new_run(path, asked):
        pass
    assert path.read_text() == "mine"
    with new_run(path, asked, force=True) as journal:
        in_process(journal, 1)
    with pytest.raises(FFNError, match="is unfinished; continue with `ffn bench --resume"), new_run(path, asked):
        pass
    for bad in ("a.txt", "a", "a.rounds.csv"):
        with pytest.raises(FFNError, match=r"must end in \.csv"), new_run(tmp_path / bad, asked):
            pass
    with pytest.raises(FFNError, match="cannot write") as error, new_run(tmp_path / "none" / "a.csv", asked):
        pass
    assert error.value.code == 3


def test_a_full_disk_keeps_what_was_finished(tmp_path):
    """A limit on the size of files stands for the disk."""
    code = """
import resource, sys
from tests.bench.test_suite import *
path = Path(sys.argv[1])
with new_run(path, request(tokens=tuple(range(1, 30)))) as journal:
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        in_process(journal)
    except FFNError as error:
        print(error.code, error.message, journal.count)
"""
    path = tmp_path / "a.csv"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(f"3 cannot write {tmp_path}/a."), done.stderr
    kept = int(done.stdout.split()[-1])
    with resumed(path) as journal:
        assert kept in (journal.count, journal.count + 1)
        left = journal.request.units - journal.count
        assert 0 < in_process(journal) == left
        journal.finish()
    assert len(read_rows(path)) == 58
    assert len(read_results(path)) == 58


class FullDisk:
    """A disk that takes no more than `most` bytes of a file, and none at all of the files that are named."""

    def __init__(self, monkeypatch, *names: str) -> None:
        self.names, self.sync = names, os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, handle: int) -> None:
        if any(os.readlink(f"/proc/self/fd/{handle}").split("/")[-1].startswith(f".{name}.") for name in self.names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.sync(handle)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files are in /proc")
@pytest.mark.parametrize("full", ["a.csv", "a.rounds.csv", "a.partial.jsonl", "a.grid.json"])
def test_a_disk_too_full_to_begin_leaves_nothing_behind(tmp_path, monkeypatch, full):
    path, part = tmp_path / "a.csv", GridPart(1, 2)
    with monkeypatch.context() as only:
        FullDisk(only, full)
        asked = new_run(path, request(tokens=(1, 2)), part=part)
        with pytest.raises(FFNError, match=r"cannot write .*: No space left") as error, asked as journal:
            in_process(journal)
    assert error.value.code == 3
    assert not [*tmp_path.iterdir()]
    with new_run(path, request(tokens=(1, 2)), part=part) as journal:
        in_process(journal)
        journal.finish()
    assert len(read_rows(path)) == 2


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files are in /proc")
@pytest.mark.parametrize("full", ["a.csv", "a.rounds.csv"])
def test_a_disk_too_full_to_replace_a_result_keeps_it(tmp_path, monkeypatch, full):
    path = tmp_path / "a.csv"
    with new_run(path, request(tokens=(1,))) as journal:
        in_process(journal)
        journal.finish()
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    with monkeypatch.context() as only:
        FullDisk(only, full)
        with pytest.raises(FFNError, match="No space left"), new_run(path, request(tokens=(2,)), force=True) as journal:
            in_process(journal)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


# --- signals ----------------------------------------------------------------------------------------------------------

_PARENT = """
import sys
from ffncli.bench import launch, suite
suite.run.__defaults__ = (suite.run.__defaults__[0], tuple(sys.argv[1].split(",")))
from ffncli.cli.main import main
sys.argv = ["ffn", *sys.argv[2:]]
main()
"""


def hear_signals() -> None:
    """A background job's child would ignore them."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def parent(command: tuple[str, ...], *arguments: str) -> subprocess.Popen[str]:
    """`ffn bench` with that worker, in a process of its own."""
    words = [sys.executable, "-c", _PARENT, ",".join(command), "bench", *arguments]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_signals, text=True, cwd=ROOT
    )


def workers(log: Path) -> list[int]:
    """Processes that still run with this file."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tests.bench.fake_worker" in words and str(log.with_suffix(".txt")).encode() in words:
            found.append(int(place.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 143, "terminated")],
)
def test_a_signal_ends_the_worker_and_says_how_to_go_on(tmp_path, number, code, word):
    command, log = worker_with(tmp_path, " 2 tokens 0 slow")
    path = tmp_path / "a.csv"
    options = ("--kernel", "eager,packed", "--tokens", "1,2", "--quick", "--threads", "1", "--device", "cpu")
    running = parent(command, "8x16:swiglu", *options, "--save", str(path))
    assert any("1 of 6 units done" in line for line in iter(running.stderr.readline, ""))  # the log may be ahead of it
    until = time.monotonic() + 50
    while time.monotonic() < until and not (log.exists() and " 2 tokens" in log.read_text()):
        time.sleep(0.02)
    assert workers(log)  # the one that measures, and those that wait for their jobs
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == code
    assert f"{word}: 1 of 6 units kept in {path}; resume with `ffn bench --resume {path}`" in err
    assert workers(log) == []
    (tmp_path / "faults.txt").write_text("")
    again = parent(command, "--resume", str(path))
    out, err = again.communicate(timeout=60)
    assert (again.returncode, "1 of 6 units are already finished" in err) == (0, True), err
    assert "0.950 [0.950, 0.950]" in out
    assert len(read_rows(path)) == 4
    assert not path.with_suffix(".partial.jsonl").exists()
    assert log.read_text().count("0 8x16:swiglu, 1 tokens") == 1


_WAITS = """
import os, sys, time
from multiprocessing.connection import Connection
def log(what):
    with open({log!r}, "a") as file:
        file.write(what + " ")
line = Connection(int(sys.argv[1]))
time.sleep(0.1)
log("ready")
line.send(("ready",))
job = line.recv()
log(f"process-{{job.process}}")
line.send(("finished",))
"""


def test_as_many_workers_start_at_once_as_there_are_cores_and_none_while_another_one_works(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "affinity", lambda: {0, 1})
    log = tmp_path / "log"
    command = (sys.executable, "-c", _WAITS.format(log=str(log)))
    pool = launch.WorkerPool(3, command, None)
    ids = []
    for process in range(3):
        with pool.worker(Job(process, (), choices(["eager"]), "eager", Method()), 1) as busy:
            ids.append(busy.process.pid)
            while busy.receive() != ("finished",):
                pass
    assert log.read_text().split() == ["ready", "ready", "process-0", "process-1", "ready", "process-2"]
    assert len(set(ids)) == 3
    with pool.worker(Job(1, (), choices(["eager"]), "eager", Method()), 1):
        (_, waiting), *_ = pool._waiting[False, 1]
        assert waiting.process.poll() is None
    pool.close()
    assert waiting.process.returncode is not None


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups")
def test_what_a_worker_leaves_running_goes_with_it(tmp_path):
    file = tmp_path / "pid"
    code = f"import subprocess,sys; p=subprocess.Popen(['sleep','60']); open({str(file)!r},'w').write(str(p.pid))"
    job = Job(0, (), choices(["eager"]), "eager", Method())
    with launch.worker(job, 1, (sys.executable, "-c", code)) as busy:
        assert busy.ended() == 0
    expect_end(int(file.read_text()), 30)  # of its 60 seconds


def test_the_environment_of_a_worker_is_explicit():
    given = {"OMP_PROC_BIND": "close", "OMP_NUM_THREADS": "7", "GOMP_CPU_AFFINITY": "0", "HOME": "/h"}
    ours = launch.environment(3, "fixed", given)
    assert (ours["OMP_PROC_BIND"], ours["OMP_PLACES"], ours["HOME"]) == ("close", "cores", "/h")
    assert {ours[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    assert "GOMP_CPU_AFFINITY" not in ours
    assert ours["MALLOC_MMAP_THRESHOLD_"] == "1073741824"
    assert not any(name.startswith("MALLOC_") for name in launch.environment(3, "system", given))


def test_threads_of_a_gpus_worker_are_not_bound_to_a_core(monkeypatch):
    """torch's backward thread, the driver's and NVML's would inherit the main thread's one core."""
    ours = launch.environment(1, "fixed", {}, gpu=True)
    assert not {"OMP_PROC_BIND", "OMP_PLACES"} & set(ours)
    assert ours["OMP_NUM_THREADS"] == "1"
    assert launch.environment(1, "fixed", {"OMP_PROC_BIND": "close"}, gpu=True)["OMP_PROC_BIND"] == "close"
    assert launch.environment(1, "fixed", {})["OMP_PROC_BIND"] == "true"
    asked = []
    monkeypatch.setattr(launch, "environment", lambda *given, gpu: asked.append(gpu) or dict(os.environ))
    for device in ("cpu", "cuda:1"):
        job = Job(0, (replace(request().cases[0], device=device),), choices(["eager"]), "eager", Method())
        with launch.worker(job, 1, (sys.executable, "-c", "")) as busy:
            assert busy.ended() == 0
    assert asked == [False, True]


def test_workers_for_a_gpu_may_launch_further_ahead(tmp_path):
    """And so does the worker that runs: it is told by the environment that it is started with."""
    variable = "CUDA_SCALE_LAUNCH_QUEUES"
    assert variable not in launch.environment(1, "fixed", {})
    assert launch.environment(1, "fixed", {}, gpu=True)[variable] == "4x"
    assert launch.environment(1, "fixed", {variable: "2x"}, gpu=True)[variable] == "2x"
    code = f"import os, pathlib; pathlib.Path('seen').write_text(os.environ.get({variable!r}, ''))"
    (case,) = request(tokens=(1,)).cases
    for device, depth in (("cuda:1", "4x"), ("cpu", "")):
        job = Job(0, (replace(case, device=device),), choices(["eager"]), "eager", Method())
        with launch.worker(job, 1, (sys.executable, "-c", code), str(tmp_path)) as busy:
            busy.process.wait(20)
        assert (tmp_path / "seen").read_text() == depth


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_workers_start_where_the_run_began(tmp_path, monkeypatch):
    asked = request(tokens=(1,), kernels=("eager",), directory=str(tmp_path))
    code = "import os, sys; open('here', 'w').write(os.getcwd())"
    with new_run(tmp_path / "a.csv", asked) as journal, pytest.raises(FFNError, match="could not start"):
        run(journal, command=(sys.executable, "-c", code))
    assert (tmp_path / "here").read_text() == os.path.realpath(tmp_path)
    gone = replace(asked, directory=str(tmp_path / "gone"))
    with (
        new_run(tmp_path / "b.csv", gone) as journal,
        pytest.raises(FFNError, match=r"began in .*gone, which no longer exists") as e,
    ):
        run(journal)
    assert e.value.code == 3


def test_what_force_replaces_is_there_until_something_is_finished(tmp_path):
    path = tmp_path / "a.csv"
    with new_run(path, request(tokens=(1,))) as journal:
        run(journal, command=FAKE)
    before = path.read_bytes(), ResultFiles(path).rounds.read_bytes()
    with pytest.raises(FFNError, match="could not start"), new_run(path, request(tokens=(2,)), force=True) as journal:
        run(journal, command=(sys.executable, "-c", ""))
    assert (path.read_bytes(), ResultFiles(path).rounds.read_bytes()) == before
    assert not ResultFiles(path).journal.exists()
    with new_run(path, request(tokens=(2,)), force=True) as journal:
        run(journal, command=FAKE)
    assert {row.tokens for row in read_rows(path)} == {2}


def test_a_device_that_torch_cannot_use_is_an_error_in_one_line(tmp_path):
    asked = request(tokens=(1,), kernels=("eager",))
    asked = replace(asked, cases=tuple(replace(case, device="cuda:999") for case in asked.cases))
    with new_run(tmp_path / "a.csv", asked) as journal, pytest.raises(FFNError, match=r"--device cuda:999: ") as error:
        run(journal)
    assert (error.value.code, journal.count) == (3, 0)


def test_a_message_of_a_worker_runs_nothing(tmp_path):
    """It comes from a process in which a user's code runs; its parent reads records and plain values."""
    file = tmp_path / "made"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(file),)

    ours, theirs = Pipe()
    busy = launch.Worker(None, ours, None, None)
    theirs.send(("unit", Hostile()))
    assert busy.receive() == ("a worker's message must not hold posix.mkdir",)
    assert not file.exists()
    unit = fake_worker.unit(request().cases[0], Job(0, (), choices(["eager"]), "eager", Method()))
    theirs.send(("unit", unit))
    assert busy.receive() == ("unit", unit)


def test_what_a_kernel_writes_to_the_line_ends_its_worker_and_not_the_run():
    """Text looks like the length of a message of gigabytes, and a short length like half of one."""
    for raw in (b"garbage\n" * 10, struct.pack("!i", 100) + b"half"):
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
        theirs.sendall(raw)
        with Connection(ours.detach()) as line, pytest.raises(OSError, match=r"message length|unavailable"):
            launch.Worker(None, line, None, None).receive(1.0)
        theirs.close()


def test_a_report_is_of_its_own_case_and_none_where_the_line_is_closed():
    ours, theirs = Pipe()
    for case in ("a", "b"):
        theirs.send_bytes(
            json.dumps(asdict(CaseReport(case, (Finding(Outcome("mine", "wrong", "off", 0.5)),)))).encode()
        )
    assert launch.report_on(ours, "b") == CaseReport("b", (Finding(Outcome("mine", "wrong", "off", 0.5)),))
    theirs.send_bytes(b'{"case": "c", "findings": [{"kernel": 3}]}')
    assert launch.report_on(ours, "c") is None
    theirs.close()
    assert launch.report_on(ours, "d") is None


def test_a_kernel_is_ok_only_where_the_referee_s_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.Worker, "report", lambda self, case: None)
    with new_run(tmp_path / "a.csv", request()) as journal:
        rows = run(journal, command=FAKE).rows
    assert {row.status for row in rows} == {"failed"}


@pytest.mark.parametrize("referee", ["process", "worker"])
def test_rows_say_who_had_the_answers_and_of_which_suite_they_are(tmp_path, monkeypatch, referee):
    """By what the parent knows: a unit that comes from a worker cannot choose."""
    if referee == "worker":
        monkeypatch.setattr(Method, "refereed_apart", lambda self, case: False)
    with new_run(tmp_path / "a.csv", request(suite="ffn-1@0")) as journal:
        rows = run(journal, command=FAKE).rows
    assert {(row.referee, row.suite) for row in rows} == {(referee, "ffn-1@0")}
