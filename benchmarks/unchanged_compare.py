"""The differences between two records of unchanged.py: changed answers, and answers that were only reworded.

Keys, numbers (as written, in the same order), exit codes and short values must be the same. Only wording may differ:
lines of text, and sentences in JSON and CSV. A table lists the old and the new wording of each sentence. A refusal that
mentions other numbers, such as the limits of an option, is listed in a separate table, and counts as a change.

Only measured values are masked: most of the output of `ffn bench` and `ffn doctor`; elsewhere, times of day and the
durations of runs. A mask keeps the kind of a value, so a number that becomes null is a change.
"""

import csv
import difflib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Keys of JSON and columns of CSV whose values contain spaces but are not sentences.
NO_SENTENCES = frozenset({"case", "citation", "command", "error", "flow", "formula", "program", "prompt", "source"})
NUMBER = re.compile(r"(?:(?<![\w-])-)?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
LONGEST_DIFF = 14  # the most lines of a difference that are shown

# Lines that measure or read measurements, and the keys (in JSON, or columns in CSV) of the measured values.
MEASURING = re.compile(
    r"(?!.*(-h|--help|--admit))(.*\b(bench|benchmark|doctor)\b|.*\b(merge|report)\b.*\bout/\S+\.csv)"
)
MEASURED = frozenset({
    # which run
    "run_id",
    # times, and values computed from them
    "time_s", "time_low_s", "time_high_s", "ratio", "ratio_low", "ratio_high", "verdict", "aa_ratio", "aa_low",
    "aa_high", "gemm_ratio", "gemm_low", "gemm_high", "tflops", "gbytes_per_s", "roof_fraction", "datasheet_fraction",
    "ridge_flops_per_byte", "fusion_saving_max", "page_faults_per_call", "process_times_s", "process_anchors_s",
    "process_ratios", "tokens_per_s", "ts", "dur", "share", "share_low", "share_high",
    # the largest over all calls, whose number depends on the time
    "error_max", "error_rel", "baseline_error_rel",
    # how much was measured in the available time
    "placements", "rounds", "inner",
    # seconds spent on each activity
    "start", "verify", "warm_up", "blocks", "lead_in", "placing", "rest",
    # columns of the rounds file
    "placement", "round", "position", "seconds",
})  # fmt: skip
# In any line: when it ran, and for how long.
TIMES = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+Z|(?<=a call takes )[\d.]+ [^\s,]+")
SECONDS = frozenset({"seconds"})
# Disturbances of a measurement, of which there may be none: keys, and the first words of lines.
DISTURBANCES = frozenset({"warnings", "flags"})
PASSING_LINES = ("warning", "load", "steal", "memory")
# The names of rows of `ffn doctor` that describe this minute; everything in these rows except the name is masked.
PASSING_ROWS = frozenset({"load", "steal", "memory"})


@dataclass(frozen=True)
class Output:
    """The result of a line: exit code (negative: the signal that ended it), both streams, files that it wrote."""

    code: int
    stdout: str
    stderr: str
    files: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Reworded(NamedTuple):
    """A sentence in two wordings; one of them is empty if the sentence was added or removed."""

    old: str
    new: str
    numbers: bool = False  # whether it is a refusal that mentions other numbers


Record = Mapping[str, Output]
Difference = str | Reworded  # a str describes a change


def read(folder: Path) -> Record:
    """Read the record in a folder. Raises SystemExit if there is none."""
    try:
        stored = json.loads((folder / "record.json").read_text("utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"no record in {folder}: python -m benchmarks.unchanged record {folder}") from None
    return {line: Output(**output) for line, output in stored.items()}


def compare(before: Record, after: Record, prose: Path | None = None) -> int:
    """Print every change, then the table of rewordings, also into the file `prose`; return 1 if anything changed."""
    changed, reworded = 0, dict[Reworded, list[str]]()
    for line in {**before, **after}:
        if line not in before:
            print(f"new: {line}")
            continue
        changes = []
        for difference in differences(line, before[line], after.get(line)):
            if isinstance(difference, str):
                changes.append(difference)
            else:
                reworded.setdefault(difference, []).append(line)
        if changes:
            changed += 1
            more = [f"... {len(changes) - LONGEST_DIFF} more"] if len(changes) > LONGEST_DIFF else []
            print("\n    ".join([f"CHANGED: {line}", *(part[:300] for part in changes[:LONGEST_DIFF]), *more]))
    refusals = {row: lines for row, lines in reworded.items() if row.numbers}
    sentences = {row: lines for row, lines in reworded.items() if not row.numbers}
    print(f"{len(before)} and {len(after)} lines: {changed} changed, {len(refusals)} refusals with other numbers,")
    print(f"{len(sentences)} sentences reworded")
    for title, rows in (("Refusals with other numbers", refusals), ("Reworded sentences", sentences)):
        if rows:
            print(f"\n{title}\n\n{_table(rows)}")
    if prose:
        prose.write_text(_table(sentences) + "\n", "utf-8")
    return int(changed > 0 or bool(refusals))


def _table(reworded: Mapping[Reworded, list[str]]) -> str:
    """Return a Markdown table, the rewordings that occur in the most lines first."""
    rows = ["| before | after | lines | such as |", "| --- | --- | --- | --- |"]
    for row, lines in sorted(reworded.items(), key=lambda item: -len(set(item[1]))):
        cells = [row.old, row.new, str(len(set(lines))), f"`{lines[0]}`"]
        rows.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(rows)


def differences(line: str, before: Output, after: Output | None) -> Iterator[Difference]:
    """Yield the differences between two outputs of a line; none if they are the same except for masked values."""
    if after is None:
        yield "only in BEFORE"
        return
    if before.code != after.code and not line.startswith("> "):  # a call's exit code is in its answer
        yield f"exit code {before.code} → {after.code}"
    measuring = MEASURING.match(line) is not None
    old, new = (
        {name: TIMES.sub("<time>", text) for name, text in texts.items()}
        for texts in ({"stdout": output.stdout, "stderr": output.stderr, **output.files} for output in (before, after))
    )
    for name in {**old, **new}:
        if name not in old or name not in new:
            yield f"{name}: written only {'BEFORE' if name in old else 'AFTER'}"
        elif name == "stderr" and before.code == after.code == 2 and _numbers(old[name]) != _numbers(new[name]):
            yield Reworded(" ".join(old[name].split()), " ".join(new[name].split()), numbers=True)
        elif old[name] != new[name]:
            measures = measuring and (before.code != 2 or name in before.files)  # an option's error has no figures
            yield from _in_text(name, old[name], new[name], measures)


def _in_text(place: str, old: str, new: str, measures: bool) -> Iterator[Difference]:
    """Yield the differences between two outputs that may be JSON or CSV."""
    for parse in (_json, _csv):
        values = [parse(text) for text in (old, new)]
        if None not in values:
            values = [_masked(value, measures) for value in values]
            if measures and place.endswith(".rounds.csv"):  # how many rounds there are is measured
                values = [sorted({str(list(row.values())) for row in rows}) for rows in values]
            yield from _in_value(place, "", *values, measures)
            return
    yield from _in_prose(place, old, new, measures)


def _json(text: str) -> Any:
    """Parse JSON, with floats as they were written (1e-5 is not 0.00001); return None if it is not JSON."""
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text, parse_float=lambda digits: f"{digits} float")
    except ValueError:
        return None


def _csv(text: str) -> Any:
    """Parse the rows of a CSV; return None if it is not a CSV."""
    if not re.match(r"\w+(,\w+)+\n", text):
        return None
    return list(csv.DictReader(io.StringIO(text)))


def _in_value(place: str, key: str, old: Any, new: Any, measures: bool) -> Iterator[Difference]:
    """Yield the differences between two JSON values; `key` is the key of the value, or of the list that contains it."""
    if isinstance(old, dict) and isinstance(new, dict):
        if new.get("error") == "FFNError" != old.get("error", "FFNError"):  # a bug became a message
            yield Reworded(f"{old['error']}: {old['message']}", f"FFNError: {new['message']}")
            return
        if list(old) != list(new):
            yield f"{place}: keys {_parted(old, new)}"
        for name in old:
            if name in new:
                yield from _in_value(f"{place}.{name}", name, old[name], new[name], measures)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{place}: {len(old)} → {len(new)} items"
        for at, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from _in_value(f"{place}[{at}]", key, one, other, measures)
    elif old == new and type(old) is type(new):  # 1 is neither 1.0 nor True
        return
    elif isinstance(old, str) and isinstance(new, str) and ("\n" in old or old.startswith("{")):
        yield from _in_text(place, old, new, measures)
    elif isinstance(old, str) and isinstance(new, str) and key == "message":
        yield Reworded(old, new, numbers=_numbers(old) != _numbers(new))
    elif isinstance(old, str) and isinstance(new, str) and _is_sentence(key, old) and _numbers(old) == _numbers(new):
        yield Reworded(old, new)
    else:
        yield f"{place}: {old!r} → {new!r}"


def _is_sentence(key: str, text: str) -> bool:
    return key not in NO_SENTENCES and len(text.split()) >= 3


def _numbers(text: str) -> list[str]:
    return NUMBER.findall(text)


def _parted(old: Iterable[str], new: Iterable[str]) -> str:
    gone, came = [name for name in old if name not in new], [name for name in new if name not in old]
    return "in another order" if not gone + came else f"{gone} → {came}"


def _in_prose(place: str, old: str, new: str, measures: bool) -> Iterator[Difference]:
    """Yield the differences between texts for readers, which must have the same numbers but may be reworded."""
    before, after = _lines(old, measures), _lines(new, measures)
    if _numbers(" ".join(before)) != _numbers(" ".join(after)):
        diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        yield from (f"{place}: {part}" for part in diff if not part.startswith("@@"))
        return
    if before == after and not measures:
        yield Reworded("(spaces and line ends)", "(others)")
    for kind, start, end, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if end - start == last - first:
            yield from map(Reworded, before[start:end], after[first:last])
        else:
            yield Reworded(" ".join(before[start:end]), " ".join(after[first:last]))


def _lines(text: str, measures: bool) -> list[str]:
    """Return the lines without spaces from layout or wrapping; if `measures`, without lines that contain digits."""
    if text.startswith("<!"):
        text = re.sub(r"(?=<)|(?<=>)", "\n", text)
    text = re.sub(r"\n {20,}(?=\S)", " ", text)
    lines = [re.sub(r"([─━═-])\1+", r"\1", " ".join(line.split())) for line in text.split("\n")]
    if measures:
        lines = [line for line in lines if not re.search(r"\d", line) and not line.startswith(PASSING_LINES)]
    return [line for line in lines if line]


# --- masks ------------------------------------------------------------------------------------------------------------


def _masked(value: Any, measures: bool) -> Any:
    """Return a JSON value with measured values masked."""
    if isinstance(value, list):
        return [_masked(item, measures) for item in value]
    if not isinstance(value, dict):
        return value
    keys = MEASURED if measures else SECONDS
    values = {name: _mask(item) if name in keys else _masked(item, measures) for name, item in value.items()}
    if measures:
        passing = value.get("name") in PASSING_ROWS
        values |= {name: "<any>" for name in value if name in DISTURBANCES or (passing and name != "name")}
    return values


def _mask(value: Any) -> Any:
    """Return the kind of a value; unknown stays unknown, and a list keeps its length."""
    if value in (None, "") or isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [_mask(item) for item in value]
    return "<number>" if isinstance(value, int) or str(value).endswith(" float") else "<text>"
