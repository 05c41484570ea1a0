"""What an export says of a block: closed forms, and the bound that `ffn verify` has."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.analysis.rounding import block_bound
from ffncli.block.dtypes import dtype
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.models.model import block_model
from ffncli.models.source import load
from ffncli.run.export.problem import problem_of
from ffncli.run.measure.gap import tolerance_for


def test_the_work_of_a_dense_block_in_closed_form():
    d, f = 64, 256
    block = problem_of(
        block_model(FFNSpec(d, f, "swiglu", norm="rmsnorm"), "b"), "block", dtype_name="bf16", tokens=(3,)
    )
    (work,) = block.workloads
    assert block.params == 3 * d * f + d
    assert (work.tokens, work.matmul_flops) == (3, 3 * 6 * d * f)
    assert work.elementwise_flops == 3 * (4 * d + 2 * f)
    assert work.bytes == 2 * (3 * d * f + 2 * 3 * d)


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
    with pytest.raises(FFNError, match="counts bytes only"):
        problem_of(load("4x8:relu"), "block", dtype_name="fp8")


def test_the_ffn_alone_has_no_norm_and_no_dropout():
    spec = FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True, dropout=0.1)
    assert [step.output for step in problem_of(block_model(spec, "b"), "ffn").steps] == [
        "gate", "up", "act", "hidden", "down",
    ]  # fmt: skip
    assert problem_of(block_model(spec, "b"), "block").formulas[-1] == "out = x + down"
