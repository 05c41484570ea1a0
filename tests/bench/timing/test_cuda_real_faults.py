"""What a real GPU does when a kernel goes wrong, and what a call's memory is; skipped where there is none."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.script import ROOT
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import block_inputs
from ffncli.kernels import built_in
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights
from tests.oracles.modules import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


KERNELS = "tests/bench/faulty_kernels.py"
SMALL = ("256x512:swiglu", "--tokens", "16")
# Where a call takes the GPU longer than the host: behind a slow launch nothing is left to do on another stream.
LARGE = ("2048x8192:swiglu", "--tokens", "512", "--dtype", "bf16")


def rows_of(*words, folder, block=SMALL):
    """(kernel → row, exit code) of a short run."""
    command = [sys.executable, "-m", "ffncli", "bench", *block, "--device", "cuda", *words]
    command += ["--quick", "--json", "--save", str(folder / "gpu.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.stdout, done.stderr
    return {row["kernel"]: row for row in json.loads(done.stdout)["rows"]}, done.returncode


@pytest.mark.parametrize(
    ("name", "block", "status", "exit_code"),
    [
        ("assert_first", SMALL, "failed", 3),
        ("assert_later", SMALL, "failed", 3),
        ("too_large", SMALL, "oom", 3),
        ("other_stream", LARGE, "wrong", 1),
    ],
)
def test_a_fault_costs_its_own_row_only(name, block, status, exit_code, tmp_path):
    rows, code = rows_of("--kernel", f"eager,bad={KERNELS}:{name},packed", folder=tmp_path, block=block)
    assert {kernel: row["status"] for kernel, row in rows.items()} == {"eager": "ok", "bad": status, "packed": "ok"}
    assert rows["bad"]["time_s"] is None
    assert code == exit_code


@pytest.mark.parametrize("launch", ["graphs", "plain"])
def test_a_right_kernel_in_a_file_is_right(launch, tmp_path):
    """Its answers in graphs are judged as well, before or after the others are captured."""
    rows, code = rows_of("--kernel", f"eager,good={KERNELS}:right", "--launch", launch, folder=tmp_path)
    assert (code, rows["good"]["status"], rows["good"]["note"][:9]) == (0, "ok", "tests/ben")


@pytest.mark.parametrize("name", ["waits", "spoils_a_capture"])
def test_what_cannot_be_replayed_is_timed_all_the_same(name, tmp_path):
    rows, code = rows_of("--kernel", f"eager,bad={KERNELS}:{name}", folder=tmp_path)
    assert (code, rows["eager"]["status"], rows["bad"]["status"]) == (0, "ok", "ok")


def test_the_peak_memory_of_a_block_is_the_count_by_hand(tmp_path):
    """silu(gate), up and their product are there at once, [2048, 11008] in 2 bytes each; gate is freed before up is
    computed. torch's allocator leaves the rest of a 2 MiB step that is too small to be used with the tensor: 43 MiB may
    be taken as 44."""
    words = ["bench", "4096x11008:swiglu", "--tokens", "2048", "--dtype", "bf16", "--kernel", "eager"]
    command = [sys.executable, "-m", "ffncli", *words, "--device", "cuda", "--quick", "--json"]
    command += ["--save", str(tmp_path / "gpu.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    (row,) = json.loads(done.stdout)["rows"]
    assert 0 <= row["peak_memory_bytes"] - 3 * 2048 * 11008 * 2 <= 3 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "tokens"), [(24, 1), (1023, 3), (1024, 16), (11008, 2), (1023, 65), (1024, 129)])
@pytest.mark.parametrize("name", ["triton_act", "fused_gate", "decode"])
def test_the_triton_kernel_is_the_reference(name, width, tokens, dtype):
    """It compiles here, and gives what its interpreter gives: float64's output, rounded."""
    kernel, block = built_in(name), kernel_steps(steps(FFNSpec(64, width, "swiglu")))
    if reason := kernel.missing("cuda"):
        pytest.skip(reason)
    weights = {
        name: tensor.to(dtype) for name, tensor in random_weights(block, torch.Generator().manual_seed(0)).items()
    }
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = run(block, {n: w.double() for n, w in weights.items()}, {block_inputs(block)[0]: x.double()})
    there = {name: tensor.cuda() for name, tensor in weights.items()}
    call, params = kernel.build(block, "cuda", dtype), kernel.prepare(block, there)
    found = call(x.cuda(), params)
    assert torch.equal(call(x.cuda(), params), found)
    limit = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert relative_error(found.double().cpu(), expected) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 129])
def test_the_gradients_of_a_triton_kernel_are_those_of_eager(tokens, dtype):
    block = kernel_steps(steps(FFNSpec(64, 1023, "swiglu", bias=True)))
    if reason := built_in("fused_gate").missing("cuda"):
        pytest.skip(reason)
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0))
    gradients = {}
    for name, of in (("eager", torch.float64), ("fused_gate", dtype)):
        leaves = [tensor.to(dtype).to(of).cuda().requires_grad_() for tensor in (x, *weights.values())]
        out = built_in(name).build(block, "cuda", of)(leaves[0], tuple(leaves[1:]))
        gradients[name] = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for one, right in zip(gradients["fused_gate"], gradients["eager"], strict=True):
        assert relative_error(one.double(), right) < {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
