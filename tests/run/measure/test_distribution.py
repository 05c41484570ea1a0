"""Figures of values that come in pieces, against torch and against definitions written out, on the whole."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from ffncli.run.measure import statistics as statistics_module
from ffncli.run.measure.distribution import PERCENTS, Distribution, Sampler


def found(values: Tensor, pieces: int) -> Distribution:
    """The distribution of rows that come some at a time."""
    seen = Sampler(values.shape[0], values.shape[1])
    for piece in values.chunk(pieces):
        seen.add(piece)
    return seen.distribution()


def values(kind: str) -> Tensor:
    drawn = torch.randn(60, 31, dtype=torch.float64)
    shaped = {
        "normal": drawn, "far": 1e6 + drawn, "skewed": drawn.exp(), "zeros": drawn.relu(), "tiny": 1e-30 * drawn,
        "fp32": drawn.float(), "bf16": drawn.bfloat16(),
    }  # fmt: skip
    return shaped[kind]


@pytest.mark.parametrize("pieces", [1, 7, 60])
@pytest.mark.parametrize("kind", ["normal", "far", "skewed", "zeros", "tiny", "fp32", "bf16"])
def test_figures_in_pieces_are_those_of_the_whole(kind: str, pieces: int) -> None:
    given = values(kind)
    d, x = found(given, pieces), given.double().flatten()
    near = 1e-6 if kind == "far" else 1e-9
    assert (d.values, d.nan, d.inf) == (x.numel(), 0, 0)
    assert (d.min, d.max) == (x.min().item(), x.max().item())
    assert d.mean == pytest.approx(x.mean().item(), rel=1e-12)
    mean, std = x.mean(), x.std(correction=0)
    assert d.std == pytest.approx(std.item(), rel=near)
    assert d.rms == pytest.approx(x.square().mean().sqrt().item(), rel=1e-9)
    z = (x - mean) / std
    assert d.skewness == pytest.approx(z.pow(3).mean().item(), rel=near, abs=near)
    assert d.excess_kurtosis == pytest.approx(z.pow(4).mean().item() - 3, rel=near, abs=near)
    assert d.negatives == int((x < 0).sum())
    assert d.zeros == int((x == 0).sum())
    assert d.near_zeros == int((given.abs() <= torch.tensor(1e-3, dtype=given.dtype)).sum())
    assert d.histogram == tuple(torch.histc(x, 24, x.min().item(), x.max().item()).int().tolist())
    assert [p.percent for p in d.percentiles] == list(PERCENTS)
    for p in d.percentiles:
        assert p.value == pytest.approx(x.quantile(p.percent / 100).item(), rel=1e-12)


def test_the_distance_from_a_normal_is_kolmogorovs() -> None:
    """By hand: at every value F jumps, and both of its sides are compared with Python's own normal distribution."""
    x = torch.randn(40, 3, dtype=torch.float64).exp()
    ordered = sorted(x.flatten().tolist())
    normal = NormalDist(x.mean().item(), x.std(correction=0).item())
    sides = [abs(share / 120 - normal.cdf(v)) for i, v in enumerate(ordered) for share in (i, i + 1)]
    assert found(x, 4).normal_distance == pytest.approx(max(sides), rel=1e-12)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    x = torch.tensor([[1.0, math.nan, -math.inf], [3.0, math.inf, -2.0]])
    d = found(x, 2)
    assert (d.values, d.nan, d.inf, d.negatives) == (6, 1, 2, 2)
    assert (d.min, d.max, d.mean) == (-2.0, 3.0, pytest.approx(2 / 3))
    assert [p.value for p in d.percentiles if p.percent == 50] == [1.0]
    none = found(torch.full((2, 3), math.nan), 1)
    assert (none.min, none.mean, none.percentiles, none.histogram, none.nan) == (None, None, (), (), 6)


def test_a_constant_has_no_shape() -> None:
    d = found(torch.full((5, 7), 0.1, dtype=torch.float64), 3)
    assert (d.mean, d.std, d.skewness, d.excess_kurtosis, d.normal_distance) == (0.1, 0.0, None, None, None)
    assert d.histogram == ()


def test_of_many_values_some_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values as from the whole tensor with that stride, however it is cut."""
    monkeypatch.setattr(statistics_module, "_MOST_IN_HISTOGRAM", 100)
    x = torch.randn(50, 20, dtype=torch.float64)
    for pieces in (1, 9, 50):
        d = found(x, pieces)
        some = x.flatten()[:: d.histogram_stride]
        assert d.histogram_stride == 11  # 10 would see every second column alone
        assert d.histogram == tuple(torch.histc(some, 24, x.min().item(), x.max().item()).int().tolist())
        assert d.percentiles[0].value == pytest.approx(some.quantile(0.01).item())
