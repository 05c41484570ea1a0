"""The answer of `ffn precision` as a page: layers and tensors as a map, and the parts of the errors as bars."""

from collections.abc import Iterator, Mapping, Sequence
from math import fsum, sqrt
from typing import Any

from ffncli.show.page.charts import layer_map, share_bars
from ffncli.show.page.document import Child, element
from ffncli.show.plots.layers import finite_number

_TENSORS = ("x", "W1", "W3", "hidden", "W2")
_Rows = Sequence[Mapping[str, Any]]


def precision_charts(rows: _Rows, budget: object) -> Iterator[Child]:
    """Yield a map and bars for each format; of a budget, a map of the chosen formats."""
    rows = sorted(rows, key=lambda row: (str(row.get("stack")), finite_number(row.get("layer")) or 0.0))
    if isinstance(budget, Mapping):
        cells = {
            (layer_name(row), str(row.get("tensor"))): (str(row.get("format")), bits)
            for row in rows if (bits := finite_number(row.get("bits"))) is not None
        }  # fmt: skip
        yield element("h3", "Chosen formats; the darker, the more bits per weight")
        yield layer_map(cells)
        return
    for name in dict.fromkeys(str(row.get("format")) for row in rows):
        some = [row for row in rows if str(row.get("format")) == name]
        errors = {(layer_name(row), tensor): error for row in some for tensor, error in _errors(row)}
        yield element("h3", f"{name}: error of the output, in %, if one tensor of one layer is rounded")
        yield layer_map({place: (f"{100 * error:.3g}", error) for place, error in errors.items()})
        if bars := [(layer_name(row), parts) for row in some if (parts := _parts(row))]:
            yield element("h3", f"{name}: parts of the squared error")
            yield share_bars(bars, (*_TENSORS, "pairs", "rest"))


def layer_name(row: Mapping[str, Any]) -> str:
    """Return the layer of a row, after its stack if it has one."""
    return f"{row.get('stack', '')} {row.get('layer', '')}".strip()


def _numbers(values: object) -> dict[str, float]:
    pairs = values.items() if isinstance(values, Mapping) else ()
    return {str(key): number for key, value in pairs if (number := finite_number(value)) is not None}


def _errors(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the relative error of the output with one tensor rounded, for each rounded tensor."""
    whole, shares = finite_number(row.get("error_rel")), _numbers(row.get("by_tensor"))
    for tensor in _TENSORS:
        if whole is not None and shares.get(tensor, -1) >= 0:
            yield tensor, whole * sqrt(shares[tensor])


def _parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of the tensors, of all pairs together, and the rest."""
    shares, pairs, rest = (_numbers(row.get("by_tensor")), _numbers(row.get("by_pair")), finite_number(row.get("rest")))
    return shares | ({"pairs": fsum(pairs.values())} if pairs else {}) | ({} if rest is None else {"rest": rest})
