"""`ffncli.count`: what `ffn params` counts for one source, as a call with the command line's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from ffncli.models.counting.count import count as count_model
from ffncli.run.user.arguments import DimensionNames, Source, converted
from ffncli.run.user.load import load

if TYPE_CHECKING:
    from ffncli.models.counting.count import ModelCount


def count(
    source: Source = None, dtype: str | None = None, tokens: int | None = None, **dimensions: Unpack[DimensionNames]
) -> ModelCount:
    """Parameters, FLOPs and bytes of a model or block, as in a row of `ffn params`.

    >>> import ffncli
    >>> ffncli.count("gpt2").ffn_params_total
    56669184

    `source` and the dimensions are those of `ffncli.trace`; `dtype` is the format that bytes count in (default: as
    released or stored), `tokens` the number that the `..._total` FLOPs are for, default 1. torch is imported only for a
    source in a Python file. Raises FFNError for whatever the command line refuses, and for an argument of the wrong
    type.
    """
    options = converted(locals(), "count")
    return count_model(load(options["source"], options["dimensions"]), options["dtype"], options["tokens"] or 1)
