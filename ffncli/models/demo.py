"""The block that runs if no source is given."""

from __future__ import annotations

from dataclasses import replace

from ffncli.models.dimensions import Dimensions, from_dimensions, merged
from ffncli.models.examples import Example


def demo(options: Dimensions) -> Example:
    """The small block that `ffn trace` runs without a source: 4 → 8 → 4 with ReLU, changed by the options.

    Its input is two tokens of the numbers 0 to 7, so that a reader can follow the sums.
    """
    resolved = from_dimensions(merged(Dimensions(d_model=4, d_ff=8), options))
    about = "a small demo block; `ffn trace SOURCE` runs yours"
    return Example(replace(resolved, evidence=(about,), notes=()), {}, "arange", (2, resolved.model.main.spec.d_model))
