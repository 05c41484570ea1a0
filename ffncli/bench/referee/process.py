"""The referee as a process of its own: it has weights, references and limits, and never loads a user's file.

The worker forks it when torch is loaded and nothing has been computed yet, so it costs no second import; then it waits
for questions, without using a processor. Nothing that the worker sends is unpickled, and no answer holds a reference.
What it finds about each kernel it tells the worker's parent itself, over a line that the worker closes before it loads
a user's file: what the worker says about its kernels is believed only where both agree (judge/summary.py).
It ends with the worker. Where forking is not safe (anything but Linux) there is none, and the worker judges by itself.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from math import log
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from torch import Tensor

from ffncli.bench.machine.math_mode import set_math_mode
from ffncli.bench.records import Case, Job
from ffncli.bench.referee.errors import CallSample
from ffncli.bench.referee.messages import about, packed, receive, samples_of, send, unpacked
from ffncli.bench.referee.problem import Inputs, Problem, seed_of, weight_bytes
from ffncli.bench.referee.rulings import Rulings
from ffncli.bench.verdict import Error, Ruling, WrongCode
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError
from ffncli.run.engine.weights import require_memory
from ffncli.system.child import ending, require_original

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CLOCKS_APART, _CLOCKS_LEAST = 0.05, 0.1  # as a share, and in seconds: less is waiting for a processor
_OPTIONAL = ("rows", "g")  # of Inputs
_LINE_BYTES = 1 << 20  # of samples that wait; the system may allow fewer


class RefereeGone(FFNError):
    """The referee's process ended; the message says how."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=ExitCode.ENVIRONMENT)


# --- the worker's side ------------------------------------------------------------------------------------------------


