"""The ranks of each world size start once, and are asked everything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.ranks.cases import CASES
from tests.ranks.harness import answers_of
from tests.ranks.records import Answer


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, list[dict[str, Answer]]]:
    def folder(world: int) -> Path:
        return tmp_path_factory.mktemp(f"world{world}")

    asked = {world: [case for w, case in CASES.values() if w == world] for world in (2, 4)}
    return {world: answers_of(cases, world, folder(world)) for world, cases in asked.items()}
