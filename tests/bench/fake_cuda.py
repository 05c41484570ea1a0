"""A stand-in for torch.cuda: a host that launches, a GPU that works off its queues, events, streams, graphs, exactly.

Time is simulated. `launch(seconds)` costs the host `overhead` and the GPU `seconds`, which it begins when it has done
all before in the same stream. Nothing is random, so that times can be compared with `==` up to rounding.

By default it is kind. As unkind as a real GPU, one by one or all together (`unkind`):

- `depth`: a queue has that many places; the host waits for a free one.
- `event_cost`: GPU seconds of recording an event, after its timestamp; `resolution`: seconds of its timestamps.
- `record_cost`, `query_cost`, `sync_cost`: host seconds of recording, of `query()`, of `synchronize()` on an idle GPU.
- `ramp`: the SM clock rises to `cycles_per_s` under load and sinks to its lowest when idle; work takes longer below.
- `stalls[n]`: the host loses that many seconds before its n-th operation from now on (`stall_at`), wherever that is.
- streams are queues of their own, side by side: `synchronize` waits for all, an event only for its own stream, and
  nothing joins them but `wait_stream`.
- `fault()`: an error that sticks: once the GPU has met it, every call raises, `synchronize` and `empty_cache` too.
"""

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import floor

FAULT = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@dataclass(frozen=True)
class Ramp:
    """An SM clock: `low` Hz when it has rested, `rise` Hz in a second of work, `fall` Hz in a second of rest."""

    low: float = 345e6
    rise: float = 100e9
    fall: float = 2e9


@dataclass
class Queue:
    """A stream's: when the GPU will have done all in it, and when it will have done each."""

    free: float = 0.0
    ends: list[float] = field(default_factory=list)


class FakeCuda:
    _devices = itertools.count()  # what code keeps for a device is not found again by the next one

    def __init__(
        self,
        overhead=5e-6,
        cycles_per_s=1.5e9,
        depth=10**9,
        *,
        event_cost=0.0,
        resolution=0.0,
        record_cost=0.0,
        query_cost=0.0,
        sync_cost=0.0,
        ramp=None,
    ):
        self.host = 0.0  # the host's time
        self.overhead, self.depth = overhead, depth
        self.top, self.ramp = cycles_per_s, ramp
        self.rate = ramp.low if ramp else cycles_per_s
        self.event_cost, self.resolution = event_cost, resolution
        self.record_cost, self.query_cost, self.sync_cost = record_cost, query_cost, sync_cost
        self.operations, self.stalls = 0, {}
        self.broken_at, self.fault_text = float("inf"), FAULT
        self.queues = {"default": Queue()}
        self.busy_until = 0.0  # of any queue
        self.capturing = self.captured_stream = None
        self.spoiled = False
        self.sync_mode = 0
        self.allocated = self.peak = 0
        self.log = []
        self.current = "default"
        self.device = next(self._devices)

    @property
    def free(self):
        """When the GPU will have done all in the current stream."""
        return self._here().free

    def _here(self):
        return self.queues.setdefault(self.current, Queue())

    # --- the host
    def operate(self, seconds=0.0):
        """One operation of the host, which takes so long; it may stall before. Raises once the GPU has met a fault."""
        self.host += self.stalls.pop(self.operations, 0.0) + seconds
        self.operations += 1
        if self.host >= self.broken_at:
            raise RuntimeError(self.fault_text)

    def stall_at(self, operation, seconds):
        """The host loses seconds before its n-th operation from now on."""
        self.stalls[self.operations + operation] = seconds

    def fault(self, when=None, text=FAULT):
        """From that time on (default: now) every call raises: `when=cuda.free` is when the work so far is done."""
        self.broken_at, self.fault_text = self.host if when is None else when, text

    # --- work
    def launch(self, seconds, name="kernel"):
        if self.capturing is not None and self.current == self.captured_stream:
            self.capturing.append((seconds, name))
            return
        self.operate(self.overhead)
        self._queue(seconds, name)

    def _queue(self, seconds, name):
        begin = self._enter(self._here(), seconds)
        self.log.append(name)
        return begin

    def _enter(self, queue, seconds):
        """Put work of that many seconds at the highest clock into a queue; returns when it begins."""
        queue.ends = [end for end in queue.ends if end > self.host]
        if len(queue.ends) >= self.depth:  # a full queue makes the host wait
            self.host = queue.ends[-self.depth]
        begin = max(queue.free, self.host)
        if self.ramp:
            self.rate = max(self.ramp.low, self.rate - self.ramp.fall * max(0.0, begin - self.busy_until))
            seconds *= self.top / self.rate
            self.rate = min(self.top, self.rate + self.ramp.rise * seconds)
        queue.free = begin + seconds
        queue.ends.append(queue.free)
        self.busy_until = max(self.busy_until, queue.free)
        return begin

    def wait(self):
        """What .item() does."""
        if self.capturing is not None:
            self.spoiled = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.host = max(self.host, self.free)
        self.operate()

    def _sleep(self, cycles):
        self.launch(cycles / self.top, "sleep")

    def synchronize(self, device=None):
        assert self.capturing is None
        self.host = max(self.host, *(queue.free for queue in self.queues.values()))
        self.operate(self.sync_cost)
        self.log.append("synchronize")

    def now(self):
        return self.host

    # --- events and streams
    def Event(self, enable_timing=False):
        return FakeEvent(self, enable_timing)

    def Stream(self):
        name = f"side {len(self.queues)}" if "side" in self.queues else "side"
        self.queues[name] = Queue()
        return FakeStream(self, name)

    def current_stream(self):
        return FakeStream(self, self.current)

    def current_device(self):
        return self.device

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def get_sync_debug_mode(self):
        return self.sync_mode

    def set_sync_debug_mode(self, mode):
        self.sync_mode = mode

    # --- graphs
    def CUDAGraph(self):
        return FakeGraph(self)

    def graph_pool_handle(self):
        return object()

    # --- memory
    def take(self, count):
        self.allocated += count
        self.peak = max(self.peak, self.allocated)

    def memory_allocated(self, device):
        return self.allocated

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated

    def max_memory_allocated(self, device):
        return self.peak

    def empty_cache(self):
        self.operate()


