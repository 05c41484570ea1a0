"""Where Triton cannot run, it costs nothing and the reason is one line. Needs no Triton."""

import os
import subprocess
import sys

import pytest
import torch

from ffncli.bench.request.kernels import choose_kernels
from ffncli.block.activations import TABLE
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.kernels import BY_DEFAULT, built_in
from ffncli.kernels.in_triton.kernels import FUNCTIONS, LEAST, splits, tile_for
from ffncli.kernels.kernel import interprets_triton, kernel_steps

KERNELS = ("triton_act", "fused_gate", "decode")
GATED = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_missing(name, monkeypatch):
    kernel = built_in(name)
    assert kernel.missing("cpu") == (
        "runs on a GPU only; with TRITON_INTERPRET=1 in the environment, ffn verify checks it on a CPU"
    )
    monkeypatch.setattr("ffncli.kernels.kernel.find_spec", lambda name: None)
    assert kernel.missing("cuda:0") == "needs the module triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel.missing("cpu") == "needs the module triton"
    monkeypatch.setattr("ffncli.kernels.kernel.find_spec", lambda name: name if name == "triton" else None)
    assert kernel.missing("cpu") is None
    assert kernel.missing("cuda") is None


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)])
def test_the_interpreter_is_chosen_as_triton_reads_it(monkeypatch, value, on):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interprets_triton() is on


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_that_it_refuses(name):
    kernel = built_in(name)
    for function in TABLE:
        reason = kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, function))))
        assert reason == (None if function in FUNCTIONS else f"has no Triton code for {function}")
    assert kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, "swiglu", moe=MoE(4, 2))))) == "cannot compute experts"
    for limited in ("situ", "swiglustep", "deepseek_v4"):
        assert kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, limited)))) is None
    norm = kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, "relu2", gated=True, norm="rmsnorm", sub_norm=True))))
    assert norm == ("has no Triton code for a norm before down" if name == "fused_gate" else None)
    assert kernel.refuses(GATED) is None
    forward_only = "computes forward only" in kernel.refusal(GATED, "cuda", "int8", "forward+backward")
    assert forward_only == (name != "fused_gate")


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_timed_where_it_is_named_only(name):
    assert name not in BY_DEFAULT
    assert choose_kernels([f"eager,{name}"], None).kernels[1].label == name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_of_down_are_all_of_it(dtype):
    """Each column is in one part; every part but the last is of whole tiles, and they do not depend on the machine."""
    for tokens in (1, 2, 16, 17, 4096):
        tile = tile_for(tokens, dtype)
        assert tile.tokens >= tokens or tile == tile_for(4096, dtype)
        assert tile.rows * tile.columns * dtype.itemsize % (16 * 32 * tile.warps) == 0  # 16 bytes for every thread
        for rows in (1, 512, 4096):
            for columns in (1, 15, 16, 1023, 2048, 11008, 28672):
                parts, each = splits(tokens, rows, columns, tile)
                assert (parts - 1) * each < columns <= parts * each
                assert each % tile.columns == 0
                assert parts == 1 or each >= LEAST * tile.columns
                assert tokens <= 16 or parts == 1
    assert splits(1, 4096, 11008, tile_for(1, torch.bfloat16)) == (2, 5632)


def test_interpreted_kernels_are_not_timed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(FFNError, match="TRITON_INTERPRET is set") as refused:
        choose_kernels(["eager"], None)
    assert refused.value.code == 3


def test_their_modules_import_no_triton():
    code = "import sys\nfrom ffncli.kernels import built_in\n"
    code += f"for name in {KERNELS}: built_in(name)\nsys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0


def test_a_users_triton_kernel_without_a_gpu_is_one_line_of_advice(call, tmp_path, monkeypatch):
    """As Triton 3.7 says it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def mlp(x, gate, up, down):\n    raise RuntimeError('0 active drivers ([]). There should only be one.')\n"
    )
    code, _, err = call("verify", "8x24:swiglu", "--check", "kernels", "--kernel", "mine.py:mlp")
    assert code == 1
    assert err.endswith(
        "mine.py, line 2: Triton sees no GPU; with TRITON_INTERPRET=1 in the environment, ffn verify runs its kernels "
        "on a CPU)\n"
    )
