"""Triton kernels compiled for an H100 on a machine without one: no spills, little shared memory, wide loads."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from ffncli.block.steps import Activation
from ffncli.kernels.in_triton.unit import BLOCK, FUNCTIONS, constants
from ffncli.kernels.pattern import Dense

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no triton here: make test-triton installs it"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

MOST_SHARED = 227 * 1024  # bytes of a program on an H100
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "fp64": "*fp64"}


@cache
def compiled(function: str, dtype: str):
    """The gated kernel with rows that 16 divides and neighbouring columns, as products leave them, for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ffncli.kernels.in_triton.launched import act_kernel

    fixed = constants(Dense(True, Activation(function), None, 1, None))
    fixed |= {"gate_column": 1, "up_column": 1, "WIDE": dtype == "fp64", "BLOCK": BLOCK}
    tensors = dict.fromkeys(("gate", "up", "out"), POINTERS[dtype])
    sizes = dict.fromkeys(("columns", "gate_row", "up_row"), "i32")
    signature = {name: (tensors | sizes).get(name, "constexpr") for name in act_kernel.arg_names}
    even = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(signature) if name in tensors | sizes}
    source = ASTSource(fn=act_kernel, signature=signature, constexprs=fixed, attrs=even)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


def report(ptx: str, folder: Path) -> dict[str, int]:
    """Registers of a thread, bytes spilled and bytes of shared memory, by NVIDIA's assembler, which Triton contains."""
    from triton import knobs

    (folder / "kernel.ptx").write_text(ptx)
    words = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    text = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stderr
    patterns = {
        "registers": r"Used (\d+) registers",
        "stores": r"(\d+) bytes spill stores",
        "loads": r"(\d+) bytes spill loads",
        "shared": r"(\d+) bytes smem",
    }
    return {name: sum(map(int, re.findall(pattern, text))) for name, pattern in patterns.items()}


@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_spilled(function, dtype, tmp_path):
    kernel = compiled(function, dtype)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= MOST_SHARED
    used = report(kernel.asm["ptx"], tmp_path)
    assert (used["stores"], used["loads"]) == (0, 0)
    assert (
        0 < used["registers"] <= (128 if dtype == "fp64" else 64)
    )  # 64: 8 programs of 128 threads on a multiprocessor
    assert used["shared"] == kernel.metadata.shared


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loads_are_of_16_bytes(dtype):
    """Four words at once: two loads of gate and two of up in fp32, one of each in bf16."""
    ptx = compiled("silu", dtype).asm["ptx"]
    assert len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", ptx)) == {"fp32": 4, "bf16": 2}[dtype]
    assert not re.search(r"ld\.global(?![\w.:]*\.v4)", ptx)


def test_the_assemblers_report_is_read(tmp_path):
    """A kernel that must spill: 100 numbers of 64 bits are read before the first is written, with 32 registers."""
    body = "\n".join(f"ld.global.f64 %d{n}, [%a+{8 * n}];" for n in range(100))
    body += "\n" + "\n".join(f"st.global.f64 [%b+{8 * n}], %d{99 - n};" for n in range(100))
    ptx = f""".version 8.0
.target sm_90
.address_size 64
.visible .entry crowded(.param .u64 p, .param .u64 q)
.maxnreg 32
{{
.reg .b64 %a, %b;
.reg .f64 %d<100>;
ld.param.u64 %a, [p];
ld.param.u64 %b, [q];
{body}
ret;
}}
"""
    used = report(ptx, tmp_path)
    assert used["registers"] == 32
    assert used["stores"] > 0
    assert used["loads"] > 0
