"""`--tp` and `--ep`: a block over ranks, as a readable page and as rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.tensors import Excerpt, edges
from ffncli.show.text import pad, plural, width

if TYPE_CHECKING:
    from ffncli.run.measure.gap import Agreement
    from ffncli.run.ranks.one_process import Collective, RankTrace
    from ffncli.run.trace.session import Session

_FORMULA = 44  # columns; after a longer formula the shapes follow on the next line
_MOST_COLUMNS = 78
_MOST_RANKS = 4  # ranks whose tensors the page shows; JSON has all ranks
_NAMES = {
    "column": "column-parallel (outputs split; distributed-llama: Row Matmul)",
    "row": "row-parallel (inputs split; distributed-llama: Col Matmul)",
    "experts": "each rank has some of the experts",
    "copied": "copied to every rank",
    "rank 0": "on the first rank only, so that it is added only once",
}


def ranks_parts(session: Session, digits: int) -> list[Part]:
    """Show one rank's computation on its slices, then the parts and the result of every collective, then the bytes that
    are sent."""
    ranks = session.over_ranks
    if ranks is None:
        return []
    world = ranks.tp * ranks.ep
    grid = " × ".join(f"{name} {n}" for name, n in (("tp", ranks.tp), ("ep", ranks.ep)) if n > 1)
    title = f"over {world} {plural('rank', world)}"
    parts: list[Part] = [Heading(title, grid), *_steps(ranks), *_shares(ranks)]
    for one in ranks.collectives:
        parts += _collective(one, ranks, digits)
    parts.append(Heading(f"{_counts(ranks)}"))
    if all(one.step != ranks.output for one in ranks.collectives):
        parts.append(Line(f"{ranks.output} compared with the whole block: {_apart(ranks.agreement)}"))
    return [*parts, *_wire(ranks)]


def _steps(ranks: RankTrace) -> list[Part]:
    """Show rank 0's steps, with the shapes of its weights as W[in, out], and the name of each split."""
    left, right = [], []
    for step in ranks.steps:
        shape = "" if step.shape is None else str(list(step.shape)) + (", partial" if step.partial else "")
        weights = ", ".join(f"{one.symbol} {list(one.shape)}" for one in step.weights)
        left.append(f"{step.name} = {step.formula}")
        right.append(" → ".join(filter(None, (weights, shape))))
    wide = max((width(text) for text in left if width(text) <= _FORMULA), default=0)
    parts: list[Part] = [Heading("rank 0", "its slices as W[in, out], and the shape of the result")]
    for formula, shapes in zip(left, right, strict=True):
        line = f"{pad(formula, wide)}  {shapes}".rstrip()
        if width(formula) <= wide and width(line) <= _MOST_COLUMNS:
            parts.append(Line(line))
        else:
            parts += [Line(formula), *([Line(f"    {shapes}")] if shapes else [])]
    return [*parts, *_places(ranks)]


def _places(ranks: RankTrace) -> list[Part]:
    """List the matrices per way to split, as in `W1, W3: column-parallel ...`; shared experts use the same symbols."""
    places: dict[str, dict[str, None]] = {}
    for one in (weight for step in ranks.steps for weight in step.weights):
        for word in one.place.split(", "):
            places.setdefault(word, {})[one.symbol.rpartition(".")[2]] = None
    return [Line(f"{', '.join(symbols)}: {_NAMES[word]}", quiet=True) for word, symbols in places.items()]


