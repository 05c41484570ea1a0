"""Starts the ranks of a world size once, with every case, and reads their answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.ranks.records import Answer, RankCase
from tests.ranks.started import Started


def answers_of(cases: Sequence[RankCase], world_size: int, folder: Path) -> list[dict[str, Answer]]:
    """By rank, the answers by the names of the cases. Fails with what the ranks wrote if one of them did not answer."""
    torch.save(list(cases), folder / "cases.pt")
    command = (sys.executable, "-m", "tests.ranks.worker", str(folder))
    ranks = [Started((*command, str(rank), str(world_size))) for rank in range(world_size)]
    try:
        ends = [one.ended() for one in ranks]
    finally:
        for one in ranks:
            one.process.kill()
            one.process.wait()
    assert [one.code for one in ends] == [0] * world_size, "\n".join(one.out + one.err for one in ends)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
