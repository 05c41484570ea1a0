"""A simulated GPU that computes as well: what is launched writes its numbers when the GPU has come to it."""

import torch

from tests.bench.fake_cuda import FakeCuda, FakeGraph


class FakeGpu(FakeCuda):
    """`run` launches a function whose tensor holds NaN until `synchronize` has waited for it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.pending = []  # (when it is done, what it does)

    def run(self, work, like, seconds=2e-5):
        """A tensor for the result of `work()`, which the GPU takes so many seconds for."""
        out = torch.full_like(like, torch.nan)
        self.launch_effect(lambda: out.copy_(work()), seconds)
        return out

    def launch_effect(self, effect, seconds):
        if self.capturing is not None:
            self.capturing.append((seconds, effect))
            return
        self.launch(seconds)
        self.pending.append((self.free, effect))

    def _queue(self, seconds, name):
        begin = super()._queue(seconds, name)
        if callable(name):  # a node of a graph
            self.pending.append((self.free, name))
        return begin

    def synchronize(self, device=None):
        super().synchronize(device)
        done = sorted((one for one in self.pending if one[0] <= self.host), key=lambda one: one[0])
        self.pending = [one for one in self.pending if one[0] > self.host]
        for _, effect in done:
            effect()

    def captured(self, call):
        """A graph of the call, and what it returned."""
        graph = FakeGraph(self)
        self.capturing, self.captured_stream, self.spoiled = [], self.current, False
        out = call()
        graph.capture_end()
        return graph, out


gpu = FakeGpu()
