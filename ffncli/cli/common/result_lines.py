"""Rows of `ffn bench` as lines of text: ratios, verdicts, rates, remarks, whether memory or compute bounds a case, the
command of a run."""

import re
import shlex
from collections.abc import Mapping, Sequence

from ffncli.bench.judge import warnings
from ffncli.bench.results.row import BenchWarning, ResultRow
from ffncli.show.parts import Line
from ffncli.show.text import percent, plural

STATUS = {"oom": "out of memory", "wrong": "WRONG RESULT"}  # full names for the CSV's abbreviations


def verdict(row: ResultRow) -> str:
    """Return a verdict such as `1.6 % faster` or `same within 2 %`; for a row without a time, return its status."""
    if row.status != "ok":
        return STATUS.get(row.status, row.status)
    if row.kernel == row.baseline:
        return "baseline"
    if row.ratio is None:
        return "no baseline"
    if row.verdict in ("faster", "slower"):
        return f"{percent(abs(row.ratio - 1), 2)} {row.verdict}"
    return "same within 2 %" if row.verdict == "same" else row.verdict


def ratio(row: ResultRow) -> str | None:
    """Return text such as `0.950 [0.948, 0.952]`; "1" for the baseline, None for a row without a ratio."""
    if row.status != "ok" or row.ratio is None or row.kernel == row.baseline:
        return "1" if row.kernel == row.baseline and row.status == "ok" else None
    return f"{row.ratio:.3f}{interval(row.ratio_low, row.ratio_high)}"


def interval(low: float | None, high: float | None) -> str:
    """Return text such as ` [0.948, 0.952]`, or "" if either end is unknown."""
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def rates(rows: Sequence[ResultRow]) -> tuple[str, list[str | None]]:
    """Return (unit, the rate of each row): TFLOP/s, or GFLOP/s if the fastest row would be below 1 TFLOP/s."""
    known = [row.tflops for row in rows if row.tflops is not None]
    unit, factor = ("GFLOP/s", 1000.0) if known and max(known) < 1 else ("TFLOP/s", 1.0)
    return unit, [None if row.tflops is None else f"{factor * row.tflops:.3g}" for row in rows]


_SHA256 = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # 12 digits are enough to tell files apart; results keep all 64


# --- remarks on rows, each once ---------------------------------------------------------------------------------------


def remarks(rows: Sequence[ResultRow]) -> list[Line]:
    """Return the remarks on one case: warnings with advice; prescribed routing; the baseline timed against itself and
    against its bare matrix products; what fusing could save; notes."""
    lines = _loads(rows)
    base = next((row for row in rows if row.kernel == row.baseline and row.status == "ok"), None)
    if base is not None:
        if base.aa_low is not None and base.aa_high is not None:
            read = f"{base.aa_low:.3f} to {base.aa_high:.3f}"
            lines.append(Line(f"identical code timed twice gave ratios of {read}", quiet=True))
        if base.gemm_ratio is not None:
            text = f"{base.kernel} takes {base.gemm_ratio:.3g} × the time of its bare matrix products"
            if base.fusion_share_max is not None:
                text += f"; fusing the activation can save about {percent(base.fusion_share_max, 2)} at most"
            lines.append(Line(text, quiet=True))
    return [*warned(rows), *lines, *notes(rows)]


def _loads(rows: Sequence[ResultRow]) -> list[Line]:
    """Return text such as `tokens per expert: from 2.7 to 22, as counted`."""
    loads = next((row.tokens_per_expert for row in rows if row.tokens_per_expert), None)
    if loads is None:
        return []
    least, most = (f"{tokens:.3g}" for tokens in (min(loads), max(loads)))
    return [Line(f"tokens per expert: {least if least == most else f'from {least} to {most}'}, as counted", quiet=True)]


def notes(rows: Sequence[ResultRow], most: int = 20) -> list[Line]:
    """List every note once, with the kernels that it concerns."""
    texts = list(dict.fromkeys(row.note for row in rows if row.note))
    lines = [
        Line(_who(rows, [r for r in rows if r.note == n]) + _SHA256.sub(r"\1", n), quiet=True) for n in texts[:most]
    ]
    return lines + ([Line(f"and {len(texts) - most} more notes, in the CSV", quiet=True)] if len(texts) > most else [])


