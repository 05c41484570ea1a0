"""What a comparison of two results consists of: its rules, a row per case and kernel, means per kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal

from ffncli.bench.judge.environment_match import EnvironmentMismatch
from ffncli.bench.judge.ratios import differs
from ffncli.bench.judge.statistics import Interval, log_or_inf
from ffncli.bench.results.row import ASKED, name_of
from ffncli.show.page.document import record_table
from ffncli.show.text import percent
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

ALPHA = 0.05  # of the gate: the chance that any row fails wrongly
CompareVerdict = Literal["slower", "faster", "same", "inconclusive", "broken", "mended"]
CONVENTIONS = {
    "ratio": "time of NEW over time of BASE: geometric means over processes, Welch's 95 % t interval on logs of times",
    "normalised": "the same, each process's time over its own machine anchor's (numpy GEMM and copy, no torch)",
    "regression": "certainly slower by more than the threshold, raw and normalised (one-sided, Holm over the rows, "
    f"{percent(ALPHA)}), or ok in BASE and wrong, failed or oom in NEW",
}


@dataclass(frozen=True)
class Rules:
    """`margin` decides between `same` and the rest; `threshold` is --fail-if-slower, None without a gate."""

    margin: float = 0.02
    threshold: float | None = None
    allow_mismatch: bool = False

    @property
    def limit(self) -> float:
        """What a row is tested for: being slower by more than this."""
        return self.margin if self.threshold is None else self.threshold


DEFAULT_RULES = Rules()


@dataclass(frozen=True)
class ComparedRow:
    """One case and kernel. Ratios are NEW over BASE, times in seconds; None is unknown.

    `base_ratio` and `new_ratio` are against the baseline kernel of each side's own runs. `gated` says whether the row
    could fail, `reason` why it could not, or why the row is inconclusive. `verdict` is None if neither side is ok.
    """

    case: str
    block: str
    tokens: int | None
    dtype: str
    passes: str
    cache: str
    device: str
    threads: int | None
    kernel: str
    base_status: str
    new_status: str
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    normalised_ratio: float | None = None
    normalised_low: float | None = None
    normalised_high: float | None = None
    anchor_ratio: float | None = None
    anchor_low: float | None = None
    anchor_high: float | None = None
    p_holm: float | None = None
    verdict: CompareVerdict | None = None
    regression: bool = False
    gated: bool = False
    reason: str = ""
    base_time_s: float | None = None
    new_time_s: float | None = None
    processes_base: int = 0
    processes_new: int = 0
    base_ratio: float | None = None
    new_ratio: float | None = None
    routing: str = ""
    input: str = ""

    def fails(self, rules: Rules) -> bool:
        """Whether it fails: slower than a gate allows, or no longer correct; without a gate no time can fail."""
        return self.regression and (rules.threshold is not None or self.verdict == "broken")

    def anchor_disagrees(self, margin: float) -> bool:
        """Whether the times differ by more than the margin but the times normalised by the anchor disagree."""
        if self.verdict != "inconclusive" or None in (self.ratio, self.ratio_low, self.ratio_high):
            return False
        times = Interval(self.ratio or 0.0, self.ratio_low or 0.0, self.ratio_high or 0.0).map(log_or_inf)
        return self.normalised_ratio is not None and differs(times, margin)

    def inconclusive(self, threshold: float | None) -> bool:
        """Whether the question remains open: slower by more than the threshold or not; without one, the verdict."""
        if self.verdict in (None, "mended", "broken"):
            return False
        if self.regression and threshold is not None:
            return False
        if threshold is None:
            return self.verdict == "inconclusive"
        return not self.gated or self.ratio_high is None or self.ratio_high > 1 + threshold


CASE_COLUMNS = ("block", *(column.name for column in fields(ComparedRow) if column.name in ASKED))


@dataclass(frozen=True)
class KernelMean:
    """One kernel over its cases: geometric means of the ratios that are known."""

    kernel: str
    cases: int
    ratio: float
    normalised_ratio: float | None


@dataclass(frozen=True)
class ResultComparison:
    """`comparable`: the same machine and software. `rows` are in the order of BASE."""

    rules: Rules
    comparable: bool
    mismatches: tuple[EnvironmentMismatch, ...]
    rows: tuple[ComparedRow, ...]
    only_in_base: tuple[tuple[str, str], ...]
    only_in_new: tuple[tuple[str, str], ...]
    kernels: tuple[KernelMean, ...]
    remarks: tuple[str, ...]
    environment: str = ""  # common to both, in a line; differences are in `mismatches`

    @property
    def regressions(self) -> tuple[ComparedRow, ...]:
        """The rows that fail."""
        return tuple(row for row in self.rows if row.regression)

    @property
    def inconclusive(self) -> tuple[ComparedRow, ...]:
        """The rows whose question remains open."""
        return tuple(row for row in self.rows if row.inconclusive(self.rules.threshold))

    def count(self, verdict: CompareVerdict) -> int:
        """How many rows have that verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    @package_errors()
    def frame(self) -> DataFrame:
        """A row per case and kernel, as in the CSV of `ffn compare`. Raises FFNError (exit 3) without pandas."""
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows]).rename(columns=name_of)

    def __repr__(self) -> str:
        verdicts = [row.verdict for row in self.rows if row.verdict is not None]
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
        return f"<ResultComparison of {len(self.rows)} rows: {counts or 'nothing was timed on both sides'}>"

    def _repr_html_(self) -> str:
        asked = [name for name in CASE_COLUMNS if any(getattr(row, name) for row in self.rows)]
        names = (*asked, "kernel", "ratio", "ratio_low", "ratio_high", "verdict")
        rows = [[getattr(row, name) for name in names] for row in self.rows]
        return record_table(repr(self)[1:-1], [*map(name_of, names)], rows)
