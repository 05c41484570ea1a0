"""What `ffncli.benchmark` gives: the rows, which show themselves as a table and become a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffncli.bench.results.row import ASKED, ResultRow, columns, name_of

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


class ResultRows(tuple[ResultRow, ...]):
    """The rows of a run in the order of the CSV: a tuple of them."""

    def frame(self) -> pandas.DataFrame:
        """A row per case and kernel with all columns of the CSV, in the types of `read_results`."""
        from ffncli.bench.results.csv_file import results_frame

        return results_frame(self)

    def __repr__(self) -> str:
        lines = [f"<ResultRows: {len(self)}", *(f"  {_line(row)}" for row in self[:10])]
        return "\n".join(lines) + ("\n  …>" if len(self) > 10 else ">")

    def _repr_html_(self) -> str:
        from ffncli.show.page.record_table import record_table

        asked = [name for name in ASKED if any(getattr(row, name) for row in self)]
        names = (*asked, "kernel", *columns("figure", shown="always"))
        rows = [[getattr(row, name) for name in names] for row in self]
        return record_table(f"{len(self)} results", [*map(name_of, names)], rows)


def _line(row: ResultRow) -> str:
    time = "" if row.time_s is None else f", {row.time_s:.4g} s"
    low, high = row.ratio_low, row.ratio_high
    ends = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    ratio = "" if row.ratio is None else f", ratio {row.ratio:.3f}{ends}"
    return f"{row.tokens} tokens, {row.dtype}, {row.kernel}: {row.status}{time}{ratio} {row.verdict}".rstrip()
