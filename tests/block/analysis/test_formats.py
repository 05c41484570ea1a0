"""Formats on Python floats and what rounding leaves of a difference: against torch, over all numbers of a format."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.activations import TABLE
from ffncli.block.analysis.difference import difference, rounded_differences, survival
from ffncli.block.analysis.rounding import FORMATS, formats, inputs, shares
from ffncli.block.formulas import with_learned
from ffncli.errors import FFNError
from ffncli.run.engine.execute import NAMESPACE
from ffncli.run.measure.gap import ulp

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
        ("fp64", "dtype fp64 is the reference"), ("bf17", "dtype: unknown dtype 'bf17'"), ("", "unknown dtype ''"),
        ("bf16,", "unknown dtype ''"), ("fp8", "dtype fp8 is for counting bytes"),
    ]:  # fmt: skip
        with pytest.raises(FFNError) as error:
            formats(text)
        assert message in str(error.value)


FLOOR = {"bf16": -133, "fp16": -24, "fp32": -149}  # exponent of the smallest number
BITS = {"bf16": 8, "fp16": 11, "fp32": 24}


def numbers(dtype: str) -> torch.Tensor:
    if dtype == "fp32":
        return torch.tensor(inputs(FORMATS[dtype]), dtype=torch.float64)
    every = every_number(dtype)
    return every[every.isfinite()]


def rounded(y: torch.Tensor, dtype: str) -> torch.Tensor:
    """Once, to the nearest: torch itself goes through float32 on its way from float64."""
    spacing = torch.ldexp(
        torch.ones_like(y), torch.frexp(y.abs())[1].clamp(min=FLOOR[dtype] + BITS[dtype]) - BITS[dtype]
    )
    near = torch.round(y / spacing) * spacing  # torch.round takes halves to even
    return near.to(DTYPES[dtype]).double()


def exact(name: str, x: torch.Tensor) -> torch.Tensor:
    learned = {n: torch.tensor(v, dtype=torch.float64) for n, v in TABLE[name].learned.items()}
    return TABLE[name].accurate(x, with_learned(NAMESPACE, learned))


PAIRS = [("gelu_tanh", "gelu"), ("quick_gelu", "gelu"), ("relu", "gelu"), ("silu", "hardswish"), ("xielu", "relu2"),
         ("tanh", "sigmoid"), ("softplus", "relu"), ("gelu_10", "gelu")]  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("name", "against"), PAIRS)
def test_over_every_number(name, against, dtype):
    d = difference(name, against)
    s = survival(d, FORMATS[dtype])
    x = numbers(dtype)
    f, g = exact(name, x), exact(against, x)
    ours, theirs = rounded(f, dtype), rounded(g, dtype)
    ulps = (torchs_ordinal(dtype, ours) - torchs_ordinal(dtype, theirs)).abs()
    edges = torch.cat([torch.tensor([-math.inf]), (x[1:] + x[:-1]) / 2, torch.tensor([math.inf])])
    mass = torch.special.ndtr(edges).diff()
    assert s.differ == pytest.approx(mass[ulps > 0].sum().item(), abs=2e-4)  # below 2^-14 lies 1e-4 of the mass
    assert s.beyond_neighbours == pytest.approx(mass[ulps > 1].sum().item(), abs=2e-4)
    error = (theirs - g)[mass > 0]
    assert s.noise == pytest.approx((mass[mass > 0] * error * error).sum().sqrt().item(), rel=1e-6, abs=1e-12)
    looked_at = torch.isin(x, torch.tensor(inputs(FORMATS[dtype]), dtype=torch.float64))
    assert s.inputs == looked_at.sum()
    if s.largest is None:
        assert not ulps[looked_at].any()
    else:
        assert s.largest.ulps == ulps[looked_at].max()
        at = (x == s.largest.x).nonzero().item()
        assert (s.largest.value, s.largest.reference) == (ours[at], theirs[at])
        assert x[looked_at & (ulps == s.largest.ulps)].abs().min() == abs(s.largest.x)
    for m in s.at_difference:
        here = torch.tensor([m.x], dtype=torch.float64)
        a, b = rounded(exact(name, here), dtype), rounded(exact(against, here), dtype)
        assert (m.value, m.reference) == (a.item(), b.item())
        assert m.ulps == (torchs_ordinal(dtype, a) - torchs_ordinal(dtype, b)).abs().item()
    assert [m.x for m in s.at_difference] == [rounded(torch.tensor(p, dtype=torch.float64), dtype) for p in d.places]


def test_the_gelus_in_bf16():
    """The question that people argue about: erf against tanh drowns in bf16's own rounding, quick_gelu does not."""
    tanh = survival(difference("gelu_tanh", "gelu"), FORMATS["bf16"])
    quick = survival(difference("quick_gelu", "gelu"), FORMATS["bf16"])
    assert (tanh.verdict, quick.verdict) == ("in part", "yes")
    assert [m.ulps for m in tanh.at_difference] == [0, 8]
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    f, g = rounded(exact("gelu_tanh", x), "bf16"), rounded(exact("gelu", x), "bf16")
    assert tanh.differ == pytest.approx((f != g).double().mean().item(), abs=2e-3)


def test_verdicts():
    for name in TABLE:
        assert survival(difference(name, name), FORMATS["fp16"]).verdict == "no"
    assert survival(difference("gelu", "relu"), FORMATS["bf16"]).ratio is None  # relu of a number is one
    assert survival(difference("gelu", "relu"), FORMATS["bf16"]).verdict == "yes"


def test_differences_and_what_is_left_of_them_in_one_record():
    """Each number is the one that `difference` and `survival` say by themselves."""
    forms = (FORMATS["bf16"], FORMATS["fp16"])
    found = rounded_differences(("gelu_tanh", "silu"), "gelu", forms, 2.0)
    assert [one.difference for one in found] == [difference(name, "gelu", 2.0) for name in ("gelu_tanh", "silu")]
    assert [s.dtype for one in found for s in one.rounded] == ["bf16", "fp16"] * 2
    assert found[1].rounded[1] == survival(difference("silu", "gelu", 2.0), FORMATS["fp16"], 2.0)
