"""CUDA graphs: many calls of a kernel are captured once and replayed as one, so that timing a small case measures the
GPU, not the host.

A GPU starts a graph later than a kernel; if a graph held one call, every call would include that delay. So one graph
holds the calls of a whole block, on one copy of the weights after another, with x and the outputs at the addresses that
they had during capture. All arms (timed calls) of a case run the same way, as a ratio between a replayed and a launched
arm would compare ways of launching. If one arm cannot be captured (its routing reads data, or it waits for the GPU),
all arms use plain calls, and a note says why; with `--launch graphs`, that arm is left out instead.
"""

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
MOST_CALLS = 1024  # in one graph; a call takes at least a microsecond, and a block lasts one millisecond
_JUDGED = 2  # minimum number of calls, with other contents, in the graph that is judged
_WARM_UP = 3  # number of calls before the capture, in which libraries choose their algorithms and workspaces
# Below this time, a case may be bound by launches. The rates are above any GPU's, so that the decision depends only on
# the case, and all processes and machines agree on it. A larger case loses nothing in a graph.
_SMALL = 100e-6  # s
_FLOPS_PER_S, _BYTES_PER_S = 1e15, 4e12
_side: dict[int, Any] = {}  # GPU → the stream of all its captures; cuBLAS keeps a workspace for every stream


class NotCaptured(Exception):
    """A call cannot be captured; the message is the reason, for a note."""


class SpoiledCapture(NotCaptured):
    """The capture itself failed. torch's allocator may still be in capture mode, so this process must not measure any
    more. `arm` is the name of the arm, if known."""

    def __init__(self, why: str, arm: str = "") -> None:
        super().__init__(why)
        self.arm = arm


class Capturable(Protocol):
    """An arm that makes a call on one copy of its weights, and can replay graphs of such calls instead."""

    copies: Any

    def on_copy(self, copy: Any, /) -> object:
        """Make the call on one copy."""

    def replay(self, replays: Sequence[Call], /) -> None:
        """Make later calls use these replays one after another."""


def by_graphs(flops: int, moved_bytes: int) -> bool:
    """Return True if a case with this much work is small enough to be bound by launches; it uses graphs by default."""
    return flops / _FLOPS_PER_S + moved_bytes / _BYTES_PER_S < _SMALL


def calls_of_graph(inner: int) -> int:
    """Return how many of a block's `inner` calls one graph contains: all calls, or an equal part of them."""
    calls = inner
    while calls > MOST_CALLS and calls % 2 == 0:
        calls //= 2
    return calls


def repeated(copies: Sequence[Copy], count: int) -> list[Copy]:
    """Return a list of `count` copies, in the order in which a cycle of calls uses them.

    Between two uses of a copy, even across the cycle's end, at least about half of the other copies are used, so that
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
    """Capture graphs of `calls` calls each, with as few graphs as are needed to use all copies. Return the graphs'
    replays; each returns its graph's last output.

    Outputs are freed as in normal use, so the next call overwrites them. The graphs are replayed one after another,
    never at the same time, so they share one memory pool. Each graph is replayed once here, because the first replay
    uploads it. A few `judged` calls are captured in a graph of their own, which is replayed once. It is
    captured before or after the others, at random, so that a kernel cannot know which graph is judged. Raises
    NotCaptured with the reason; exceptions of the plain call pass through.
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
        # A separate pool: a graph in the same pool that was captured earlier and replayed later would overwrite the
        # judged answers.
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
    """How the calls of a case's arms are launched, which is the same in all placements of the case: `launch`, and
    `plain_because` if they could not be captured.

    `asked` is --launch. With `auto`, a `small` case is replayed if all arms can be captured; the first placement
    decides. `earlier` is the reason if another process of the run could not capture them; calls are then plain in this
    process too.
    """

    def __init__(self, asked: Launch, small: bool, earlier: str = "", cuda: Cuda = torch.cuda) -> None:
        self.launch: Launched = "graphs" if asked == "graphs" or (asked == "auto" and small) else "plain"
        self.plain_because = ""
        self._asked, self._captured_before, self._cuda = asked, False, cuda
        if earlier and asked == "auto":
            self.launch, self.plain_because = "plain", earlier

    @property
    def note(self) -> str:
        """The reason why the arms are not replayed from CUDA graphs, if they were meant to be; otherwise empty."""
        return f"no CUDA graphs, as {self.plain_because}" if self.plain_because else ""

    def capture(
        self,
        arms: Mapping[str, Capturable],
        inner: Mapping[str, int],
        judged: Mapping[str, Callable[[Any], object]] | None = None,
    ) -> dict[str, int]:
        """Capture the arms of a new placement; return the number of calls per replay of each arm, or nothing if calls
        are plain.

        `inner` is the number of calls per block of each arm; `judged` maps arms to the argument `judged` of `captured`.
        Raises BrokenArm for an arm that cannot be captured while the others are replayed, and SpoiledCapture.
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
                if self._captured_before:  # a measurement that began with graphs cannot continue with plain calls
                    raise BrokenArm(name) from reason
                self.launch, self.plain_because = "plain", f"{name} {not_captured(str(reason))}"
                return {}
        self._captured_before = True
        for name, arm in arms.items():
            arm.replay(replays[name])
        return calls


def replaying(replays: Sequence[Call]) -> Call:
    """Return a call that runs the next of these replays each time."""
    turn = cycle(replays)
    return lambda: next(turn)()


def _warm_up(call: Callable[[Copy], object], copy: Copy, cuda: Cuda) -> None:
    """Make some calls, the last with a check for waiting: torch may not recover from a failed capture."""
    for _ in range(_WARM_UP):
        call(copy)
    cuda.synchronize()
    before = cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        cuda.set_sync_debug_mode("error")
        try:
            call(copy)
        except Exception as error:  # a user's kernel may raise anything
            raise NotCaptured(_line(error)) from error
        finally:
            cuda.set_sync_debug_mode(before)
            cuda.synchronize()


def _graph(call: Callable[[Copy], object], copies: Sequence[Copy], pool: Any, cuda: Cuda) -> Call:
    """Capture the calls on these copies as a graph; return a call that replays it."""
    graph = cuda.CUDAGraph()
    reason: Exception | None = None
    out: object = None
    try:
        graph.capture_begin(pool=pool)
        try:
            for copy in copies:
                out = None  # frees the output, as in normal use
                out = call(copy)
        except Exception as error:  # a user's kernel may raise anything
            reason = error
        graph.capture_end()
    except Exception as error:  # usually the call has already raised the error that made the capture fail
        raise SpoiledCapture(_line(reason or error)) from (reason or error)
    if reason is not None:
        raise NotCaptured(_line(reason)) from reason

    def replay() -> object:
        graph.replay()
        return out

    return replay


def _line(error: BaseException) -> str:
    """Return the first line of torch's message; the other lines are advice for debugging."""
    while error.__cause__ is not None:  # the error that wraps it is less specific
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
