"""The rows of `ffn verify` as JSON, as CSV and as a page to read: one table per check, what it means beneath it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from ffncli.cli.common.block_summary import dimensions_text
from ffncli.errors import ExitCode, FFNError
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.run.verify.checks.row import CheckRow
    from ffncli.run.verify.verify import Verdict

_COLUMNS = ("subject", "max error", "relative", "ulps", "tolerance", "passed")
_MANY = 4  # subjects that share a note are named up to so many


def answer(verdict: Verdict) -> Answer:
    """All rows: `rows` in JSON, a line each in CSV."""
    from ffncli.run.verify.checks.row import CONVENTIONS, CheckRow
    from ffncli.run.verify.verify import CHECKS

    block, rows = verdict.block, verdict.rows
    names = tuple(f.name for f in fields(CheckRow))
    table = Table(names, [tuple(getattr(row, name) for name in names) for row in rows])
    parts: list[Part] = [Heading(block.name, block.weights), Line(dimensions_text(block))]
    for name in dict.fromkeys(row.check for row in rows):
        parts += _check(name, CHECKS[name].states, [row for row in rows if row.check == name])
    parts += [Heading(counted(rows))]
    return Answer("verify", {"block": asdict(block), "rows": [asdict(row) for row in rows]}, table, parts, CONVENTIONS)


def counted(rows: Sequence[CheckRow]) -> str:
    """`31 passed, 1 failed, 4 without a verdict`."""
    counts = ((True, "passed"), (False, "failed"), (None, "without a verdict"))
    return ", ".join(f"{n} {word}" for value, word in counts if (n := sum(row.passed is value for row in rows)))


def failure(verdict: Verdict) -> FFNError:
    """The error that names what failed; the answer has been shown before it."""
    said = []
    for row in verdict.failed[:3]:
        size = f"relative error {row.relative_error:.2g}" if row.relative_error is not None else row.note
        named = row.check == "layout" and row.note and row.relative_error is not None  # it names the misreading
        why = f": {row.note}" if named else ""
        said.append(f"{row.check}, {row.subject} ({size}){why}")
    more = f" and {len(verdict.failed) - 3} more" if len(verdict.failed) > 3 else ""
    return FFNError(f"not verified: {'; '.join(said)}{more}", code=ExitCode.FAILED)


def _check(name: str, states: str, rows: Sequence[CheckRow]) -> list[Part]:
    """One check: its table of figures, then the notes, each with the subjects that it is of.

    A tolerance that all rows have stands in the heading.
    """
    allowed = {row.tolerance for row in rows} - {None}
    (one,) = allowed if len(allowed) == 1 else (None,)
    parts: list[Part] = [Heading(name, states + ("" if one is None else f", within {one:.2g}"))]
    figures = [row for row in rows if row.max_error is not None or row.passed is not None]
    if figures:
        lines = [(r.subject, r.max_error, r.relative_error, r.ulps, r.tolerance, r.passed) for r in figures]
        failed = frozenset(at for at, row in enumerate(figures) if row.passed is False)
        used = [i for i, _ in enumerate(_COLUMNS) if i in (0, 5) or any(line[i] not in (None, one) for line in lines)]
        lines = [tuple(line[i] for i in used) for line in lines]  # type: ignore[misc]
        parts.append(Table(tuple(_COLUMNS[i] for i in used), lines, emphasis=failed))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        subjects = [row.subject for row in rows if row.note == note]
        who = "" if len(subjects) == len(rows) else f"{_named(subjects)}: "
        parts.append(Line(who + note, quiet=all(row.passed is not False for row in rows if row.note == note)))
    return parts


def _named(subjects: Sequence[str]) -> str:
    return ", ".join(subjects) if len(subjects) <= _MANY else f"{subjects[0]} ... {subjects[-1]}"
