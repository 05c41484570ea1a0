"""`ffncli.compare`: run what `ffn compare` runs on two files, or on two results of several files each."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ffncli.bench.judge.compare import ResultComparison, Rules
from ffncli.bench.judge.compare import compare as compare_rows
from ffncli.bench.results.csv_file import is_results, read_rows
from ffncli.block.activations import known_names
from ffncli.errors import FFNError, option, shown
from ffncli.options.accept import FROM_ZERO, PATHS, listed, percentage
from ffncli.options.opt import Opt, Options, call, chosen
from ffncli.options.shared import Path as FilePath
from ffncli.run.corpus.question import recorded_routes
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.corpus.compare_routes import RoutesComparison
    from ffncli.run.saved.compare import TraceComparison

_results = partial(Opt, group="Results of ffn bench", daily=True)


@dataclass(frozen=True, kw_only=True)
class CompareQuestion(Options):
    """Compare two results of `ffn bench` (each side is one or more CSV files), two saved traces, or two routes.

    For results, each ratio is the time of `new` divided by the time of `base`, with a 95 % interval. `margin` (0.02: up
    to 2 % counts as the same) and `fail_if_slower` are fractions. A regression does not raise an error; it is listed in
    `regressions`. For traces, `first` is the first step whose relative error exceeds `tolerance` (which defaults by
    dtype). For routes, `rows` has a record for each layer: how many choices differ, at how many tokens, and by what
    margin. All comparisons have `frame()`, a DataFrame of the rows.

    Raises FFNError for other files, for results from different machines (unless `allow_mismatch` is set), and for
    traces of different blocks.
    """

    base: Annotated[
        FilePath | Iterable[FilePath],
        Opt(
            metavar="BASE",
            accepts=PATHS,
            help="Results of ffn bench (one or several: a.csv,b.csv), a saved trace, or routes of tokens to experts.",
        ),
    ] = field(kw_only=False)
    new: Annotated[
        FilePath | Iterable[FilePath] | None,
        Opt(metavar="NEW", accepts=PATHS, help="The same kind of file, to compare with BASE. Optional with --plot."),
    ] = field(default=None, kw_only=False)
    fail_if_slower: Annotated[
        float | None,
        _results(
            "--fail-if-slower",
            metavar="X%",
            accepts=percentage(zero=True),
            help="Exit 1 if a kernel is certainly more than X% slower, or no longer correct.",
        ),
    ] = None
    margin: Annotated[
        float | None,
        _results(
            "--margin", metavar="X%", accepts=percentage(zero=True),
            help="Differences up to X% count as the same. [default: 2%]",
        ),
    ] = None  # fmt: skip
    allow_mismatch: Annotated[
        bool,
        _results("--allow-mismatch", help="Compare results from different machines or versions; the gate is then off."),
    ] = False
    tolerance: Annotated[
        float | None,
        Opt(
            "--tolerance", accepts=FROM_ZERO, group="Saved traces", daily=True,
            help="Largest relative error allowed. [default: by dtype, such as 1e-5 for fp32 and 1e-2 for bf16]",
        ),
    ] = None  # fmt: skip

    @property
    def rules(self) -> Rules:
        """The rules for comparing results: which rows fail, and which differences count as the same."""
        return Rules(Rules.margin if self.margin is None else self.margin, self.fail_if_slower, self.allow_mismatch)


@package_errors()
def compared(question: CompareQuestion) -> ResultComparison | TraceComparison | RoutesComparison:
    """Compare the two sides of a question."""
    base, new = sides(question)
    if are_routes((base, new), chosen(question)):
        from ffncli.run.corpus.compare_routes import compare_routes
        from ffncli.run.corpus.routes import read_routes

        return compare_routes(read_routes(base[0]), read_routes(new[0]))
    if are_results((base, new), chosen(question)):
        return compare_results(base, new, question.rules)
    from ffncli.run.saved.compare import compare as compare_traces
    from ffncli.run.saved.saved import open_saved

    return compare_traces(open_saved(base[0]), open_saved(new[0]), question.tolerance)


compare = call(CompareQuestion, compared, "compare")


def sides(question: CompareQuestion) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files of BASE and of NEW. Raises FFNError for names that are not files."""
    if question.new is None:
        raise FFNError(f"{option('new')} is missing", "give two files, or one result of ffn bench with --plot")
    names = (listed(question.base), listed(question.new))
    return paths_of(names[0], names), paths_of(names[1], names)


