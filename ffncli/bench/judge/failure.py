"""The outcome of a run as a whole: the gate, if requested, and the error behind its exit code."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.bench.judge.gate import Gate, gate
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.row import ResultRow
from ffncli.errors import ExitCode, FFNError
from ffncli.show.text import percent


def gated(rows: Sequence[ResultRow], request: BenchRequest) -> Gate | None:
    """The result of --fail-if-slower for the rows; None if it was not requested."""
    return None if request.fail_if_slower is None else gate(rows, request.fail_if_slower, request.method)


def name_in(row: ResultRow, many: bool) -> str:
    """A row's kernel, with its case if the run has several."""
    return f"{row.kernel} ({row.case})" if many else row.kernel


def failure(rows: Sequence[ResultRow], request: BenchRequest, judged: Gate | None) -> FFNError | None:
    """The error for the exit code, the most serious first; None if all is well."""
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
    if lost := [row for row in rows if row.status in ("failed", "oom")]:
        return FFNError(f"not measured: {names(lost)}", f"{lost[0].status}: {lost[0].note}", ExitCode.ENVIRONMENT)
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
