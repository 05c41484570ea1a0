"""What the benchmark scripts share: what the figures depend on, and how results are kept."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

# The least that a command line with a table can be: typer and rich and nothing of ours.
BARE = """
import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer()


@app.command()
def main() -> None:
    table = Table("name", "value")
    table.add_row("answer", "42")
    Console().print(table)


app()
"""


def machine(*packages: str) -> dict[str, str]:
    """Python, the packages' versions and the processor: no host name, no path."""
    versions = {name: version(name) for name in packages}
    return {"python": platform.python_version(), **versions, "cpu": f"{_cpu()}, {os.cpu_count()} cores"}


def save(path: str, columns: Sequence[str], rows: Iterable[Sequence[object]], about: Mapping[str, str]) -> None:
    """All rows as CSV, the machine in every row; unknown is empty, booleans are `true|false`."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *about])
        writer.writerows([*map(_cell, row), *about.values()] for row in rows)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
