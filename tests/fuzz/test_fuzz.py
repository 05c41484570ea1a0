"""Some hundred drawn cases of every format; `make fuzz` runs thousands of the same."""

import os

import pytest

from tests.fuzz.answers import answer, peak_bytes, wrong_with
from tests.fuzz.formats import FORMATS, run_case

pytestmark = pytest.mark.fuzz

COUNT = int(os.environ.get("FFN_FUZZ_CASES", "12"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*FORMATS, "calls"])
def test_input_that_lies_is_answered(name: str):
    before = peak_bytes()
    for number in range(25 * COUNT if name == "calls" else COUNT):
        command, given = run_case(name, number)
        assert not given.wrong, (
            f"python -m tests.fuzz --only {name}/{number}: {given.wrong}\n{command}\n{given.text[-2000:]}"
        )
    assert peak_bytes() - before < 1 << 30


@pytest.mark.parametrize("name", ["options", "assertion", "sweep", "block"])
def test_a_case_repeats(name: str):
    (words, first), (again, second) = (run_case(name, 7) for _ in range(2))
    assert [word for word in words if "/" not in word] == [word for word in again if "/" not in word]
    assert (first.code, first.text.count("\n")) == (second.code, second.text.count("\n"))


def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch):
    assert wrong_with(70, "") == "exit 70"
    assert wrong_with(2, "error: a bug in ffn: KeyError") == "a bug in ffn"
    assert "act on a terminal" in wrong_with(0, "a\x1b[31m")
    assert wrong_with(2, "error: a: no such file\n") == ""

    def fail(words: list[str]) -> None:
        raise KeyError("x")

    monkeypatch.setattr("ffncli.cli.main.main", fail)
    assert answer(["params"]).wrong.startswith("KeyError came out of main")
