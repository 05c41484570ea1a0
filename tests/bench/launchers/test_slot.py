"""What a slot does with a task, with a worker that measures nothing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ffncli.bench.launchers.slot import measured, task_of, units_of
from ffncli.bench.records import Job
from ffncli.bench.request.cluster import LauncherChoice, slot_size
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.journal import sha256
from ffncli.errors import ExitCode, FFNError
from tests import ROOT
from tests.bench import fake_worker
from tests.bench.test_suite import FAKE, request, worker_with


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


@pytest.mark.parametrize("state", ["is missing", "has another content than where the run began"])
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
    with pytest.raises(FFNError, match=r"node7: ffn .* is installed here, and '0.1' deals the cases"):
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
