"""Peak memory of a call on a simulated GPU."""

from ffncli.bench.timing.cuda_counters import peak_memory
from tests.bench.fake_cuda import FakeCuda


def test_the_most_a_call_holds_beyond_what_was_there():
    cuda = FakeCuda()
    cuda.take(1000)  # weights
    cuda.peak = 50_000  # and a peak of the past
    first = []

    def call():
        if not first:
            first.append(cuda.take(300))  # a workspace, kept
        cuda.take(70)
        cuda.take(20)
        cuda.allocated -= 90

    assert peak_memory(call, "cuda", cuda) == 90


def test_a_processor_has_none():
    assert peak_memory(lambda: 1 / 0, "cpu") is None
