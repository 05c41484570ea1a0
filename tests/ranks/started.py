"""Commands over real ranks: by ffn itself, by torchrun's agents, or one rank by hand."""

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 240  # for a command; it is killed then
_LOCKS: list[socket.socket] = []
FFN = (sys.executable, "-m", "ffncli")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class Started:
    """A running command `python -m ...`, forked from a process that has imported torch; with `new` started anew.

    `ranks`: how many it starts itself by torch's launcher.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        env: Mapping[str, str] | None = None,
        ranks: int = 0,
        new: bool = False,
        folder: Path = ROOT,
    ) -> None:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115  # closed with this
        self.process: subprocess.Popen[bytes] | Forked
        if new:
            self.process = subprocess.Popen(command, stdout=self._out, stderr=self._err, cwd=folder, env=variables)
        else:
            order = {"command": command, "env": variables, "folder": str(folder), "ranks": ranks}
            self.process = Forked(order, self._out.fileno(), self._err.fileno())

    def ended(self) -> Ended:
        """Wait for its end."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for one in (self._out, self._err):
            one.seek(0)
        return Ended(code, self._out.read(), self._err.read())


class Forked:
    """A process of `tests.ranks.forks`, as Popen has one."""

    def __init__(self, order: Mapping[str, object], out: int, err: int) -> None:
        reading, report = os.pipe()
        socket.send_fds(forks()[0], [json.dumps(order).encode()], [out, err, report])
        os.close(report)
        self._report = os.fdopen(reading, "rb", buffering=0)
        self.pid = int(self._report.readline())
        self._code: int | None = None

    def wait(self, timeout: float = LIMIT_S) -> int:
        """Its exit code; raises TimeoutExpired."""
        if self._code is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forked", timeout)
            self._code = int(self._report.readline())
            self._report.close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """As Popen does."""
        self.send_signal(signal.SIGKILL)


@cache
def forks() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Where to order forked processes; what forks them ends with this process."""
    orders, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = (sys.executable, "-m", "tests.ranks.forks", str(inside.fileno()))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[inside.fileno()], stdout=subprocess.DEVNULL)
    inside.close()
    return orders, process


class Meeting(Started):
    """`tests.ranks.meets` in a mode of it, from the launcher on or as one rank."""

    def __init__(self, folder: Path, mode: str, env: Mapping[str, str] | None = None, new: bool = False) -> None:
        line = folder / f"line-{mode}"
        if not line.exists():
            os.mkfifo(line)
        # Opened for writing too: else a rank that has written and closed makes it readable, with nothing to read.
        self._reading = os.open(line, os.O_RDWR | os.O_NONBLOCK)
        command = (sys.executable, "-m", "tests.ranks.meets", mode, str(line))
        super().__init__(command, env, 2 if mode.startswith("launch") else 0, new)

    def ranks_that_met(self) -> list[int]:
        """Descriptors of both ranks' processes, once they have met: readable when the process has ended."""
        text = ""
        while text.count("\n") < 2:
            assert select.select([self._reading], [], [], LIMIT_S)[0], "the ranks did not meet"
            text += os.read(self._reading, 1 << 10).decode()
        return [os.pidfd_open(int(pid)) for pid in text.split()]


def all_end(descriptors: list[int], limit: float = 20.0) -> bool:
    """Whether all these processes end within so many seconds."""
    return all(select.select([one], [], [], limit)[0] for one in descriptors)


def agent(ranks: int) -> tuple[str, ...]:
    """ffn under torchrun, up to its arguments. `--standalone` takes a port that is free; its usual one is 29500."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *FFN[1:])


def free_port() -> int:
    """A port that nobody uses, and that no other process of these tests takes as long as this one runs.

    It is below those that the system gives out. The name of a socket is its lock, which ends with the process.
    """
    while True:
        port, lock = random.randrange(20000, 30000), socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0ffn-test-port-{port}")
            with socket.create_server(("127.0.0.1", port)):
                _LOCKS.append(lock)
                return port
        except OSError:
            lock.close()


def by_hand(rank: int, size: int, port: int, **others: str) -> dict[str, str]:
    """The variables of a rank that no agent has started, alone on its machine."""
    place = {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1", **others}


def node(port: int, *arguments: str) -> Started:
    """One of two nodes with a rank each, which meet at that port as torchrun's usual rendezvous does."""
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two-nodes")
    where = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")
    return Started((sys.executable, "-m", "torch.distributed.run", *meet, *where, *FFN[1:], *arguments), ranks=1)
