"""`ffn bench --admit`: a line per condition, with every fault of those that do not hold."""

from __future__ import annotations

from ffncli.bench.public.admission import Admission, Condition
from ffncli.cli.common.short_lines import ShortLine, short_lines
from ffncli.errors import ExitCode, FFNError, shown_path
from ffncli.show.parts import Answer, Heading, Part
from ffncli.show.tables import Table
from ffncli.show.text import plural

_MOST_FAULTS = 3  # lines of one condition; JSON has all


def admission_answer(admission: Admission) -> Answer:
    """`admission` and a row per condition in JSON, a line per condition in CSV."""
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
    table = Table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    return Answer("bench", body, table, parts)


def refused_admission(admission: Admission) -> FFNError | None:
    """The error of a result that is not admitted, naming the conditions; None for one that is."""
    failed = [condition.name for condition in admission.conditions if not condition.passed]
    if not failed:
        return None
    return FFNError(f"not admitted: {', '.join(failed)}", code=ExitCode.FAILED)


def _lines(condition: Condition) -> list[ShortLine]:
    """What holds; or each fault."""
    if condition.passed:
        return [("PASS", condition.name, condition.statement)]
    left = len(condition.faults) - _MOST_FAULTS
    more = [f"and {left} more"] if left > 0 else []
    return [("FAIL", condition.name, text) for text in (*condition.faults[:_MOST_FAULTS], *more)]
