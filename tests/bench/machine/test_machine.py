"""The columns that say where and with what, beside what torch and numpy say themselves."""

import hashlib
import os
import platform
from dataclasses import fields
from types import SimpleNamespace

import numpy
import pytest
import torch

from ffncli import __version__
from ffncli.bench.machine import machine
from ffncli.bench.results.row import ResultRow
from ffncli.system import hardware, host
from ffncli.system.gpu import open_gpu
from tests.bench.fake_nvml import FakeNvml


def test_every_column_of_the_environment_is_one_of_a_row():
    found = machine.environment("cpu")
    assert set(found) <= {field.name for field in fields(ResultRow)}
    assert all(isinstance(value, str) for value in found.values())
    assert found["torch"] == torch.__version__
    assert found["numpy"] == numpy.__version__
    assert found["python"] == platform.python_version()
    assert found["ffncli"] == __version__
    assert found["device_name"] == found["cpu"] == host.cpu_name()
    assert found["driver"] == ""


def test_blas_is_what_torch_was_built_with():
    said, found = torch.__config__.show(), machine.blas()
    assert found.startswith("torch: ")
    assert torch.backends.cpu.get_cpu_capability() in found
    assert ("MKL 20" in found) == ("Math Kernel Library Version" in said)
    assert ("oneDNN" in found) == ("MKL-DNN v" in said)
    assert numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]["version"] in found


def test_math_mode_follows_torch():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert "medium" in machine.environment("cpu")["math_mode"]
    finally:
        torch.set_float32_matmul_precision(before)
    assert before in machine.environment("cpu")["math_mode"]


def test_openmp_and_allocator_are_as_the_process_has_them(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OMP_", "GOMP_", "MALLOC_"))]:
        monkeypatch.delenv(name, raising=False)
    plain = machine.openmp()
    assert machine.allocator() == "system"
    monkeypatch.setenv("OMP_PLACES", "cores")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert machine.openmp() == f"{plain};bind=true;places=cores"
    assert machine.allocator() == "trim_threshold=7"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert machine.allocator("cuda:0") == "trim_threshold=7;cuda=expandable_segments:True"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that says of itself what it is told to."""
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card.name)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "580.82.07")
    return card


def test_a_gpu(gpu):
    found = machine.environment("cuda:1")
    assert (found["device"], found["device_name"]) == ("cuda:1", "NVIDIA H100 80GB HBM3")
    assert found["driver"] == "580.82.07, CUDA 12.8"
    assert machine.llc_bytes("cuda:1") == 50 << 20
    assert "tf32" in found["math_mode"]


def test_what_makes_two_gpus_of_one_model_two_machines(gpu, monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setattr(machine, "gpu_handles", lambda device: open_gpu("1234", nvml))
    monkeypatch.setattr(machine, "cublas_version", lambda: "12.8.4")
    monkeypatch.setattr(machine, "installed", {"triton": "3.4.0"}.get)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    gpu.uuid = "1234"
    columns = {name: machine.environment("cuda")[name] for name in machine.gpu_columns("cuda")}
    hashed = hashlib.sha256(b"1234").hexdigest()[:12]
    assert columns == {
        "gpu_uuid": hashed, "power_limit_w": "700", "cublas": "12.8.4", "cudnn": "91002", "triton": "3.4.0", "mig": "",
        "persistence": "on",
    }  # fmt: skip
    gpu.uuid, gpu.name, nvml.limit, nvml.persistent = "1235", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 250_500, 0
    other = machine.environment("cuda")
    assert other["gpu_uuid"] != hashed
    assert "1235" not in str(other.values())
    assert (other["power_limit_w"], other["mig"], other["persistence"]) == ("250.5", "1g.10gb", "off")
    assert machine.gpu_columns("cpu") == {}


def test_cublas_is_the_library_in_the_process(monkeypatch):
    def get(which, value):
        value._obj.value = (12, 8, 4)[which]

    assert machine.property_version(get) == "12.8.4"
    version = machine.cublas_version.__wrapped__
    monkeypatch.setattr(machine, "text", lambda path: "7f00-7f01 r-xp 0 0:0 1   /site/nvidia/lib/libcublas.so.13\n")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda path: SimpleNamespace(cublasGetProperty=get))
    assert version() == "12.8.4"
    monkeypatch.setattr(machine, "text", lambda path: "/site/nvidia/lib/libcublasLt.so.13\n")
    monkeypatch.setattr(machine, "installed", {"nvidia-cublas-cu12": "12.9.1.4"}.get)
    assert version() == "12.9.1.4"


def test_the_depth_of_a_gpus_queue_is_recorded(gpu, monkeypatch):
    monkeypatch.setenv("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    assert machine.environment("cuda:1")["launch_queues"] == "4x"
    assert machine.environment("cpu")["launch_queues"] == ""


def test_behind_an_l2_may_lie_a_larger_cache(gpu):
    gpu.name, gpu.L2_cache_size = "AMD Instinct MI300X", 4 << 20
    assert machine.llc_bytes("cuda") == 256 << 20 == hardware.find(gpu.name).llc_bytes
    gpu.name, gpu.L2_cache_size = "Unheard of", 0
    assert machine.llc_bytes("cuda") == 50 << 20
    assert "assumed" in machine.llc_note("cuda")


def test_the_driver_as_the_kernel_module_says_it(monkeypatch):
    said = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24\nGCC version: gcc 12.2.0"
    monkeypatch.setattr(machine, "text", lambda path: said)
    assert machine.nvidia_driver.__wrapped__() == "535.161.08"
    said_open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build"
    monkeypatch.setattr(machine, "text", lambda path: said_open)
    assert machine.nvidia_driver.__wrapped__() == "580.82.07"


def test_a_limit_on_memory_bounds_the_room_for_copies(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 10_000_000_000)
    monkeypatch.setattr(machine, "used_memory", lambda pid: 400_000_000)
    monkeypatch.setattr(machine, "freed_memory", lambda: 0)
    assert machine.room("cpu") == 6_000_000_000
    assert machine.room("cpu", 1_400_000_000) == 600_000_000
    assert machine.room("cpu", 300_000_000) == 0
    assert machine.room("cpu", 90_000_000_000) == 6_000_000_000
    monkeypatch.setattr(machine, "freed_memory", lambda: 300_000_000)  # of an earlier case; used as the system counts
    assert machine.room("cpu") == 6_180_000_000
    assert machine.room("cpu", 300_000_000) == 120_000_000
