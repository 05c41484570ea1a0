"""Cases of `ffn bench` and `ffn compare`: results, an unfinished run's journal and rounds; nothing is measured."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from ffncli.bench import suite
from ffncli.bench.activity import Activity
from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import Job, Method
from ffncli.bench.request.grid import BenchRequest, Grid, cases
from ffncli.bench.request.machines import GridPart
from ffncli.bench.results.csv_file import HEADER, row_lines
from ffncli.bench.results.journal import ResultFiles, begin
from ffncli.kernels.choice import choices
from ffncli.system.child import PrintedBytes
from tests.bench import fake_worker
from tests.bench.stored import table
from tests.fuzz import changes

RUN = {"run_id": "20260101T000000Z-0", "started_utc": "2026-01-01T00:00:00Z"}
CELLS = [*changes.TEXTS, *"nan inf -1 0 1e308 1e-308".split(), "9" * 400, *"true a;b 1;nan 1;2;3 0;0 ok oom".split()]
COMPARE = [[], ["--json"], ["--csv"], ["--fail-if-slower", "3%"], ["--allow-mismatch"], ["--strict"], ["--md"]]


def results(draw: Random, folder: Path) -> list[str]:
    """NEW with cells, lines or bytes changed."""
    base, new = folder / "a.csv", folder / "b.csv"
    base.write_text(_csv("base"))
    if draw.random() < 0.3:
        new.write_bytes(changes.of_bytes(_csv("new").encode(), draw))
    else:
        lines = [line.split(",") for line in _csv("new").splitlines()]
        for _ in range(draw.choice((1, 1, 2, 6))):
            _change_cells(lines, draw)
        new.write_bytes(("\n".join(map(",".join, lines)) + "\n").encode("utf-8", "surrogatepass"))
    return ["compare", *draw.sample([str(base), str(new)], 2), *draw.choice(COMPARE)]


def _change_cells(lines: list[list[str]], draw: Random) -> None:
    """A column everywhere, one cell, or a column that is gone, doubled or added."""
    at, cell = draw.randrange(len(lines[0])), draw.choice(CELLS)
    match draw.randrange(6):
        case 0:
            for line in lines[1:]:
                line[at % len(line)] = cell
        case 1:
            for line in lines:
                del line[at % len(line)]
        case 2:
            for line in lines:
                line.insert(at, line[at % len(line)])
        case 3:
            lines[0] += [f"c{n}" for n in range(draw.choice((1, 2000)))]
        case _:
            line = draw.choice(lines)
            line[at % len(line)] = cell


def journal(draw: Random, folder: Path) -> list[str]:
    """A journal of which one line is changed; the units that are lost by that are measured again."""
    state = _unfinished(draw.random() < 0.3)
    lines = state["a.partial.jsonl"].decode().splitlines()
    at = 0 if draw.random() < 0.4 else draw.randrange(len(lines))
    lines[at] = changes.of_json(json.loads(lines[at]), draw)
    if draw.random() < 0.1:
        lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    raw = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        raw = changes.of_bytes(raw, draw)
    return _resumed(folder, state | {"a.partial.jsonl": raw}, draw)


def rounds(draw: Random, folder: Path) -> list[str]:
    """A rounds file with changed bytes or cells beside a journal that is right."""
    state = _unfinished(False)
    raw = state["a.rounds.csv"]
    if draw.random() < 0.5:
        raw = changes.of_bytes(raw, draw)
    else:  # cells of the same length, so that the journal still fits
        lines = raw.split(b"\n")
        line = lines[at := draw.randrange(len(lines))].split(b",")
        cell = draw.randrange(len(line))
        line[cell] = draw.choice((b"0" * 40, b"9" * 40, b"-" * 40, b"e" * 40, b"\x1b" * 40, b"nan"))[: len(line[cell])]
        lines[at] = b",".join(line)
        raw = b"\n".join(lines)
    return _resumed(folder, state | {"a.rounds.csv": raw}, draw)


def grid(draw: Random, folder: Path) -> list[str]:
    """Two parts of a grid; in one of them the grid, the rows or the blocks are changed."""
    files = _parts()
    name = draw.choice(("a.grid.json", "a.grid.json", "a.csv", "a.rounds.csv", "b.partial.jsonl", "b.rounds.csv"))
    raw = files[name]
    if name == "a.grid.json" and draw.random() < 0.7:
        raw = changes.of_json(json.loads(raw), draw).encode("utf-8", "surrogatepass")
    elif name == "a.csv" and draw.random() < 0.7:
        lines = [line.split(",") for line in raw.decode().splitlines()]
        _change_cells(lines, draw)
        raw = ("\n".join(map(",".join, lines)) + "\n").encode("utf-8", "surrogatepass")
    else:
        raw = changes.of_bytes(raw, draw)
    for one, contents in (files | {name: raw}).items():
        (folder / one).write_bytes(contents)
    words = ["merge", str(folder / "a.csv"), str(folder / "b.csv"), "-o", str(folder / "all.csv")]
    return [*words, *draw.choice(([], ["--json"], ["--allow-mismatch"], ["--csv"]))]


def _resumed(folder: Path, state: dict[str, bytes], draw: Random) -> list[str]:
    for name, raw in state.items():
        (folder / name).write_bytes(raw)
    return ["bench", "--resume", str(folder / "a.csv"), *draw.choice(([], ["--json"], ["--fail-if-slower", "3%"]))]


@contextmanager
def no_workers() -> Iterator[None]:
    """Workers that answer at once, in this process."""

    class Answers:
        def __init__(self, job: Job) -> None:
            self.messages: list[Any] = []
            for case in job.cases:
                self.messages += [("began", case.key), ("unit", fake_worker.unit(case, job))]
            self.made = [message for message in self.messages if message[0] == "unit"]
            self.messages.append(("finished",))
            self.printed, self.activity = PrintedBytes(), Activity()

        def receive(self, patience: float) -> Any:
            return self.messages.pop(0)

        def report(self, case: str) -> Any:
            return next(fake_worker.report(m[1]) for m in self.made if m[1].case == case)

        def ended(self) -> int:
            return 0

        def memory(self) -> None:
            return None

    @contextmanager
    def started(_running: Any, job: Job, *_: Any) -> Iterator[Answers]:
        yield Answers(job)

    with patch.object(suite._Run, "_started", started), patch("os.fsync", lambda handle: None):
        yield


COMPARED = (1.0, 1.0, 1.2)  # factors between two results


def write_compared() -> None:
    """Write two results, of a row per factor each, in the current folder: a.csv and b.csv."""
    for name, run in (("a.csv", "base"), ("b.csv", "new")):
        Path(name).write_text(_csv(run))


@cache
def _csv(run: str) -> str:
    more = dict.fromkeys(("time_s", "time_low_s", "time_high_s"), 1e-3) | {
        "ratio_low": 0.89,
        "ratio_high": 0.91,
        "aa_ratio": 1.0,
    }
    return HEADER + row_lines(table(COMPARED, run, **more))


@cache
def _parts() -> dict[str, bytes]:
    """The files of two parts of a grid, of which the second is unfinished."""
    import tempfile

    points = cases(Grid("8x16:swiglu", tokens=(1, 2, 3), device=("cpu",), threads=(1,)))
    asked = BenchRequest(points, choices(["eager", "packed"]), "eager", Method(processes=1))
    with tempfile.TemporaryDirectory() as folder:
        for index, name in ((1, "a"), (2, "b")):
            with suite.new_run(Path(folder) / f"{name}.csv", asked, part=GridPart(index, 2)) as opened:
                for case in opened.request.cases:
                    opened.add(fake_worker.unit(case, Job(0, (), asked.kernels, "eager", asked.method)))
                if name == "a":
                    opened.finish()
        return {one.name: one.read_bytes() for one in Path(folder).iterdir()}


@cache
def _unfinished(by_step: bool) -> dict[str, bytes]:
    """The files of a run in which one unit is missing."""
    import tempfile

    block = "8x16:swiglu" if not by_step else "8x16:gelu"
    points = cases(Grid(block, tokens=(1, 2), device=("cpu",), threads=(1,)))
    asked = BenchRequest(points, choices(["eager", "packed"]), "eager", Method(processes=2), asked={"--tokens": "1,2"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        opened = begin(path, asked, RUN, suite.software(), summarise, False)
        for process in range(2):
            for case in points[: 2 - process]:
                opened.add(fake_worker.unit(case, Job(process, (), asked.kernels, "eager", asked.method)))
        files = ResultFiles(path)
        return {one.name: one.read_bytes() for one in (files.csv, files.rounds, files.journal)}
