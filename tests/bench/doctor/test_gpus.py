"""The GPUs of `ffn doctor`, on machines that are made up: usable or not, shared, limited."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ffncli.bench.doctor import doctor
from ffncli.bench.machine import devices, machine
from ffncli.system import gpu
from ffncli.system.gpu_state import NEEDS, GpuState
from tests.bench.fake_nvml import FakeNvml
from tests.system import fake_gpu as fake


@pytest.fixture
def card(monkeypatch):
    """The real torch with an H100, and its NVML."""
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, L2_cache_size=50 << 20, uuid="1234"
    )
    fake.install(monkeypatch, fake.FakeCudaTorch())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "driver", lambda device: "580.82.07, CUDA 12.8")
    properties.nvml = FakeNvml()
    monkeypatch.setattr(devices, "gpu_handles", lambda device: devices.open_gpu("1234", properties.nvml))
    return properties


def rows():
    return {check.name: check for check in doctor.gpu_checks()}


def test_a_gpu_its_state_and_its_data_sheet(card):
    assert {name: check.value for name, check in rows().items()} == {
        "gpu 0": "NVIDIA H100 80GB HBM3, 80 GiB, L2 50 MiB",
        "gpu 0 memory": "79 GiB free of 80 GiB, no other process",
        "gpu 0 clocks": "1410 MHz now, up to 1410 MHz, power limit 700 W",
        "gpu 0 modes": "persistence mode on, compute mode default",
        "data sheet 0": "989.4 TFLOP/s dense, 3350 GB/s",
        "driver": "580.82.07, CUDA 12.8",
    }
    assert {check.status for check in rows().values()} == {"ok"}
    card.name = "NVIDIA H100 of another kind"
    assert rows()["data sheet 0"].status == "note"


def test_other_work_a_lower_limit_and_no_persistence_are_noted(card):
    card.nvml.processes = [(7, 30 << 30), (8, None)]
    card.nvml.utilisation, card.nvml.limit, card.nvml.persistent = 97, 500_000, 0
    found = rows()
    assert found["gpu 0 memory"].value == "79 GiB free of 80 GiB, 2 other processes use this GPU (32.2 GB, 97 % busy)"
    assert found["gpu 0 memory"].advice.startswith("times include the turns of the other work")
    assert found["gpu 0 clocks"].advice.startswith("the power limit was lowered from 700 W")
    assert found["gpu 0 modes"].advice.startswith("sudo nvidia-smi -pm 1")
    assert {found[f"gpu 0 {name}"].status for name in ("memory", "clocks", "modes")} == {"note"}


def test_a_gpu_that_is_busy_is_bad_and_says_why(card, monkeypatch):
    fake.install(monkeypatch, fake.FakeCudaTorch(fake.BUSY))
    card.nvml.mode = 3
    found = rows()
    assert found["gpu 0"].status == "bad"
    assert "the GPU is busy" in found["gpu 0"].value
    assert "nvidia-smi" in found["gpu 0"].advice
    assert "compute mode exclusive process" in found["gpu 0 modes"].value


def test_what_nvml_does_not_provide_has_no_row(card):
    card.nvml.refuses |= {"memory", "processes", "clock", "rated", "limit", "default limit", "persistence", "mode"}
    assert set(rows()) == {"gpu 0", "data sheet 0", "driver"}


def test_without_nvml_one_row_says_how_to_get_it(card, monkeypatch):
    monkeypatch.setattr(devices, "gpu_handles", lambda device: (None, NEEDS))
    assert rows()["gpu 0 state"].value == "clocks and power were not read: in a clone of ffn: pip install -e '.[gpu]'"


@pytest.mark.parametrize(
    ("driver", "stand_in", "status", "value"),
    [
        (False, fake.FakeCudaTorch(fake.NO_DRIVER, 0), "ok", "none"),
        (False, fake.FakeCudaTorch(fake.NOT_COMPILED, 0, None), "ok", "none"),
        (True, fake.FakeCudaTorch(fake.NOT_COMPILED, 0, None), "missing", "torch 2.13.0+cu130 was built for CPUs only"),
        (True, fake.FakeCudaTorch(fake.OLD_DRIVER, 0), "bad", "the driver is too old"),
        (True, fake.FakeCudaTorch(fake.NONE_VISIBLE, 0), "bad", "torch sees no GPU"),
    ],
)
def test_a_gpu_that_torch_does_not_count(driver, stand_in, status, value, monkeypatch):
    fake.install(monkeypatch, stand_in)
    monkeypatch.setattr(doctor, "has_driver", lambda: driver)
    monkeypatch.setattr(gpu, "has_driver", lambda root=None: driver)
    (row,) = doctor.gpu_checks()
    assert row.status == status
    assert value in row.value
    assert bool(row.advice) is (status != "ok")


def test_a_prohibited_gpu_gets_the_command_that_allows_it():
    (row,) = doctor.state_checks(1, GpuState(compute_mode="prohibited", mig=True))
    assert row.name == "gpu 1 modes"
    assert row.value == "compute mode prohibited, a MIG instance: clocks and power are the whole card's"
    assert row.advice == "sudo nvidia-smi -c 0 allows computing"
