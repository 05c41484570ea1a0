"""The committed table of architectures: complete, explained, and not smaller than it was."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.architectures import report
from tests import ROOT
from tests.oracles.architectures import cases, text_architectures, towers
from tests.oracles.architectures.nested import composites, uncounted
from tests.oracles.architectures.saved import COLUMNS
from tests.oracles.architectures.walk import walk

FILE = ROOT / "benchmarks" / "results" / "architectures.csv"
LEAST = 459  # how many architectures agreed when the table was last made (`make architectures`)


def _table() -> Mapping[str, Mapping[str, str]]:
    with open(FILE, encoding="utf-8", newline="") as file:
        return {line["model_type"]: line for line in csv.DictReader(file)}


TABLE = _table()


def test_it_names_everything_that_takes_token_ids_once_in_order() -> None:
    with open(FILE, encoding="utf-8", newline="") as file:
        first, *lines = csv.reader(file)
    assert tuple(first) == COLUMNS
    assert [line[0] for line in lines] == sorted({*walk(), *text_architectures()})


def test_as_many_agree_as_before() -> None:
    assert sum(line["result"] == "same" for line in TABLE.values()) >= LEAST


def test_what_agrees_has_one_number_in_all_columns() -> None:
    for name, line in TABLE.items():
        numbers = {line[column] for column in ("config_count", "header_count", "module_count")}
        if line["result"] == "same":
            assert (len(numbers), "" in numbers, line["reason"]) == (1, False, ""), name


def test_what_does_not_agree_has_a_reason() -> None:
    for name, line in TABLE.items():
        if line["result"] != "same":
            assert line["result"] in ("differs", "not counted"), name
            assert line["reason"], name


def test_what_is_not_counted_is_what_the_cases_cannot_build() -> None:
    told = {name: case.reason for name, case in {**towers(), **cases()}.items() if case.reason}
    told |= {name: why for name in composites() if (why := uncounted(name))}
    assert {name: line["reason"] for name, line in TABLE.items() if line["result"] == "not counted"} == told


def test_a_row_that_fails_says_so_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(name: str, case: object) -> tuple[object, ...]:
        if name == "bert":
            raise RuntimeError("no such\nmodule")
        return (name, "A", 1, 1, 1, "same", "")

    monkeypatch.setattr("benchmarks.architectures.architectures", lambda: dict.fromkeys(("albert", "bert", "zaya")))
    monkeypatch.setattr(sys, "argv", ["architectures", "--save", str(tmp_path / "rows.csv")])
    assert report("about", COLUMNS, row, "agree") == 1
    with open(tmp_path / "rows.csv", encoding="utf-8", newline="") as file:
        made = list(csv.DictReader(file))
    assert [line["result"] for line in made] == ["same", "error", "same"]
    assert made[1]["reason"] == "error: RuntimeError: no such module"
    assert "2 of 3 agree" in capsys.readouterr().out
