"""`ffn verify`: its rows as JSON, as CSV and as a page, which shows one line per check, or all rows with --verbose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.common.summaries import ShortLine, csv_table, dimensions_text, in_json, short_lines
from ffncli.errors import ExitCode, FFNError
from ffncli.options.opt import Opt
from ffncli.run.verify.call import verdict_of
from ffncli.run.verify.question import REFEREE_STATEMENTS, VerifyQuestion
from ffncli.show.parts import Answer, Heading, Line, Part, Table

if TYPE_CHECKING:
    from ffncli.run.verify.certificate import Certificate
    from ffncli.run.verify.checks.case import CheckRow
    from ffncli.run.verify.verify import Verdict

_COLUMNS = ("subject", "max error", "relative", "ulps", "tolerance", "passed")
_PASSED = {True: "PASS", False: "FAIL", None: "SKIP"}
_MANY = 4  # up to this many subjects that share a note are listed by name


_Verbose = Annotated[bool, Opt("-v", "--verbose", daily=True, help="Show every row of every check, with its errors.")]


@spread
def command(*, question: VerifyQuestion, verbose: _Verbose = False, show: OutputOptions) -> None:
    """Prove that ways of computing a block agree, and that a file was read correctly; exit 1 if not.

    Examples:
      ffn verify 512x2048:swiglu               # every check
      ffn verify ./my-model -l 1               # a checkpoint, and how it was read
      ffn verify 64x256:swiglu -k mine.py:mlp  # your kernel
      ffn verify 64x256:swiglu -k mine.py:mlp --referee
    """
    output = show.output()
    verdict = verdict_of(question)
    output.notes(*verdict.notes)
    if verdict.certificate is not None:
        certificate = verdict.certificate
        output.show(referee_answer(verdict, certificate, verbose), f"{certificate.kernel} is {certificate.verdict}")
        if certificate.reason:
            raise FFNError(f"refused: {certificate.kernel}: {certificate.reason}", code=ExitCode.FAILED)
        return
    output.show(answer(verdict, verbose), counted(verdict.rows))
    if verdict.failed:
        raise failure(verdict)


def answer(verdict: Verdict, verbose: bool = False) -> Answer:
    """Build the answer: `rows` in JSON, a line per row in CSV; a line per check, or a table if `verbose`."""
    from ffncli.run.verify.checks.case import CONVENTIONS
    from ffncli.run.verify.verify import CHECKS

    block, rows = verdict.block, verdict.rows
    parts: list[Part] = [Heading(block.name, block.weights), Line(dimensions_text(block))]
    if verbose:
        for name, mine in by_check(rows).items():
            parts += check_table(name, CHECKS[name].states, mine)
    else:
        lines = [line for name, mine in by_check(rows).items() for line in _lines(name, CHECKS[name].states, mine)]
        parts += short_lines(lines)
    parts += [Heading(counted(rows), "" if verbose else "-v shows every row")]
    body = {"block": asdict(block), "rows": in_json(rows)}
    return Answer("verify", body, csv_table(body["rows"]), parts, CONVENTIONS)


def by_check(rows: Sequence[CheckRow]) -> dict[str, list[CheckRow]]:
    """Group the rows by check, in order of appearance."""
    return {name: [row for row in rows if row.check == name] for name in dict.fromkeys(row.check for row in rows)}


def counted(rows: Sequence[CheckRow]) -> str:
    """Return text such as `31 passed, 1 failed, 2 for information`; rows for information have no verdict."""
    judged: dict[bool | None, str] = {True: "passed", False: "failed"}
    words = [judged.get(row.passed, "skipped" if row.max_error is None else "for information") for row in rows]
    return ", ".join(f"{n} {w}" for w in (*judged.values(), "skipped", "for information") if (n := words.count(w)))


def failure(verdict: Verdict) -> FFNError:
    """Return the error that lists the failures; the answer has already been shown."""
    reasons = []
    for row in verdict.failed[:3]:
        size = f"relative error {row.relative_error:.2g}" if row.relative_error is not None else row.note
        # The note names the misreading, or where a kernel is wrong and why.
        named = row.check in ("layout", "kernels") and row.note and row.relative_error is not None
        why = f": {row.note}" if named else ""
        reasons.append(f"{row.check}, {row.subject} ({size}){why}")
    more = f" and {len(verdict.failed) - 3} more" if len(verdict.failed) > 3 else ""
    return FFNError(f"not verified: {'; '.join(reasons)}{more}", code=ExitCode.FAILED)


# --- a line per check -------------------------------------------------------------------------------------------------


def _lines(name: str, states: str, rows: Sequence[CheckRow]) -> list[ShortLine]:
    """Return one line for a check (what holds, or why it was skipped), or one line per failed row.

    A user's kernel gets its own line with its error, and so does a built-in kernel if it is the only kernel requested.
    """
    from ffncli.kernels import BUILT_IN

    single = [row for row in rows if name == "kernels" and (row.subject not in BUILT_IN or len(rows) == 1)]
    others = [row for row in rows if row not in single]
    failed = [row for row in others if row.passed is False]
    lines = [("FAIL", name, f"{row.subject}: {'; '.join(filter(None, (error_text(row), row.note)))}") for row in failed]
    if single:
        states = states.replace("every kernel", "the built-in kernels")
    if others and not lines:
        passed = any(row.passed for row in others)
        judged = passed or any(row.max_error is not None for row in others)
        lines = [("PASS" if passed else "SKIP", name, states if judged else others[0].note)]
    return lines + [(_PASSED[row.passed], row.subject, error_text(row) or row.note) for row in single]


def error_text(row: CheckRow) -> str:
    """Return text such as `error 5.8e-07 (limit 2.2e-05)`, or "" for a row without figures."""
    if row.relative_error is None or row.tolerance is None:
        return ""
    return f"error {row.relative_error:.2g} (limit {row.tolerance:.2g})"


# --- a table per check ------------------------------------------------------------------------------------------------


def check_table(name: str, states: str, rows: Sequence[CheckRow]) -> list[Part]:
    """Show one check: its table of figures, then its notes, each with the subjects that it concerns.

    A tolerance shared by all rows is shown in the heading.
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


