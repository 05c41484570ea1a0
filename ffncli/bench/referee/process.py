"""The referee as a process of its own: it has weights and references, and never loads a user's file.

The worker forks it when torch is loaded and nothing has been computed yet, so it costs no second import; then it waits
for questions, without using a processor. Nothing that the worker sends is unpickled, and no answer holds a reference.
It ends with the worker. Where forking is not safe (anything but Linux) there is none, and the worker judges by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import log
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from torch import Tensor

from ffncli.bench.machine.math_mode import set_math_mode
from ffncli.bench.records import Case, Job
from ffncli.bench.referee.errors import Error
from ffncli.bench.referee.problem import Inputs, Problem, seed_of, weight_bytes
from ffncli.bench.referee.samples import CallSample
from ffncli.errors import ExitCode, FFNError
from ffncli.run.engine.weights import require_memory

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CLOCKS_APART, _CLOCKS_LEAST = 0.05, 0.1  # as a share, and in seconds: less is waiting for a processor
_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)}
_OPTIONAL = ("rows", "g")  # of Inputs
_PARTS = ("x", "out", "g", "gradient")  # of a CallSample


class RefereeGone(FFNError):
    """The referee's process ended; the message says how."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=ExitCode.ENVIRONMENT)


# --- the worker's side ------------------------------------------------------------------------------------------------


