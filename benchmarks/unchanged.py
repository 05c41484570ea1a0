"""Does ffn still give the same answers? Compares what two versions print, return and write for the same commands.

    python -m benchmarks.unchanged record before --package OTHER_CHECKOUT
    python -m benchmarks.unchanged record after
    python -m benchmarks.unchanged compare before after --prose reworded.md

`record` runs every line of `unchanged.txt` with a checkout's ffncli, and lines that it derives from `--help`: the help
of every command, and a wrong value for each of its options. It stores the exit code, stdout, stderr and the files that
a line writes. `compare` prints each difference, then a table of sentences that were only reworded
(`unchanged_compare.py`); it exits with 1 if anything else differs. Only the command line and `import ffncli` are used,
so the code of the two versions may be organised in any way. `make unchanged BASE=REV` does all three.

Everything is deterministic (one thread, fixed seeds, the same files) except what `ffn bench` and `ffn doctor` measure.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.unchanged_compare import Output, compare, read

HERE = Path(__file__).parent
COMMANDS = HERE / "unchanged.txt"
# For commands that need arguments: the words before a wrong value for an option, omitted if they set that option.
SOURCES: Mapping[str, Sequence[str]] = {
    "trace": ("4x8:relu",), "verify": ("4x8:relu",), "plan": ("gpt2",), "params": ("gpt2",), "activations": ("gelu",),
    "bench": ("8x16:gelu", "--kernel eager", "--max-time 1s", "--processes 1", "-q"),
    "approximate": ("--d-ff 1", "--steps 5", "--seeds 1"), "experts": ("m/mixtral", "--prompt Hello"),
    "export": ("8x16:gelu", "--as latex"), "merge": ("base.csv",), "compare": ("base.csv slower.csv",),
    "report": ("base.csv", "--output out/report.html"), "doctor": ("--no-noise",),
}  # fmt: skip
# An option that takes a value, as written in a line of --help: its first long name, and its metavar.
OPTION = re.compile(r"^ {2,8}(?:-\w, )?(--[\w-]+)(?:, --[\w-]+)? ([^\s,|]+)", re.MULTILINE)
NUMBERS = ("N", "X", "X%", "P", "TIME", "SIZE")  # metavars for which -1 is out of range

TIMEOUT_S = 180
SLOW_S = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; return 1 if anything but wording changed."""
    parser = argparse.ArgumentParser(description="Does ffn still answer the same?")
    actions = parser.add_subparsers(dest="action", required=True)
    recorder = actions.add_parser("record", help="run every command and store its output")
    recorder.add_argument("folder", type=Path)
    recorder.add_argument("--package", type=Path, default=HERE.parent, help="a checkout; its ffncli runs")
    recorder.add_argument("--inputs", type=Path, help="input files, created if missing; default: a new folder")
    comparer = actions.add_parser("compare", help="show what differs between two records")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--prose", type=Path, help="a Markdown file to write the table of reworded sentences to")
    for action in (recorder, comparer):
        action.add_argument("--only", action="append", default=[], metavar="TEXT", help="only lines that contain TEXT")
    options = parser.parse_args(arguments)
    if options.action == "record":
        return _record(options.folder, options.package.resolve(), options.inputs, options.only)
    records = [read(folder) for folder in (options.before, options.after)]
    before, after = ({line: record[line] for line in chosen(record, options.only)} for record in records)
    return compare(before, after, options.prose)


# --- record -----------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """Return the commands in unchanged.txt. Raises ValueError if one is repeated: a command is its output's key."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if twice := [line for line, count in Counter(lines).items() if count > 1]:
        raise ValueError(f"repeated: {'; '.join(twice)}")
    return lines


def chosen(lines: Iterable[str], only: Sequence[str], with_files: bool = False) -> list[str]:
    """Return the lines with a string of `only` (empty: all); `with_files` adds lines with the same files in out/."""
    files_of = {line: {*re.findall(r"\bout/[\w.-]+", line)} for line in lines}
    these = {line for line in files_of if not only or any(text in line for text in only)}
    files = {file for line in these for file in files_of[line]} if with_files else set()
    return [line for line in files_of if line in these or files & files_of[line]]


def _record(folder: Path, package: Path, inputs: Path | None, only: Sequence[str]) -> int:
    start = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ffn-unchanged-") as scratch:
        work = Path(scratch, "work")
        shutil.copytree(_inputs(inputs or Path(scratch, "inputs")), work)
        (work / "out").mkdir()
        with Forks(package, work) as forks:
            lines = dict.fromkeys([*commands(COMMANDS.read_text("utf-8")), *from_help(forks.help)])
            version = json.loads(forks.run("> ffncli.__version__")[1])["value"]
            outputs = {line: _run(line, package, work, forks, version) for line in chosen(lines, only, True)}
    stored = {line: asdict(output) for line, output in outputs.items()}
    (folder / "record.json").write_text(json.dumps(stored, indent=1, ensure_ascii=False), "utf-8")
    for line, output in outputs.items():
        if output.code < 0:
            print(f"ended by signal {-output.code}: {line}", file=sys.stderr)
    print(f"{len(outputs)} lines in {time.perf_counter() - start:.0f} s: {_by_subcommand(outputs)}")
    return 0


