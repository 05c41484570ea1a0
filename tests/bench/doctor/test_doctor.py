"""The rows of `ffn doctor` on machines and GPUs that are made up, and what can be told apart at a known scatter."""

import re
import tomllib
from math import exp, log, sqrt
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace

import pytest
import torch

from ffncli.bench.doctor import doctor, noise
from ffncli.bench.machine import devices, machine
from ffncli.bench.records import TWIN, TimedBlock
from ffncli.system import gpu, host
from ffncli.system.gpu import NEEDS, GpuState
from ffncli.system.packages import REQUIRED
from tests import ROOT
from tests.bench.fake_nvml import FakeNvml
from tests.system import fake_gpu as fake
from tests.system.test_host import put

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pinned(requirements: list[str]) -> dict[str, str]:
    return dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", text).groups() for text in requirements)


def test_packages_are_those_of_the_project():
    assert pinned(PROJECT["dependencies"]) == REQUIRED
    for name, packages in doctor.EXTRAS.items():
        assert pinned(PROJECT["optional-dependencies"][name]) == packages
    assert set(PROJECT["optional-dependencies"]) - set(doctor.EXTRAS) == {"test"}  # of who works on ffn itself


@pytest.mark.parametrize(
    ("found", "least", "old"),
    [
        ("2.9.1", "2.10", True),
        ("2.13.0+cpu", "2.10", False),
        ("5", "5", False),
        ("4.57.1", "5", True),
        ("1", "1", False),
    ],
)
def test_versions_are_numbers(found, least, old):
    assert doctor.older(found, least) is old


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in ("torch", "gguf") else real(name))
    rows = {check.name: check for check in [*doctor._software(), doctor._extra("models")]}
    assert (rows["torch"].status, rows["torch"].advice) == ("missing", "pip install 'torch>=2.10'")
    assert rows["extra models"].status == "missing"
    assert "gguf missing" in rows["extra models"].value
    assert "in a clone of ffn: pip install -e '.[models]'" in rows["extra models"].advice
    assert [check.name for check in doctor.lacking(rows.values())] == ["torch"]


def test_a_package_that_does_not_load_is_bad(monkeypatch):
    monkeypatch.setattr(doctor, "_import_error", lambda name: "OSError: libgomp.so.1" if name == "torch" else "")
    rows = list(doctor._software())
    assert [check.name for check in doctor.lacking(rows)] == ["torch"]
    assert "libgomp.so.1" in next(check.value for check in rows if check.name == "torch")


def test_a_library_that_does_not_load_is_no_crash(monkeypatch):
    def absent():
        raise ModuleNotFoundError("threadpoolctl")

    monkeypatch.setattr(machine, "openmp_runtimes", absent)
    assert list(doctor._libraries()) == []


def test_an_old_extra_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: "3.1.0")
    assert doctor._extra("plots").status == "note"
    assert doctor._extra("plots").advice.startswith("matplotlib old")


def test_the_gpu_extra_is_asked_for_where_there_is_one(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    monkeypatch.setattr(doctor, "has_driver", lambda: False)
    assert doctor._extra("gpu").status == "ok"
    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    assert doctor._extra("gpu").status == "missing"


def test_a_quota_is_noted():
    assert doctor._cores(host.Cores(8, 2.5, 4)).value == "2, of 8 CPUs allowed, 4 cores, a quota of 2.5"
    assert doctor._cores(host.Cores(8, 2.5, 4)).status == "note"
    assert doctor._cores(host.Cores(1, None, 1)).value == "1, of 1 CPU allowed, 1 core, no quota"
    assert doctor._cores(host.Cores(1, None, 1)).status == "ok"


@pytest.mark.parametrize(("code", "status"), [(-4, "bad"), (0, "ok")])
def test_instructions_that_are_announced_and_end_a_process(code, status, tmp_path, monkeypatch):
    put(tmp_path, "proc/cpuinfo", "processor : 0\nflags : avx2 amx_tile amx_bf16\n")
    monkeypatch.setattr(doctor, "bf16_product_ending", lambda: code)
    row = next(row for row in doctor._processor(tmp_path) if row.name == "instructions")
    assert (row.value, row.status) == ("avx2 amx_tile amx_bf16", status)
    assert row.advice.endswith(doctor.WITHOUT_AMX) == (status == "bad")


def test_a_product_in_bf16_ends_well_here():
    assert doctor.bf16_product_ending() == 0


def test_caches_alike_are_counted():
    caches = (
        host.ProcessorCache(1, "Data", 48 << 10, (0,)), host.ProcessorCache(1, "Data", 48 << 10, (1,)),
        host.ProcessorCache(1, "Instruction", 32 << 10, (0,)), host.ProcessorCache(3, "Unified", 36608 << 10, (0, 1)),
    )  # fmt: skip
    assert doctor.cache_text(caches) == "L1d 48 KiB x2, L3 35.8 MiB"


def test_a_restless_machine_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "affinity", lambda: (0,))
    put(tmp_path, "proc/stat", "cpu  50 0 20 20 5 0 0 5 0 0")
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave")
    rows = {check.name: check for check in doctor._quiet(tmp_path, lambda: 1.5)}
    assert {name: check.status for name, check in rows.items()} == dict.fromkeys(("load", "steal", "governor"), "note")
    assert all(check.advice for check in rows.values())
    put(tmp_path, "proc/stat", "cpu  50 0 20 30 0 0 0 0 0 0")
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance")
    assert {check.status for check in doctor._quiet(tmp_path, lambda: 0.1)} == {"ok"}


