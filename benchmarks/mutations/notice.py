"""Does any of the tests that reach a broken line fail?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.mutations.chosen import CHOSEN
from benchmarks.mutations.places import Place, Spot
from benchmarks.mutations.reached import Reached
from benchmarks.mutations.scratch import Ended, Tree

COLUMNS = ("id", "file", "line", "function", "kind", "before", "after", "tests", "result", "by", "seconds")
# To collect tests costs more than to run the fastest of them: these come first and alone.
FIRST = 30
_NO_TESTS = 5  # pytest's exit code where none of them is there any more


def noticed(tree: Tree, place: Place, spot: Spot, reached: Reached, limit: float) -> dict[str, Any]:
    """The row of a place: `noticed` and by which test, `survived`, or `timeout` where time was over before."""
    tests = reached.tests(spot.file, spot.line) or reached.of_floor(spot.file)
    began, result, by = time.monotonic(), "survived", ""
    with tree.changed(spot.file, spot.text):
        for some in filter(None, (tests[:FIRST], tests[FIRST:])):
            ended = ask(tree, some, limit - (time.monotonic() - began), "-x")
            if by := next(iter(failed(tree)), ""):
                result = "noticed"
            elif ended.code is None:
                result = "timeout"
            elif ended.code not in (0, _NO_TESTS):
                result, by = "noticed", ended.output.strip()[-200:]
            if result != "survived":
                break
    row = {"id": place.id, "file": spot.file, "line": spot.line, "function": place.function, "kind": place.kind}
    row |= {"before": place.before, "after": place.after, "tests": len(tests), "result": result, "by": by}
    return row | {"seconds": time.monotonic() - began}


def control(tree: Tree, tests: Iterable[str]) -> None:
    """The tests that noticed something, on code that is not broken: one that fails has noticed nothing."""
    ask(tree, sorted(set(tests)), None)
    for name in failed(tree):
        print(f"fails also where nothing is broken: {name}")


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
