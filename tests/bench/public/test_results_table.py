"""The public table: ranks against every pair, and the page against made-up results."""

from __future__ import annotations

import itertools
import math
import random
import re
from pathlib import Path

import pytest
import yaml

from benchmarks import results_table
from benchmarks.results_table import Entry, newest, page, ranked, ranks
from ffncli.bench.public.admission import admit
from ffncli.version import __version__
from tests.bench.public.made import RUN, TIMES, result
from tests.bench.stored import row

ROOT = Path(__file__).parents[3]


def test_ranks_are_those_of_every_pair():
    drawn = random.Random(1)
    for _ in range(300):
        ends = [sorted((drawn.randrange(8), drawn.randrange(8))) for _ in range(drawn.randrange(1, 7))]
        intervals = [(float(low), math.inf if high == 7 else float(high)) for low, high in ends]
        places = ranks(intervals)
        below = [0] * len(intervals)
        for one, other in itertools.permutations(range(len(intervals)), 2):
            apart = all(a < b for a in intervals[other] for b in intervals[one])
            below[one] += apart
            overlap = max(intervals[one][0], intervals[other][0]) <= min(intervals[one][1], intervals[other][1])
            assert not (overlap and apart)
        assert places == [1 + n for n in below]
        assert min(places) == 1
    assert ranks([(1.0, 1.0), (0.9, 1.0), (0.8, 0.89)]) == [2, 2, 1]  # two overlap, one is wholly below both
    assert ranks([(1, 2), (2, 3), (2.5, 4)]) == [1, 1, 2]  # overlapping is not transitive


def test_kernels_are_ranked_with_those_that_compute_alike():
    entries = [
        Entry(row(kernel=name, ratio=low, ratio_low=low, ratio_high=low + 0.05, computes=computes), "")
        for name, low, computes in (("a", 1.0, ""), ("b", 0.8, ""), ("c", 0.4, "fp8"), ("d", 0.83, ""))
    ]
    places = [(rank, entry.row.kernel, entry.error_class) for rank, entry in ranked(entries)]
    assert places == [(1, "b", "fp32"), (1, "d", "fp32"), (3, "a", "fp32"), (1, "c", "fp8")]


def test_the_page_is_that_of_the_files():
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert text == page(), "make results"
    assert results_table.PAGE == ROOT / "docs" / "results.md"


def test_the_page_of_made_up_results(tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "ffn-1"
    folder.mkdir(parents=True)
    assert "No result has been admitted yet" in page(folder.parent, tmp_path)
    result(folder, name="first")
    later = {**RUN, "run_id": "later", "started_utc": "2026-12-01T00:00:00Z"}
    result(folder, name="again", run=later, times={**TIMES, "fast": 9e-3})
    result(folder, processes=3, name="short")
    (folder / "broken.csv").write_text("x\n")
    text = page(folder.parent, tmp_path)
    assert "short](../benchmarks/results/ffn-1/short.csv) | processes |" in text
    assert re.search(r"broken\]\(\S+\) \| \S*broken.csv, line 1: no column", text)
    assert text.count("**llama-3.2-1b, 1 tokens") == text.count("**privacy-filter, 32 tokens") == 1
    lines = [line for line in text.splitlines() if line.startswith("| 1 | `fast` | 0.9")]
    assert len(lines) == 6  # of the newer file
    assert all("[again](../benchmarks/results/ffn-1/again.csv)" in line for line in lines)
    assert sum(line.startswith("| 2 | `eager` | 1.000 | ") for line in text.splitlines()) == 6
    assert "| 2026-11-24 | `ffn bench --suite ffn-1 --kernel eager,fast=mine.py` |" in text
    tables = newest([admit(folder / "first.csv"), admit(folder / "again.csv")], tmp_path)
    assert list(tables) == ["a cpu, cpu"]
    assert {len(entries) for entries in tables["a cpu, cpu"].values()} == {2}


def test_what_is_withdrawn_is_named_and_not_ranked(tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "ffn-1"
    folder.mkdir(parents=True)
    result(folder, name="first")
    assert "| `fast` |" in page(folder.parent, tmp_path)
    reason = '[[rows]]\nresult = "first"\nkernel = "fast"\nreason = "it slept"\n'
    (folder / "withdrawn.toml").write_text(reason, "utf-8")
    text = page(folder.parent, tmp_path)
    assert "| 1 | `fast` |" not in text
    assert "| 1 | `eager` |" in text
    link = "[first](../benchmarks/results/ffn-1/first.csv)"
    assert f"### Withdrawn\n\n| result | kernel | why |\n| --- | --- | --- |\n| {link} | `fast` | it slept |" in text
    (folder / "withdrawn.toml").write_text(reason.replace("fast", "fats"), "utf-8")
    with pytest.raises(SystemExit, match="no admitted result has"):
        page(folder.parent, tmp_path)


def test_the_citation_names_this_version():
    """Checked with cffconvert when it was written; the keys that its schema requires, and what changes."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["cff-version"], cited["type"], cited["license"]) == ("1.2.0", "software", "MIT")
    assert cited["version"] == __version__
    assert all(set(author) == {"name"} for author in cited["authors"])