# --- the referee's verdict: a line per check, then the certificate ----------------------------------------------------


def referee_answer(verdict: Verdict, certificate: Certificate, verbose: bool = False) -> Answer:
    """Build the referee's answer: `certificate` and `rows` in JSON, one line per row in CSV."""
    from ffncli.run.verify.checks.case import CONVENTIONS

    block, rows = verdict.block, verdict.rows
    of = f"{certificate.dtype} on {certificate.device}, {block.weights}"
    parts: list[Part] = [Heading(block.name, of), Line(dimensions_text(block))]
    if verbose:
        for name, mine in by_check(rows).items():
            parts += check_table(name, REFEREE_STATEMENTS[name], mine)
    else:
        parts += short_lines([_referee_line(name, mine) for name, mine in by_check(rows).items()])
    parts += [Heading(f"{certificate.verdict.upper()} {certificate.kernel}", _remark(certificate))]
    body = {"block": asdict(block), "certificate": asdict(certificate), "rows": in_json(rows)}
    return Answer("verify", body, csv_table(body["rows"]), parts, CONVENTIONS)


def _remark(certificate: Certificate) -> str:
    """Return text such as `fp32-true, batch-invariant, gradients fp32-true`. For a refused kernel, return the reason,
    followed by the kernel's arithmetic if that explains the refusal."""
    if certificate.reason:
        like = certificate.error_class if (certificate.error_class or "").endswith("-like") else None
        return "; ".join(filter(None, (certificate.reason, like)))
    invariant = "batch-invariant" if certificate.batch_invariant else "not batch-invariant"
    gradients = "forward pass only"
    if certificate.gradients:
        gradients = f"gradients {' and '.join(dict.fromkeys(certificate.gradients.values()))}"
    return f"{certificate.error_class}, {invariant}, {gradients}"


def _referee_line(name: str, rows: Sequence[CheckRow]) -> ShortLine:
    """Return a check's line: what holds, its first failed row, figures that are only reported, or why it is skipped."""
    failed = next((row for row in rows if row.passed is False), None)
    if name in ("precision", "gradient-class") and rows[0].relative_error is not None:
        rms = "rms " if name == "precision" else ""
        worst = failed or max(rows, key=lambda row: (row.relative_error or 0.0) / (row.tolerance or 1.0))
        return "PASS" if failed is None else "FAIL", name, f"{worst.subject}: {rms}{error_text(worst)}"
    if failed is not None:
        return "FAIL", name, f"{failed.subject}: " + "; ".join(filter(None, (error_text(failed), failed.note)))
    figures = [row for row in rows if row.passed is None and row.relative_error is not None]
    if figures:
        largest = max(row.relative_error for row in figures if row.relative_error is not None)
        more = f" and {len(figures) - 1} more" if len(figures) > 1 else ""
        return "INFO", name, f"bits differ: {figures[0].subject}{more}, by up to {largest:.2g}"
    if not any(row.passed for row in rows):
        return "SKIP", name, rows[0].note
    return "PASS", name, REFEREE_STATEMENTS[name]
