"""`ffn models`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ffncli.block.cost import CONVENTIONS
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models import catalog
from ffncli.models.counting.count import ModelCount, count
from ffncli.show.parts import Answer
from ffncli.show.tables import Short, Table


@spread
def command(
    *,
    search: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Show only models with a name that contains TEXT.")
    ] = None,
    show: OutputOptions,
) -> None:
    """List the known models, with their sources: widths, activation, FFN parameters; --json and --csv give
    the source of each row.

    Examples:
      ffn models              # all of them
      ffn models llama        # those with llama in the name
      ffn models qwen3 --csv  # with sources
      ffn models --json       # every field
    """
    output = show.output()
    names = catalog.names() if search is None else catalog.search(search)
    if not names:
        raise FFNError(
            f"no known model matches {shown(search)}",
            did_you_mean(str(search), catalog.spellings(), "`ffn models` lists all"),
        )
    models = [model for name in names if (model := catalog.find(name))]
    output.show(answer([count(model) for model in models]))


def answer(counts: list[ModelCount]) -> Answer:
    """Rows as in `ffn params`, without groups."""
    rows = [
        {k: v for k, v in asdict(c).items() if k != "groups"} | {"aliases": catalog.aliases(c.name)} for c in counts
    ]
    flat = Table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    columns = ("model", "d_model", "d_ff", "activation", "gated", "layers", "FFN", "active")
    kept = len(columns) if any(c.experts for c in counts) else -1  # "active" means nothing for dense models
    table = Table((*columns[:kept], "also"), [(*_row(c)[:kept], ", ".join(catalog.aliases(c.name))) for c in counts])
    return Answer("models", {"rows": rows}, flat, [table], CONVENTIONS)


def _row(c: ModelCount) -> tuple[object, ...]:
    return (
        c.name, c.d_model, c.d_ff, c.activation, c.gated, c.layers, Short(c.ffn_params_total),
        Short(c.ffn_params_active) if c.experts and c.ffn_params_active else "",
    )  # fmt: skip
