"""`ffn models`."""

from dataclasses import asdict
from typing import Annotated

from ffncli.block.cost import CONVENTIONS
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.common.summaries import csv_table
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models import catalog
from ffncli.models.counting.count import ModelCount, count
from ffncli.options.opt import Opt
from ffncli.show.parts import Answer, Short, Table

_Text = Annotated[
    str | None, Opt(metavar="TEXT", help="Show only models with TEXT in their name, or as their year or organisation.")
]


@spread
def command(*, text: _Text = None, show: OutputOptions) -> None:
    """List the known models, with their sources: widths, activation, FFN parameters; --json and --csv
    add the source, the organisation and the other names of each model.

    Examples:
      ffn models              # all of them
      ffn models llama        # those with llama in the name
      ffn models 2026         # those released in that year
      ffn models nvidia --csv # one organisation, with sources
    """
    output = show.output()
    names = catalog.names() if text is None else catalog.search(text)
    if not names:
        hint = did_you_mean(str(text), catalog.spellings(), "`ffn models` lists all")
        raise FFNError(f"no known model matches {shown(text)}", hint)
    models = [model for name in names if (model := catalog.find(name))]
    output.show(answer([count(model) for model in models]))


def answer(counts: list[ModelCount]) -> Answer:
    """Build rows as in `ffn params`, but without groups."""
    rows = [{k: v for k, v in asdict(c).items() if k != "groups"} | _origin(c.name) for c in counts]
    columns = ("model", "year", "d_model", "d_ff", "activation", "layers", "FFN", "active")
    kept = len(columns) if any(c.has_experts for c in counts) else -1  # "active" is meaningless for dense models
    table = Table(columns[:kept], [_row(c)[:kept] for c in counts])
    return Answer("models", {"rows": rows}, csv_table(rows), [table], CONVENTIONS)


def _origin(name: str) -> dict[str, object]:
    """Return the source of a known model, its organisation, and its other names."""
    return {
        "organisation": catalog.organisation(name), "year": catalog.year(name), "aliases": catalog.aliases(name),
    }  # fmt: skip


def _row(c: ModelCount) -> tuple[object, ...]:
    return (
        c.name, str(catalog.year(c.name)), c.d_model, c.d_ff, c.activation, c.layers, Short(c.ffn_params_total),
        Short(c.ffn_params_active) if c.has_experts and c.ffn_params_active else "",
    )  # fmt: skip
