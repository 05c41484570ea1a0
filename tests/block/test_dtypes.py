from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.dtypes import STORED, TABLE, activation_dtype, dtype, find, storage
from ffncli.errors import FFNError

GGML = [row for row in STORED if row.other_bytes == 4]


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
    assert {dtype(text).name for text in (*spellings.split(), f" {name.upper()}\n")} == {name}
    assert {storage(text).name for text in spellings.split()} == {name}
    assert getattr(torch, dtype(name).torch).itemsize == dtype(name).bytes


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("fp8", "fp8 FP8_E4M3 torch.float8_e4m3fn F8_E4M3"),
        ("fp8_e5m2", "e5m2 float8_e5m2 F8_E5M2"),
        ("int8", "int8 torch.int8 I8"),
        ("q4_0", "q4_0 Q4_0 Q40"),
        ("q6_k", "Q6_K q6k"),
        ("nf4", "nf4"),
    ],
)
def test_spellings_of_stored_formats(name, spellings):
    assert {storage(text).name for text in spellings.split()} == {name}
    assert not storage(name).computable
    if attribute := storage(name).torch:
        assert getattr(torch, attribute).itemsize == storage(name).bytes


def test_no_name_means_two_formats():
    names = [
        n for row in (*TABLE, *STORED) for n in {row.name, row.torch, row.safetensors.lower(), *row.aliases} - {""}
    ]
    assert len(names) == len(set(names))


def test_an_unknown_one_is_named():
    assert [row.name for row in TABLE] == ["fp64", "fp32", "bf16", "fp16"]
    with pytest.raises(FFNError, match=r"dtype: unknown dtype 'int9'; use one of fp64, fp32, bf16, fp16$"):
        dtype("int9", "dtype")
    with pytest.raises(FFNError, match="--dtype: unknown dtype 'q4_k_m'; did you mean 'q4_k'"):
        storage("q4_k_m")
    with pytest.raises(FFNError, match=r"unknown dtype 'xyz'; use one of fp64, fp32, .*, fp8, .*, q4_0, "):
        storage("xyz")


@pytest.mark.parametrize("row", STORED, ids=lambda row: row.name)
def test_a_stored_format_is_refused_where_something_is_computed(row):
    assert find(row.name) is None
    with pytest.raises(FFNError) as refused:
        dtype(row.name)
    assert str(refused.value) == f"--dtype {row.name} counts bytes only; compute in one of fp64, fp32, bf16, fp16"
    assert activation_dtype(row).name == "bf16"


def test_plain_weights_go_with_activations_of_their_own():
    assert [activation_dtype(row) for row in TABLE] == list(TABLE)


@pytest.mark.parametrize("row", GGML, ids=lambda row: row.name)
def test_block_sizes_are_ggmls(row):
    assert (row.block, row.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[row.name.upper()]]


def test_mxfp4_and_nvfp4_take_the_bits_that_ggml_gives_them():
    for name in ("mxfp4", "nvfp4"):
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
        assert storage(name).bits_per_weight == 8 * size / block


@pytest.mark.parametrize(
    ("name", "bits"),
    [  # bits of a weight, and of its share of a scale
        ("fp32", 32), ("fp8", 8), ("int8", 8), ("int4", 4), ("mxfp8", 8 + 8 / 32), ("mxfp6", 6 + 8 / 32),
        ("mxfp4", 4 + 8 / 32), ("nvfp4", 4 + 8 / 16), ("nf4", 4 + 32 / 64), ("q4_0", 4 + 16 / 32),
        ("q8_0", 8 + 16 / 32), ("q4_k", 4 + (2 * 16 + 8 * 12) / 256), ("q6_k", 6 + (16 + 16 * 8) / 256),
    ],
)  # fmt: skip
def test_bits_per_weight_from_their_parts(name, bits):
    assert storage(name).bits_per_weight == bits
    assert storage(name).bytes == bits / 8


@given(
    row=st.sampled_from((*TABLE, *STORED)), stack=st.integers(1, 5), rows=st.integers(1, 9), blocks=st.integers(1, 9)
)
def test_whole_blocks_take_whole_bytes(row, stack, rows, blocks):
    assert row.matrix_bytes((stack, rows, blocks * row.block)) == stack * rows * blocks * row.block_bytes


def test_rows_that_are_no_whole_number_of_blocks():
    with pytest.raises(FFNError, match="q4_0 stores 32 weights in a block, and a row of 33 is not a whole number of"):
        storage("q4_0").matrix_bytes((4, 33))
    assert storage("nf4").matrix_bytes((3, 33)) == 2 * 36  # 99 weights, over the ends of rows: two blocks
    assert storage("int4").matrix_bytes((3, 3)) == 5
