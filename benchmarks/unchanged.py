"""Does ffn still say the same, byte for byte? What two versions print, return and write for the same commands.

    python -m benchmarks.unchanged record before --package OTHER_CHECKOUT
    python -m benchmarks.unchanged record after
    python -m benchmarks.unchanged compare before after

`record` runs every command of `unchanged.txt` with a checkout's ffncli and stores exit code, stdout, stderr and the
files it writes. `compare` prints each difference as a short diff; exit 1 where one is not in ON_PURPOSE. Only the
command line is used, so the two may be laid out in any way. `make unchanged BASE=REV` does all three.

Everything is deterministic (one thread, fixed seeds, the same files) but what `ffn bench` and `ffn doctor` measure: of
these, and of nothing else, the values under the keys of MEASURED are masked. A mask keeps the kind of a value: a number
that becomes null is a difference.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMANDS = HERE / "unchanged.txt"
# What differs since BASE because it was meant to: command, as in unchanged.txt → the reason.
ON_PURPOSE: Mapping[str, str] = {
    "bench 8x16:gelu --kernel slowed:x:eager": "the factor is named, and how to write it; it was an unknown kernel",
}

# The commands that measure, and the keys (of JSON, columns of CSV) of what they measure.
MEASURING = ("bench", "doctor")
MEASURED = frozenset({
    # when, and which run
    "run_id", "started_utc",
    # times, and what is computed from them
    "time_s", "time_low_s", "time_high_s", "ratio", "ratio_low", "ratio_high", "verdict", "aa_ratio", "aa_low",
    "aa_high", "gemm_ratio", "tflops", "gbytes_per_s", "roof_fraction", "datasheet_fraction", "fusion_saving_max",
    "page_faults_per_call", "process_times_s", "process_anchors_s", "process_ratios",
    # how much was measured in the time there was
    "placements", "rounds", "inner",
    # seconds by what they were spent on
    "start", "verify", "warm_up", "blocks", "lead_in", "placing", "rest",
    # a line of the file of rounds
    "placement", "round", "position", "seconds",
})  # fmt: skip
# What disturbs a measurement, which may be nothing at all.
DISTURBANCES = frozenset({"warnings", "flags"})
# Rows of `ffn doctor` that are about this minute, by their name: of these all but the name.
PASSING_ROWS = frozenset({"load", "steal", "memory"})

TIMEOUT_S = 180
SLOW_S = 20
LONGEST_DIFF = 14  # lines of a diff that are shown


@dataclass(frozen=True)
class Output:
    """What a command left: exit code (negative: the signal that ended it), both streams, files that it wrote."""

    code: int
    stdout: str
    stderr: str
    files: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


Record = Mapping[str, Output]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; 1 where something changed."""
    parser = argparse.ArgumentParser(description="Does ffn still say the same, byte for byte?")
    actions = parser.add_subparsers(dest="action", required=True)
    recorder = actions.add_parser("record", help="run every command and store what it says")
    recorder.add_argument("folder", type=Path)
    recorder.add_argument("--package", type=Path, default=HERE.parent, help="a checkout; its ffncli runs")
    recorder.add_argument("--inputs", type=Path, help="where the input files are, or shall be made; default: made anew")
    recorder.add_argument("--only", default="", help="only commands that contain this")
    comparer = actions.add_parser("compare", help="show what differs between two records")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.action == "record":
        return _record(options.folder, options.package.resolve(), options.inputs, options.only)
    return report(read(options.before), read(options.after))


# --- record -----------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """The commands in the text of unchanged.txt; ValueError where one is there twice, for it names its output."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if twice := [line for line, count in Counter(lines).items() if count > 1]:
        raise ValueError(f"there twice: {'; '.join(twice)}")
    return lines


def _record(folder: Path, package: Path, inputs: Path | None, only: str) -> int:
    start = time.perf_counter()
    lines = [line for line in commands(COMMANDS.read_text("utf-8")) if only in line]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ffn-unchanged-") as scratch:
        work = Path(scratch, "work")
        shutil.copytree(_inputs(inputs or Path(scratch, "inputs")), work)
        (work / "out").mkdir()
        with Forks(package, work) as forks:
            outputs = {line: _run(line, package, work, forks) for line in lines}
    stored = {line: asdict(output) for line, output in outputs.items()}
    (folder / "record.json").write_text(json.dumps(stored, indent=1, ensure_ascii=False), "utf-8")
    for line, output in outputs.items():
        if output.code < 0:
            print(f"ended by signal {-output.code}: {line}", file=sys.stderr)
    print(f"{len(outputs)} commands in {time.perf_counter() - start:.0f} s: {_by_subcommand(outputs)}")
    return 0