def warned(rows: Sequence[ResultRow]) -> list[Line]:
    """List every kind of warning once, with advice. A line names the kernels if there is one case, or counts the rows
    if there are several cases.

    The first warning of each kind represents all warnings of that kind.
    """
    lines: list[Line] = []
    several = len({row.case for row in rows}) > 1
    for first, concerned in warnings.by_kind(rows):
        who = f"{len(concerned)} of {len(rows)} {plural('row', len(rows))}: " if several else _who(rows, concerned)
        alike = {warning for row in concerned for warning in row.warnings if warning.code == first.code}
        more = f" ({_first(concerned, first)}; others similar)" if len(alike) > 1 else ""
        advice = warnings.advice(first, max(row.threads or 0 for row in concerned))
        lines.append(Line(f"warning: {who}{first}{more}" + (f" - {advice}" if advice else "")))
    return lines


def _first(rows: Sequence[ResultRow], warning: BenchWarning) -> str:
    """Return the kernel of the row whose figures a warning shows, and its token count if there are several cases."""
    row = next(row for row in rows if warning in row.warnings)
    if len({row.case for row in rows}) == 1 or row.tokens is None:
        return row.kernel
    return f"{row.kernel}, {row.tokens} {plural('token', row.tokens)}"


def _who(rows: Sequence[ResultRow], concerned: Sequence[ResultRow]) -> str:
    """Return text such as `packed, inplace: `, or "" if all kernels are concerned."""
    names = list(dict.fromkeys(row.kernel for row in concerned))
    everyone = {row.kernel for row in rows if row.status == "ok"} | set(names)
    if len(names) > 1 and set(names) >= everyone - {row.baseline for row in rows}:
        return ""
    return (", ".join(names[:4]) + (" ..." if len(names) > 4 else "") + ": ") if names else ""


_MOST_NAMED = 6


# --- what bounds each case, and where the machine's ridge lies --------------------------------------------------------


def balance(rows: Sequence[ResultRow], names: Mapping[str, str]) -> list[Line]:
    """Return a line such as `memory bound: 1, 4; compute bound: 64; ridge 13.2 FLOP/byte, measured in this run`.

    `names` maps the keys of cases to names without commas; if there is only one case, the line shows that case's FLOPs
    per byte instead. Return no line if no rate is known.
    """
    first = {row.case: row for row in rows if row.bound and row.ridge_flops_per_byte}
    if not first:
        return []
    if len(names) == 1:
        (row,) = first.values()
        rate = row.flops_per_byte
        why = "the working set fits in cache" if rate is None else f"{rate:.3g} FLOP/byte from memory"
        what = f"{row.bound} bound: {why}"
    else:
        what = "; ".join(_named(bound, [*first.values()], names) for bound in ("memory", "compute")).strip("; ")
    return [Line(f"{what}; {_ridge(rows)}", quiet=True)]


def _named(bound: str, rows: Sequence[ResultRow], names: Mapping[str, str]) -> str:
    """Return text such as `memory bound: 1, 4`, or "" if there are no such cases."""
    cases = [names.get(row.case, row.case) for row in rows if row.bound == bound]
    if not cases:
        return ""
    if len(cases) == len(names):
        return f"all {bound} bound"
    more = f" and {len(cases) - _MOST_NAMED} more" if len(cases) > _MOST_NAMED else ""
    return f"{bound} bound: {', '.join(cases[:_MOST_NAMED])}{more}"


def _ridge(rows: Sequence[ResultRow]) -> str:
    """Return text such as `ridge 13.2 to 14.1 FLOP/byte, measured in this run` (a merged result: `in these runs`)."""
    ridges = [row.ridge_flops_per_byte for row in rows if row.ridge_flops_per_byte]
    texts = list(dict.fromkeys(f"{ridge:.3g}" for ridge in (min(ridges), max(ridges))))
    measured = any(row.roof_fraction is not None for row in rows)
    runs = "this run" if len({row.run_id for row in rows}) == 1 else "these runs"
    return f"ridge {' to '.join(texts)} FLOP/byte, {f'measured in {runs}' if measured else 'by the data sheet'}"


# --- the command of a run, from its stored options --------------------------------------------------------------------


def command_line(asked: Mapping[str, str]) -> str:
    """Return a command such as `ffn bench 512x2048:swiglu --tokens 1,32`, with the source first."""
    source = asked.get("--source")
    words = [
        *([source] if source else []),
        *(w for pair in asked.items() if pair[0] != "--source" for w in _words(*pair)),
    ]
    return f"ffn bench {shlex.join(words)}".rstrip()


def _words(name: str, value: str) -> list[str]:
    """Return an option as it is typed; a flag has no value."""
    if value == "false":
        return ["--plain" if name == "--gated" else f"--no-{name.removeprefix('--')}"]
    return [name] if value == "true" else [name, value]
