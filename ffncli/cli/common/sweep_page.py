"""Several cases on one page: a grid of ratios, thread scaling, and every warning once; ratios and speeds as plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ffncli.bench.judge.curves import ThreadScaling, thread_scaling
from ffncli.bench.records import Case
from ffncli.bench.results.row import ResultRow
from ffncli.cli.common.result_lines import balance, interval, notes, ratio, verdict, warned
from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.plots.plot import Plot, Series, axis
from ffncli.show.text import interval_bar, percent, plural, time_text

if TYPE_CHECKING:
    from ffncli.bench.judge.curves import SpeedCurve, SpeedSweep


_VARYING = ("label", "tokens", "dtype", "passes", "cache", "device", "threads", "layout", "routing", "input")
_NAMES = {"label": "block", "passes": "pass"}
_MOST_NOTES = 6


def sweep(cases: Mapping[str, Case], rows: Sequence[ResultRow], baseline: str) -> list[Part]:
    """Build one line per case and one column per kernel; the heading states what the cases have in common."""
    # weights too large for cold copies are measured warm, so the cache mode is taken from the rows
    caches: dict[str, Any] = {row.case: row.cache for row in rows if row.status == "ok"}
    measured = {key: replace(case, cache=caches.get(key) or case.cache) for key, case in cases.items()}
    values = {name: list(dict.fromkeys(getattr(case, name) for case in measured.values())) for name in _VARYING}
    differ = [name for name in _VARYING if len(values[name]) > 1]
    common = ", ".join(_common(name, values[name][0]) for name in _VARYING if name not in differ and values[name][0])
    hosts = {row.case: row.host or "unknown" for row in rows}
    several = len({*hosts.values()}) > 1
    parts: list[Part] = [
        Heading(f"{len(cases)} {plural('case', len(cases))}", common),
        _grid(measured, rows, baseline, differ, hosts if several else {}),
        *(_machines(rows, hosts) if several else ()),
    ]
    if any(row.verdict == "inconclusive" and row.kernel != row.baseline for row in rows):
        parts.append(Line("?: inconclusive", quiet=True))
    parts += balance(rows, {key: _where(case, differ).replace(",", "") for key, case in measured.items()})
    parts += _scaling(
        measured, thread_scaling(tuple(cases.values()), rows), [name for name in differ if name != "threads"]
    )
    twins = [row for row in rows if row.kernel == row.baseline and row.aa_low is not None and row.aa_high is not None]
    if twins:
        low, high = min(r.aa_low or 1.0 for r in twins), max(r.aa_high or 1.0 for r in twins)
        parts.append(
            Line(f"identical code timed twice gave ratios of {low:.3f} to {high:.3f}, over all cases", quiet=True)
        )
    return [*parts, *notes(rows, _MOST_NOTES), *warned(rows)]


def _machines(rows: Sequence[ResultRow], hosts: Mapping[str, str]) -> list[Part]:
    """Return a line such as `node1: AMD EPYC 7B13, 12 cases` for each machine."""
    hardware = {row.host or "unknown": row.hardware for row in rows}
    texts = {host: f"{host}: {hardware[host]}, " if hardware[host] else f"{host}: " for host in hardware}
    counts = Counter(hosts.values())
    return [Line(f"{texts[host]}{n} {plural('case', n)}", quiet=True) for host, n in counts.items()]


def _grid(
    cases: Mapping[str, Case],
    rows: Sequence[ResultRow],
    baseline: str,
    differ: Sequence[str],
    hosts: Mapping[str, str],
) -> Table:
    """Build the grid: the baseline's column has times, the other columns have ratios to the baseline; machines
    are named if `hosts` is not empty."""
    of = {(row.case, row.kernel): row for row in rows}
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    kernels.sort(key=lambda kernel: kernel != baseline)  # stable: the other kernels stay in order
    machine = ("machine",) if hosts else ()
    columns = (_named(differ), *machine, *(f"{kernel}, time" if kernel == baseline else kernel for kernel in kernels))
    lines = [
        (
            _where(case, differ),
            *(hosts.get(key) for _ in machine),
            *(_cell(of.get((key, kernel))) for kernel in kernels),
        )
        for key, case in cases.items()
    ]
    return Table(columns, lines, side_by_side=True)


def _cell(row: ResultRow | None) -> str | None:
    """Return a ratio such as `0.950 [0.948, 0.952]`, with `?` if the verdict is inconclusive. Without a ratio, return
    the time; without a time, the status.

    A kernel that declares fewer bits also shows its error.
    """
    if row is None:
        return None
    if row.status != "ok":
        return verdict(row)
    if row.computes and row.kernel != row.baseline and row.ratio is not None:
        return f"{ratio(row)} in {row.computes}, rms error {row.error_rel or 0.0:.2g}"
    if row.kernel == row.baseline or row.ratio is None:
        return time_text(row.time_s)
    return f"{ratio(row)}{' ?' if row.verdict == 'inconclusive' else ''}"


def _scaling(cases: Mapping[str, Case], scalings: Sequence[ThreadScaling], differ: Sequence[str]) -> list[Part]:
    """Show how many times as fast each kernel is with more threads; empty if no cases differ in threads."""
    if not scalings:
        return []
    lines: dict[tuple[str, int, int], dict[str, str]] = {}
    for one in scalings:
        where = _where(replace(cases[one.case], threads=1), differ)
        speed_up = f"{one.speed_up:.2f}{interval(one.speed_up_low, one.speed_up_high)}"
        lines.setdefault((where, one.base_threads, one.threads), {})[one.kernel] = (
            f"{speed_up}, {percent(one.efficiency, 2)}"
        )
    kernels = list(dict.fromkeys(one.kernel for one in scalings))
    columns = (_named([*differ, "threads"]), *kernels)
    cells = [
        (", ".join(filter(None, (where, f"{few} → {many}"))), *(texts.get(kernel) for kernel in kernels))
        for (where, few, many), texts in lines.items()
    ]
    remark = "times as fast [95 % interval], and the share of the ideal speed-up"
    return [Heading("speed-up and efficiency", remark), Table(columns, cells, side_by_side=True)]


def _named(differ: Sequence[str]) -> str:
    return ", ".join(_NAMES.get(name, name) for name in differ)


def _where(case: Case, differ: Sequence[str]) -> str:
    """Return text such as `32, bf16`: this case's values in the columns that differ between cases."""
    return ", ".join(str(getattr(case, name)) for name in differ)


