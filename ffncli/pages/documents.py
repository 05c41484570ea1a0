"""Turn JSON answers into sections of a page: charts for what has them, and every list of records as a table."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ffncli.errors import FFNError, shown_path
from ffncli.models.files.strict_json import read_object
from ffncli.pages.checkpoints import checkpoint_charts
from ffncli.pages.layers import layer_charts
from ffncli.pages.precision import precision_charts
from ffncli.pages.records import Records, titled
from ffncli.run.verify.certificate import certificate_of
from ffncli.show.page.charts import ChartLine, CostBar, cost_bars, lines
from ffncli.show.page.document import Child, PageParts, Section, definitions, element
from ffncli.show.plots.layers import finite_number
from ffncli.show.text import counted, time_unit

_MOST_BYTES = 50_000_000
_TITLES = {"verify": "Verified", "compare": "Compared", "bench": "Results"}
_EVERY = ("schema_version", "command", "conventions")  # keys that every answer has
_MOST_LINES = 12  # drawn lines of a history
_Rows = Sequence[Mapping[str, Any]]


def document_parts(path: Path, name: str) -> PageParts:
    """Return the section of one JSON answer. Raises FFNError for any other JSON."""
    values = read_object(path, _MOST_BYTES)
    command = values.get("command")
    word = command if isinstance(command, str) and command.isalpha() else ""
    if not word:
        raise FFNError(f"{shown_path(path)} is not an answer of ffn", _HINT)
    main = _main(word, values)
    if main is None:
        raise FFNError(f"{shown_path(path)} is the JSON of ffn {word}, without rows", _HINT)
    if "certificate" in values:
        certificate_of(values, shown_path(path))
    records = Records(name, main)
    charts = list(_charts(word, values, main, name, records.data))
    left_out = (*_EVERY, "findings") if word == "compare" else _EVERY  # the charts say them
    tables = list(records.children({key: value for key, value in values.items() if key not in left_out}))
    if not any(one is not None for one in (*charts, *tables)):
        raise FFNError(f"{shown_path(path)} is the JSON of ffn {word}, without rows", _HINT)
    title = f"{len(main)} layers" if _is_layered(word, main) else _TITLES.get(word, f"ffn {word}")
    section = Section(f"{name}-section", title, (*charts, *tables, *_meanings(values.get("conventions"))))
    return PageParts((section,), records.data, title=_title(word, values))


_HINT = "a page is made from results, saved traces, and answers in JSON (ffn COMMAND -o FILE.json)"


def _main(word: str, values: Mapping[str, Any]) -> _Rows | None:
    """Return the answer's main list of records; [] if it has none, None if it is damaged."""
    inner, key = values, "rows"
    for where, holder, inside in (
        ("trace", "corpus", "layers"), ("precision", "budget", "choices"), ("trace", "", "layers"),
        ("experts", "", "layers"), ("trace", "", "steps"), ("compare", "", "lines"),
    ):  # fmt: skip
        place = values.get(holder) if holder else values
        if word == where and isinstance(place, Mapping) and inside in place:
            inner, key = place, inside
            break
    rows = inner.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    return rows if key != "layers" or all(finite_number(row.get("layer")) is not None for row in rows) else None


def _is_layered(word: str, main: _Rows) -> bool:
    return word in ("trace", "experts") and bool(main) and "layer" in main[0]


def _charts(word: str, values: Mapping[str, Any], main: _Rows, name: str, data: dict[str, Any]) -> Iterator[Child]:
    if _is_layered(word, main):
        yield from layer_charts(main, name, data)
    elif word == "trace" and main is values.get("steps"):
        costs = [CostBar(f"{row.get('name')} = {row.get('formula')}", int(finite_number(row.get("flops")) or 0),
                         str(row.get("shape"))) for row in main]  # fmt: skip
        yield cost_bars(costs) if costs else None
    elif word == "compare" and isinstance(values.get("findings"), list):
        yield from checkpoint_charts(values, main)
    elif word == "compare" and main is values.get("lines"):
        yield from _history(main)
    elif word == "precision":
        yield from precision_charts(main, values.get("budget"))


def _history(every: _Rows) -> Iterator[Child]:
    """Yield a chart of each line of a history, those with changes first: its times, with their intervals."""
    several = len({str(line.get("machine")) for line in every}) > 1
    for line in sorted(every, key=lambda line: not line.get("changes"))[:_MOST_LINES]:
        runs = [run for run in line["runs"] if isinstance(run, Mapping)] if isinstance(line.get("runs"), list) else []
        times = [(at, y, run) for at, run in enumerate(runs, 1) if (y := finite_number(run.get("time_s")))]
        if len(times) < 2:
            continue
        unit, size = time_unit(times[0][1])
        ends = [(finite_number(run.get("time_low_s")), finite_number(run.get("time_high_s"))) for _, _, run in times]
        bars = [None if low is None or high is None else (low / size, high / size) for low, high in ends]
        where = f", {line.get('machine')}" if several else ""
        yield element("h3", f"{line.get('kernel')}: {line.get('case')}{where}")
        series = [ChartLine(str(line.get("kernel")), [(float(at), y / size) for at, y, _ in times], bars)]
        yield lines(series, "run", f"{unit} per call", log_x=False, log_y=False, marks=[*_changes(line, len(runs))])


def _changes(line: Mapping[str, Any], runs: int) -> Iterator[tuple[float, str]]:
    """Yield each change of a line: where it is among the runs, counted from 1, and how much slower it made them. A jump
    lies before a run, a drift begins with one."""
    changes = line.get("changes")
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, Mapping):
            first, ratio = finite_number(change.get("first")), finite_number(change.get("ratio"))
            if first is not None and ratio is not None and 0 <= first < runs:
                drift = change.get("kind") == "drift"
                yield first + (1 if drift else 0.5), f"{'drift ' if drift else ''}{100 * (ratio - 1):+.1f} %"


def _meanings(conventions: object) -> Iterator[Child]:
    if isinstance(conventions, Mapping) and conventions:
        words = definitions((str(key), str(text)) for key, text in conventions.items())
        yield element("details", element("summary", "What the words mean"), words)


def _title(word: str, values: Mapping[str, Any]) -> str:
    """Return what the answer is about: its model or block and the prompt, or the two things compared; "" if unknown."""
    model, block, run = values.get("model"), values.get("block"), values.get("model_run")
    name = next((one["name"] for one in (block, model, values) if isinstance(one, Mapping) and one.get("name")), "")
    prompt = next((one["prompt"] for one in (run, values) if isinstance(one, Mapping) and one.get("prompt")), "")
    if word == "compare" and isinstance(lines := values.get("lines"), list):
        return f"History of {counted(len(lines), 'line')}"
    if word == "compare" and values.get("base") and values.get("new"):
        return f"{values['new']} compared with {values['base']}"
    if word == "precision" and name and isinstance(rows := values.get("rows"), list):
        formats = dict.fromkeys(str(row["format"]) for row in rows if isinstance(row, Mapping) and row.get("format"))
        name = f"{name} in {', '.join(formats)}" if formats else name
    return titled(str(name), str(prompt))
