"""Triton kernels compiled for an H100 on a machine without one: no spills, little shared memory, wide loads."""

import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ffncli.block.steps import Activation
from ffncli.kernels.dense import Dense
from ffncli.kernels.in_triton.kernels import BLOCK, FUNCTIONS, GROUP, Tile, constants, tile_for

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no triton here: make test-triton installs it"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

MOST_SHARED = 227 * 1024  # bytes of a program on an H100
REGISTERS = 64 * 1024  # of 4 bytes, on one of its multiprocessors
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "fp64": "*fp64"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
TILES = sorted({(dtype, tile_for(tokens, DTYPES[dtype])) for dtype in DTYPES for tokens in (1, 16, 64, 128)})
EVERY_LIMIT = {"low": -5.0, "high": 7.0, "most": 6.0, "plus": 1.0}


def compiled(name: str, pointers: Mapping[str, str], fixed: Mapping[str, object], tile: Tile | None = None, even=True):
    """A kernel for sm_90; what is neither a pointer nor fixed is an integer. `even`: 16 divides all of them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ffncli.kernels.in_triton import launched

    kernel = getattr(launched, name)
    block = {} if tile is None else {"BM": tile.tokens, "BN": tile.rows, "BK": tile.columns}
    options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
    fixed = {n: value for n, value in {**fixed, **block}.items() if n in kernel.arg_names}
    signature = {n: "constexpr" if n in fixed else pointers.get(n, "i32") for n in kernel.arg_names}
    sixteens = {(n,): [["tt.divisibility", 16]] for n, of in enumerate(signature.values()) if of != "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=sixteens if even else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(kernel, folder: Path) -> dict[str, int]:
    """Registers of a thread, bytes spilled and bytes of shared memory, by NVIDIA's assembler, which Triton contains."""
    return reported(kernel.asm["ptx"], folder)


def reported(ptx: str, folder: Path) -> dict[str, int]:
    from triton import knobs

    (folder / "kernel.ptx").write_text(ptx)
    words = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    text = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stderr
    assert "Potential Performance Loss" not in text, text  # as it says of products that wait for each other
    patterns = {
        "registers": r"Used (\d+) registers",
        "stores": r"(\d+) bytes spill stores",
        "loads": r"(\d+) bytes spill loads",
        "shared": r"(\d+) bytes smem",
    }
    return {name: sum(map(int, re.findall(pattern, text))) for name, pattern in patterns.items()}


# --- between the products ---------------------------------------------------------------------------------------------


@cache
def elementwise(name: str, function: str, dtype: str):
    """The gated kernel with rows that 16 divides and neighbouring columns, as products leave them."""
    fixed = constants(Dense(True, Activation(function), None, 1, None))
    fixed |= {"gate_column": 1, "up_column": 1, "WIDE": dtype == "fp64", "BLOCK": BLOCK}
    tensors = ("gate", "up", "out", "d_hidden", "d_gate", "d_up", "hidden")
    return compiled(name, dict.fromkeys(tensors, POINTERS[dtype]), fixed)


@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["act_kernel", "act_backward_kernel"])
def test_nothing_is_spilled_between_the_products(name, function, dtype, tmp_path):
    kernel = elementwise(name, function, dtype)
    assert kernel.asm["cubin"]
    used = report(kernel, tmp_path)
    assert (used["stores"], used["loads"], used["shared"]) == (0, 0, 0)
    # 64: 8 programs of 128 threads on a multiprocessor
    assert 0 < used["registers"] <= (128 if dtype == "fp64" else 64)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loads_are_of_16_bytes(dtype):
    """Four words at once: two loads of each tensor in fp32, one in bf16."""
    for name, tensors in {"act_kernel": 2, "act_backward_kernel": 3}.items():
        ptx = elementwise(name, "silu", dtype).asm["ptx"]
        assert len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", ptx)) == {"fp32": 2, "bf16": 1}[dtype] * tensors
        assert not re.search(r"ld\.global(?![\w.:]*\.v4)", ptx)


# --- products ---------------------------------------------------------------------------------------------------------


@cache
def hidden(dtype: str, tile: Tile, function: str = "gelu", *, gated=True, trained=True, turned=False):
    """gate, up and what follows; `trained` with biases, every limit, and gate and up stored. `turned`: by columns."""
    limits = EVERY_LIMIT if trained else {}
    fixed = constants(Dense(gated, Activation(function, **limits), Activation("identity", **limits), 1, None))
    fixed |= {"WIDE": dtype == "fp64", "CAST": False, "GROUP": GROUP}
    fixed |= dict.fromkeys(("x_row", "gate_row", "up_row") if turned else ("x_column", "gate_column", "up_column"), 1)
    extras = ("gate_bias", "up_bias", "gates", "ups")
    fixed |= {} if trained else dict.fromkeys(extras)
    tensors = dict.fromkeys(("x", "gate", "up", "hidden", *extras), POINTERS[dtype])
    return compiled("hidden_kernel", tensors, fixed, tile, even=not turned)


