"""One line over time per machine, case and kernel of many stored results, and the runs at which its time changed.

The statistical unit is the run: its value is the mean log time of its processes. A line is split where two means fit it
best: |t| of the pooled t test, largest over all splits. Its p-value is multiplied by the number of splits (Bonferroni),
and a line is split only below ALPHA divided by the number of lines. So a history in which nothing changed shows any
change with a probability of at most ALPHA, if its runs are independent. Each side of a split is then searched at half
the level (A. J. Scott and M. Knott, Biometrics 30 (1974) 507-512). Where a straight line leaves a smaller sum of
squares than the two means, the change is a drift, not a jump. Correlated neighbours divide t by √((1 + r)/(1 − r)), as
in `standard_error`. If every run has anchor times, the times divided by them must show the same change: the smaller |t|
counts, so that a kernel on a machine that became slower has not changed.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ffncli.bench.judge.environment_match import name_of_case, runs_of
from ffncli.bench.judge.statistics import (
    CONFIDENCE,
    autocorrelation,
    exp_or_inf,
    mean,
    t_interval,
    t_quantile,
    t_sf,
    widening,
)
from ffncli.bench.results.csv_file import is_rows, read_rows
from ffncli.bench.results.row import ResultRow, columns
from ffncli.errors import FFNError, shown
from ffncli.system.notebook import record_table
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

ALPHA = 0.05  # the chance of any change in a history without one
FEWEST = 6  # runs in a line that is tested
_EDGE = 2  # runs on each side of a change
_MACHINE = ("cpu", "isa", "device_name", "gpu_uuid", "mig", "power_limit_w", "launch")
_SOFTWARE = tuple(
    name for name in columns("environment") if name not in _MACHINE and name not in ("host", "persistence")
)
CONVENTIONS = {
    "time_s": "geometric mean over the processes of a run, with a 95 % t interval",
    "changes": f"found by a t test at {ALPHA:g} over all lines: the chance that a history without a change shows any",
    "ratio": "time after the change over the time before it, with its 95 % interval; of a drift, last run over first",
}


@dataclass(frozen=True)
class HistoryRun:
    """One run of a line: its time with the interval over processes (None for one process), and its anchor's time."""

    run_id: str
    started_utc: str
    commit: str
    ffncli: str
    time_s: float
    time_low_s: float | None
    time_high_s: float | None
    anchor_s: float | None


@dataclass(frozen=True)
class ChangePoint:
    """A change between the runs `first - 1` and `first` of a line (a drift: from the run `first` to the run `last`).

    `ratio` is the time after the change over the time before. `p` is the p-value, corrected for the splits of its line
    and for the lines. `also` lists what else differs between the two runs (a drift: its ends), as in `torch: 2.9, then
    2.10`.
    """

    kind: Literal["jump", "drift"]
    first: int
    last: int
    ratio: float
    ratio_low: float
    ratio_high: float
    p: float
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistoryLine:
    """The runs of one machine, case and kernel in order of time, with the changes in the same order.

    `untested` says why no change was looked for; "" if it was. `anchored`: the times per anchor show the changes, too.
    """

    machine: str
    case: str
    kernel: str
    runs: tuple[HistoryRun, ...]
    anchored: bool
    changes: tuple[ChangePoint, ...] = ()
    untested: str = ""

    def slower(self, threshold: float) -> bool:
        """Return whether the last change is certainly a slowdown of more than `threshold`, a fraction."""
        return bool(self.changes) and self.changes[-1].ratio_low > 1 + threshold