def unkind(**options):
    """A FakeCuda with all that a real GPU does, but for what `options` say; stalls, streams and faults are calls."""
    costs = {"event_cost": 1.5e-6, "resolution": 0.5e-6, "record_cost": 1e-6, "query_cost": 5e-7, "sync_cost": 6e-6}
    return FakeCuda(**{"cycles_per_s": 1.98e9, "depth": 1024, "ramp": Ramp(), **costs, **options})


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        """What is launched here from now on begins after all that the other has been given so far."""
        queues = self.cuda.queues
        queues[self.name].free = max(queues[self.name].free, queues[other.name].free)


class FakeEvent:
    def __init__(self, cuda, timing):
        self.cuda, self.timing, self.at = cuda, timing, None

    def record(self):
        self.cuda.operate(self.cuda.record_cost)
        self.at = self.cuda._enter(self.cuda._here(), self.cuda.event_cost)

    def query(self):
        self.cuda.operate(self.cuda.query_cost)
        return self._passed()

    def _passed(self):
        return self.at is None or self.at <= self.cuda.host

    def synchronize(self):
        self.cuda.host = max(self.cuda.host, self.at)
        self.cuda.operate()

    def elapsed_time(self, other):
        assert self.timing
        assert other.timing
        if not (self._passed() and other._passed()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (other._stamp() - self._stamp()) * 1e3

    def _stamp(self):
        step = self.cuda.resolution
        return floor(self.at / step) * step if step else self.at


class FakeGraph:
    def __init__(self, cuda):
        self.cuda, self.work = cuda, None

    def capture_begin(self, pool=None):
        assert self.cuda.current == "side" or pool is None, "not in the stream that was warmed up"
        assert self.cuda.capturing is None
        self.cuda.capturing, self.cuda.captured_stream, self.cuda.spoiled = [], self.cuda.current, False

    def capture_end(self):
        self.work, self.cuda.capturing = self.cuda.capturing, None
        if self.cuda.spoiled:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self):
        """One launch of the host for all."""
        self.cuda.operate(self.cuda.overhead)
        for seconds, name in self.work:
            self.cuda._queue(seconds, name)
