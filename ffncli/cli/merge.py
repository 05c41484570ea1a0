"""`ffn merge`: shows what was merged, the missing cases with the commands that measure them, and the rows in the form
of `ffn bench`."""

from dataclasses import asdict, replace

from ffncli.bench.results.csv_file import COLUMNS, cells, json_rows
from ffncli.bench.results.grid_file import SHARD
from ffncli.bench.results.merge import Merged, MergeQuestion, MissingCase, merged
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.result_lines import command_line
from ffncli.cli.common.spread import spread
from ffncli.cli.common.sweep_page import sweep
from ffncli.errors import ExitCode, FFNError, shown_path
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import plural

_MOST_MISSING = 40  # lines on the page; JSON lists all missing cases
_CONVENTIONS = {
    "complete": "whether every case of the grid is present; null for results that are not parts of a grid",
    "missing": "cases of the grid without a result: part is the case's --shard; command measures it",
}


@spread
def command(*, question: MergeQuestion, show: OutputOptions) -> None:
    """Merge results of ffn bench into one, such as the parts of a grid that ran on several machines. Exit 1 if cases of
    the grid are missing; the cases that exist are merged anyway.

    Examples:
      ffn merge part-1.csv part-2.csv -o all.csv          # or part-*.csv
      ffn merge part-1.csv part-2.csv -o all.csv --force  # replaces all.csv
      ffn merge all.csv part-2.csv -o new.csv             # merged files, too
      ffn merge part-1.csv part-2.csv -o a.csv --json     # for a script
    """
    output = replace(show, out=None).output()
    result = merged(question)
    output.notes(*result.notes)
    output.show(answer(result))
    output.wrote(shown_path(result.csv))
    if missing := len(result.missing):
        of = missing + len({row.case for row in result.rows})
        what = f"{missing} of {of} cases {'is' if missing == 1 else 'are'} missing"
        raise FFNError(what, f"measure them: {_command(result, result.missing[0])}", ExitCode.FAILED)


def answer(merged: Merged) -> Answer:
    """Build the answer; JSON and CSV contain the rows in the form of `ffn bench`."""
    parts: list[Part] = [Heading(_summary(merged), shown_path(merged.csv)), _inputs(merged)]
    if merged.missing:
        parts += _missing(merged)
    if merged.grid is not None and merged.rows and not merged.grid.request.method.by_step:
        present = {row.case for row in merged.rows}
        cases = {case.key: case for case in merged.grid.request.cases if case.key in present}
        parts += sweep(cases, merged.rows, merged.grid.request.baseline)
    body = {
        "file": shown_path(merged.csv),
        "rounds_file": shown_path(merged.rounds),
        "complete": merged.complete,
        "inputs": [asdict(one) for one in merged.inputs],
        "missing": [{**asdict(one), "command": _command(merged, one)} for one in merged.missing],
        "rows": json_rows(merged.rows),
    }
    return Answer("merge", body, Table(COLUMNS, [cells(row) for row in merged.rows]), parts, _CONVENTIONS)


def _summary(merged: Merged) -> str:
    """Return text such as `14 of 20 cases from 3 files`."""
    present, files = len({row.case for row in merged.rows}), len(merged.inputs)
    of = "" if merged.grid is None else f"of {len(merged.grid.request.cases)} "
    total = present if merged.grid is None else len(merged.grid.request.cases)
    return f"{present} {of}{plural('case', total)} from {files} {plural('file', files)}"


def _inputs(merged: Merged) -> Table:
    lines = [
        (one.file, ", ".join(one.hosts), one.cases, "unfinished" if one.unfinished else "finished")
        for one in merged.inputs
    ]
    return Table(("file", "machine", "cases", "run"), lines)


def _missing(merged: Merged) -> list[Part]:
    """List the missing cases, then each command once."""
    lines = [(one.case, one.part or None, one.resume or None) for one in merged.missing[:_MOST_MISSING]]
    left = len(merged.missing) - len(lines)
    commands = sorted({_command(merged, one) for one in merged.missing}, key=lambda text: (len(text), text))
    return [
        Heading("missing", "the commands below measure them"),
        Table(("case", "part", "unfinished run"), lines),
        *([Line(f"and {left} more", quiet=True)] if left else []),
        *(Line(text) for text in commands),
    ]


def _command(merged: Merged, missing: MissingCase) -> str:
    """Return the command that measures a missing case: it resumes the unfinished run if there is one, else it runs the
    case's part on any machine."""
    if missing.resume:
        return command_line({"--resume": missing.resume})
    assert merged.grid is not None
    return command_line({**merged.grid.request.asked, SHARD: missing.part})
