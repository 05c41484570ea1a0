"""Formats on Python floats against torch's: rounding, steps between numbers, shares of a normal input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.analysis.rounding import FORMATS, formats, inputs, shares
from ffncli.errors import FFNError
from ffncli.run.measure.ulp import ulp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTS = {"bf16": torch.int16, "fp16": torch.int16, "fp32": torch.int32}
every_format = pytest.mark.parametrize("name", FORMATS)
every_half = pytest.mark.parametrize("name", ["bf16", "fp16"])


def every_number(name: str) -> torch.Tensor:
    """All numbers of a 16-bit format, infinities included, -0 left out, in order."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[name])
    return numbers[~numbers.isnan()].double().unique()


def torchs_ordinal(name: str, values: torch.Tensor) -> torch.Tensor:
    """Counted from 0 by the bits of sign and magnitude."""
    bits = values.to(DTYPES[name]).view(INTS[name]).long()
    sign = 1 << (15 if name != "fp32" else 31)
    return torch.where(bits < 0, -(bits + sign), bits)


@every_half
def test_every_number_is_itself_and_has_its_place(name):
    form, numbers = FORMATS[name], every_number(name)
    places = [form.ordinal(x) for x in numbers.tolist()]
    assert places == torchs_ordinal(name, numbers).tolist()
    assert places == list(range(-places[-1], places[-1] + 1))  # neighbours are one step apart
    assert [form.value(n) for n in places] == numbers.tolist() == [form.nearest(x) for x in numbers.tolist()]
    finite = numbers[numbers.isfinite()]
    assert [form.ulp(x) for x in finite.tolist()] == [ulp(x, DTYPES[name]) for x in finite.tolist()]


@every_half
def test_between_neighbours_the_nearest_then_the_even(name):
    """float32 holds every middle and what lies beside it, so that torch rounds once."""
    form, numbers = FORMATS[name], every_number(name)
    finite = numbers[numbers.isfinite()].float()
    middle = (finite[:-1].double() + finite[1:].double()).div(2).float()
    beside = [torch.nextafter(middle, torch.tensor(s * math.inf)) for s in (-1, 1)]
    x = torch.cat([middle, *beside, torch.tensor([65519.996, 65520.0, 3.39e38, 3.3961776e38, -3.4e38, math.inf])])
    x = x[torch.isfinite(x) | (x == math.inf)]
    expected = x.to(DTYPES[name]).double()
    assert [form.nearest(v) for v in x.tolist()] == expected.tolist()
    assert [form.ordinal(v) for v in x.tolist()] == torchs_ordinal(name, expected).tolist()


@given(st.floats(allow_nan=False))
def test_doubles_to_fp32(x):
    form = FORMATS["fp32"]
    expected = torch.tensor(x, dtype=torch.float64).float()
    assert form.nearest(x) == expected.item()
    assert form.value(form.ordinal(x)) == expected.item()
    assert form.ordinal(x) == torchs_ordinal("fp32", expected).item()


@given(st.floats(min_value=-4, max_value=4), st.floats(min_value=-1e-5, max_value=1e-5), st.sampled_from([*FORMATS]))
def test_rounding_once_where_torch_rounds_twice(x, off, name):
    """A double just off a middle: by way of float32 it would be rounded to even, and the wrong way."""
    form = FORMATS[name]
    y = form.nearest(x + off)
    assert abs(x + off - y) <= form.ulp(y) / 2
    assert all(abs(x + off - y) <= abs(x + off - form.value(form.ordinal(y) + s)) for s in (-1, 1))


def test_a_double_beside_a_middle_is_not_rounded_by_way_of_float32():
    x = 1 + 2**-8 + 2**-50  # above the middle of two bf16, which float32 takes it for
    assert FORMATS["bf16"].nearest(x) == 1 + 2**-7
    assert FORMATS["bf16"].nearest(1 + 2**-8) == 1.0


@every_format
def test_what_is_no_number_stays_so(name):
    form = FORMATS[name]
    assert math.isnan(form.nearest(math.nan))
    assert (form.nearest(math.inf), form.nearest(-1e300)) == (math.inf, -math.inf)
    assert form.value(form.ordinal(math.inf)) == math.inf
    assert form.ordinal(form.largest) + 1 == form.ordinal(math.inf)
    assert form.largest == torch.finfo(DTYPES[name]).max
    assert form.value(1) == torch.finfo(DTYPES[name]).smallest_normal * torch.finfo(DTYPES[name]).eps
    assert form.ulp(0.0) == form.value(1)
    assert form.ordinal(0.0) == form.ordinal(-0.0) == 0


@every_format
@pytest.mark.parametrize("std", [1.0, 1e-6, 0.02, 3.0, 1e6])
def test_inputs_and_their_shares(name, std):
    form, xs = FORMATS[name], inputs(FORMATS[name], std)
    x = torch.tensor(xs, dtype=torch.float64)
    assert torch.equal(x, x.to(DTYPES[name]).double())
    assert torch.equal(x, -x.flip(0))
    assert torch.equal(x, x.unique())
    if name != "fp32":
        numbers = every_number(name)
        low, high = xs[len(xs) // 2 + 1], xs[-1]
        inside = numbers[((numbers.abs() >= low) & (numbers.abs() <= high)) | (numbers == 0)]
        assert torch.equal(x, inside)
    middles = torch.cat([torch.tensor([-math.inf]), (x[1:] + x[:-1]) / 2, torch.tensor([math.inf])])
    below = torch.special.ndtr(middles / std)
    expected = torch.where(middles[1:] <= 0, below.diff(), torch.special.ndtr(-middles / std).diff().neg())
    assert torch.allclose(torch.tensor(shares(form, std), dtype=torch.float64), expected, rtol=1e-9, atol=1e-15)
    assert math.fsum(shares(form, std)) == pytest.approx(1, abs=1e-12)
    reach = xs[-1] / std
    assert reach >= 64 or xs[-1] == form.largest
    assert xs[len(xs) // 2 + 1] <= 2**-14 * std or xs[len(xs) // 2 + 1] == form.value(1)


def test_formats_by_name():
    assert [f.name for f in formats("bfloat16, half,bf16,torch.float32")] == ["bf16", "fp16", "fp32"]
    for text, message in [
        ("fp64", "--dtype fp64 is the reference"), ("bf17", "--dtype: unknown dtype 'bf17'"), ("", "unknown dtype ''"),
        ("bf16,", "unknown dtype ''"), ("fp8", "--dtype fp8 counts bytes only"),
    ]:  # fmt: skip
        with pytest.raises(FFNError) as error:
            formats(text)
        assert message in str(error.value)
