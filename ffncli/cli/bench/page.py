"""The rows of `ffn bench` as JSON, as CSV and as a page that a newcomer can read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ffncli.bench.judge import warnings
from ffncli.bench.judge.failure import name_in
from ffncli.bench.judge.gate import Gate, GatedRow
from ffncli.bench.judge.warnings import Code
from ffncli.bench.records import Case
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.csv_file import COLUMNS, cells
from ffncli.bench.results.journal import ResultFiles
from ffncli.bench.results.row import BenchWarning, ResultRow
from ffncli.errors import shown_path
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import percent, plural, time_text

CONVENTIONS = {
    "ratio": "time over the baseline's in the same rounds; ratio_low to ratio_high holds it with 95 % confidence,"
    " Student's t over the processes",
    "verdict": "faster or slower: the interval lies wholly beyond 2 %; same: wholly within; else inconclusive",
    "time_s": "of one call; the quotient of two need not equal their ratio",
    "roof_fraction": "of the best that this machine reached in this run: matrix products, or bytes copied",
}
_SHA256 = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # 12 digits tell two files apart; results hold all 64
_MANY = 6  # cases; more share one table
_VARYING = ("label", "tokens", "dtype", "passes", "cache", "device", "threads")
_NAMES = {"label": "block", "passes": "pass"}
_CACHES = {
    "warm": "weights in cache", "shared": "weights in cache, as far as all kernels' fit",
    "cold-weights": "weights not in cache", "flush": "caches emptied before each call",
}  # fmt: skip


def answer(
    rows: Sequence[ResultRow],
    request: BenchRequest,
    judged: Gate | None,
    files: ResultFiles,
    spent: Mapping[str, float] | None = None,
) -> Answer:
    """`rows` in JSON and a line each in CSV have the columns of the results."""
    table = Table(COLUMNS, [cells(row) for row in rows])
    cases = {case.key: case for case in request.cases}
    parts: list[Part] = []
    if request.method.by_step:
        from ffncli.cli.bench.by_step_page import by_step_parts

        for key, case in cases.items():
            mine = [row for row in rows if row.case == key]
            parts += [*by_step_parts(case, _where(case, mine), mine), *_warned(mine)]
    elif len(cases) <= _MANY:
        for key, case in cases.items():
            parts += _case(case, [row for row in rows if row.case == key])
    else:
        parts += _sweep(cases, rows)
    if judged is not None:
        parts += _gate(judged, rows, request)
    parts += _legend(rows, request, files)
    body = {
        "file": shown_path(files.csv),
        "rounds_file": shown_path(files.rounds),
        "gate": None if judged is None else _gate_json(judged, request.fail_if_slower),
        "spent": dict(spent or {}),
        "rows": [dict(zip(COLUMNS, map(_listed, cells(row)), strict=True)) for row in rows],
    }
    return Answer("bench", body, table, parts, CONVENTIONS)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- one case ---------------------------------------------------------------------------------------------------------


def _case(case: Case, rows: Sequence[ResultRow]) -> list[Part]:
    """Its table, then what is to be said of it in words."""
    table = Table(("kernel", "time", "ratio", "verdict", "TFLOP/s", "of roof"), [_line(row) for row in rows])
    return [Heading(case.label, _where(case, rows)), table, *_remarks(rows)]


def _where(case: Case, rows: Sequence[ResultRow]) -> str:
    """`32 tokens, fp32, forward, weights in cache, cpu, 2 threads`: all of a case but its block."""
    cache = rows[0].cache if rows else case.cache
    threads = f"{case.threads} {plural('thread', case.threads)}"
    place = f"{case.device}, {threads}" if case.device == "cpu" else case.device
    return ", ".join((f"{case.tokens} {plural('token', case.tokens)}", case.dtype, case.passes, _CACHES[cache], place))


def _line(row: ResultRow) -> tuple[Any, ...]:
    rate = None if row.tflops is None else f"{row.tflops:.3g}"
    roof = None if row.roof_fraction is None else f"{100 * row.roof_fraction:.0f} %"
    return (row.kernel, time_text(row.time_s), _ratio(row), verdict(row), rate, roof)


def verdict(row: ResultRow) -> str:
    """`1.6 % faster`, `same within 2 %`, `cannot tell`; of a row without a time its status."""
    if row.status != "ok":
        return {"oom": "out of memory", "wrong": "WRONG RESULT"}.get(row.status, row.status)
    if row.kernel == row.baseline:
        return "baseline"
    if row.ratio is None:
        return "no baseline"
    if row.verdict in ("faster", "slower"):
        return f"{percent(abs(row.ratio - 1), 2)} {row.verdict}"
    return "same within 2 %" if row.verdict == "same" else "cannot tell"


def _ratio(row: ResultRow) -> str | None:
    if row.status != "ok" or row.ratio is None or row.kernel == row.baseline:
        return "1" if row.kernel == row.baseline and row.status == "ok" else None
    return f"{row.ratio:.3f}{_interval(row.ratio_low, row.ratio_high)}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


# --- in words ---------------------------------------------------------------------------------------------------------


def _remarks(rows: Sequence[ResultRow]) -> list[Part]:
    """The twin, the bare products, what fusing can save; notes, then warnings with advice."""
    found: list[Part] = []
    base = next((row for row in rows if row.kernel == row.baseline and row.status == "ok"), None)
    if base is not None:
        if base.aa_low is not None and base.aa_high is not None:
            found.append(Line(f"the same code twice reads {base.aa_low:.3f} to {base.aa_high:.3f}", quiet=True))
        if base.gemm_ratio is not None:
            text = f"{base.kernel} takes {base.gemm_ratio:.3g} times its bare matrix products"
            if base.fusion_share_max is not None:
                text += f"; fusing the activation can save at most about {percent(base.fusion_share_max, 2)} here"
            found.append(Line(text, quiet=True))
    return [*found, *_notes(rows), *_warned(rows)]


def _notes(rows: Sequence[ResultRow], most: int = 20) -> list[Line]:
    """Every note once, with whom it is of."""
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    said = [
        Line(_who(rows, [r for r in rows if r.note == n]) + _SHA256.sub(r"\1", n), quiet=True) for n in notes[:most]
    ]
    return said + ([Line(f"and {len(notes) - most} more notes, in the CSV", quiet=True)] if len(notes) > most else [])


def _warned(rows: Sequence[ResultRow]) -> list[Part]:
    """Every warning once, with whom it concerns and what to do; of one kind the first stands for all."""
    found: list[Part] = []
    kinds: dict[str, list[BenchWarning]] = {}
    for row in rows:
        for warning in row.warnings:
            kinds.setdefault(warning.code, []).append(warning)
    for alike in kinds.values():
        concerned = [row for row in rows if set(row.warnings) & set(alike)]
        more = f" ({_first(concerned, alike[0])}; the others alike)" if len(set(alike)) > 1 else ""
        advice = warnings.advice(alike[0])
        found.append(Line(f"warning: {_who(rows, concerned)}{alike[0]}{more}" + (f" - {advice}" if advice else "")))
    return found


def _first(rows: Sequence[ResultRow], warning: BenchWarning) -> str:
    """Whose figures a warning shows; the tokens too where the rows are of several cases."""
    row = next(row for row in rows if warning in row.warnings)
    return name_in(row, len({row.case for row in rows}) > 1)


def _who(rows: Sequence[ResultRow], concerned: Sequence[ResultRow]) -> str:
    """`packed, inplace: `; empty where all are concerned."""
    names = list(dict.fromkeys(row.kernel for row in concerned))
    everyone = {row.kernel for row in rows if row.status == "ok"} | set(names)
    if len(names) > 1 and set(names) >= everyone - {row.baseline for row in rows}:
        return ""
    return (", ".join(names[:4]) + (" ..." if len(names) > 4 else "") + ": ") if names else ""


# --- many cases -------------------------------------------------------------------------------------------------------


def _sweep(cases: Mapping[str, Case], rows: Sequence[ResultRow]) -> list[Part]:
    """All cases in one table; what they have in common is its heading."""
    values = {name: list(dict.fromkeys(getattr(case, name) for case in cases.values())) for name in _VARYING}
    differ = [name for name in _VARYING if len(values[name]) > 1]
    common = ", ".join(_common(name, values[name][0]) for name in _VARYING if name not in differ)
    columns = (*(_NAMES.get(name, name) for name in differ), "kernel", "time", "ratio", "verdict")
    order = {key: at for at, key in enumerate(cases)}
    lines = []
    for row in sorted(rows, key=lambda row: order.get(row.case, 0)):
        where = (str(getattr(cases[row.case], name)) for name in differ)
        lines.append((*where, row.kernel, time_text(row.time_s), _ratio(row), verdict(row)))
    twins = [row for row in rows if row.kernel == row.baseline and row.aa_low is not None and row.aa_high is not None]
    parts: list[Part] = [Heading(f"{len(cases)} cases", common), Table(columns, lines)]
    if twins:
        low, high = min(r.aa_low or 1.0 for r in twins), max(r.aa_high or 1.0 for r in twins)
        parts.append(Line(f"the same code twice reads {low:.3f} to {high:.3f}, over all cases", quiet=True))
    return [*parts, *_notes(rows, _MANY), *_warned(rows)]


def _common(name: str, value: Any) -> str:
    if name in ("tokens", "threads"):
        return f"{value} {name if value > 1 else name[:-1]}"
    return str(value)


# --- the gate ---------------------------------------------------------------------------------------------------------


def _gate(judged: Gate, rows: Sequence[ResultRow], request: BenchRequest) -> list[Part]:
    """What was checked, what was found, and what that means for the exit code."""
    allowed = percent(request.fail_if_slower or 0.0, 2)
    many = len(request.cases) > 1
    checked = [f"{row.kernel} {row.error_rel:.1e}" for row in rows if row.error_rel is not None]
    parts: list[Part] = [Heading("gate", f"fails where a kernel is more than {allowed} slower than {request.baseline}")]
    if checked and not many:
        parts.append(Line(f"results were checked against float64; relative error: {', '.join(checked)}", quiet=True))
    for words, group in (("FAILED", judged.slower), ("passed", judged.passed), ("cannot tell", judged.inconclusive)):
        parts += [Line(f"{words}: {_judged(j, many)}{_reason(j.row)}") for j in group]
    parts += [Line(f"not gated: {name_in(row, many)}: {reason}") for row, reason in judged.not_gated]
    failed, open_, left = len(judged.slower), len(judged.inconclusive), len(judged.not_gated)
    if failed:
        summary = f"{failed} {plural('kernel', failed)} slower than allowed"
    elif open_:
        summary = "no kernel is shown to be slower than allowed, but not all are shown to be within"
    else:
        summary = f"no kernel is more than {allowed} slower" if judged.passed else "nothing could be gated"
    if left and (failed or open_ or judged.passed):
        summary += f"; {left} of {left + failed + open_ + len(judged.passed)} could not be gated"
    return [*parts, Heading(f"gate: {summary}")]


def _judged(judged: GatedRow, many: bool) -> str:
    """`new: 5.1 % slower, 1.051 [1.047, 1.055], at least 4.6 % (95 % over all rows)`."""
    row, ratio = judged.row, judged.row.ratio or 1.0
    way = f"{percent(abs(ratio - 1), 2)} {'slower' if ratio > 1 else 'faster'}"
    read = f"ratio {ratio:.3f}{_interval(row.ratio_low, row.ratio_high)}"
    text = f"{name_in(row, many)} is {way} than {row.baseline}, {read}"
    low = f", at least {percent(judged.low - 1, 2)} slower" if judged.low > 1 else ""
    return f"{text}{low}"


def _reason(row: ResultRow) -> str:
    """A reason that is visible: page faults, other work, a cache that does not hold all arms."""
    seen = [part for part in row.note.split("; ") if "page fault" in part]
    if row.cache == "shared":
        seen.append("cache: the kernels' weights do not all fit into the last-level cache")
    seen += [str(warning) for warning in row.warnings if warning.code in (Code.PREEMPTED, Code.THROTTLED)]
    return f" ({'; '.join(seen)})" if seen else ""


def _gate_json(judged: Gate, allowed: float | None) -> dict[str, Any]:
    groups = (("slower", judged.slower), ("passed", judged.passed), ("inconclusive", judged.inconclusive))
    found = [
        {"case": j.row.case, "kernel": j.row.kernel, "result": result, "low": j.low, "p_holm": j.p_holm, "reason": ""}
        for result, group in groups
        for j in group
    ]
    found += [
        {
            "case": row.case,
            "kernel": row.kernel,
            "result": "not gated",
            "low": None,
            "p_holm": None,
            "reason": why,
        }
        for row, why in judged.not_gated
    ]
    return {"fail_if_slower": allowed, "failed": bool(judged.slower), "rows": found}


# --- the end ----------------------------------------------------------------------------------------------------------


def _legend(rows: Sequence[ResultRow], request: BenchRequest, files: ResultFiles) -> list[Part]:
    """How to read the page, in few lines."""
    method = request.method
    over = f"{method.processes} fresh processes" if method.processes > 1 else "this process only"
    if method.by_step:
        share = f"share of the time: a step's time over the block's in the same rounds, with its 95 % interval ({over})"
        lines = [share, f"results: {shown_path(files.csv)}"]
        return [Heading("how to read this"), *(Line(text, quiet=True) for text in lines)]
    lines = [
        f"ratio: time over {request.baseline}'s in the same rounds, with its 95 % confidence interval ({over})",
    ]
    if any(row.verdict == "inconclusive" for row in rows):
        lines.append(
            "cannot tell: the interval is neither within 2 % of 1 nor wholly beyond, or the machine was busy; try a"
            " longer --max-time"
        )
    if any(row.roof_fraction is not None for row in rows):
        lines.append("of roof: of the best matrix product (or copy) that this machine reached in this run")
    lines.append(f"every kernel was checked against float64 first; results: {shown_path(files.csv)}")
    return [Heading("how to read this"), *(Line(text, quiet=True) for text in lines)]
