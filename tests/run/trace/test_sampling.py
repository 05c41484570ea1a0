"""argmax, top-k and top-p sets, against torch's own calls and transformers' filters."""

from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from ffncli.run.trace.routing import sampling


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept(filtered: torch.Tensor) -> list[set[int]]:
    """The ids that a transformers filter leaves."""
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in filtered]


@pytest.mark.parametrize("top_k", [1, 5, 50])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_the_sets_are_those_of_transformers(top_k, top_p):
    logits = drawn(4, 50)
    found = sampling(logits.softmax(-1), top_k, top_p, show=None)
    by_k = kept(TopKLogitsWarper(top_k)(None, logits))
    by_p = kept(TopPLogitsWarper(top_p)(None, logits))
    for one, ks, ps in zip(found, by_k, by_p, strict=True):
        assert {c.id for c in one.candidates if c.in_top_k} == ks
        assert {c.id for c in one.candidates if c.in_top_p} == ps
        assert one.top_p_count == len(ps)


def test_figures_are_torchs():
    probs = drawn(3, 40).softmax(-1)
    for row, one in zip(probs, sampling(probs, 7, 0.8), strict=True):
        best = row.topk(7)
        assert one.argmax == int(row.argmax())
        assert one.probability == float(row.max())
        assert [c.id for c in one.candidates[:7]] == best.indices.tolist()
        assert [c.probability for c in one.candidates[:7]] == best.values.tolist()
        mass = row.sort(descending=True).values.cumsum(0)
        assert one.top_k_mass == pytest.approx(float(mass[6]), rel=1e-12)
        assert one.top_p_mass == pytest.approx(float(mass[one.top_p_count - 1]), rel=1e-12)
        assert [c.cumulative for c in one.candidates] == pytest.approx(mass[:8].tolist(), rel=1e-12)
        assert one.top_p_mass >= 0.8 > float(mass[one.top_p_count - 2])


def test_edges():
    (one,) = sampling(torch.tensor([0.5, 0.25, 0.125, 0.125]), 9, 0.5)
    assert (one.top_k, one.top_k_mass, one.top_p_count, one.position) == (4, 1.0, 1, ())
    (one,) = sampling(torch.tensor([[0.25, 0.25, 0.25, 0.25]]), 1, 1.0)
    assert (one.argmax, one.top_p_count, one.position) == (0, 4, (0,))
    tenths = torch.full((10,), 0.1, dtype=torch.float64)  # ten tenths add up to a little less than 1
    assert sampling(tenths, 1, 1.0)[0].top_p_count == 10
    (one,) = sampling(torch.tensor([float("nan"), 0.5]), 1, 0.9)
    assert (one.argmax, one.probability, one.top_p_mass, one.candidates) == (None, None, None, ())


def test_first_and_last_positions_are_shown():
    probs = drawn(2, 30, 11).softmax(-1)
    found = sampling(probs, 3, 0.9, show=4)
    assert [one.position for one in found] == [(b, t) for b in (0, 1) for t in (0, 1, 28, 29)]
    assert found[5].argmax == int(probs[1, 1].argmax())
    assert {len(one.candidates) for one in found} == {4}
    assert len(sampling(probs, 3, 0.9, show=None)) == 60
