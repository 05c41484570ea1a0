"""What `ffn bench` makes of the kernel in a file: a worker's own path, in a forked process, and what its parent does.

A server, started with the environment of a worker, has imported torch but computed nothing; it forks for every file. So
a kernel costs the time of its calls alone, and what it replaces ends with its process. Time is the real clock's.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from ffncli.bench.judge.summary import agreed
from ffncli.bench.launch import environment, report_on
from ffncli.bench.records import Case, Job, Method, Outcome, TimedUnit
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels.choice import choices
from ffncli.system.child import settle

HERE = Path(__file__).parent
KERNEL = "mine"
_LONGEST = 300  # s; a child that takes longer is killed; one that yields to all others takes a minute beside them
_METHOD = Method(processes=3, max_time=0.9, placements=2, rounds=3)
_NO_ROOF = 2  # the number of a process that does not measure the roof, which is nothing of a kernel's


@dataclass(frozen=True)
class Header:
    """What the text at the top of a file says: which code it deserves (any of several), and of which case."""

    does: str
    codes: tuple[str, ...]
    case: dict[str, str]


def header(path: Path) -> Header:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    fields = dict(re.findall(r"^(code|case): (.*)$", text, re.MULTILINE))
    codes = tuple(code.strip() for code in fields.get("code", "").split("|") if code.strip())
    case = dict(pair.split("=", 1) for pair in fields.get("case", "").split())
    return Header(text.split("\n", 1)[0], codes, case)


def case_of(fields: dict[str, str]) -> Case:
    """A small gated block, one thread; `fields` as in a header: `tokens=1 dtype=bf16 passes=forward+backward`.

    (`seconds` is the time for the three processes of a run, of which this is one.)
    """
    rest = {name: value for name, value in fields.items() if name != "kernel"}
    width, hidden = int(rest.pop("d_model", 64)), int(rest.pop("d_ff", 192))
    tokens, threads = int(rest.pop("tokens", 16)), int(rest.pop("threads", 1))
    moe = MoE(4, 2) if rest.pop("moe", "") else None
    spec = FFNSpec(width, hidden, rest.pop("activation", "swiglu"), bias=False, moe=moe)
    return Case("s", "s", spec, tokens, threads=threads, **rest)


def unit_of(path: Path, reports: Connection, longer: int) -> TimedUnit:
    """The unit of eager and of the kernel in the file, in this process; `reports` is its referee's. `longer`: how many
    times the usual time it has."""
    from ffncli.bench.referee.process import referee_process
    from ffncli.bench.timing.measure_case import measure_case

    fields = header(path).case
    method = replace(_METHOD, max_time=longer * float(fields.pop("seconds", _METHOD.max_time)))
    case, kernel = case_of(fields), f"{KERNEL}={path}:{fields.get('kernel', 'mlp')}"
    job = Job(_NO_ROOF, (case,), choices(["eager", kernel]), None, method)
    with referee_process(job, Connection(os.dup(0)), reports) as referee:
        return measure_case(case, job, referee=referee)


class Server:
    """Asks the process that forks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def outcomes(self, path: Path, longer: int = 1) -> dict[str, Outcome]:
        """The outcomes of eager and of the kernel in the file, by name."""
        self._connection.send((str(path), longer))
        answer = self._connection.recv()
        assert isinstance(answer, TimedUnit), answer
        return {outcome.kernel: outcome for outcome in answer.outcomes}


@contextmanager
def server() -> Iterator[Server]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            env=environment(1, "fixed"),
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.DEVNULL,
        )
    try:
        with Connection(ours.detach()) as connection:
            yield Server(connection)
    finally:
        process.wait(10)


def _serve(connection: Connection) -> None:
    import numpy  # noqa: F401  # as a worker does: before torch

    from ffncli.bench.timing import measure_case  # noqa: F401  # and torch, before the fork

    while True:
        try:
            path, longer = connection.recv()
        except EOFError:
            return
        connection.send(_forked(Path(path), longer))


def _forked(path: Path, longer: int) -> TimedUnit | str:
    """The unit that a forked process makes of the file, or what happened to it."""
    reading, writing = os.pipe()
    reports, referees = (Connection(one.detach()) for one in socket.socketpair())
    child = os.fork()
    if child == 0:
        os.close(reading)
        reports.close()
        settle()
        signal.alarm(_LONGEST)
        try:
            answer: object = unit_of(path, referees, longer)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    referees.close()
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    with reports:
        answer = pickle.loads(data) if data else f"its process ended with status {status}"
        if not isinstance(answer, TimedUnit):
            return answer
        return agreed(answer, report_on(reports, answer.case))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
