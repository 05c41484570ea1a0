"""The rows of `ffn bench --in-model` as a page: tokens per second of a model, alone and with kernels in its FFNs."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.bench.records import Case
from ffncli.bench.results.row import ResultRow
from ffncli.cli.common.results.remarks import remarks
from ffncli.cli.common.results.words import ratio, verdict
from ffncli.show.parts import Heading, Part
from ffncli.show.tables import Table
from ffncli.show.text import plural, time_text

_COLUMNS = ("", "time", "tokens/s", "ratio", "verdict", "logits differ by", "at most")


def in_model_parts(case: Case, rows: Sequence[ResultRow]) -> list[Part]:
    """One case: a line for the model alone and one with each kernel, then remarks in words."""
    where = f"{case.device}, {case.threads} {plural('thread', case.threads)}" if case.device == "cpu" else case.device
    what = f"one forward of {case.tokens} {plural('token', case.tokens)}, {case.dtype}, {where}"
    return [Heading(case.label, what), Table(_COLUMNS, [_line(row) for row in rows]), *remarks(rows)]


def _line(row: ResultRow) -> tuple[str | None, ...]:
    speed = None if row.tokens_per_s is None else f"{row.tokens_per_s:,.4g}"
    figures = (None if value is None else f"{value:.1e}" for value in (row.logits_error, row.logits_limit))
    return (row.kernel, time_text(row.time_s), speed, ratio(row), verdict(row), *figures)
