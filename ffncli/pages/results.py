"""Turn results of `ffn bench` into sections of a page. One result has ratios, times, roofline, errors, rounds, a table
and the machine; a pair of results has the ratios of their times, with intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ffncli.bench.judge import warnings
from ffncli.bench.judge.compare import CASE_COLUMNS, ComparedRow, Rules, compare
from ffncli.bench.judge.environment_match import NothingInCommon, block_of
from ffncli.bench.results.csv_file import parse_rounds, read_rows
from ffncli.bench.results.row import ASKED, ResultRow, columns, name_of
from ffncli.errors import FFNError
from ffncli.show.page.charts import ChartLine, RatioBar, intervals, lines
from ffncli.show.page.document import Child, PageParts, Section, definitions, element
from ffncli.show.text import counted, plural, time_unit
from ffncli.system.files import open_to_read

_MOST_RATIOS = 100  # maximum number of ratios drawn; the table has all ratios
_MOST_BLOCKS = 20_000  # maximum number of blocks drawn, over all cases
_MOST_ROUNDS_BYTES = 200_000_000
_OF_CASE = ("source", *ASKED)
_FIGURES = (*columns("figure", shown="always"), *columns("figure", shown="page"))
_COLUMNS = (*_OF_CASE, "kernel", *_FIGURES, "note")
_OF_COMPARISON = (
    "base_status", "new_status", "base_time_s", "new_time_s", "ratio", "ratio_low", "ratio_high", "normalised_ratio",
    "verdict", "reason",
)  # fmt: skip
_VERDICTS = ("faster", "slower", "same", "inconclusive", "broken", "mended")
_MACHINE = ("started_utc", *columns("environment"), "threads", "precision", "processes", "rounds")


def results_parts(path: Path, name: str, compared: bool = False) -> PageParts:
    """Return a result's sections; anchors begin with `name`. A result that is `compared` has only its rows and its
    machine. Raises FFNError for another file."""
    rows = read_rows(path)
    if not rows:
        raise FFNError(f"{path} has no rows")
    labels = _labels(rows)
    with open_to_read(path) as file:
        text = file.read().decode("utf-8-sig")
    data: dict[str, Any] = {f"{name}-table": _table(rows), f"{name}-csv": {"name": path.name, "text": text}}
    sections = [] if compared else [
        Section(f"{name}-ratios", "Ratios", _ratios(rows, labels)),
        *_optional(f"{name}-times", "Time against tokens", _times(rows)),
        *_optional(f"{name}-roofline", "Roofline", _roofline(rows)),
        *_optional(f"{name}-errors", "Error and speed", _errors(rows, labels)),
    ]  # fmt: skip
    rounds = None if compared else _rounds(path, labels)
    if rounds is not None:
        data[f"{name}-rounds"], note = rounds
        place = element("div", data_rounds=f"{name}-rounds")
        sections.append(Section(f"{name}-rounds", "Rounds", (element("p", note, class_="muted"), place)))
    button = element("button", f"Download {path.name}", type="button", data_download=f"{name}-csv")
    download = element("div", button, class_="tools")
    table = element("div", data_table=f"{name}-table")
    sections += [
        Section(
            f"{name}-table", "All rows",
            (*_warnings(rows), element("details", element("summary", counted(len(rows), "row")), table, download))
            if compared else (table, download),
        ),
        Section(f"{name}-machine", "The machine", (_machine(rows),)),
        *([] if compared else [Section(f"{name}-reading", "How to read this", _HOW_TO_READ)]),
    ]  # fmt: skip
    return PageParts(tuple(sections), data, frozenset(["uplot"] if rounds is not None else []), _title(rows))


def _title(rows: Sequence[ResultRow]) -> str:
    """Return what was measured and where, as in `llama-2-7b, 16 tokens, bf16 on NVIDIA H200`."""
    blocks, tokens, dtypes, devices = (
        list(dict.fromkeys(filter(None, some)))
        for some in zip(*((row.source or block_of(row), row.tokens, row.dtype, row.device_name or row.cpu)
                          for row in rows), strict=True)
    )  # fmt: skip
    sizes = f"{tokens[0]:,}" if len(tokens) == 1 else f"{min(tokens):,} to {max(tokens):,}" if tokens else ""
    words = [
        ", ".join(blocks) if len(blocks) < 3 else f"{len(blocks)} blocks",
        f"{sizes} {plural('token', tokens[0] if len(tokens) == 1 else 2)}" if tokens else "", ", ".join(dtypes),
    ]  # fmt: skip
    return ", ".join(filter(None, words)) + (f" on {', '.join(devices)}" if devices else "")


def _warnings(rows: Sequence[ResultRow]) -> list[Child]:
    """List every kind of warning once, with the kernels that have it and with advice; those that leave the ratios as
    they are come last."""
    items = []
    for first, concerned in warnings.by_kind(rows):
        advice = warnings.advice(first, max(row.threads or 0 for row in concerned))
        kernels = list(dict.fromkeys(row.kernel for row in concerned))
        named = ", ".join(kernels) if len(kernels) < 4 else f"{len(kernels)} kernels"
        who = f"{named} ({len(concerned):,} of {len(rows):,} {plural('row', len(rows))})"
        items.append((f"{who}: {first}" + (f" - {advice}" if advice else ""), "ratios hold" in advice))
    items.sort(key=lambda item: item[1])
    listed = element("ul", [element("li", text) for text, _ in items])
    return [element("p", "Warnings about them:"), listed] if items else []


def _optional(name: str, title: str, children: Sequence[Child]) -> list[Section]:
    return [Section(name, title, tuple(children))] if children else []


def _labels(rows: Sequence[ResultRow]) -> dict[str, str]:
    """Return a label for every case, made of the columns in which the rows differ."""
    differ = [name for name in _OF_CASE if len({getattr(row, name) for row in rows}) > 1] or ["source"]
    cases = {row.case: row for row in rows}
    return {case: ", ".join(filter(None, (_word(row, name) for name in differ))) for case, row in cases.items()}


def _word(row: ResultRow | ComparedRow, name: str) -> str:
    value = getattr(row, name)
    return f"{value} {plural(name[:-1], value)}" if name in ("tokens", "threads") else str(value or "")


# --- charts -----------------------------------------------------------------------------------------------------------


def _ratios(rows: Sequence[ResultRow], labels: Mapping[str, str]) -> tuple[Child, ...]:
    """Draw each kernel's time relative to the baseline, with its interval; list the kernels without a time."""
    timed = [row for row in rows if row.ratio is not None and row.kernel != row.baseline]
    drawn = [
        RatioBar(
            row.kernel, row.ratio, row.ratio_low, row.ratio_high, row.verdict,
            "; ".join(filter(None, (row.verdict, ", ".join(one.code for one in row.warnings)))), labels[row.case],
        )
        for row in timed[:_MOST_RATIOS]
        if row.ratio is not None
    ]  # fmt: skip
    counts = {word: sum(row.verdict == word for row in timed) for word in _VERDICTS}
    verdicts = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    baselines = ", ".join(dict.fromkeys(row.baseline for row in timed))
    out: list[Child] = (
        [element("p", f"Time relative to {baselines}; lower is faster. Verdicts on {len(timed):,}: {verdicts}.")]
        if timed
        else []
    )
    wrong = [row for row in rows if row.status not in ("ok", "skipped", "")]
    out += [element("p", f"{labels[row.case]}: {row.kernel} is {row.status}: {row.note}") for row in wrong[:20]]
    out += _warnings(rows)
    if drawn:
        out.append(element("figure", intervals(drawn, f"time relative to {baselines}")))
    if len(timed) > len(drawn):
        out.append(element("p", f"Only the first {len(drawn):,} of {len(timed):,} are drawn.", class_="muted"))
    skipped = [row for row in rows if row.status == "skipped"]
    if skipped:
        listed = [element("li", f"{labels[row.case]}: {row.kernel}: {row.note}") for row in skipped[:200]]
        out.append(element("details", element("summary", f"{len(skipped):,} were skipped"), element("ul", listed)))
    return tuple(out) or (element("p", "No kernel was compared with a baseline."),)


