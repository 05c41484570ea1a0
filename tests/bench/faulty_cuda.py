"""A simulated GPU on which an illegal access sticks: the next wait raises, and everything after it, as long as the
process lives. A kernel's file reaches the one in use as `faulty_cuda.current()`."""

from ffncli.bench.timing.gpu.cuda_clock import CudaClock
from tests.bench.fake_cuda import FakeCuda

FAULT = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA` ..."
_current: "list[FaultyCuda]" = []


class FaultyCuda(FakeCuda):
    """`spoil` is what a faulty kernel does: its launch returns, as launches do."""

    def __init__(self) -> None:
        super().__init__()
        self.faulty = self.raised = False
        _current[:] = [self]

    def spoil(self) -> None:
        self.faulty = True

    def synchronize(self, device=None):
        if self.faulty:
            self.raised = True
            raise RuntimeError(FAULT)
        super().synchronize(device)

    def launch(self, seconds, name="kernel"):
        if self.raised:
            raise RuntimeError(FAULT)
        super().launch(seconds, name)


class LaunchingClock(CudaClock):
    """Every call launches a millisecond of work, besides what it does on the CPU."""

    def __init__(self, cuda: FaultyCuda) -> None:
        self.gpu = cuda
        super().__init__(cuda, cuda.now)

    def time(self, call, inner, before=None):
        def both():
            call()
            self.gpu.launch(1e-3)

        return super().time(both, inner, before)


def current() -> FaultyCuda:
    return _current[0]
