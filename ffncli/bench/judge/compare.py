"""Compare two stored results: what changed, with an interval per row, and which rows fail a gate.

The statistical unit is the process. `raw` is the difference in log time between NEW and BASE; `normalised` is the same
with each process's time divided by the time of its own machine anchor. A row fails only if both show a slowdown, after
Holm's correction over the rows, and if the anchor's time did not change: otherwise the machine may be the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from ffncli.bench.judge.environment_match import (
    EnvironmentMismatch,
    RowPair,
    block_of,
    environment,
    hosts,
    match,
    mismatches,
)
from ffncli.bench.judge.gate import aa_of, unlike_precision
from ffncli.bench.judge.ratios import differs, verdict
from ffncli.bench.judge.statistics import Interval, Shift, exp_or_inf, holm, log_or_inf, mean_ratio, welch
from ffncli.bench.judge.warnings import Code, has
from ffncli.bench.results.row import ASKED, ResultRow, name_of
from ffncli.errors import FFNError, shown
from ffncli.frames import Tabular
from ffncli.show.text import percent
from ffncli.system.notebook import record_table

ALPHA = 0.05  # the gate's level: the chance that any row fails wrongly
CompareVerdict = Literal["slower", "faster", "same", "inconclusive", "broken", "mended"]
CONVENTIONS = {
    "ratio": "time of NEW over time of BASE: geometric means over processes, Welch's 95 % t interval on logs of times",
    "normalised": "the same, after dividing each process's time by its machine anchor's time (numpy GEMM and copy)",
    "regression": "certainly slower by more than the threshold, raw and normalised (one-sided, Holm over the rows, "
    f"{percent(ALPHA)}), or ok in BASE and wrong, failed or oom in NEW",
}
_BROKEN = ("wrong", "failed", "oom")


@dataclass(frozen=True)
class Rules:
    """Differences within `margin` are `same`; `threshold` is --fail-if-slower, None without a gate."""

    margin: float = 0.02
    threshold: float | None = None
    allow_mismatch: bool = False

    @property
    def limit(self) -> float:
        """The limit of the test: a row fails if it is slower by more than this."""
        return self.margin if self.threshold is None else self.threshold


DEFAULT_RULES = Rules()


@dataclass(frozen=True)
class ComparedRow:
    """One case and kernel. Ratios are NEW over BASE, times are in seconds; None means unknown.

    `base_ratio` and `new_ratio` are relative to the baseline kernel of each side's own runs. `gated` is true if the row
    could fail; `reason` is why the row could not fail, or why it is inconclusive. `verdict` is None if neither side is
    ok.
    """

    case: str
    block: str
    tokens: int | None
    dtype: str
    passes: str
    cache: str
    device: str
    threads: int | None
    kernel: str
    base_status: str
    new_status: str
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    normalised_ratio: float | None = None
    normalised_low: float | None = None
    normalised_high: float | None = None
    anchor_ratio: float | None = None
    anchor_low: float | None = None
    anchor_high: float | None = None
    p_holm: float | None = None
    verdict: CompareVerdict | None = None
    regression: bool = False
    gated: bool = False
    reason: str = ""
    base_time_s: float | None = None
    new_time_s: float | None = None
    processes_base: int = 0
    processes_new: int = 0
    base_ratio: float | None = None
    new_ratio: float | None = None
    routing: str = ""
    input: str = ""

    def fails(self, rules: Rules) -> bool:
        """Return whether the row is slower than the gate allows, or no longer correct."""
        return self.regression and (rules.threshold is not None or self.verdict == "broken")

    def anchor_disagrees(self, margin: float) -> bool:
        """Return whether the times differ by more than the margin, and the normalised times do not confirm it."""
        if self.verdict != "inconclusive" or None in (self.ratio, self.ratio_low, self.ratio_high):
            return False
        times = Interval(self.ratio or 0.0, self.ratio_low or 0.0, self.ratio_high or 0.0).map(log_or_inf)
        return self.normalised_ratio is not None and differs(times, margin)

    def inconclusive(self, threshold: float | None) -> bool:
        """Return whether `slower by more than threshold` is undecided; without threshold, whether the verdict is."""
        if self.verdict in (None, "mended", "broken"):
            return False
        if self.regression and threshold is not None:
            return False
        if threshold is None:
            return self.verdict == "inconclusive"
        return not self.gated or self.ratio_high is None or self.ratio_high > 1 + threshold


CASE_COLUMNS = ("block", *(column.name for column in fields(ComparedRow) if column.name in ASKED))


@dataclass(frozen=True)
class KernelMean:
    """One kernel over all its cases: geometric means of the known ratios."""

    kernel: str
    cases: int
    ratio: float
    normalised_ratio: float | None


@dataclass(frozen=True)
class ResultComparison(Tabular):
    """NEW compared with BASE, in BASE's order. `comparable` is true if machine and software are the same."""

    rules: Rules
    comparable: bool
    mismatches: tuple[EnvironmentMismatch, ...]
    rows: tuple[ComparedRow, ...]
    only_in_base: tuple[tuple[str, str], ...]
    only_in_new: tuple[tuple[str, str], ...]
    kernels: tuple[KernelMean, ...]
    remarks: tuple[str, ...]
    environment: str = ""  # one line with the fields common to both sides; differences are in `mismatches`

    @property
    def regressions(self) -> tuple[ComparedRow, ...]:
        """The rows with a regression."""
        return tuple(row for row in self.rows if row.regression)

    @property
    def inconclusive(self) -> tuple[ComparedRow, ...]:
        """The rows for which it is undecided whether they are slower."""
        return tuple(row for row in self.rows if row.inconclusive(self.rules.threshold))

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """The (case, kernel) pairs of BASE that a gate cannot judge, because NEW does not have them."""
        return () if self.rules.threshold is None else self.only_in_base

    def count(self, verdict: CompareVerdict) -> int:
        """Return how many rows have this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each case and kernel, with the columns of the CSV."""
        return [{name_of(key): value for key, value in asdict(row).items()} for row in self.rows]

    def __repr__(self) -> str:
        verdicts = [row.verdict for row in self.rows if row.verdict is not None]
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
        return f"<ResultComparison of {len(self.rows)} rows: {counts or 'nothing was timed on both sides'}>"

    def _repr_html_(self) -> str:
        asked = [name for name in CASE_COLUMNS if any(getattr(row, name) for row in self.rows)]
        names = (*asked, "kernel", "ratio", "ratio_low", "ratio_high", "verdict")
        rows = [[getattr(row, name) for name in names] for row in self.rows]
        return record_table(repr(self)[1:-1], [*map(name_of, names)], rows)


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(base: Sequence[ResultRow], new: Sequence[ResultRow], rules: Rules = DEFAULT_RULES) -> ResultComparison:
    """Compare NEW's rows with BASE's. Raises FFNError if times are invalid, if no case and kernel are in common, or if
    the machines differ and `allow_mismatch` is not set. If it is set and the machines differ, no row is gated."""
    matching = match(base, new)
    unlike = mismatches(matching.pairs)
    if unlike and not rules.allow_mismatch:
        listed = "; ".join(f"{m.field}: {m.base} in BASE, {m.new} in NEW" for m in unlike)
        same = "with the same --launch" if {m.field for m in unlike} == {"launch"} else "on one machine"
        hint = f"measure both {same}, or compare without a gate: --allow-mismatch"
        raise FFNError(f"BASE and NEW come from different environments: {listed}", hint)
    rows = _corrected([_compared(pair, rules, bool(unlike)) for pair in matching.pairs], rules)
    return ResultComparison(
        rules, not unlike, unlike, rows, matching.only_base, matching.only_new, _kernels(rows),
        _remarks(matching.pairs), environment(matching.pairs),
    )  # fmt: skip