def _inputs(path: Path) -> Path:
    """The folder of the input files, which are made where there is none."""
    if not path.exists():
        from benchmarks.unchanged_inputs import write_inputs

        path.mkdir(parents=True)
        write_inputs(path)
    return path


def _run(line: str, package: Path, work: Path, forks: Forks) -> Output:
    """One command, in a fork or in a shell of its own, and the files under out/ that it changed."""
    before = _contents(work)
    start = time.perf_counter()
    if line.startswith(("$ ", "% ")):
        code, out, err = _in_shell(line[2:], package, work, terminal=line.startswith("%"))
    else:
        code, out, err = forks.run(shlex.split(line))
    seconds = round(time.perf_counter() - start, 2)
    if seconds > SLOW_S:
        print(f"{seconds:.0f} s: {line}", file=sys.stderr)
    files = {name: text for name, text in _contents(work).items() if before.get(name) != text}
    return Output(code, _portable(out, work), _portable(err, work), files, seconds)


def _contents(work: Path) -> dict[str, str]:
    """Name → text of every file under out/; of what is no text its sha256, of a zip its members' without dates."""
    contents = {}
    for path in sorted(path for path in (work / "out").rglob("*") if path.is_file()):
        members = {"": path.read_bytes()}
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                members = {name: file.read(name) for name in file.namelist()}
        lines = "\n".join(f"{name}{': ' if name else ''}{_as_text(data)}" for name, data in members.items())
        contents[path.relative_to(work / "out").as_posix()] = lines.replace(str(work), "<work>")
    return contents


def _as_text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return f"sha256 {hashlib.sha256(data).hexdigest()}"


def _portable(data: bytes, work: Path) -> str:
    """As text, the temporary folder that the commands ran in under one name."""
    return data.decode("utf-8", "backslashreplace").replace(str(work), "<work>")


def environment(package: Path, work: Path) -> dict[str, str]:
    """A fixed one, with that checkout's ffncli: no colour, no network, one thread, one width."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")}
    fixed = {
        "PYTHONPATH": str(package), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "NO_COLOR": "1",
        "COLUMNS": "100", "LINES": "40", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(work.parent / "hub"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    return {**kept, **fixed}


def _in_shell(line: str, package: Path, work: Path, terminal: bool) -> tuple[int, bytes, bytes]:
    """A line of bash in which `ffn` is that checkout's; in a terminal both streams are stdout."""
    script = (
        f'set -o pipefail; ffn() {{ python -m ffncli "$@"; }}; python() {{ \'{sys.executable}\' -P "$@"; }}\n{line}'
    )
    env = environment(package, work)
    words = ["bash", "-c", script]
    if not terminal:
        done = subprocess.run(
            words, cwd=work, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S
        )
        return done.returncode, done.stdout, done.stderr
    del env["NO_COLOR"]
    ours, theirs = os.openpty()
    with subprocess.Popen(
        words, cwd=work, env=env | {"TERM": "xterm-256color"}, stdin=theirs, stdout=theirs, stderr=theirs
    ) as shell:
        os.close(theirs)
        data = b"".join(_chunks(ours))
    os.close(ours)
    return shell.returncode, data, b""


def _chunks(descriptor: int) -> Iterator[bytes]:
    """What a terminal shows, to the end."""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # Linux's word for: the other end is closed
            return
        if not data:
            return
        yield data


