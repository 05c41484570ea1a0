"""`ffncli.compare`, and what a notebook shows of comparisons and results."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

import ffncli
from ffncli.bench.results.csv_file import COLUMNS, ResultRows
from tests.bench.stored import row, table, write


@pytest.fixture
def base(tmp_path) -> str:
    return write(tmp_path / "base.csv", table([1.0] * 3, "base"))


@pytest.fixture
def new(tmp_path) -> str:
    return write(tmp_path / "new.csv", table([1, 1.12, 0.9], "new"))


def cells(html: str) -> list[list[str]]:
    """The rows of a notebook's table, read as XML: it is well-formed."""
    return [[cell.text or "" for cell in line] for line in ElementTree.fromstring(html).iter("tr")]


def test_results_are_compared_as_the_command_does(base, new, call):
    found = ffncli.compare(base, new, fail_if_slower=0.05)
    assert [r.verdict for r in found.rows] == ["same", "slower", "faster"]
    assert [r.tokens for r in found.regressions] == [2]
    assert call("compare", base, new, "--fail-if-slower", "5%")[0] == 1
    assert repr(found) == "<ResultComparison of 3 rows: 1 same, 1 slower, 1 faster>"
    frame = found.frame()
    assert (frame["ratio"].tolist(), "pass" in frame) == ([r.ratio for r in found.rows], True)
    shown = cells(found._repr_html_())
    assert shown[0][-4:] == ["ratio", "ratio_low", "ratio_high", "verdict"]
    assert [line[-1] for line in shown[1:]] == ["same", "slower", "faster"]
    assert [line[-4] for line in shown[1:]] == [f"{r.ratio:.4g}" for r in found.rows]


def test_traces_are_compared_within_a_tolerance(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        ffncli.trace("4x8:relu", [1, 2, 3, 4], seed=seed, save=tmp_path / f"{name}.npz")
    same = ffncli.compare(tmp_path / "a.npz", tmp_path / "a.npz")
    assert (same.first, repr(same)) == (None, "<TraceComparison of 4 steps: all agree>")
    found = ffncli.compare(tmp_path / "a.npz", tmp_path / "b.npz")
    assert found.first == "up"
    assert found.frame()["step"].tolist()[:4] == ["x", "up", "act", "down"]
    assert [line[-1] for line in cells(found._repr_html_())[1:3]] == ["True", "False"]
    assert ffncli.compare(tmp_path / "a.npz", tmp_path / "b.npz", tolerance=1e9).first is None


def test_what_it_refuses(base, tmp_path):
    ffncli.trace("4x8:relu", [1, 2, 3, 4], save=tmp_path / "a.npz")
    trace = tmp_path / "a.npz"
    for arguments, options, words in (
        ((base, trace), {}, "holds results, .* a saved trace"),
        ((base, base), {"tolerance": 1e-3}, "tolerance is for saved traces"),
        (
            (trace, trace),
            {"margin": 0.1},
            "margin is for results of ffn bench; two saved traces",
        ),
        (("no.csv", base), {}, "'no.csv' does not exist"),
        (([base, trace], base), {}, "is not a CSV; only results"),
        (([], base), {}, "a side without files"),
    ):
        with pytest.raises(ffncli.FFNError, match=words):
            ffncli.compare(*arguments, **options)


def test_results_show_themselves():
    rows = ResultRows([row(time_s=1e-3, ratio_low=0.8, ratio_high=1.0, verdict="same"), row(ratio=None, kernel="<b>")])
    assert repr(rows).splitlines() == [
        "<ResultRows: 2",
        "  32 tokens, fp32, packed: ok, 0.001 s, ratio 0.900 [0.800, 1.000] same",
        "  32 tokens, fp32, <b>: ok>",
    ]
    assert [*rows.frame().columns] == [*COLUMNS]
    assert [line[6] for line in cells(rows._repr_html_())] == ["kernel", "packed", "<b>"]
    assert len(cells(ResultRows([row()] * 150)._repr_html_())) == 102  # the head, 100, and how many more
