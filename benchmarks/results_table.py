"""The public table of a suite in docs/results.md, from the results in benchmarks/results/ffn-1. Measures nothing.

    python -m benchmarks.results_table [--check]      write the table; with --check, exit 1 if it is out of date

A result is in the table only if `ffn bench --suite ffn-1 --admit FILE.csv` admits it. A result that is not admitted is
listed at the end, with the conditions that it fails; rows that `withdrawn.toml` lists appear there with the reason.
Ratios are ranked by their intervals, within one case, one machine's hardware and one error class: a rank is 1 + the
number of kernels whose whole interval lies below. If a kernel was measured several times on the same hardware, only its
newest result counts.
"""

import math
import shlex
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import script
from benchmarks.script import RESULTS, ROOT
from ffncli.bench.public.admission import Admission, admit, kernel_sha256
from ffncli.bench.request.suite import SUITES, PublicSuite, public_suite
from ffncli.bench.results.row import ResultRow
from ffncli.errors import FFNError
from ffncli.kernels import BUILT_IN
from ffncli.show.text import percent, time_text

PAGE = ROOT / "docs" / "results.md"
_NEW_BASELINE = "2026-11-26"  # the day from which `eager` has cost what a function written by hand costs
_BESIDE = (".rounds.csv",)  # files next to a result
_START = "<!-- results: written by make docs-update -->"


@dataclass(frozen=True)
class Entry:
    """A kernel's row for one case, and the path of the result that has it, relative to the repository."""

    row: ResultRow
    file: str

    @property
    def kernel(self) -> tuple[str, str]:
        """The kernel's identity: its name, and the sha256 of a user's file."""
        return self.row.kernel, kernel_sha256(self.row)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the ratio; an unknown end is 0 or infinity."""
        row = self.row
        return row.ratio_low or 0.0, math.inf if row.ratio_high is None else row.ratio_high

    @property
    def error_class(self) -> str:
        """The format that the kernel computes in."""
        return self.row.computes or self.row.dtype


def ranks(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Return the rank of each interval: 1 + the number of intervals that lie wholly below it."""
    return [1 + sum(high < low for _, high in intervals) for low, _ in intervals]


def ranked(entries: Iterable[Entry]) -> Iterator[tuple[int, Entry]]:
    """Yield (rank, entry), ordered by error class, then rank, then ratio."""
    classes: dict[str, list[Entry]] = {}
    for entry in entries:
        classes.setdefault(entry.error_class, []).append(entry)
    for mine in classes.values():
        places = zip(ranks([entry.interval for entry in mine]), mine, strict=True)
        yield from sorted(places, key=lambda place: (place[0], place[1].row.ratio or 0.0, place[1].row.kernel))


def withdrawn(results: Path) -> dict[tuple[str, str], str]:
    """Return a mapping from (result's name, kernel) to the reason why these rows were withdrawn."""
    path = results / "withdrawn.toml"
    rows = tomllib.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    return {(row["result"], row["kernel"]): row["reason"] for row in rows}


def newest(
    admissions: Iterable[Admission], root: Path = ROOT, without: Collection[tuple[str, str]] = ()
) -> dict[str, dict[str, list[Entry]]]:
    """Return the newest entry of each kernel, by hardware, then by case, except the withdrawn rows in `without`."""
    tables: dict[str, dict[str, dict[tuple[str, str], Entry]]] = {}
    for admission in sorted(admissions, key=lambda one: one.rows[0].started_utc):
        for row in admission.rows:
            if row.status == "ok" and row.ratio is not None and (admission.path.stem, row.kernel) not in without:
                entry = Entry(row, admission.path.relative_to(root).as_posix())
                place = f"{row.hardware}, {row.device}"
                tables.setdefault(place, {}).setdefault(row.case, {})[entry.kernel] = entry
    return {place: {case: list(mine.values()) for case, mine in cases.items()} for place, cases in tables.items()}


def command_of(admission: Admission) -> str:
    """Return the command that measures the same kernels; a user's file has the name that the result recorded."""
    names = []
    for row in {row.kernel: row for row in admission.rows}.values():
        file = row.note.partition(", sha256 ")[0].rpartition("; ")[2]
        plain = row.kernel in BUILT_IN or ".py:" in row.kernel or not kernel_sha256(row)
        names.append(row.kernel if plain else f"{row.kernel}={file}")
    device = "" if admission.track == "cpu" else f" --device {admission.track}"
    return f"ffn bench --suite {admission.suite.name}{device} --kernel {shlex.quote(','.join(names))}"


