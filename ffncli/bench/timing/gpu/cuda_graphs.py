"""CUDA graphs: many calls of a kernel captured once and replayed as one, so that a small case times the GPU, not the
host.

A GPU begins a graph later than it begins a kernel, so a graph of one call would add that to every call. One graph holds
the calls of a whole block, on the copies of the weights in turn, with x and the outputs at their places during capture.
All arms of a case run the same way: a ratio of a replayed arm to a launched one would compare ways of launching. So one
arm that cannot be captured (its routing reads data, it waits for the GPU) means plain calls for all, and a note with
the reason; `--launch graphs` leaves that arm out instead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from ffncli.bench.records import Launch, Launched, not_captured
from ffncli.bench.timing.clock import Call
from ffncli.bench.timing.outcomes import BrokenArm, Skipped

Cuda: TypeAlias = Any
Copy = TypeVar("Copy")
MOST_CALLS = 1024  # in one graph: a call takes a microsecond at least, a block lasts one millisecond
_JUDGED = 2  # calls with other contents, at least, in the graph that is judged
_WARM_UP = 3  # calls: libraries choose their algorithms and workspaces outside of the capture
# Below this a case may be bound by launches. The rates are above any GPU's, so that the decision depends on the case
# alone and all processes and machines agree on it. A larger case loses nothing by a graph.
_SMALL = 100e-6  # s
_FLOPS_PER_S, _BYTES_PER_S = 1e15, 4e12
_side: dict[int, Any] = {}  # one stream for all captures on a GPU: cuBLAS keeps a workspace for every stream


class NotCaptured(Exception):
    """Why a call cannot be a graph, in words for a note."""


class SpoiledCapture(NotCaptured):
    """The capture itself failed. torch's allocator may believe that it goes on: this process must not measure more.
    `arm` names the call, if known."""

    def __init__(self, why: str, arm: str = "") -> None:
        super().__init__(why)
        self.arm = arm


class Capturable(Protocol):
    """An arm: its call on one copy of its weights, and a way to make it replay graphs of such calls instead."""

    copies: Any

    def on_copy(self, copy: Any, /) -> object:
        """The call on one copy."""

    def replay(self, replays: Sequence[Call], /) -> None:
        """Make calls use these in turn from now on."""


def by_graphs(flops: int, moved_bytes: int) -> bool:
    """Whether a case with this much work is small enough to be bound by launches: then graphs are the default."""
    return flops / _FLOPS_PER_S + moved_bytes / _BYTES_PER_S < _SMALL


def calls_of_graph(inner: int) -> int:
    """How many of a block's `inner` calls one graph holds: all of them, or an equal part."""
    calls = inner
    while calls > MOST_CALLS and calls % 2 == 0:
        calls //= 2
    return calls


def repeated(copies: Sequence[Copy], count: int) -> list[Copy]:
    """`count` copies, the order in which a cycle of calls uses them.

    When the cycle begins again, as anywhere in it, about half of the others come between two uses of a copy, so that
    it is no longer in a cache.
    """
    rounds, rest = divmod(count, len(copies))
    start = 0 if rest > len(copies) // 2 else len(copies) // 2
    return [*copies] * rounds + [*copies[start : start + rest]]


