"""Peak memory of a call on a simulated GPU, and the buffer that empties the cache."""

import torch

from ffncli.bench import cuda_memory
from ffncli.bench.cuda_memory import flush, flush_bytes, peak_memory
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


def test_the_flush_is_three_times_the_cache_and_is_written(monkeypatch):
    monkeypatch.setattr(cuda_memory, "llc_bytes", lambda device: 1000)
    assert flush_bytes("cpu") == 3000
    buffer = flush("cpu")()
    assert (buffer.numel(), buffer.dtype, int(buffer.count_nonzero())) == (3000, torch.uint8, 0)
