"""`ffn bench --selftest`: does the gate fire where it must, and stay silent where it must?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ffncli.bench.grid import Request
from ffncli.errors import ExitCode, FFNError
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

_COLUMNS = ("case", "kernel", "truth", "ratio", "ratio_low", "ratio_high", "flagged", "passed")
_TRUTHS = {"again": 1.0, "slowed": 1.05}
_WORDS = {"again": "the same code again", "slowed": "the same code, made 5 % slower"}


def selftest(request: Request, output: Output) -> None:
    """Measure what is known, and say whether it was found; exit 1 where it was not."""
    from ffncli.bench.gate import gate
    from ffncli.bench.suite import begun, run
    from ffncli.cli.bench import told

    with (
        tempfile.TemporaryDirectory() as folder,
        begun(Path(folder, "selftest.csv"), request) as journal,
        told(request, 0, output) as tell,
    ):
        rows = run(journal, tell).rows
    allowed = request.fail_if_slower or 0.02
    judged = gate(rows, allowed, request.method)
    flagged = {(j.row.case, j.row.kernel) for j in judged.slower}
    if bad := next((row for row in rows if row.status != "ok"), None):
        code = ExitCode.FAILED if bad.status == "wrong" else ExitCode.ENVIRONMENT
        raise FFNError(f"selftest: {bad.kernel} is {bad.status}: {bad.note}", code=code)
    lines = []
    for row in rows:
        if row.kernel in _TRUTHS:
            fired = (row.case, row.kernel) in flagged
            passed = fired == (row.kernel == "slowed")
            lines.append(
                (row.case, row.kernel, _TRUTHS[row.kernel], row.ratio, row.ratio_low, row.ratio_high, fired, passed)
            )
    output.show(_answer(lines, allowed))
    if not all(line[-1] for line in lines):
        what = "; ".join(_verdict(line, allowed) for line in lines if not line[-1])
        why = "; ".join(dict.fromkeys(reason for _, reason in judged.not_gated)) or "the machine may be busy"
        raise FFNError(f"selftest failed: {what}", f"{why}: see ffn doctor", ExitCode.FAILED)


def _answer(lines: Sequence[tuple[object, ...]], allowed: float) -> Answer:
    parts: list[Part] = [Heading("selftest", f"--fail-if-slower {allowed:.0%}, on differences that are known")]
    for case in dict.fromkeys(line[0] for line in lines):
        parts += [Line(str(case), quiet=True)]
        parts += [Line(_verdict(line, allowed)) for line in lines if line[0] == case]
    passed = all(line[-1] for line in lines)
    parts.append(Heading("passed" if passed else "failed"))
    body = {"selftest": {"allowed": allowed, "passed": passed},
            "rows": [dict(zip(_COLUMNS, line, strict=True)) for line in lines]}  # fmt: skip
    return Answer("bench", body, Table(_COLUMNS, lines), parts)


def _verdict(line: tuple[object, ...], allowed: float) -> str:
    """`the same code, made 5 % slower: reads 1.051 [1.049, 1.053], and is flagged as it must be`."""
    _, kernel, _, ratio, low, high, fired, passed = line
    said = ("flagged" if fired else "not flagged") + (", as it must be" if passed else ", which is wrong")
    return f"{_WORDS[str(kernel)]}: reads {ratio:.3f} [{low:.3f}, {high:.3f}], {said}"
