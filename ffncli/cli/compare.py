"""`ffn compare`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.cli.options import OutputOptions, from_zero, spread
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.run.depart import Comparison, Row
    from ffncli.run.saved import Saved

Base = Annotated[str, typer.Argument(metavar="BASE", help="A trace saved by ffn trace --save, the reference.")]
New = Annotated[str, typer.Argument(metavar="NEW", help="Another one, held to it.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance", metavar="T", parser=from_zero("--tolerance"),
        help="Relative error allowed; default by dtype: 1e-5 for fp32, 1e-2 for bf16.",
    ),
]  # fmt: skip


@spread
def command(*, base: Base, new: New, tolerance: Tolerance = None, show: OutputOptions) -> None:
    """Compare two saved traces: the first step that departs, by how much, and why. Exit 1 where one does.

    Try: ffn trace --save a.npz; ffn trace --activation gelu --save b.npz; ffn compare a.npz b.npz
    """
    output = show.output()
    paths = _files(base, new)

    # From here on torch is needed.
    from ffncli.run.depart import compare
    from ffncli.run.saved import open_saved

    saved = [open_saved(path) for path in paths]
    found = compare(saved[0], saved[1], tolerance)
    same_screen = output.path is None and all(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))
    output.show(_answer(saved[0], saved[1], found, verdict=not same_screen))  # there the error says it
    if found.first is not None:
        raise FFNError(_verdict(found.row(found.first)), "; ".join(found.causes), ExitCode.FAILED)


def _files(*names: str) -> list[Path]:
    """The two files. Raises FFNError for names that are no files, and for what cannot be compared."""
    paths = [Path(os.path.expanduser(name)) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if not os.path.isfile(path)]
    if missing and _are_activations(names):
        raise FFNError("ffn compare compares files", f"did you mean `ffn activations {' '.join(names)}`?")
    if missing:
        what = "is no file" if os.path.exists(os.path.expanduser(missing[0])) else "does not exist"
        raise FFNError(f"{shown(missing[0], 200)} {what}", "save two traces with ffn trace --save FILE")
    for name in names:
        if name.endswith(".csv"):
            raise FFNError(f"{shown(name, 200)}: results in CSV cannot be compared yet", "give two saved traces")
    return paths


def _are_activations(names: Sequence[str]) -> bool:
    from ffncli.block.activations import known_names

    return all(name.lower().replace("-", "_") in known_names() for name in names)


def _answer(base: Saved, new: Saved, found: Comparison, verdict: bool = True) -> Answer:
    """The comparison as JSON, as CSV (one row per step, then per weight) and as a page.

    Without `verdict` the page leaves to the error what that says: which step departs first, and why.
    """
    from ffncli.run.depart import CONVENTIONS

    body = {"base": base.where, "new": new.where, **asdict(found)}
    columns = tuple(f.name for f in fields(found.rows[0]))
    every = [*found.rows, *found.weights]
    rows = Table(columns, [tuple(getattr(row, name) for name in columns) for row in every])
    parts: list[Part] = [Heading(f"{base.where} against {new.where}", "BASE is the reference")]
    parts += [Line(f"{m.field}: {m.base} in BASE, {m.new} in NEW", quiet=True) for m in found.mismatches]
    parts.append(_table(found.rows, "step", found.first))
    if found.weights:
        parts.append(_table(found.weights, "weight", None))
    if found.first is None:
        parts.append(Heading(f"all {len(found.rows)} steps agree"))
        if other := [row.step for row in found.weights if not row.agrees]:
            parts.append(Line(f"though weights differ: {', '.join(other)}"))
    elif verdict:
        parts.append(Heading(_verdict(found.row(found.first))))
        parts += [Line(cause) for cause in found.causes]
    return Answer("compare", body, rows, parts, CONVENTIONS)


def _table(rows: tuple[Row, ...], first_column: str, first: str | None) -> Table:
    columns = (first_column, "max error", "relative", "ulps", "worst element", "base", "new", "ok")
    cells = [
        (row.step, row.max_error, _finite(row.relative_error), row.ulps, row.worst, row.base, row.new, row.agrees)
        for row in rows
    ]
    return Table(columns, cells, emphasis=frozenset(at for at, row in enumerate(rows) if row.step == first))


def _finite(relative: float) -> float | None:
    """A relative error as a page has it: None where BASE is 0 everywhere, as in JSON."""
    return relative if math.isfinite(relative) else None


def _verdict(row: Row) -> str:
    """`up departs first: at up[0,3] base has 1.5, new 1.25 ...`."""
    at = f"{row.step} departs first: {row.worst} is {row.base!r} in BASE, {row.new!r} in NEW"
    if row.nonfinite:
        return f"{at} ({row.nonfinite:,} values are not finite in one alone)"
    if _finite(row.relative_error) is None:
        return f"{at}; all of it is 0 in BASE, so that no error is relative to it"
    near = row.base is not None and row.new is not None and abs(row.new - row.base) <= abs(row.base)
    ulps = (
        f", {row.ulps:.4g} ulps of {row.dtype}" if near and row.ulps is not None else ""
    )  # else the unit says nothing
    return f"{at}; relative error {row.relative_error:.3g} > {row.tolerance:g}{ulps}"