def paths_of(side: Sequence[str], both: Sequence[Sequence[str]] = ()) -> tuple[Path, ...]:
    """Return the files of one side. Each entry of `side` is a name or a comma-separated list of names. Raises FFNError
    for names that are not files.

    If the names on `both` sides are all activations, the error suggests the command that compares activations.
    """
    names = [name for text in side for name in ([text] if _is_file(text) else text.split(","))]
    missing = [name for name in names if not _is_file(name)]
    if missing and both and all(name.lower().replace("-", "_") in known_names() for side in both for name in side):
        words = " ".join(name for side in both for name in side)
        raise FFNError("ffn compare compares files", f"did you mean `ffn activations {words}`?")
    if missing:
        what = "is not a file" if missing[0] and os.path.exists(os.path.expanduser(missing[0])) else "does not exist"
        hint = "make results with ffn bench --save FILE.csv, a trace with ffn trace --save FILE"
        raise FFNError(f"{shown(missing[0], 200)} {what}", hint)
    if not names:
        raise FFNError("one side has no files", "give one file, or several results")
    return tuple(Path(os.path.expanduser(name)) for name in names)


def _is_file(name: str) -> bool:
    return bool(name) and os.path.isfile(os.path.expanduser(name))


def are_routes(sides: Sequence[Sequence[Path]], options: Collection[str]) -> bool:
    """Return True if each side is one file of routes. Raises FFNError if only one is, or for an option of results."""
    kinds = [len(paths) == 1 and recorded_routes(str(paths[0]), traces=False) is not None for paths in sides]
    if any(kinds) and not all(kinds):
        other = shown(",".join(map(str, sides[kinds.index(False)])), 200)
        raise FFNError(f"{other} is not a file of routes, the other side is", "give two files of the same kind")
    if all(kinds) and (wrong := [name for name in options if name not in ("base", "new")]):
        raise FFNError(f"{option(wrong[0])} is not for routes", "leave it out")
    return all(kinds)


def are_results(sides: Sequence[Sequence[Path]], options: Collection[str]) -> bool:
    """Return True if both sides are results of `ffn bench`, and False if each side is one saved trace.

    Raises FFNError for other files, and if `options` includes an option that only applies to the other kind of file.
    """
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
        raise FFNError(f"{names[0]} holds {first}, {names[1]} holds {second}", "give two files of the same kind")
    if kinds[0] and "tolerance" in options:
        hint = f"for results, {option('margin')} sets what counts as the same"
        raise FFNError(f"{option('tolerance')} is for saved traces", hint)
    other = next((name for name in options if name not in ("base", "new", "tolerance")), None)
    if not kinds[0] and other is not None:
        hint = f"two saved traces are compared within {option('tolerance')}"
        raise FFNError(f"{option(other)} is for results of ffn bench", hint)
    return kinds[0]


def compare_results(base: Sequence[Path], new: Sequence[Path], rules: Rules) -> ResultComparison:
    """Compare the rows of the files. Raises FFNError for files without rows."""
    rows = [[row for path in paths for row in read_rows(path)] for paths in (base, new)]
    for paths, side in zip((base, new), rows, strict=True):
        if not side:
            raise FFNError(f"{shown(','.join(map(str, paths)), 200)} holds no rows", "the run did not finish any case")
    return compare_rows(rows[0], rows[1], rules)
