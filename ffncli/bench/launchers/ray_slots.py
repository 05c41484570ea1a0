"""Slots of a Ray cluster. Each slot is an actor that Ray starts on a machine; it stops with the machine or this
program."""

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ffncli.bench.launchers.slot import SlotEvent
from ffncli.bench.request.machines import LauncherChoice, SlotSize
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.system.packages import require_extra

_MOST_FAILED_STARTS = 3  # in a row
_ANSWER = 10.0  # maximum seconds to wait until a cluster's port answers
_RECOUNT = 2.0  # s between two counts of the cluster's machines


class _SlotOnRay:
    """The actor of a slot. ffncli is loaded on the actor's machine, where Ray looks this class up by its name."""

    def host(self) -> str:
        import platform

        return platform.node()

    def measure(self, task: str) -> str:
        """Measure a task at normal priority and return the answer: Ray starts its processes at a low priority (nice
        15)."""
        from ffncli.bench.launchers.slot import measured

        with suppress(OSError):  # only root may do this; other users run `RAY_worker_niceness=0 ray start`
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        return measured(task)


@contextmanager
def ray_slots(cluster: LauncherChoice, size: SlotSize) -> "Iterator[RaySlots]":
    """Yield the slots of a running cluster, then end its actors. Raises FFNError (exit 3) without a cluster."""
    require_extra("ray", "ray")
    import ray  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from ray.util.scheduling_strategies import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        NodeAffinitySchedulingStrategy,
    )

    _connect(ray, cluster.options.get("address") or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        slots = RaySlots(ray, size, cluster.slots, partial(NodeAffinitySchedulingStrategy, soft=False))
        slots.require_room()
        yield slots
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Join the cluster. Raises FFNError (exit 3) at once if nothing answers; Ray would try for ten minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), _ANSWER).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address) from error
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", include_dashboard=None)
    except ConnectionError as error:
        raise _no_cluster(address) from error
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python, or an invalid address
        text = " ".join(str(error).split())[:200]
        raise FFNError(f"cannot use the Ray cluster: {text}", code=ExitCode.ENVIRONMENT) from error
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray's handler would bypass ours


def _no_cluster(address: str) -> FFNError:
    why = "there is no Ray cluster" if address == "auto" else f"no Ray cluster answers at {shown(address)}"
    hint = "start one (ray start --head), or name one: --launcher-option address=HOST:6379"
    return FFNError(why, hint, ExitCode.ENVIRONMENT)


@dataclass(frozen=True)
class _Actor:
    """An actor, its index among all started actors, and the machine that it was started on (empty: any)."""

    handle: Any
    number: int
    node: str
    host: str = ""

    @property
    def place(self) -> str:
        """The slot's name for messages, such as `node7, slot 2`."""
        return f"{self.host or 'a machine'}, slot {self.number}"


@dataclass
class RaySlots:
    """One actor for each GPU, or for each machine with enough cores; with `count`, `count` actors on any machines."""

    ray: Any
    size: SlotSize
    count: int | None = None
    on_node: Callable[[str], Any] = str  # a machine's id → Ray's strategy for running only there
    _starting: dict[Any, _Actor] = field(default_factory=dict)  # key: the reference of its first answer
    _idle: list[_Actor] = field(default_factory=list)
    _busy: dict[Any, tuple[_Actor, str]] = field(default_factory=dict)
    _start_events: list[SlotEvent] = field(default_factory=list)
    _started: int = 0
    _failed_starts: int = 0
    _counted: float = float("-inf")

    @property
    def free(self) -> int:
        """The number of actors that wait for a case."""
        return len(self._idle)

    def submit(self, case: str, task: str) -> None:
        """Give a case to a waiting actor."""
        actor = self._idle.pop()
        self._busy[actor.handle.measure.remote(task)] = (actor, case)
        self._start_events.append(SlotEvent("started", case, actor.place))

    def events(self, patience: float) -> Sequence[SlotEvent]:
        """Return the answers of actors since the last call, and an event for each lost actor."""
        self._refill()
        events, self._start_events = self._start_events, []
        waiting = [*self._busy, *self._starting]
        if not waiting:
            time.sleep(0 if events else patience)
            return events
        ready, _ = self.ray.wait(waiting, num_returns=1, timeout=0 if events else patience)
        for reference in ready:
            if reference in self._busy:
                events.append(self._answer(reference, *self._busy.pop(reference)))
            else:
                self._welcome(reference, self._starting.pop(reference))
        return events

    def require_room(self) -> None:
        """Raise FFNError (exit 3) if no machine of the cluster has room for even one slot."""
        if any(self._rooms().values()):
            return
        what = f"{self.size.gpus} GPU and " if self.size.gpus else ""
        why = f"no machine of the Ray cluster has {what}{self.size.cores} CPUs"
        raise FFNError(why, "use fewer --threads, or add machines", ExitCode.ENVIRONMENT)

    def _answer(self, reference: Any, actor: _Actor, case: str) -> SlotEvent:
        """Return the event for a busy actor's answer; an actor that has answered becomes idle."""
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            self.ray.kill(actor.handle)
            return SlotEvent("refused", case, actor.place, _last_line(error))
        except self.ray.exceptions.RayError as error:
            self.ray.kill(actor.handle)
            why = f"its machine or its process has ended ({type(error).__name__})"
            return SlotEvent("lost", case, actor.place, why)
        self._idle.append(actor)
        return SlotEvent("answered", case, actor.place, str(answer))

    def _welcome(self, reference: Any, actor: _Actor) -> None:
        """Add a newly started actor. Raises FFNError (exit 3) if several in a row could not start."""
        try:
            host = str(self.ray.get(reference))
        except self.ray.exceptions.RayError as error:
            self.ray.kill(actor.handle)
            self._failed_starts += 1
            if self._failed_starts < _MOST_FAILED_STARTS:
                return
            hint = "install the same ffncli on every machine of the cluster, in the Python that runs Ray"
            raise FFNError(f"no slot can start: {_last_line(error)}", hint, ExitCode.ENVIRONMENT) from None
        self._failed_starts = 0
        self._idle.append(_Actor(actor.handle, actor.number, actor.node, host))

    def _refill(self) -> None:
        """Start the missing actors, on the machines that the cluster has now."""
        if time.monotonic() - self._counted < _RECOUNT:
            return
        self._counted = time.monotonic()
        actors = [*self._starting.values(), *self._idle, *(actor for actor, _ in self._busy.values())]
        wanted = self._rooms() if self.count is None else Counter({"": self.count})  # an empty id means any machine
        for node, number in (wanted - Counter(actor.node for actor in actors)).items():
            for _ in range(number):
                self._start(node)

    def _rooms(self) -> Counter[str]:
        """Map each machine's id to its number of slots: one per GPU; without GPUs, one per machine, as two would share
        the memory bandwidth."""
        rooms: Counter[str] = Counter()
        for node in self.ray.nodes():
            resources = node["Resources"]
            if node["Alive"] and resources.get("CPU", 0) >= self.size.cores:
                rooms[node["NodeID"]] = int(resources.get("GPU", 0) // self.size.gpus) if self.size.gpus else 1
        return rooms

    def _start(self, node: str) -> None:
        where = self.on_node(node) if node else "SPREAD"
        actor = self.ray.remote(_SlotOnRay).options(
            num_cpus=self.size.cores, num_gpus=self.size.gpus, max_restarts=0, scheduling_strategy=where
        )
        self._started += 1
        handle = actor.remote()
        self._starting[handle.host.remote()] = _Actor(handle, self._started, node)


def _last_line(error: BaseException) -> str:
    """Return the last line of a traceback from another machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
