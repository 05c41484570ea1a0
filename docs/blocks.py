"""The console blocks of README.md and docs/*.md: run their commands, compare the output, or write it into the blocks.

    python -m docs.blocks check [FILE ...]                exit 1 if a block differs from what its command prints
    python -m docs.blocks update [FILE ...] [--measured]  write what the commands print into the blocks

In a ```console block, `$ ffn ...` is a command, and the lines below it are its standard output (and its errors, if it
fails). A command with nothing below it is only run; `update` replaces a line `?` below a command by its output. The
commands of a page run in one folder, which has `my-model`, a tiny checkpoint. A comment before a block changes this:

    <!-- lines 1-8, -2 -->   the block shows only these lines of the output, and `...` for the others
    <!-- from down =; lines 1-4 -->   the lines are counted from the first line that begins with `down =`
    <!-- exit 1 -->          the last command fails; `$ echo $?` in the block shows this to the reader
    <!-- numbers -->         the figures are rounding errors: only the words around them are compared
    <!-- measured -->        the figures are times: `check` runs the command with --quick and compares the shape of its
                             table, and `update` changes the block only with --measured
    <!-- file mine.py -->    not a console block, but a file for the commands after it
    <!-- workflow -->        not a console block, but YAML whose `run` and `entry` commands are run like measured ones
    <!-- job -->             not a console block, but a CI job; tests/test_ci.py runs its lines in an empty environment
    <!-- not run: WHY -->    the commands are not run
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from docs.example_model import write_mixture, write_model, write_tuned

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:^<!-- (?P<notes>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
_ELSEWHERE = ("pip ", "make ", "git ", "cd ", "python3 -m venv")  # installing and the like, which is not run here
_NUMBER = re.compile(r"[-+−±]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_VERDICT = re.compile(r"# % (?:faster|slower)|\b(?:same|inconclusive|baseline)\b")


@dataclass
class Command:
    """One line after `$`, and the output that the block shows below it."""

    line: str
    output: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: its body, where the body starts and ends, and the notes of the comment before it."""

    language: str
    body: str
    start: int
    end: int
    notes: dict[str, str]


@dataclass(frozen=True)
class Difference:
    """A command whose output differs from what its page shows."""

    page: str
    command: str
    shown: list[str]
    printed: list[str]

    def __str__(self) -> str:
        lines = difflib.unified_diff(self.shown, self.printed, "shown", "printed", lineterm="")
        return "\n".join([f"{self.page}: $ {self.command}", *lines])


def blocks(text: str) -> list[Block]:
    """Return every fenced block of a page, in order."""
    return [
        Block(match["language"], match["body"], match.start("body"), match.end("body"), _notes(match["notes"] or ""))
        for match in _BLOCK.finditer(text)
    ]


def commands(body: str) -> list[Command]:
    """Return the commands of a console block; a command that ends with a backslash continues on the next line."""
    found: list[Command] = []
    for line in body.splitlines():
        if found and not found[-1].output and found[-1].line.endswith("\\"):
            found[-1].line += "\n" + line
        elif line.startswith("$ "):
            found.append(Command(line[2:]))
        elif found:
            found[-1].output.append(line)
        else:
            raise ValueError(f"a console block begins with {line!r}, not with a command")
    return found


def check(page: Path) -> list[Difference]:
    """Run a page's commands, and return every difference between their output and what the page shows."""
    every = blocks(page.read_text("utf-8"))
    if not any(map(_is_run, every)):
        return []
    with page_folder():
        return [difference for block in every for difference in _checked(page.name, block)]


def update(page: Path, measured: bool = False) -> bool:
    """Run a page's commands and write their output into the page; return whether that changed the page."""
    text = page.read_text("utf-8")
    every = blocks(text)
    if not any(map(_is_run, every)):
        return False
    with page_folder():
        bodies = [(block, _updated(block, measured)) for block in every]
    new = text
    for block, body in reversed(bodies):
        new = new[: block.start] + body + new[block.end :]
    if new != text:
        page.write_text(new, "utf-8")
    return new != text


