"""Rank 0's launches, and the ranks that follow them, with workers that measure nothing and a store in memory."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError

from ffncli.bench import rank_launches
from ffncli.bench.judge.summary import summarise
from ffncli.bench.rank_launches import RankLaunches, follow_ranks, lead_ranks, variables
from ffncli.bench.records import Job, Method, Outcome
from ffncli.bench.request.grid import Grid, build_request
from ffncli.bench.results.journal import resume
from ffncli.bench.suite import new_run, run
from ffncli.block.shard import Ranks
from ffncli.errors import ExitCode, FFNError
from ffncli.run.ranks.environment import Place
from tests import ROOT
from tests.bench.test_suite import worker_with

FIRST = Place(0, 0, 2, 2, "127.0.0.1", 1)
SECOND = replace(FIRST, rank=1, local_rank=1)


class Store:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shared = SimpleNamespace(shared=Store())
    monkeypatch.setattr("ffncli.run.ranks.store.open_store", lambda place, limit: shared)
    monkeypatch.setattr(rank_launches, "_LOOK", 0.02)
    return shared


def request(tokens=(1, 2), processes=2):
    grid = Grid("8x16:swiglu", tokens=tokens, device=("cpu",), threads=(1,), ranks=Ranks(2))
    return build_request(grid, ["eager", "packed"], None, Method(processes=processes))[0]


def over_ranks(store, tmp_path, first=(), second=(), asked=None):
    """(what a run gives, or raises; the exit code of the rank that follows), with these faults of their workers."""
    asked = asked or request()
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    commands = [worker_with(tmp_path / str(rank), *faults)[0] for rank, faults in enumerate((first, second))]
    return over_workers(tmp_path, commands, asked)


def over_workers(tmp_path, commands, asked):
    """The same with these workers of the ranks."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(follow_ranks, SECOND, commands[1])
        try:
            with new_run(tmp_path / "a.csv", asked) as journal, lead_ranks(asked, FIRST) as launches:
                found = run(journal, command=commands[0], launches=launches)
        except FFNError as error:
            found = error
        return found, other.result(timeout=60)


def logged(tmp_path, rank):
    return (tmp_path / str(rank) / "faults.log").read_text().splitlines()


def test_every_rank_starts_a_worker_for_each_process_with_the_same_job(store, tmp_path):
    found, code = over_ranks(store, tmp_path)
    assert code == 0
    assert logged(tmp_path, 0) == logged(tmp_path, 1)
    assert len(logged(tmp_path, 0)) == 4
    assert len(found.rows) == 4
    assert {row.layout for row in found.rows} == {"tp2"}


def test_the_others_end_with_the_exit_code_of_the_first(store, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(follow_ranks, SECOND)
        with pytest.raises(FFNError), lead_ranks(request(), FIRST):
            raise FFNError("wrong results", code=ExitCode.FAILED)
        assert other.result(timeout=10) == 1


def test_a_store_that_no_agent_keeps_is_open_until_the_others_have_read_the_end(store, monkeypatch):
    monkeypatch.setattr(rank_launches, "_LOOK", 0.5)  # a rank that looks seldom
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(follow_ranks, SECOND)
        with lead_ranks(request(), FIRST):
            pass
        store.shared = None  # it closes with rank 0
        assert other.result(timeout=20) == 0


def test_a_rank_whose_store_is_lost_says_that_rank_0_has_ended(store, monkeypatch):
    def lost(keys):
        raise DistNetworkError("Failed to recv, got 0 bytes")

    monkeypatch.setattr(store.shared, "check", lost)
    with pytest.raises(FFNError, match=r"^rank 0 ended before the others$") as caught:
        follow_ranks(SECOND)
    assert caught.value.code == 3


def test_a_worker_that_is_killed_ends_the_run_and_no_kernel_is_blamed(store, tmp_path):
    found, code = over_ranks(store, tmp_path, first=["2 tokens 0 kill"])
    assert isinstance(found, FFNError)
    assert (found.code, code) == (3, 3)
    assert "was killed" in found.message
    assert "on rank 0" in found.message
    kept = resume(tmp_path / "a.csv", summarise)
    assert kept.count == 1  # what was finished before; the rest is still to be done
    assert not kept.died


def script(text):
    """A worker that does this."""
    return (sys.executable, "-c", f"import sys; {text}")


SAYS = "from multiprocessing.connection import Connection; Connection(int(sys.argv[1])).send(('refused', {!r}, '', 3))"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("import time; time.sleep(120)", "import os; os.kill(os.getpid(), 9)", "rank 1: its worker was killed (signal"),
        (SAYS.format("another reports an error"), SAYS.format("no GPU"), "rank 1: no GPU"),
    ],
)
def test_what_ends_another_rank_before_all_have_met_is_said_at_once(store, tmp_path, first, second, words):
    found, code = over_workers(tmp_path, [script(first), script(second)], request())
    assert isinstance(found, FFNError)
    assert words in str(found)
    assert (found.code, code) == (3, 3)


def test_a_kernel_that_another_rank_saw_raise_is_left_out_of_the_next_launch(store):
    store.shared.set("word/0/1", '["packed", "ValueError: out of luck"]')
    launches = RankLaunches(FIRST, request(), store, 0)
    assert launches.endings(wait=True) == {1: ("packed", "ValueError: out of luck")}


def test_ranks_that_say_nothing_are_not_waited_for_long(store, monkeypatch):
    monkeypatch.setattr(rank_launches, "_REPORTING", 0.1)
    start = time.monotonic()
    assert RankLaunches(FIRST, request(), store, 0).endings(wait=True) == {}
    assert time.monotonic() - start < 5


def test_a_job_survives_the_store(store):
    asked = request()
    gone = ((asked.cases[0].key, Outcome("packed", "failed", "a note", error_rel=0.5)),)
    job = Job(1, asked.cases[1:], asked.kernels, asked.baseline, asked.method, gone, (("a case", "why"),))
    RankLaunches(FIRST, asked, store).begin(job, 1)
    told = rank_launches._message(store, 0)
    launch = rank_launches.record_of(rank_launches._Launch, told["launch"], "a launch")
    assert launch.job() == job


def test_workers_of_a_launch_meet_under_a_name_of_their_own(monkeypatch):
    job = Job(0, request().cases, (), None, Method())
    monkeypatch.setattr("ffncli.system.host.affinity", lambda: (0, 1, 2, 3))
    monkeypatch.setattr("ffncli.system.host.one_cpu_per_core", lambda cpus: tuple(cpus)[::1])
    first, again = (variables(SECOND, number, job, 2, {}) for number in (0, 1))
    assert first["TORCHELASTIC_RESTART_COUNT"] != again["TORCHELASTIC_RESTART_COUNT"]
    assert first["OMP_PLACES"] == "{2},{3}"
    assert variables(FIRST, 0, job, 2, {})["OMP_PLACES"] == "{0},{1}"
    assert variables(SECOND, 0, job, 3, {})["OMP_PROC_BIND"] == "false"  # 6 threads on 4 cores
    assert "OMP_PLACES" not in variables(SECOND, 0, job, 2, {"OMP_PLACES": "sockets"})


@pytest.mark.parametrize(("given", "gpu"), [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "6, 7"}, "7")])
def test_a_rank_sees_its_gpu_alone(given, gpu):
    case = replace(request().cases[0], device="cuda")
    named = variables(SECOND, 0, Job(0, (case,), (), None, Method()), 2, given)
    assert (named["CUDA_VISIBLE_DEVICES"], named["LOCAL_RANK"]) == (gpu, "0")
