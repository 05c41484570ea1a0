"""`ffn trace --layer all` as JSON, as CSV and as a table to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.block.cost import CONVENTIONS
from ffncli.block.units import NEAR_ZERO
from ffncli.cli.insight import InsightOptions
from ffncli.cli.options import RunOptions, TokenOptions
from ffncli.cli.prompt_options import PromptOptions
from ffncli.cli.prompt_page import listed
from ffncli.errors import FFNError
from ffncli.models.model import Resolved
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.run.survey import LayerRow, Survey

TOP_UNITS = 3
SURVEY_CONVENTIONS = {
    "near_zero": f"|x| <= {NEAR_ZERO:g} after the activation",
    "dead_units": "units whose activation is exactly zero for every token; near_dead_units: "
    f"within {NEAR_ZERO:g} of zero",
    "norms": "mean L2 norm of a token; gain = output_norm / input_norm",
    "agreement": "max|a-b|; over max|b|; in units in the last place of b there: a ours, b the model's own FFN",
}


def show_survey(
    model: Resolved, run: RunOptions, tokens: TokenOptions, prompt: PromptOptions, insight: InsightOptions,
    one: Mapping[str, object], output: Output,
) -> None:  # fmt: skip
    """Survey all layers and show them. Raises FFNError for options that mean one layer, `one` among them."""
    alone = {"--unembed": prompt.unembed, "--train": run.train, **one}
    if said := next((option for option, given in alone.items() if given), None):
        raise FFNError(f"{said} needs one layer", "give --layer I instead of all")
    leading = tokens.leading()
    import torch

    from ffncli.run.prepare import Request
    from ffncli.run.survey import survey

    if run.threads:
        torch.set_num_threads(run.threads)
    request = Request(None, run.input, leading, run.dtype, run.device, run.seed)
    top = TOP_UNITS if insight.top_units is None else insight.top_units
    found = survey(model, request, prompt.asked() if prompt.runs_model else None, top)
    output.notes(*model.notes, *map(str, model.differences), *found.notes)
    output.show(survey_answer(model, found, prompt.prompt, insight.top_units or 1))
    insight.judge(_not_finite(found), output)


def _not_finite(found: Survey) -> list[str]:
    """The first layer with NaN or Inf, and how many more there are: one makes all that come after it so."""
    bad = [row for row in found.rows if row.not_finite]
    said = [f"{row.stack} layer {row.layer}: {fault}" for row in bad[:1] for fault in row.not_finite]
    return said + ([f"{len(bad) - 1} more of the layers have NaN or Inf"] if len(bad) > 1 else [])


def survey_answer(model: Resolved, found: Survey, prompt: str | None, units: int = 1) -> Answer:
    """All layers: `layers` in JSON, one row each in CSV and in the table, which names that many active `units`."""
    body = {
        "model": {"name": model.name, "source": model.source, "prompt": prompt, "input": found.input,
                  "tokens": {stack: [*map(asdict, tokens)] for stack, tokens in found.tokens.items()}},
        "layers": [_keys(row) for row in found.rows],
    }  # fmt: skip
    rows = [_keys(row) for row in found.rows]
    names = tuple(rows[0])
    csv = Table(names, [tuple(_flat(row[name]) for name in names) for row in rows])
    parts: list[Part] = [Heading(model.name, f"{len(rows)} layers with an FFN")]
    if found.input is not None:
        parts.append(Line(f"input: {found.input}"))
    for stack, tokens in found.tokens.items():
        parts.append(Line(f"{stack}: {listed(tokens)}"))
    parts.append(_table(found, units))
    parts += [Line(f"{name.replace('_', ' ')}: {text}", quiet=True) for name, text in _said(found, units).items()]
    return Answer("trace", body, csv, parts, {**CONVENTIONS, **SURVEY_CONVENTIONS})


def _keys(row: LayerRow) -> dict[str, Any]:
    """A row under the keys of docs/json.md."""
    out = asdict(row)
    found = out.pop("agreement")
    names = ("max_error", "relative_error", "ulps")
    return out | {name: found[name] if found else None for name in names}


def _flat(value: Any) -> Any:
    """A CSV cell: active units as `3`, `7:3` inside expert 7, `shared:3`; what is not finite as `weight up.weight`."""
    if not isinstance(value, tuple):
        return value
    return tuple(
        f"{one['kind']} {one['name']}" if "kind" in one else _place(one["unit"], one["expert"], one["shared"])
        for one in value
    )


def _place(unit: int, expert: int | None, shared: bool) -> str:
    return f"{expert}:{unit}" if expert is not None else f"shared:{unit}" if shared else f"{unit}"


def _table(found: Survey, units: int) -> Table:
    columns = ["layer", "zeros %", "near %", "dead", "|in|", "|out|", "gain", "most active"]
    ran = any(row.agreement for row in found.rows)
    several = len({row.stack for row in found.rows}) > 1
    rows = []
    for row in found.rows:
        name = f"{row.stack}.{row.layer}" if several else str(row.layer)
        cells = [
            name, *(None if s is None else round(100 * s, 2) for s in (row.zero_share, row.near_zero_share)),
            row.near_dead_units, row.input_norm, row.output_norm, row.gain,
            ", ".join(_place(unit.unit, unit.expert, unit.shared) for unit in row.most_active[:units]) or None,
        ]  # fmt: skip
        rows.append(tuple([*cells, row.agreement.relative_error if row.agreement else None] if ran else cells))
    return Table(tuple([*columns, "error"] if ran else columns), rows)


def _said(found: Survey, units: int) -> dict[str, str]:
    """What the columns mean."""
    moe = any(unit.expert is not None for row in found.rows for unit in row.most_active)
    out = {
        "zeros, near": f"share of values after the activation that are 0, and within {NEAR_ZERO:g} of 0",
        "dead": f"units within {NEAR_ZERO:g} of 0 for every token" + (", of the experts that have any" if moe else ""),
        "most active": f"the {'unit' if units == 1 else 'units'} with the largest mean |act|"
        + (", as expert:unit" if moe else ""),
    }
    if any(row.agreement for row in found.rows):
        out["error"] = "max|ours - the model's own| over max|the model's own|"
    return out