# --- one row ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """One side of a row: the logs of its times and of its anchor times, one per process over all its runs."""

    times: tuple[float, ...]
    anchors: tuple[float, ...]  # () if any process has no anchor time
    status: str
    ratio: float | None

    @property
    def normalised(self) -> tuple[float, ...]:
        return tuple(t - a for t, a in zip(self.times, self.anchors, strict=True)) if self.anchors else ()


_Tested = tuple[ComparedRow, Shift | None, Shift | None]


def _compared(pair: RowPair, rules: Rules, unlike: bool) -> _Tested:
    """Return the row without columns that depend on other rows; for a gated row, also its raw and normalised shifts."""
    base, new = _side("BASE", pair.base), _side("NEW", pair.new)
    row = _described(pair, base, new)
    if base.status != "ok" or new.status != "ok":
        return _unlike_status(row, unlike), None, None
    raw, normalised, anchor = (
        welch(b, n)
        for b, n in ((base.times, new.times), (base.normalised, new.normalised), (base.anchors, new.anchors))
    )
    logs = [shift.log_ratio if shift else None for shift in (raw, normalised, anchor)]
    row = replace(
        row,
        ratio=mean_ratio(base.times, new.times),
        normalised_ratio=mean_ratio(base.normalised, new.normalised),
        anchor_ratio=mean_ratio(base.anchors, new.anchors),
        **{
            f"{name}_{end}": getattr(interval.map(exp_or_inf), end)
            for name, interval in zip(("ratio", "normalised", "anchor"), logs, strict=True)
            if interval
            for end in ("low", "high")
        },
    )
    word, why = _verdict(logs[0], logs[1], rules.margin)
    reason = "other environment" if unlike else _ungated(pair, base, new, logs[2], rules.margin)
    row = replace(row, verdict=word, gated=not reason, reason=reason or why)
    return (row, raw, normalised) if row.gated else (row, None, None)