def captured(
    call: Callable[[Copy], object],
    copies: Sequence[Copy],
    calls: int = 1,
    cuda: Cuda = torch.cuda,
    judged: Callable[[Copy], object] | None = None,
) -> list[Call]:
    """Replays of graphs of that many `calls` each, as few as go through all copies; each returns its last output.

    The outputs of calls are freed as in use: the next one overwrites them. The graphs are replayed one after another,
    never together, so they share one pool of memory. Each has been replayed once, for a first replay uploads its graph.
    A few `judged` calls are captured in a graph of their own, before or after the others, which a kernel cannot know,
    and replayed once. Raises NotCaptured with the reason; exceptions of the plain call pass through.
    """
    graphs = -(-len(copies) // calls)
    order = repeated(copies, graphs * calls)
    device = cuda.current_device()
    if device not in _side:
        _side[device] = cuda.Stream()
    side = _side[device]
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        _warm_up(call, copies[0], cuda)
        pool, (first, more) = cuda.graph_pool_handle(), os.urandom(2)
        # Not the others' pool: one of them, captured before it and replayed after it, would write over its answers.
        judged_pool = cuda.graph_pool_handle()
        few = repeated(copies, _JUDGED + more % 3)
        once = [_graph(judged, few, judged_pool, cuda)] if judged and first % 2 else []
        replays = [_graph(call, order[at : at + calls], pool, cuda) for at in range(0, len(order), calls)]
        once = once or ([_graph(judged, few, judged_pool, cuda)] if judged else [])
        for replay in (*once, *replays):
            replay()
    cuda.current_stream().wait_stream(side)
    cuda.synchronize()
    return replays


class Launching:
    """How the arms of a case are called, the same way in all its placements: `launch`, and `plain_because` if they
    could not be captured.

    `asked` is --launch: with `auto`, a `small` case is replayed if all arms can be captured, which the first placement
    shows. `earlier` is why another process of the run could not capture them, which decides it.
    """

    def __init__(self, asked: Launch, small: bool, earlier: str = "", cuda: Cuda = torch.cuda) -> None:
        self.launch: Launched = "graphs" if asked == "graphs" or (asked == "auto" and small) else "plain"
        self.plain_because = ""
        self._asked, self._captured_before, self._cuda = asked, False, cuda
        if earlier and asked == "auto":
            self.launch, self.plain_because = "plain", earlier

    @property
    def note(self) -> str:
        """Why they are not replayed from CUDA graphs, where that was to be; else empty."""
        return f"no CUDA graphs, as {self.plain_because}" if self.plain_because else ""

    def capture(
        self,
        arms: Mapping[str, Capturable],
        inner: Mapping[str, int],
        judged: Mapping[str, Callable[[Any], object]] | None = None,
    ) -> dict[str, int]:
        """Make the arms of a new placement replay; the calls of a replay by arm, nothing if they are called plainly.

        `inner` are the calls of a block, `judged` those of `captured` by arm, where it has any. Raises BrokenArm for an
        arm that cannot be captured, while the others are replayed, and SpoiledCapture.
        """
        if self.launch == "plain":
            return {}
        calls = {name: calls_of_graph(inner[name]) for name in arms}
        replays = {}
        for name, arm in arms.items():
            try:
                replays[name] = captured(arm.on_copy, arm.copies, calls[name], self._cuda, (judged or {}).get(name))
            except SpoiledCapture as reason:
                raise SpoiledCapture(str(reason), name) from reason
            except NotCaptured as reason:
                if self._asked == "graphs":
                    raise BrokenArm(name) from Skipped(not_captured(str(reason)))
                if self._captured_before:  # a measurement by graphs cannot go on with plain calls
                    raise BrokenArm(name) from reason
                self.launch, self.plain_because = "plain", f"{name} {not_captured(str(reason))}"
                return {}
        self._captured_before = True
        for name, arm in arms.items():
            arm.replay(replays[name])
        return calls


def replaying(replays: Sequence[Call]) -> Call:
    """One call that makes these in turn."""
    turn = cycle(replays)
    return lambda: next(turn)()


def _warm_up(call: Callable[[Copy], object], copy: Copy, cuda: Cuda) -> None:
    """A few calls, the last checked for waiting before any capture, since torch may not recover from a spoiled one."""
    for _ in range(_WARM_UP):
        call(copy)
    cuda.synchronize()
    before = cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype; a wait that it misses spoils the capture
        cuda.set_sync_debug_mode("error")
        try:
            call(copy)
        except Exception as error:  # a user's kernel may raise anything
            raise NotCaptured(_line(error)) from error
        finally:
            cuda.set_sync_debug_mode(before)
            cuda.synchronize()


def _graph(call: Callable[[Copy], object], copies: Sequence[Copy], pool: Any, cuda: Cuda) -> Call:
    """The replay of a graph of calls on these copies."""
    graph = cuda.CUDAGraph()
    reason: Exception | None = None
    out: object = None
    try:
        graph.capture_begin(pool=pool)
        try:
            for copy in copies:
                out = None  # freed, as in use
                out = call(copy)
        except Exception as error:  # a user's kernel may raise anything
            reason = error
        graph.capture_end()
    except Exception as error:  # usually the call has already raised the error that spoiled the capture
        raise SpoiledCapture(_line(reason or error)) from (reason or error)
    if reason is not None:
        raise NotCaptured(_line(reason)) from reason

    def replay() -> object:
        graph.replay()
        return out

    return replay


def _line(error: BaseException) -> str:
    """The first line of torch's message; the rest is advice for debugging."""
    while error.__cause__ is not None:  # the wrapping error is less specific
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
