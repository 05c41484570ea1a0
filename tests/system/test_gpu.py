"""Whether a GPU can be used: what torch says in every situation, as one line, through every command that computes."""

import pytest
import torch

from ffncli.errors import FFNError
from ffncli.system import gpu
from tests.oracles.checkpoints import expect_refusal
from tests.system import fake_gpu as fake
from tests.system.fake_gpu import FakeCudaTorch
from tests.system.test_host import put

CARD = "dev/nvidia3"  # a container with the fourth of several
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def told(why, hint, *stand_in, device="cuda", files=(CARD,), **variables):
    """(device, torch, files of the driver, variables, what is wrong, what to do)."""
    return device, FakeCudaTorch(*stand_in), files, variables, why, hint


SITUATIONS = {
    "a CPU build, no GPU": told(
        "there is no GPU here (no driver, and torch was built for CPUs only)",
        "use --device cpu",
        fake.NOT_COMPILED,
        0,
        None,
        files=(),
    ),
    "a CPU build next to a GPU": told(
        "torch 2.13.0+cu130 was built for CPUs only",
        "install one with CUDA: https://pytorch.org/get-started, or use --device cpu",
        fake.NOT_COMPILED,
        0,
        None,
    ),
    "no driver": told("there is no GPU here (no driver)", "use --device cpu", fake.NO_DRIVER, 0, files=()),
    "a container without the driver's library": told(
        "the driver's library is not installed here",
        "in a container, start it with its GPUs (docker run --gpus all), or use --device cpu",
        fake.NO_DRIVER,
        0,
    ),
    "an old driver": told(
        "the driver is too old for torch 2.13.0+cu130 (it supports CUDA 11.4)",
        "update the driver, install a torch for an older CUDA, or use --device cpu",
        fake.OLD_DRIVER,
        0,
    ),
    "hidden": told(
        "CUDA_VISIBLE_DEVICES= leaves no GPU",
        "unset it, or use --device cpu",
        fake.NONE_VISIBLE,
        0,
        CUDA_VISIBLE_DEVICES="",
    ),
    "not to be seen": told("torch sees no GPU", "nvidia-smi lists the GPUs; or use --device cpu", fake.NONE_VISIBLE, 0),
    "out of range": told("there is 1 GPU here", "use cuda", device="cuda:1"),
    "out of range of two": told("there are 2 GPUs here", "use cuda:0 to cuda:1", None, 2, device="cuda:2"),
    "out of what is left": told(
        "CUDA_VISIBLE_DEVICES=3 leaves 1 GPU", "use cuda", device="cuda:1", CUDA_VISIBLE_DEVICES="3"
    ),
    "busy": told(
        "the GPU is busy: another process has it in exclusive mode, or its compute mode is prohibited",
        "nvidia-smi shows both; wait for that process, or use --device cpu",
        fake.BUSY,
        2,
        device="cuda:1",
    ),
    "full": told(
        "no memory is left on the GPU: 0.0 of 85.9 GB are free",
        "nvidia-smi shows who uses it; or use --device cpu",
        fake.FULL,
    ),
    "full for the allocator": told(
        "no memory is left on the GPU: 0.0 of 85.9 GB are free",
        "nvidia-smi shows who uses it; or use --device cpu",
        fake.OUT_OF_MEMORY,
    ),
    "too new": told(
        "torch 2.13.0+cu130 has no kernels for this GPU (sm_120",
        "it has sm_80, sm_90); install a build that has them: https://pytorch.org/get-started, or use --device cpu",
        fake.TOO_NEW,
    ),
    "not ready": told(
        "the GPUs are not ready: the fabric manager is not running",
        "start nvidia-fabricmanager, or use --device cpu",
        fake.NOT_READY,
        0,
    ),
    "half updated": told(
        "the driver was updated, and its parts no longer match",
        "restart the machine, or use --device cpu",
        fake.MISMATCH,
        0,
    ),
    "cuda-compat": told(
        "this GPU does not support the CUDA compatibility library that is installed",
        "remove cuda-compat, or use --device cpu",
        fake.OLD_CARD,
        0,
    ),
    "broken memory": told(
        "the GPU reports a memory error that it could not correct",
        "nvidia-smi -q -d ECC shows it, or use --device cpu",
        fake.ECC,
    ),
    "anything else": told(
        "the GPU cannot be used: CUDA error: unspecified launch failure",
        "`ffn doctor` checks it, or use --device cpu",
        fake.UNKNOWN,
    ),
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in HIDING:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_situation_is_one_line(situation, tmp_path, monkeypatch):
    device, stand_in, files, variables, why, hint = SITUATIONS[situation]
    for name in files:
        put(tmp_path, name, "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FFNError) as caught:
        gpu.use_device(device, stand_in, tmp_path)
    assert (str(caught.value), caught.value.code) == (f"--device {device}: {why}; {hint}", 3)
    assert stand_in.current is None


def test_a_device_that_cannot_be_opened(tmp_path, monkeypatch):
    put(tmp_path, "dev/kfd", "")
    monkeypatch.setattr(gpu.os, "access", lambda path, mode: False)
    with pytest.raises(FFNError, match=r"dev/kfd cannot be opened: permission denied; add your user to the groups"):
        gpu.use_device("cuda", FakeCudaTorch("No HIP GPUs are available", 0, None, "6.4"), tmp_path)


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_that_works_becomes_the_current_one(device, index):
    stand_in = FakeCudaTorch(count=2)
    assert gpu.use_device(device, stand_in) == device
    assert (stand_in.made, stand_in.current) == ([f"cuda:{index}"], index)


def test_of_the_cpu_torch_is_asked_nothing():
    assert gpu.use_device("cpu", None) == "cpu"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("mps", "--device: Apple's GPUs (mps) are not supported; use cpu, cuda or cuda:1"),
        ("xpu:0", "--device: Intel's GPUs (xpu) are not supported; use cpu, cuda or cuda:1"),
        ("gpu", "--device: unknown device 'gpu'; use cpu, cuda or cuda:1"),
        ("cuda:00", "--device: unknown device 'cuda:00'; use cpu, cuda or cuda:1"),
    ],
)
def test_other_devices_are_refused_by_name(text, line):
    with pytest.raises(FFNError) as caught:
        gpu.use_device(text, None)
    assert (str(caught.value), caught.value.code) == (line, 2)


