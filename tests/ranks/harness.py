"""Starts the ranks of a world size once, with every case, and reads their answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.ranks.records import Answer, RankCase

LIMIT_S = 480  # for all cases of a world size; then its ranks are killed


def answers_of(cases: Sequence[RankCase], world_size: int, folder: Path) -> list[dict[str, Answer]]:
    """By rank, the answers by the names of the cases. Fails with what the ranks wrote if one of them did not answer."""
    torch.save(list(cases), folder / "cases.pt")
    command = [sys.executable, "-m", "tests.ranks.worker", str(folder)]
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(world_size)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world_size)], stdout=log, stderr=log, env=os.environ)
        for rank, log in enumerate(logs)
    ]
    try:
        for one in ranks:
            one.wait(LIMIT_S)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    text = "\n".join(Path(log.name).read_text() for log in logs)
    for log in logs:
        log.close()
    assert [one.returncode for one in ranks] == [0] * world_size, text
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
