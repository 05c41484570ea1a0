"""Remarks on rows, each once: notes, and warnings with advice."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ffncli.bench.judge import warnings
from ffncli.bench.results.row import BenchWarning, ResultRow
from ffncli.show.parts import Line
from ffncli.show.text import percent, plural

_SHA256 = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # 12 digits distinguish files; results keep all 64


def remarks(rows: Sequence[ResultRow]) -> list[Line]:
    """For one case: a prescribed routing, the twin, the bare products, possible savings by fusing; notes, then warnings
    with advice."""
    lines = _loads(rows)
    base = next((row for row in rows if row.kernel == row.baseline and row.status == "ok"), None)
    if base is not None:
        if base.aa_low is not None and base.aa_high is not None:
            lines.append(Line(f"the same code twice reads {base.aa_low:.3f} to {base.aa_high:.3f}", quiet=True))
        if base.gemm_ratio is not None:
            text = f"{base.kernel} takes {base.gemm_ratio:.3g} times its bare matrix products"
            if base.fusion_share_max is not None:
                text += f"; fusing the activation can save at most about {percent(base.fusion_share_max, 2)} here"
            lines.append(Line(text, quiet=True))
    return [*lines, *notes(rows), *warned(rows)]


def _loads(rows: Sequence[ResultRow]) -> list[Line]:
    """`tokens per expert: from 2.7 to 22, as counted`."""
    loads = next((row.tokens_per_expert for row in rows if row.tokens_per_expert), None)
    if loads is None:
        return []
    least, most = (f"{tokens:.3g}" for tokens in (min(loads), max(loads)))
    return [Line(f"tokens per expert: {least if least == most else f'from {least} to {most}'}, as counted", quiet=True)]


def notes(rows: Sequence[ResultRow], most: int = 20) -> list[Line]:
    """Every note once, with the kernels that it concerns."""
    texts = list(dict.fromkeys(row.note for row in rows if row.note))
    lines = [
        Line(_who(rows, [r for r in rows if r.note == n]) + _SHA256.sub(r"\1", n), quiet=True) for n in texts[:most]
    ]
    return lines + ([Line(f"and {len(texts) - most} more notes, in the CSV", quiet=True)] if len(texts) > most else [])


def warned(rows: Sequence[ResultRow]) -> list[Line]:
    """Every kind of warning once, with advice: the kernels in one case, the number of rows in several.

    The first warning of a kind represents all.
    """
    lines: list[Line] = []
    kinds: dict[str, list[BenchWarning]] = {}
    for row in rows:
        for warning in row.warnings:
            kinds.setdefault(warning.code, []).append(warning)
    several = len({row.case for row in rows}) > 1
    for alike in kinds.values():
        concerned = [row for row in rows if set(row.warnings) & set(alike)]
        who = f"{len(concerned)} of {len(rows)} {plural('row', len(rows))}: " if several else _who(rows, concerned)
        more = f" ({_first(concerned, alike[0])}; others similar)" if len(set(alike)) > 1 else ""
        advice = warnings.advice(alike[0], max(row.threads or 0 for row in concerned))
        lines.append(Line(f"warning: {who}{alike[0]}{more}" + (f" - {advice}" if advice else "")))
    return lines


def _first(rows: Sequence[ResultRow], warning: BenchWarning) -> str:
    """The row whose figures a warning shows, with its tokens if there are several cases."""
    row = next(row for row in rows if warning in row.warnings)
    if len({row.case for row in rows}) == 1 or row.tokens is None:
        return row.kernel
    return f"{row.kernel}, {row.tokens} {plural('token', row.tokens)}"


def _who(rows: Sequence[ResultRow], concerned: Sequence[ResultRow]) -> str:
    """`packed, inplace: `; empty if all are concerned."""
    names = list(dict.fromkeys(row.kernel for row in concerned))
    everyone = {row.kernel for row in rows if row.status == "ok"} | set(names)
    if len(names) > 1 and set(names) >= everyone - {row.baseline for row in rows}:
        return ""
    return (", ".join(names[:4]) + (" ..." if len(names) > 4 else "") + ": ") if names else ""
