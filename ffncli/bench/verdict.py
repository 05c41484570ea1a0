"""Ruling: the verdict on a kernel's answer, in figures and words. The ruling's note and errors become part of an
Outcome, the result of one kernel in one case."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ffncli.bench.records import Outcome
from ffncli.show.text import finite

_LONGEST = 200  # maximum characters of `wrong` in a note


@dataclass(frozen=True)
class Error:
    """`largest` = max|a-b| / max|b|, `rel` = ‖a-b‖ / ‖b‖, of the worst tensor; `subnormal` counts subnormal outputs."""

    largest: float = 0.0
    rel: float = 0.0
    subnormal: int = 0

    @property
    def remark(self) -> str:
        """The remark for a note, such as `3 subnormal outputs`; empty if there are none."""
        return f"{self.subnormal} subnormal outputs" if self.subnormal else ""

    def worst(self, other: "Error") -> "Error":
        """Return the larger value of each field."""
        most = max(self.subnormal, other.subnormal)
        return Error(max(self.largest, other.largest), max(self.rel, other.rel), most)


_NO_ERROR = Error()


class WrongCode(StrEnum):
    """What a wrong kernel did, as a code."""

    REPLAY_BY_ID = "replay-by-id"
    REPLAY_BY_ADDRESS = "replay-by-address"
    REPLAY_BY_VERSION = "replay-by-version"
    REPLAY_BY_CONTENT = "replay-by-content"
    REPLAY_BY_PHASE = "replay-by-phase"
    DEFERRED_WORK = "deferred-work"
    BATCHED_CALLS = "batched-calls"
    OTHER_STREAM = "works-on-another-stream"
    LAZY_RESULT = "lazy-result"
    STALE_MEMORY = "stale-memory"
    STALE_WEIGHTS = "stale-weights"
    LOWER_PRECISION = "lower-precision"
    CHANGED_INPUT = "changed-input"
    CHANGED_WEIGHTS = "changed-weights"
    PATCHED_CLOCK = "patched-clock"
    PATCHED_TORCH = "patched-torch"
    PATCHED_LIBRARY = "patched-library"
    PATCHED_FFN = "patched-ffn"
    THREADS_CHANGED = "threads-changed"
    ENVIRONMENT_CHANGED = "environment-changed"
    WRONG_WHEN_TIMED = "wrong-when-timed"


@dataclass(frozen=True)
class Ruling:
    """A verdict: `wrong` says in words what is wrong, and is empty for a right answer. `code` stands for what the
    kernel did, if known; `error` is the size of the errors."""

    wrong: str = ""
    code: WrongCode | None = None
    error: Error = _NO_ERROR

    @property
    def note(self) -> str:
        """The code and, after it, what is wrong, in one line; empty for a right answer."""
        line = " ".join(self.wrong.split())
        line = line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
        return f"{self.code}: {line}" if self.code and line else line

    def at(self, when: str, code: WrongCode | None = None) -> "Ruling":
        """Return this ruling; if it finds an answer wrong, add `when` as a prefix, and `code` if it has none."""
        return replace(self, wrong=when + self.wrong, code=self.code or code) if self.wrong else self

    def then(self, later: "Ruling") -> "Ruling":
        """Return the first of the two rulings that finds an answer wrong, with the larger errors of both."""
        return replace(self if self.wrong else later, error=self.error.worst(later.error))


def ruled(outcome: Outcome, ruling: Ruling) -> Outcome:
    """Apply a ruling to an outcome: the larger errors count, and the first note on a wrong answer is kept."""
    error = ruling.error
    if error.largest or error.rel:
        largest, rel = max(outcome.error_max or 0.0, error.largest), max(outcome.error_rel or 0.0, error.rel)
        outcome = replace(outcome, error_max=finite(largest), error_rel=finite(rel))
    if not ruling.wrong or outcome.status == "wrong":
        return outcome
    return replace(outcome, status="wrong", note=ruling.note)


class WrongResult(Exception):
    """Raised if a kernel breaks its contract or its values are wrong; `ruling` says how."""

    def __init__(self, ruling: Ruling) -> None:
        super().__init__(ruling.wrong)
        self.ruling = ruling


MEANING: Mapping[WrongCode, str] = {
    WrongCode.REPLAY_BY_ID: "repeats an answer if it gets the same tensor object",
    WrongCode.REPLAY_BY_ADDRESS: "repeats an answer if the input has the same address",
    WrongCode.REPLAY_BY_VERSION: "repeats an answer if torch counts no write to the input",
    WrongCode.REPLAY_BY_CONTENT: "caches answers, or parts of them, and finds them by the input's values",
    WrongCode.REPLAY_BY_PHASE: "repeats an answer once it has been called often, or in quick succession",
    WrongCode.DEFERRED_WORK: "returns before its work is done, or computes between calls",
    WrongCode.BATCHED_CALLS: "does the work of several calls in a single call",
    WrongCode.OTHER_STREAM: "is still working on another GPU stream when the timed stream has finished",
    WrongCode.LAZY_RESULT: "returns an object that computes when it is read",
    WrongCode.STALE_MEMORY: "returns memory that it has not written to",
    WrongCode.STALE_WEIGHTS: "computes with other weights than it is given",
    WrongCode.LOWER_PRECISION: "computes in fewer bits than the case's dtype",
    WrongCode.CHANGED_INPUT: "writes to its input",
    WrongCode.CHANGED_WEIGHTS: "writes to its weights",
    WrongCode.PATCHED_CLOCK: "replaced a clock, or a function that waits for the GPU",
    WrongCode.PATCHED_TORCH: "replaced a part of torch, which the other kernels also use",
    WrongCode.PATCHED_LIBRARY: "replaced a function of Python or numpy",
    WrongCode.PATCHED_FFN: "replaced a part of ffn",
    WrongCode.THREADS_CHANGED: "changed the number of threads, or used more cores than the case has threads",
    WrongCode.ENVIRONMENT_CHANGED: "changed a setting of the process that the other kernels share",
    WrongCode.WRONG_WHEN_TIMED: "is right when it is checked and wrong when it is timed",
}
