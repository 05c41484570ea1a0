"""Wrong cuts of a fused matrix, against rows written out and as each other's inverse."""

from __future__ import annotations

import pytest
import torch

from ffncli.run.engine.execute import halves_by_turns, turns_as_halves

FIRST, SECOND = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])


def test_rows_written_out() -> None:
    assert [t.tolist() for t in halves_by_turns(FIRST, SECOND)] == [[0, 2, 4], [1, 3, 5]]
    assert [t.tolist() for t in turns_as_halves(FIRST, SECOND)] == [[0, 3, 1], [4, 2, 5]]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_undoes_the_other_along_any_axis(axis: int) -> None:
    pair = tuple(torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    made = turns_as_halves(*pair, axis)
    assert made[0].shape == pair[0].shape
    assert not torch.equal(made[0], pair[0])
    for found, was in zip(halves_by_turns(*made, axis), pair, strict=True):
        assert torch.equal(found, was)
