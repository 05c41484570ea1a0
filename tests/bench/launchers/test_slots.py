"""Slots of a submitit and of a Ray that are made up: jobs and actors start, answer, end and are lost."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ffncli.bench.launchers import ray_slots
from ffncli.bench.launchers.ray_slots import RaySlots
from ffncli.bench.launchers.slot import SlotEvent, measured
from ffncli.bench.launchers.slurm_slots import SlurmSlots, parameters
from ffncli.bench.request.machines import LauncherChoice, SlotSize
from ffncli.errors import FFNError

KNOWN = {"partition", "account", "time", "gpus_per_node", "gres", "exclusive", "setup", "mem"}


class UncompletedJobError(RuntimeError): ...


class FailedJobError(UncompletedJobError): ...


class FailedSubmissionError(RuntimeError): ...


@pytest.fixture(autouse=True)
def _submitit(monkeypatch: pytest.MonkeyPatch):
    utils = ModuleType("submitit.core.utils")
    for one in (UncompletedJobError, FailedJobError, FailedSubmissionError):
        setattr(utils, one.__name__, one)
    for name, module in (("submitit", ModuleType("submitit")), ("submitit.core", ModuleType("submitit.core"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "submitit.core.utils", utils)


class FakeJob:
    def __init__(self, number: int) -> None:
        self.job_id, self.state, self.cancelled = str(number), "PENDING", False
        self.end: Any = None
        self.paths = SimpleNamespace(folder=Path("/logs"))

    def done(self) -> bool:
        return self.end is not None

    def get_info(self) -> dict[str, str]:
        return {"NodeList": "node7"} if self.state != "PENDING" else {}

    def result(self) -> Any:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    def cancel(self, check: bool = True) -> None:
        self.cancelled = True
        raise RuntimeError("scancel: it is over")


class FakeExecutor:
    def __init__(self) -> None:
        self.jobs: list[FakeJob] = []

    def submit(self, function: Any, task: str) -> FakeJob:
        assert function is measured
        self.jobs.append(FakeJob(len(self.jobs) + 1))
        return self.jobs[-1]


def test_jobs_begin_and_end():
    executor = FakeExecutor()
    slots = SlurmSlots(executor, 3)
    for number in (1, 2, 3):
        slots.submit(f"case {number}", "task")
    assert slots.free == 0
    one, two, three = executor.jobs
    assert slots.events(0.0) == []
    one.state = "RUNNING"
    assert slots.events(0.0) == [SlotEvent("started", "case 1", "node7, job 1")]
    assert slots.events(0.0) == []
    one.end = "answer"
    two.state, two.end = (
        "FAILED",
        FailedJobError(
            f"Job failed:\n{'-' * 22}\nTraceback\nModuleNotFoundError: ffncli\n\n{'-' * 22}\nYou can check full logs"
        ),
    )
    three.state, three.end = "NODE_FAIL", UncompletedJobError("no output")
    assert slots.events(0.0) == [
        SlotEvent("answered", "case 1", "node7, job 1", "answer"),
        SlotEvent("started", "case 2", "node7, job 2"),
        SlotEvent("refused", "case 2", "node7, job 2", "ModuleNotFoundError: ffncli (logs: /logs)"),
        SlotEvent("started", "case 3", "node7, job 3"),
        SlotEvent("lost", "case 3", "node7, job 3", "its job ended (NODE_FAIL); logs: /logs"),
    ]
    assert slots.free == 3


def test_a_job_is_begun_again_after_a_loss_and_what_is_left_is_ended():
    executor = FakeExecutor()
    slots = SlurmSlots(executor, 1)
    slots.submit("case 1", "task")
    executor.jobs[0].end = UncompletedJobError()
    slots.events(0.0)
    slots.submit("case 1", "task")
    executor.jobs[1].state = "RUNNING"
    assert slots.events(0.0) == [SlotEvent("started", "case 1", "node7, job 2")]
    slots.cancel()
    assert [job.cancelled for job in executor.jobs] == [False, True]


def test_a_job_that_sbatch_refuses_is_an_error():
    class Refusing(FakeExecutor):
        def submit(self, function: Any, task: str) -> FakeJob:
            raise FailedJobError("sbatch: error: invalid partition specified: gpu2")

    with pytest.raises(FFNError, match=r"SLURM rejected the job: .*invalid partition") as error:
        SlurmSlots(Refusing(), 1).submit("case", "task")
    assert error.value.code == 3


def test_parameters_of_a_job():
    options = {"partition": "gpu", "time": "90", "exclusive": "true", "nice": "5", "setup": "module load cuda"}
    assert parameters(options, SlotSize(8, 2), 100.0, KNOWN) == {
        "name": "ffn", "timeout_min": 90, "cpus_per_task": 8, "gpus_per_node": 2, "slurm_partition": "gpu",
        "slurm_exclusive": True, "slurm_setup": ["module load cuda"], "slurm_additional_parameters": {"nice": 5},
    }  # fmt: skip


@pytest.mark.parametrize(("seconds", "minutes"), [(100.0, 10), (601.0, 11), (3600.0, 60)])
def test_a_job_has_time_for_a_case(seconds: float, minutes: int):
    assert parameters({"cluster": "local"}, SlotSize(1, 0), seconds, KNOWN)["timeout_min"] == minutes


def test_a_users_word_on_gpus_is_the_last():
    assert parameters({"gres": "gpu:a100:1"}, SlotSize(1, 1), 1.0, KNOWN)["gpus_per_node"] is None


@pytest.mark.parametrize("text", ["0", "1:30:00", "", "-5"])
def test_time_is_in_minutes(text: str):
    with pytest.raises(FFNError, match="is not a number of minutes"):
        parameters({"time": text}, SlotSize(1, 0), 1.0, KNOWN)


class RayError(Exception): ...


class RayTaskError(RayError): ...


class ActorDiedError(RayError): ...


@dataclass
class FakeRay:
    """Machines by name with their resources; an actor is on the machine of its strategy, else on the first."""

    machines: dict[str, dict[str, float]]
    answers: dict[object, Callable[[], str]] = field(default_factory=dict)
    killed: list[object] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    start_error: RayError | None = None
    exceptions: Any = field(default_factory=lambda: SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True, "Resources": has} for name, has in self.machines.items()]

    def remote(self, actor: type) -> Any:
        assert actor.__name__ == "_SlotOnRay"
        return SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> Any:
        self.options.append(options)
        node = options["scheduling_strategy"]
        return SimpleNamespace(remote=lambda: self._actor(next(iter(self.machines)) if node == "SPREAD" else node))

    def _actor(self, node: str) -> Any:
        def call(result: Callable[[], str]) -> Any:
            def answer() -> str:
                if node not in self.machines:
                    raise ActorDiedError("a long text of Ray's")
                return result()

            reference = object()
            self.answers[reference] = answer
            return reference

        def host() -> str:
            if self.start_error is not None:
                raise self.start_error
            return f"host-{node}"

        def measure(task: str) -> str:
            if task == "raises":
                raise RayTaskError("Traceback:\n  line\nModuleNotFoundError: No module named 'ffncli'\n")
            return f"answer to {task}"

        return SimpleNamespace(
            host=SimpleNamespace(remote=lambda: call(host)),
            measure=SimpleNamespace(remote=lambda task: call(lambda: measure(task))),
        )

    def wait(self, references: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        return references[:num_returns], references[num_returns:]

    def get(self, reference: object) -> str:
        return self.answers[reference]()

    def kill(self, handle: object) -> None:
        self.killed.append(handle)


@pytest.fixture(autouse=True)
def _counted_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_slots, "_RECOUNT", 0.0)


def until_free(slots: RaySlots, free: int) -> list[SlotEvent]:
    events: list[SlotEvent] = []
    for _ in range(20):
        if slots.free == free:
            return events
        events += slots.events(0.0)
    raise AssertionError(f"{slots.free} slots are free")


def test_one_actor_for_each_gpu():
    ray = FakeRay({"a": {"CPU": 8, "GPU": 2}, "b": {"CPU": 8, "GPU": 4}, "head": {"CPU": 64}})
    slots = RaySlots(ray, SlotSize(4, 1))
    until_free(slots, 6)
    assert [one["scheduling_strategy"] for one in ray.options] == ["a", "a", "b", "b", "b", "b"]
    assert {(one["num_cpus"], one["num_gpus"], one["max_restarts"]) for one in ray.options} == {(4, 1, 0)}


def test_one_actor_for_each_machine_that_has_the_cores():
    ray = FakeRay({"a": {"CPU": 8}, "small": {"CPU": 2}, "b": {"CPU": 4}})
    slots = RaySlots(ray, SlotSize(4, 0))
    until_free(slots, 2)
    assert [one["scheduling_strategy"] for one in ray.options] == ["a", "b"]


def test_as_many_as_requested_wherever_there_is_room():
    ray = FakeRay({"a": {"CPU": 8}})
    slots = RaySlots(ray, SlotSize(2, 0), 3)
    until_free(slots, 3)
    assert [one["scheduling_strategy"] for one in ray.options] == ["SPREAD"] * 3


def test_no_machine_with_room_is_refused():
    for size, words in ((SlotSize(16, 0), "has 16 CPUs"), (SlotSize(1, 1), "has 1 GPU and 1 CPUs")):
        with pytest.raises(FFNError, match=words) as error:
            RaySlots(FakeRay({"a": {"CPU": 8}}), size).require_room()
        assert error.value.code == 3
    RaySlots(FakeRay({"a": {"CPU": 8}}), SlotSize(8, 0)).require_room()


def test_an_answer_makes_its_actor_free_again():
    slots = RaySlots(FakeRay({"a": {"CPU": 1}}), SlotSize(1, 0))
    until_free(slots, 1)
    slots.submit("case 1", "task 1")
    assert slots.free == 0
    place = "host-a, slot 1"
    assert until_free(slots, 1) == [
        SlotEvent("started", "case 1", place),
        SlotEvent("answered", "case 1", place, "answer to task 1"),
    ]


def test_a_machine_that_is_gone_loses_its_case_and_one_that_comes_has_a_slot():
    ray = FakeRay({"a": {"CPU": 1}})
    slots = RaySlots(ray, SlotSize(1, 0))
    until_free(slots, 1)
    slots.submit("case 1", "task 1")
    ray.machines = {"b": {"CPU": 1}}
    events = until_free(slots, 1)
    why = "its machine or its process has ended (ActorDiedError)"
    assert [one for one in events if one.kind != "started"] == [SlotEvent("lost", "case 1", "host-a, slot 1", why)]
    assert len(ray.killed) == 1
    slots.submit("case 1", "task 1")
    assert until_free(slots, 1)[-1] == SlotEvent("answered", "case 1", "host-b, slot 2", "answer to task 1")


def test_an_actor_that_raises_refuses():
    slots = RaySlots(FakeRay({"a": {"CPU": 1}}), SlotSize(1, 0))
    until_free(slots, 1)
    slots.submit("case 1", "raises")
    events = [*slots.events(0.0), *slots.events(0.0)]
    why = "ModuleNotFoundError: No module named 'ffncli'"
    assert [one for one in events if one.kind == "refused"] == [SlotEvent("refused", "case 1", "host-a, slot 1", why)]


def test_slots_that_never_start_are_an_error():
    ray = FakeRay({"a": {"CPU": 1}}, start_error=RayTaskError("Traceback\nModuleNotFoundError: ffncli"))
    slots = RaySlots(ray, SlotSize(1, 0))
    with pytest.raises(FFNError, match=r"no slot can start: ModuleNotFoundError: ffncli") as error:
        until_free(slots, 1)
    assert error.value.code == 3
    assert len(ray.options) == 3


def test_an_address_where_nothing_listens_is_an_error_at_once():
    class NoRay:
        def init(self, **settings: Any) -> None:
            raise AssertionError("Ray would try for minutes")

    with pytest.raises(FFNError, match=r"no Ray cluster answers at '127.0.0.1:1'"):
        ray_slots._connect(NoRay(), "127.0.0.1:1")


def test_without_ray_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FFNError, match=r"ray is not installed; in a clone of ffn: pip install -e '\.\[ray\]'") as error:
        ray_slots.ray_slots(LauncherChoice("ray"), SlotSize(1, 0)).__enter__()
    assert error.value.code == 3


def test_an_actor_measures_at_the_usual_priority_where_it_may(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[int, int, int]] = []

    def refused(*arguments: int) -> None:
        calls.append(arguments)  # type: ignore[arg-type]
        raise PermissionError

    monkeypatch.setattr("os.setpriority", refused)
    monkeypatch.setattr("ffncli.bench.launchers.slot.measured", lambda task: f"answer to {task}")
    assert ray_slots._SlotOnRay().measure("task") == "answer to task"
    assert calls == [(os.PRIO_PROCESS, 0, 0)]
