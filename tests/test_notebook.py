"""docs/notebook.ipynb, run in a new kernel in a folder with `my-model` and `my-mixture`: its outputs are as shown."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from docs.blocks import page_folder

pytestmark = pytest.mark.docs

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


def outputs(cell: Any) -> list[str]:
    """Return what a cell shows: its results as strings, and an error's name."""
    return [
        str(one.get("data", {}).get("text/plain", one.get("ename", "")))
        for one in cell.outputs
        if one.output_type != "stream"
    ]


def run(notebook: Any) -> Any:
    """Run a notebook, and return it with its new outputs."""
    with page_folder():
        return NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def test_the_notebook_shows_what_its_calls_give():
    shown = nbformat.read(NOTEBOOK, as_version=4)
    expected = [outputs(cell) for cell in shown.cells if cell.cell_type == "code"]
    calls = set(re.findall(r"ffncli\.(\w+)\(", "".join(cell.source for cell in shown.cells)))
    assert calls == {"trace", "count", "survey", "corpus", "experts", "verify", "benchmark"}
    found = [outputs(cell) for cell in run(shown).cells if cell.cell_type == "code"]
    assert found == expected
