"""`ffn params`."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffncli.block import dtypes, storage, traffic
from ffncli.block.cost import CONVENTIONS
from ffncli.block.dtypes import DType
from ffncli.cli import assertions
from ffncli.cli.options import DimensionOptions, OutputOptions, TokenListOptions, positive, spread
from ffncli.cli.params_tables import parts_of, sweep_table
from ffncli.errors import ExitCode, FFNError
from ffncli.models import catalog
from ffncli.models.costs import TokenCost, ridge_tokens, token_costs
from ffncli.models.count import ModelCount, count
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Model
from ffncli.run.sources import load
from ffncli.show.output import Output
from ffncli.show.parts import Answer
from ffncli.show.tables import Table

# Sweeps, twins and splits are imported where they are asked for.
if TYPE_CHECKING:
    from ffncli.models.tensor_parallel import Split

_CONVENTIONS = {**CONVENTIONS, **storage.CONVENTIONS, **traffic.CONVENTIONS}
_MANY = ("groups", "evidence", "differences")  # keys that hold more than one value
KEYS = tuple(f.name for f in fields(ModelCount) if f.name not in _MANY)

_Texts = list[str] | None


@spread
def command(
    *,
    sources: Annotated[
        _Texts,
        typer.Argument(metavar="SOURCE", help="Names, paths, hf://org/name, 512x2048:gelu, my.py:Class (runs it)."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every known model.")] = False,
    asserted: Annotated[
        _Texts, typer.Option("--assert", metavar="TEXT", help="'ffn_params_total == 4328521728'; exit 1 if not.")
    ] = None,
    sweep: Annotated[
        _Texts, typer.Option("--sweep", metavar="NAME=A,B", help="d_ff=1x,2x,4x, tokens=1,32, ...; repeatable.")
    ] = None,
    iso_params: Annotated[bool, typer.Option("--iso-params", help="Beside its gated or plain twin, of equal size.")] = (
        False
    ),
    multiple_of: Annotated[
        int | None,
        typer.Option(
            "--multiple-of", metavar="M", parser=positive("--multiple-of"), help="The twin's d_ff, rounded up."
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", "--tensor-parallel", metavar="N", parser=positive("--tp", 65536), help="Split over N ranks."
        ),
    ] = None,
    ridge: Annotated[
        float | None, typer.Option("--ridge", metavar="X", help="From how many tokens on: X FLOPs per byte.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="NAME", help="Weights in fp32, bf16, fp8, q4_0, mxfp4, ...; default as stored."
        ),
    ] = None,
    tokens: TokenListOptions,
    dimensions: DimensionOptions,
    show: OutputOptions,
) -> None:
    """Count parameters, FLOPs and bytes, per layer and in total; several sources side by side.

    Try: ffn params llama-2-7b mixtral-8x7b, ffn params ./my-model
    """
    output = show.output()
    said = dimensions.dimensions()
    weights = dtypes.storage(dtype) if dtype is not None else None  # a wrong one is said before anything is read
    conditions = assertions.parse(asserted or [], KEYS)
    numbers = tokens.numbers()
    if sweep:
        _refuse_beside_sweep(sources, everything, iso_params, tp, ridge)
        answer = _swept(sources[0] if sources else None, said, sweep, dtype, numbers)
        output.show(answer)
        assertions.check(conditions, answer.body["rows"])
        return
    models = _models(sources, everything, said, iso_params, multiple_of)
    _notes(models, output)
    answer = answer_for(models, dtype, weights, numbers, tp, ridge)
    output.show(answer)
    assertions.check(conditions, answer.body["rows"])
    _demand_agreement(models)


def answer_for(
    models: list[Model], dtype: str | None = None, weights: DType | None = None, tokens: tuple[int, ...] = (),
    ranks: int | None = None, ridge: float | None = None,
) -> Answer:  # fmt: skip
    """The records as JSON rows, CSV rows and tables. Costs, splits and ridges are there where they were asked for."""
    counts, rows, conventions = [], [], _CONVENTIONS
    if ranks:
        from ffncli.models import tensor_parallel

        conventions = {**_CONVENTIONS, **tensor_parallel.CONVENTIONS}
    costs: list[tuple[TokenCost, ...]] = []
    splits: list[Split | None] = []
    ridges: list[int | None] = []
    for model in models:
        row = weights or dtypes.find_storage(model.dtype or "fp32") or dtypes.dtype("bf16")
        counts.append(count(model, dtype, tokens[0] if tokens else 1))
        splits.append(tensor_parallel.split(model, ranks, row, tokens[0] if tokens else 1) if ranks else None)
        costs.append(token_costs(model, row, tokens or (1,), ranks or 1))
        ridges.append(ridge_tokens(model, row, ridge, ranks or 1) if ridge is not None else None)
        more: dict[str, Any] = {"costs": [asdict(cost) for cost in costs[-1]]}
        more |= {"tensor_parallel": asdict(splits[-1])} if splits[-1] else {}
        more |= {"ridge_tokens": ridges[-1]} if ridge is not None else {}
        rows.append({**asdict(counts[-1]), **more})
    parts = parts_of(counts, costs if tokens or ranks else [], [s for s in splits if s], ridge, ridges)
    return Answer("params", {"rows": rows}, _flat(counts), parts, conventions)


def _models(
    sources: _Texts, everything: bool, said: Dimensions, iso_params: bool, multiple_of: int | None
) -> list[Model]:
    if multiple_of is not None and not iso_params:
        raise FFNError("--multiple-of needs --iso-params", "it rounds the twin's d_ff")
    if everything and sources:
        raise FFNError("--all and a SOURCE contradict each other", "give one or the other")
    names = catalog.names() if everything else sources
    models = [load(name, said) for name in names] if names else [load(None, said)]
    if iso_params:
        from ffncli.models.iso_params import counterparts

        models = [twin for model in models for twin in (model, counterparts(model, multiple_of or 1))]
    return models


def _notes(models: list[Model], output: Output) -> None:
    for model in models:
        for note in model.notes:
            output.note(f"{model.name}: {note}" if len(models) > 1 else note)


def _demand_agreement(models: list[Model]) -> None:
    """Raises FFNError, exit 1, where a config and the tensors beside it disagree."""
    wrong = [(model, difference) for model in models for difference in model.differences]
    if wrong:
        model, first = wrong[0]
        more = f"; and {len(wrong) - 1} more, which --json lists" if len(wrong) > 1 else ""
        raise FFNError(f"{model.name}: {first}{more}", code=ExitCode.FAILED)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def _refuse_beside_sweep(
    sources: _Texts, everything: bool, iso_params: bool, tp: int | None, ridge: float | None
) -> None:
    if everything or (sources and len(sources) > 1):
        raise FFNError("--sweep takes one SOURCE", "give one, or dimensions alone")
    said = [name for name, on in (("--iso-params", iso_params), ("--tp", tp), ("--ridge", ridge)) if on]
    if said:
        raise FFNError(f"--sweep and {said[0]} do not go together", "ask for one at a time")


def _swept(
    source: str | None, said: Dimensions, sweep: list[str], dtype: str | None, tokens: tuple[int, ...]
) -> Answer:
    """One row for each combination: what was swept, then the counts."""
    from ffncli.models.sweep import points, swept

    found = [
        (point, count(model, dtype, point.tokens or (tokens[0] if tokens else 1)))
        for point, model in swept(source, said, points(sweep))
    ]
    rows = [{"sweep": dict(point.values), **asdict(c)} for point, c in found]
    names = [name for name, _ in found[0][0].values]
    flat = _flat([c for _, c in found])
    swept_rows = [(*(text for _, text in point.values), *row) for (point, _), row in zip(found, flat.rows, strict=True)]
    table = Table((*(f"sweep_{name}" for name in names), *flat.columns), swept_rows)
    return Answer("params", {"rows": rows}, table, [sweep_table(names, found)], _CONVENTIONS)


def _flat(counts: list[ModelCount]) -> Table:
    names = [f.name for f in fields(ModelCount) if f.name != "groups"]
    return Table(tuple(names), [tuple(getattr(c, name) for name in names) for c in counts])
