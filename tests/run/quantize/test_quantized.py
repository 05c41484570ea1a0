"""Codes, scales and values of small tensors by hand; what a quantized tensor gives away; what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffncli
from ffncli.block.dtypes import storage
from ffncli.block.formats import FORMATS, format_of
from ffncli.errors import FFNError
from ffncli.run.quantize.blocks import Blocks
from tests.oracles.packed import FP8, UP, config_groups, unpacked

W = f"{UP}.weight"


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_fp8_by_hand():
    """The largest value becomes 448; 0.3 × 448 = 134.4 lies between 128 and 144."""
    quantized = ffncli.quantize(torch.tensor([[1.0, 0.3, -0.5, 0.0]]), "fp8")
    assert quantized.codes.tolist() == [[0x7E, 0x70, 0xF6, 0]]
    assert quantized.scales is not None
    assert quantized.scales.item() == pytest.approx(1 / 448)
    assert quantized.dequantize()[0].tolist() == pytest.approx([1, 128 / 448, -0.5, 0])


def test_powers_of_two_cover_the_largest():
    for largest in (448.0, 449.0, 1.0, 1e-3, 3e4):
        scales = ffncli.quantize(torch.full((1, 4), largest), "fp8:pow2").scales
        assert scales is not None
        assert scales.float().item() == 2.0 ** math.ceil(math.log2(largest / 448))


@pytest.mark.parametrize(
    ("rule", "scale", "codes"),
    [("floor", 1.0, [7, 7, 1]), ("even", 2.0, [6, 5, 0]), ("ceil", 2.0, [6, 5, 0]), ("rceil", 2.0, [6, 5, 0])],
)
def test_mxfp4_by_hand(rule: str, scale: float, codes: list[int]):
    """7.5 in the scale 1 is cut to 6; in the scale 2 it is 3.75, nearest to 4. 5.5 is 2.75 there, nearest to 3, and 0.5
    a tie of 0 and 0.5, which goes to the even code."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([7.5, 5.5, 0.5])
    quantized = ffncli.quantize(x, f"mxfp4:{rule}")
    assert quantized.scales is not None
    assert (quantized.scales.float().item(), quantized.codes[0, :3].tolist()) == (scale, codes)


def test_nvfp4_by_hand():
    """The tensor's scale maps its largest value to 448 × 6, so the block of the largest value has the scale 448."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 16] = 2688.0, -1344.0, 3.0
    for rule, empty in (("torchao", 2.0**-6), ("compressed-tensors", 0.125)):
        quantized = ffncli.quantize(torch.cat([x, torch.zeros(1, 32)]), f"nvfp4:{rule}")
        assert quantized.scales is not None
        assert quantized.tensor_scale is not None
        assert (quantized.scales.float().tolist(), quantized.tensor_scale.item()) == ([[448, 0.5], [empty] * 2], 1)
        assert quantized.codes[0, [0, 1, 16]].tolist() == [7, 8 + 5, 7]
        assert torch.equal(quantized.dequantize()[:1], x)


def test_int4_by_hand():
    """Symmetric: 7.5 steps on each side. Asymmetric: 15 steps from -1 to 4, and 0 at the code -8 + 3."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([-1.0, 4.0, 2.0])
    symmetric, other = (ffncli.quantize(x, f"int4:g32{words}") for words in ("", ":asymmetric"))
    assert symmetric.scales is not None
    assert other.scales is not None
    assert other.zeros is not None
    assert (symmetric.scales.item(), other.scales.item()) == (pytest.approx(4 / 7.5), pytest.approx(1 / 3))
    assert (symmetric.codes[0, :4].tolist(), other.codes[0, :4].tolist()) == ([-2, 7, 4, 0], [-8, 7, 1, -5])
    assert (other.zeros.item(), other.dequantize()[0, :4].tolist()) == (-5, pytest.approx([-1, 4, 2, 0]))


