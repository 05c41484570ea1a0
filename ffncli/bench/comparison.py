"""`ffncli.compare`: what `ffn compare` does, as a call with the command line's names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.bench.judge.compare import compare as compare_rows
from ffncli.bench.judge.comparison_records import ResultComparison, Rules
from ffncli.bench.results.csv_file import is_results, read_rows
from ffncli.errors import FFNError, shown
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.saved.compare import TraceComparison

_FilePath = str | os.PathLike[str]


@package_errors()
def compare(
    base: _FilePath | Iterable[_FilePath],
    new: _FilePath | Iterable[_FilePath],
    *,
    tolerance: float | None = None,
    margin: float | None = None,
    fail_if_slower: float | None = None,
    allow_mismatch: bool = False,
) -> ResultComparison | TraceComparison:
    """Compare two results of `ffn bench` (files of CSV, one or several per side), or two saved traces.

    Of results, ratios are the times of `new` over those of `base`, with 95 % intervals; `margin` (0.02: up to 2 % count
    as the same) and `fail_if_slower` are shares, and nothing raises for a regression: see `regressions`. Of traces,
    `first` is the first step whose relative error exceeds `tolerance` (default: by dtype). Both have `frame()`, a
    DataFrame of the rows.

    Raises FFNError for other files, for results of different machines without `allow_mismatch`, and for traces of
    different blocks.
    """
    sides = [_paths(base), _paths(new)]
    if are_results(sides):
        if tolerance is not None:
            raise FFNError("tolerance is for saved traces", "for results, margin sets what counts as the same")
        rules = Rules(Rules.margin if margin is None else margin, fail_if_slower, allow_mismatch)
        return compare_results(sides[0], sides[1], rules)
    if (margin, fail_if_slower, allow_mismatch) != (None, None, False):
        raise FFNError(
            "margin, fail_if_slower and allow_mismatch are for results of ffn bench", "for traces: tolerance"
        )
    from ffncli.run.saved.compare import compare as compare_traces
    from ffncli.run.saved.saved import open_saved

    return compare_traces(open_saved(sides[0][0]), open_saved(sides[1][0]), tolerance)


def are_results(sides: Sequence[Sequence[Path]]) -> bool:
    """Whether both sides are results of `ffn bench`; else each is one saved trace. Raises FFNError for other files."""
    kinds = []
    for paths in sides:
        are = [is_results(path) for path in paths]
        if not all(are) and len(paths) > 1:
            name = str(paths[are.index(False)])
            raise FFNError(f"{shown(name, 200)} is not a CSV", "only results may have several files per side")
        kinds.append(all(are))
    if kinds[0] != kinds[1]:
        names = [shown(",".join(map(str, paths)), 200) for paths in sides]
        first, second = ("results" if kind else "a saved trace" for kind in kinds)
        raise FFNError(f"{names[0]} holds {first}, {names[1]} {second}", "give two of one kind")
    return kinds[0]


def compare_results(base: Sequence[Path], new: Sequence[Path], rules: Rules) -> ResultComparison:
    """The rows of files, compared. Raises FFNError for files without rows."""
    rows = [[row for path in paths for row in read_rows(path)] for paths in (base, new)]
    for paths, side in zip((base, new), rows, strict=True):
        if not side:
            raise FFNError(f"{shown(','.join(map(str, paths)), 200)} holds no rows", "the run did not finish any case")
    return compare_rows(rows[0], rows[1], rules)


def _paths(files: _FilePath | Iterable[_FilePath]) -> list[Path]:
    several = [files] if isinstance(files, (str, os.PathLike)) else [*files]
    paths = [Path(os.path.expanduser(file)) for file in several]
    if missing := next((path for path in paths if not path.is_file()), None):
        raise FFNError(
            f"{shown(str(missing), 200)} is not a file", "make it with ffn bench --save, or ffn trace --save"
        )
    if not paths:
        raise FFNError("a side without files", "give one file, or several results")
    return paths
