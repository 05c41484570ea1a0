"""Plots over the layers of a model, from rows with a figure per key; pages and notebooks draw the same."""

from collections.abc import Iterable, Mapping, Sequence
from sys import float_info
from typing import Any

from ffncli.show.parts import is_number
from ffncli.show.plots.plot import Plot, Series

# The title, the unit of the y axis, and the keys; each key is drawn as one line, if it is in the rows.
_FRAMES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Norms of a token", "mean L2 norm", ("input_norm", "output_norm")),
    ("Shares", "share", ("zero_share", "near_zero_share", "active_share", "dead_share", "busiest_share")),
    ("Minimum and maximum after the activation", "value", ("min", "max")),
    ("Entropy of the experts' load", "bits", ("entropy_bits", "max_entropy_bits")),
    ("Difference from the model's own FFN", "relative error", ("relative_error",)),
)
_Rows = Sequence[Mapping[str, Any]]


def layer_plots(rows: _Rows) -> list[Plot]:
    """Return the plots of several layers; each row has its `layer`, and its `stack` if there are several."""
    drawn = []
    for row in rows:  # add the figures of the layer's routing, and the layer's share of dead units
        routing, units, dead = row.get("routing"), finite_number(row.get("units")), finite_number(row.get("dead_units"))
        more = {**routing} if isinstance(routing, Mapping) else {}
        if units and dead is not None:
            more["dead_share"] = dead / units
        drawn.append({**row, **more})
    out = []
    for title, up, keys in _FRAMES if len(rows) > 1 else ():
        if series := _series(drawn, keys):
            positive = all(y > 0 for one in series for _, y in one.points)
            log = positive and up in ("mean L2 norm", "relative error")
            out.append(Plot(title, "layer", up, series, log_y=log, marks=True))
    return out


def _series(rows: _Rows, keys: Iterable[str]) -> list[Series]:
    """Return a line for each key and stack."""
    stacks = list(dict.fromkeys(str(row.get("stack", "")) for row in rows))
    out = []
    for key in keys:
        for stack in stacks:
            some = [row for row in rows if str(row.get("stack", "")) == stack]
            points = [(float(row["layer"]), y) for row in some if (y := finite_number(row.get(key))) is not None]
            name = key.replace("_", " ") + (f", {stack}" if len(stacks) > 1 else "")
            if points and (key not in ("relative_error", "near_zero_share") or any(y for _, y in points)):
                out.append(Series(name, points))
    return out


def finite_number(value: object) -> float | None:
    """Return a number that a float can hold as a float, None for anything else; integers in JSON have no limit."""
    if not is_number(value) or not abs(value) <= float_info.max:  # type: ignore[arg-type]
        return None
    return float(value)  # type: ignore[arg-type]
