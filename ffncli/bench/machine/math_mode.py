"""The arithmetic that torch may use instead of full float32: fixed before anything is measured, and recorded.

Callers do not import torch at their top: a worker calls `set_math_mode` once, and again for a case on another device.
"""

from __future__ import annotations

import os

import torch

from ffncli.errors import FFNError, shown

# Variables that change a GPU's products behind torch's back: the first wins over `allow_tf32`.
_OVERRIDES = {"NVIDIA_TF32_OVERRIDE": "tf32_override", "CUBLAS_WORKSPACE_CONFIG": "cublas_workspace"}
# torch's float32 matmul precision → the arithmetic of float32 products, on a GPU and (oneDNN) on a CPU.
MODES = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}


def set_math_mode(mode: str, device: str = "cpu") -> str:
    """Fix the arithmetic of this process and return it in the form of the column `math_mode`, read back from torch.

    `mode` is torch's float32 matmul precision and holds for convolutions too: cuDNN's use TF32 by default, and a
    kernel made of convolutions would otherwise run in different arithmetic than one made of products. Sums of bf16 and
    fp16 products keep torch's defaults (partial sums may be rounded), fp16 accumulation stays off, subnormals
    are kept. The text names the settings that matter on `device` (`cpu`, `cuda`, `cuda:1`). Raises FFNError for an
    unknown mode.
    """
    if mode not in MODES:
        raise FFNError(f"--math-mode: unknown mode {shown(mode)}", f"use {', '.join(MODES)}")
    torch.set_float32_matmul_precision(mode)
    on_gpu, on_cpu = MODES[mode]
    torch.backends.cudnn.allow_tf32 = on_gpu == "tf32"
    if hasattr(torch.backends.mkldnn, "conv"):
        torch.backends.mkldnn.conv.fp32_precision = on_cpu
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    if hasattr(matmul, "allow_fp16_accumulation"):
        matmul.allow_fp16_accumulation = False
    torch.set_flush_denormal(False)
    return math_mode(device)


def math_mode(device: str = "cpu") -> str:
    """The current arithmetic: `fp32=highest subnormals=kept`, on a GPU with TF32 and the sums of bf16 and fp16."""
    matmul = torch.backends.cuda.matmul
    words = [f"fp32={torch.get_float32_matmul_precision()}"]
    if device.startswith("cuda"):
        words += [
            f"tf32={_on(matmul.allow_tf32)}",
            f"conv_tf32={_on(torch.backends.cudnn.allow_tf32)}",
            f"bf16_reduction={_sums(matmul.allow_bf16_reduced_precision_reduction)}",
            f"fp16_reduction={_sums(matmul.allow_fp16_reduced_precision_reduction)}",
            f"blas={str(torch.backends.cuda.preferred_blas_library()).rpartition('.')[2].lower()}",
        ]
        overrides = {word: os.environ.get(name, "") for name, word in _OVERRIDES.items()}
        words += [f"{word}={''.join(value.split())}" for word, value in overrides.items() if value]
    smallest = torch.tensor(torch.finfo(torch.float32).tiny) / 2  # torch does not report whether subnormals are flushed
    return " ".join([*words, f"subnormals={'kept' if smallest.item() else 'flushed'}"])


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _sums(reduced: object) -> str:
    """torch's flag may be a pair (reduced precision, split-k); the first one tells whether partial sums are rounded."""
    first = reduced[0] if isinstance(reduced, tuple) else reduced
    return "rounded" if first else "fp32"