def test_where_results_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    theirs = tmp_path / "state" / "ffn" / "results"
    assert doctor._results(tmp_path).value == f"{theirs}, created when needed"
    theirs.mkdir(parents=True)
    assert doctor._results(tmp_path).value == str(theirs)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    assert doctor._results(tmp_path).value == str(tmp_path / "benchmarks" / "results")
    monkeypatch.chdir(tmp_path)
    assert doctor._results(Path.cwd()).value == "benchmarks/results"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("a file in its place")
    (tmp_path / "empty").mkdir()
    assert doctor._results(tmp_path / "empty").status == "note"
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "--save" in doctor._results(tmp_path).advice


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor._compiler().status == "missing"
    monkeypatch.setenv("CXX", "false")
    assert doctor._compiler().status == "bad"


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
    assert found["gpu 0 memory"].advice.startswith("times include other processes' work")
    assert found["gpu 0 clocks"].advice.startswith("the power limit was lowered from 700 W")
    assert found["gpu 0 modes"].advice.endswith("sudo nvidia-smi -pm 1")
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
    assert row.advice == "to allow computing: sudo nvidia-smi -c 0"


T4, T5 = 2.7764451, 2.5705818  # Student's t, 0.975, 4 and 5 degrees of freedom


def process(number: int, ratio: float = 1.0, drift: float = 1.0, flags: tuple[str, ...] = ()) -> list[TimedBlock]:
    """Three placements of four rounds; the twin takes `ratio` times as long, the second half `drift` times."""
    out = []
    for index in range(12):
        slow = 1e-3 * (drift if index >= 6 else 1.0)
        for position, (name, seconds) in enumerate(((noise.GEMM, slow), (TWIN, slow * ratio))):
            out.append(TimedBlock(number, "c", index // 4, index % 4, position, name, 2, 2 * seconds, flags))
    return out


def test_the_half_width_over_processes():
    logs = [0.004, -0.006, 0.001, 0.003, -0.002]
    blocks = [block for number, d in enumerate(logs) for block in process(number, exp(d))]
    found = noise.judged(blocks, 2, 9.5)
    half = T4 * stdev(logs) / sqrt(5)
    assert found.resolvable_difference == pytest.approx(exp(half) - 1, rel=1e-6)
    assert found.aa_ratio == pytest.approx(1.0)
    assert (found.aa_low, found.aa_high) == pytest.approx((exp(-half), exp(half)))
    assert (found.processes, found.rounds, found.threads, found.seconds) == (5, 60, 2, 9.5)
    assert found.troubled == 0


def test_a_twin_that_is_surely_slower_is_no_resolution():
    logs = [0.050, 0.051, 0.049, 0.052, 0.048]
    blocks = [block for number, d in enumerate(logs) for block in process(number, exp(d))]
    found = noise.judged(blocks, 2, 9.5)
    assert found.resolvable_difference == pytest.approx(exp(0.05 + T4 * stdev(logs) / sqrt(5)) - 1, rel=1e-6)


def test_timing_one_after_the_other_sees_the_drift_that_rounds_do_not():
    logs = [0.001, -0.001, 0.001, -0.001, 0.0]
    blocks = [block for number, d in enumerate(logs) for block in process(number, exp(d), drift=1.1)]
    found = noise.judged(blocks, 1, 9.5)
    expected = T5 * log(1.1) / sqrt(5)
    assert log(1 + found.sequential_difference) == pytest.approx(expected, rel=0.01)
    assert found.resolvable_difference < 0.002
    ours = T4 * stdev(logs) / sqrt(5)
    assert found.sequential_times_longer == pytest.approx((expected / ours) ** 2, rel=0.02)


def test_blocks_that_others_took_time_from_are_counted():
    blocks = [*process(0, flags=("preempted", "faults=3")), *process(1, 1.001, flags=("faults=3",)), *process(2)]
    assert noise.judged(blocks, 1, 1.0).troubled == pytest.approx(1 / 3)


def test_one_process_says_nothing():
    assert noise.judged(process(0), 1, 1.0) is None
    assert noise.judged([], 1, 1.0) is None


def test_seconds_are_shared_and_late_processes_left_out():
    asked, told, time = [], [], [100.0]
    slow = 0.0

    def run(number: int, threads: int, until: float) -> list[TimedBlock]:
        asked.append((number, threads, until))
        time[0] += slow
        return process(number, 1 + number / 1000)

    found = noise.measure_noise(10.0, 3, told.append, run, lambda: time[0])
    assert asked == [(n, 3, 100.0 + 2 * (n + 1)) for n in range(5)]
    assert told == [1] * 5
    assert found.processes == 5
    assert noise.measure_noise(2.0, 1, run=run, now=lambda: time[0]).processes == 3
    slow = 5.0
    assert noise.measure_noise(10.0, 1, run=run, now=lambda: time[0]).processes == 3
    assert noise.measure_noise(20.0, 1, run=run, now=lambda: time[0]).processes == 5


def test_a_real_process_measures_both_arms_and_a_failing_one_none(monkeypatch):
    blocks = noise._in_a_process(4, 1, 0.0)
    assert {block.kernel for block in blocks} == {noise.GEMM, TWIN}
    assert {block.process for block in blocks} == {4}
    assert 0 in {block.placement for block in blocks}
    assert all(block.seconds > 0 for block in blocks)
    monkeypatch.setattr(noise.sys, "executable", "/bin/false")
    assert noise._in_a_process(4, 1, 0.0) == []
