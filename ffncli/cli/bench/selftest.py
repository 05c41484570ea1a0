"""`ffn bench --selftest`: does the gate fire where it must, and stay silent where it must?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import BenchRequest, Grid
from ffncli.cli.bench.options import GridOptions, MethodOptions, ResultOptions
from ffncli.errors import ExitCode, FFNError
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

_COLUMNS = ("case", "kernel", "truth", "ratio", "ratio_low", "ratio_high", "flagged", "passed")
_KERNELS = ("eager", "again=slowed:1:eager", "slowed=slowed:1.05:eager")
_ALLOWED = 0.02
_TRUTHS = {"again": 1.0, "slowed": 1.05}
_WORDS = {"again": "the same code again", "slowed": "the same code, made 5 % slower"}


def selftest_request(grid: Grid, kernels: GridOptions, method: MethodOptions, result: ResultOptions) -> BenchRequest:
    """The question whose answer is known: eager, the same once more, and the same slower by 5 %.

    Raises FFNError for options that it cannot follow.
    """
    if set(grid.passes) - {"forward"}:
        raise FFNError("--selftest slows the forward pass, and times no other", "leave out --pass")
    if kernels.kernel or kernels.baseline or result != ResultOptions() or method.by_step:
        raise FFNError("--selftest brings its own kernels, and writes no results", "leave the other options out")
    how = method.method()
    if method.processes is None and not method.quick:
        how = replace(how, processes=4)
    if how.processes == 1:
        raise FFNError("--selftest needs several --processes", "one process says nothing about the next")
    if method.max_time is None:
        how = replace(how, max_time=10.0)
    grid = replace(grid, threads=grid.threads or (1,))
    return build_request(grid, _KERNELS, "eager", how, fail_if_slower=_ALLOWED)[0]


def selftest(request: BenchRequest, output: Output) -> None:
    """Measure what is known, and say whether it was found; exit 1 where it was not."""
    from ffncli.bench.judge.gate import gate
    from ffncli.bench.suite import begun, run
    from ffncli.cli.bench.progress import unit_progress

    with (
        tempfile.TemporaryDirectory() as folder,
        begun(Path(folder, "selftest.csv"), request) as journal,
        unit_progress(request, 0, output) as tell,
    ):
        rows = run(journal, tell).rows
    allowed = request.fail_if_slower or _ALLOWED
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
