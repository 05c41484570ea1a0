"""`ffn trace --layer all` as JSON, as CSV and as a table to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.block.cost import CONVENTIONS
from ffncli.cli.insight import InsightOptions
from ffncli.cli.options import RunOptions, TokenOptions
from ffncli.cli.prompt_options import PromptOptions
from ffncli.cli.prompt_page import label
from ffncli.errors import FFNError
from ffncli.models.model import Model
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import edges

if TYPE_CHECKING:
    from ffncli.run.survey import LayerRow, Survey

TOP_UNITS = 3
SURVEY_CONVENTIONS = {
    "near_zero": "|x| <= 0.001 after the activation",
    "dead_units": "units whose activation is exactly zero for every token; near_dead_units: within 0.001 of zero",
    "norms": "mean L2 norm of a token; gain = output_norm / input_norm",
    "agreement": "max|a-b|; over max|b|; in units in the last place of max|b|: a ours, b the model's own FFN",
}


def show_survey(
    model: Model, run: RunOptions, tokens: TokenOptions, prompt: PromptOptions, insight: InsightOptions,
    one: Mapping[str, object], output: Output,
) -> None:  # fmt: skip
    """Survey all layers and show them. Raises FFNError for options that mean one layer, `one` among them."""
    alone = {"--unembed": prompt.unembed, "--train": run.train, "--fail-on-nonfinite": insight.fail_on_nonfinite, **one}
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
    for note in (*model.notes, *map(str, model.differences), *found.notes):
        output.note(note)
    output.show(survey_answer(model, found, prompt.prompt))


def survey_answer(model: Model, found: Survey, prompt: str | None) -> Answer:
    """All layers: `layers` in JSON, one row each in CSV and in the table."""
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
        shown = ", ".join(label(tokens[i]) for i in edges(len(tokens), 8))
        parts.append(Line(f"{stack}: {len(tokens)} token{'s' * (len(tokens) != 1)}: {shown}"))
    parts.append(_table(found))
    parts += [Line(f"{name.replace('_', ' ')}: {text}", quiet=True) for name, text in _said(found).items()]
    return Answer("trace", body, csv, parts, {**CONVENTIONS, **SURVEY_CONVENTIONS})


def _keys(row: LayerRow) -> dict[str, Any]:
    """A row under the keys of docs/json.md."""
    out = asdict(row)
    found = out.pop("agreement")
    names = ("max_error", "relative_error", "ulps")
    return out | {name: found[name] if found else None for name in names}


def _flat(value: Any) -> Any:
    """A CSV cell: active units as `3`, `7:3` inside expert 7, `shared:3`."""
    if not isinstance(value, tuple):
        return value
    return tuple(_place(unit["unit"], unit["expert"], unit["shared"]) for unit in value)


def _place(unit: int, expert: int | None, shared: bool) -> str:
    return f"{expert}:{unit}" if expert is not None else f"shared:{unit}" if shared else f"{unit}"


def _table(found: Survey) -> Table:
    columns = ["layer", "zeros %", "near %", "dead", "|in|", "|out|", "gain", "most active"]
    ran = any(row.agreement for row in found.rows)
    several = len({row.stack for row in found.rows}) > 1
    rows = []
    for row in found.rows:
        name = f"{row.stack}.{row.layer}" if several else str(row.layer)
        cells = [
            name, *(None if s is None else round(100 * s, 2) for s in (row.zero_share, row.near_zero_share)),
            row.near_dead_units, row.input_norm, row.output_norm, row.gain,
            next((_place(unit.unit, unit.expert, unit.shared) for unit in row.most_active), None),
        ]  # fmt: skip
        rows.append(tuple([*cells, row.agreement.relative_error if row.agreement else None] if ran else cells))
    return Table(tuple([*columns, "error"] if ran else columns), rows)


def _said(found: Survey) -> dict[str, str]:
    """What the columns mean."""
    moe = any(unit.expert is not None for row in found.rows for unit in row.most_active)
    out = {
        "zeros, near": "share of values after the activation that are 0, and within 0.001 of 0",
        "dead": "units within 0.001 of 0 for every token" + (", of the experts that have any" if moe else ""),
        "most active": "the unit with the largest mean |act|" + (", as expert:unit" if moe else ""),
    }
    if any(row.agreement for row in found.rows):
        out["error"] = "max|ours - the model's own| over max|the model's own|"
    return out