def test_q4_0_by_hand():
    """The value of largest magnitude is the code 0 = -8, so its sign is that of the scale's opposite."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([4.0, -4.0, 1.0])
    quantized = ffncli.quantize(x, "q4_0")
    assert quantized.scales is not None
    assert (quantized.scales.item(), quantized.codes[0, :4].tolist()) == (-0.5, [0, 15, 6, 8])
    assert quantized.dequantize()[0, :4].tolist() == [4, -3.5, 1, 0]


# --- what it gives away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORMATS, "fp8:block128", "fp8:tensor", "int4:g64:asymmetric", "int8:block128"])
def test_dequantized_is_value_times_scale_of_the_values_block(name: str):
    """Every value by its own: its code, and the scale at its block's position."""
    x, form = random(2, 5, 256), format_of(name)
    quantized = ffncli.quantize(x, name)
    values, found = quantized.values(), quantized.dequantize()
    assert (found.shape, found.dtype, quantized.shape) == (x.shape, torch.float32, (2, 5, 256))
    for index in ((0, 0, 0), (1, 4, 255), (1, 2, 130), (0, 3, 17)):
        at = quantized.blocks.at(index)
        expected = values[index]
        expected = expected if quantized.zeros is None else expected - quantized.zeros[at]
        expected = expected if quantized.factors is None else expected * quantized.factors[at]
        expected = expected if quantized.minimums is None else expected + quantized.minimums[at].float()
        assert found[index] == expected
    steps = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tq1_0": 0.5, "tq2_0": 0.5}
    worst = steps.get(name) or (2.0**-3 if form.bits == 8 and form.element != "int" else 2.0 ** -(form.bits - 2))
    assert float((found - x).abs().max()) <= worst * float(x.abs().max())


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.fixed])
def test_bits_per_weight_are_those_that_are_counted(name: str):
    quantized = ffncli.quantize(random(8, 512), name)
    extra = 32 / (8 * 512) if name == "nvfp4" else 0  # the tensor's scale is not counted there
    assert quantized.bits_per_weight == storage(name).bits_per_weight + extra


def test_bits_per_weight_with_zeros():
    assert ffncli.quantize(random(8, 256).bfloat16(), "int4:g128:asymmetric").bits_per_weight == 4 + (16 + 4) / 128
    assert ffncli.quantize(random(256, 256), "fp8:block128").bits_per_weight == 8 + 32 / 128**2
    assert ffncli.quantize(random(4, 4), "bf16").bits_per_weight == 16


def test_tiles_at_the_ends_are_smaller():
    x = random(200, 131)
    quantized = ffncli.quantize(x, "fp8:block128")
    assert quantized.scales is not None
    assert quantized.scales[1, 1] == x[128:, 128:].abs().max() / 448
    assert (quantized.blocks.counts, quantized.blocks.at((199, 130))) == ((2, 2), (1, 1))


@pytest.mark.parametrize(("shape", "block"), [((5,), (2,)), ((4, 6), (2, 3)), ((3, 5, 7), (1, 2, 4)), ((6, 6), (6, 6))])
def test_a_grid_joins_what_it_splits(shape: tuple[int, ...], block: tuple[int, ...]):
    grid, x = Blocks(shape, block), random(*shape)
    blocks = grid.split(x)
    assert blocks.shape == (*grid.counts, math.prod(block))
    assert torch.equal(grid.join(blocks), x)
    for index in torch.ones(shape).nonzero().tolist():
        assert x[tuple(index)] in blocks[grid.at(tuple(index))]


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name: str):
    assert bool((ffncli.quantize(torch.zeros(2, 256), name).dequantize() == 0).all())


def test_values_that_fit_are_exact():
    """Products of one scale and codes of each format come back."""
    sixes = torch.tensor([0.0, 0.5, -1, 1.5, 2, -3, 4, 6] * 4)
    for name in ("mxfp4", "mxfp4:gguf", "mxfp8", "bf16", "fp16"):
        assert torch.equal(ffncli.quantize(sixes, name).dequantize(), sixes)
    assert torch.equal(ffncli.quantize(torch.arange(-127.0, 129.0)[:, None].T, "int8:asymmetric").dequantize()[0],
                       torch.arange(-127.0, 129.0))  # fmt: skip


# --- read back by the readers -----------------------------------------------------------------------------------------


