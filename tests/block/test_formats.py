"""The table of quantized formats: names, words, blocks, ranges."""

import pytest
import torch

from ffncli.block.dtypes import storage
from ffncli.block.formats import FORMATS, float_values, format_of
from ffncli.errors import FFNError

OF_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn,
            "fp8_e5m2": torch.float8_e5m2}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), OF_TORCH.items())
def test_ranges_are_torchs(name: str, dtype: torch.dtype):
    form, info = FORMATS[name], torch.finfo(dtype)
    assert (form.largest, form.lowest, form.bits) == (info.max, info.min, info.bits)
    assert form.smallest == torch.tensor([1], dtype=torch.int8 if info.bits == 8 else torch.int16).view(dtype).item()


def test_values_of_small_floats_are_those_of_ocp():
    """OCP Microscaling Formats 1.0, tables 3 and 5."""
    assert float_values(2, 1)[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert max(float_values(2, 3)) == 7.5
    assert float_values(2, 3)[1] == 0.125
    assert [str(value) for value in float_values(2, 1)[8:10]] == ["-0.0", "-0.5"]
    as_e5m2 = torch.arange(124, dtype=torch.uint8).view(torch.float8_e5m2).double().tolist()
    assert [*float_values(5, 2)[:124]] == as_e5m2


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.fixed])
def test_stored_bits_are_those_that_are_counted(name: str):
    """The table of dtypes has the same formats, for counting bytes."""
    form = FORMATS[name]
    scale = {"e8m0": 8, "e4m3": 8, "fp16": 16, "fp16 + fp16": 32}[form.scale]
    assert form.bits + scale / form.group == storage(name).bits_per_weight


def test_names_in_every_spelling():
    same = ("fp8", "FP8_E4M3", "float8_e4m3fn", "torch.float8_e4m3fn", "fp8:channel", "fp8:compressed-tensors")
    assert len({format_of(text) for text in same}) == 1
    assert format_of("fp8:pow2").rule == "transformers"
    assert format_of("fp8:torchao:pow2").rule == "torchao"
    assert format_of("int4:asymmetric:g32") == format_of("int4:g32:asymmetric")
    texts = ("fp8:block128:pow2:torchao", "int4:g32:asymmetric", "nvfp4:torchao", "mxfp4:even", "bf16", "q8_0")
    for text in texts:
        assert (str(format_of(text)), format_of(str(format_of(text)))) == (text, format_of(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvfp5", "no tensor can be quantized to 'nvfp5'; did you mean 'nvfp4'"),
        ("q4_k", "no tensor can be quantized to 'q4_k'"),
        ("", "no tensor can be quantized to ''"),
        ("fp8:g0", "fp8 does not take the word 'g0'; it takes tensor, channel, g128, block128, pow2"),
        ("fp8:floor", "fp8 does not take the word 'floor'"),
        ("mxfp4:g16", "mxfp4 does not take the word 'g16'; it takes floor, even, rceil, ceil"),
        ("nvfp4:asymmetric", "nvfp4 does not take the word 'asymmetric'"),
        ("bf16:tensor", "bf16 does not take the word 'tensor'; it takes no words"),
        ("q8_0:gguf:x", "q8_0 does not take the word 'x'"),
        ("fp8:compressed-tensors:pow2", "compressed-tensors does not write powers of two; use transformers or torchao"),
        ("mxfp4:even:floor", "two words for the same choice"),
        ("int4:g32:g64", "two words for the same choice"),
        ("int4:channel:channel", "two words for the same choice"),
        ("fp8:", "fp8 does not take the word ''"),
    ],
)
def test_other_names_are_refused(text: str, message: str):
    with pytest.raises(FFNError) as error:
        format_of(text)
    assert message in str(error.value)


def test_a_block_on_each_axis():
    assert format_of("fp8:tensor").block((3, 8, 16)) == (3, 8, 16)
    assert format_of("fp8").block((3, 8, 16)) == (1, 1, 16)
    assert format_of("fp8:block128").block((3, 8, 16)) == (1, 128, 128)
    assert format_of("nvfp4").block((32,)) == (16,)
    for text, shape in (("nvfp4", (4, 24)), ("q8_0", (4, 48)), ("int4", (4, 192)), ("tq1_0", (4, 128))):
        with pytest.raises(FFNError, match=f"needs rows of whole blocks of {format_of(text).group} values, got"):
            format_of(text).block(shape)
    for shape in ((), (0,), (4, 0)):
        with pytest.raises(FFNError, match="has no rows"):
            format_of("bf16").block(shape)
    with pytest.raises(FFNError, match="needs a matrix"):
        format_of("fp8:block128").block((128,))
