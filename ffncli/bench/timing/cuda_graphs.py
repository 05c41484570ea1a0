"""CUDA graphs: a kernel's launches recorded once and replayed as one, so that a small case times the GPU, not the host.

One graph for each copy of the weights, with x and the outputs at their places during capture. All arms of a case run
the same way: a ratio of a replayed arm to a launched one would compare ways of launching. So one arm that cannot be
captured (its routing reads data, it waits for the GPU) means plain calls for all, and a note with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from ffncli.bench.timing.clock import Call
from ffncli.bench.timing.outcomes import BrokenArm

Cuda: TypeAlias = Any
Copy = TypeVar("Copy")

MOST_COPIES = 256  # graphs of one arm; each takes host time to capture, and memory
REPLAYED = "CUDA graphs: every arm's launches were recorded and replayed"
_WARM_UP = 3  # calls: libraries choose their algorithms and workspaces outside of the capture
# Below this a case may be bound by launches. The rates are above any GPU's, so that the decision depends on the case
# alone and all processes and machines agree on it. A larger case loses nothing by a graph.
_SMALL = 100e-6  # s
_FLOPS_PER_S, _BYTES_PER_S = 1e15, 4e12

_side: dict[int, Any] = {}  # one stream for all captures on a GPU: cuBLAS keeps a workspace for every stream


class NotCaptured(Exception):
    """Why a call cannot be a graph, in words for a note; `arm` names it, if known."""

    def __init__(self, why: str, arm: str = "") -> None:
        super().__init__(why)
        self.arm = arm


class Replayable(Protocol):
    """An arm: its call on one copy of its weights, and a way to make it replay graphs of that instead."""

    copies: Any

    def on_copy(self, copy: Any, /) -> object:
        """The call on one copy."""

    def replay(self, calls: Sequence[Call], /) -> None:
        """Make calls use these in turn from now on."""


def by_graphs(flops: int, moved_bytes: int) -> bool:
    """Whether a case with this much work is small enough to be bound by launches: then graphs are the default."""
    return flops / _FLOPS_PER_S + moved_bytes / _BYTES_PER_S < _SMALL


def captured(call: Callable[[Copy], object], copies: Sequence[Copy], cuda: Cuda = torch.cuda) -> list[Call]:
    """`call(copy)` as a replay of its own graph, for each copy; its output is overwritten by its next replay.

    The copies are replayed one after another, never together, so their graphs share one pool of memory. Raises
    NotCaptured with the reason; exceptions of the plain call pass through.
    """
    if len(copies) > MOST_COPIES:
        raise NotCaptured(f"{len(copies)} copies of its weights would need as many graphs; the limit is {MOST_COPIES}")
    side = _side_stream(cuda)
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        _warm_up(call, copies[0], cuda)
        pool = cuda.graph_pool_handle()
        calls = [_captured_call(call, copy, pool, cuda) for copy in copies]
    cuda.current_stream().wait_stream(side)
    cuda.synchronize()
    return calls


def replays(arms: Mapping[str, Replayable], cuda: Cuda = torch.cuda) -> dict[str, list[Call]]:
    """Every arm's graphs, by its name. Raises NotCaptured for the first arm that cannot be captured."""
    made = {}
    for name, arm in arms.items():
        try:
            made[name] = captured(arm.on_copy, arm.copies, cuda)
        except NotCaptured as reason:
            raise NotCaptured(f"{name} cannot be captured: {reason}", name) from reason
    return made


class Launching:
    """How the arms of a case are called, the same way in all its placements. `note` says so, for its rows.

    `small`: by graphs if all arms can be captured, which the first placement shows.
    """

    def __init__(self, small: bool, cuda: Cuda = torch.cuda) -> None:
        self.graphs: bool | None = None if small else False
        self.note = ""
        self._cuda = cuda

    def settle(self, arms: Mapping[str, Replayable]) -> None:
        """Make the arms of a new placement replay, or leave them. Raises BrokenArm for one that no longer can."""
        if self.graphs is False:
            return
        try:
            made = replays(arms, self._cuda)
        except NotCaptured as reason:
            if self.graphs:  # a measurement by graphs cannot go on with plain calls
                raise BrokenArm(reason.arm) from reason
            self.graphs, self.note = False, f"no CUDA graphs, as {reason}"
            return
        self.graphs, self.note = True, REPLAYED
        for name, calls in made.items():
            arms[name].replay(calls)


def _side_stream(cuda: Cuda) -> Any:
    device = cuda.current_device()
    if device not in _side:
        _side[device] = cuda.Stream()
    return _side[device]


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


def _captured_call(call: Callable[[Copy], object], copy: Copy, pool: Any, cuda: Cuda) -> Call:
    graph = cuda.CUDAGraph()
    reason: Exception | None = None
    out: object = None
    graph.capture_begin(pool=pool)
    try:
        out = call(copy)
    except Exception as error:
        reason = error
    try:
        graph.capture_end()
    except RuntimeError as error:  # usually the call has already raised the error that spoiled the capture
        reason = reason or error
    if reason is not None:
        _recover(cuda)
        raise NotCaptured(_line(reason)) from reason

    def replay() -> object:
        graph.replay()
        return out

    return replay


def _recover(cuda: Cuda) -> None:
    """A failed capture leaves torch's random generator in capture mode; an empty one that succeeds frees it."""
    try:
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        graph.capture_begin()
        graph.capture_end()
    except RuntimeError:
        pass


def _line(error: BaseException) -> str:
    """The first line of torch's message; the rest is advice for debugging."""
    while error.__cause__ is not None:  # the wrapping error is less specific
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
