"""`ffn bench` as it is typed; nothing is measured: --suite, and what a run that ends early keeps."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import ffncli
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.request.suite import public_suite
from ffncli.bench.results.grid_file import difference, whole_grid
from ffncli.cli.bench import command as module
from ffncli.cli.bench.command import _kept
from ffncli.errors import FFNError, Terminated

SUITE = public_suite("ffn-1")


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[BenchRequest]:
    """The requests that would have been measured."""
    requests: list[BenchRequest] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_measure", lambda journal, request, plot, output: requests.append(request))
    return requests


def test_it_measures_the_cases_as_they_are_defined(call, measured):
    code, _, err = call("bench", "--suite", "ffn-1", "-k", "packed", "--save", "a.csv")
    assert code == 0, err
    (request,) = measured
    assert (request.cases, request.suite, request.names) == (SUITE.cases("cpu"), SUITE.tag, ("eager", "packed"))
    assert request.method == SUITE.method("cpu")
    assert request.asked == {"--kernel": "packed", "--suite": "ffn-1"}


def test_time_and_processes_are_the_user_s_and_a_trial_says_so(call, measured):
    _, _, err = call("bench", "--suite", "ffn-1", "--quick", "--max-time", "1s", "--save", "a.csv")
    assert "a trial: results of ffn-1 have 5 processes or more, this run 3" in err
    method = measured[0].method
    assert (method.processes, method.precision, method.max_time, method.seed) == (3, 0.03, 1.0, SUITE.seed)


def test_its_parts_are_those_of_a_grid(call, measured):
    keys = []
    for part in (1, 2, 3):
        code, _, err = call("bench", "--suite", "ffn-1", "--shard", f"{part}/3", "--save", f"{part}.csv")
        assert (code, f"part {part}/3: 2 of 6 cases" in err) == (0, True)
        keys += [case.key for case in measured[-1].cases]
        assert measured[-1].suite == SUITE.tag
    assert sorted(keys) == sorted(case.key for case in SUITE.cases("cpu"))
    without = whole_grid(replace(measured[0], suite=""), 3)
    assert difference(whole_grid(measured[0], 3), without).startswith("the suite, ")


def test_the_library_refuses_what_the_command_refuses():
    for name, value in {"source": "gpt2", "tokens": (1,), "baseline": "packed", "threads": (1,)}.items():
        with pytest.raises(FFNError, match=f"suite contradicts {name}; a suite's cases, seed and baseline are fixed"):
            ffncli.benchmark(suite="ffn-1", **{name: value})


# --- a run that ends early --------------------------------------------------------------------------------------------


KEPT = "1 of 2 units kept in a.csv; resume with `ffn bench --resume a.csv`"


def ended(stop, tmp_path, monkeypatch):
    """(the error of a run that ends so, its notes)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.partial.jsonl").touch()
    notes: list[str] = []
    files = SimpleNamespace(journal=Path("a.partial.jsonl"), csv=Path("a.csv"))
    journal, request = SimpleNamespace(count=1, files=files), SimpleNamespace(units=2)
    with pytest.raises(BaseException) as caught, _kept(journal, request, SimpleNamespace(note=notes.append)):
        raise stop
    return caught.value, notes


@pytest.mark.parametrize(("stop", "what"), [(KeyboardInterrupt(), "interrupted"), (Terminated(), "terminated")])
@pytest.mark.parametrize("agent", ["True", ""])
def test_the_one_error_of_a_stop_is_the_launcher_s_if_there_is_one(stop, what, agent, tmp_path, monkeypatch):
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": agent}.items():
        monkeypatch.setenv(name, str(value))
    error, notes = ended(stop, tmp_path, monkeypatch)
    if agent:
        assert error is stop
        assert notes == [KEPT]
    else:
        assert isinstance(error, FFNError)
        assert error.message == f"{what}: {KEPT}"
        assert notes == []
