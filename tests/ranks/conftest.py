"""The ranks of each world size start once, and are asked everything."""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.ranks.cases import CASES, Answer, answers_of


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, list[dict[str, Answer]]]:
    """By world size and rank, by the names of the cases; of pytest's processes the first that needs them asks."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "answers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return {world: _answers(world, shared / f"world{world}") for world in (2, 4)}


def _answers(world: int, folder: Path) -> list[dict[str, Answer]]:
    file = folder / "answers.pt"
    if not file.exists():
        folder.mkdir()
        torch.save(answers_of([case for w, case in CASES.values() if w == world], world, folder), file)
    return torch.load(file, weights_only=False)
