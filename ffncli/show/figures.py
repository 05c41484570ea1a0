"""Plots as a file, through matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ffncli.show.files import written_whole
from ffncli.show.plots import Plot


def write(path: Path, plots: Sequence[Plot]) -> None:
    """Draw the plots below each other into one SVG, PNG or PDF, as its suffix says."""
    with written_whole(path):
        pass
