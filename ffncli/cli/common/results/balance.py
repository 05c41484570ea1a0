"""One line on what bounds each case, the arithmetic or the memory, and where the machine's ridge lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ffncli.bench.results.row import ResultRow
from ffncli.show.parts import Line

_MOST_NAMED = 6


def balance(rows: Sequence[ResultRow], names: Mapping[str, str]) -> list[Line]:
    """`memory bound: 1, 4; compute bound: 64; ridge 13.2 FLOP/byte, measured in this run`.

    `names` are the cases by their keys, without a comma; of a single case the line has its FLOPs per byte instead.
    Nothing where no rate is known.
    """
    first = {row.case: row for row in rows if row.bound and row.ridge_flops_per_byte}
    if not first:
        return []
    if len(names) == 1:
        (row,) = first.values()
        what = f"{row.bound} bound: {_intensity(row)}"
    else:
        what = "; ".join(_named(bound, [*first.values()], names) for bound in ("memory", "compute")).strip("; ")
    return [Line(f"{what}; {_ridge(rows)}", quiet=True)]


def _intensity(row: ResultRow) -> str:
    if row.flops_per_byte is None:
        return "the cache can hold all that it reads and writes"
    return f"{row.flops_per_byte:.3g} FLOP/byte from memory"


def _named(bound: str, rows: Sequence[ResultRow], names: Mapping[str, str]) -> str:
    """`memory bound: 1, 4`; empty where no case is."""
    cases = [names.get(row.case, row.case) for row in rows if row.bound == bound]
    if not cases:
        return ""
    if len(cases) == len(names):
        return f"all {bound} bound"
    more = f" and {len(cases) - _MOST_NAMED} more" if len(cases) > _MOST_NAMED else ""
    return f"{bound} bound: {', '.join(cases[:_MOST_NAMED])}{more}"


def _ridge(rows: Sequence[ResultRow]) -> str:
    """`ridge 13.2 to 14.1 FLOP/byte, measured in this run`; of a merged result, in these runs."""
    ridges = [row.ridge_flops_per_byte for row in rows if row.ridge_flops_per_byte]
    texts = list(dict.fromkeys(f"{ridge:.3g}" for ridge in (min(ridges), max(ridges))))
    measured = any(row.roof_fraction is not None for row in rows)
    runs = "this run" if len({row.run_id for row in rows}) == 1 else "these runs"
    return f"ridge {' to '.join(texts)} FLOP/byte, {f'measured in {runs}' if measured else 'by the data sheet'}"
