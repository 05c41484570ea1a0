"""Commands started over real ranks: by ffn itself, by torchrun's agents, or one rank by hand."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 240  # for a command; it is killed then
FFN = (sys.executable, "-m", "ffncli")
AGENT = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class Started:
    """A running command."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=variables
        )

    def ended(self) -> Ended:
        """Wait for its end."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return Ended(self.process.returncode, out, err)


class Meeting(Started):
    """`tests.ranks.meets` in a mode of it, from the launcher on or as one rank."""

    def __init__(self, folder: Path, mode: str, env: Mapping[str, str] | None = None) -> None:
        line = folder / f"line-{mode}"
        if not line.exists():
            os.mkfifo(line)
        self._reading = os.open(line, os.O_RDONLY | os.O_NONBLOCK)
        super().__init__((sys.executable, "-m", "tests.ranks.meets", mode, str(line)), env)

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


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def by_hand(rank: int, size: int, port: int, **others: str) -> dict[str, str]:
    """The variables of a rank that no agent has started, alone on its machine."""
    place = {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1", **others}


def node(port: int, *arguments: str) -> Started:
    """One of two nodes with a rank each, which meet at that port as torchrun's usual rendezvous does."""
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two-nodes")
    where = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")
    return Started((sys.executable, "-m", "torch.distributed.run", *meet, *where, "-m", "ffncli", *arguments))
