"""Codes and scales are those that the format's own library writes, bit for bit, on a million values of each kind."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from ffncli.block.formats import format_of
from ffncli.run.quantize.quantized import quantize
from tests.oracles.quantizers import WRITERS

SIDE = 1024
LIBRARY = {"compressed-tensors": "compressed_tensors", "transformers": "transformers", "gguf": "gguf"}
NAMES = (
    "fp8 fp8:tensor fp8:block128 fp8:g128 fp8:torchao fp8:tensor:torchao fp8:block128:torchao "
    "fp8:block128:transformers fp8:block128:pow2 fp8:tensor:pow2 fp8:block128:torchao:pow2 "
    "fp8_e5m2 fp8_e5m2:tensor fp8_e5m2:block128 "
    "fp8_e5m2:pow2 mxfp8 mxfp8:even mxfp8:rceil mxfp8:ceil mxfp8:compressed-tensors mxfp4 mxfp4:even mxfp4:rceil "
    "mxfp4:ceil mxfp4:compressed-tensors mxfp4:gguf nvfp4 nvfp4:compressed-tensors int8 int8:tensor int8:g128 "
    "int8:asymmetric int8:block128 int4 int4:g32 int4:channel int4:asymmetric int4:g64:asymmetric "
    "q8_0 q4_0 q4_1 q5_0 q5_1 tq1_0 tq2_0"
).split()


def matrix(kind: str) -> Tensor:
    """Return a million values of a kind."""
    random = torch.Generator().manual_seed(len(kind))
    x = torch.randn(SIDE, SIDE, generator=random)
    if kind == "heavy":  # the ratio of two normal values: no mean, a few enormous values
        x = (x / torch.randn(SIDE, SIDE, generator=random)).clamp(-3e4, 3e4)
    if kind == "ties":  # multiples of 1/8, with the largest value of E2M1 in every block of 16: many exact middles
        x = torch.randint(-48, 49, x.shape, generator=random) / 8
        x[:, ::16] = 6
        x *= 2.0 ** torch.randint(-3, 4, (SIDE, 1), generator=random)
    if kind == "subnormal":  # rows from 2^-148 to 2^1
        x *= 2.0 ** torch.linspace(-148, 1, SIDE)[:, None].round()
    if kind == "zeros":  # single values, blocks, tiles and rows
        x[x.abs() < 0.5] = 0
        x[: SIDE // 4, SIDE // 4 : SIDE // 2] = x[SIDE // 2 : SIDE // 2 + 88] = x[
            :, SIDE // 2 + 128 : SIDE // 2 + 192
        ] = 0
    if kind == "outlier":
        x[
            torch.arange(SIDE)[:, None],
            torch.arange(0, SIDE, 16) + torch.randint(16, (SIDE, SIDE // 16), generator=random),
        ] *= 1e3
    return x.bfloat16() if kind == "bf16" else x


def unlike(ours: Tensor | None, theirs: Tensor | None, where: Tensor | None = None) -> int:
    """Count the numbers that differ in any bit."""
    if ours is None or theirs is None:
        return int(ours is not theirs)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    differ = ours.contiguous().view(bits) != theirs.contiguous().view(bits)
    return int((differ if where is None else differ & where).sum())


@pytest.mark.parametrize("kind", ["normal", "heavy", "ties", "bf16", "subnormal", "zeros", "outlier"])
@pytest.mark.parametrize("name", NAMES)
def test_every_code_and_scale(name: str, kind: str):
    form = format_of(name)
    library = LIBRARY.get(form.rule, "torchao")
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    x = matrix(kind)
    ours, theirs = quantize(x, name), WRITERS[form.rule](x, form)
    assert ours.codes.shape == x.shape
    not_nan = None
    if form.element == "e4m3" or form.element == "e5m2":  # 0 / 0 in the library; 0 here
        not_nan = ~theirs.codes.view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form.element]).isnan()
        assert bool((x[~not_nan] == 0).all())
        assert bool((ours.codes[~not_nan] == 0).all())
    differ = {
        part: unlike(getattr(ours, part), getattr(theirs, part), not_nan if part == "codes" else None)
        for part in ("codes", "scales", "zeros", "minimums", "tensor_scale")
    }
    assert differ == dict.fromkeys(differ, 0)
