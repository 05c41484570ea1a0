from __future__ import annotations

import pytest

from ffncli.block.dtypes import TABLE, dtype
from ffncli.errors import FFNError


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("fp64", "fp64 float64 torch.float64 F64 double"),
        ("fp32", "fp32 float32 torch.float32 F32 float single"),
        ("bf16", "bf16 bfloat16 torch.bfloat16 BF16"),
        ("fp16", "fp16 float16 torch.float16 F16 half"),
    ],
)
def test_spellings(name, spellings):
    import torch

    assert {dtype(text).name for text in (*spellings.split(), f" {name.upper()}\n")} == {name}
    assert getattr(torch, dtype(name).torch).itemsize == dtype(name).bytes


def test_an_unknown_one_is_named():
    assert [row.name for row in TABLE] == ["fp64", "fp32", "bf16", "fp16"]
    with pytest.raises(FFNError, match="dtype: unknown dtype 'int8'; use one of fp64, fp32, bf16, fp16"):
        dtype("int8", "dtype")
