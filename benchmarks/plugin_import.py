"""What the pytest plugin costs every pytest of an environment that has ffn: the time to import it.

What: seconds of `import ffncli.pytest_plugin` in a fresh process that has imported pytest; beside it the seconds of
`import pytest` alone, and whether torch was loaded.

How: the two kinds of process run in random order; each figure is the median of 11 processes. Three rounds before that
fill the bytecode and file caches.

Limits: warm caches only; the first import after an installation compiles. The mark, 20 ms, is of this machine.

    python -m benchmarks.plugin_import [--save FILE]

The exit code is 1 if the plugin takes more than 20 ms, or loads torch.
"""

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import script

LIMIT_S = 0.02
PROCESSES, WARM_UPS = 11, 3
TIMED = """
{before}
start = time.perf_counter()
import {module}
finish(seconds=time.perf_counter() - start, torch="torch" in sys.modules)
"""
PROGRAMS = {
    "import pytest": TIMED.format(before="", module="pytest"),
    "import ffncli.pytest_plugin": TIMED.format(before="import pytest", module="ffncli.pytest_plugin"),
}


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each import; only the plugin's has a limit."""
    runs = {name: partial(script.child, program) for name, program in PROGRAMS.items()}
    for name, figures in script.interleaved(runs, options.processes, WARM_UPS).items():
        seconds, torch = [one["seconds"] for one in figures], any(one["torch"] for one in figures)
        limit = LIMIT_S if "ffncli" in name else None
        median = statistics.median(seconds)
        yield {
            "what": name, "median_s": median, "least_s": min(seconds), "most_s": max(seconds), "limit_s": limit,
            "torch": torch, "passed": None if limit is None else median <= limit and not torch,
            "processes": options.processes,
        }  # fmt: skip


if __name__ == "__main__":
    script.main_once(__doc__, ("pytest",), measured, processes=PROCESSES)
