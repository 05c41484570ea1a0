"""Does any of the tests that reach a broken line fail?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.mutations.chosen import CHOSEN
from benchmarks.mutations.places import Place, Spot
from benchmarks.mutations.reached import Reached
from benchmarks.mutations.scratch import Ended, Tree

COLUMNS = ("id", "file", "line", "function", "kind", "before", "after", "tests", "result", "by", "seconds")
# To collect tests costs more than to run the fastest of them: these come first and alone.
FIRST = 30
_ENDLESS = 300.0  # seconds: one test that runs for longer than this does not end
_NO_TESTS = 5  # pytest's exit code where none of them is there any more


def noticed(tree: Tree, place: Place, spot: Spot, reached: Reached, limit: float) -> dict[str, Any]:
    """The row of a place: `noticed` and by which test, `survived`, or `timeout` where time was over before.

    That test, run alone, fails here and passes where nothing is broken; one that needs others before it is put aside.
    """
    tests = reached.tests(spot.file, spot.line) or reached.of_floor(spot.file)
    row = {"id": place.id, "file": spot.file, "line": spot.line, "function": place.function, "kind": place.kind}
    row |= {"before": place.before, "after": place.after, "tests": len(tests)}
    seconds = 0.0
    while True:
        began = time.monotonic()
        with tree.changed(spot.file, spot.text):
            result, by = search(tree, tests, limit - seconds)
        seconds += time.monotonic() - began
        if not by or _alone(tree, spot, by):
            return row | {"result": result, "by": by, "seconds": seconds}
        print(f"put aside, it fails alone or only among others: {by}", flush=True)
        after = tests[tests.index(by) + 1 :] if by in tests else tests
        tests = [test for test in after if test.partition("::")[0] != by]


def search(tree: Tree, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """The result, and the first of the tests to fail, or the file that cannot be collected."""
    began = time.monotonic()
    for some in filter(None, (tests[:FIRST], tests[FIRST:])):
        ended = ask(tree, some, limit - (time.monotonic() - began), "-x")
        if by := failed(tree):
            return "noticed", by[0]
        if ended.code is None:
            return "timeout", ""
        if ended.code not in (0, _NO_TESTS):
            raise SystemExit(f"pytest: {ended.output[-2000:]}")
    return "survived", ""


def _alone(tree: Tree, spot: Spot, test: str) -> bool:
    """Whether the test by itself passes (a file: can be collected) as things are, and does not once they are broken."""
    passes = ask(tree, [test], None).code in (0, _NO_TESTS)
    with tree.changed(spot.file, spot.text):
        return passes and ask(tree, [test], _ENDLESS).code not in (0, _NO_TESTS)


def ask(tree: Tree, tests: Sequence[str], limit: float | None, *options: str) -> Ended:
    """Run exactly these tests, in this order, in one process."""
    chosen = tree.beside / "chosen.json"
    chosen.write_text(json.dumps(tests), "utf-8")
    files = sorted({name.partition("::")[0] for name in tests})
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.mutations.chosen", "-p", "no:cacheprovider"]
    return tree.run([*command, *options, *files], limit, {CHOSEN: str(chosen)})


def failed(tree: Tree) -> list[str]:
    """The tests that failed when last asked."""
    path = tree.beside / "chosen.failed"
    return path.read_text("utf-8").splitlines() if path.exists() else []