def _checked(page: str, block: Block) -> Iterator[Difference]:
    _write_file(block)
    if not _is_run(block):
        return
    measured = "measured" in block.notes
    last = 0
    for command, allowed in _with_exits(block):
        quick = command.line.startswith("ffn bench")
        printed, last = _run(f"{command.line} --quick" if quick else command.line, last)
        if last not in allowed:
            raise AssertionError(f"{page}: $ {command.line}: exit {last}: {printed[-1:]}")
        shown, printed = command.output, _excerpt(printed, block.notes)
        if quick:
            shown, printed = _table(shown), _table(printed)
        elif measured:
            continue
        elif "numbers" in block.notes:
            shown, printed = [_shape(line) for line in shown], [_shape(line) for line in printed]
        if command.output and shown != printed:
            yield Difference(page, command.line, shown, printed)


def _updated(block: Block, measured: bool) -> str:
    _write_file(block)
    if not _is_run(block) or "workflow" in block.notes:
        return block.body
    lines = []
    last = 0
    for command in commands(block.body):
        lines.append(f"$ {command.line}")
        if "measured" in block.notes and not measured and command.output != ["?"]:
            lines += command.output
            continue
        printed, last = _run(command.line, last)
        if command.output:
            lines += _excerpt(printed, block.notes)
    return "".join(f"{line}\n" for line in lines)


def _write_file(block: Block) -> None:
    """Write the file that a block shows, and a copy in `base/`, as if it were the file of the base branch."""
    if "file" in block.notes:
        for path in (Path(block.notes["file"]), Path("base", block.notes["file"])):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, "utf-8")


def _is_run(block: Block) -> bool:
    return "workflow" in block.notes or (block.language == "console" and "not run" not in block.notes)


