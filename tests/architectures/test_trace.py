"""Every text architecture that is counted, traced: weights read from disk give what transformers' own model gives."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator, Mapping

import pytest

from tests import ROOT
from tests.architectures.test_table import TABLE as COUNTED
from tests.oracles.architectures.tiny import statement, tiny
from tests.oracles.architectures.traced import APART, COLUMNS, FP32, compare, row

FILE = ROOT / "benchmarks" / "results" / "trace_architectures.csv"
WHOLE = 373  # of how many the whole block, norms and residual included, gives what leaves the model's layer


def _table() -> Mapping[str, Mapping[str, str]]:
    with open(FILE, encoding="utf-8", newline="") as file:
        return {line["model_type"]: line for line in csv.DictReader(file)}


TABLE = _table()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tiny models warn of their sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@statement
@pytest.mark.parametrize("name", [name for name, line in COUNTED.items() if line["result"] == "same"])
def test_the_trace_is_the_models_own(name: str) -> None:
    found = compare(tiny(name))
    assert [one.reason for one in found if one.reason] == []
    line = dict(zip(COLUMNS, row(name, tiny(name).case, found), strict=True))
    kept = ("layers", "norms", "block", "result")  # the error's last digits depend on the machine
    assert [line[column] for column in kept] == [TABLE[name][column] for column in kept]


def test_the_table_names_what_the_other_names_in_its_order() -> None:
    with open(FILE, encoding="utf-8", newline="") as file:
        first, *lines = csv.reader(file)
    assert tuple(first) == COLUMNS
    assert [line[0] for line in lines] == list(COUNTED)


def test_whatever_is_counted_is_traced() -> None:
    assert {name: line["result"] for name, line in TABLE.items()} == {n: line["result"] for n, line in COUNTED.items()}
    assert all(float(line["relative_error"]) <= FP32 for line in TABLE.values() if line["result"] == "same")


def test_the_blocks_are_the_layers_but_for_those_with_a_reason() -> None:
    assert sum(line["block"] == "same" for line in TABLE.values()) >= WHOLE
    assert {name for name, why in APART.items() if name in TABLE and TABLE[name]["block"] != why} == set()