class Forks:
    """The process of `unchanged_forks.py`, which runs a checkout's commands in forks of itself."""

    def __init__(self, package: Path, work: Path) -> None:
        self._streams = work.parent / "stdout", work.parent / "stderr"
        script = str(HERE / "unchanged_forks.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, str(package)], cwd=work, env=environment(package, work),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def run(self, words: Sequence[str]) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr of `ffn WORDS`."""
        assert self._process.stdin
        assert self._process.stdout
        for path in self._streams:
            path.unlink(missing_ok=True)
        out, err = self._streams
        request = {"words": words, "stdout": str(out), "stderr": str(err), "seconds": TIMEOUT_S}
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the process that runs the commands ended")
        return int(answer), out.read_bytes(), err.read_bytes()


def _by_subcommand(lines: Iterable[str]) -> str:
    """`trace 120, params 60, ...`, and how many of the commands failed as they should."""
    names = ("trace", "params", "activations", "approximate", "bench", "compare", "verify", "doctor", "models")
    counts = Counter(next((word for word in line.split() if word in names), "ffn") for line in lines)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


# --- compare ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Record:
    """The record in a folder; SystemExit where there is none."""
    try:
        stored = json.loads((folder / "record.json").read_text("utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"no record in {folder}: python -m benchmarks.unchanged record {folder}") from None
    return {line: Output(**output) for line, output in stored.items()}


def report(before: Record, after: Record, on_purpose: Mapping[str, str] = ON_PURPOSE) -> int:
    """Print every difference; 1 where one is not on purpose."""
    changed = {
        line: diff for line in {**before, **after} if (diff := differences(line, before.get(line), after.get(line)))
    }
    for line, diff in changed.items():
        print(f"{'meant' if line in on_purpose else 'CHANGED'}: {line}")
        print("\n".join(f"    {part}" for part in ([on_purpose[line]] if line in on_purpose else diff)))
    unmeant = [line for line in changed if line not in on_purpose]
    meant = len(changed) - len(unmeant)
    print(f"{len(before)} and {len(after)} commands: {len(unmeant)} changed, {meant} changed on purpose")
    return int(bool(unmeant))


def differences(line: str, before: Output | None, after: Output | None) -> list[str]:
    """What of a command's output changed, as the lines of short diffs; nothing where it is the same but for masks."""
    if before is None or after is None:
        return ["only in AFTER" if before is None else "only in BEFORE"]
    found = [] if before.code == after.code else [f"exit code {before.code} → {after.code}"]
    old, new = _parts(line, before), _parts(line, after)
    for name in {**old, **new}:
        found += _diff(name, old.get(name), new.get(name))
    return found


def _parts(line: str, output: Output) -> dict[str, str]:
    """Every text that a command left, masked where it measures."""
    parts = {"stdout": output.stdout, "stderr": output.stderr, **output.files}
    if not any(f"{name} " in f"{line} " for name in MEASURING):
        return parts
    return {name: masked(text, distinct=name.endswith(".rounds.csv")) for name, text in parts.items()}


def _diff(name: str, old: str | None, new: str | None) -> list[str]:
    if old == new:
        return []
    if old is None or new is None:
        return [f"{name}: written only {'AFTER' if old is None else 'BEFORE'}"]
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "", "", n=0, lineterm=""))[2:]
    lines = [line for line in lines if not line.startswith("@@")] or ["(the ends of lines differ)"]
    more = [f"... {len(lines) - LONGEST_DIFF} more lines"] if len(lines) > LONGEST_DIFF else []
    return [f"{name}:", *(part[:200] for part in lines[:LONGEST_DIFF]), *more]


# --- masks ------------------------------------------------------------------------------------------------------------


def masked(text: str, distinct: bool = False) -> str:
    """JSON or CSV without what was measured; any other text as it is. `distinct`: rows that are then equal are one."""
    if text.startswith("{"):
        try:
            # numbers as they were written: 1e-5 is not 0.00001
            answer = json.loads(text, parse_float=lambda digits: f"{digits} (a float)")
        except ValueError:
            return text
        return json.dumps(_masked_value(answer), indent=2, ensure_ascii=False)
    header = text.partition("\n")[0].split(",")
    if not {"kernel", "advice"} & set(header):
        return text
    rows = [_masked_row(row) for row in csv.DictReader(io.StringIO(text))]
    lines = (
        [f"{name}: {value}" for row in rows for name, value in row.items()]
        if not distinct
        else sorted({"; ".join(map(str, row.values())) for row in rows})
    )
    return "\n".join([",".join(header), *lines])


def _masked_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked_value(item) for item in value]
    return _masked_row(value) if isinstance(value, dict) else value


def _masked_row(row: Mapping[str, Any]) -> dict[str, Any]:
    passing = row.get("name") in PASSING_ROWS
    masks = {name: "<any>" for name in row if name in DISTURBANCES or (passing and name != "name")}
    values = {name: _mask(value) if name in MEASURED else _masked_value(value) for name, value in row.items()}
    return {**values, **masks}


def _mask(value: Any) -> Any:
    """What kind of value it is; unknown stays unknown, and a list of numbers as long as it is."""
    if value in (None, "") or isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [_mask(item) for item in value]
    return "<number>" if isinstance(value, int) or str(value).endswith("(a float)") else "<text>"


if __name__ == "__main__":
    sys.exit(main())
