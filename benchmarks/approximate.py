"""How long `ffn approximate --target sin --d-ff 1,4,16,64` takes, and whether its errors behave as theory predicts.

What: the wall and processor time of the whole process, with default activations and seeds. Targets: the run takes less
than 30 seconds; gelu's error at width 64 is at most a hundredth of its error at width 1; identity's error is nowhere
below the best straight line's, and at most a thousandth above it; a second run prints the same bytes.

Limits: the wall time of one machine, including other work on it; no other program is measured for comparison.

    python -m benchmarks.approximate [--save FILE]

The exit code is 1 if a target is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import script

COMMAND = ["approximate", "--target", "sin", "--d-ff", "1,4,16,64", "--json"]
LIMIT_S, FALL, NEAR = 30.0, 100.0, 1.001


def timed() -> tuple[bytes, float, float]:
    """Run the command; return its output, wall seconds and processor seconds."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "ffncli", *COMMAND], capture_output=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode != 0:
        raise SystemExit(f"ffn {' '.join(COMMAND)} failed:\n{done.stderr.decode(errors='replace')}")
    used = sum(getattr(after, n) - getattr(before, n) for n in ("children_user", "children_system"))
    return done.stdout, wall, used


def measured(_: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each target, from two runs."""
    (first, wall, used), (second, again, _) = timed(), timed()
    rows = {(row["activation"], row["d_ff_plain"]): row for row in json.loads(first)["rows"]}
    gelu = rows["gelu", 1]["rmse"] / rows["gelu", 64]["rmse"]
    line = [row["rmse"] / row["floor"] for (name, _), row in rows.items() if name == "identity"]
    print(f"ffn {' '.join(COMMAND)}: {wall:.1f} s, again {again:.1f} s; {used:.1f} s of processor; {len(rows)} rows")
    for name, value, demanded, passed in (
        ("seconds", wall, f"under {LIMIT_S:g}", wall < LIMIT_S),
        ("gelu: error at width 1 over that at 64", gelu, f"at least {FALL:g}", gelu >= FALL),
        ("identity: least error over the best line's", min(line), "not below 1", min(line) >= 1 - 1e-9),
        ("identity: largest error over the best line's", max(line), f"at most {NEAR:g}", max(line) <= NEAR),
        ("the same bytes again", first == second, "true", first == second),
    ):
        yield {"mark": name, "value": value, "demanded": demanded, "passed": passed}


if __name__ == "__main__":
    script.main_once(__doc__, ("torch",), measured)