@pytest.mark.parametrize("name", ["dev/nvidia0", "dev/nvidia3", "dev/nvidiactl", "dev/kfd", "dev/dxg", "dev/nvmap"])
def test_any_file_of_a_driver_shows_that_there_may_be_a_gpu(name, tmp_path):
    assert not gpu.has_driver(tmp_path)
    put(tmp_path, name, "")
    assert gpu.has_driver(tmp_path)


def test_what_is_no_gpu_is_not_taken_for_one(tmp_path):
    for name in ("dev/nvidia-uvm-tools", "dev/nvram", "dev/null"):
        put(tmp_path, name, "")
    assert not gpu.has_driver(tmp_path)


def test_a_gpu_that_becomes_busy_after_it_was_checked():
    with pytest.raises(FFNError, match="the GPU is busy") as caught, gpu.gpu_errors("cuda", FakeCudaTorch()):
        raise RuntimeError(fake.BUSY)
    assert caught.value.code == 3
    with pytest.raises(RuntimeError, match="mat1 and mat2"), gpu.gpu_errors("cuda", FakeCudaTorch()):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="busy"), gpu.gpu_errors("cpu", FakeCudaTorch()):
        raise RuntimeError(fake.BUSY)


# --- through the commands ---------------------------------------------------------------------------------------------

COMMANDS = {
    "trace": ("trace", "4x8"),
    "verify": ("verify", "4x8"),
    "activations": ("activations", "relu", "--rounding"),
    "precision": ("precision", "4x8", "--dtype", "fp8"),
    "survey": ("trace", "llama-2-7b", "--d-model", "8", "--d-ff", "16", "--layer", "all"),
    "referee": ("verify", "4x8", "--kernel", "eager", "--referee"),
}
SOME = ("a CPU build next to a GPU", "an old driver", "hidden", "out of range", "busy", "full", "too new")


@pytest.mark.parametrize("situation", SOME)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_gives_the_same_line(command, situation, call, monkeypatch):
    device, stand_in, _, variables, why, hint = SITUATIONS[situation]
    monkeypatch.setattr(gpu, "has_driver", lambda root=None: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fake.install(monkeypatch, stand_in)
    code, _, err = call(*COMMANDS[command], "--device", device)
    assert (code, err.splitlines()[-1]) == (3, f"error: --device {device}: {why}; {hint}")
    assert "bug in ffn" not in err


@pytest.mark.parametrize("text", [fake.UNKNOWN, fake.BUSY])
def test_a_gpu_that_fails_later_is_no_bug_either(text, call, monkeypatch):
    from ffncli.run.engine import prepare

    def fails(device):
        raise fake.AcceleratorError(text)

    monkeypatch.setattr(prepare, "device_of", fails)
    err = expect_refusal(call("trace", "4x8", "--device", "cuda"), "the GPU", code=3)
    assert "bug" not in err


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("CUDA driver error: unspecified launch failure", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("HIP error: invalid device function", True),
        ("mat1 and mat2 must have the same dtype, but got CUDA and CPU", False),
        ("an error of CUDA's graph", False),
    ],
)
def test_what_a_library_of_the_gpu_reports_is_no_bug_of_ours(text, reported):
    assert gpu.is_gpu_error(RuntimeError(text)) is reported


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_real_torch_without_a_gpu(call):
    for command in COMMANDS.values():
        err = expect_refusal(call(*command, "--device", "cuda"), code=3)
        assert err.startswith("error: --device cuda: there is no GPU here")