class RefereeProcess:
    """Asks the referee. Raises RefereeGone if that has ended, and what the referee raised."""

    def __init__(self, connection: Connection, samples: socket.socket, pid: int) -> None:
        self._connection, self._samples, self._pid = connection, samples, pid
        self._asking = os.getpid()
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

    def declare(self, kernel: str, computes: str) -> None:
        """What a kernel computes in. Raises FFNError for an unknown format."""
        self._ask({"ask": "declare", "kernel": kernel, "computes": computes})

    def limit(self, kernel: str) -> float:
        """The largest error that kernel may have."""
        return float(self._ask({"ask": "limit", "kernel": kernel})[0]["limit"])

    def ruling(self, kernel: str, number: int, given: Mapping[str, Tensor]) -> Ruling:
        """Of a kernel's whole answer to the inputs of that number."""
        question = {"ask": "ruling", "kernel": kernel, "number": number, "given": list(given)}
        return _read_ruling(self._ask(question, list(given.values()))[0]["ruling"])

    def show(self, sample: CallSample) -> None:
        """A sample of a timed call. It waits in the line: the referee sleeps on until it is asked, or the line full."""
        try:
            self._samples.send(packed(sample))
        except BlockingIOError:
            self._ask({"ask": "read samples"})
            self._samples.send(packed(sample))
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise self._ended() from None
            question, tensors = about("show", [sample])
            self._ask({**question, "block": sample.block}, tensors)

    def timed(self) -> dict[str, Ruling]:
        """Of each kernel's samples since the last time, together."""
        rulings = self._ask({"ask": "timed"})[0]["rulings"]
        return {kernel: _read_ruling(ruling) for kernel, ruling in rulings.items()}

    def sampled(self, samples: Sequence[CallSample]) -> list[Error | None]:
        """How far each sample is off, in their order; None for one that was not judged."""
        head, _ = self._ask(*about("sampled", samples))
        return [None if error is None else Error(*error) for error in head["errors"]]

    def accuse(self, kernel: str, note: str) -> None:
        """Keep what the worker found."""
        self._ask({"ask": "accuse", "kernel": kernel, "note": note})

    def report(self) -> None:
        """Have it tell the worker's parent what it found in this case."""
        self._ask({"ask": "report"})

    def clock_started(self) -> None:
        """The referee's clock and the worker's are compared from now on."""
        self._ask({"ask": "clock started"})

    def clock_stopped(self, seconds: float) -> str:
        """What is wrong with the worker's clock, by which `seconds` have passed since; empty where nothing is."""
        return str(self._ask({"ask": "clock stopped", "seconds": seconds})[0]["remark"])

    def close(self) -> None:
        """End it, also where a process that a kernel has forked keeps the line open."""
        self._connection.close()
        self._samples.close()
        if not self.gone:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self.gone = True

    def _tell(self, head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        require_original(self._asking)
        try:
            send(self._connection, head, tensors)
        except OSError:
            raise self._ended() from None

    def _ask(self, head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> tuple[dict[str, Any], list[Tensor]]:
        self._tell(head, tensors)
        try:
            answer, given = receive(self._connection)
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
        return RefereeGone(f"the referee's process {ending(status)}")


@contextmanager
def referee_process(job: Job, others: Connection, reports: Connection | None = None) -> Iterator[RefereeProcess | None]:
    """The referee of a job; None where it has no business (on a GPU, step by step) or cannot be forked.

    To be called before any computation, and before a user's file is loaded. The child closes `others`, the line to the
    worker's parent, and the worker `reports`, the referee's line to that parent.
    """
    if not any(job.method.refereed_apart(case) for case in job.cases):
        if reports:
            reports.close()
        yield None
        return
    ours, theirs = socket.socketpair()
    shown, seen = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shown.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LINE_BYTES)
    for line in (shown, seen):
        line.setblocking(False)
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        others.close()
        ours.close()
        shown.close()
        _live(_Answers(job, reports, seen), Connection(theirs.detach()), worker)
    theirs.close()
    seen.close()
    if reports:
        reports.close()
    process = RefereeProcess(Connection(ours.detach()), shown, pid)
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


def _live(answers: _Answers, connection: Connection, worker: int) -> NoReturn:
    """All of the forked process: it answers until the worker closes the line, or dies."""
    code = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # its memory is not the worker's to read
        if os.getppid() == worker:
            _serve(answers, connection)
        code = 0
    finally:
        os._exit(code)


def _serve(answers: _Answers, connection: Connection) -> None:
    while True:
        try:
            head, tensors = receive(connection)
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
            send(connection, answer, given)
        except OSError:
            return


@dataclass
class _Answers:
    """The state of the referee: the case that is at hand."""

    job: Job
    reports: Connection | None = None  # to the parent of the worker
    samples: socket.socket | None = None  # from the worker, in the order of time
    case: Case | None = None
    begun: Rulings | None = None
    started: float = 0.0

    def to(self, head: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer to a question, and its tensors."""
        match head["ask"]:
            case "begin":
                self._read_samples()  # of the case before; nobody asks for them any more
                self.case = next(case for case in self.job.cases if case.of_rank.key == head["key"])
                self.begun = None
                torch.set_num_threads(self.case.threads)
                set_math_mode(self.job.method.math_mode, self.case.device)
                self._rulings().inputs(1)
            case "inputs":
                inputs = self._rulings().inputs(int(head["number"]))
                parts = [part for part in _OPTIONAL if getattr(inputs, part) is not None]
                tensors = [inputs.x, *(getattr(inputs, part) for part in parts)]
                return {"parts": parts, "remark": inputs.remark, "rounding": inputs.rounding}, tensors
            case "declare":
                self._rulings().declare(str(head["kernel"]), str(head["computes"]))
            case "limit":
                return {"limit": self._rulings().limit(str(head["kernel"]))}, []
            case "ruling":
                given = dict(zip(head["given"], tensors, strict=True))
                return {"ruling": _figures(self._rulings().ruling(str(head["kernel"]), int(head["number"]), given))}, []
            case "show":
                self._read_samples()
                for sample in samples_of(head["kernels"], head["parts"], tensors):
                    self._rulings().show(replace(sample, block=int(head["block"])))
            case "read samples":
                self._read_samples()
            case "timed":
                self._read_samples()
                rulings = self._rulings().timed()
                return {"rulings": {kernel: _figures(ruling) for kernel, ruling in rulings.items()}}, []
            case "sampled":
                errors = self._rulings().sampled(samples_of(head["kernels"], head["parts"], tensors))
                return {"errors": [None if e is None else [e.largest, e.rel, e.subnormal] for e in errors]}, []
            case "accuse":
                self._rulings().accuse(str(head["kernel"]), str(head["note"]))
            case "clock started":
                self.started = time.monotonic()
            case "clock stopped":
                return {"remark": self._clock_stopped(float(head["seconds"]))}, []
            case "report" if self.reports:
                with suppress(OSError):  # the parent is gone, or hangs up
                    report = asdict(self._rulings().report()) | {"case": self.case.key if self.case else ""}
                    self.reports.send_bytes(json.dumps(report).encode())
        return {}, []

    def _rulings(self) -> Rulings:
        assert self.case is not None
        if self.begun is None:
            require_memory(2 * weight_bytes(self.case), "the block's weights, in the worker and in its referee,")
            case = self.case.of_rank
            problem = Problem.of(case, seed_of(case, self.job))
            users = [choice.label for choice in self.job.kernels if choice.file is not None]
            self.begun = Rulings(problem, self.job.wanted_baseline, self.job.method.math_mode, users)
        return self.begun

    def _read_samples(self) -> None:
        """Everything that waits in their line."""
        with suppress(BlockingIOError, EOFError):
            while self.samples and (message := self.samples.recv(_LINE_BYTES)):
                if self.case is not None:
                    self._rulings().show(unpacked(message))

    def _clock_stopped(self, seconds: float) -> str:
        """Where the clocks differ, no time of a user's kernel can be believed."""
        remark = clocks_apart(seconds, time.monotonic() - self.started)
        for choice in self.job.kernels if remark else ():
            if choice.file is not None:
                self._rulings().accuse(choice.label, Ruling(remark, WrongCode.PATCHED_CLOCK).note)
        return remark


def clocks_apart(worker: float, referee: float) -> str:
    """What is wrong where the worker's clock says that so many seconds have passed, and the referee's other ones."""
    apart = abs(worker - referee)
    if apart <= _CLOCKS_LEAST or worker <= 0 or abs(log(worker / referee)) <= _CLOCKS_APART:
        return "" if worker > 0 or apart <= _CLOCKS_LEAST else f"no time passed in {referee:.2g} s"
    return f"{worker:.3g} s passed by the worker's clock, {referee:.3g} s by the referee's"


def _figures(ruling: Ruling) -> list[Any]:
    """A ruling as JSON has it."""
    error = ruling.error
    return [[error.largest, error.rel, error.subnormal], ruling.wrong, ruling.code]


def _read_ruling(figures: Sequence[Any]) -> Ruling:
    error, wrong, code = figures
    return Ruling(wrong, None if code is None else WrongCode(code), Error(*error))
