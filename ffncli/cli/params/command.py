"""`ffn params`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncli.block import dtypes, shard, storage, traffic
from ffncli.block.analysis.flow import flow
from ffncli.block.cost import CONVENTIONS
from ffncli.block.recipe import steps
from ffncli.cli.common.devices_page import devices_answer
from ffncli.cli.common.load_options import LoadOptions
from ffncli.cli.common.options import OutputOptions, TokenListOptions
from ffncli.cli.common.parsers import joined
from ffncli.cli.common.rank_options import ExpertParallel, TensorParallel
from ffncli.cli.common.spread import spread
from ffncli.cli.params.options import (
    Asserted,
    AssertFile,
    EqualSize,
    Everything,
    Formats,
    MultipleOf,
    Ridge,
    Sources,
    Sweep,
    ridge_of,
)
from ffncli.cli.params.page import parts_of, sweep_table
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.models import catalog
from ffncli.models.counting import assertions
from ffncli.models.counting.figures import KEYS, FigureQuestion
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Resolved, ranges
from ffncli.run.user.load import load
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.system.files import read_whole

if TYPE_CHECKING:
    from ffncli.models.counting.iso_params import (
        IsoParams,  # sweeps, counterparts and splits are imported on request
    )

_CONVENTIONS = {**CONVENTIONS, **storage.CONVENTIONS, **traffic.CONVENTIONS, **shard.CONVENTIONS}
_Texts = list[str] | None

_MOST_CONDITION_BYTES = 10_000_000  # of --assert-file


@spread
def command(
    *,
    sources: Sources = None,
    everything: Everything = False,
    asserted: Asserted = None,
    assert_file: AssertFile = None,
    sweep: Sweep = None,
    iso_params: EqualSize = False,
    multiple_of: MultipleOf = None,
    tp: TensorParallel = None,
    ep: ExpertParallel = None,
    ridge: Ridge = None,
    dtype: Formats = None,
    tokens: TokenListOptions,
    dimensions: Dimensions,
    load_limit: LoadOptions,
    show: OutputOptions,
) -> None:
    """Count parameters, FLOPs and bytes, per layer and in total; several sources side by side.

    Examples:
      ffn params llama-2-7b mixtral-8x7b               # side by side
      ffn params ./my-model --dtype fp8 --tokens 1,32  # FLOPs and bytes of a call
      ffn params 512x2048:gelu --sweep d_ff=1x,2x,4x   # a row for each
      ffn params gpt2 --assert 'd_ff == 3072'          # in CI: exit 1 if not
    """
    output = show.output()
    if ridge == ["list"]:
        output.show(devices_answer("params"))
        return
    load_limit.apply()
    conditions = assertions.parse([*(asserted or []), *_lines_of(assert_file)], KEYS)
    overrides = dimensions
    options = FigureQuestion(_formats(joined(dtype)), tokens.numbers(), tp, *ridge_of(ridge), ep)
    if multiple_of is not None and not iso_params:
        raise FFNError("--multiple-of needs --iso-params", "it rounds the d_ff of the other block")
    if sweep:
        _check_sweep(sources, everything, iso_params, options)
        models, answer, lines = _swept(sources[0] if sources else None, overrides, sweep, options)
    else:
        models = _models(sources, everything, overrides)
        answer, lines = _with_twins(models, multiple_of or 1, options) if iso_params else answer_for(models, options)
    checked, several = assertions.check(conditions, lines), len(lines) > 1
    _notes(models, output)
    if not (checked and output.quiet and output.format == "table" and output.path is None):
        output.show(_with_assertions(answer, checked, several) if checked else answer)
    if output.format == "csv":
        output.notes(*(one.line(several) for one in checked if one.holds))
    assertions.require(checked, several)
    _require_agreement(models)


def _lines_of(path: str | None) -> list[str]:
    """The conditions in a file, one per line; `#` starts a comment."""
    if path is None:
        return []
    try:
        text = read_whole(Path(os.path.expanduser(path)), _MOST_CONDITION_BYTES, pipe=True).decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FFNError(f"--assert-file: cannot read {shown(path)}: {why}") from None
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _with_assertions(answer: Answer, checked: Sequence[assertions.CheckedAssertion], several: bool) -> Answer:
    """The answer with the assertions: one line each for people, all of them under `assertions` for JSON."""
    parts: list[Part] = [Heading("assertions"), *(Line(one.line(several)) for one in checked)]
    return answer.with_section("assertions", [asdict(one) for one in checked], parts)


def answer_for(models: list[Resolved], options: FigureQuestion) -> tuple[Answer, list[dict[str, Any]]]:
    """(JSON rows, CSV rows and tables; the CSV rows unchanged)."""
    reports = options.reports(models)
    lines = [line for one in reports for line in one.lines()]
    parts = parts_of(reports, costs=bool(options.tokens or options.ranks))
    if len(models) == 1 and not models[0].model.unknown:  # below the line with its widths
        parts[2:2] = _drawing(models[0])
    return Answer("params", {"rows": [one.row() for one in reports]}, _flat(lines), parts, _CONVENTIONS), lines


def _drawing(resolved: Resolved) -> list[Part]:
    """The flow of dimensions through the block; of several kinds, the one of most layers."""
    group = resolved.model.main
    where = f"{group.stack} {ranges(group.layers)}:"
    return [
        *([Line(where, quiet=True)] if len(resolved.model.groups) > 1 else []),
        *(Line(line) for line in flow(steps(group.spec))),
    ]


def _formats(text: str | None) -> tuple[str | None, ...]:
    """The formats of `--dtype`, a comma-separated list; a wrong one is reported before anything is read."""
    return (None,) if text is None else tuple(dtypes.storage(name).name for name in text.split(","))


def _models(sources: _Texts, everything: bool, overrides: Dimensions) -> list[Resolved]:
    if everything and sources:
        raise FFNError("--all and a SOURCE contradict each other", "give one or the other")
    names = catalog.names() if everything else sources
    return [load(name, overrides) for name in names] if names else [load(None, overrides)]


def _with_twins(
    models: list[Resolved], multiple_of: int, options: FigureQuestion
) -> tuple[Answer, list[dict[str, Any]]]:
    """Each model next to its gated or plain counterpart, with the difference in size."""
    from ffncli.models.counting.iso_params import counterparts, iso_params

    answer, lines = answer_for(
        [twin for resolved in models for twin in (resolved, counterparts(resolved, multiple_of))], options
    )
    equal = [iso_params(resolved.model.main.spec, multiple_of) for resolved in models]
    differences = [Line(f"{resolved.model.name}: {_difference(e)}") for resolved, e in zip(models, equal, strict=True)]
    body = {
        **answer.body,
        "iso_params": [{"name": m.model.name, **asdict(e)} for m, e in zip(models, equal, strict=True)],
    }
    return replace(answer, body=body, parts=[*answer.parts, *differences]), lines


def _difference(e: IsoParams) -> str:
    return f"gated d_ff {e.gated_d_ff:,} and plain d_ff {e.plain_d_ff:,} differ by {e.difference_percent:+.2f} %"


def _notes(models: Sequence[Resolved], output: Output) -> None:
    for resolved in models:
        for note in resolved.notes:
            output.note(f"{resolved.model.name}: {note}" if len(models) > 1 else note)


def _require_agreement(models: Sequence[Resolved]) -> None:
    """Raises FFNError, exit 1, if a config and its tensors disagree."""
    wrong = [(resolved, difference) for resolved in models for difference in resolved.differences]
    if wrong:
        resolved, first = wrong[0]
        more = f"; and {len(wrong) - 1} more, which --json lists" if len(wrong) > 1 else ""
        raise FFNError(f"{resolved.model.name}: {first}{more}", code=ExitCode.FAILED)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def _check_sweep(sources: _Texts, everything: bool, iso_params: bool, options: FigureQuestion) -> None:
    if everything or (sources and len(sources) > 1):
        raise FFNError("--sweep takes one SOURCE", "give one, or dimensions alone")
    ridge = options.ridge is not None or bool(options.devices)
    others = [("--iso-params", iso_params), ("--tp", options.ranks), ("--ep", options.ep), ("--ridge", ridge)]
    for name, on in others:
        if on:
            raise FFNError(f"--sweep contradicts {name}", "use one at a time")
    if len(options.tokens) > 1:
        raise FFNError("--sweep takes one number of --tokens", "to vary them: --sweep tokens=1,32,512")
    if len(options.formats) > 1:
        raise FFNError("--sweep takes one --dtype", "use one at a time")


def _swept(
    source: str | None, overrides: Dimensions, sweep: list[str], options: FigureQuestion
) -> tuple[list[Resolved], Answer, list[dict[str, Any]]]:
    """(the swept model, the answer with one row for each combination, its CSV rows)."""
    from ffncli.models.counting.sweep import points, swept

    reports = [
        (point, model, options.report(model, options.formats[0], point.tokens))
        for point, model in swept(source, overrides, points(sweep), load)
    ]
    rows = [{"sweep": dict(point.values), **one.row()} for point, _, one in reports]
    lines = [
        {**{f"sweep_{name}": text for name, text in point.values}, **line}
        for point, _, one in reports
        for line in one.lines()
    ]
    table = sweep_table([(point, one) for point, _, one in reports], bool(options.tokens))
    answer = Answer("params", {"rows": rows}, _flat(lines), [table], _CONVENTIONS)
    return [reports[0][1]] if source else [], answer, lines


def _flat(lines: list[dict[str, Any]]) -> Table:
    return Table(tuple(lines[0]), [tuple(line.values()) for line in lines])
