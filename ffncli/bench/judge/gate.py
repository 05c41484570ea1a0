"""`gate` finds the kernels of a run that are slower than a threshold allows, with few false alarms even over many rows.
`failure` builds the error that decides the exit code of the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, log1p, sqrt
from typing import TYPE_CHECKING

from ffncli.bench.judge import statistics
from ffncli.bench.judge.statistics import Interval, log_or_inf
from ffncli.bench.results.row import ResultRow
from ffncli.errors import ExitCode, FFNError
from ffncli.show.text import percent

if TYPE_CHECKING:
    from ffncli.bench.request.grid import BenchRequest

LEVEL = 0.05  # the chance of any false alarm among all rows


@dataclass(frozen=True)
class GatedRow:
    """A gated row: its p value under the hypothesis "not slower than allowed", raw and adjusted, and its bounds.

    `low` and `high` are one-sided bounds on the ratio: `low` at LEVEL over all rows, `high` at LEVEL for this row
    alone.
    """

    row: ResultRow
    p: float
    p_holm: float
    low: float
    high: float


@dataclass(frozen=True)
class Gate:
    """The judged rows of a run. Rows in `slower` fail the run; rows in `inconclusive` may or may not be slower;
    `not_gated` pairs each remaining row with the reason."""

    slower: tuple[GatedRow, ...]
    passed: tuple[GatedRow, ...]
    inconclusive: tuple[GatedRow, ...]
    not_gated: tuple[tuple[ResultRow, str], ...]


def gate(rows: Sequence[ResultRow], threshold: float) -> Gate:
    """Judge all rows of a run by `threshold` (0.03: more than 3 % slower than the baseline is too slow).

    Each row gets a one-sided Student t test of its mean log ratio, with the standard error that its interval expresses,
    and Holm's correction over the rows. So a single regression among many rows is found, and identical kernels raise an
    alarm in at most 5 % of runs, regardless of the number of rows.
    """
    reasons = _reasons(rows)
    gated = [row for row, reason in reasons if not reason]
    edge = log1p(threshold)
    judged = _judged(gated, edge)
    return Gate(
        slower=tuple(j for j in judged if j.p_holm < LEVEL),
        passed=tuple(j for j in judged if j.p_holm >= LEVEL and log(j.high) <= edge),
        inconclusive=tuple(j for j in judged if j.p_holm >= LEVEL and log(j.high) > edge),
        not_gated=tuple((row, reason) for row, reason in reasons if reason),
    )


def not_faster(rows: Sequence[ResultRow], least: float) -> list[str]:
    """Return a sentence for every row that is not shown to take at least `least` less time than its baseline (0.03: at
    most 0.97 of the baseline's time); [] if all rows are.

    The whole interval must be at or below the limit. If it only contains the limit, the row is inconclusive, and the
    sentence states the smallest difference that an interval as wide could have shown.
    """
    reasons = _reasons(rows)
    if not reasons:
        return ["nothing was compared: both are the same kernel"]
    limit, share, many = 1 - least, percent(least, 2), len({row.case for row in rows}) > 1
    sentences = []
    for row, reason in reasons:
        name, low, high = name_in(row, many), row.ratio_low or 0.0, row.ratio_high or inf
        read = f"ratio {row.ratio or 1.0:.3f} [{low:.3f}, {high:.3f}]"
        if reason:
            sentences.append(f"{name} cannot be compared with {row.baseline}: {reason}")
        elif low > limit:
            sentences.append(f"{name} is not {share} faster than {row.baseline}: {read}")
        elif high > limit:
            shown = percent(1 - limit * sqrt(low / high), 2)  # the interval's upper end is its centre × √(high / low)
            could = f"this run could have shown a difference of {shown} or more"
            sentences.append(f"inconclusive: {name} may be {share} faster than {row.baseline}: {read}; {could}")
    return sentences


def unlike_precision(computes: str, other: str) -> str:
    """Return the reason why times of kernels that compute in these two formats are not compared; "" if the formats are
    equal."""
    if computes == other:
        return ""
    texts = [text or "the case's dtype" for text in (computes, other)]
    return f"computes in {texts[0]}, the other in {texts[1]}"


def one_sided(log_ratio: Interval, processes: int, edge: float) -> float:
    """Return the probability of a mean this high if the true mean is `edge`, by Student's t. `log_ratio` is the mean
    over the processes, with its 95 % interval."""
    error, above = _error(log_ratio, processes), log_ratio.value - edge
    if error == 0:
        return 0.0 if above > 0 else 1.0
    return statistics.t_sf(above / error, processes - 1)


def _error(log_ratio: Interval, processes: int) -> float:
    return log_ratio.half_width / statistics.t_quantile(0.5 + statistics.CONFIDENCE / 2, processes - 1)


def _judged(rows: Sequence[ResultRow], edge: float) -> list[GatedRow]:
    means = [Interval(*(log_or_inf(end or 0.0) for end in (row.ratio, row.ratio_low, row.ratio_high))) for row in rows]
    ps = [one_sided(mean, len(row.process_ratios), edge) for mean, row in zip(means, rows, strict=True)]
    adjusted = statistics.holm(ps)
    ranks = {index: rank for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i]))}
    gated = []
    for i, row in enumerate(rows):
        centre, df = means[i].value, len(row.process_ratios) - 1
        error = _error(means[i], len(row.process_ratios))
        # Holm's level for this rank: the bound and the corrected p then decide alike.
        low = centre - statistics.t_quantile(1 - LEVEL / (len(rows) - ranks[i]), df) * error
        high = centre + statistics.t_quantile(1 - LEVEL, df) * error
        gated.append(GatedRow(row, ps[i], adjusted[i], exp(low), exp(high)))
    return gated


def _reasons(rows: Sequence[ResultRow]) -> list[tuple[ResultRow, str]]:
    """Return every row but the baselines, with the reason why it cannot be compared with its baseline, "" if it can."""
    computes = {row.case: row.computes for row in rows if row.kernel == row.baseline}
    return [
        (row, _untimed(row) or unlike_precision(row.computes, computes.get(row.case, "")))
        for row in rows
        if row.kernel != row.baseline
    ]


def _untimed(row: ResultRow) -> str:
    """Return the reason why a row has no ratio to judge, or "" if it has one."""
    if row.status != "ok":
        return f"{row.status}: no time"
    if not row.process_ratios:
        return "no ratio"
    if len(row.process_ratios) < 2:
        return "1 process: its interval covers this process only"
    return "" if row.ratio_low and row.ratio_high else "its interval is unbounded"


def aa_of(row: ResultRow) -> Interval:
    """Return the log of the row's A/A ratio (the same code timed twice); an unknown end is infinite."""
    ends = (row.aa_ratio or 1.0, row.aa_low or 0.0, inf if row.aa_high is None else row.aa_high)
    return Interval(*map(log_or_inf, ends))


# --- the run as a whole -----------------------------------------------------------------------------------------------


def gated(rows: Sequence[ResultRow], request: BenchRequest) -> Gate | None:
    """Return the result of --fail-if-slower for the rows; None if it was not requested."""
    return None if request.fail_if_slower is None else gate(rows, request.fail_if_slower)


def name_in(row: ResultRow, many: bool) -> str:
    """Return a row's kernel, followed by its case if the run has several cases."""
    return f"{row.kernel} ({row.case})" if many else row.kernel


def failure(rows: Sequence[ResultRow], request: BenchRequest, judged: Gate | None) -> FFNError | None:
    """Return the most serious error of the run, which decides the exit code; None if all is well."""
    many = len(request.cases) > 1

    def names(rows: Sequence[ResultRow]) -> str:
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        return "; ".join(name_in(row, many) for row in rows[:3]) + more

    if wrong := [row for row in rows if row.status == "wrong"]:
        return FFNError(f"wrong results: {names(wrong)}", wrong[0].note, ExitCode.FAILED)
    if judged is not None and judged.slower:
        slower = names([j.row for j in judged.slower])
        allowed = percent(request.fail_if_slower or 0.0, 2)
        return FFNError(f"slower than {request.baseline} by more than {allowed}: {slower}", code=ExitCode.FAILED)
    if failed := [row for row in rows if row.status in ("failed", "oom")]:
        return FFNError(f"not measured: {names(failed)}", f"{failed[0].status}: {failed[0].note}", ExitCode.ENVIRONMENT)
    unclear = [row for row in rows if row.verdict == "inconclusive" or (row.status == "ok" and row.ratio is None)]
    if judged is not None:
        bases = [row for row in rows if row.kernel == row.baseline and row.status != "ok"]
        if bases and not (judged.passed or judged.inconclusive):
            why = f"the baseline is {bases[0].status}: {bases[0].note}"
            return FFNError(f"nothing could be gated: no ratio to {request.baseline}", why, ExitCode.ENVIRONMENT)
        unclear += [*(j.row for j in judged.inconclusive), *(row for row, _ in judged.not_gated)]
    if request.strict and unclear:
        inconclusive = names(list(dict.fromkeys(unclear)))
        return FFNError(f"inconclusive: {inconclusive}", "measure longer: --max-time", ExitCode.INCONCLUSIVE)
    return None
