"""`ffn bench` as it is typed, with nothing measured: --suite, --launcher, and what a run that ends early keeps."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ffncli
from ffncli.bench.launchers import deal
from ffncli.bench.launchers.deal import Dealt
from ffncli.bench.launchers.slot import SlotEvent, Slots
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.request.machines import LauncherChoice, cluster_of
from ffncli.bench.request.suite import public_suite
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.results.grid_file import difference, whole_grid
from ffncli.bench.suite import new_run
from ffncli.cli.bench import command as module
from ffncli.cli.bench.command import _kept
from ffncli.cli.bench.page import longer_command
from ffncli.cli.bench.progress import ClusterProgress, who_does_what
from ffncli.errors import FFNError, Terminated
from ffncli.run.ranks.environment import Place
from ffncli.show.color import Advance
from tests.bench.launchers.test_deal import FakeSlots, over_machines, well
from tests.bench.test_suite import in_process
from tests.oracles.checkpoints import expect_refusal

SUITE = public_suite("ffn-1")


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[BenchRequest]:
    """The requests that would have been measured."""
    requests: list[BenchRequest] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_measure", lambda journal, request, plot, output: requests.append(request))
    return requests


def test_it_measures_the_cases_as_they_are_defined(stdout_of, measured):
    stdout_of("bench", "--suite", "ffn-1", "-k", "packed", "--save", "a.csv", notes=True)
    (request,) = measured
    assert (request.cases, request.suite, request.names) == (SUITE.cases("cpu"), SUITE.tag, ("eager", "packed"))
    assert request.method == SUITE.method("cpu")
    assert request.asked == {"--kernel": "packed", "--suite": "ffn-1"}


def test_time_and_processes_are_the_user_s_and_a_trial_says_so(call, measured):
    _, _, err = call("bench", "--suite", "ffn-1", "--quick", "--max-time", "1s", "--save", "a.csv")
    assert "only a trial: results of ffn-1 need 5 processes or more, and this run has 3" in err
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


# --- --launcher, with slots that measure nothing ----------------------------------------------------------------------


WORDS = ("bench", "8x16:swiglu", "-k", "eager,packed", "--processes", "2", "--save", "a.csv")
RAY = ("--launcher", "ray", "--device", "cpu", "--threads", "1")


@pytest.fixture
def bench(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `ffn bench` in a directory of its own; the slots are `run.slots`, what was opened `run.opened`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Any:
        return call(*arguments)

    @contextmanager
    def opened(cluster: LauncherChoice, size: Any, seconds: float, logs: Path) -> Iterator[Slots]:
        run.opened = (cluster, size, logs.name)  # type: ignore[attr-defined]
        yield run.slots  # type: ignore[attr-defined]

    run.slots = FakeSlots()  # type: ignore[attr-defined]
    monkeypatch.setattr(deal, "open_slots", opened)
    return run


def test_a_grid_over_machines_has_the_page_the_file_and_the_exit_code_of_any_other(bench: Any, tmp_path: Path):
    code, out, err = bench(*WORDS, "-n", "1,2,3", *RAY, "--slots", "2", "--launcher-option", "address=h:1")
    assert code == 0, err
    assert bench.opened == (
        LauncherChoice("ray", 2, {"address": "h:1"}),
        deal.slot_size(over_machines().cases),
        "a.ray",
    )
    rows = [line.split() for line in out.splitlines() if "0.950 [0.950, 0.950]" in line]
    hosts = {row.case: row.host for row in read_rows(tmp_path / "a.csv")}
    assert [row[:2] for row in rows] == [
        [str(n), hosts[case.key]] for n, case in enumerate(over_machines((1, 2, 3)).cases, 1)
    ]
    assert len({*hosts.values()}) > 1
    assert [line.split(" · ")[0] for line in err.splitlines()[1:]] == ["2 of 3", "3 of 3"]
    assert err.splitlines()[1].endswith("8x16:swiglu, 3 tokens")
    assert len(read_rows(tmp_path / "a.csv")) == 6
    assert "--launcher" not in json.dumps([row.case for row in read_rows(tmp_path / "a.csv")])


def test_a_loss_is_news_and_an_interrupted_run_goes_on_where_it_ended(bench: Any, tmp_path: Path):
    def behave(case: str, attempt: int, task: str, place: str) -> SlotEvent:
        if "3 tokens" in case:
            raise KeyboardInterrupt
        return (
            SlotEvent("lost", case, place, "gone")
            if "1 tokens" in case and attempt == 1
            else well(case, attempt, task, place)
        )

    bench.slots = FakeSlots(behave)
    code, _, err = bench(*WORDS, "-n", "1,2,3", *RAY)
    assert code == 130
    assert "node1 was lost with 8x16:swiglu, 1 tokens" in err
    assert err.splitlines()[-1] == ("error: interrupted: 2 of 6 units kept in a.csv; "
                                    "resume with `ffn bench --resume a.csv`")  # fmt: skip
    bench.slots = FakeSlots()
    code, _, err = bench("bench", "--resume", "a.csv", "--launcher", "slurm", "--launcher-option", "cluster=local")
    assert (code, bench.opened[0]) == (0, LauncherChoice("slurm", None, {"cluster": "local"}))
    assert sorted(bench.slots.tries.values()) == [1, 1]
    assert len(read_rows(tmp_path / "a.csv")) == 6


def test_a_part_without_cases_opens_no_slots(bench: Any):
    del bench.slots
    assert bench(*WORDS, "-n", "1", *RAY, "--shard", "2/2")[0] == 0


def test_a_run_that_began_here_is_not_continued_elsewhere(bench: Any, tmp_path: Path):
    with new_run(tmp_path / "a.csv", replace(over_machines(), cluster=None)) as journal:
        in_process(journal, 1)
    expect_refusal(bench("bench", "--resume", "a.csv", "--launcher", "ray"), "the run began on this machine")


def test_under_torchrun_it_is_refused(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ffncli.cli.bench.command.torchrun", lambda: Place(1, 1, 2, 2, "h", 1))
    expect_refusal(bench(*WORDS, *RAY), "--launcher contradicts torchrun")


def test_a_value_may_have_an_equals_sign_and_a_key_dashes():
    assert cluster_of("slurm", None, ["gpu-bind=map_gpu:0=1", "--mem=4G"]) == LauncherChoice(
        "slurm", None, {"gpu_bind": "map_gpu:0=1", "mem": "4G"}
    )


def test_the_longer_command_is_for_the_same_machines():
    request = replace(over_machines(), cluster=LauncherChoice("slurm", 4, {"partition": "long one"}))
    assert longer_command(request).endswith("--launcher slurm --slots 4 --launcher-option 'partition=long one'")


def test_the_progress_names_machines_and_is_short_in_a_bar():
    cases = over_machines().cases
    dealt = Dealt(3, 60, {"node8, slot 2": cases[1], "node7, slot 1": cases[0]})
    text = "3 of 60 · node7, slot 1: 8x16:swiglu, 1 token · node8, slot 2: 8x16:swiglu, 2 tokens"
    assert who_does_what(dealt) == text
    assert who_does_what(Dealt(3, 60, {})) == "3 of 60 · waiting for a machine"
    assert who_does_what(Dealt(60, 60, {})) == "60 of 60"
    shown: list[str] = []

    class Bar(Advance):
        def doing(self, what: str) -> None:
            shown.append(what)

    ClusterProgress(Bar(), shown.append, shown.append, 30)(dealt)
    assert shown == [text[:29] + "…"]


def test_a_long_grid_prints_some_sixty_lines():
    lines: list[str] = []
    progress = ClusterProgress(Advance(), lines.append, lines.append)
    for finished in range(601):
        progress(Dealt(finished, 600, {}))
    assert len(lines) == 60
    with pytest.raises(FFNError):
        cluster_of("ray", None, ["x"])
