"""What a real GPU says of itself; skipped where there is none."""

import re
import time

import pytest
import torch

from ffncli.bench.machine.devices import gpu_handles, gpu_probe
from ffncli.bench.machine.machine import gpu_columns
from ffncli.system import gpu, hardware
from ffncli.system.gpu import gpu_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_it_can_be_used_and_its_driver_is_found():
    assert gpu.problem_of(0, torch) is None
    assert gpu.problem_of(torch.cuda.device_count(), torch).message.startswith(("there ", "CUDA_VISIBLE_DEVICES"))
    assert gpu.has_driver(), "no file of the driver is known: add it to _NODES"


def test_its_columns():
    columns = gpu_columns("cuda")
    assert re.fullmatch(r"[0-9a-f]{12}", columns["gpu_uuid"])
    assert re.fullmatch(r"\d+(\.\d+)+", columns["cublas"])
    assert columns["cudnn"].isdigit()
    if gpu_handles("cuda")[0]:
        assert 10 < float(columns["power_limit_w"]) < 2000


def test_its_state():
    handles, why = gpu_handles("cuda")
    if handles is None:
        pytest.skip(why)
    state = gpu_state(handles)
    assert 0 < state.memory_free <= state.memory_total
    assert state.sm_mhz <= 1.05 * state.rated_mhz


def test_the_table_has_its_last_level_cache():
    properties = torch.cuda.get_device_properties(0)
    row = hardware.find(properties.name)
    if row is None or not row.llc_bytes:
        pytest.skip(f"{properties.name} or its cache is not in the table")
    assert properties.L2_cache_size == pytest.approx(row.llc_bytes, rel=0.1)


def test_the_energy_of_a_second_and_a_half_is_that_of_the_mean_power():
    probe, why = gpu_probe("cuda")
    if probe is None or probe.energy() is None:
        pytest.skip(why or "no energy counter")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    began, before, powers = time.perf_counter(), probe.energy(), []
    while time.perf_counter() - began < 1.5:
        torch.mm(a, a)
        torch.cuda.synchronize()
        powers.append(probe.fresh().power_w)
    watts = (probe.energy() - before) / (time.perf_counter() - began)
    assert watts == pytest.approx(sorted(powers)[-1], rel=0.3)