def _times(rows: Sequence[ResultRow]) -> list[Child]:
    """Draw time against the number of tokens, with the measured roof, for each block and setting that has several
    token counts."""
    out: list[Child] = []
    fields = [field for field in _OF_CASE if field not in ("tokens", "cache")]
    for alike in _grouped(rows, lambda row: tuple(getattr(row, field) for field in fields)).values():
        timed = [row for row in alike if row.time_s and row.tokens]
        if len({row.tokens for row in timed}) < 2:
            continue
        unit, size = time_unit(max(row.time_s for row in timed if row.time_s))
        series = [
            ChartLine(
                kernel,
                [(float(row.tokens or 0), (row.time_s or math.nan) / size) for row in group],
                [
                    (row.time_low_s / size, row.time_high_s / size) if row.time_low_s and row.time_high_s else None
                    for row in group
                ],
            )
            for kernel, group in _grouped(
                sorted(timed, key=lambda row: row.tokens or 0), lambda row: row.kernel
            ).items()
        ]
        if roof := _roof(timed):
            series.append(ChartLine("measured roof", [(x, y / size) for x, y in roof], dashed=True))
        out.append(element("h3", ", ".join(filter(None, (_word(timed[0], field) for field in fields)))))
        out.append(lines(series, "tokens", f"{unit} per call"))
    return out