@dataclass(frozen=True)
class History:
    """The lines of many results, in the order in which their kernels first ran. `skipped` are matched files that are
    not results; `threshold` is --fail-if-slower, None without a gate."""

    files: tuple[str, ...]
    skipped: tuple[str, ...]
    threshold: float | None
    lines: tuple[HistoryLine, ...]

    @property
    def slowdowns(self) -> tuple[HistoryLine, ...]:
        """The lines that fail the gate."""
        return tuple(line for line in self.lines if self.threshold is not None and line.slower(self.threshold))

    @package_errors()
    def frame(self) -> DataFrame:
        """Return a data frame, a row per line and run, as in the CSV. Raises FFNError (exit 3) without pandas."""
        import pandas

        return pandas.DataFrame(list(self.rows()), columns=ROWS)

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Yield the cells of ROWS for each run of each line."""
        for line in self.lines:
            starts = {change.first: change for change in line.changes}
            for at, run in enumerate(line.runs):
                change = starts.get(at)
                yield (
                    line.machine, line.case, line.kernel, run.run_id, run.started_utc, run.commit, run.ffncli,
                    run.time_s, run.time_low_s, run.time_high_s, run.anchor_s,
                    *((change.kind, change.ratio, change.ratio_low, change.ratio_high, change.p) if change else _NONE),
                )  # fmt: skip

    def __repr__(self) -> str:
        changes = sum(len(line.changes) for line in self.lines)
        return f"<History of {len(self.files)} files: {len(self.lines)} lines, {changes} changes>"

    def _repr_html_(self) -> str:
        names = ("machine", "case", "kernel", "runs", "change", "ratio", "ratio_low", "ratio_high", "started_utc")
        rows = [
            (line.machine, line.case, line.kernel, len(line.runs), one.kind, one.ratio, one.ratio_low, one.ratio_high,
             line.runs[one.first].started_utc)
            for line in self.lines for one in line.changes
        ]  # fmt: skip
        return record_table(repr(self)[1:-1], names, rows)


ROWS = (
    "machine", "case", "kernel", "run_id", "started_utc", "commit", "ffncli", "time_s", "time_low_s", "time_high_s",
    "anchor_s", "change", "ratio", "ratio_low", "ratio_high", "p",
)  # fmt: skip
_NONE = (None,) * 5


def read_history(patterns: Sequence[str], threshold: float | None = None) -> History:
    """Read the results that the names and patterns (`results/*.csv`) match, and find the changes.

    Matched files that are not results of `ffn bench` are left out. Raises FFNError if none is, for a damaged one, and
    if a run has two results for one case and kernel.
    """
    names = dict.fromkeys(name for text in patterns for name in _matched(text))
    paths = [Path(name) for name in names if not name.endswith(".rounds.csv")]
    results = [path for path in paths if is_rows(path)]
    if not results:
        what = "is not a result of ffn bench" if paths else "matches no file"
        raise FFNError(f"{shown(', '.join(patterns), 200)} {what}", "give results: --history 'results/*.csv'")
    rows = [row for path in results for row in read_rows(path)]
    skipped = tuple(str(path) for path in paths if path not in results)
    return History(tuple(map(str, results)), skipped, threshold, history_lines(rows))


def _matched(text: str) -> list[str]:
    path = os.path.expanduser(text)
    return [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))


def history_lines(rows: Sequence[ResultRow]) -> tuple[HistoryLine, ...]:
    """Return the lines of these rows, with their changes. Rows that are not ok, or have no times, are left out."""
    machines: dict[str, list[ResultRow]] = {}
    for row in rows:
        if row.status == "ok" and row.process_times_s and all(row.process_times_s):
            names = dict.fromkeys(str(value) for name in _MACHINE if (value := getattr(row, name)))
            machines.setdefault(", ".join(names), []).append(row)
    lines, ordered = [], []
    for machine, some in machines.items():
        for group in runs_of("the history", some).values():
            runs = sorted(group, key=lambda row: row.started_utc)
            anchored = all(len(row.process_anchors_s) == len(row.process_times_s) for row in runs)
            lines.append(HistoryLine(machine, *name_of_case(runs[0]), tuple(map(_run, runs)), anchored))
            ordered.append(runs)
    tested = sum(len(line.runs) >= FEWEST for line in lines)
    return tuple(_searched(line, runs, ALPHA / max(tested, 1)) for line, runs in zip(lines, ordered, strict=True))


def _run(row: ResultRow) -> HistoryRun:
    times = t_interval([math.log(time) for time in row.process_times_s]).map(exp_or_inf)
    anchors = [math.log(time) for time in row.process_anchors_s if time]
    return HistoryRun(
        row.run_id, row.started_utc, row.commit, row.ffncli, times.value, times.low if times.bounded else None,
        times.high if times.bounded else None, math.exp(mean(anchors)) if anchors else None,
    )  # fmt: skip


# --- changes ----------------------------------------------------------------------------------------------------------


def _searched(line: HistoryLine, rows: Sequence[ResultRow], level: float) -> HistoryLine:
    """Return the line with its changes, if it has enough runs."""
    if len(rows) < FEWEST:
        return replace(line, untested=f"{len(rows)} of the {FEWEST} runs that a test needs")
    times = [math.log(run.time_s) for run in line.runs]
    views = [times]
    if line.anchored:
        views.append([t - math.log(run.anchor_s or 1.0) for t, run in zip(times, line.runs, strict=True)])
    ordered = sorted(find_changes(views, level), key=lambda one: one.first)
    jumps = [0, *(one.first for one in ordered if one.kind == "jump"), len(times)]
    changes = []
    for one in ordered:
        if one.kind == "jump":  # from the change before it to the change after it
            at = jumps.index(one.first)
            before, after = times[jumps[at - 1] : one.first], times[one.first : jumps[at + 1]]
            ratio, low, high = _pooled(before, after)
            one = replace(one, ratio=ratio, ratio_low=low, ratio_high=high)
        old, new = rows[one.first - (one.kind == "jump")], rows[one.last]
        changes.append(replace(one, also=_differences(old, new)))
    return replace(line, changes=tuple(changes))


def find_changes(views: Sequence[Sequence[float]], level: float, start: int = 0) -> list[ChangePoint]:
    """Return the changes of a series of logs, by the test that this file's first lines state. The `views` are the same
    runs in several ways (times, times per anchor), which must all show a change. `start` is the index of the first
    run. The p-values of the changes are multiplied by ALPHA / level, so that they compare with ALPHA."""
    n = len(views[0])
    if n < FEWEST:
        return []
    at, jump = _best_split(views)
    if not jump:
        return []
    lines = [_line(values) for values in views]
    steps = [_step(values, at) for values in views]
    drifts = all(_squares(line) < _squares(step) for line, step in zip(lines, steps, strict=True))
    drifts = drifts and len({slope > 0 for slope, _, _ in map(_slope, views)}) == 1
    left = lines if drifts else [[*_around_steps(values[:at]), *_around_steps(values[at:])] for values in views]
    wide = max(widening(autocorrelation(residuals)) for residuals in left)
    ts = [abs(slope) / error if error else math.inf for slope, error, _ in map(_slope, views)]
    t = (min(ts) if drifts else abs(jump)) / wide
    p = min(1.0, 2 * t_sf(t, n - 2) * (n - 2 * _EDGE + 1))
    if p > level:
        return []
    corrected = min(1.0, p * ALPHA / level)
    if drifts:
        slope, error, _ = _slope(views[0])
        half = t_quantile(0.5 + CONFIDENCE / 2, n - 2) * error * wide
        total, low, high = (exp_or_inf(value * (n - 1)) for value in (slope, slope - half, slope + half))
        return [ChangePoint("drift", start, start + n - 1, total, low, high, corrected)]
    here = ChangePoint("jump", start + at, start + at, *_pooled(views[0][:at], views[0][at:]), corrected)
    before = find_changes([values[:at] for values in views], level / 2, start)
    after = find_changes([values[at:] for values in views], level / 2, start + at)
    return [*before, here, *after]


def _best_split(views: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Return the split with the largest |t| that all views show, and the smallest of their t there; t = 0 if none."""
    fits = [_splits(values) for values in views]
    every = range(_EDGE, len(views[0]) - _EDGE + 1)
    alike = [at for at in every if len({fit[at] > 0 for fit in fits}) == 1]
    agreeing = {at: min((fit[at] for fit in fits), key=abs) for at in alike}
    at = max(agreeing, key=lambda one: abs(agreeing[one]), default=0)
    return at, agreeing.get(at, 0.0)


