"""Where Triton cannot run, it costs nothing and the reason is one line. Needs no Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ffncli.bench.request.kernel_names import choose_kernels
from ffncli.block.activations import TABLE
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.kernels import BY_DEFAULT, built_in
from ffncli.kernels.in_triton.unit import FUNCTIONS
from ffncli.kernels.kernel import interprets_triton, kernel_steps

GATED = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_what_is_missing(monkeypatch):
    kernel = built_in("triton_act")
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


def test_blocks_that_it_refuses():
    kernel = built_in("triton_act")
    for name in TABLE:
        reason = kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, name))))
        assert reason == (None if name in FUNCTIONS else f"{name} is not written in Triton here")
    assert kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, "swiglu", moe=MoE(4, 2))))) == "cannot compute experts"
    limited = {"situ": "a soft cap is not", "swiglustep": "a limit after the activation function is not"}
    for name, reason in limited.items():
        assert kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, name)))).startswith(reason)
    assert kernel.refuses(kernel_steps(steps(FFNSpec(8, 24, "deepseek_v4")))) is None
    assert kernel.refuses(GATED) is None
    assert kernel.refusal(GATED, "cuda", "bf16", "forward+backward").endswith("computes forward only")


def test_it_is_timed_where_it_is_named_only():
    assert "triton_act" not in BY_DEFAULT
    assert choose_kernels(["eager,triton_act"], None).kernels[1].label == "triton_act"


def test_interpreted_kernels_are_not_timed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(FFNError, match="TRITON_INTERPRET is set") as refused:
        choose_kernels(["eager"], None)
    assert refused.value.code == 3


def test_its_module_imports_no_triton():
    code = "import sys, ffncli.kernels.triton_act; sys.exit('triton' in sys.modules)"
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
