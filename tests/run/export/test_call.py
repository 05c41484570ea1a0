"""`ffncli.export`: what it takes, what it writes, what it loads."""

import pytest
import torch

import ffncli
from ffncli.block.analysis.rounding import block_bound
from ffncli.block.dtypes import dtype
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import ExitCode, FFNError
from ffncli.models.model import block_model
from ffncli.models.source import load
from ffncli.run.export.call import FORMS
from ffncli.run.export.problem import problem_of
from ffncli.run.measure.gap import tolerance_for


def test_text_and_files(tmp_path):
    made = ffncli.export("8x16:swiglu", form="torch", tokens=[1, 7], dtype="bf16")
    assert made.text == made.files["block.py"]
    assert [one.tokens for one in made.problem.workloads] == [1, 7]
    assert made.write(tmp_path / "a.py") == (str(tmp_path / "a.py"),)
    assert (tmp_path / "a.py").read_text("utf-8") == made.text
    with pytest.raises(FFNError, match=r"a\.py exists already; choose another out FILE, or give --force"):
        made.write(tmp_path / "a.py")
    made.write(tmp_path / "a.py", force=True)


def test_a_data_set_takes_several_blocks(tmp_path):
    for source in ("8x16:swiglu", "8x16:geglu"):
        made = ffncli.export(source, form="flashinfer-trace")
        paths = made.write(tmp_path / "set")
        assert len(paths) == len(made.files) == 4
        with pytest.raises(FFNError, match="is not text; write it: out='PATH'"):
            assert made.text
    assert len(list((tmp_path / "set" / "definitions" / "ffn").glob("*.json"))) == 2
    with pytest.raises(FFNError, match=r"swiglu|silu.*exists already; choose another folder, or give force"):
        ffncli.export("8x16:swiglu", form="flashinfer-trace").write(tmp_path / "set")
    (tmp_path / "file").write_text("")
    with pytest.raises(FFNError, match="cannot write") as caught:
        made.write(tmp_path / "file")
    assert caught.value.code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"form": "tensorflow"}, "form: unknown form 'tensorflow'; use torch, flashinfer-trace, onnx, latex"),
        ({"form": 3}, "form must be a string"),
        ({"part": "half"}, "part: unknown choice 'half'"),
        ({"seed": 1}, "form='torch' writes no weights; give seed and large with form='onnx'"),
        ({"form": "latex", "large": True}, "form='latex' writes no weights"),
        ({"tokens": 0}, "tokens must be one or more whole numbers from 1"),
        ({"source": None}, "d_model is missing"),
        ({"dtype": "q4_0"}, "is for counting bytes"),
    ],
)
def test_what_it_refuses(arguments, why):
    with pytest.raises(FFNError) as caught:
        ffncli.export(**{"source": "8x16", **arguments})
    assert str(caught.value).startswith(why) or why in str(caught.value)


def test_a_source_that_does_not_say_what_it_computes(tmp_path):
    from tests.oracles.checkpoints import folder, tensors

    bare = folder(tmp_path / "m", None, tensors("llama"))
    with pytest.raises(FFNError, match="does not specify its activation, so it cannot be run"):
        ffncli.export(bare)
    assert "F.silu" in ffncli.export(bare, activation="silu").text


def test_a_module_of_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)\n\n"
        "    def forward(self, x):\n        return self.b(nn.functional.gelu(self.a(x)))\n"
    )
    assert "F.gelu(up)" in ffncli.export(f"{tmp_path}/mine.py:Net").text


def test_every_form_has_its_default_part():
    assert {name: form.part for name, form in FORMS.items()} == {
        "torch": "block", "flashinfer-trace": "ffn", "onnx": "block", "latex": "block",
    }  # fmt: skip
    assert "x + down" not in ffncli.export("llama-2-7b", part="ffn").text
    assert "x + down" in ffncli.export("llama-2-7b").text


def test_the_work_of_a_dense_block_in_closed_form():
    d, f = 64, 256
    block = problem_of(
        block_model(FFNSpec(d, f, "swiglu", norm="rmsnorm"), "b"), "block", dtype_name="bf16", tokens=(3,)
    )
    (work,) = block.workloads
    assert block.params == 3 * d * f + d
    assert (work.tokens, work.matmul_flops) == (3, 3 * 6 * d * f)
    assert work.elementwise_flops == 3 * (4 * d + 2 * f)
    assert work.bytes == 2 * (3 * d * f + d + 2 * 3 * d)  # the norm too


def test_the_work_of_a_mixture_in_closed_form():
    d, f, experts, k, tokens = 16, 24, 8, 2, 5
    spec = FFNSpec(d, f, "swiglu", moe=MoE(experts, k))
    (work,) = problem_of(block_model(spec, "b"), "ffn", dtype_name="fp32", tokens=(tokens,)).workloads
    touched = experts * (1 - (1 - k / experts) ** tokens)
    assert work.matmul_flops == tokens * (2 * d * experts + k * 6 * d * f)
    assert work.bytes == 4 * (d * experts + 2 * tokens * d) + round(4 * touched * 3 * d * f)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
def test_the_tolerance_is_that_of_verify(name, scores):
    torch_dtype = getattr(torch, dtype(name).torch)
    assert block_bound(dtype(name), 300, scores) == tolerance_for(torch_dtype, 300, torch.float32 if scores else None)
    moe = MoE(4, 2, score_dtype="fp32" if scores else "input")
    block = problem_of(block_model(FFNSpec(8, 300, "swiglu", moe=moe), "b"), "block", dtype_name=name)
    assert block.tolerance == block_bound(dtype(name), 300, scores)


def test_the_layer_is_of_the_most_common_kind():
    model = load("deepseek-v3")
    assert (problem_of(model, "block").layer.index, problem_of(model, "block").spec.moe.experts) == (3, 256)
    assert problem_of(model, "block", "0").spec.moe is None
    with pytest.raises(FFNError, match="out of range"):
        problem_of(model, "block", "61")


def test_the_dtype_is_that_of_the_release():
    assert problem_of(load("llama-2-7b"), "block").dtype.name == "fp16"
    assert problem_of(load("deepseek-v3"), "block").dtype.name == "bf16"  # stored in fp8
    assert problem_of(load("4x8:relu"), "block").dtype.name == "fp32"
    with pytest.raises(FFNError, match="is for counting bytes"):
        problem_of(load("4x8:relu"), "block", dtype_name="fp8")


def test_the_ffn_alone_has_no_norm_and_no_dropout():
    spec = FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True, dropout=0.1)
    assert [step.output for step in problem_of(block_model(spec, "b"), "ffn").steps] == [
        "gate", "up", "act", "hidden", "down",
    ]  # fmt: skip
    assert problem_of(block_model(spec, "b"), "block").formulas[-1] == "out = x + down"
