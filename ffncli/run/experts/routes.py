"""The routes of a layer as a file that `ffn bench --routing` takes: a saved trace of the one tensor `route`."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps
from ffncli.models.model import Layer
from ffncli.run.engine.trace import Trace, input_record
from ffncli.run.experts.sums import MOST_ROUTES
from ffncli.run.saved.saved import save
from ffncli.show.text import plural


def save_routes(path: Path, layer: Layer, routes: Tensor) -> str:
    """Write a router's weights [tokens, experts]; returns a note. Raises FFNError (exit 3) if that fails."""
    result = Trace("route", "route", (input_record("route", routes),), {"route": routes})
    about = {"name": f"routes of {layer.stack} layer {layer.index}", "stack": layer.stack, "layer": layer.index}
    save(path, ffn_steps(steps(layer.spec)), result, about, {})
    first = "the first " if len(routes) >= MOST_ROUTES else ""
    return f"saved the routes of {first}{len(routes):,} {plural('token', len(routes))} to {path}"
