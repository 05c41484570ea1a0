"""What rounding leaves of a difference, against torch over every number of the format."""

from __future__ import annotations

import math

import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.analysis.difference import difference, rounded_differences, survival
from ffncli.block.analysis.rounding import FORMATS, inputs
from ffncli.block.formulas import with_learned
from ffncli.run.engine.functions import NAMESPACE
from tests.block.analysis.test_formats import DTYPES, every_number, torchs_ordinal

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
