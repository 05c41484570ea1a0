"""The referee as a separate process: it has weights, references and limits, and never loads a user's file.

The worker forks it after torch is loaded and before anything is computed, which saves a second import. The referee then
waits for questions without using a processor. Nothing that the worker sends is unpickled, and no answer contains a
reference. The referee reports its findings about each kernel to the worker's parent itself, over a connection that the
worker closes before it loads a user's file; what the worker says about its kernels counts only if both agree
(judge/summary.py). The referee ends with the worker. If forking is not safe (on any system but Linux), there is no such
process, and the worker judges by itself.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import log
from multiprocessing.connection import Connection
from typing import Any, NoReturn, get_type_hints

import torch

from ffncli.bench.machine.machine import set_math_mode
from ffncli.bench.records import Case, Job
from ffncli.bench.referee.problem import QUESTIONS, CallSample, Inputs, Problem, Referee, seed_of, weight_bytes
from ffncli.bench.referee.rulings import Rulings
from ffncli.bench.referee.wire import packed, receive, require_fitting, send, unpacked
from ffncli.bench.verdict import Ruling, WrongCode
from ffncli.errors import ExitCode, FFNError
from ffncli.run.engine.weights import require_memory
from ffncli.system.child import ending, give_up_reading_memory, require_original

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CLOCKS_APART, _CLOCKS_LEAST = 0.05, 0.1  # minimum difference, as a fraction and in s
_LINE_BYTES = 1 << 20  # bytes of waiting samples; the system may allow fewer


class RefereeGone(FFNError):
    """The referee's process ended; the message says how."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=ExitCode.ENVIRONMENT)


# --- the worker's side ------------------------------------------------------------------------------------------------