@cache
def split(dtype: str, tile: Tile):
    """A part of down."""
    tensors = dict.fromkeys(("x", "weight"), POINTERS[dtype]) | {"partial": "*fp64" if dtype == "fp64" else "*fp32"}
    fixed = {"WIDE": dtype == "fp64", "CAST": False, "x_column": 1, "weight_column": 1}
    return compiled("split_kernel", tensors, fixed, tile)


def assert_two_fit(kernel, tile: Tile, folder: Path) -> None:
    """No spills, and two programs on a multiprocessor: while one loads or writes, the other computes."""
    used = report(kernel, folder)
    assert (used["stores"], used["loads"]) == (0, 0)
    assert 0 < used["registers"] * 32 * tile.warps <= REGISTERS / 2
    assert kernel.metadata.shared <= MOST_SHARED / 2


@pytest.mark.parametrize("form", [{"trained": True}, {"trained": False}, {"gated": False}])
@pytest.mark.parametrize(("dtype", "tile"), TILES)
def test_two_programs_of_products_fit(dtype, tile, form, tmp_path):
    assert_two_fit(hidden(dtype, tile, **form), tile, tmp_path)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_programs_fit_with_every_function(function, tmp_path):
    for tokens in (1, 128):
        tile = tile_for(tokens, torch.bfloat16)
        assert_two_fit(hidden("bf16", tile, function), tile, tmp_path)


@pytest.mark.parametrize(("dtype", "tile"), TILES)
def test_two_programs_of_down_fit(dtype, tile, tmp_path):
    assert_two_fit(split(dtype, tile), tile, tmp_path)


@pytest.mark.parametrize(("dtype", "tile"), [one for one in TILES if one[0] in ("bf16", "fp64")])
def test_matrices_by_columns_and_odd_sizes_fit_once(dtype, tile, tmp_path):
    """Nothing is divided by 16, and neighbours in memory are of one column: it need not be fast."""
    kernel = hidden(dtype, tile, turned=True)
    assert kernel.metadata.shared <= MOST_SHARED
    assert report(kernel, tmp_path)["registers"] > 0


@pytest.mark.parametrize(("dtype", "tile"), TILES)
def test_what_products_load_and_multiply_with(dtype, tile):
    """16 bytes at once: into registers for one token, else into shared memory. fp32 is never rounded to TF32."""
    for kernel in (hidden(dtype, tile, trained=False), split(dtype, tile)):
        ptx = kernel.asm["ptx"]
        assert "tf32" not in ptx
        words = re.findall(r"ld\.global[\w.:]*\.(v4\.b32|v2\.b64)|ld\.global|cp\.async[\w.]*\.global .* (0x10),", ptx)
        assert words
        assert all(map(any, words))
        assert ("cp.async" in ptx) == (tile.tokens > 1)
        assert bool(re.search(r"\b(wg)?mma\b", ptx)) == (tile.tokens > 1 and dtype != "fp32")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("tokens", [64, 128])
def test_a_hoppers_own_products_are_used(dtype, tokens, tmp_path):
    """HGMMA, 64 rows at once, in the machine's code: one for each 16 columns of gate's tile and of up's."""
    from triton import knobs

    tile = tile_for(tokens, DTYPES[dtype])
    (tmp_path / "kernel.cubin").write_bytes(hidden(dtype, tile).asm["cubin"])
    words = [knobs.nvidia.cuobjdump.path, "-sass", "kernel.cubin"]
    text = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert text.count("HGMMA.64x64x16.F32") == 2 * tile.columns // 16


@pytest.mark.parametrize("dtype", POINTERS)
def test_the_sum_of_parts_spills_nothing(dtype, tmp_path):
    tensors = dict.fromkeys(("bias", "out"), POINTERS[dtype]) | {"partial": "*fp64" if dtype == "fp64" else "*fp32"}
    used = report(compiled("sum_kernel", tensors, {"BLOCK": 128}), tmp_path)
    assert (used["stores"], used["loads"], used["shared"]) == (0, 0, 0)


# --- the report -------------------------------------------------------------------------------------------------------


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
    used = reported(ptx, tmp_path)
    assert used["registers"] == 32
    assert used["stores"] > 0
    assert used["loads"] > 0
