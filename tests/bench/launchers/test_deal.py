"""Cases dealt to slots that measure nothing: the order of events, lost machines, refusals, what a crash leaves."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ffncli.bench.judge.gate import failure
from ffncli.bench.launchers.deal import MOST_TRIES, Dealt, run_in_slots
from ffncli.bench.launchers.slot import SlotEvent, measured, task_of, units_of
from ffncli.bench.records import Job
from ffncli.bench.request.grid import BenchRequest, from_json
from ffncli.bench.request.machines import LauncherChoice, slot_size
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.results.journal import ResultFiles, sha256
from ffncli.bench.suite import new_run, resumed
from ffncli.errors import ExitCode, FFNError
from tests import ROOT
from tests.bench import fake_worker
from tests.bench.test_suite import FAKE, in_process, request, worker_with

TOKENS = (1, 2, 3, 4, 5)


def over_machines(tokens: Sequence[int] = TOKENS) -> BenchRequest:
    return replace(request(tokens=tokens), cluster=LauncherChoice("ray", 2))


def answer(task: str, place: str = "here", **changes: Any) -> str:
    """What a slot at that place sends."""
    asked = from_json(json.loads(task)["request"])
    (case,) = asked.cases
    units = [
        fake_worker.unit(case, Job(p, (), asked.kernels, asked.baseline, asked.method))
        for p in range(asked.method.processes)
    ]
    units = [replace(one, environment={**one.environment, "host": place}) for one in units]
    entries = [{"unit": asdict(one), "died": False} for one in units]
    return json.dumps({"host": place, "units": entries, "refusal": "", "hint": "", "code": 0} | changes)


Behave = Callable[[str, int, str, str], SlotEvent]  # (case, its how manieth try, its task, its place) → its end


def well(case: str, attempt: int, task: str, place: str) -> SlotEvent:
    return SlotEvent("answered", case, place, answer(task, place))


class FakeSlots:
    """`count` slots; those that run end in the opposite order, all at once, or each by itself in their order."""

    def __init__(self, behave: Behave = well, count: int = 2, at_once: bool = True) -> None:
        self.behave, self.count, self.at_once = behave, count, at_once
        self.tries: Counter[str] = Counter()
        self.running: list[tuple[str, str]] = []
        self.begun: list[SlotEvent] = []

    @property
    def free(self) -> int:
        return self.count - len(self.running)

    def submit(self, case: str, task: str) -> None:
        assert self.free > 0
        self.tries[case] += 1
        self.running.append((case, task))
        self.begun.append(SlotEvent("started", case, self.place(case)))

    def place(self, case: str) -> str:
        return f"node{sum(self.tries.values()) % 3}"

    def events(self, patience: float) -> Sequence[SlotEvent]:
        events, self.begun = self.begun, []
        if events:
            self.places = {event.case: event.place for event in events} | getattr(self, "places", {})
            self.places |= {event.case: event.place for event in events}
            return events
        ended, self.running = (self.running[::-1], []) if self.at_once else (self.running[:1], self.running[1:])
        return [self.behave(case, self.tries[case], task, self.places[case]) for case, task in ended]


def test_rows_are_those_of_one_machine_whatever_the_order_of_the_answers(tmp_path: Path):
    asked, path = over_machines(), tmp_path / "a.csv"
    with new_run(path, asked) as journal:
        result = run_in_slots(journal, FakeSlots())
    with new_run(tmp_path / "b.csv", replace(asked, cluster=None)) as journal:
        in_process(journal)
        expected = list(journal.rows)
    same = [replace(row, host="", run_id="", started_utc="") for row in result.rows]
    assert same == [replace(row, host="", run_id="", started_utc="") for row in expected]
    assert [row.case for row in read_rows(path)] != [row.case for row in result.rows]  # the file: as they came back
    assert sorted(map(str, read_rows(path))) == sorted(map(str, result.rows))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.csv", "a.rounds.csv", "b.csv", "b.partial.jsonl",
                                                              "b.rounds.csv"]  # fmt: skip


def test_every_case_is_of_one_machine(tmp_path: Path):
    with new_run(tmp_path / "a.csv", over_machines()) as journal:
        rows = run_in_slots(journal, FakeSlots()).rows
    hosts = {case: {row.host for row in rows if row.case == case} for case in {row.case for row in rows}}
    assert all(len(names) == 1 for names in hosts.values())
    assert len(set.union(*hosts.values())) == 3
    assert not any("differ" in row.note for row in rows)


def test_a_lost_case_is_run_again(tmp_path: Path):
    def behave(case: str, attempt: int, task: str, place: str) -> SlotEvent:
        if "3 tokens" in case and attempt < MOST_TRIES:
            return SlotEvent("lost", case, place, "its machine\nhas ended \x1b[2J")
        return well(case, attempt, task, place)

    asked, slots, seen = over_machines(), FakeSlots(behave), list[Dealt]()
    with new_run(tmp_path / "a.csv", asked) as journal:
        rows = run_in_slots(journal, slots, seen.append).rows
    assert [row.status for row in rows] == ["ok"] * 10
    assert {case: n for case, n in slots.tries.items() if n > 1} == {asked.cases[2].key: MOST_TRIES}
    news = [dealt.news for dealt in seen if dealt.news]
    assert len(news) == MOST_TRIES - 1
    assert news[0].endswith(f"{asked.cases[2].key}: its machine has ended \\x1b[2J; it will be run again")
    assert (seen[-1].finished, seen[-1].cases, dict(seen[-1].running)) == (5, 5, {})


def test_a_case_that_loses_every_machine_is_failed_and_the_rest_goes_on(tmp_path: Path):
    def behave(case: str, attempt: int, task: str, place: str) -> SlotEvent:
        return SlotEvent("lost", case, place, "gone") if "3 tokens" in case else well(case, attempt, task, place)

    asked, slots = over_machines(), FakeSlots(behave)
    with new_run(tmp_path / "a.csv", asked) as journal:
        rows = run_in_slots(journal, slots).rows
    assert slots.tries[asked.cases[2].key] == MOST_TRIES
    assert Counter(row.status for row in rows) == {"ok": 8, "failed": 2}
    failed = [row for row in rows if row.status == "failed"]
    assert {(row.host, row.note) for row in failed} == {("", "lost 3 times with its machine; the last: gone")}
    error = failure(rows, asked, None)
    assert error.code == 3


def test_a_refusal_ends_the_run_when_the_others_are_finished_and_it_is_resumed(tmp_path: Path):
    def behave(case: str, attempt: int, task: str, place: str) -> SlotEvent:
        if "1 tokens" in case:
            refusal = answer(task, place, units=[], refusal="/k.py is missing", hint="share it", code=3)
            return SlotEvent("answered", case, place, refusal)
        return well(case, attempt, task, place)

    asked, path, slots = over_machines(), tmp_path / "a.csv", FakeSlots(behave, at_once=False)
    with pytest.raises(FFNError, match=r"node1: /k.py is missing; share it") as error, new_run(path, asked) as journal:
        run_in_slots(journal, slots)
    assert error.value.code == 3
    assert sorted(slots.tries) == sorted(case.key for case in asked.cases[:2])  # the second was running
    assert {row.case for row in read_rows(path)} == {asked.cases[1].key}
    again = FakeSlots()
    with resumed(path) as journal:
        rows = run_in_slots(journal, again).rows
    assert asked.cases[1].key not in again.tries
    assert [row.case for row in rows] == [case.key for case in asked.cases for _ in asked.names]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_came_back_before_an_interrupt_is_kept(tmp_path: Path, error: type[BaseException]):
    def behave(case: str, attempt: int, task: str, place: str) -> SlotEvent:
        if "4 tokens" in case:
            raise error
        return well(case, attempt, task, place)

    asked, path = over_machines(), tmp_path / "a.csv"
    with pytest.raises(error), new_run(path, asked) as journal:
        run_in_slots(journal, FakeSlots(behave))
    assert {row.case for row in read_rows(path)} == {case.key for case in asked.cases[:2]}
    again = FakeSlots()
    with resumed(path) as journal:
        rows = run_in_slots(journal, again).rows
    assert sorted(again.tries) == sorted(case.key for case in asked.cases[2:])
    assert len(read_rows(path)) == len(rows) == 10


def test_a_case_of_which_half_was_written_is_measured_again_as_a_whole(tmp_path: Path):
    """The parent was killed between two lines of the journal."""
    asked, path = over_machines(), tmp_path / "a.csv"
    with new_run(path, asked) as journal:
        for process, case in ((0, asked.cases[0]), (1, asked.cases[0]), (0, asked.cases[1])):
            journal.add(fake_worker.unit(case, Job(process, (), asked.kernels, "eager", asked.method), "other"))
    again = FakeSlots()
    with resumed(path) as journal:
        assert journal.count == 2
        rows = run_in_slots(journal, again).rows
    assert asked.cases[0].key not in again.tries
    hosts = {row.host for row in rows if row.case == asked.cases[1].key}
    assert hosts == {again.places[asked.cases[1].key]}
    assert len(read_rows(path)) == 10
    assert not ResultFiles(path).journal.exists()


def test_the_same_run_on_this_machine_keeps_half_a_case(tmp_path: Path):
    asked, path = replace(over_machines(), cluster=None), tmp_path / "a.csv"
    with new_run(path, asked) as journal:
        journal.add(fake_worker.unit(asked.cases[0], Job(0, (), asked.kernels, "eager", asked.method)))
    with resumed(path) as journal:
        assert journal.count == 1


def other_kernel(entry: dict[str, Any]) -> None:
    entry["units"][0]["unit"]["outcomes"][0]["kernel"] = "mine"


def other_case(entry: dict[str, Any]) -> None:
    for one in entry["units"]:
        one["unit"]["case"] = "8x16:swiglu, 2 tokens, fp32, forward, warm, cpu, 1 thread"


def other_blocks(entry: dict[str, Any]) -> None:
    entry["units"][1]["unit"]["blocks"][0]["process"] = 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_kernel, "is damaged: its kernels differ from the run's kernels"),
        (other_case, "is damaged: its case does not belong to the run"),
        (other_blocks, "is damaged: its blocks belong to another unit"),
        (lambda entry: entry["units"].pop(), "is damaged: it has 1 of 2 processes"),
        (lambda entry: entry["units"].reverse(), "is damaged: its processes are not in order"),
        (lambda entry: entry["units"][0].update(died=True), "is damaged: its processes are not in order"),
        (lambda entry: entry.update(units=[]), "node1: nothing was measured"),
        (lambda entry: entry.update(units=7), "units must be a list, got 7"),
        (lambda entry: entry["units"][0]["unit"].update(case="\x1b[2J"), "is damaged: its case does not"),
    ],
)
def test_an_answer_is_checked_like_a_file(tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str):
    def behave(case: str, attempt: int, task: str, place: str) -> SlotEvent:
        entry = json.loads(answer(task, place))
        change(entry)
        return SlotEvent("answered", case, place, json.dumps(entry))

    with pytest.raises(FFNError) as error, new_run(tmp_path / "a.csv", over_machines((1,))) as journal:
        run_in_slots(journal, FakeSlots(behave))
    assert words in error.value.message
    assert "node1" in error.value.message
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_an_answer_and_what_a_launcher_raises_name_the_place(tmp_path: Path):
    for number, event in enumerate(
        (SlotEvent("answered", "", "", "[1, 2"), SlotEvent("refused", "", "", "ModuleNotFoundError: ffncli"))
    ):

        def behave(case: str, attempt: int, task: str, place: str, event: Any = event) -> SlotEvent:
            return replace(event, case=case, place=place)

        with (
            pytest.raises(FFNError, match=r"node1"),
            new_run(tmp_path / f"{number}.csv", over_machines((1,))) as journal,
        ):
            run_in_slots(journal, FakeSlots(behave))


def test_a_case_that_comes_back_twice_counts_once(tmp_path: Path):
    class Late(FakeSlots):
        def events(self, patience: float) -> Sequence[SlotEvent]:
            events = super().events(patience)
            return [*events, *[one for one in events if one.kind == "answered"]]

    with new_run(tmp_path / "a.csv", over_machines()) as journal:
        assert len(run_in_slots(journal, Late()).rows) == 10


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def asked(**more: Any) -> BenchRequest:
    return replace(request(), cluster=LauncherChoice("slurm"), **more)


def test_a_slot_measures_its_case_and_leaves_nothing(tmp_path: Path):
    run, before = asked(directory="/nowhere"), os.sched_getaffinity(0)
    units = units_of(measured(task_of(run, run.cases[1]), FAKE), "node7")
    expected = [(fake_worker.unit(run.cases[1], Job(p, (), run.kernels, "eager", run.method)), False) for p in range(2)]
    for (unit, died), (made, _) in zip(units, expected, strict=True):
        assert not died
        assert unit.blocks == made.blocks
        assert unit.process == made.process
    assert os.sched_getaffinity(0) == before
    assert [one.name for one in tmp_path.glob("ffn-slot-*")] == []


def test_a_case_that_ends_its_worker_is_over(tmp_path: Path):
    command, _ = worker_with(tmp_path, " 2 tokens 1 segfault")
    run = asked()
    units = units_of(measured(task_of(run, run.cases[1]), command), "node7")
    assert [died for _, died in units] == [False, True]
    assert {one.status for one in units[1][0].outcomes} == {"failed"}


@pytest.mark.parametrize("state", ["is missing", "differs from the file that the run began with"])
def test_a_file_of_the_users_must_be_there(tmp_path: Path, state: str):
    kernel = tmp_path / "k.py"
    kernel.write_text("def mlp(x, up, down): ...")
    run = asked(files={str(kernel): sha256(kernel)})
    kernel.unlink() if state == "is missing" else kernel.write_text("other")
    with pytest.raises(FFNError, match=state) as error:
        units_of(measured(task_of(run, run.cases[0]), FAKE), "node7")
    assert error.value.message.startswith("node7: ")
    assert error.value.code == 3


def test_its_folder_must_be_there_for_a_file(tmp_path: Path):
    kernel = tmp_path / "k.py"
    kernel.write_text("def mlp(x, up, down): ...")
    run = asked(files={str(kernel): sha256(kernel)}, directory=str(tmp_path / "gone"))
    with pytest.raises(FFNError, match=r"node7: the folder .*gone is missing"):
        units_of(measured(task_of(run, run.cases[0]), FAKE), "node7")


def test_another_version_of_ffn_is_refused():
    run = asked()
    task = json.loads(task_of(run, run.cases[0])) | {"ffncli": "0.1"}
    with pytest.raises(FFNError, match=r"node7: ffn .* is installed here, but the run uses '0.1'"):
        units_of(measured(json.dumps(task), FAKE), "node7")


def test_the_slot_and_not_the_parent_looks_for_the_gpu(monkeypatch: pytest.MonkeyPatch):
    def missing(devices: tuple[str, ...], sustained: bool) -> None:
        raise FFNError(f"{devices[0]}: there is no GPU", "", ExitCode.ENVIRONMENT)

    monkeypatch.setattr("ffncli.bench.launchers.slot.require_gpu", missing)
    run = request()
    run = replace(run, cases=tuple(replace(case, device="cuda") for case in run.cases), cluster=LauncherChoice("ray"))
    with pytest.raises(FFNError, match=r"node7: cuda: there is no GPU") as error:
        units_of(measured(task_of(run, run.cases[0]), FAKE), "node7")
    assert error.value.code == 3


def test_the_size_of_a_slot():
    cases = request(threads=(1, 3)).cases
    size = slot_size(cases)
    assert (size.cores, size.gpus) == (3, 0)
    size = slot_size([replace(cases[0], device="cuda")])
    assert (size.cores, size.gpus) == (1, 1)
