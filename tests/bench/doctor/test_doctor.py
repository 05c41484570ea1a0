"""The rows of `ffn doctor` on machines that are made up, and the packages beside pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ffncli.bench.doctor import doctor
from ffncli.bench.machine import machine
from ffncli.system import host
from ffncli.system.packages import REQUIRED
from tests import ROOT
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
