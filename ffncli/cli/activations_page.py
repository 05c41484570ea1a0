"""What `ffn activations` found, as JSON, as CSV and as tables to read."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.block.analysis.curve import curve
from ffncli.show.parts import Answer
from ffncli.show.tables import Table


def answer(names: Sequence[str], at: Sequence[float], std: float) -> Answer:
    """A row per activation."""
    curves = [curve(name) for name in names]
    rows = [{"name": c.name, "values": [{"x": x, "value": c.f(x), "slope": c.slope(x)} for x in at]} for c in curves]
    table = Table(("x", *names), [(x, *(c.f(x) for c in curves)) for x in at])
    return Answer("activations", {"rows": rows}, table, [table])
