"""The rows of `ffn bench` as JSON, as CSV and as a page for newcomers; and the verdict of --admit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.bench.judge.curves import StepShare, step_shares, thread_scaling, together
from ffncli.bench.judge.gate import Gate, GatedRow, name_in
from ffncli.bench.judge.warnings import Code, resolvable_difference
from ffncli.bench.public.admission import Admission, Condition
from ffncli.bench.records import Case
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.csv_file import COLUMNS, cells, json_rows
from ffncli.bench.results.journal import ResultFiles
from ffncli.bench.results.row import ResultRow
from ffncli.cli.common.result_lines import balance, command_line, interval, rates, ratio, remarks, verdict, warned
from ffncli.cli.common.summaries import ShortLine, csv_table, in_json, short_lines
from ffncli.cli.common.sweep_page import sweep
from ffncli.errors import ExitCode, FFNError, shown_path
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import bytes_text, counted, percent, plural, time_text

if TYPE_CHECKING:
    from ffncli.bench.selftest import KnownDifference, SelfTest
    from ffncli.kernels import KernelLine

CONVENTIONS = {
    "ratio": "time divided by the baseline's time in the same rounds; ratio_low to ratio_high is its 95 % confidence"
    " interval, by Student's t over the processes",
    "verdict": "faster or slower: the interval lies entirely beyond 2 %; same: entirely within; else inconclusive",
    "time_s": "time of one call; the quotient of two times need not equal their ratio",
    "roof_fraction": "share of the best rate that this machine reached in this run: in matrix products, or in bytes"
    " copied or read",
}
_CACHES = {
    "warm": "weights in cache", "shared": "weights in cache, if all kernels' copies fit",
    "cold-weights": "weights not in cache", "flush": "caches emptied before each call",
}  # fmt: skip
_LAUNCHED = {"graphs": ", CUDA graphs", "plain": ", no CUDA graphs"}


def answer(
    rows: Sequence[ResultRow],
    request: BenchRequest,
    judged: Gate | None,
    files: ResultFiles,
    spent: Mapping[str, float] | None = None,
) -> Answer:
    """Build the answer: `rows` in JSON and the lines of the CSV have the columns of the results file."""
    table = Table(COLUMNS, [cells(row) for row in rows])
    cases = {case.key: case for case in request.cases}
    parts: list[Part] = []
    if request.method.by_step:
        for key, case in cases.items():
            mine = [row for row in rows if row.case == key]
            parts += by_step_parts(case, _where(case, mine), mine)
        parts += warned(rows)
    elif request.method.in_model:
        for key, case in cases.items():
            parts += in_model_parts(case, [row for row in rows if row.case == key])
    elif not cases:
        parts.append(Line("nothing to measure: this part of the grid has no cases"))
    elif len(cases) == 1:
        parts += case_parts(request.cases[0], rows)
    else:
        parts += sweep(cases, rows, request.baseline)
    if judged is not None:
        parts += _gate(judged, rows, request)
    parts += _legend(rows, request, files) if cases else []
    body = {
        "file": shown_path(files.csv),
        "rounds_file": shown_path(files.rounds),
        "gate": None if judged is None else _gate_json(judged, request.fail_if_slower),
        "spent": dict(spent or {}),
        "thread_scaling": in_json(thread_scaling(request.cases, rows)),
        "rows": json_rows(rows),
    }
    return Answer("bench", body, table, parts, CONVENTIONS)


# --- one case ---------------------------------------------------------------------------------------------------------


def case_parts(case: Case, rows: Sequence[ResultRow]) -> list[Part]:
    """Show one case and its rows: a table, then remarks."""
    unit, speeds = rates(rows)
    lines = {row: _line(row, speed) for row, speed in zip(rows, speeds, strict=True)}
    columns = ("kernel", "time", "ratio", "verdict", unit, "of roof")
    parts: list[Part] = [
        Heading(case.label, _where(case, rows)),
        Table(columns, [line for row, line in lines.items() if not row.computes]),
        *(_communication(case, rows) if case.layout else ()),
    ]
    for computes in dict.fromkeys(row.computes for row in rows if row.computes):
        group = [(*line, _rms_error(row)) for row, line in lines.items() if row.computes == computes]
        remark = f"fewer bits than {case.dtype}, as declared: compare the error, not only the ratio"
        parts += [Heading(f"computes in {computes}", remark), Table((*columns, "rms error"), group)]
    return [*parts, *balance(rows, {case.key: case.label}), *remarks(rows)]


def _communication(case: Case, rows: Sequence[ResultRow]) -> list[Part]:
    """Show the separate times of computing and communicating, and how much communication is hidden by computing."""
    sent = next((row.communication_bytes for row in rows if row.communication_bytes is not None), None)
    remark = "" if sent is None else f"each rank sends {bytes_text(round(sent))} per call"
    lines = [
        (row.kernel, *map(time_text, (row.time_s, row.compute_s, row.communication_s)), _hidden(row.overlap))
        for row in rows
        if row.status == "ok"
    ]
    table = Table(("kernel", "time", "compute", "communication", "overlap"), lines)
    return [Heading(f"over {case.ranks.world_size} ranks ({case.layout})", remark), table] if lines else []


def _hidden(overlap: float | None) -> str | None:
    """Return text such as `35 %`; negative if computing and communicating together take longer than in sequence."""
    return None if overlap is None else f"{100 * overlap:.0f} %".replace("-", "−")


def _rms_error(row: ResultRow) -> str | None:
    """Return text such as `0.026 (baseline 1e-07)`."""
    if row.error_rel is None:
        return None
    baseline = "" if row.baseline_error_rel is None else f" (baseline {row.baseline_error_rel:.1e})"
    return f"{row.error_rel:.2g}{baseline}"


def _where(case: Case, rows: Sequence[ResultRow]) -> str:
    """Describe a case without its block, as in `32 tokens, fp32, forward, weights in cache, cpu, 2 threads`."""
    cache = rows[0].cache if rows else case.cache
    threads = f"{case.threads} {plural('thread', case.threads)}"
    launched = next((_LAUNCHED[row.launch] for row in rows if row.launch in _LAUNCHED), "")
    threads += " each" if case.layout else ""
    place = f"{case.device}, {threads}" if case.device == "cpu" else f"{case.device}{launched}"
    place += f", {case.layout}" if case.layout else ""
    tokens = f"{case.tokens} {plural('token', case.tokens)}"
    return ", ".join((tokens, case.dtype, case.passes, _CACHES[cache], place, *case.data))


def _line(row: ResultRow, rate: str | None) -> tuple[Any, ...]:
    roof = None if row.roof_fraction is None else f"{100 * row.roof_fraction:.0f} %"
    return (row.kernel, time_text(row.time_s), ratio(row), verdict(row), rate, roof)


# --- the gate ---------------------------------------------------------------------------------------------------------


def _gate(judged: Gate, rows: Sequence[ResultRow], request: BenchRequest) -> list[Part]:
    """Show the checks, their results, and the conclusion that determines the exit code."""
    allowed = percent(request.fail_if_slower or 0.0, 2)
    many = len(request.cases) > 1
    checked = [f"{row.kernel} {row.error_rel:.1e}" for row in rows if row.error_rel is not None]
    parts: list[Part] = [Heading("gate", f"fails if a kernel is more than {allowed} slower than {request.baseline}")]
    if checked and not many:
        parts.append(Line(f"results were checked against float64; relative error: {', '.join(checked)}", quiet=True))
    for word, group in (("FAILED", judged.slower), ("passed", judged.passed), ("inconclusive", judged.inconclusive)):
        parts += [Line(f"{word}: {_judged(j, many)}{_reason(j.row)}") for j in group]
    parts += [Line(f"not gated: {name_in(row, many)}: {reason}") for row, reason in judged.not_gated]
    failed, open_, left = len(judged.slower), len(judged.inconclusive), len(judged.not_gated)
    if failed:
        summary = f"{failed} {plural('kernel', failed)} slower than allowed"
    elif open_:
        summary = "no kernel is shown to be slower than allowed, but some are inconclusive"
    else:
        summary = f"no kernel is more than {allowed} slower" if judged.passed else "nothing could be gated"
    if left and (failed or open_ or judged.passed):
        summary += f"; {left} of {left + failed + open_ + len(judged.passed)} could not be gated"
    return [*parts, Heading(f"gate: {summary}")]


def _judged(judged: GatedRow, many: bool) -> str:
    """Return text such as `new is 5.1 % slower than eager, ratio 1.051 [1.047, 1.055], at least 4.6 % slower`."""
    row, ratio = judged.row, judged.row.ratio or 1.0
    way = f"{percent(abs(ratio - 1), 2)} {'slower' if ratio > 1 else 'faster'}"
    read = f"ratio {ratio:.3f}{interval(row.ratio_low, row.ratio_high)}"
    text = f"{name_in(row, many)} is {way} than {row.baseline}, {read}"
    low = f", at least {percent(judged.low - 1, 2)} slower" if judged.low > 1 else ""
    return f"{text}{low}"


def _reason(row: ResultRow) -> str:
    """Return visible reasons for a verdict: page faults, other work, a cache too small for all kernels."""
    reasons = [part for part in row.note.split("; ") if "page fault" in part]
    if row.cache == "shared":
        reasons.append("cache: the kernels' weights do not all fit into the last-level cache")
    reasons += [str(warning) for warning in row.warnings if warning.code in (Code.PREEMPTED, Code.THROTTLED)]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _gate_json(judged: Gate, allowed: float | None) -> dict[str, Any]:
    groups = (("slower", judged.slower), ("passed", judged.passed), ("inconclusive", judged.inconclusive))
    results = [(j.row, result, j.low, j.p_holm, "") for result, group in groups for j in group]
    rows = [
        {"case": row.case, "kernel": row.kernel, "result": result, "low": low, "p_holm": p_holm, "reason": reason}
        for row, result, low, p_holm, reason in (
            *results,
            *((row, "not gated", None, None, why) for row, why in judged.not_gated),
        )
    ]
    return {"fail_if_slower": allowed, "failed": bool(judged.slower), "rows": rows}


# --- the end ----------------------------------------------------------------------------------------------------------


def _legend(rows: Sequence[ResultRow], request: BenchRequest, files: ResultFiles) -> list[Part]:
    """Explain how to read the page, in a few lines."""
    method = request.method
    over = f"{method.processes} fresh processes" if method.processes > 1 else "this process only"
    if method.by_step:
        share = "share of the time: a step's time divided by the block's in the same rounds, with its 95 % interval"
        lines = [f"{share} ({over})", f"results: {shown_path(files.csv)}"]
        return [Heading("how to read this"), *(Line(text, quiet=True) for text in lines)]
    lines = [f"ratio: time divided by {request.baseline}'s in the same rounds, with its 95 % interval ({over})"]
    if any(row.verdict == "inconclusive" for row in rows):
        lines.append("inconclusive: the interval is neither entirely inside nor entirely outside 1 ± 2 %")
        lines += closing(rows, request)
    if request.ranks.world_size > 1:
        lines.append("time: of the slowest rank, including its collectives; compute: without them")
        lines.append(
            "overlap: share of the communication hidden behind compute; negative if the two slow each other down"
        )
    if len(request.cases) == 1 and any(row.roof_fraction is not None for row in rows):
        lines.append("of roof: share of this machine's best rate in this run, for matrix products or for memory")
    checked = "every kernel in every FFN" if method.in_model else "every kernel"
    lines.append(f"{checked} was checked against float64 first; results: {shown_path(files.csv)}")
    return [Heading("how to read this"), *(Line(text, quiet=True) for text in lines)]


_LEAST = 0.0005  # smallest share that rounds to 0.1 %
_BAR = 12  # length of a bar for 100 %, in columns
_WHY = "alone, a step finds different data in the cache, and the block has extra work between steps"


# --- --by-step: where the time goes -----------------------------------------------------------------------------------


def by_step_parts(case: Case, where: str, rows: Sequence[ResultRow]) -> list[Part]:
    """Show one case, measured under the conditions `where`: a table of the steps in order, and what the shares do and
    do not mean.

    `rows` are the rows of the block and of its steps (`step gate`).
    """
    shares = step_shares(case, rows)
    blocks = frozenset(at for at, one in enumerate(shares) if one.whole)
    columns = ("step", "op", "share of the time", "", "time", "FLOPs", "GFLOP/s")
    table = Table(columns, [_step_line(one) for one in shares], emphasis=blocks)
    parts: list[Part] = [Heading("where the time goes", f"{case.label}, {where}"), table]
    if (total := together(shares)) is not None:
        parts.append(
            Line(f"the steps together take {_share(total)} of the block's time, not 100 %: {_WHY}", quiet=True)
        )
    if any(one.inside for one in shares):
        parts.append(Line("experts[e].gate: all experts that received tokens; part of experts", quiet=True))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        who = [row.kernel for row in rows if row.note == note]
        parts.append(Line((f"{', '.join(who)}: " if len(who) < len(rows) else "") + note, quiet=True))
    return parts


def _step_line(one: StepShare) -> tuple[str | None, ...]:
    """Return the line of one step; if the step was not timed, its status replaces the share."""
    label = f"  {one.name}" if one.inside else one.name
    if one.status not in ("ok", ""):
        return (label, one.op, one.status, "", None, None, None)
    share, bar = ("100 %", "") if one.whole else (_interval(one), _bar(one.share))
    rate = None if one.flops_per_s is None else f"{one.flops_per_s / 1e9:.3g}"
    flops = None if one.flops_share is None else _share(one.flops_share)
    return (label, one.op, share, bar, time_text(one.time_s), flops, rate)


def _interval(one: StepShare) -> str | None:
    """Return text such as `38.2 % [37.9, 38.5]`."""
    if one.share is None:
        return None
    if one.low is None or one.high is None or one.high < _LEAST:
        return _share(one.share)
    return f"{_share(one.share)} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= _LEAST or not share else "< 0.1 %"


def _bar(share: float | None) -> str:
    """Return a bar as long as the share; a nonzero share gets at least one mark."""
    return "" if not share else "█" * min(_BAR, max(1, round(_BAR * share)))


_COLUMNS = ("", "time", "tokens/s", "ratio", "verdict", "logits differ by", "at most")


# --- --in-model: tokens per second of a model -------------------------------------------------------------------------


def in_model_parts(case: Case, rows: Sequence[ResultRow]) -> list[Part]:
    """Show one case: a line for the model alone, a line for the model with each kernel, then remarks."""
    where = f"{case.device}, {case.threads} {plural('thread', case.threads)}" if case.device == "cpu" else case.device
    what = f"one forward of {case.tokens} {plural('token', case.tokens)}, {case.dtype}, {where}"
    return [Heading(case.label, what), Table(_COLUMNS, [_model_line(row) for row in rows]), *remarks(rows)]


def _model_line(row: ResultRow) -> tuple[str | None, ...]:
    speed = None if row.tokens_per_s is None else f"{row.tokens_per_s:,.4g}"
    figures = (None if value is None else f"{value:.1e}" for value in (row.logits_error, row.logits_limit))
    return (row.kernel, time_text(row.time_s), speed, ratio(row), verdict(row), *figures)


_MORE = 4  # factor for the time or the processes; halves the intervals if noise is the only cause of their width


# --- what a run could decide, and the command that would decide more --------------------------------------------------


def closing(rows: Sequence[ResultRow], request: BenchRequest) -> list[str]:
    """Return the lines that show how small a difference the run could resolve, and the command for a longer run. Return
    no lines if every verdict is decided.

    The longer run has more time if the intervals are too wide, or more processes if each process was certain but the
    processes disagree.
    """
    compared = [row for row in rows if row.status == "ok" and row.kernel != row.baseline]
    if not any(row.verdict == "inconclusive" for row in compared):
        return []
    sizes = [(row.kernel, resolvable_difference(row, request.method.margin)) for row in compared]
    resolved = sorted((size, kernel) for kernel, size in sizes if size is not None)
    lines = []
    if resolved:
        (least, best), (most, worst) = resolved[0], resolved[-1]
        text = f"this run could resolve differences of {percent(least, 2)} or more"
        if percent(most, 2) != percent(least, 2):
            text += f" ({best}); of {percent(most, 2)} or more where it was least certain ({worst})"
        lines.append(text)
    left = len(sizes) - len(resolved)
    if left:
        lines.append(f"{left} of {len(sizes)} {plural('row', len(sizes))} have no interval")
    early = any("--processes" in warning.figures for row in compared for warning in row.warnings)
    return [*lines, f"run longer: {longer_command(request, early)}"]


def longer_command(request: BenchRequest, more_processes: bool = False) -> str:
    """Return the command of this run with four times the time for each case, or with four times as many processes.

    It omits --quick, and --processes 1, whose interval holds for that process only. The other options stay as typed.
    """
    left_out = ("--quick", *(["--processes"] if request.method.processes == 1 else []))
    options = {name: value for name, value in request.asked.items() if name not in left_out}
    if more_processes and request.method.processes > 1:
        options["--processes"] = str(_MORE * request.method.processes)
    else:
        seconds = _MORE * request.method.max_time
        options["--max-time"] = f"{seconds:g}s" if seconds < 100 else f"{seconds / 60:.0f}m"
    command = command_line(options)
    if (cluster := request.cluster) is None:
        return command
    words = ["--launcher", cluster.launcher, *(["--slots", str(cluster.slots)] if cluster.slots else [])]
    words += [word for key, value in cluster.options.items() for word in ("--launcher-option", f"{key}={value}")]
    return f"{command} {shlex.join(words)}"


# --- --selftest: whether known differences are detected ---------------------------------------------------------------

_KNOWN = {"again": "identical code", "slowed": "code slowed by 5 %"}


def selftest_answer(outcome: SelfTest) -> Answer:
    """Show the known differences with their verdicts, by case."""
    parts: list[Part] = [Heading("selftest", f"--fail-if-slower {outcome.allowed:.0%}, on known differences")]
    for case in dict.fromkeys(row.case for row in outcome.rows):
        parts += [Line(case, quiet=True)]
        parts += [Line(_known_difference(row)) for row in outcome.rows if row.case == case]
    parts.append(Heading("failed" if outcome.failed else "passed"))
    rows = in_json(outcome.rows)
    body = {"selftest": {"allowed": outcome.allowed, "passed": not outcome.failed}, "rows": rows}
    return Answer("bench", body, csv_table(rows), parts)


def failed_selftest(outcome: SelfTest) -> FFNError | None:
    """Return the error for a failed selftest, with the wrong verdicts; None if it passed."""
    if not outcome.failed:
        return None
    what = "; ".join(map(_known_difference, outcome.failed))
    why = "; ".join(outcome.reasons) or "the machine may be busy"
    return FFNError(f"selftest failed: {what}", f"{why}: see ffn doctor", ExitCode.FAILED)


def _known_difference(row: KnownDifference) -> str:
    """Return text such as `code slowed by 5 %: ratio 1.051 [1.049, 1.053], flagged, as it should be`."""
    result = ("flagged" if row.flagged else "not flagged") + (", as it should be" if row.passed else ", which is wrong")
    return f"{_KNOWN[row.kernel]}: ratio {row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}], {result}"


_MOST_FAULTS = 3  # lines per condition; JSON lists all faults


# --- --list-kernels: how each computes, and what it needs -----------------------------------------------------------


def kernels_answer(kernels: Sequence[KernelLine]) -> Answer:
    """Build the answer: `rows` in JSON, one line per kernel in CSV; two lines per kernel for people."""
    parts: list[Part] = []
    for one in kernels:
        limit = "" if one.most_tokens is None else f"up to {counted(one.most_tokens, 'token')}"
        facts = (
            one.blocks, ", ".join(one.dtypes), ", ".join(one.devices), one.passes, limit,
            f"needs {', '.join(one.needs)}" if one.needs else "", "" if one.by_default else "only if named",
            f"not here: {one.missing}" if one.missing else "",
        )  # fmt: skip
        parts += [Heading(one.kernel, one.computes), Line("; ".join(filter(None, facts)), quiet=True)]
    rows = [asdict(one) for one in kernels]
    return Answer("bench", {"rows": rows}, csv_table(rows), parts)


# --- --admit: a line per condition, with the faults of unmet conditions -----------------------------------------------


def admission_answer(admission: Admission) -> Answer:
    """Build the answer: `admission` and one row per condition in JSON, one line per condition in CSV."""
    suite, conditions = admission.suite, admission.conditions
    lines = [line for condition in conditions for line in _lines(condition)]
    kernels = list(dict.fromkeys(row.kernel for row in admission.rows))
    of = f"{suite.name}, track {admission.track}, {len(kernels)} {plural('kernel', len(kernels))}"
    parts: list[Part] = [Heading(shown_path(admission.path), of), *short_lines(lines)]
    parts.append(Heading("admitted" if admission.admitted else "not admitted"))
    rows = [
        {"condition": one.name, "statement": one.statement, "passed": one.passed, "faults": list(one.faults)}
        for one in conditions
    ]
    body = {
        "file": shown_path(admission.path),
        "admission": {
            "suite": suite.name, "suite_sha256": suite.digest, "track": admission.track, "kernels": kernels,
            "admitted": admission.admitted,
        },
        "rows": rows,
    }  # fmt: skip
    return Answer("bench", body, csv_table(rows), parts)


def refused_admission(admission: Admission) -> FFNError | None:
    """Return the error for a result that is not admitted, with the unmet conditions; None if it is admitted."""
    failed = [condition.name for condition in admission.conditions if not condition.passed]
    if not failed:
        return None
    return FFNError(f"not admitted: {', '.join(failed)}", code=ExitCode.FAILED)


def _lines(condition: Condition) -> list[ShortLine]:
    """Return the condition's statement if it is met, else its faults."""
    if condition.passed:
        return [("PASS", condition.name, condition.statement)]
    left = len(condition.faults) - _MOST_FAULTS
    more = [f"and {left} more"] if left > 0 else []
    return [("FAIL", condition.name, text) for text in (*condition.faults[:_MOST_FAULTS], *more)]
