"""`ffn params`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ffncli.block import dtypes, shard, traffic
from ffncli.block.analysis.flow import flow
from ffncli.block.cost import CONVENTIONS
from ffncli.block.recipe import steps
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.common.summaries import csv_table, devices_answer, in_json
from ffncli.cli.params.page import parts_of, sweep_table
from ffncli.errors import ExitCode, FFNError, option, shown
from ffncli.models import catalog
from ffncli.models.counting import assertions
from ffncli.models.counting.count import require_determined
from ffncli.models.counting.figures import KEYS, FigureQuestion
from ffncli.models.counting.training import TRAINING_RULES
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Resolved, ranges
from ffncli.options.accept import COUNT, TEXTS
from ffncli.options.conflicts import Conflict, check, given
from ffncli.options.opt import Opt, Options
from ffncli.options.shared import KINDS_OF_SOURCE, Strict
from ffncli.run.user.load import load
from ffncli.run.user.time_limit import LoadOptions
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.system.files import read_whole

if TYPE_CHECKING:
    from ffncli.models.counting.iso_params import IsoParams  # sweeps and counterparts are imported only if requested

_CONVENTIONS = {**CONVENTIONS, **dtypes.CONVENTIONS, **traffic.CONVENTIONS, **shard.CONVENTIONS}
_MOST_CONDITION_BYTES = 10_000_000  # maximum size of --assert-file
_group = partial(Opt, group="What to count")


@dataclass(frozen=True, kw_only=True)
class CountOptions(Options):
    """The models to count, and assertions about their counts."""

    sources: Annotated[
        Sequence[str],
        Opt(
            metavar="SOURCE", accepts=TEXTS, repeat=True, completes="models",
            help=f"{KINDS_OF_SOURCE} Several are shown side by side.",
        ),
    ] = ()  # fmt: skip
    everything: Annotated[bool, _group("--all", daily=True, help="Count every known model.")] = False
    asserted: Annotated[
        Sequence[str],
        _group(
            "--assert", metavar="'NAME == X'", accepts=TEXTS, repeat=True, daily=True,
            help="Exit 1 unless this holds, as in 'ffn_params_total == 4328521728'; repeatable.",
        ),
    ] = ()  # fmt: skip
    assert_file: Annotated[
        str | None,
        _group("--assert-file", metavar="FILE", help="Exit 1 unless every line of FILE holds; # starts a comment."),
    ] = None
    strict: Strict = False
    sweep: Annotated[
        Sequence[str],
        _group(
            "--sweep", metavar="NAME=A,B,...", accepts=TEXTS, repeat=True, daily=True,
            help="Show one row per value, as in d_ff=1x,2x,4x or tokens=1,32; repeatable.",
        ),
    ] = ()  # fmt: skip
    iso_params: Annotated[
        bool,
        _group("--iso-params", daily=True, help="Add the gated or plain block with the same number of parameters."),
    ] = False
    multiple_of: Annotated[
        int | None,
        _group(
            "--multiple-of", metavar="N", accepts=COUNT,
            help="With --iso-params: round its d_ff up to a multiple of N.",
        ),
    ] = None  # fmt: skip


CONFLICTS = (
    Conflict("multiple_of", needs="iso_params", why="it rounds the d_ff of the other block"),
    Conflict("everything", contradicts="sources", why="give one or the other"),
    Conflict("sweep", contradicts="everything", why="it takes one SOURCE"),
    Conflict("sweep", contradicts="iso_params tp ep ridge", why="use one at a time"),
)


@spread
def command(
    *,
    counted: CountOptions,
    question: FigureQuestion,
    dimensions: Dimensions,
    load_limit: LoadOptions,
    show: OutputOptions,
) -> None:
    """Count parameters, FLOPs and bytes, per layer and in total; several sources side by side.

    Examples:
      ffn params llama-2-7b mixtral-8x7b               # side by side
      ffn params ./my-model --dtype fp8 --tokens 1,32  # FLOPs and bytes of a call
      ffn params 512x2048:gelu --sweep d_ff=1x,2x,4x   # one row per width
      ffn params gpt2 --assert 'd_ff == 3072'          # in CI: exit 1 if not
    """
    output = show.output()
    if question.ridge == ("list",):
        output.show(devices_answer("params"))
        return
    load_limit.apply()
    conditions = assertions.parse([*counted.asserted, *_lines_of(counted.assert_file)], KEYS)
    check((*CONFLICTS, *TRAINING_RULES), given(counted, question))
    if counted.sweep:
        _require_one(counted, question)
        models, answer, lines = _swept(counted, dimensions, question)
    else:
        names = catalog.names() if counted.everything else counted.sources or (None,)
        models = [load(name, dimensions) for name in names]
        answer, lines = (
            _with_twins(models, question, counted.multiple_of or 1)
            if counted.iso_params
            else answer_for(models, question)
        )
    checked, several = assertions.check(conditions, lines), len(lines) > 1
    output.notes(*(f"{one.model.name}: {note}" if len(models) > 1 else note for one in models for note in one.notes))
    if not (checked and output.quiet and output.format == "table" and output.path is None):
        if checked:
            parts: list[Part] = [Heading("assertions"), *(Line(one.line(several)) for one in checked)]
            answer = answer.with_section("assertions", in_json(checked), parts)
        output.show(answer)
    if output.format == "csv":
        output.notes(*(one.line(several) for one in checked if one.holds))
    assertions.require(checked, several)
    _require_agreement(models)
    if counted.strict:
        require_determined(models, question.formats)


def _lines_of(path: str | None) -> list[str]:
    """Read the conditions from a file, one per line; `#` starts a comment line."""
    if path is None:
        return []
    try:
        text = read_whole(Path(os.path.expanduser(path)), _MOST_CONDITION_BYTES, pipe=True).decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FFNError(f"{option('assert_file')}: cannot read {shown(path)}: {why}") from None
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def answer_for(models: Sequence[Resolved], question: FigureQuestion) -> tuple[Answer, list[dict[str, Any]]]:
    """Return a pair: the answer (JSON rows, CSV rows and tables), and its CSV rows as dictionaries."""
    reports = question.reports(models)
    lines = [line for one in reports for line in one.lines()]
    parts = parts_of(reports, costs=bool(question.token_counts or question.tp))
    if len(models) == 1 and not models[0].model.unknown:  # below the line with the model's widths
        parts[2:2] = _drawing(models[0])
    return Answer("params", {"rows": [one.row() for one in reports]}, csv_table(lines), parts, _CONVENTIONS), lines


def _drawing(resolved: Resolved) -> list[Part]:
    """Draw the flow of dimensions through the block or, if there are several kinds, through the most common kind."""
    group = resolved.model.main
    where = f"{group.stack} {ranges(group.layers)}:"
    return [
        *([Line(where, quiet=True)] if len(resolved.model.groups) > 1 else []),
        *(Line(line) for line in flow(steps(group.spec))),
    ]


def _with_twins(
    models: Sequence[Resolved], question: FigureQuestion, multiple_of: int
) -> tuple[Answer, list[dict[str, Any]]]:
    """Show each model next to its gated or plain counterpart, with the difference in size."""
    from ffncli.models.counting.iso_params import counterparts, iso_params

    answer, lines = answer_for([twin for one in models for twin in (one, counterparts(one, multiple_of))], question)
    equal = [(one.model.name, iso_params(one.model.main.spec, multiple_of)) for one in models]
    body = {**answer.body, "iso_params": [{"name": name, **asdict(one)} for name, one in equal]}
    differences = [Line(f"{name}: {_difference(one)}") for name, one in equal]
    return replace(answer, body=body, parts=[*answer.parts, *differences]), lines


def _difference(e: IsoParams) -> str:
    return f"gated d_ff {e.gated_d_ff:,} and plain d_ff {e.plain_d_ff:,} differ by {e.difference_percent:+.2f} %"


def _require_agreement(models: Sequence[Resolved]) -> None:
    """Raise FFNError (exit 1) if a config and its tensors disagree."""
    wrong = [(resolved, difference) for resolved in models for difference in resolved.differences]
    if wrong:
        resolved, first = wrong[0]
        more = f"; and {len(wrong) - 1} more, which --json lists" if len(wrong) > 1 else ""
        raise FFNError(f"{resolved.model.name}: {first}{more}", code=ExitCode.FAILED)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def _require_one(counted: CountOptions, question: FigureQuestion) -> None:
    """Raise FFNError if --sweep is given and an option has several values although --sweep accepts only one."""
    if len(counted.sources) > 1:
        raise FFNError(f"{option('sweep')} takes one SOURCE", "give one, or dimensions alone")
    if len(question.token_counts) > 1:
        hint = f"to vary them: {option('sweep', 'tokens=1,32,512')}"
        raise FFNError(f"{option('sweep')} takes one value of {option('tokens')}", hint)
    if len(question.formats) > 1:
        raise FFNError(f"{option('sweep')} takes one {option('dtype')}", "use one at a time")


def _swept(
    counted: CountOptions, dimensions: Dimensions, question: FigureQuestion
) -> tuple[list[Resolved], Answer, list[dict[str, Any]]]:
    """Return (the swept model, the answer with one row per combination, its CSV rows)."""
    from ffncli.models.counting.sweep import points, swept

    source = next(iter(counted.sources), None)
    reports = [
        (point, model, question.report(model, question.formats[0], point.tokens))
        for point, model in swept(source, dimensions, points(counted.sweep), load)
    ]
    rows = [{"sweep": dict(point.values), **one.row()} for point, _, one in reports]
    lines = [
        {**{f"sweep_{name}": text for name, text in point.values}, **line}
        for point, _, one in reports
        for line in one.lines()
    ]
    table = sweep_table([(point, one) for point, _, one in reports], bool(question.token_counts))
    answer = Answer("params", {"rows": rows}, csv_table(lines), [table], _CONVENTIONS)
    return [reports[0][1]] if source else [], answer, lines
