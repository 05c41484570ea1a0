"""Write and read a benchmark's CSV, and its rounds file, which has every block.

Every record is one line of UTF-8. The reader is strict: it refuses impossible values and names their line.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import IO, TYPE_CHECKING, Annotated, Any, get_args, get_origin

from ffncli.bench.records import TimedBlock
from ffncli.bench.results.row import ASKED, SCHEMA_VERSION, BenchWarning, ResultRow, columns, name_of
from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.models.files.json_records import checked_fields, hints_of, record_of
from ffncli.options.accept import PATH, listed, several
from ffncli.options.arguments import checked
from ffncli.show.parts import csv_text
from ffncli.system.files import open_to_read
from ffncli.system.notebook import record_table

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from matplotlib.figure import Figure

COLUMNS = tuple(name_of(f.name) for f in fields(ResultRow))
ROUNDS = ("run_id", "process", "case", "placement", "round", "position", "kernel", "inner", "seconds", "flags")
_FIELDS = {name_of(f.name): f.name for f in fields(ResultRow)}
_FIXED = COLUMNS[: COLUMNS.index("note") + 1]  # in every file; columns added later may be missing
_LONGEST_LINE = 1_000_000
_MOST_COLUMNS = 1000
_WHOLE = re.compile(r"-?[0-9]{1,40}")


# --- writing ----------------------------------------------------------------------------------------------------------


def line(cells: Iterable[Any]) -> str:
    """Return one CSV record with its line end. A `;` within a list element becomes a comma."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([csv_text(_plain(cell)) for cell in cells])
    return out.getvalue()


def _plain(cell: Any) -> Any:
    if isinstance(cell, float) and not math.isfinite(cell):
        return None
    if isinstance(cell, (list, tuple)):
        return tuple(part.replace(";", ",") if isinstance(part, str) else part for part in cell)
    return cell


HEADER = line(COLUMNS)
ROUNDS_HEADER = line(ROUNDS)


def cells(row: ResultRow) -> tuple[Any, ...]:
    """Return the raw values of a row, in the order of COLUMNS, with warnings as strings."""
    values = {f.name: getattr(row, f.name) for f in fields(row)} | {"warnings": tuple(map(str, row.warnings))}
    return tuple(values.values())


