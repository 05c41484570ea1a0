"""The page of `ffn compare` for results: the verdict in words, failures, rows, and what was and was not compared."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ffncli.bench.judge.compare import CASE_COLUMNS, CONVENTIONS, ComparedRow, ResultComparison, change
from ffncli.bench.results.row import name_of
from ffncli.errors import clean
from ffncli.show.output import markdown
from ffncli.show.parts import Answer, Fold, Heading, Line, Part, Table
from ffncli.show.text import finite, percent, plural, time_text

LONGEST_COMMENT = 65_000  # characters of Markdown; GitHub rejects comments of more than 65,536
_UNITS = {"tokens": " tokens", "routing": " routing", "input": " input"}
_MOST_NAMED = 5  # rows named on one line
_MOST_MEANS = 20
_LONGEST_CELL = 120


def answer(
    base: Sequence[Path], new: Sequence[Path], comparison: ResultComparison, format: str = "table", verdict: bool = True
) -> Answer:
    """Return the comparison as JSON, CSV (one row per case and kernel) and a page; Markdown begins with the verdict.

    Without `verdict` the page leaves the verdict to the error message.
    """
    names = [",".join(map(str, paths)) for paths in (base, new)]
    columns = tuple(name_of(f.name) for f in fields(ComparedRow))
    table = Table(columns, [tuple(map(_known, asdict(row).values())) for row in comparison.rows])
    parts = _comment(names, comparison) if format == "md" else _page(names, comparison, verdict)
    return Answer("compare", _body(names, comparison), table, parts, CONVENTIONS)


def _known(value: Any) -> Any:
    """Return a CSV cell; an infinite end of an interval becomes empty."""
    return finite(value) if isinstance(value, float) else value


def _body(names: Sequence[str], comparison: ResultComparison) -> dict[str, Any]:
    def row(one: ComparedRow) -> dict[str, Any]:
        return {name_of(key): value for key, value in asdict(one).items()}

    def named(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        return [{"case": case, "kernel": kernel} for case, kernel in pairs]

    undecided = len(comparison.inconclusive) + len(comparison.missing)
    return {
        "base": names[0],
        "new": names[1],
        "comparable": comparison.comparable,
        "mismatches": [asdict(mismatch) for mismatch in comparison.mismatches],
        "margin": comparison.rules.margin,
        "fail_if_slower": comparison.rules.threshold,
        "verdict": headline(comparison),
        "regressions": named([(one.case, one.kernel) for one in comparison.regressions]),
        "counts": {word: comparison.count(word) for word in _WORDS} | {"undecided": undecided},
        "kernels": [asdict(kernel) for kernel in comparison.kernels],
        "only_in_base": named(comparison.only_in_base),
        "only_in_new": named(comparison.only_in_new),
        "remarks": list(comparison.remarks),
        "rows": [row(one) for one in comparison.rows],
    }


# --- words ------------------------------------------------------------------------------------------------------------

_WORDS: dict[Any, str] = {
    "broken": "no longer correct", "slower": "slower", "faster": "faster", "same": "same", "mended": "correct again",
    "inconclusive": "inconclusive",
}  # fmt: skip


def headline(comparison: ResultComparison) -> str:
    """Return the verdict over all rows in one sentence."""
    counts = ", ".join(
        f"{count} {text}" + (f" within {percent(comparison.rules.margin)}" if word == "same" else "")
        for word, text in _WORDS.items()
        if (count := comparison.count(word))
    )
    if not comparison.comparable:
        return f"shown only, without a gate: the environments differ ({counts or 'nothing was timed'})"
    if comparison.rules.threshold is None:
        return counts or "nothing was timed on both sides"
    if comparison.regressions:
        return failure(comparison, named=False)
    gated = sum(row.gated for row in comparison.rows)
    limit = percent(comparison.rules.threshold)
    if not gated:
        why = Counter(row.reason for row in comparison.rows if row.reason).most_common(1)
        return f"nothing could be gated at {limit}: {why[0][0]}"
    total = len(comparison.rows)
    left = f"; {total - gated} of {total} could not be gated" if gated < total else ""
    gone = f"; {_gone(comparison)}" if comparison.missing else ""
    return f"no kernel is certainly slower by more than {limit} ({counts}){left}{gone}"


def _gone(comparison: ResultComparison) -> str:
    lost = len(comparison.missing)
    return f"{lost} {plural('row', lost)} of BASE {'is' if lost == 1 else 'are'} not in NEW" if lost else ""


def not_gated(comparison: ResultComparison) -> str:
    """Return which rows the gate could not judge, and why, or "" if it judged all rows. Without this sentence, the rows
    that were not judged would seem to have passed."""
    left = [row for row in comparison.rows if not row.gated and row.verdict is not None]
    if comparison.rules.threshold is None:
        return ""
    gone = _gone(comparison)
    if not left:
        return gone
    reasons = list(dict.fromkeys(row.reason for row in left))
    more = f" and {len(reasons) - 1} more reasons" if len(reasons) > 1 else ""
    rows = f"{len(left)} of {len(comparison.rows)} rows were not gated by --fail-if-slower: {cut(reasons[0])}{more}"
    return "; ".join(filter(None, (rows, gone)))


def failure(comparison: ResultComparison, named: bool = True) -> str:
    """Return the result of --fail-if-slower: how many rows fail, and which; "" if no row fails."""
    slow = [row for row in comparison.regressions if row.verdict != "broken"]
    broken = [row for row in comparison.regressions if row.verdict == "broken"]
    total, margin, out = len(comparison.rows), comparison.rules.margin, []
    if slow:
        verb = "is" if len(slow) == 1 else "are"
        words = f"{len(slow)} of {total} rows {verb} slower by more than {percent(comparison.rules.limit)}"
        out.append(words + (f": {_listed(slow, margin)}" if named else ""))
    if broken:
        verb = "was ok in BASE and is not ok" if len(broken) == 1 else "were ok in BASE and are not ok"
        out.append(f"{len(broken)} of {total} rows {verb} in NEW" + (f": {_listed(broken, margin)}" if named else ""))
    return "; ".join(out)


def open_question(comparison: ResultComparison) -> str:
    """Return the message of --strict about inconclusive rows, and about rows of BASE that a gate did not find in NEW;
    "" if there are none."""
    rows, total = comparison.inconclusive, len(comparison.rows)
    open_ = f"{len(rows)} of {total} rows are inconclusive: {_listed(rows, comparison.rules.margin)}" if rows else ""
    return "; ".join(filter(None, (open_, _gone(comparison))))


def _listed(rows: Sequence[ComparedRow], margin: float) -> str:
    texts = [f"{cut(row.kernel)} ({cut(row.case)}): {words(row, margin)}" for row in rows[:_MOST_NAMED]]
    return "; ".join(texts) + (f"; and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else "")


def words(row: ComparedRow, margin: float) -> str:
    """Return text such as `12 % slower (8 to 16 %)`, `inconclusive (-3 to +8 %)` or `wrong in NEW, ok in BASE`."""
    if row.verdict in ("broken", "mended", None) or row.ratio is None:
        return f"{row.new_status} in NEW, {row.base_status} in BASE"
    if row.verdict == "same":
        return f"same within {percent(margin)}"
    low, high = row.ratio_low, row.ratio_high
    if low is None or high is None:
        return f"inconclusive ({change(row.ratio)}, one process)"
    if row.verdict == "inconclusive":
        if row.anchor_disagrees(margin) and row.normalised_ratio is not None:
            return f"inconclusive ({_signed(row.ratio)}, anchored {_signed(row.normalised_ratio)})"
        return f"inconclusive ({_signed(low)} to {_signed(high)})"
    return f"{change(row.ratio)} ({span(row.ratio, low, high)})"


def span(ratio: float, low: float, high: float) -> str:
    """Return the interval in the unit that `change` uses for the ratio, with enough digits to tell its ends apart."""
    if ratio >= 2:
        ends, unit = (low, high), ""
    elif ratio <= 0.5:
        ends, unit = (1 / high if high else math.inf, 1 / low if low else math.inf), ""
    else:
        ends, unit = ((low - 1, high - 1) if ratio >= 1 else (1 - high, 1 - low)), " %"
    scaled = [100 * end if unit else end for end in ends]
    texts = next(
        (pair for digits in (2, 3, 4) if (pair := [f"{end:.{digits}g}" for end in scaled])[0] != pair[1]),
        [f"{end:.2g}" for end in scaled],
    )
    return f"{texts[0]} to {texts[1]}{unit}"


def _percent(share: float) -> str:
    if share >= 0.095:
        return f"{100 * share:,.0f} %"
    return f"{100 * share:.2g} %" if share >= 0.00995 else f"{100 * share:.1f} %"


def _signed(ratio: float) -> str:
    if not ratio < 100:
        return "far more"
    return f"{'+' if ratio >= 1 else '-'}{_percent(abs(ratio - 1))}"


def cut(text: str) -> str:
    """Return text that is safe to print, cut if it is long."""
    text = clean(text)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


# --- parts ------------------------------------------------------------------------------------------------------------


def _page(names: Sequence[str], comparison: ResultComparison, verdict: bool) -> list[Part]:
    parts: list[Part] = [Heading(f"{names[0]} against {names[1]}", "BASE is the reference")]
    parts += [Line(text, quiet=True) for text in _frame(comparison)]
    failing, others = _split(comparison)
    if failing:
        parts.append(_table(comparison, failing, _title(comparison), "fail"))
    if others:
        parts.append(_table(comparison, others, "the other rows" if failing else ""))
    parts += _reasons(comparison)
    parts += [Line(text) for text in _alone(comparison)]
    parts += _means(comparison)
    if verdict:
        parts.append(Heading(headline(comparison)))
    return parts


def _comment(names: Sequence[str], comparison: ResultComparison) -> list[Part]:
    """Build a pull-request comment: the verdict, the failures, then the other rows, folded. It has as many rows as the
    size limit allows."""
    failing, others = _split(comparison)
    ranks = {"broken": 0, "slower": 1, "inconclusive": 2, "mended": 3, "faster": 4, "same": 5, None: 6}
    rows = [*failing, *sorted(others, key=lambda row: ranks[row.verdict])]

    def made(count: int) -> list[Part]:
        shown_rows = rows[:count]
        top, rest = shown_rows[: len(failing)], shown_rows[len(failing) :]
        parts: list[Part] = [Heading(f"ffn compare: {headline(comparison)}"[:1000])]
        if top:
            parts.append(_table(comparison, top, _title(comparison)))
        parts += _reasons(comparison)
        if left := len(rows) - count:
            parts.append(Line(f"{left:,} of {len(rows):,} rows are left out: comments have a size limit"))
        if rest:
            many = f"{len(rest):,} {'other ' if top else ''}{plural('row', len(rest))}"
            parts.append(Fold(many, [_table(comparison, rest, "")]))
        about: list[Part] = [Line(f"BASE: {cut(names[0])}; NEW: {cut(names[1])}")]
        about += [Line(text) for text in (*_frame(comparison), *_alone(comparison))]
        return [*parts, Fold("how it was measured, means over cases", [*about, *_means(comparison)])]

    return made(_most(len(rows), lambda count: len(markdown(made(count))) <= LONGEST_COMMENT))


def _most(high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest count up to `high` that fits, found by bisection."""
    if fits(high):
        return high
    low = 0
    while high - low > 1:  # each `fits` renders all rows, and the length grows with the count
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _split(comparison: ResultComparison) -> tuple[list[ComparedRow], list[ComparedRow]]:
    """Return (the failing rows, the other rows); without a gate only rows that are no longer correct fail."""
    failing = [row for row in comparison.rows if row.fails(comparison.rules)]
    return failing, [row for row in comparison.rows if not row.fails(comparison.rules)]