def _roof(rows: Sequence[ResultRow]) -> list[tuple[float, float]]:
    """Return pairs (token count, least time that the measured roof allows). This least time is a kernel's time
    multiplied by its roof fraction."""
    times: dict[int, float] = {}
    for row in rows:
        if row.roof_fraction and row.time_s and row.tokens:
            times.setdefault(row.tokens, row.time_s * row.roof_fraction)
    return [(float(tokens), time) for tokens, time in sorted(times.items())]


def _roofline(rows: Sequence[ResultRow]) -> list[Child]:
    """Draw FLOP/s against FLOPs per byte, a point per row, under the measured bandwidth and peak rate."""
    known = [row for row in rows if row.flops_per_byte and row.tflops]
    series = [
        ChartLine(kernel, [(row.flops_per_byte or 0, 1e3 * (row.tflops or 0)) for row in group], joined=False)
        for kernel, group in _grouped(known, lambda row: row.kernel).items()
    ]
    if not series:
        return []
    across = [row.flops_per_byte or 0 for row in known]
    for (dtype, threads), group in _grouped(known, lambda row: (row.dtype, row.threads)).items():
        if (roof := _peaks(group)) is not None:
            bandwidth, peak = roof
            ends = [min(across) / 2, peak / bandwidth, max(*across, 2 * peak / bandwidth)]
            points = [(x, min(peak, bandwidth * x)) for x in ends]
            series.append(ChartLine(f"roof of {dtype}, {threads} {plural('thread', threads)}", points, dashed=True))
    return [lines(series, "FLOPs per byte that no cache holds", "GFLOP/s")]


