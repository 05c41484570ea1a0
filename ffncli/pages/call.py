"""`ffncli.report` and `ffn report`: write a page, or a trace of events."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from ffncli.bench.records import BLOCK, STEP
from ffncli.bench.results.csv_file import is_results, read_rows
from ffncli.bench.results.row import ResultRow
from ffncli.errors import FFNError, option, shown_path
from ffncli.options.accept import PATH, PATHS, TEXT, listed
from ffncli.options.opt import Opt, Options, call
from ffncli.options.shared import Force
from ffncli.options.shared import Path as FilePath
from ffncli.pages.documents import document_parts
from ffncli.pages.results import comparison_parts, results_parts
from ffncli.show.page.document import PageParts, document
from ffncli.system.files import TENSOR_SUFFIXES, check_writable, open_to_read, written_whole
from ffncli.system.notebook import Shown
from ffncli.system.packages import package_errors

_MOST_FILES = 20
_ABOUT = (
    "each step was timed by itself, and the steps are laid end to end; the block above them was timed as a whole,"
    " so its time need not be their sum"
)


@dataclass(frozen=True)
class Report(Shown):
    """A written page: its `path` and size, the files that it shows, and the titles of its sections."""

    path: str
    bytes: int
    files: tuple[str, ...]
    sections: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReportQuestion(Options):
    """Write one self-contained page of HTML from results of `ffn bench` (.csv), saved traces (`ffn trace --save`), and
    the JSON of any command. If there are several results, each is compared with the next. `about` is the line under the
    title.

    If `output` ends in .json, a result of `ffn bench --by-step` becomes a trace of events for Perfetto or Chrome.

    Raises FFNError for any other kind of file, and (exit 3) if the page cannot be written.
    """

    files: Annotated[
        FilePath | Iterable[FilePath],
        Opt(
            accepts=PATHS, repeat=True,
            help="Results of ffn bench (.csv), saved traces (ffn trace --save), or the JSON of any command"
            " (-o FILE.json).",
        ),
    ] = field(kw_only=False)  # fmt: skip
    # other commands call their -o `out`
    output: Annotated[FilePath, PATH] = field(default="report.html", kw_only=False)
    title: Annotated[
        str | None,
        Opt(
            "--title",
            metavar="WORDS",
            group="Page",
            daily=True,
            help="The page's title. [default: what the file is about, such as the block and the prompt; of several"
            " files their names]",
        ),
    ] = None
    about: Annotated[str | None, TEXT] = None
    force: Force = False


@package_errors()
def write_report(question: ReportQuestion) -> Report:
    """Write the page, or the trace of events, that the question asks for."""
    chosen = [Path(os.path.expanduser(path)) for path in listed(question.files)]
    if not chosen or len(chosen) > _MOST_FILES:
        raise FFNError(f"a page shows 1 to {_MOST_FILES} files, got {len(chosen)}")
    target = Path(os.path.expanduser(question.output))
    if target.suffix.lower() not in (".html", ".htm", ".json"):
        name = option("output", str(question.output))
        raise FFNError(f"{name}: the name must end in .html, or in .json for a trace of events")
    check_writable(str(target), question.force, option("output"))
    sections: tuple[str, ...] = ()
    if target.suffix.lower() == ".json":
        if len(chosen) > 1 or _kind(chosen[0]) != "results":
            what = "a trace of events is made from one result of ffn bench --by-step"
            raise FFNError(f"{option('output')} of .json: {what}")
        text = json.dumps(_timeline(read_rows(chosen[0])), allow_nan=False)
    else:
        parts = _parts(chosen)
        names = ", ".join(path.name for path in chosen)
        about = question.about or f"Made by ffn report from {names}; the page loads nothing."
        title = parts[0].title if len(chosen) == 1 or len(parts) > len(chosen) else ""
        text = document(question.title or title or names, about, parts)
        sections = tuple(section.title for part in parts for section in part.sections)
    data = text.encode("utf-8")
    with written_whole(target) as file:
        file.write(data)
    return Report(shown_path(target), len(data), tuple(map(shown_path, chosen)), sections)


report = call(ReportQuestion, write_report, "report")


def _parts(paths: list[Path]) -> list[PageParts]:
    """Return the sections of the page: first the comparisons of results, then every file in order."""
    kinds = [_kind(path) for path in paths]
    results = [path for path, kind in zip(paths, kinds, strict=True) if kind == "results"]
    out, compared = list[PageParts](), set[Path]()
    for number, pair in enumerate(pairwise(results), 1):
        out.append(comparison_parts(*pair, f"compared{number}"))
        compared |= {*pair} if out[-1].data else set()  # without data, they have nothing in common
    for at, (path, kind) in enumerate(zip(paths, kinds, strict=True), 1):
        if kind == "results":
            out.append(results_parts(path, f"file{at}", path in compared))
        elif kind == "document":
            out.append(document_parts(path, f"file{at}"))
        else:
            from ffncli.pages.traces import trace_parts

            out.append(trace_parts(path, f"file{at}"))
        if len(paths) > 1:
            out[-1] = _named(path.name, out[-1])
    return out


def _named(name: str, parts: PageParts) -> PageParts:
    """Prefix the titles of a file's sections with the file's name."""
    titles = (one.title if one.title.startswith(name) else f"{name}: {one.title}" for one in parts.sections)
    return replace(parts, sections=tuple(replace(one, title=t) for one, t in zip(parts.sections, titles, strict=True)))


def _kind(path: Path) -> str:
    """Return the kind of a file: `results`, `trace` or `document`. Raises FFNError for anything else."""
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise FFNError(f"{shown_path(path)} does not exist")
    if path.suffix.lower() == ".json":
        return "trace" if b'"ffn_trace"' in _start(path) else "document"
    if path.suffix.lower() in TENSOR_SUFFIXES:
        return "trace"
    if is_results(path):
        start = _start(path)
        if b"schema_version" in start.partition(b"\n")[0] or not start:
            return "results"
        hint = "a trace must be .safetensors, .npz or .json (ffn trace --save)"
        raise FFNError(f"{shown_path(path)} is not a result of ffn bench", hint)
    raise FFNError(
        f"{shown_path(path)} cannot be shown on a page",
        "give results (.csv), a saved trace (.safetensors, .npz, .json), or an answer in JSON",
    )


def _start(path: Path) -> bytes:
    """Return the first bytes of a file. Raises FFNError for anything that is not a file, or cannot be read."""
    try:
        with open_to_read(path) as file:
            return file.read(65536)
    except OSError as error:
        raise FFNError(f"cannot read {shown_path(path)}: {error.strerror or error}") from None


# --- a trace of events ------------------------------------------------------------------------------------------------


def _timeline(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Return a result of `ffn bench --by-step` in Chrome's Trace Event Format, which Perfetto also opens: complete
    events ("X"), with times in microseconds. Every case is a process with three threads: the block, its steps in order,
    and the steps inside experts.

    Raises FFNError for a result without steps.
    """
    cases: dict[str, list[ResultRow]] = {}
    for row in rows:
        if row.time_s is not None and (row.kernel == BLOCK or row.kernel.startswith(STEP)):
            cases.setdefault(row.case, []).append(row)
    if not any(row.kernel.startswith(STEP) for group in cases.values() for row in group):
        raise FFNError(
            "a trace of events is made from steps, but this result has no steps", "measure with ffn bench --by-step"
        )
    events: list[dict[str, Any]] = []
    for process, (case, group) in enumerate(cases.items(), 1):
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": case}})
        ends = [0.0, 0.0, 0.0]  # end times so far: of the block, its steps, the steps inside experts
        for row in group:
            name = row.kernel.removeprefix(STEP)
            thread = 0 if row.kernel == BLOCK else 2 if "[e]." in name else 1
            lasts = 1e6 * (row.time_s or 0.0)
            share = {"share": row.ratio, "share_low": row.ratio_low, "share_high": row.ratio_high}
            event = {"name": name, "ph": "X", "pid": process, "tid": thread, "ts": ends[thread], "dur": lasts}
            events.append({**event, "args": {**share, "flops": row.flops}})
            ends[thread] += lasts
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"about": _ABOUT}}