def _common(name: str, value: Any) -> str:
    if name in ("routing", "input"):
        return f"{name} {value}"
    return f"{value} {plural(name[:-1], value)}" if name in ("tokens", "threads") else str(value)


_COLUMNS = 40


# --- ratios with their intervals as bars, on one scale for all cases --------------------------------------------------


def ratio_bars(rows: Sequence[ResultRow]) -> list[Part]:
    """Build one table per case with each kernel's interval around its ratio, a mark at 1, and a line that explains the
    scale. Empty if there are no ratios."""
    timed = [row for row in rows if row.ratio is not None and row.kernel != row.baseline]
    ends = [v for row in timed for v in (row.ratio, row.ratio_low, row.ratio_high, 1.0) if v is not None]
    scale = axis(ends, log=True) if timed else None
    if scale is None:
        return []
    parts: list[Part] = []
    for case in dict.fromkeys(row.case for row in timed):
        lines = []
        for row in timed:
            if row.case == case and row.ratio is not None:
                low, high = (None if end is None else scale.share(end) for end in (row.ratio_low, row.ratio_high))
                bar = interval_bar(low, scale.share(row.ratio), high, scale.share(1.0), _COLUMNS)
                lines.append((row.kernel, bar, ratio(row)))
        parts.append(Table(("kernel", "time relative to the baseline", "ratio"), lines, title=case))
    text = f"from {min(ends):.3g} to {max(ends):.3g} on a logarithmic scale; │ is 1, ├ and ┤ end the interval"
    return [*parts, Line(text, quiet=True)]


# --- speed against a swept size ---------------------------------------------------------------------------------------


def speed_plots(sweeps: Sequence[SpeedSweep]) -> list[Plot]:
    """Build one plot per sweep, with sizes on a log axis; intervals are drawn only in files."""
    return [
        Plot(
            ", ".join(filter(None, (f"speed against {one.baseline}", one.block, one.where))),
            one.axis,
            f"times as fast as {one.baseline}",
            [_series(curve, one.baseline) for curve in one.curves],
            log_x=True,
            marks=True,
        )
        for one in sweeps
    ]


def _series(curve: SpeedCurve, baseline: str) -> Series:
    points = [(float(point.size), point.speed) for point in curve.points]
    if curve.kernel == baseline:
        return Series(f"{curve.kernel} (baseline)", points)
    ends = [(_or_nan(point.speed_low), _or_nan(point.speed_high)) for point in curve.points]
    return Series(curve.kernel, points, ends)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
