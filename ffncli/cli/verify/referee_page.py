"""The referee's verdict as JSON, as CSV and as a page: a line per check, then what the certificate says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ffncli.cli.common.block_summary import dimensions_text
from ffncli.cli.common.short_lines import ShortLine, short_lines
from ffncli.cli.verify.page import by_check, check_table, error_text, every_row
from ffncli.errors import ExitCode, FFNError
from ffncli.run.verify.names import REFEREE_STATEMENTS
from ffncli.show.parts import Answer, Heading, Line, Part

if TYPE_CHECKING:
    from ffncli.run.verify.certificate import Certificate
    from ffncli.run.verify.checks.row import CheckRow
    from ffncli.run.verify.verify import Verdict


def referee_answer(verdict: Verdict, certificate: Certificate, verbose: bool = False) -> Answer:
    """`certificate` and `rows` in JSON, a line per row in CSV."""
    from ffncli.run.verify.checks.row import CONVENTIONS

    block, rows = verdict.block, verdict.rows
    of = f"{certificate.dtype} on {certificate.device}, {block.weights}"
    parts: list[Part] = [Heading(block.name, of), Line(dimensions_text(block))]
    if verbose:
        for name, mine in by_check(rows).items():
            parts += check_table(name, REFEREE_STATEMENTS[name], mine)
    else:
        parts += short_lines([_line(name, mine) for name, mine in by_check(rows).items()])
    parts += [Heading(f"{certificate.verdict.upper()} {certificate.kernel}", _remark(certificate))]
    body = {"block": asdict(block), "certificate": asdict(certificate), "rows": [asdict(row) for row in rows]}
    return Answer("verify", body, every_row(rows), parts, CONVENTIONS)


def refusal(certificate: Certificate) -> FFNError:
    """The error of a kernel that is not certified; the answer has been shown before it."""
    return FFNError(f"refused: {certificate.kernel}: {certificate.reason}", code=ExitCode.FAILED)


def _remark(certificate: Certificate) -> str:
    """`fp32-true, batch-invariant`; of a refused kernel the reason, and the arithmetic where that explains it."""
    if certificate.reason:
        like = certificate.error_class if (certificate.error_class or "").endswith("-like") else None
        return "; ".join(filter(None, (certificate.reason, like)))
    invariant = "batch-invariant" if certificate.batch_invariant else "not batch-invariant"
    return f"{certificate.error_class}, {invariant}"


def _line(name: str, rows: Sequence[CheckRow]) -> ShortLine:
    """What holds; or the first row that failed; or the figures of one that is only reported; or why it was skipped."""
    failed = next((row for row in rows if row.passed is False), None)
    if name == "precision" and rows[0].relative_error is not None:
        return "PASS" if failed is None else "FAIL", name, f"{rows[0].subject}: rms {error_text(rows[0])}"
    if failed is not None:
        return "FAIL", name, f"{failed.subject}: " + "; ".join(filter(None, (error_text(failed), failed.note)))
    figures = [row for row in rows if row.passed is None and row.relative_error is not None]
    if figures:
        more = f" and {len(figures) - 1} more" if len(figures) > 1 else ""
        return "INFO", name, f"other bits: {figures[0].subject}{more}, by up to {_largest(figures):.2g}"
    if not any(row.passed for row in rows):
        return "SKIP", name, rows[0].note
    return "PASS", name, REFEREE_STATEMENTS[name]


def _largest(rows: Sequence[CheckRow]) -> float:
    return max(row.relative_error for row in rows if row.relative_error is not None)