def pairs(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


@pytest.mark.parametrize("name", ["fp8", "fp8:tensor", "fp8:block128", "fp8_e5m2", "fp8:block128:pow2", "mxfp8"])
def test_8_bits_in_a_file_are_read_as_dequantized(name: str, tmp_path: Path):
    quantized = ffncli.quantize(random(256, 384), name)
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    assert quantized.scales is not None
    tensors = {W: quantized.codes.view(dtype), f"{W}_scale": quantized.scales}
    assert torch.equal(
        unpacked(tmp_path, tensors, quantization=FP8 if "block" in name else None), quantized.dequantize()
    )


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4:rceil", "nvfp4", "nvfp4:compressed-tensors"])
def test_4_bits_in_a_file_are_read_as_dequantized(name: str, tmp_path: Path):
    quantized = ffncli.quantize(random(24, 64), name)
    assert quantized.scales is not None
    whole = {} if quantized.tensor_scale is None else {"tensor": quantized.tensor_scale}
    by_ct, size = quantized.format.rule == "compressed-tensors", quantized.format.group
    config: Any = config_groups({"num_bits": 4, "type": "float", "group_size": size})
    ending = "_global_scale" if by_ct else "_scale_2"
    tensors = {f"{W}_packed" if by_ct or not whole else W: pairs(quantized.codes), f"{W}_scale": quantized.scales}
    tensors |= {f"{W}{ending}": value for value in whole.values()}
    read = unpacked(
        tmp_path, tensors, quantization=config if f"{W}_packed" in tensors else {"quant_method": "modelopt"}
    )
    assert torch.equal(read, quantized.dequantize())


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4:gguf"])
def test_values_are_those_that_gguf_reads(name: str):
    constants, quants = pytest.importorskip("gguf.constants"), pytest.importorskip("gguf.quants")
    x, kind = random(16, 512), constants.GGMLQuantizationType[name.split(":")[0].upper()]
    read = quants.dequantize(quants.quantize(x.numpy(), kind), kind)
    assert torch.equal(ffncli.quantize(x, name).dequantize(), torch.from_numpy(read))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "name", "message"),
    [
        (torch.ones(4, 24), "nvfp4", "nvfp4:torchao needs rows of whole blocks of 16 values, got rows of 24; choose"),
        (torch.ones(4, 48), "mxfp4", "needs rows of whole blocks of 32 values"),
        (torch.ones(4, 64), "int4", "int4:g128 needs rows of whole blocks of 128 values"),
        (torch.ones(4, 64), "int4", "got rows of 64; choose a format whose blocks fit, such as int4:g64"),
        (torch.ones(4, 9), "int4", "got rows of 9; choose a format whose blocks fit, such as fp8 or bf16"),
        (torch.ones(4, 64), "tq2_0", "tq2_0 needs rows of whole blocks of 256 values"),
        (torch.ones(4, 64), "fp3", "no tensor can be quantized to 'fp3'"),
        (torch.ones(4), "fp8:block128", "needs a matrix"),
        (torch.tensor([[1.0, math.nan, math.inf]]), "fp8", "2 of 3 values are NaN or infinite, the first at [0, 1]"),
        (torch.tensor([[-math.inf]]), "bf16", "1 of 1 values are NaN or infinite"),
        (
            torch.ones(4, 16, dtype=torch.int8),
            "fp8",
            "only a tensor of floats with values can be quantized, got 'cpu torch.int8'",
        ),
        (torch.ones(4, 16, device="meta"), "fp8", "with values can be quantized, got 'meta torch.float32'"),
        ([[1.0]], "fp8", "can be quantized, got 'list'"),
        (torch.ones(4), 8, "a format has a name such as 'nvfp4', got 'int'"),
        (torch.ones(0, 16), "fp8", "has no rows"),
    ],
)
def test_refusals(x: Any, name: Any, message: str):
    with pytest.raises(FFNError) as error:
        ffncli.quantize(x, name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_tensor_and_its_gradient_are_left_alone():
    x = random(4, 32).requires_grad_()
    before = x.detach().clone()
    quantized = ffncli.quantize(x.T.contiguous().T, "q8_0")
    assert not quantized.dequantize().requires_grad
    assert torch.equal(x.detach(), before)