def _title(comparison: ResultComparison) -> str:
    if comparison.rules.threshold is None:
        return "no longer correct"
    return f"fails --fail-if-slower {percent(comparison.rules.threshold)}"


def _frame(comparison: ResultComparison) -> list[str]:
    """Return lines about what all rows have in common, about the machine, and with remarks."""
    first = comparison.rows[0]
    units = _UNITS | {"threads": f" {plural('thread', first.threads or 0)}"}
    alike = [
        f"{getattr(first, name)}{units.get(name, '')}"
        for name in CASE_COLUMNS
        if not _varies(comparison, name) and getattr(first, name)
    ]
    out = [", ".join(cut(text) for text in alike)] if alike else []
    counts = [sorted({getattr(row, f"processes_{side}") for row in comparison.rows} - {0}) for side in ("base", "new")]
    texts = ["none" if not c else f"{c[0]}" if len(c) == 1 else f"{c[0]} to {c[-1]}" for c in counts]
    out.append(f"processes: {texts[0]} in BASE, {texts[1]} in NEW; ranges are 95 % intervals over processes")
    if comparison.environment:
        out.append(cut(comparison.environment))
    out += [f"{cut(m.field)}: {cut(m.base)} in BASE, {cut(m.new)} in NEW" for m in comparison.mismatches]
    return [*out, *(cut(remark) for remark in comparison.remarks)]


