"""A worker that measures nothing: its times are made up, the same every time.

`fake_worker.py [FILE] FD REPORTS MEMORY`: FILE holds lines `CASE-PART PROCESS WHAT`: what goes wrong at a case whose
key holds that text: `kill`, `segfault`, `exit`, `slow`, `wrong`, `fails`, `other` (machine), `packed` (kills the
worker, unless it is left out), `hangs` (loading packed never ends, unless it is left out), `spoils` (packed spoils a
capture, unless it is left out or the case is launched plainly), `even` (all take as long), `pause` (a moment for each
case); or one of MISDEEDS, which packed does, unless it is left out.
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path

from ffncli.bench.activity import SIZE
from ffncli.bench.launch import labels
from ffncli.bench.records import (
    ANCHOR,
    TWIN,
    Case,
    CaseReport,
    Finding,
    Job,
    Outcome,
    Roof,
    Status,
    TimedBlock,
    TimedUnit,
)  # fmt: skip
from ffncli.bench.timing.reporter import REPORTER

RATIOS = {"packed": 0.95, "numpy": 1.10, "module": 1.0, "slowed": 1.05}  # of the others' time to the baseline's


def unit(case: Case, job: Job, what: str = "") -> TimedUnit:
    """What the case gives in that process: the same in every run."""
    ratios = {} if what == "even" else RATIOS
    rng = random.Random(f"{case.key}/{job.process}")
    status: Status = "wrong" if what == "wrong" else "failed" if what == "fails" else "ok"
    names = [choice.label for choice in job.kernels]
    arms = [*names, TWIN, ANCHOR] if status == "ok" else []
    gone = {outcome.kernel: outcome for key, outcome in job.gone if key == case.key}
    arms = [name for name in arms if name not in gone]
    blocks = tuple(
        TimedBlock(
            job.process, case.key, placement, turn, position, name, 7, 7e-3 * ratios.get(name, 1.0) * noise, flags
        )
        for placement in range(2)
        for turn in range(2)
        for noise, flags in [(math.exp(rng.gauss(0, 1e-4)), ("faults=3",) if turn else ())]
        for position, name in enumerate(arms)
    )
    outcomes = tuple(
        gone.get(name) or Outcome(name, status, "0 of 9" if status != "ok" else "", 1e-7, 1e-8) for name in names
    )
    notes, why = ("a note; of the unit",), dict(job.plain).get(case.key, "")
    if why:
        notes = (*notes, f"no CUDA graphs, as {why}")
    environment = {"host": "there" if what == "other" else "here", "torch": "2.x", "cpu": "fake", "numpy": "2"}
    return TimedUnit(job.process, case.key, job.baseline or names[0], case.cache, outcomes, blocks, Roof(1e11, 1e10),
                environment, notes, {"blocks": 1.0}, "plain" if why else "", plain_because=why)  # fmt: skip


def hold_memory() -> None:
    held = bytearray(b"x") * HELD
    time.sleep(60)
    del held


def leave_a_copy() -> None:
    """The copy keeps the line open."""
    if os.fork():
        os._exit(0)
    time.sleep(60)


HELD = 300_000_000  # bytes
MISDEEDS: dict[str, Callable[[], object]] = {
    "never-returns": lambda: time.sleep(60),
    "exits": lambda: os._exit(0),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "eats": hold_memory,
    "forks": leave_a_copy,
    "closes-all": lambda: (os.closerange(3, 100), time.sleep(60)),
    "floods": lambda: [print("y" * 9999) for _ in range(1000)] and None,
}


def misbehave(connection: Connection, what: str) -> None:
    """What packed does while it is timed."""
    os.dup2(2, 1)
    connection.send(("stage", "timing", ""))
    REPORTER.calls("packed")
    MISDEEDS[what]()
    REPORTER.rests()


def report(unit: TimedUnit) -> CaseReport:
    """What a referee says of it."""
    blocks = Counter(block.kernel for block in unit.blocks)
    return CaseReport(
        unit.case,
        tuple(Finding(Outcome(o.kernel), answers=3, samples=n) for o in unit.outcomes if (n := blocks[o.kernel])),
    )


def faults(file: Path | None, case: Case, process: int) -> str:
    if file is None:
        return ""
    with file.with_suffix(".log").open("a") as log:
        log.write(f"{process} {case.key}\n")
    for line in file.read_text().splitlines():
        part, at, what = line.rsplit(maxsplit=2)
        if part in case.key and int(at) == process:
            return what
    return ""


def main(arguments: list[str]) -> None:
    *files, line, reports_line, memory = arguments
    file = Path(files[0]) if files else None
    connection, reports = Connection(int(line)), Connection(int(reports_line))
    connection.send(("ready",))
    job: Job = connection.recv()
    REPORTER.share(mmap(int(memory), SIZE), labels(job))
    for case in job.cases:
        connection.send(("began", case.key))
        what = faults(file, case, job.process)
        if what == "packed" and (case.key, what) not in [(key, outcome.kernel) for key, outcome in job.gone]:
            connection.send(("stage", "checking", what))
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hangs" and "packed" not in [outcome.kernel for key, outcome in job.gone if key == case.key]:
            connection.send(("stage", "loading", "packed"))
            time.sleep(60)
        left_out = (case.key, "packed") in [(key, outcome.kernel) for key, outcome in job.gone]
        if what in MISDEEDS and not left_out:
            misbehave(connection, what)
        if what == "spoils" and not left_out and case.key not in dict(job.plain):
            connection.send(("spoiled", "packed", "it waits"))
            return
        if what == "loses-gpu" and not left_out:
            connection.send(("lost", "packed", "CUDA error: an illegal memory access was encountered \x1b[2J"))
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif what == "exit":
            os._exit(5)
        elif what == "pause":
            time.sleep(0.04)
        elif what == "slow":
            time.sleep(60)
        made = unit(case, job, what)
        reports.send_bytes(json.dumps(asdict(report(made))).encode())
        connection.send(("unit", made))
    connection.send(("finished",))


if __name__ == "__main__":
    main(sys.argv[1:])
