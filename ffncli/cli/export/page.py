"""What was exported, as a page, JSON and CSV: the workloads, the tolerance, the files."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.errors import clean
from ffncli.run.export.call import Export
from ffncli.run.export.problem import CONVENTIONS
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

_COLUMNS = ("tokens", "matmul_flops", "elementwise_flops", "bytes")


def answer(made: Export, written: Sequence[str]) -> Answer:
    """JSON has the contents of files that were not written, if they are text."""
    problem = made.problem
    rows = [tuple(getattr(one, name) for name in _COLUMNS) for one in problem.workloads]
    paths = list(written) or list(made.files)
    files = [
        {
            "path": clean(path),
            "bytes": len(contents if isinstance(contents, bytes) else contents.encode()),
            "text": None if written or isinstance(contents, bytes) else contents,
        }
        for path, contents in zip(paths, made.files.values(), strict=True)
    ]
    body = {
        "form": made.form,
        "part": problem.part,
        "name": problem.name,
        "source": problem.source,
        "citation": problem.citation,
        "layer": None if problem.bare else f"{problem.layer.stack}.{problem.layer.index}",
        "dtype": problem.dtype.name,
        "params": problem.params,
        "tolerance": problem.tolerance,
        "formulas": problem.formulas,
        "rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
        "files": files,
    }
    allowed = f"{problem.params:,} parameters; error up to {problem.tolerance:.3g} in {problem.dtype.name}"
    parts: list[Part] = [
        Heading(clean(problem.title), made.form),
        Line(allowed),
        Table(tuple(name.replace("_", " ").replace("flops", "FLOPs") for name in _COLUMNS), rows),
        *(Line(f"wrote {clean(path)}") for path in written),
    ]
    return Answer("export", body, Table(_COLUMNS, rows), parts, CONVENTIONS)