class RefereeProcess(Referee):
    """Passes questions to the referee's process. Raises RefereeGone if that process has ended, and re-raises the
    referee's errors."""

    def __init__(self, connection: Connection, samples: socket.socket, pid: int) -> None:
        self._connection, self._samples, self._pid = connection, samples, pid
        self._asking = os.getpid()
        self.gone = False

    def begin(self, case: Case) -> None:
        """Begin a case: the referee draws its weights while the worker draws its own."""
        self._tell("begin", case.key)

    def show(self, sample: CallSample) -> None:
        """Send a sample of a timed call. It waits in the connection, so that the referee sleeps until it is asked a
        question or the connection is full."""
        try:
            self._samples.send(packed(sample))
        except BlockingIOError:
            self._ask("read_samples")
            self._samples.send(packed(sample))
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise self._ended() from None
            super().show(sample)

    def report(self) -> None:
        """Make the referee report its findings on this case to the worker's parent."""
        self._ask("report")

    def close(self) -> None:
        """End the process, even if a process forked by a kernel keeps the connection open."""
        self._connection.close()
        self._samples.close()
        if not self.gone:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self.gone = True

    def _tell(self, question: str, *arguments: Any) -> None:
        require_original(self._asking)
        try:
            send(self._connection, [question, *arguments])
        except OSError:
            raise self._ended() from None

    def _ask(self, question: str, *arguments: Any) -> Any:
        self._tell(question, *arguments)
        try:
            answer, raised = receive(self._connection)
        except (EOFError, OSError):
            raise self._ended() from None
        match raised:
            case ["FFNError", str(text), str(hint), int(code)]:
                raise FFNError(text, hint, ExitCode(code))
            case [str(kind), str(text)]:
                raise MemoryError(text) if kind == "MemoryError" else RuntimeError(text)
        return answer

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
    """Yield the referee of a job, or None if it is not used (on a GPU, with --by-step) or cannot be forked.

    Call it before any computation, and before a user's file is loaded. The child closes `others`, the connection to the
    worker's parent; the worker closes `reports`, the referee's own connection to that parent.
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
    give_up_reading_memory()
    if reports:
        reports.close()
    process = RefereeProcess(Connection(ours.detach()), shown, pid)
    try:
        yield process
    finally:
        process.close()


# --- the referee's side -----------------------------------------------------------------------------------------------


def _live(answers: "_Answers", connection: Connection, worker: int) -> NoReturn:
    """Run the forked process: answer questions until the worker closes the connection, or dies."""
    code = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # so that the worker cannot read its memory
        if os.getppid() == worker:
            _serve(answers, connection)
        code = 0
    finally:
        os._exit(code)


def _serve(answers: "_Answers", connection: Connection) -> None:
    while True:
        try:
            question, *arguments = receive(connection)
        except (EOFError, OSError):
            return
        answer, raised = None, None
        try:
            answer = answers.to(question, arguments)
        except FFNError as error:
            raised = ["FFNError", error.message, error.hint, int(error.code)]
        except Exception as error:
            kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
            raised = [kind, str(error) or kind]
        if question == "begin":
            continue  # nobody waits for an answer; the first question raises the error again
        try:
            send(connection, [answer, raised])
        except OSError:
            return


@dataclass
class _Answers:
    """The state of the referee: the current case."""

    job: Job
    reports: Connection | None = None  # to the worker's parent
    samples: socket.socket | None = None  # from the worker, in chronological order
    case: Case | None = None
    rulings: "_ClockedRulings | None" = None

    def to(self, question: str, arguments: list[Any]) -> Any:
        """Answer a question, which is the name of a method of Referee or of one of three tasks of this process."""
        match question, arguments:
            case "begin", [str(key)]:
                return self._begin(key)
            case "read_samples", []:
                return self._read_samples()
            case "report", []:
                return self._report()
        if question not in QUESTIONS:
            raise ValueError("no such question")
        *hints, _ = get_type_hints(getattr(Referee, question)).values()
        require_fitting(arguments, hints)
        self._read_samples()
        answer = getattr(self._rulings(), question)(*arguments)
        return replace(answer, out=None, grads=None) if isinstance(answer, Inputs) else answer  # without references

    def _begin(self, key: str) -> None:
        self._read_samples()  # drop samples of the previous case
        self.case = next(case for case in self.job.cases if case.of_rank.key == key)
        self.rulings = None
        torch.set_num_threads(self.case.threads)
        set_math_mode(self.job.method.math_mode, self.case.device)
        self._rulings().inputs(1)

    def _report(self) -> None:
        if self.reports is None:
            return
        with suppress(OSError):  # the parent has ended or closes the connection
            report = asdict(self._rulings().report()) | {"case": self.case.key if self.case else ""}
            self.reports.send_bytes(json.dumps(report).encode())

    def _rulings(self) -> "_ClockedRulings":
        assert self.case is not None
        if self.rulings is None:
            require_memory(2 * weight_bytes(self.case), "the block's weights, in the worker and in its referee,")
            case = self.case.of_rank
            problem = Problem.of(case, seed_of(case, self.job))
            users = [choice.label for choice in self.job.kernels if choice.file is not None]
            self.rulings = _ClockedRulings(problem, self.job.wanted_baseline, self.job.method.math_mode, users)
        return self.rulings

    def _read_samples(self) -> None:
        """Read all samples that are waiting in the connection."""
        with suppress(BlockingIOError, EOFError):
            while self.samples and (message := self.samples.recv(_LINE_BYTES)):
                sample = unpacked(message)
                if self.case is not None and isinstance(sample, CallSample):
                    self._rulings().show(sample)


class _ClockedRulings(Rulings):
    """Rulings in a process whose clock no other process can change."""

    _started = _stopped = 0.0

    def clock_started(self) -> None:
        """Start to compare the clocks."""
        self._started = time.monotonic()

    def clock_stopped(self) -> None:
        """Read the clock for a comparison; the last reading counts."""
        self._stopped = time.monotonic()

    def clock_remark(self, seconds: float) -> str:
        """Compare the clocks: if they differ, the times of users' kernels cannot be trusted."""
        remark = clocks_apart(seconds, self._stopped - self._started)
        for kernel in self.users if remark else ():
            self.accuse(kernel, Ruling(remark, WrongCode.PATCHED_CLOCK).note)
        return remark


def clocks_apart(worker: float, referee: float) -> str:
    """Return how far apart the worker's and the referee's clocks are, in words; empty if they agree."""
    apart = abs(worker - referee)
    if apart <= _CLOCKS_LEAST or worker <= 0 or abs(log(worker / referee)) <= _CLOCKS_APART:
        return "" if worker > 0 or apart <= _CLOCKS_LEAST else f"no time passed in {referee:.2g} s"
    return f"{worker:.3g} s passed by the worker's clock, {referee:.3g} s by the referee's"
