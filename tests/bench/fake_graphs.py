"""Graphs that cost what a real GPU's cost, and captures that cannot be mended: FakeCuda, less kind.

- A graph begins later than a kernel: `begin` seconds of the GPU for each replay.
- Its first replay also uploads it: `upload` seconds for each of its kernels.
- The waiting kernel takes `least` seconds before it waits at all.
- After a capture that fails, torch's allocator believes that it goes on: every later capture and `synchronize` raises.
"""

from tests.bench.fake_cuda import FakeCuda, FakeGraph


class CostedGraphs(FakeCuda):
    def __init__(self, begin=4e-6, upload=1e-6, least=0.0, **more):
        super().__init__(**more)
        self.begin, self.upload, self.least = begin, upload, least
        self.stuck = False

    def _sleep(self, cycles):
        self.launch(self.least + cycles / self.rate, "sleep")

    def synchronize(self, device=None):
        self.require_not_stuck()
        super().synchronize(device)

    def CUDAGraph(self):
        return CostedGraph(self)

    def require_not_stuck(self):
        if self.stuck:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")


class CostedGraph(FakeGraph):
    replays = 0

    def capture_begin(self, pool=None):
        self.cuda.require_not_stuck()
        super().capture_begin(pool)

    def capture_end(self):
        try:
            super().capture_end()
        except RuntimeError:
            self.cuda.stuck = True
            raise

    def replay(self):
        uploaded = 0.0 if self.replays else self.cuda.upload * len(self.work)
        self.replays += 1
        self.cuda._queue(self.cuda.begin + uploaded, "graph")
        super().replay()
