"""Who else uses a GPU: asked before this process has anything there, told by every case."""

from __future__ import annotations

import os

import pytest
import torch

from ffncli.bench.machine import devices
from ffncli.errors import FFNError
from ffncli.system.gpu_state import GpuState, gpu_state, open_gpu
from tests.bench.fake_nvml import FakeNvml
from tests.system import fake_gpu


@pytest.fixture
def card(monkeypatch):
    devices.neighbours.cache_clear()
    stand_in = FakeNvml()
    monkeypatch.setattr(devices, "gpu_handles", lambda device: open_gpu("1234", stand_in))
    yield stand_in
    devices.neighbours.cache_clear()


def test_neighbours_are_those_of_before_this_process_made_anything(card, monkeypatch):
    fake_gpu.install(monkeypatch, there := fake_gpu.FakeCudaTorch(count=2))
    made = there.ones

    def ones(*shape, device):
        card.processes.append((os.getppid(), 1 << 30))  # a context of our own, under another number in a container
        return made(*shape, device=device)

    there.ones = ones
    card.processes, card.utilisation = [(7, 31 << 30)], 42
    devices.use_in_worker("cuda:1")
    assert there.current == 1
    assert devices.neighbours("cuda:1") == "1 other process uses this GPU (33.3 GB, 42 % busy)"


def test_alone_nothing_is_said(card):
    card.processes = [(os.getpid(), 1 << 30)]
    assert devices.neighbours("cuda") == ""


def test_a_gpu_that_cannot_be_asked_is_refused_for_its_own_reason(monkeypatch):
    def fails(device):
        raise RuntimeError(fake_gpu.NO_DRIVER)

    devices.neighbours.cache_clear()
    monkeypatch.setattr(devices, "gpu_handles", fails)
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch(fake_gpu.BUSY))
    with pytest.raises(FFNError, match="--device cuda: the GPU is busy"):
        devices.use_in_worker("cuda")


def test_on_a_cpu_nothing_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(devices, "neighbours", asked.append)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    devices.use_in_worker("cpu")
    assert asked == []


def test_a_state_is_what_nvml_says():
    card = FakeNvml()
    card.processes, card.limit, card.mode = [(7, 1 << 30), (8, None), (os.getpid(), 5)], 500_000, 2
    state = gpu_state(open_gpu("1234", card)[0])
    assert state == GpuState(79 << 30, 80 << 30, 2, 1 << 30, 0.0, 1410, 1410, 500.0, 700.0, True, "prohibited", False)
    assert state.power_lowered
    assert gpu_state(open_gpu("1234", FakeNvml("MIG-1234"))[0]).mig


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(devices, "has_driver", lambda: False)


def test_a_gpu_that_is_certainly_missing_is_refused(no_driver, monkeypatch):
    """A sandbox may show no driver's files: torch is asked, and its reason is the answer."""
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch(fake_gpu.NO_DRIVER, count=0))
    for asked in (["cuda"], ["cpu", "cuda:0"]):
        with pytest.raises(FFNError, match=rf"^--device {asked[-1]}: there is no GPU here") as caught:
            devices.require_gpu(asked, sustained=False)
        assert caught.value.code == 3
    devices.require_gpu(["cpu"], sustained=False)
    fake_gpu.install(monkeypatch, fake_gpu.FakeCudaTorch())  # one that torch sees all the same
    devices.require_gpu(["cuda"], sustained=True)


def test_what_may_be_there_is_left_to_the_workers(monkeypatch):
    """The parent makes nothing on a GPU: it would keep its memory from them."""
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    fake_gpu.install(monkeypatch, there := fake_gpu.FakeCudaTorch(fake_gpu.BUSY))
    devices.require_gpu(["cuda"], sustained=True)
    assert there.made == []


def test_long_turns_need_a_gpu(no_driver):
    with pytest.raises(FFNError, match=r"^--sustained needs --device cuda") as caught:
        devices.require_gpu(["cpu"], sustained=True)
    assert caught.value.code == 2
