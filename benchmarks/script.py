"""What the scripts in this folder share: options, rows that are added to a CSV, other programs, targets and tables.

A script states its question and its limits in its docstring, measures the rows that its file lacks, and judges all
rows. It uses `ffn` as a user does: through a command line, its exit code, and the files that the command writes.
"""

import argparse
import csv
import io
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Name = TypeVar("Name", bound=Hashable)
Row = Mapping[str, str]
Rows = Sequence[Row]
Mark = tuple[str, str, str, bool | None]  # what was measured, figure, target, whether it is reached (None: no data)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KNOWN = "benchmarks/known.py"  # user kernels whose true ratio is known, and kernels that disturb others
START_S = 4.0  # seconds that `ffn bench` takes before it measures, per worker process; for estimates only
# The smallest command line that prints a table: typer and rich, without any code of ffn.
BARE = """
import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer()


@app.command()
def main() -> None:
    table = Table("name", "value")
    table.add_row("answer", "42")
    Console().print(table)


app()
"""


# --- options and what a script prints ---------------------------------------------------------------------------------


def options_of(about: str | None, words: Sequence[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """Parse a script's options: --save, --summary, and one for each keyword, such as `--max-time` for `max_time`.

    A default sets the option's type: a number, a string (or None), False for a switch, a tuple for a list (`1,2`).
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE", help="write the rows to FILE as CSV; continues an interrupted run")
    parser.add_argument("--summary", metavar="FILE", help="measure nothing; print the figures of FILE")
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
            continue
        listed = isinstance(default, tuple)
        kind = type(default[0] if listed else "" if default is None else default)
        parser.add_argument(
            option, default=default, metavar=kind.__name__.upper() + ",..." * listed,
            type=(lambda text, kind=kind: tuple(map(kind, text.split(",")))) if listed else kind,
            help=f"[{','.join(map(str, default)) if listed else default}]".replace("%", "%%"),
        )  # fmt: skip
    return parser.parse_args(words)


Measure = Callable[["Kept", argparse.Namespace], None]


def main(
    about: str | None,
    packages: Sequence[str],
    columns: Sequence[str],
    measure: Measure,
    summary: Callable[[Rows], str | tuple[str, bool]],
    **defaults: Any,
) -> NoReturn:
    """Run a script: `measure` adds the rows that --save FILE lacks, `summary` judges; exit 1 if a target is missed."""
    answer = summary(rows_of(options_of(about, **defaults), packages, columns, measure))
    text, reached = (answer, True) if isinstance(answer, str) else answer
    print(text)
    sys.exit(not reached)


def rows_of(options: argparse.Namespace, packages: Sequence[str], columns: Sequence[str], measure: Measure) -> Rows:
    """Return the rows of --summary FILE, or else the rows of --save FILE with the rows that `measure` adds."""
    if options.summary:
        return read(options.summary)
    kept = Kept(options.save, columns, machine(*packages))
    measure(kept, options)
    return kept.rows


def main_once(
    about: str | None,
    packages: Sequence[str],
    measure: Callable[[argparse.Namespace], Iterable[Mapping[str, Any]]],
    **defaults: Any,
) -> NoReturn:
    """Run a script that measures all rows at once, and print each row when it is known; exit 1 if a row fails."""
    options, rows = options_of(about, **defaults), []
    print(", ".join(f"{name} {value}" for name, value in machine(*packages).items()), flush=True)
    for row in measure(options):
        print(*([] if rows else [table(row, [])]), f"| {' | '.join(map(shown, row.values()))} |", sep="\n", flush=True)
        rows.append(row)
    save(options.save, rows, *packages)
    sys.exit(any(False in (row.get("passed"), row.get("met")) for row in rows))


def save(path: str | None, rows: Sequence[Mapping[str, object]], *packages: str) -> None:
    """Write all rows of a run to a new file, if `path` is given; the columns are the keys of the first row."""
    if path:
        Path(path).unlink(missing_ok=True)
        Kept(path, tuple(rows[0]), machine(*packages) if packages else {}).add_all(rows)


def table(head: Iterable[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a line may be shorter than the head."""
    names = list(head)
    lines = names, ["---"] * len(names), *([*map(shown, row)] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put(page: str, start: str, new: str) -> str:
    """Return the page with `new` between the marker `start`, `<!-- NAME: ... -->`, and `<!-- end of NAME -->`.

    Raises ValueError if it does not have both markers.
    """
    end = f"<!-- end of {start.removeprefix('<!-- ').partition(':')[0]} -->"
    before, begins, rest = page.partition(start)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise ValueError(f"no {start} and {end}")
    return f"{before}{start}\n\n{new}\n\n{end}{after}"


def folded(title: str, text: str) -> str:
    """Return Markdown that shows the title, and the text when a reader opens it."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>'


def shown(value: object) -> str:
    """Return a value as shown in tables: floats with four digits, large numbers with thousands separators."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else cell(value)


def marks(verdicts: Iterable[Mark]) -> str:
    """Return a table of targets; an empty target means that only the figure is reported."""
    words = {True: "reached", False: "**missed**", None: "no data"}
    lines = [(what, figure, mark, "" if good and not mark else words[good]) for what, figure, mark, good in verdicts]
    return table(("what", "measured", "target", ""), lines).replace("target |  |", "target | |", 1)


def about_line(rows: Rows, *names: str) -> str:
    """Return text such as `2026-11-22; cpu ...; torch ...`: when and on what the rows were measured."""
    days = sorted({row["date"][:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    versions = [f"{name} {', '.join(sorted({row[name] for row in rows}))}" for name in names if name != "cpu"]
    return "; ".join([when, ", ".join(sorted({row["cpu"] for row in rows})), *versions])


def now() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ratio_text(row: Row) -> str:
    """Return text such as `0.953 (0.947 to 0.960)`, or the status of a kernel without a time."""
    value, low, high = (number(row, name) for name in ("ratio", "low", "high"))
    if value is None:
        return row["status"]
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def number(row: Row, name: str) -> float | None:
    """Return a cell of a row as a float, or None if the cell is empty."""
    return float(row[name]) if row.get(name) else None


# --- rows -------------------------------------------------------------------------------------------------------------


def machine(*packages: str) -> dict[str, str]:
    """Return the versions of Python and the packages, and the processor, without a host name or a path."""
    versions = {name: version(name) for name in packages}
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(names, "") or platform.processor() or platform.machine()
    return {"python": platform.python_version(), **versions, "cpu": f"{cpu}, {os.cpu_count()} cores"}


def cell(value: object) -> str:
    """Return a value as written to results: nine digits, `true` or `false`, empty for unknown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def read(path: str | Path) -> list[dict[str, str]]:
    """Return the complete rows of a CSV, without a last line that an interrupted run left incomplete."""
    text = Path(path).read_text("utf-8") if Path(path).exists() else ""
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


class Kept:
    """The rows of a CSV file, to which new rows are appended; without a path, the rows are only in memory.

    A row is written to the disk as soon as it is known. Every new row contains `about` (machine and versions).
    """

    def __init__(self, path: str | None, columns: Sequence[str], about: Mapping[str, str]) -> None:
        self.path, self.columns, self.about = path, (*columns, *about), dict(about)
        self.rows = read(path) if path else []
        if not path:
            return
        head = _line(self.columns)
        there = Path(path).read_text("utf-8") if Path(path).exists() else ""
        if self.rows and not there.startswith(head):
            raise SystemExit(f"{path} has other columns than this script writes: move it, or use another --save")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        whole = there[: there.rfind("\n") + 1] if there.startswith(head) else head
        if whole != there:
            Path(path).write_text(whole, "utf-8")

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row, and wait until it is on the disk."""
        self.add_all([row])

    def add_all(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append rows that belong together, in a single write, so that the file has all of them or none."""
        full = [{name: cell({**self.about, **row}.get(name)) for name in self.columns} for row in rows]
        self.rows += full
        if self.path:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write("".join(_line(row.values()) for row in full))
                file.flush()
                os.fsync(file.fileno())

    def drop(self, **values: object) -> None:
        """Remove the rows with these values, in the file too."""
        gone = self.of(**values)
        self.rows = [row for row in self.rows if row not in gone]
        if self.path and gone:
            Path(self.path).write_text(
                "".join(map(_line, (self.columns, *(row.values() for row in self.rows)))), "utf-8"
            )

    def has(self, **values: object) -> bool:
        """Return whether there is a row with these values."""
        return bool(self.of(**values))

    def of(self, **values: object) -> list[dict[str, str]]:
        """Return the rows with these values."""
        wanted = {name: cell(value) for name, value in values.items()}
        return [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


@contextmanager
def scratch(name: str, where: str | None = None, keep: bool = False) -> Iterator[Path]:
    """Create a folder in `where`, and delete it afterwards unless `keep`."""
    root = Path(tempfile.mkdtemp(prefix=f"ffn-{name}-", dir=where))
    try:
        yield root
    finally:
        if keep:
            print(f"kept in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


# --- other programs ---------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return the caller's environment with this working tree, offline, without settings for colours or widths."""
    drop = {
        "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "COLUMNS", "LINES",
        "PYTHONDONTWRITEBYTECODE",
    }  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def command(*arguments: str) -> list[str]:
    """Return the words that run `ffn` from this working tree."""
    return [sys.executable, "-m", "ffncli", *arguments]


def ffn(*arguments: str) -> list[str]:
    """Return the words that run `ffn` as a user does: with the console script if it is installed."""
    script = Path(sys.executable).parent / "ffn"
    return [str(script), *arguments] if script.exists() else command(*arguments)


def output_of(words: Sequence[str], codes: Sequence[int] = (0,), cwd: Path = ROOT) -> str:
    """Run a program and return what it prints. Ends the script if the exit code is not one of `codes`."""
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment(), check=False)
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


# A child's program ends with `finish(figure=...)`, which also reports its memory peak and the bytes read from disk.
_CHILD = """
import json, sys, time

def finish(**figures):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    io = dict(line.split(":", 1) for line in open("/proc/self/io"))
    figures |= {"peak": 1024 * int(status["VmHWM"].split()[0]), "read": int(io["read_bytes"])}
    with open(path, "w") as file:
        json.dump(figures, file)

path = sys.argv.pop(1)
"""


def child(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program in a fresh process and return its reported figures; end the script if it fails. Linux only."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        output_of([sys.executable, "-c", _CHILD + program, report.name, *arguments])
        figures: dict[str, Any] = json.load(report)
        return figures


@dataclass(frozen=True)
class Answer:
    """A run of `ffn bench`: exit code, rows of its CSV and of the rounds file, JSON object, seconds, arguments."""

    code: int
    rows: Rows
    blocks: Rows
    json: Mapping[str, object]
    wall_s: float
    command: str = ""

    @property
    def spent(self) -> dict[str, float]:
        """The seconds that all workers together spent on each activity; empty if not known."""
        spent = self.json.get("spent")
        return {str(k): float(v) for k, v in spent.items()} if isinstance(spent, dict) else {}


def how(options: argparse.Namespace, seed: int = 0) -> list[str]:
    """Return a script's --processes, --max-time and --precision, and the seed, as arguments of `ffn bench`."""
    words = ["--processes", str(options.processes), "--max-time", f"{options.max_time:g}s"]
    return [*words, "--precision", getattr(options, "precision", "1%"), "--seed", str(seed)]


def benched(columns: Sequence[str], *words: str, **same: object) -> list[dict[str, object]]:
    """Run `ffn bench` and return its rows with these columns; `low` and `high` are the ends of the ratio's interval."""
    answer, renamed = bench(*words), {"low": "ratio_low", "high": "ratio_high"}
    stamp = {"date": now(), "wall_s": answer.wall_s, **same}
    return [{name: row.get(renamed.get(name, name), "") for name in columns} | stamp for row in answer.rows]


def bench(*arguments: str, around: Callable[[int], AbstractContextManager[None]] | None = None) -> Answer:
    """Run `ffn bench` in a separate process, within `around(process id)` if given. Ends the script if the command
    refuses its input or is interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.csv")
        words = command("bench", *arguments, "--save", str(path), "--json", "-q")
        start = time.perf_counter()
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment())
        with around(process.pid) if around else nullcontext():
            output, errors = process.communicate()
        wall = time.perf_counter() - start
        rows, blocks = read(path), read(path.with_suffix(".rounds.csv"))
    if process.returncode in (2, 130) or not rows:
        raise SystemExit(f"ffn bench {' '.join(arguments)}: exit {process.returncode}\n{errors}")
    try:
        printed = json.loads(output)
    except json.JSONDecodeError:
        printed = {}
    return Answer(process.returncode, rows, blocks, printed, wall, " ".join(arguments))


def in_background(*arguments: str) -> subprocess.Popen[str]:
    """Start `ffn bench` in the background, so that it can be interrupted or killed; its stderr can be read."""
    words = command("bench", *arguments)
    return subprocess.Popen(
        words, cwd=ROOT, env=environment(), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[str], within: float = 900.0) -> tuple[int, str]:
    """Wait until a program in the background ends; return its exit code and stderr."""
    _, errors = process.communicate(timeout=within)
    return process.returncode, errors


@dataclass(frozen=True)
class Run:
    """One process: wall and CPU (user + system) seconds, peak resident bytes, exit code, output and errors."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    code: int
    output: str
    errors: str


def run(words: Sequence[str]) -> Run:
    """Run a program, wait until it ends, and read the resources that the kernel counted for it (wait4).

    Its stdout and stderr go to files, because on a small machine the reader of a pipe would compete with the program.
    The program's peak is never below this process's memory at the start, so this process must use little memory.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment())
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        output, errors = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    cpu = usage.ru_utime + usage.ru_stime
    return Run(wall, cpu, usage.ru_maxrss * unit, process.returncode, output, errors)


def interleaved(measures: Mapping[Name, Callable[[], Any]], rounds: int, warm_ups: int) -> dict[Name, list[Any]]:
    """Take every measure once per round, in random order, so that a machine that slows down affects all of them.

    The first `warm_ups` rounds fill the bytecode and file caches, and are not counted.
    """
    order = random.Random(0)
    taken: dict[Name, list[Any]] = {name: [] for name in measures}
    for at in range(warm_ups + rounds):
        for name in order.sample(list(measures), len(measures)):
            figure = measures[name]()
            if at >= warm_ups:
                taken[name].append(figure)
    return taken


def runs_of(commands: Mapping[Name, Sequence[str]], rounds: int, warm_ups: int) -> dict[Name, list[Run]]:
    """Run every program once per round; end the script if one fails."""

    def once(words: Sequence[str]) -> Run:
        done = run(words)
        if done.code:
            raise SystemExit(f"{' '.join(words)[:200]}: exit {done.code}\n{done.output[-300:]}{done.errors[-2000:]}")
        return done

    return interleaved({name: lambda words=words: once(words) for name, words in commands.items()}, rounds, warm_ups)


def ratio(runs: Sequence[Run], base: Sequence[Run], figure: str) -> float:
    """Return the median over rounds of a program's figure divided by another program's figure in the same round."""
    return statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in zip(runs, base, strict=True))


def median(runs: Sequence[Run], figure: str) -> float:
    """Return the median of a figure over rounds."""
    return float(statistics.median(getattr(one, figure) for one in runs))