def from_help(help_of: Callable[[str], str]) -> Iterator[str]:
    """Yield lines for every command in `ffn --help`: -h, --help, and each of its options with a wrong value."""
    for name in re.findall(r"^  (\w+)", help_of("").partition("Commands:")[2].partition("Output:")[0], re.MULTILINE):
        yield from (f"{name} -h", f"{name} --help", f"{name} --no-such-option")
        for option, value in OPTION.findall(help_of(name).partition("Examples:")[0]):
            words = [part for part in SOURCES.get(name, ()) if not part.startswith(option)]
            for wrong in ["x?", "-1"][: 1 + (value in NUMBERS)]:
                yield shlex.join([name, *" ".join(words).split(), option, wrong])


def _inputs(path: Path) -> Path:
    """Return the folder of the input files; create the folder and the files if it does not exist."""
    if not path.exists():
        from benchmarks.unchanged_inputs import write_inputs

        path.mkdir(parents=True)
        write_inputs(path)
    return path


def _run(line: str, package: Path, work: Path, forks: "Forks", version: str) -> Output:
    """Run a line in a fork or a new shell; return its output and files; delete the files that are not in out/."""
    before, inputs = _contents(work / "out"), set(work.iterdir())
    start = time.perf_counter()
    if line.startswith(("$ ", "% ")):
        code, out, err = _in_shell(line[2:], package, work, terminal=line.startswith("%"))
    else:
        code, out, err = forks.run(line)
    seconds = round(time.perf_counter() - start, 2)
    if seconds > SLOW_S:
        print(f"{seconds:.0f} s: {line}", file=sys.stderr)
    portable = Portable(work, version)
    files = {name: portable(data) for name, data in _contents(work / "out").items() if before.get(name) != data}
    for path in set(work.iterdir()) - inputs:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            files[f"./{path.name}"] = portable(path.read_bytes())
            path.unlink()
    return Output(code, portable(out), portable(err), files, seconds)


def _contents(folder: Path) -> dict[str, bytes]:
    """Return a mapping from file names to contents; a zip file is replaced by its members, without their dates."""
    contents = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                contents |= {f"{name}/{member}": file.read(member) for member in file.namelist()}
        else:
            contents[name] = path.read_bytes()
    return contents


@dataclass(frozen=True)
class Portable:
    """Converts bytes to text without the temporary folder in which commands run, and without ffncli's version."""

    work: Path
    version: str

    def __call__(self, data: bytes) -> str:
        """Return the text; for safetensors, the header and the hash of the rest; for other binary data, its hash."""
        size = int.from_bytes(data[:8], "little")
        if data[8:9] == b"{" and size < len(data):
            header = json.loads(data[8 : 8 + size])
            return self._text(json.dumps({**header, "sha256": hashlib.sha256(data[8 + size :]).hexdigest()}))
        try:
            return self._text(data.decode("utf-8"))
        except UnicodeDecodeError:
            return f"sha256 {hashlib.sha256(data).hexdigest()}"

    def _text(self, text: str) -> str:
        text = text.replace(str(self.work), "<work>").replace(str(self.work.parent), "<scratch>")
        return re.sub(rf"(?<![\d.]){re.escape(self.version)}(?![\d.])", "<version>", text)


def environment(package: Path, work: Path) -> dict[str, str]:
    """Return a fixed environment with the checkout's ffncli: no colour, no network, one thread, one width."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")}
    fixed = {
        "PYTHONPATH": str(package), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "NO_COLOR": "1",
        "COLUMNS": "100", "LINES": "40", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "XDG_STATE_HOME": str(work.parent / "state"), "XDG_CACHE_HOME": str(work.parent / "cache"),
        "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(work.parent / "hub"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    return {**kept, **fixed}


def _in_shell(line: str, package: Path, work: Path, terminal: bool) -> tuple[int, bytes, bytes]:
    """Run a line of bash in which `ffn` is the checkout's; return its exit code, stdout and stderr.

    In a terminal, stdout contains both streams."""
    script = (
        f'set -o pipefail; ffn() {{ python -m ffncli "$@"; }}; python() {{ \'{sys.executable}\' -P "$@"; }}\n{line}'
    )
    env = environment(package, work)
    words = ["bash", "-c", script]
    if not terminal:
        try:
            done = subprocess.run(
                words, cwd=work, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired as late:
            return -signal.SIGKILL, late.stdout or b"", late.stderr or b""
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
    """Yield all output of a terminal."""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # on Linux this means that the other end is closed
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

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def help(self, command: str) -> str:
        """Return what `ffn COMMAND --help` prints."""
        return self.run(f"{command} --help")[1].decode()

    def run(self, line: str) -> tuple[int, bytes, bytes]:
        """Run a command, or a call after `> `; return its exit code, stdout and stderr."""
        assert self._process.stdin
        assert self._process.stdout
        for path in self._streams:
            path.unlink(missing_ok=True)
        out, err = self._streams
        asked = {"call": line[2:]} if line.startswith("> ") else {"words": shlex.split(line)}
        request = {**asked, "stdout": str(out), "stderr": str(err), "seconds": TIMEOUT_S}
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the process that runs the commands ended")
        return int(answer), out.read_bytes(), err.read_bytes()


def _by_subcommand(lines: Iterable[str]) -> str:
    """Return text such as `trace 120, params 60`: the number of lines for each command or call."""
    words = (re.search(r"(?<=ffncli\.)\w+|\b[a-z]{4,}", line) for line in lines)
    counts = Counter(word[0] if word else "ffn" for word in words)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