def json_rows(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return each row for JSON, as a dict from column to value."""
    return [
        {name: list(cell) if isinstance(cell, tuple) else cell for name, cell in zip(COLUMNS, cells(row), strict=True)}
        for row in rows
    ]


def row_lines(rows: Sequence[ResultRow]) -> str:
    """Return the rows as lines of the CSV."""
    return "".join(line(cells(row)) for row in rows)


def block_lines(run_id: str, blocks: Sequence[TimedBlock]) -> str:
    """Return the timed blocks as lines of the rounds file."""
    return "".join(
        line((run_id, b.process, b.case, b.placement, b.round, b.position, b.kernel, b.inner, b.seconds, b.flags))
        for b in blocks
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def is_results(path: Path) -> bool:
    """Return whether a file contains results, judged by its first line or its suffix.

    Raises FFNError for a file that cannot be read, and for a rounds file, which only accompanies a result.
    """
    try:
        with open_to_read(path) as file:
            start = file.read(200).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise FFNError(f"cannot read {shown(str(path), 200)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
    if start.startswith(b"run_id,process,") or path.name.endswith(".rounds.csv"):
        stem = path.name.removesuffix(".csv").removesuffix(".rounds")
        raise FFNError(f"{shown(str(path), 200)} is a rounds file", f"give {stem}.csv, not {path.name}")
    return start.startswith(b"schema_version,") or path.suffix.lower() == ".csv"


def is_rows(path: Path) -> bool:
    """Return whether a file begins as a result does. Raises FFNError for a file that cannot be read."""
    return path.suffix.lower() == ".csv" and next((text for _, text in _lines(path)), "").startswith("schema_version,")


def read_rows(path: str | Path, growing: bool = False) -> tuple[ResultRow, ...]:
    """Read the rows of a result, or of several results joined with `cat`. The last line of a `growing` file may be
    incomplete; it is then skipped.

    Raises FFNError, naming the file and line.
    """
    rows, kinds = [], _kinds(ResultRow)
    known: dict[str, dict[str, Any]] = {name: {} for name in kinds}  # most cells repeat those of other rows
    for where, record in _records(_lines(Path(path), growing), _FIXED, []):
        if record["schema_version"] != str(SCHEMA_VERSION):
            version = shown(record["schema_version"])
            raise FFNError(f"{where}: unknown schema_version {version}", f"this ffn reads version {SCHEMA_VERSION}")
        cells = {_FIELDS[column]: text for column, text in record.items() if column in _FIELDS}
        fresh = {name: text for name, text in cells.items() if text not in known[name]}
        values = {name: _value(where, name_of(name), text, *kinds[name]) for name, text in fresh.items()}
        for name, value in checked_fields(ResultRow, values, where).items():
            known[name][fresh[name]] = value
        rows.append(ResultRow(**{name: known[name][text] for name, text in cells.items()}))
    return tuple(rows)


def unknown_column(path: Path) -> str:
    """Return a column of the file's first line that this version does not know, or "" if all are known."""
    first = next((text for _, text in _lines(path)), "")
    return next((name for name in next(csv.reader([first]), []) if name not in _FIELDS), "")


def rounds_lines(
    path: Path, of: Container[tuple[str, str]], growing: bool = False
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((run_id, case), line with its end) for every block in a rounds file whose (run_id, case) is in `of`.

    Raises FFNError, naming the file and line.
    """
    for where, text in _lines(path, growing):
        for _, record in _records([(where, text)], ROUNDS, list(ROUNDS)):
            if (key := (_text(record["run_id"]), _text(record["case"]))) in of:
                yield key, text + "\n"


def parse_rounds(raw: bytes, name: str) -> tuple[tuple[str, TimedBlock], ...]:
    """Return (run_id, block) for every line after the header of the rounds file `name`; `raw` has these lines.

    Raises FFNError, naming the file and line.
    """
    kinds = _kinds(TimedBlock)
    blocks = []
    for where, record in _records(_split(io.BytesIO(raw), name), ROUNDS, list(ROUNDS)):
        values = {column: _value(where, column, record[column], *kinds[column]) for column in kinds}
        blocks.append((_text(record["run_id"]), record_of(TimedBlock, values, where)))
    return tuple(blocks)


@checked(path=several(PATH, "a path, or several", least=1))
def read_results(path: str | Path | Sequence[str | Path]) -> pandas.DataFrame:
    """Read results of `ffn bench` as a DataFrame with a row per case and kernel and the columns of the CSV.

    Whole numbers have the type Int64 and booleans the type boolean (unknown: <NA>); other numbers have the type float64
    (unknown: NaN), strings the type str; lists are tuples. `path` may be several files. Raises FFNError for a file that
    is not a result.
    """
    return results_frame([row for one in listed(path) for row in read_rows(Path(one))])


def results_frame(records: Sequence[ResultRow]) -> pandas.DataFrame:
    """Return rows as a DataFrame, in the form in which `read_results` returns a file's rows."""
    import pandas

    rows = [cells(row) for row in records]
    kinds = {"int": "Int64", "float": "float64", "bool": "boolean"}
    series = {}
    for at, name in enumerate(COLUMNS):
        values = [row[at] for row in rows]
        plain, _ = _kinds(ResultRow)[_FIELDS[name]]
        kind = kinds.get(plain.__name__)
        if kind is None:  # strings stay unchanged: "none" is not a missing value
            series[name] = pandas.Series(values, dtype="str" if plain is str else object)
        elif kind == "float64":
            series[name] = pandas.Series([math.nan if v is None else v for v in values], dtype="float64")
        else:
            series[name] = pandas.Series([pandas.NA if v is None else v for v in values], dtype=kind)
    return pandas.DataFrame(series)


def _records(
    lines: Iterable[tuple[str, str]], needed: Sequence[str], columns: list[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (a place such as `FILE, line 7`, a dict from column to cell) for every record. More headers may follow."""
    for where, text in lines:
        try:
            (cells,) = csv.reader([text], strict=True) if text else ([],)
        except (csv.Error, ValueError) as error:
            raise FFNError(f"{where}: {error}", "it is not a CSV file") from None
        if not columns or cells[:1] == [needed[0]]:
            columns = _header(where, cells, needed)
        elif len(cells) != len(columns):
            raise FFNError(f"{where} has {len(cells)} cells, the header {len(columns)}", "the line is damaged")
        else:
            yield where, dict(zip(columns, cells, strict=True))


def _header(where: str, cells: list[str], needed: Sequence[str]) -> list[str]:
    if len(cells) > _MOST_COLUMNS:
        raise FFNError(f"{where}: {len(cells):,} columns are too many", "it is not a CSV file of `ffn bench`")
    twice = next((name for name in cells if cells.count(name) > 1), None)
    if twice is not None:
        raise FFNError(f"{where}: the column {shown(twice)} is duplicated")
    missing = next((name for name in needed if name not in cells), None)
    if missing is not None:
        kind = "rounds file" if needed is ROUNDS else "result"
        raise FFNError(f"{where}: no column {missing}", f"give a {kind} of `ffn bench`")
    return cells


def _lines(path: Path, growing: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (a place such as `FILE, line 7`, the line without its end), in a `growing` file for complete lines only."""
    try:
        with open_to_read(path) as file:
            if file.read(3) != b"\xef\xbb\xbf":
                file.seek(0)
            at, empty = shown_path(path), True
            for where, text in _split(file, at, growing):
                yield where, text
                empty = False
    except OSError as error:
        code = ExitCode.USAGE if isinstance(error, FileNotFoundError | IsADirectoryError) else ExitCode.ENVIRONMENT
        raise FFNError(f"cannot read {shown_path(path)}: {error.strerror}", code=code) from None
    except ValueError:
        raise FFNError("a file name cannot have a NUL character") from None
    if empty:
        raise FFNError(f"{at} is empty", "give a CSV of `ffn bench`")


def _split(file: IO[bytes], name: str, growing: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (a place such as `NAME, line 7`, the line) for every line. Only one line is in memory at a time."""
    number = 0
    while one := file.readline(_LONGEST_LINE + 2):
        number += 1
        where = f"{name}, line {number}"
        if b"\0" in one:
            raise FFNError(f"{where} holds a NUL byte", "the file is damaged")
        if len(one) > _LONGEST_LINE:
            raise FFNError(f"{where} is too long", "it is not a CSV file of `ffn bench`")
        if not one.endswith(b"\n"):
            if growing:
                return
            raise FFNError(f"{where} is cut off (it has no line end)", "the file is damaged, or its run unfinished")
        try:
            text = one[:-1].decode().removesuffix("\r")
        except UnicodeDecodeError:
            raise FFNError(f"{where} is not UTF-8", "the file is damaged") from None
        yield where, text


@cache
def _kinds(record: type) -> dict[str, tuple[Any, bool]]:
    """Map each field to (its type without limits, in a tuple if the field is a list of that type; whether it may be
    unknown)."""
    return {name: _kind(hint) for name, hint in hints_of(record).items()}


def _kind(hint: Any) -> tuple[Any, bool]:
    args = get_args(hint)
    if get_origin(hint) is Annotated:
        return args[0], False
    if NoneType in args:
        return _kind(next(one for one in args if one is not NoneType))[0], True
    return (tuple[_kind(args[0])[0]] if args else hint), False  # type: ignore[misc]


def _value(where: str, column: str, text: str, kind: Any, optional: bool) -> Any:
    """Convert a column's cell to the type of its field. Limits are checked later, with the whole record."""
    if kind is str:
        return _text(text)
    if get_origin(kind) is tuple:
        parts = map(_text, text.split(";")) if text else ()
        return tuple(_element(where, column, part, get_args(kind)[0]) for part in parts)
    if text == "":
        if not optional:
            raise FFNError(f"{where}: {column} is empty")
        return None
    return _element(where, column, text, kind)


def _element(where: str, column: str, text: str, kind: Any) -> Any:
    if kind is BenchWarning:
        return BenchWarning.parse(text)
    if kind is bool:
        if text not in ("true", "false"):
            raise FFNError(f"{where}: {column} must be true or false, got {shown(text)}")
        return text == "true"
    if kind is str:
        return text
    try:
        value = kind(text) if kind is float or _WHOLE.fullmatch(text) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FFNError(f"{where}: {column} is not a {'whole ' if kind is int else ''}number: {shown(text)}")
    return value


def _text(text: str) -> str:
    """Return the cell without the apostrophe that keeps a spreadsheet from running the cell as a formula."""
    return text[1:] if re.match(r"'[=+\-@]", text) else text


# --- the rows of a run ------------------------------------------------------------------------------------------------


class ResultRows(tuple[ResultRow, ...]):
    """The result of `ffncli.benchmark`: a tuple of the rows of a run, in the order of the CSV."""

    def frame(self) -> pandas.DataFrame:
        """Return a DataFrame, a row per case and kernel, with the CSV's columns and the types of `read_results`."""
        return results_frame(self)

    def __repr__(self) -> str:
        lines = [f"<ResultRows: {len(self)}", *(f"  {_line(row)}" for row in self[:10])]
        return "\n".join(lines) + ("\n  …>" if len(self) > 10 else ">")

    def plot(self) -> Figure:
        """Return a matplotlib figure of the ratios, with intervals. Raises FFNError (exit 3) without matplotlib."""
        from ffncli.bench.results.plots import ratio_plot
        from ffncli.show.plots.image import figure

        return figure(ratio_plot(self))

    def _repr_html_(self) -> str:
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