def _side(side: str, rows: Sequence[ResultRow]) -> _Side:
    """Combine all runs of one side. Raises FFNError for impossible times."""
    status = next((row.status for row in rows if row.status != "ok"), "ok")
    times = [value for row in rows for value in row.process_times_s]
    anchors = [value for row in rows for value in row.process_anchors_s]
    paired = all(len(row.process_anchors_s) == len(row.process_times_s) for row in rows)
    ratios = [value for row in rows for value in (row.process_ratios or ((row.ratio,) if row.ratio else ()))]
    if status == "ok":
        for name, values in (("process_times_s", times), ("process_anchors_s", anchors), ("ratio", ratios)):
            for value in values:
                if not 0 < value < math.inf:
                    raise FFNError(f"{side}: {name} of {shown(rows[0].kernel)} must be above 0, got {value!r}")
        if not times:
            raise FFNError(f"{side}: {shown(rows[0].kernel)} is ok but has no process_times_s")
    logs = [math.log(value) for value in ratios] if status == "ok" else []
    ratio = mean_ratio((0.0,), logs)
    if status != "ok":
        return _Side((), (), status, None)
    return _Side(_logs(times), _logs(anchors) if paired else (), status, ratio)


def _logs(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(math.log(value) for value in values)


def _described(pair: RowPair, base: _Side, new: _Side) -> ComparedRow:
    row = pair.new[0]
    return ComparedRow(
        case=pair.case, block=row.source or block_of(row), tokens=row.tokens, dtype=row.dtype, passes=row.passes,
        cache=row.cache, device=row.device, threads=row.threads, kernel=pair.kernel,
        base_status=base.status, new_status=new.status,
        base_time_s=mean_ratio((0.0,), base.times), new_time_s=mean_ratio((0.0,), new.times),
        processes_base=len(base.times), processes_new=len(new.times), base_ratio=base.ratio, new_ratio=new.ratio,
        routing=row.routing, input=row.input,
    )  # fmt: skip


def _unlike_status(row: ComparedRow, unlike: bool) -> ComparedRow:
    """Judge a row unless it is ok on both sides. A row that was ok in BASE but is not in NEW is a regression, whatever
    its time."""
    reason = f"{row.base_status} in BASE, {row.new_status} in NEW"
    if row.base_status == "ok" and row.new_status in _BROKEN:
        reason += ": other environment" * unlike
        return replace(row, verdict="broken", regression=not unlike, gated=not unlike, reason=reason)
    if row.base_status == "ok":  # it was skipped in NEW
        return replace(row, verdict="inconclusive", reason=reason)
    return replace(row, verdict="mended" if row.new_status == "ok" else None, reason=reason)


def _verdict(raw: Interval | None, normalised: Interval | None, margin: float) -> tuple[CompareVerdict, str]:
    """Return the verdict on the raw log ratio; if the normalised one disagrees, `inconclusive` with the reason."""
    if raw is None:
        return "inconclusive", ""
    first = verdict(raw, margin)
    if normalised is None or first == "inconclusive":
        return first, ""
    second = verdict(normalised, margin)
    if first == second or (first == "same" and second == "inconclusive"):
        return first, ""
    return "inconclusive", "times disagree with times normalised by the machine's anchor"


def _ungated(pair: RowPair, base: _Side, new: _Side, anchor: Interval | None, margin: float) -> str:
    """Return the reason why this row is not gated, or "" if it is."""
    for name, side in (("BASE", base), ("NEW", new)):
        if len(side.times) < 2:
            return f"only one process in {name}: not gated"
    for row in pair.new:
        if unlike := unlike_precision(pair.base[0].computes, row.computes):
            return f"BASE {unlike}: not gated"
    if anchor is None:
        return "no machine anchor recorded: not gated"
    if differs(anchor, margin):
        return f"the machine itself changed, {change(exp_or_inf(anchor.value))}: not gated"
    for name, rows in (("BASE", pair.base), ("NEW", pair.new)):
        for row in rows:
            if has(row.warnings, Code.PREEMPTED):
                return f"other work ran on the cores in {name}: not gated"
            if differs(aa_of(row), margin):
                return f"the baseline differs from itself in {name}: not gated"
    return ""


def change(ratio: float) -> str:
    """Return the ratio in words, as in `12 % slower`, `3.4 % faster`, `the same` or `2.3 times as slow`."""
    if ratio >= 2:
        return f"{ratio:.3g} times as slow"
    if ratio <= 0.5:
        return f"{1 / ratio:.3g} times as fast" if ratio > 0 else "infinitely fast"
    share = abs(ratio - 1)
    if share < 0.00005:
        return "the same"
    text = percent(share, 2) if share >= 0.00995 else f"{100 * share:{'.1f' if share >= 0.0005 else '.1g'}} %"
    return f"{text} {'slower' if ratio >= 1 else 'faster'}"


# --- all rows ---------------------------------------------------------------------------------------------------------


def _corrected(rows: Sequence[_Tested], rules: Rules) -> tuple[ComparedRow, ...]:
    """Return the rows with `p_holm` and `regression` filled in."""
    tested = [at for at, (row, _, _) in enumerate(rows) if row.gated and row.ratio is not None]
    ps = []
    for at in tested:
        _, raw, normalised = rows[at]
        assert raw is not None
        assert normalised is not None
        # The larger p counts: a row is a regression only if its times and its normalised times both show a slowdown.
        ps.append(max(raw.p_above(rules.limit), normalised.p_above(rules.limit)))
    adjusted = dict(zip(tested, holm(ps), strict=True))
    return tuple(
        replace(row, p_holm=adjusted[at], regression=adjusted[at] < ALPHA) if at in adjusted else row
        for at, (row, _, _) in enumerate(rows)
    )


def _kernels(rows: Sequence[ComparedRow]) -> tuple[KernelMean, ...]:
    out = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        of_kernel = [row for row in rows if row.kernel == kernel]
        raw = _mean(row.ratio for row in of_kernel)
        if raw is not None:
            cases = sum(row.ratio is not None for row in of_kernel)
            complete = all(row.normalised_ratio is not None for row in of_kernel if row.ratio is not None)
            normalised = _mean(row.normalised_ratio for row in of_kernel) if complete else None
            out.append(KernelMean(kernel, cases, raw, normalised))
    return tuple(out)


def _mean(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the known ratios; None if no ratio is known, or if a ratio has no logarithm."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or not all(0 < ratio < math.inf for ratio in known):
        return None
    return math.exp(math.fsum(math.log(ratio) for ratio in known) / len(known))


def _remarks(pairs: Sequence[RowPair]) -> tuple[str, ...]:
    """Return remarks for the reader that do not affect any verdict."""
    base, new = [row for pair in pairs for row in pair.base], [row for pair in pairs for row in pair.new]
    out = []
    if both := sorted({row.run_id for row in base} & {row.run_id for row in new} - {""}):
        out.append(f"both sides contain the same run, which shows no difference: {', '.join(both[:3])}")
    names = hosts(pairs)
    if all(names):
        texts = [", ".join(sorted(side)[:3]) for side in names]
        out.append(f"host: {texts[0]} in BASE, {texts[1]} in NEW")
    versions = [sorted({row.ffncli for row in side}) for side in (base, new)]
    if versions[0] != versions[1]:
        out.append(f"ffncli: {', '.join(versions[0])} in BASE, {', '.join(versions[1])} in NEW")
    if warned := sum(any(row.warnings for row in (*pair.base, *pair.new)) for pair in pairs):
        out.append(f"{warned} of {len(pairs)} rows were measured with warnings (see the files)")
    return tuple(out)
