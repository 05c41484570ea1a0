"""Every probe by its part, and how they run: each in a process group of its own with a time limit, at its own cost.

`python -m benchmarks.gpu_first.run NAME FILE` is that process: one probe's measurement, its figures as JSON in FILE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu_first import clock, device, facts, faults, method
from benchmarks.gpu_first.probe import Answer, Probe
from benchmarks.script import ROOT, Kept, environment, now
from ffncli.errors import clean
from ffncli.system import child

CHILD = (sys.executable, "-m", "benchmarks.gpu_first.run")
COLUMNS = (
    "date", "part", "probe", "finding", "question", "answer", "expected", "figure", "figures", "seconds", "limit_s",
    "look",
)  # fmt: skip
NO_ANSWER = ("timeout", "failed", "garbage")
_MOST_FIGURES = 1 << 20  # bytes of a probe's answer
_LONGEST = 300  # characters of a figure


PARTS: Mapping[str, tuple[Probe, ...]] = {
    "facts": facts.PROBES,
    "device": device.PROBES,
    "clock": clock.PROBES,
    "faults": faults.PROBES,
    "method": method.METHOD,
    "repeat": method.REPEAT,
}
LONGEST_PART_S = 600


def probe_of(name: str) -> Probe:
    """The probe of that name. Raises KeyError."""
    return {probe.name: probe for probes in PARTS.values() for probe in probes}[name]


def listing() -> str:
    """Every probe on a line: part, finding, name, limit in seconds, question."""
    lines = []
    for part, probes in PARTS.items():
        lines.append(f"{part}: at most {sum(probe.limit_s for probe in probes)} s")
        lines += [f"  {p.finding:<4} {p.name:<16} {p.limit_s:>4} s  {p.question}" for p in probes]
    return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """`answer` is yes, no, figure, or why there is none: timeout, failed, garbage. `figures` is the JSON behind it."""

    answer: str
    figure: str
    figures: str
    seconds: float


def outcome(probe: Probe, log: IO[bytes], command: Sequence[str] = CHILD) -> Outcome:
    """Run a probe; its output goes to the log, which can be read too: the last line says why a probe failed."""
    log.write(f"\n=== {probe.name}: {probe.question}\n".encode())
    log.flush()
    start = log.seek(0, os.SEEK_END)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        variables = environment() | dict(probe.variables)
        words = [*command, probe.name, str(file)]
        code = _ended(words, variables, log, probe.limit_s)
        seconds = time.perf_counter() - began
        if code is None:
            return Outcome("timeout", f"did not end within {probe.limit_s} s", "", seconds)
        if code != 0:
            return Outcome("failed", f"its process {child.ending(code)}: {_last_line(log, start)}", "", seconds)
        return _judged(probe, file, seconds)


def _ended(words: Sequence[str], variables: dict[str, str], log: IO[bytes], limit: float) -> int | None:
    """The exit code; None if it had to be killed. All that it started is gone afterwards, as far as the system lets."""
    process = subprocess.Popen(
        words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the probe; one that hangs in the driver is left behind rather than waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


def _last_line(log: IO[bytes], start: int) -> str:
    """The last line that a probe printed, of those after `start`."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(start, end - _LONGEST))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return clean(lines[-1].strip()) if lines else "nothing in the log"


def _judged(probe: Probe, file: Path, seconds: float) -> Outcome:
    """The answer from the file that the probe wrote, if that holds figures."""
    try:
        text = file.read_bytes()[:_MOST_FIGURES].decode()
        figures = json.loads(text)
        answer: Answer = probe.judge(figures)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        return Outcome("garbage", clean(f"no figures: {type(error).__name__}: {error}")[:_LONGEST], "", seconds)
    return Outcome(answer.word, clean(answer.figure)[:_LONGEST], text, seconds)


def run_part(part: str, probes: Iterable[Probe], kept: Kept, log: IO[bytes], command: Sequence[str] = CHILD) -> int:
    """Run every probe, print its line, and keep its row; how many gave no answer."""
    unanswered = 0
    for probe in probes:
        done = outcome(probe, log, command)
        unanswered += done.answer in NO_ANSWER
        kept.add({
            "date": now(), "part": part, "probe": probe.name, "finding": probe.finding, "question": probe.question,
            "answer": done.answer, "expected": _word(probe.expected), "figure": done.figure, "figures": done.figures,
            "seconds": done.seconds, "limit_s": probe.limit_s, "look": probe.look,
        })  # fmt: skip
        print(line(probe, done), flush=True)
    return unanswered


def line(probe: Probe, done: Outcome) -> str:
    """`A8   flush         yes     12.3 µs after writes, ...  4.1 s`, and what to look at if this is not as expected."""
    unexpected = probe.expected is not None and done.answer not in (_word(probe.expected), *NO_ANSWER)
    look = f"\n{'':34}look at: {probe.look}" if unexpected else ""
    return f"{probe.finding:<4} {probe.name:<16} {done.answer:<8} {done.figure}  {done.seconds:.1f} s{look}"


def _word(expected: bool | None) -> str:
    return "" if expected is None else "yes" if expected else "no"


if __name__ == "__main__":
    name, file = sys.argv[1:]
    Path(file).write_text(json.dumps(probe_of(name).measure()), "utf-8")  # what it prints goes to the log
