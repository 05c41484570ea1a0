"""Two results next to each other: the newer's times over the older's, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ffncli.bench.judge.compare import compare
from ffncli.bench.judge.comparison_records import CASE_COLUMNS, ComparedRow, Rules
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.results.row import name_of
from ffncli.show.page.charts import RatioBar, intervals
from ffncli.show.page.document import PageParts, Section
from ffncli.show.page.element import Child, element

_MOST_DRAWN = 100
_FIGURES = (
    "base_status", "new_status", "base_time_s", "new_time_s", "ratio", "ratio_low", "ratio_high", "normalised_ratio",
    "verdict", "reason",
)  # fmt: skip


def comparison_parts(base: Path, new: Path, name: str) -> PageParts:
    """The section of two results. Raises FFNError if they have nothing in common."""
    result = compare(read_rows(base), read_rows(new), Rules(allow_mismatch=True))
    children: list[Child] = [element("p", f"The time in {new.name} over the time in {base.name}, lower is faster.")]
    if result.mismatches:
        listed = "; ".join(f"{m.field}: {m.base}, then {m.new}" for m in result.mismatches)
        children.append(element("p", f"The two were measured in different environments: {listed}. Nothing is decided."))
    drawn = [
        RatioBar(_label(row), row.ratio, row.ratio_low, row.ratio_high, row.verdict or "", row.verdict or "")
        for row in result.rows
        if row.ratio is not None
    ][:_MOST_DRAWN]
    if drawn:
        children.append(element("figure", intervals(drawn, f"time over that in {base.name}")))
    children.append(element("div", data_table=name))
    for which, left in ((base.name, result.only_in_base), (new.name, result.only_in_new)):
        if left:
            children.append(element("p", f"Only in {which}: {len(left):,} cases and kernels.", class_="muted"))
    asked = [column for column in CASE_COLUMNS if any(getattr(row, column) for row in result.rows)]
    names = (*asked, "kernel", *_FIGURES)
    rows = [[getattr(row, column) for column in names] for row in result.rows]
    data: dict[str, Any] = {"columns": [*map(name_of, names)], "rows": rows}
    section = Section(f"{name}-section", f"{base.name} and {new.name}", tuple(children))
    return PageParts((section,), {name: data})


def _label(row: ComparedRow) -> str:
    return ", ".join(str(part) for part in (row.block, f"{row.tokens} tokens", row.dtype, row.kernel) if part)