def standings(results: Path = RESULTS, root: Path = ROOT) -> str:
    """Return the tables of all suites."""
    parts = []
    for name in SUITES:
        admitted: list[Admission] = []
        refused: list[tuple[Path, str]] = []
        for path in sorted((results / name).glob("*.csv")):
            if path.name.endswith(_BESIDE):
                continue
            try:
                one = admit(path, name)
            except FFNError as error:
                refused.append((path, error.message.replace(str(path), path.name)))
                continue
            if one.admitted:
                admitted.append(one)
            else:
                refused.append((path, ", ".join(c.name for c in one.conditions if not c.passed)))
        taken_back = withdrawn(results / name)
        parts += [f"### {name}\n", *_suite_parts(public_suite(name), admitted, root, taken_back)]
        if taken_back:
            known = {(one.path.stem, row.kernel) for one in admitted for row in one.rows}
            if unknown := [key for key in taken_back if key not in known]:
                raise SystemExit(f"withdrawn.toml of {name}: no admitted result has {unknown}")
            links = {result: _link(results / name / f"{result}.csv", root) for result, _ in taken_back}
            rows = [(links[result], f"`{kernel}`", why) for (result, kernel), why in taken_back.items()]
            parts += ["#### Withdrawn\n", _table(("result", "kernel", "why"), rows)]
        if refused:
            rows = [(_link(path, root), why) for path, why in refused]
            parts += ["#### Not admitted\n", _table(("result", "fails"), rows)]
    return "\n".join(parts).strip()


def _suite_parts(
    suite: PublicSuite, admitted: Sequence[Admission], root: Path, without: Collection[tuple[str, str]]
) -> Iterator[str]:
    if not admitted:
        command = f"ffn bench --suite {suite.name} --kernel eager,mine.py:mlp"
        yield f"No result has been admitted yet: `{command}` makes one.\n"
        return
    keys = [case.key for track in suite.tracks for case in suite.cases(track)]
    for place, cases in newest(admitted, root, without).items():
        yield f"#### {place}\n"
        for key in (key for key in keys if key in cases):
            yield f"**{key}**\n"
            yield _table(
                ("rank", "kernel", "ratio", "time", "of roof", "error class", "error", "result"),
                [_line(rank, entry) for rank, entry in ranked(cases[key])],
            )
    yield "#### Files and commands\n"
    lines = [(_link(one.path, root), _measured(one), f"`{command_of(one)}`") for one in admitted]
    yield _table(("result", "measured", "command"), lines)


def _measured(one: Admission) -> str:
    """Return the day of a result, with a remark if its baseline was slower than it is now."""
    day = one.rows[0].started_utc[:10]
    return day if day >= _NEW_BASELINE else f"{day}, with a baseline that was up to 8 % slower on small blocks"


def _line(rank: int, entry: Entry) -> tuple[str, ...]:
    row, (low, high) = entry.row, entry.interval
    interval = "" if row.kernel == row.baseline else f" [{low:.3f}, {high:.3f}]"
    roof = "" if row.roof_fraction is None else percent(row.roof_fraction)
    error = "" if row.error_max is None else f"{row.error_max:.1e}"
    file = f"[{Path(entry.file).stem}](../{entry.file})"
    kernel, ratio = row.kernel.replace("`", "'"), f"{row.ratio:.3f}{interval}"
    return str(rank), f"`{kernel}`", ratio, time_text(row.time_s) or "", roof, entry.error_class, error, file


def _link(path: Path, root: Path) -> str:
    return f"[{path.stem}](../{path.relative_to(root).as_posix()})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return script.table(head, ([cell.replace("|", "/") for cell in line] for line in rows)) + "\n"


def main() -> int:
    """Write the tables, or check whether they are up to date."""
    check = script.options_of(__doc__, check=False).check
    page = PAGE.read_text("utf-8")
    if (new := script.put(page, _START, standings())) == page:
        return 0
    print(f"docs/results.md: {'out of date, make results' if check else 'written'}")
    if not check:
        PAGE.write_text(new, "utf-8")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