def job_lines(body: str) -> list[str]:
    """Return the shell lines of a GitHub workflow, a GitLab job or a pre-commit configuration, in order."""

    def lines(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("run", "entry", "before_script", "script"):
                    for text in value if isinstance(value, list) else [value]:
                        yield from text.splitlines()
                else:
                    yield from lines(value)
        elif isinstance(node, list):
            for value in node:
                yield from lines(value)

    return list(lines(yaml.safe_load(body)))


def _with_exits(block: Block) -> Iterator[tuple[Command, set[int]]]:
    """Yield every command with the exit codes that it may have: 0, or the code that the block gives for it."""
    if "workflow" in block.notes:
        found = [Command(line) for line in job_lines(block.body) if line.startswith("ffn ")]
    else:
        found = commands(block.body)
    for command, after in zip(found, [*found[1:], None], strict=True):
        if command.line.startswith("ffn bench"):  # on a busy machine, other verdicts are not the page's fault
            allowed = {0, 1, 4}
        elif after is None:
            allowed = {int(block.notes.get("exit", 0))}
        else:
            allowed = {int(after.output[0])} if after.line == "echo $?" and after.output else {0}
        yield command, allowed


# --- running ----------------------------------------------------------------------------------------------------------


def _run(line: str, last: int) -> tuple[list[str], int]:
    """Return the lines that a command prints and its exit code; `last` is the previous command's exit code."""
    if line == "echo $?":
        return [str(last)], 0
    if line.startswith(_ELSEWHERE):
        return [], 0
    line = line.replace("\\\n", " ")
    ours, pipe, rest = line.partition(" | ")
    if not ours.startswith("ffn ") or re.search(r"[;&<>]", re.sub(r"'[^']*'", "", ours)):
        done = subprocess.run(["bash", "-c", _SHIM + line], capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr * bool(done.returncode)).splitlines(), done.returncode
    out, err, code = in_process(shlex.split(ours, comments=True)[1:])
    if pipe:
        done = subprocess.run(["bash", "-c", rest], input=out, capture_output=True, text=True, check=False)
        out, err, code = done.stdout, done.stderr, done.returncode
    return (out + err * bool(code)).splitlines(), code


_SHIM = f'ffn() {{ {shlex.quote(sys.executable)} -m ffncli "$@"; }}\n'


def in_process(arguments: Sequence[str]) -> tuple[str, str, int]:
    """Run `ffn` with these arguments in this process; return its standard output, standard error and exit code."""
    from ffncli.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(list(arguments))
    except SystemExit as stop:
        return out.getvalue(), err.getvalue(), int(stop.code or 0)


@contextlib.contextmanager
def page_folder() -> Iterator[Callable[[str], None]]:
    """Enter a new folder that has `my-model`, `my-tuned` and `my-mixture`; commands have no network there, and no
    terminal's size.

    Yield a function that runs shell lines in the folder, and raises CalledProcessError if a line fails.
    """
    before, width = Path.cwd(), os.environ.pop("COLUMNS", None)
    os.environ.update(HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))

    def run(lines: str) -> None:
        subprocess.run(["bash", "-ec", _SHIM + lines], check=True, stdout=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory(prefix="ffn-docs-") as name:
        os.chdir(name)
        write_model(Path("my-model"))
        write_mixture(Path("my-mixture"))
        write_tuned(Path("my-tuned"), Path("my-model"))
        try:
            yield run
        finally:
            os.chdir(before)
            if width is not None:
                os.environ["COLUMNS"] = width


# --- what is compared -------------------------------------------------------------------------------------------------


def _notes(text: str) -> dict[str, str]:
    """Parse the notes in a comment: `lines 1-8; exit 1` gives {"lines": "1-8", "exit": "1"}."""
    notes = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        key = "not run" if part.startswith("not run") else part.split()[0]
        notes[key] = part[len(key) :].strip(" :")
    return notes


def _excerpt(lines: list[str], notes: dict[str, str]) -> list[str]:
    """Return the lines that a note such as `1-8, -2` selects (negative: counted from the end), with `...` for gaps."""
    ranges = notes.get("lines")
    if "from" in notes and len(lines) > 1:
        start = next((at for at, line in enumerate(lines) if line.startswith(notes["from"])), None)
        if start is None:
            raise ValueError(
                f"no line of {lines[:2]} ... begins with {notes['from']!r}: change the comment of its block"
            )
        lines = lines[start:]
    if not ranges:
        return lines
    kept: set[int] = set()
    for part in ranges.split(","):
        first, last = re.fullmatch(r"(-?\d+)(?:-(\d+))?", part.strip()).groups()  # type: ignore[union-attr]
        at = int(first) - 1 if int(first) > 0 else len(lines) + int(first)
        kept |= set(range(at, int(last) if last else at + 1))
    shown: list[str] = []
    for number, line in enumerate(lines):
        if number in kept:
            shown.append(line)
        elif not shown or shown[-1] != "...":
            shown.append("...")
    return shown


def _table(lines: list[str]) -> list[str]:
    """Return the shape of the head and table of `ffn bench`, with units of time and verdicts masked: they vary."""
    rows = []
    for line in lines:
        if line.startswith(("  ", "...")):
            break
        rows.append(
            " ".join(re.sub(r"\b(?:ns|µs|ms|s)\b", "u", _VERDICT.sub("V", _shape(line))).replace("[#, #]", "").split())
        )
    return rows


def _shape(line: str) -> str:
    """Return a line with its numbers masked."""
    return " ".join(_NUMBER.sub("#", line).split())


def main() -> int:
    """Check or update the pages; return 1 if a block differs from what is printed, or cannot be updated."""
    options = argparse.ArgumentParser(description="The console blocks of README.md and docs/.")
    options.add_argument("action", choices=["check", "update"])
    options.add_argument("pages", nargs="*", type=Path, metavar="FILE")
    options.add_argument("--measured", action="store_true", help="also run measured commands again")
    chosen = options.parse_args()
    differences: list[Difference] = []
    failed = False
    for page in [page.absolute() for page in chosen.pages] or PAGES:
        try:
            if chosen.action == "update":
                print(f"{page.name}: {'written' if update(page, chosen.measured) else 'unchanged'}")
            else:
                differences += check(page)
        except (ValueError, AssertionError) as error:  # the other pages are still brought up to date
            print(f"{page.name}: {error}")
            failed = True
    for difference in differences:
        print(difference, end="\n\n")
    return int(failed or bool(differences))


if __name__ == "__main__":
    sys.exit(main())
