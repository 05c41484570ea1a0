"""The answer of `ffn compare` about two checkpoints as a page: findings, a map of layers and matrices, and spectra."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffncli.pages.precision import layer_name
from ffncli.show.page.charts import ChartLine, layer_map, lines
from ffncli.show.page.document import Child, element
from ffncli.show.plots.layers import finite_number

_MOST_SPECTRA = 8
_Rows = Sequence[Mapping[str, Any]]


def checkpoint_charts(values: Mapping[str, Any], rows: _Rows) -> Iterator[Child]:
    """Yield what was done, a map of relative changes and spectra of the largest changes."""
    details = [one.get("detail") for one in _records(values.get("findings"))]
    yield element("h3", "What was done, the likeliest first")
    yield element("ol", [element("li", str(detail)) for detail in details])
    changes = {
        (layer_name(row), str(row.get("matrix"))): x for row in rows if (x := finite_number(row.get("relative_change")))
    }
    if not changes:
        return
    yield element("h3", "Relative change in %")
    yield layer_map({place: (f"{100 * x:.3g}", x) for place, x in changes.items()})
    ranked = sorted(
        (row for row in rows if row.get("energy")), key=lambda row: -(finite_number(row["relative_change"]) or 0.0)
    )
    series = [
        ChartLine(f"{layer_name(row)} {row.get('matrix')}", points)
        for row in ranked[:_MOST_SPECTRA] if (points := _points(row.get("energy")))
    ]  # fmt: skip
    if series:
        yield element("h3", "Energy of the change in its first singular values")
        yield lines(series, "singular values", "share of the energy", log_x=True, log_y=False)


def _records(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _points(energy: object) -> list[tuple[float, float]]:
    shares = [finite_number(one) for one in energy] if isinstance(energy, list) else []
    return [(2.0**at, share) for at, share in enumerate(shares[:16]) if share is not None]
