"""python -m benchmarks.gpu_first.child NAME FILE: one probe's measurement, its figures as JSON in FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.gpu_first.table import probe_of


def main() -> None:
    """What the probe prints goes to the log."""
    name, file = sys.argv[1:]
    figures = probe_of(name).measure()
    Path(file).write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
