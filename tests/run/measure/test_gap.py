"""How far two tensors are apart, against numpy's spacing, closed forms and one look at everything."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from ffncli.errors import FFNError
from ffncli.run.measure import gap as measured
from ffncli.run.measure.gap import Gap, agreement, gap
from ffncli.run.measure.ulp import ulp

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, -2.0, 3.9999, 1e-30, 1e-44, 65504.0, 7e4, 1e30])
def test_ulp_is_numpys_spacing(value: float) -> None:
    assert ulp(value, torch.float32) == float(abs(numpy.spacing(numpy.float32(value))))
    assert ulp(value, torch.float64) == float(abs(numpy.spacing(numpy.float64(value))))


def test_ulp_in_bfloat16() -> None:
    assert ulp(1.0, torch.bfloat16) == 2.0**-7
    assert ulp(-6.0, torch.bfloat16) == 4 * 2.0**-7
    assert math.isnan(ulp(INF, torch.bfloat16))


def test_a_gap_is_told_with_its_place_and_what_is_not_finite_beside_it() -> None:
    a = torch.tensor([[1.0, NAN, 5.0], [INF, 2.0, -INF]])
    b = torch.tensor([[1.0, NAN, 4.0], [INF, -8.0, INF]])
    assert gap(a, b) == Gap(10.0, 4, abs(b.flatten()[4].item()), 8.0, 1, 5)
    assert gap(b, b) == Gap(0.0, -1, 0.0, 8.0, 0, -1)
    assert gap(torch.ones(2), torch.zeros(2)).relative == INF
    assert gap(torch.zeros(0), torch.zeros(0)) == Gap()


@pytest.mark.parametrize("piece", [1, 4, 7])
def test_a_gap_does_not_depend_on_the_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(5, 4, generator=generator) for _ in range(2))
    a[1, 1], b[4, 3] = NAN, INF
    whole = gap(a, b)
    assert (whole.unlike, whole.first_unlike) == (2, 5)
    monkeypatch.setattr(measured, "_PIECE", piece)
    assert gap(a, b) == whole


def test_agreement_is_the_closed_form() -> None:
    theirs = torch.tensor([1.0, -4.0, 2.0])
    found = agreement(theirs + torch.tensor([0.0, 0.0, 2**-20]), theirs)
    assert (found.max_error, found.relative_error) == (2**-20, 2**-22)
    assert found.ulps == 4.0  # of 2, where they differ: its last place in float32 is 2⁻²²
    assert agreement(torch.tensor([0.5, 4.0]), torch.tensor([0.0, 4.0])).ulps is None
    assert agreement(theirs, theirs).ulps == 0
    assert agreement(theirs.bfloat16() * 1.0078125, theirs.bfloat16()).ulps == 1.0


def test_agreement_where_not_all_is_finite() -> None:
    assert agreement(torch.tensor([NAN, INF, 1.0]), torch.tensor([NAN, INF, 1.0])).max_error == 0
    assert agreement(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0])).max_error == INF
    assert agreement(torch.tensor([1.0]), torch.tensor([0.0])).relative_error == INF
    with pytest.raises(FFNError, match="cannot be compared"):
        agreement(torch.zeros(2), torch.zeros(1, 2))
