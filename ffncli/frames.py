"""Records with rows, as pandas data frames."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.system.notebook import Shown
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


class Tabular(Shown):
    """A record with `rows`, which are records too, as a table."""

    rows: tuple[Any, ...]

    def table(self) -> list[dict[str, Any]]:
        """Return the rows of the table, each as a mapping from a column's name to the value."""
        return [asdict(row) for row in self.rows]

    @package_errors()
    def frame(self) -> DataFrame:
        """Return the table as a pandas DataFrame. Raises FFNError (exit 3) without pandas."""
        import pandas

        return pandas.DataFrame(self.table())