def _varies(comparison: ResultComparison, name: str) -> bool:
    return any(getattr(row, name) != getattr(comparison.rows[0], name) for row in comparison.rows)


def _table(comparison: ResultComparison, rows: Sequence[ComparedRow], title: str, emphasis: str = "") -> Table:
    varying = [name for name in CASE_COLUMNS if _varies(comparison, name)]
    columns = (*(name_of(name) for name in varying), "kernel", "BASE", "NEW", "NEW's time is")
    cells = [
        (
            *(_cell(getattr(row, name)) for name in varying),
            cut(row.kernel), time_text(row.base_time_s), time_text(row.new_time_s),
            words(row, comparison.rules.margin),
        )
        for row in rows
    ]  # fmt: skip
    return Table(columns, cells, title, frozenset(range(len(rows))) if emphasis else frozenset())


def _cell(value: Any) -> Any:
    return cut(value) if isinstance(value, str) else value


def _reasons(comparison: ResultComparison) -> list[Part]:
    """List the reasons why rows were not gated or have no verdict, each reason once."""
    rows: dict[str, list[ComparedRow]] = {}
    for row in comparison.rows:
        if row.reason and row.verdict not in ("broken", "mended", None) and comparison.comparable:
            rows.setdefault(row.reason.partition(",")[0], []).append(row)  # without the row's own figures
    out: list[Part] = []
    for group in sorted(rows.values(), key=len, reverse=True)[:_MOST_NAMED]:
        kernels = list(dict.fromkeys(cut(row.kernel) for row in group))
        who = "all rows" if len(group) == len(comparison.rows) else f"{len(group)} {plural('row', len(group))}"
        few = ", ".join(kernels[:_MOST_NAMED]) + (", ..." if len(kernels) > _MOST_NAMED else "")
        texts = sorted({row.reason for row in group})
        out.append(Line(f"{who} ({few}): {cut(texts[0])}" + (" (others similar)" if len(texts) > 1 else "")))
    if len(rows) > _MOST_NAMED:
        out.append(Line(f"and {len(rows) - _MOST_NAMED} more reasons, in --json"))
    return out


def _means(comparison: ResultComparison) -> list[Part]:
    """Show one row per kernel that has several cases."""
    several = [kernel for kernel in comparison.kernels if kernel.cases > 1]
    if not several:
        return []
    columns = ("mean over cases", "cases", "NEW's time is", "relative to a fixed reference loop")
    cells = [
        (cut(k.kernel), k.cases, change(k.ratio), None if k.normalised_ratio is None else change(k.normalised_ratio))
        for k in several[:_MOST_MEANS]
    ]
    left = len(several) - len(cells)
    return [Table(columns, cells), *([Line(f"and {left} more kernels, in --json")] if left else [])]


def _alone(comparison: ResultComparison) -> list[str]:
    out = []
    for side, pairs in (("BASE", comparison.only_in_base), ("NEW", comparison.only_in_new)):
        if pairs:
            few = "; ".join(f"{cut(kernel)} ({cut(case)})" for case, kernel in pairs[:_MOST_NAMED])
            more = f"; and {len(pairs) - _MOST_NAMED} more" if len(pairs) > _MOST_NAMED else ""
            out.append(f"only in {side}, not compared: {few}{more}")
    return out