def _peaks(rows: Sequence[ResultRow]) -> tuple[float, float] | None:
    """Return the (GB/s, GFLOP/s) that the run measured. A row's roof fraction gives one of the two; its machine
    balance, which is their quotient, gives the other."""
    roofs = []
    for row in rows:
        if row.roof_fraction and row.ridge_flops_per_byte and row.tflops and row.flops_per_byte:
            reached = 1e3 * row.tflops / row.roof_fraction
            peak = reached if row.bound == "compute" else reached / row.flops_per_byte * row.ridge_flops_per_byte
            roofs.append((peak / row.ridge_flops_per_byte, peak))
    return sorted(roofs)[len(roofs) // 2] if roofs else None


def _errors(rows: Sequence[ResultRow], labels: Mapping[str, str]) -> list[Child]:
    """Draw each kernel's error against its ratio."""
    known = [row for row in rows if row.error_rel and row.ratio]
    series = [
        ChartLine(
            kernel, [(row.ratio or 0, row.error_rel or 0) for row in group], joined=False,
            labels=[f"{kernel}, {labels[row.case]}" for row in group],
        )
        for kernel, group in _grouped(known, lambda row: row.kernel).items()
    ]  # fmt: skip
    return [lines(series, "time relative to the baseline", "error against float64, ‖a−b‖ / ‖b‖")] if series else []


# --- rounds -----------------------------------------------------------------------------------------------------------


def _rounds(path: Path, labels: Mapping[str, str]) -> tuple[dict[str, Any], str] | None:
    """Return (the blocks of every case, a sentence about them) from the rounds file; None if there is no such file."""
    file = path.with_name(f"{path.name.removesuffix('.csv')}.rounds.csv")
    if not file.is_file():
        return None
    with open_to_read(file) as source:
        raw = source.read(_MOST_ROUNDS_BYTES)
    blocks = [block for _, block in parse_rounds(raw, file.name) if block.case in labels]
    every = -(-len(blocks) // _MOST_BLOCKS) or 1
    kept = blocks[::every]
    kernels = list(dict.fromkeys(block.kernel for block in kept))
    cases = [
        {
            "label": labels[case],
            "kernel": [kernels.index(b.kernel) for b in group],
            "seconds": [float(f"{b.per_call:.4g}") for b in group],
        }
        for case, group in _grouped(kept, lambda block: block.case).items()
    ]
    note = f"{len(blocks):,} timed blocks" + (f", of which one in {every} is drawn" if every > 1 else "")
    note += ". Drift does not affect the ratios, because kernels alternate."
    return {"kernels": kernels, "cases": cases}, note


# --- the table, the file, the machine ---------------------------------------------------------------------------------


def _table(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Return the rows as a table, without empty columns."""
    shown = [
        name
        for name in _COLUMNS
        if name in ("kernel", "time_s") or any(getattr(row, name) not in (None, "", ()) for row in rows)
    ]
    names = [name_of(name) for name in shown]
    return {"columns": names, "rows": [[getattr(row, name) for name in shown] for row in rows]}


def _machine(rows: Sequence[ResultRow]) -> Child:
    """List the machine and the software of the rows; fields that differ between rows list several values."""
    texts: dict[str, str] = {}
    for name in _MACHINE:
        values = dict.fromkeys(str(value) for row in rows if (value := getattr(row, name)) not in (None, ""))
        if values:
            more = f" and {len(values) - 6} more" if len(values) > 6 else ""
            texts[name.replace("_", " ")] = ", ".join([*values][:6]) + more
    return definitions(texts.items())


def _grouped(items: Iterable[Any], key: Any) -> dict[Any, list[Any]]:
    out: dict[Any, list[Any]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out


# --- two results ------------------------------------------------------------------------------------------------------


def comparison_parts(base: Path, new: Path, name: str) -> PageParts:
    """Return the section that compares two results; it says so if they have no case and kernel in common."""
    title = f"{base.name} and {new.name}"
    try:
        new_rows = read_rows(new)
        result = compare(read_rows(base), new_rows, Rules(allow_mismatch=True))
    except NothingInCommon as nothing:
        why = nothing.hint.replace(" in BASE", f" in {base.name}").replace(" in NEW", f" in {new.name}")
        text = f"Not compared: the two results have no case and kernel in common ({why})."
        return PageParts((Section(f"{name}-section", title, (element("p", text),)),), {})
    counts = {word: sum(row.verdict == word for row in result.rows) for word in _VERDICTS}
    verdicts = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    children: list[Child] = [
        element("p", f"Time in {new.name} relative to {base.name}; lower is faster. Verdicts: {verdicts or 'none'}.")
    ]
    children += [element("p", remark) for remark in result.remarks]
    if result.mismatches:
        listed = "; ".join(f"{m.field}: {m.base}, then {m.new}" for m in result.mismatches)
        children.append(element("p", f"The environments differ, which may explain the differences: {listed}."))
    differ = [column for column in CASE_COLUMNS if len({getattr(row, column) for row in result.rows}) > 1] or ["block"]
    drawn = [
        RatioBar(
            row.kernel, row.ratio, row.ratio_low, row.ratio_high, row.verdict or "", row.verdict or "",
            ", ".join(filter(None, (_word(row, column) for column in differ))),
        )
        for row in result.rows if row.ratio is not None
    ][:_MOST_RATIOS]  # fmt: skip
    if drawn:
        children.append(element("figure", intervals(drawn, f"time relative to {base.name}")))
    children.append(element("div", data_table=name))
    for which, left in ((base.name, result.only_in_base), (new.name, result.only_in_new)):
        if left:
            children.append(element("p", f"Only in {which}: {len(left):,} rows.", class_="muted"))
    asked = [column for column in CASE_COLUMNS if any(getattr(row, column) for row in result.rows)]
    names = (*asked, "kernel", *_OF_COMPARISON)
    rows = [[getattr(row, column) for column in names] for row in result.rows]
    data: dict[str, Any] = {"columns": [*map(name_of, names)], "rows": rows}
    section = Section(f"{name}-section", title, (*children, *_HOW_TO_READ[:2]))
    about = _title(new_rows)
    return PageParts((section,), {name: data}, title=f"{new.name} compared with {base.name}: {about}")


# --- how to read a page -----------------------------------------------------------------------------------------------


_RATIO = (
    "A ratio is a kernel's time divided by the baseline's time in the same rounds of the same processes. The two "
    "alternate, so a slower machine slows both. The 95 % interval covers the differences between processes."
)
_VERDICT = (
    "faster or slower: the whole interval is below or above 1 by more than the margin. same: the whole interval is "
    "within the margin. inconclusive: the interval is too wide to tell; more processes or more time make it narrower."
)
_ROOF = (
    "The roof is the best rate that the same run measured on the same threads, for a large matrix product or for "
    "reading memory. Above 100 %, the machine was faster while the kernel ran than while the roof was measured."
)
_ERROR = (
    "The error of the output is measured against float64: ‖a−b‖ / ‖b‖. It is larger for a kernel that is faster "
    "because it computes in fewer bits."
)
_HOW_TO_READ: tuple[Child, ...] = tuple(element("p", text) for text in (_RATIO, _VERDICT, _ROOF, _ERROR))
