"""What parameters weigh: torch's nbytes in plain formats, matrices and vectors by hand in stored ones."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.cost import cost
from ffncli.block.dtypes import TABLE, storage, weight_bytes
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from tests.oracles import modules

sizes = st.integers(1, 300)


@given(d_model=sizes, d_ff=sizes, gated=st.booleans(), bias=st.booleans(), row=st.sampled_from(TABLE))
def test_plain_formats_take_the_bytes_of_torchs_tensors(d_model, d_ff, gated, bias, row):
    with torch.device("meta"):
        module = (modules.Gated if gated else modules.Plain)(d_model, d_ff, bias).to(getattr(torch, row.torch))
    block = steps(FFNSpec(d_model, d_ff, gated=gated, bias=bias, norm="layernorm"))
    assert weight_bytes(block, row) == sum(p.nbytes for p in module.parameters())
    assert weight_bytes(block, row) == cost(block).params * row.bytes


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs"])
def test_ggml_packs_the_matrices_and_keeps_vectors_in_fp32(name):
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    row = {512: 512 // block * size, 1024: 1024 // block * size}
    dense = 1024 * row[512] + 512 * row[1024] + 4 * (1024 + 512)
    assert weight_bytes(steps(FFNSpec(512, 1024, "relu")), storage(name)) == dense


def test_only_matrices_between_d_model_and_d_ff_are_packed():
    moe = MoE(8, 2, 1, shared_gate=True, router_bias=True, correction=True)
    block = steps(FFNSpec(64, 96, "swiglu", bias=True, norm="rmsnorm", sub_norm=True, moe=moe))
    packed = 9 * 3 * 64 * 96
    kept = 9 * (2 * 96 + 64) + (8 * 64 + 8) + 8 + 64  # biases, router, correction, the shared experts' gate
    for name, width, other in (("q4_0", 18 / 32, 4), ("mxfp4", 17 / 32, 2), ("fp8", 1, 2), ("nf4", 36 / 64, 2)):
        assert weight_bytes(block, storage(name)) == packed * width + kept * other
    xielu = steps(FFNSpec(64, 96, "xielu", bias=False))
    assert weight_bytes(xielu, storage("q8_0")) == 2 * 64 * 96 * 34 // 32 + 2 * 4


def test_the_tensor_that_does_not_fit_is_named():
    with pytest.raises(
        FFNError, match=r"^up.weight: q4_0 stores 32 weights .* a row of 48 .*; choose another --dtype$"
    ):
        weight_bytes(steps(FFNSpec(48, 64)), storage("q4_0"))
    with pytest.raises(FFNError, match=r"^down.weight: q4_k stores 256 .* a row of 640"):
        weight_bytes(steps(FFNSpec(256, 640, moe=MoE(4, 2))), storage("q4_k"))
