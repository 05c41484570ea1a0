"""A stand-in for torch.cuda: a host that launches, a GPU that works off a queue, events, streams and graphs, exactly.

Time is simulated. `launch(seconds)` costs the host `overhead` and the GPU `seconds`, which it begins when it has done
all before. Nothing is random, so that times can be compared with `==` up to rounding.
"""

from contextlib import contextmanager


class FakeCuda:
    def __init__(self, overhead=5e-6, cycles_per_s=1.5e9, depth=10**9):
        self.host = 0.0  # the host's time
        self.free = 0.0  # when the GPU will have done all in its queue
        self.overhead, self.rate, self.depth = overhead, cycles_per_s, depth
        self.ends = []  # of what is in the queue
        self.capturing = None
        self.spoiled = False
        self.sync_mode = 0
        self.allocated = self.peak = 0
        self.log = []
        self.current = "default"

    # --- work
    def launch(self, seconds, name="kernel"):
        if self.capturing is not None:
            self.capturing.append((seconds, name))
            return
        self.host += self.overhead
        self._queue(seconds, name)

    def _queue(self, seconds, name):
        self.ends = [end for end in self.ends if end > self.host]
        if len(self.ends) >= self.depth:  # a full queue makes the host wait
            self.host = self.ends[-self.depth]
        self.free = max(self.free, self.host) + seconds
        self.ends.append(self.free)
        self.log.append(name)

    def wait(self):
        """What .item() does."""
        if self.capturing is not None:
            self.spoiled = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.host = max(self.host, self.free)

    def _sleep(self, cycles):
        self.launch(cycles / self.rate, "sleep")

    def synchronize(self, device=None):
        assert self.capturing is None
        self.host = max(self.host, self.free)
        self.log.append("synchronize")

    def now(self):
        return self.host

    # --- events and streams
    def Event(self, enable_timing=False):
        return FakeEvent(self, enable_timing)

    def Stream(self):
        return FakeStream("side")

    def current_stream(self):
        return FakeStream(self.current)

    def current_device(self):
        return id(self)

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


class FakeStream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        pass


class FakeEvent:
    def __init__(self, cuda, timing):
        self.cuda, self.timing, self.at = cuda, timing, None

    def record(self):
        self.at = max(self.cuda.free, self.cuda.host)

    def query(self):
        return self.at <= self.cuda.host

    def elapsed_time(self, other):
        assert self.timing
        assert other.timing
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (other.at - self.at) * 1e3


class FakeGraph:
    def __init__(self, cuda):
        self.cuda, self.work = cuda, None

    def capture_begin(self, pool=None):
        assert self.cuda.current == "side" or pool is None, "not in the stream that was warmed up"
        assert self.cuda.capturing is None
        self.cuda.capturing, self.cuda.spoiled = [], False

    def capture_end(self):
        self.work, self.cuda.capturing = self.cuda.capturing, None
        if self.cuda.spoiled:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self):
        """One launch of the host for all."""
        self.cuda.host += self.cuda.overhead
        for seconds, name in self.work:
            self.cuda._queue(seconds, name)
