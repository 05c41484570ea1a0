"""`ffn params`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffncli.block import dtypes, shard, storage, traffic
from ffncli.block.cost import CONVENTIONS
from ffncli.block.dtypes import DType
from ffncli.cli import assertions
from ffncli.cli.options import DimensionOptions, OutputOptions, TokenListOptions, above_zero, positive, spread
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

_CONVENTIONS = {**CONVENTIONS, **storage.CONVENTIONS, **traffic.CONVENTIONS, **shard.CONVENTIONS}
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
        float | None,
        typer.Option(
            "--ridge", metavar="X", parser=above_zero("--ridge"), help="From how many tokens on: X FLOPs per byte."
        ),
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
        _refuse_beside_sweep(sources, everything, iso_params or multiple_of is not None, tp, ridge)
        if len(numbers) > 1:
            raise FFNError("--sweep takes one number of --tokens", "to vary them: --sweep tokens=1,32,512")
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
    """The records as JSON rows, CSV rows and tables. CSV has a row for each number of tokens."""
    found = [_costed(model, dtype, weights, tokens or (1,), ranks, ridge) for model in models]
    rows = [row.json(ridge is not None) for row in found]
    costs = [row.costs for row in found] if tokens or ranks else []
    splits = [row.split for row in found if row.split]
    parts = parts_of([row.count for row in found], costs, splits, ridge, [row.ridge_tokens for row in found])
    return Answer(
        "params", {"rows": rows}, _flat([line for row in found for line in row.csv(dtype)]), parts, _CONVENTIONS
    )


@dataclass(frozen=True)
class _Costed:
    """One source with what was asked for beside its counts; no costs where nothing says how many experts work."""

    model: Model
    count: ModelCount
    costs: tuple[TokenCost, ...]
    split: Split | None
    ridge_tokens: int | None

    def json(self, ridge: bool) -> dict[str, Any]:
        """The row: counts, costs for each number of tokens, the split and the ridge where they were asked for."""
        more: dict[str, Any] = {"costs": [asdict(cost) for cost in self.costs]}
        more |= {"tensor_parallel": asdict(self.split)} if self.split else {}
        more |= {"ridge_tokens": self.ridge_tokens} if ridge else {}
        return {**asdict(self.count), **more}

    def csv(self, dtype: str | None) -> list[dict[str, Any]]:
        """The rows, one for each number of tokens."""
        split = {name: getattr(self.split, name) for name in _OF_SPLIT} if self.split else {}
        out = []
        for cost in self.costs or (None,):
            again = cost is not None and cost.tokens != self.count.tokens
            counted = count(self.model, dtype, cost.tokens) if cost and again else self.count
            out.append({**_plain(counted), **{name: getattr(cost, name, None) for name in _OF_COST}, **split})
        return out


_OF_COST = (
    "experts_touched", "weight_bytes_read", "activation_bytes", "activation_bytes_fused", "flops_per_byte",
    "flops_per_byte_fused",
)  # fmt: skip
_OF_SPLIT = (
    "ranks", "rank_0_params_total", "other_rank_params_total", "rank_0_weight_bytes_total",
    "other_rank_weight_bytes_total", "ring_all_reduce_bytes_per_token", "all_gather_bytes_per_token",
)  # fmt: skip


def _costed(
    model: Model, dtype: str | None, weights: DType | None, tokens: tuple[int, ...], ranks: int | None,
    ridge: float | None,
) -> _Costed:  # fmt: skip
    # what a packed format of a file moves per weight is not modelled: bf16 stands for it, and the table says so
    row = weights or dtypes.find_storage(model.dtype or "fp32") or dtypes.dtype("bf16")
    known = "top_k" not in model.unknown  # else nothing says how many experts work
    over = _split(model, row, tokens[0], ranks) if ranks else None  # first: it says which numbers of ranks would do
    return _Costed(
        model,
        count(model, dtype, tokens[0]),
        token_costs(model, row, tokens, ranks or 1) if known else (),
        over,
        ridge_tokens(model, row, ridge, ranks or 1) if known and ridge is not None else None,
    )


def _split(model: Model, weights: DType, tokens: int, ranks: int) -> Split:
    from ffncli.models.tensor_parallel import split

    return split(model, ranks, weights, tokens)


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
    lines = [{**{f"sweep_{name}": text for name, text in point.values}, **_plain(c)} for point, c in found]
    return Answer("params", {"rows": rows}, _flat(lines), [sweep_table(names, found)], _CONVENTIONS)


def _plain(c: ModelCount) -> dict[str, Any]:
    """A row without its groups."""
    return {f.name: getattr(c, f.name) for f in fields(ModelCount) if f.name != "groups"}


def _flat(lines: list[dict[str, Any]]) -> Table:
    return Table(tuple(lines[0]), [tuple(line.values()) for line in lines])
