"""The arithmetic is what was asked for, in every place where torch keeps a flag of its own."""

import pytest
import torch

from ffncli.bench.machine.math_mode import MODES, math_mode, set_math_mode
from ffncli.errors import FFNError

CUDA = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _as_before():
    yield
    set_math_mode("highest")
    torch.backends.cudnn.allow_tf32 = True  # as torch ships it


@pytest.mark.parametrize("mode", MODES)
def test_products_and_convolutions_use_the_same_arithmetic(mode):
    torch.backends.cudnn.allow_tf32 = mode == "highest"  # torch's default is on: must not survive
    text = set_math_mode(mode, "cuda")
    assert torch.get_float32_matmul_precision() == mode
    assert CUDA.allow_tf32 is torch.backends.cudnn.allow_tf32 is (mode != "highest")
    assert torch.backends.mkldnn.conv.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision
    assert f"fp32={mode} " in text
    tf32 = "off" if mode == "highest" else "on"
    assert f" tf32={tf32} conv_tf32={tf32} " in text


def test_on_a_cpu_the_flags_of_a_gpu_are_not_named():
    assert set_math_mode("highest") == "fp32=highest subnormals=kept"
    assert set_math_mode("high", "cuda:1").startswith("fp32=high tf32=on conv_tf32=on bf16_reduction=rounded")


def test_on_a_gpu_what_changes_products_behind_torchs_back_is_recorded(monkeypatch):
    for name in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert "override" not in math_mode("cuda")
    assert "cublas_workspace" not in math_mode("cuda")
    assert " blas=cublas " in math_mode("cuda")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert " tf32_override=0 cublas_workspace=:4096:8 " in math_mode("cuda:1")
    assert "override" not in math_mode("cpu")


def test_what_a_user_file_changed_is_recorded():
    set_math_mode("highest")
    CUDA.allow_bf16_reduced_precision_reduction = False
    assert "bf16_reduction=fp32" in math_mode("cuda")
    set_math_mode("highest")
    assert "bf16_reduction=rounded" in math_mode("cuda")


def test_flushed_subnormals_are_seen_and_put_back():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    assert math_mode().endswith("subnormals=flushed")
    assert set_math_mode("highest").endswith("subnormals=kept")


def test_an_unknown_mode_is_refused():
    with pytest.raises(FFNError, match="use highest, high, medium"):
        set_math_mode("fast")