def _around_steps(values: Sequence[float]) -> list[float]:
    """Return what the best two means leave, without what another change would add to the correlation of neighbours."""
    at, _ = _best_split([values]) if len(values) > 2 * _EDGE else (0, 0.0)
    return _step(values, at) if at else [value - mean(values) for value in values]


def _splits(values: Sequence[float]) -> list[float]:
    """Return t of the pooled t test, after minus before, for a split before each index; infinite without a spread."""
    n, centre = len(values), mean(values)
    shifted = [value - centre for value in values]
    sums = [0.0, *accumulate(shifted)]
    total = math.fsum(value * value for value in shifted)
    out = [0.0]
    for at in range(1, n):
        before, after = sums[at] / at, (sums[n] - sums[at]) / (n - at)
        inside = total - at * before * before - (n - at) * after * after
        error = math.sqrt(max(inside, 0.0) / (n - 2) * (1 / at + 1 / (n - at)))
        out.append((after - before) / error if error else math.copysign(math.inf, after - before) * (after != before))
    return out


def _step(values: Sequence[float], at: int) -> list[float]:
    """Return what two means leave."""
    means = mean(values[:at]), mean(values[at:])
    return [value - means[index >= at] for index, value in enumerate(values)]


def _line(values: Sequence[float]) -> list[float]:
    """Return what a straight line leaves."""
    slope, _, centre = _slope(values)
    return [value - centre - slope * (index - (len(values) - 1) / 2) for index, value in enumerate(values)]


def _slope(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the slope per run of the least-squares line, its standard error, and the mean."""
    n, centre = len(values), mean(values)
    across = [index - (n - 1) / 2 for index in range(n)]
    square = math.fsum(x * x for x in across)
    slope = math.fsum(x * (y - centre) for x, y in zip(across, values, strict=True)) / square
    left = math.fsum((y - centre - slope * x) ** 2 for x, y in zip(across, values, strict=True))
    return slope, math.sqrt(left / (n - 2) / square), centre


def _squares(residuals: Sequence[float]) -> float:
    """Return the sum of squares."""
    return math.fsum(value * value for value in residuals)


def _pooled(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of geometric means with its 95 % interval, from logs whose spread is the same on both sides."""
    df = len(before) + len(after) - 2
    left = [*(v - mean(before) for v in before), *(v - mean(after) for v in after)]
    error = math.sqrt(_squares(left) / df * (1 / len(before) + 1 / len(after))) if df else math.inf
    half = t_quantile(0.5 + CONFIDENCE / 2, df) * error * widening(autocorrelation(left)) if df else math.inf
    shift = mean(after) - mean(before)
    return exp_or_inf(shift), exp_or_inf(shift - half), exp_or_inf(shift + half)


def _differences(before: ResultRow, after: ResultRow) -> tuple[str, ...]:
    """Return the software that differs between two runs, and their machines' names."""
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in (*_SOFTWARE, "host")]
    return tuple(f"{name}: {old or 'unknown'}, then {new or 'unknown'}" for name, old, new in pairs if old != new)
