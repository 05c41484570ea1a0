"""`ffn compare --history`: the changes of every line in words, and the lines as charts."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from ffncli.bench.judge.compare import change
from ffncli.bench.judge.history import ALPHA, CONVENTIONS, ROWS, ChangePoint, History, HistoryLine
from ffncli.cli.compare.results_page import cut, span
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.plots.plot import Plot, Series
from ffncli.show.text import percent, plural, time_text, time_unit

_MOST_LINES = 200  # in the table; JSON and CSV have all
_MOST_POINTS = 2_000  # of charts, so that a page stays small
_MOST_NAMED = 5


def history_answer(history: History, verdict: bool = True) -> Answer:
    """Return the history as JSON, as CSV (one row per line and run) and as a page, lines with changes first."""
    body = {
        "history": list(history.files), "skipped": list(history.skipped), "alpha": ALPHA,
        "fail_if_slower": history.threshold,
        "slowdowns": [{"machine": o.machine, "case": o.case, "kernel": o.kernel} for o in history.slowdowns],
        "lines": [asdict(line) for line in history.lines],
    }  # fmt: skip
    runs = {run.run_id for line in history.lines for run in line.runs}
    about = f"{len(runs):,} {plural('run', len(runs))} in {len(history.files):,} {plural('file', len(history.files))}"
    counts = [len({getattr(line, name) for line in history.lines}) for name in ("kernel", "machine")]
    names = [f"{count:,} {plural(word, count)}" for count, word in zip(counts, ("kernel", "machine"), strict=True)]
    parts: list[Part] = [Heading(f"history of {' on '.join(names)}", about)]
    if history.skipped:
        left_out = ", ".join(map(cut, history.skipped[:_MOST_NAMED])) + (
            " …" if len(history.skipped) > _MOST_NAMED else ""
        )
        parts.append(Line(f"not results of ffn bench, left out: {left_out}", quiet=True))
    ordered = _ordered(history)
    parts += _shared(ordered)
    parts.append(_table(ordered[:_MOST_LINES]))
    if left := len(ordered) - _MOST_LINES:
        parts += [Line(f"and {left:,} more lines, in --json")] if left > 0 else []
    parts += [Line(text, quiet=True) for text in _notes(history)]
    if verdict:
        parts.append(Heading(failure(history) or _summary(history)))
    return Answer("compare", body, Table(ROWS, list(history.rows())), parts, CONVENTIONS)


def history_plots(history: History) -> list[Plot]:
    """Return a chart per line that has several runs, lines with changes first: the times with their intervals, and the
    mean before and after each change."""
    out, points = [], 0
    for line in _ordered(history):
        points += len(line.runs)
        if points > _MOST_POINTS or len(line.runs) < 2:
            break
        unit, size = time_unit(line.runs[0].time_s)
        times = [(float(at), run.time_s / size) for at, run in enumerate(line.runs, 1)]
        ends = [((run.time_low_s or math.nan) / size, (run.time_high_s or math.nan) / size) for run in line.runs]
        what = ", ".join(filter(None, (cut(line.case), line.machine if _several(history) else "")))
        curves = [Series(line.kernel, times, ends), *_levels(line, times)]
        first, last = line.runs[0].started_utc[:10], line.runs[-1].started_utc[:10]
        out.append(
            Plot(f"{line.kernel}: {what}", f"run, from {first} to {last}", f"{unit} per call", curves, marks=True)
        )
    return out


def _levels(line: HistoryLine, times: Sequence[tuple[float, float]]) -> list[Series]:
    """Return the means between the jumps, as one broken line; a drift has no level."""
    jumps = [one.first for one in line.changes if one.kind == "jump"]
    if not jumps:
        return []
    points: list[tuple[float, float]] = []
    for first, last in zip([0, *jumps], [*jumps, len(times)], strict=True):
        level = math.exp(math.fsum(math.log(y) for _, y in times[first:last]) / (last - first))
        points += [(times[first][0], level), (times[last - 1][0], level), (math.nan, math.nan)]
    return [Series("mean between changes", points, level=True)]


def failure(history: History) -> str:
    """Return the result of --fail-if-slower; "" if no line fails."""
    slow = history.slowdowns
    if not slow or history.threshold is None:
        return ""
    where = [cut(f"{one.case}, {one.machine}" if _several(history) else one.case) for one in slow]
    named = [
        f"{cut(one.kernel)} ({place}): {words(one, one.changes[-1])}"
        for one, place in zip(slow[:_MOST_NAMED], where, strict=False)
    ]
    more = f"; and {len(slow) - _MOST_NAMED} more" if len(slow) > _MOST_NAMED else ""
    verb = "is" if len(slow) == 1 else "are"
    total = f"{len(slow)} of {len(history.lines)} {plural('line', len(history.lines))}"
    what = f"{verb} slower by more than {percent(history.threshold)} since the last change"
    return f"{total} {what}: {'; '.join(named)}{more}"


def words(line: HistoryLine, one: ChangePoint) -> str:
    """Return text such as `12 % slower (8 to 16 %) since 2026-03-02, commit 1a2b3c4d5e6f`."""
    run = line.runs[one.first]
    text = f"{change(one.ratio)} ({span(one.ratio, one.ratio_low, one.ratio_high)})"
    when = " ".join(filter(None, (run.started_utc.replace("T", " ").removesuffix("Z"), _commit(run.commit))))
    if one.kind == "drift":
        return f"drifts: {text} from run {one.first + 1} to {one.last + 1}"
    return f"{text} since run {one.first + 1}" + (f", {when}" if when else "")


def _commit(commit: str) -> str:
    return f"(commit {cut(commit)[:12]}{'+' if commit.endswith('+') else ''})" if commit else ""


def _summary(history: History) -> str:
    changed = sum(bool(line.changes) for line in history.lines)
    tested = sum(not line.untested for line in history.lines)
    if not tested:
        return "no line has enough runs to look for a change"
    text = (
        f"{changed} of {tested} {plural('line', tested)} changed"
        if changed
        else f"no change in {tested} " + plural("line", tested)
    )
    return (
        text if history.threshold is None else f"no kernel is slower by more than {percent(history.threshold)}: {text}"
    )


def _ordered(history: History) -> list[HistoryLine]:
    return sorted(history.lines, key=lambda line: (not line.changes, bool(line.untested)))


def _several(history: History) -> bool:
    return len({line.machine for line in history.lines}) > 1


def _shared(lines: Sequence[HistoryLine]) -> list[Part]:
    """Name what all lines have in common, instead of a column for it."""
    values = [{getattr(line, name) for line in lines} for name in ("machine", "case")]
    return [Line(cut(next(iter(some))), quiet=True) for some in values if len(some) == 1]


def _table(lines: Sequence[HistoryLine]) -> Table:
    shown = [name for name in ("case", "kernel", "machine") if len({getattr(line, name) for line in lines}) > 1]
    names = shown or ["kernel"]
    rows = [
        (
            *(cut(getattr(line, name)) for name in names), len(line.runs), time_text(line.runs[0].time_s),
            time_text(line.runs[-1].time_s),
            line.untested or "; ".join(words(line, one) for one in line.changes) or "none",
        )
        for line in lines
    ]  # fmt: skip
    changed = frozenset(at for at, line in enumerate(lines) if line.changes)
    return Table((*names, "runs", "first", "last", "changes"), rows, emphasis=changed, labels=len(names))


def _notes(history: History) -> list[str]:
    """State the test, what it saw, and what else differs at a change."""
    also = [
        f"{cut(line.kernel)}, at run {one.first + 1}: {cut('; '.join(one.also))}"
        for line in history.lines for one in line.changes if one.also
    ]  # fmt: skip
    out = list(dict.fromkeys(also))[:_MOST_NAMED]
    if any(not line.untested for line in history.lines):
        seen = all(line.anchored for line in history.lines)
        anchors = "times per machine anchor show the changes, too" if seen else "some runs have no machine anchor"
        out.append(f"a history without a change shows one with a probability of {percent(ALPHA)}; {anchors}")
    return out
