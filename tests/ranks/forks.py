"""Forks processes that have imported torch, which takes every rank seconds: `python -m tests.ranks.forks FD`.

An order on the socket FD has a command, its variables and folder, and how many ranks torch's launcher will start in it.
They are forked too, and are children of the command, as if it had started them. Its id and then its exit code are
written to a pipe of the order, which comes with its standard output and error.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

IMPORTED = tuple(
    """
    torch.distributed.launcher.api ffncli.cli.verify ffncli.cli.trace.command ffncli.run.trace.session
    ffncli.run.verify.verify ffncli.run.ranks.simulate ffncli.run.ranks.parallel
""".split()
)
_LONGEST = 1 << 17  # bytes of an order
_waiting: list[WaitingRank] = []


class WaitingRank:
    """A child that waits to become a rank: forked before its parent has threads. To torch's launcher it is a Popen."""

    def __init__(self) -> None:
        self.args: Sequence[str] = ()
        self.returncode: int | None = None
        self.orders, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()  # as the launcher's processes do: it kills their groups
            for one in (self, *_waiting):
                one.orders.close()
            _waiting.clear()
            become(json.loads(inside.recv(_LONGEST) or sys.exit()))
        inside.close()

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code; raises TimeoutExpired."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code


def start_rank(_: SubprocessHandler, args: Sequence[str], env: Mapping[str, str]) -> WaitingRank:
    """In place of the launcher's own start of a process."""
    rank = _waiting.pop(0)
    rank.args = args
    rank.orders.send(json.dumps({"command": args, "env": dict(env), "folder": os.getcwd(), "ranks": 0}).encode())
    return rank


def become(order: Mapping[str, Any]) -> None:
    """Run the command `python -m MODULE ...` in this process, to its end."""
    program, *words = [word for word in order["command"] if word != "-u"]
    assert (program, words[0]) == (sys.executable, "-m")
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for _ in range(order["ranks"]):
        _waiting.append(WaitingRank())  # noqa: PERF401  # each closes the sockets of those before it
    SubprocessHandler._popen = start_rank  # type: ignore[method-assign,assignment]
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.exit()


def attended(order: Mapping[str, Any], out: int, err: int, report: int) -> None:
    """In a process for each command: fork it, and report how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
        for one in (out, err, report):
            os.close(one)
        become(order)
    os.write(report, b"%d\n" % pid)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # a test that needs no exit code may have ended
        os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def main(orders: socket.socket) -> None:
    """Take orders until the tests end."""
    for name in IMPORTED:
        import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, given, *_ = socket.recv_fds(orders, _LONGEST, 3)
        if not message:
            return
        if os.fork() == 0:
            orders.close()
            attended(json.loads(message), *given)
        for one in given:
            os.close(one)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
