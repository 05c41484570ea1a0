"""Every kernel that cheats is wrong, for the reason that its file names; no honest one is accused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ffncli.bench.verdict import MEANING, WrongCode
from tests.cheats.harness import HERE, KERNEL, Server, header, server

CHEATS = sorted(path for path in HERE.glob("*.py") if header(path).codes)
HONEST = sorted((HERE / "honest").glob("*.py"))
DEFUSED = "defused"  # it is right in every call, and what it looks for is not there: it computes as others do


@pytest.fixture(scope="module")
def referee() -> Iterator[Server]:
    with server() as running:
        yield running


def test_the_corpus_is_large_and_every_file_says_what_it_does():
    assert len(CHEATS) >= 60
    assert len(HONEST) >= 25
    assert all(header(path).does.endswith(".") for path in (*CHEATS, *HONEST))
    assert {code for path in CHEATS for code in header(path).codes} <= {*WrongCode, DEFUSED}


def test_every_code_has_a_meaning_and_the_manual_has_them():
    assert set(MEANING) == set(WrongCode)
    manual = (HERE.parent.parent / "docs" / "method.md").read_text("utf-8")
    assert all(f"| `{code}` | {meaning} |" in manual for code, meaning in MEANING.items())


@pytest.mark.parametrize("path", CHEATS, ids=lambda path: path.stem)
def test_a_cheat_is_caught(referee: Server, path: Path):
    codes = header(path).codes
    # Some are honest in their first calls; on a busy machine a process may end before they cheat.
    for longer in (1, 3, 9):
        outcomes = referee.outcomes(path, longer)
        assert outcomes["eager"].status == "ok", outcomes["eager"].note  # what was replaced was put back
        cheat = outcomes[KERNEL]
        if cheat.status != "ok" or DEFUSED in codes:
            break
    if cheat.status == "ok":
        assert DEFUSED in codes, cheat.note
        return
    assert cheat.status == "wrong", cheat.note
    assert cheat.note.partition(": ")[0] in codes, cheat.note


@pytest.mark.parametrize("path", HONEST, ids=lambda path: path.stem)
def test_an_honest_kernel_is_not_accused(referee: Server, path: Path):
    outcomes = referee.outcomes(path)
    assert {name: outcome.status for name, outcome in outcomes.items()} == {"eager": "ok", KERNEL: "ok"}, outcomes