def _shares(ranks: RankTrace) -> list[Part]:
    """Show one row per rank: its experts, the rows that they receive, what it stores and sends."""
    some = [ranks.shares[at] for at in edges(len(ranks.shares), 2 * _MOST_RANKS)]
    columns: dict[str, list[object]] = {"rank": [str(one.rank) for one in some], "parameters": [s.params for s in some]}
    if ranks.ep > 1:
        columns["tokens"] = [one.tokens for one in some]
        columns["experts"] = [_numbers(one.experts) for one in some]
        columns["rows"] = [one.rows for one in some]
    if ranks.tp > 1:
        columns["ring all-reduce"] = [ceil(one.ring_all_reduce_bytes) for one in some]
    if ranks.ep > 1:
        columns["dispatch"] = [one.dispatch_bytes for one in some]
        columns["combine"] = [one.combine_bytes for one in some]
    rows = list(zip(*columns.values(), strict=True))
    more = len(ranks.shares) - len(some)
    left = [Line(f"{more} more ranks: --json lists all", quiet=True)] if more else []
    return [Table(tuple(columns), rows, f"parameters of each rank, and bytes that it sends ({ranks.dtype})"), *left]


def _numbers(numbers: Sequence[int]) -> str:
    """Return text such as `4-7` for a rank's experts, whose indices are always consecutive."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))


def _collective(one: Collective, ranks: RankTrace, digits: int) -> list[Part]:
    """Show the ranks' parts, then the combined result, with its distance from the result of the whole block."""
    reduces = one.kind == "all-reduce"
    what = "partial sum" if reduces else "results of its experts"
    parts: list[Part] = []
    for at in edges(len(one.parts), _MOST_RANKS):
        part = one.parts[at]
        parts.append(Heading(f"rank {part.rank}: {one.step}, {what}", str(list(part.shape))))
        parts.append(Excerpt(part.shape, part.values_index, part.values, digits, part.tokens))
    if len(one.parts) > _MOST_RANKS:
        parts.append(Line(f"{len(one.parts) - _MOST_RANKS} more ranks: --json lists all", quiet=True))
    how = f"sum over {ranks.tp} ranks" if reduces else f"combined from {len(one.parts)} ranks"
    parts.append(Heading(f"{one.output}: {how}", str(list(one.shape))))
    parts.append(Excerpt(one.shape, one.values_index, one.values, digits))
    return [*parts, Line(f"compared with the whole block: {_apart(one.agreement)}", quiet=True)]


def _apart(agreement: Agreement) -> str:
    """Return text such as `error 1.2e-07, relative 3.1e-07, 2 ulps`."""
    ulps = "" if agreement.ulps is None else f", {agreement.ulps:.3g} ulps"
    return f"error {agreement.max_error:.3g}, relative {agreement.relative_error:.3g}{ulps}"


def _counts(ranks: RankTrace) -> str:
    """Return text such as `collectives: 1 all-reduce` or `collectives: 1 all-reduce, 2 all-to-alls`."""
    named = (("all-reduce", ranks.all_reduces), ("all-to-all", ranks.all_to_alls))
    return "collectives: " + (", ".join(f"{n} {plural(name, n)}" for name, n in named if n) or "none")


def _wire(ranks: RankTrace) -> list[Part]:
    """Show the bytes sent, how these grow with the number of ranks, and the cost of the unneeded all-gather."""
    parts: list[Part] = []
    if ranks.tp > 1:
        parts.append(Line("No all-gather is needed before W2: each rank already has its inputs;"))
        parts.append(Line(f"it would cost {ranks.unneeded_all_gather_bytes:,} bytes from each rank"))
    if ranks.ep > 1:
        parts.append(Line(f"dispatch with even routing: {ranks.expected_dispatch_bytes:,.0f} bytes from each rank"))
    if ranks.wire:
        rows = [(str(one.ranks), ceil(one.ring_all_reduce_bytes), one.gather_and_sum_bytes) for one in ranks.wire]
        title = f"Bytes that each of n ranks sends to sum {ranks.reduced_bytes:,} bytes"
        parts.append(Table(("n", "ring all-reduce", "gather and sum (distributed-llama)"), rows, title))
        parts.append(Line("ring: 2 (n - 1) / n times these bytes, below 2; gather and sum: n - 1 times", quiet=True))
    return parts