class RefereeProcess:
    """Asks the referee. Raises RefereeGone if that has ended, and what the referee raised."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection, self._pid = connection, pid
        self._start = 0
        self.gone = False

    def begin(self, case: Case) -> None:
        """Take up a case: its weights are drawn there while the worker draws its own."""
        self._tell({"ask": "begin", "key": case.key})

    def inputs(self, number: int) -> Inputs:
        """x, and g in a backward pass; without references."""
        head, (x, *rest) = self._ask({"ask": "inputs", "number": number})
        more = dict(zip(head["parts"], rest, strict=True))
        return Inputs(x, None, more.get("rows"), more.get("g"), None, str(head["remark"]), 0, float(head["rounding"]))

    def errors(self, number: int, given: Mapping[str, Tensor]) -> dict[str, Error]:
        """How far a kernel's tensors for the inputs of that number are off."""
        head, _ = self._ask({"ask": "errors", "number": number, "given": list(given)}, list(given.values()))
        return {what: Error(*error) for what, error in zip(given, head["errors"], strict=True)}

    def sampled(self, samples: Sequence[CallSample]) -> list[Error | None]:
        """How far each sample is off, in their order; None for one that was not judged."""
        parts = [[part for part in _PARTS if getattr(sample, part) is not None] for sample in samples]
        tensors = [getattr(s, part) for s, names in zip(samples, parts, strict=True) for part in names]
        head, _ = self._ask({"ask": "sampled", "kernels": [s.kernel for s in samples], "parts": parts}, tensors)
        return [None if error is None else Error(*error) for error in head["errors"]]

    def clock_started(self) -> None:
        """The referee's clock and the worker's are compared from now on."""
        self._ask({"ask": "clock started"})

    def clock_stopped(self, seconds: float) -> str:
        """What is wrong with the worker's clock, by which `seconds` have passed since; empty where nothing is."""
        return str(self._ask({"ask": "clock stopped", "seconds": seconds})[0]["remark"])

    def close(self) -> None:
        """End it, also where a process that a kernel has forked keeps the line open."""
        self._connection.close()
        if not self.gone:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self.gone = True

    def _tell(self, head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        try:
            _send(self._connection, head, tensors)
        except OSError:
            raise self._ended() from None

    def _ask(self, head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> tuple[dict[str, Any], list[Tensor]]:
        self._tell(head, tensors)
        try:
            answer, given = _receive(self._connection)
        except (EOFError, OSError):
            raise self._ended() from None
        if "error" in answer:
            _raise_again(answer)
        return answer, given

    def _ended(self) -> RefereeGone:
        if self.gone:
            return RefereeGone("the referee's process has ended")
        self.gone = True
        status = 0
        with suppress(ChildProcessError):
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if status == -signal.SIGKILL:
            return RefereeGone("the referee's process was killed (signal 9), probably for memory")
        return RefereeGone(f"the referee's process ended with exit code {status}")


@contextmanager
def referee_process(job: Job, others: Connection) -> Iterator[RefereeProcess | None]:
    """The referee of a job; None where it has no business (on a GPU, step by step) or cannot be forked.

    To be called before any computation, and before a user's file is loaded. The child closes `others`, the line to the
    worker's parent.
    """
    if not sys.platform.startswith("linux") or job.method.by_step or all(c.device != "cpu" for c in job.cases):
        yield None
        return
    ours, theirs = socket.socketpair()
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        others.close()
        ours.close()
        _live(job, Connection(theirs.detach()), worker)
    theirs.close()
    process = RefereeProcess(Connection(ours.detach()), pid)
    try:
        yield process
    finally:
        process.close()


def _raise_again(answer: Mapping[str, Any]) -> NoReturn:
    text = str(answer["text"])
    if answer["error"] == "FFNError":
        raise FFNError(text, str(answer["hint"]), ExitCode(answer["code"]))
    raise MemoryError(text) if answer["error"] == "MemoryError" else RuntimeError(text)


# --- the referee's side -----------------------------------------------------------------------------------------------


def _live(job: Job, connection: Connection, worker: int) -> NoReturn:
    """All of the forked process: it answers until the worker closes the line, or dies."""
    code = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # its memory is not the worker's to read
        if os.getppid() == worker:
            _serve(_Answers(job), connection)
        code = 0
    finally:
        os._exit(code)


def _serve(answers: _Answers, connection: Connection) -> None:
    while True:
        try:
            head, tensors = _receive(connection)
        except (EOFError, OSError):
            return
        try:
            answer, given = answers.to(head, tensors)
        except Exception as error:
            kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
            answer, given = {"error": kind, "text": str(error) or kind}, []
            if isinstance(error, FFNError):
                answer |= {"text": error.message, "hint": error.hint, "code": int(error.code)}
        if head["ask"] == "begin":
            continue  # nobody waits; what went wrong comes up again with the first question
        try:
            _send(connection, answer, given)
        except OSError:
            return


@dataclass
class _Answers:
    """The state of the referee: the case that is at hand."""

    job: Job
    case: Case | None = None
    problem: Problem | None = None
    known: dict[int, Inputs] = field(default_factory=dict)
    started: float = 0.0

    def to(self, head: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer to a question, and its tensors."""
        match head["ask"]:
            case "begin":
                self.case = next(case for case in self.job.cases if case.key == head["key"])
                self.problem, self.known = None, {}
                torch.set_num_threads(self.case.threads)
                set_math_mode(self.job.method.math_mode, self.case.device)
                _ = self._problem().first
            case "inputs":
                inputs = self._inputs(int(head["number"]))
                parts = [part for part in _OPTIONAL if getattr(inputs, part) is not None]
                tensors = [inputs.x, *(getattr(inputs, part) for part in parts)]
                return {"parts": parts, "remark": inputs.remark, "rounding": inputs.rounding}, tensors
            case "errors":
                given = dict(zip(head["given"], tensors, strict=True))
                errors = self._problem().errors(self._inputs(int(head["number"])), given)
                return {"errors": [_figures(errors[what]) for what in given]}, []
            case "sampled":
                judged = self._problem().sampled(_samples(head["kernels"], head["parts"], tensors))
                return {"errors": [None if error is None else _figures(error) for error in judged]}, []
            case "clock started":
                self.started = time.monotonic()
            case "clock stopped":
                return {"remark": clocks_apart(float(head["seconds"]), time.monotonic() - self.started)}, []
        return {}, []

    def _problem(self) -> Problem:
        assert self.case is not None
        if self.problem is None:
            require_memory(2 * weight_bytes(self.case), "the block's weights, in the worker and in its referee,")
            self.problem = Problem.of(self.case, seed_of(self.case, self.job))
        return self.problem

    def _inputs(self, number: int) -> Inputs:
        if number == 1:
            return self._problem().first
        if number not in self.known:
            self.known[number] = self._problem().inputs(number)
        return self.known[number]


def clocks_apart(worker: float, referee: float) -> str:
    """What is wrong where the worker's clock says that so many seconds have passed, and the referee's other ones."""
    apart = abs(worker - referee)
    if apart <= _CLOCKS_LEAST or worker <= 0 or abs(log(worker / referee)) <= _CLOCKS_APART:
        return "" if worker > 0 or apart <= _CLOCKS_LEAST else f"no time passed in {referee:.2g} s"
    return f"{worker:.3g} s passed by the worker's clock, {referee:.3g} s by the referee's"


def _figures(error: Error) -> list[float]:
    return [error.largest, error.rel, error.subnormal]


def _samples(kernels: Sequence[str], parts: Sequence[Sequence[str]], tensors: Sequence[Tensor]) -> list[CallSample]:
    at, samples = iter(tensors), []
    for kernel, names in zip(kernels, parts, strict=True):
        samples.append(CallSample(kernel, **{name: next(at) for name in names if name in _PARTS}))
    return samples


# --- the line ---------------------------------------------------------------------------------------------------------


def _send(connection: Connection, head: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """A message: what is in `head` as JSON, then every tensor's bytes."""
    plain = [tensor.detach().cpu().contiguous() for tensor in tensors]
    kinds = [[str(tensor.dtype), list(tensor.shape)] for tensor in plain]
    connection.send_bytes(json.dumps({**head, "tensors": kinds}).encode())
    for tensor in plain:
        if tensor.numel():
            connection.send_bytes(_bytes(tensor))


def _receive(connection: Connection) -> tuple[dict[str, Any], list[Tensor]]:
    """The next message."""
    head = json.loads(connection.recv_bytes())
    tensors = []
    for kind, shape in head["tensors"]:
        tensor = torch.empty(shape, dtype=_DTYPES[kind])
        if tensor.numel():
            _bytes(tensor)[:] = connection.recv_bytes()
        tensors.append(tensor)
    return head, tensors


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
