"""Runs the tests once under coverage, each test on its own account."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.mutations.follow import FOLDER, SITE
from benchmarks.mutations.reached import Reached, gather
from benchmarks.mutations.scratch import tree

HOW = "this needs coverage: pip install coverage, or pip install --target DIR coverage and DIR on PYTHONPATH"


def measure(jobs: int, words: Sequence[str] = ()) -> Reached:
    """The tests (`words`: paths and options of pytest), in that many processes, in a copy of the working tree."""
    if find_spec("coverage") is None:
        raise SystemExit(HOW)
    with tree() as copy:
        site, left = copy.beside / "site", copy.beside / "reached"
        site.mkdir()
        left.mkdir()
        (site / "sitecustomize.py").write_text(SITE, "utf-8")
        ended = copy.run(
            [sys.executable, "-m", "pytest", "-p", "benchmarks.mutations.plugin", "-n", str(jobs), *words],
            None,
            {FOLDER: str(left), "PYTHONPATH": str(site)},
        )
        print(ended.output[-3000:])
        return gather(left, copy.root)
