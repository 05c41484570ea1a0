"""Jobs of a submitit that is made up: their parameters, their states, their ends."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ffncli.bench.launchers.slot import Answered, Begun, Lost, Refusal, measured
from ffncli.bench.launchers.slurm_slots import SlurmSlots, parameters
from ffncli.bench.request.cluster import SlotSize
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
    assert slots.events(0.0) == [Begun("case 1", "node7, job 1")]
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
        Answered("case 1", "node7, job 1", "answer"),
        Begun("case 2", "node7, job 2"),
        Refusal("case 2", "node7, job 2", "ModuleNotFoundError: ffncli (logs: /logs)"),
        Begun("case 3", "node7, job 3"),
        Lost("case 3", "node7, job 3", "its job ended (NODE_FAIL); logs: /logs"),
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
    assert slots.events(0.0) == [Begun("case 1", "node7, job 2")]
    slots.cancel()
    assert [job.cancelled for job in executor.jobs] == [False, True]


def test_a_job_that_sbatch_refuses_is_an_error():
    class Refusing(FakeExecutor):
        def submit(self, function: Any, task: str) -> FakeJob:
            raise FailedJobError("sbatch: error: invalid partition specified: gpu2")

    with pytest.raises(FFNError, match=r"SLURM did not take the job: .*invalid partition") as error:
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
