"""Kernels that go wrong on a GPU, each in one way. `ffn bench` must charge it to their own row."""

import torch
from torch.nn.functional import linear, silu

calls = 0
_side = None


def right(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def assert_first(x, gate, up, down):
    """A device-side assertion, which every later call in the process reports too."""
    torch._assert_async(torch.zeros((), dtype=torch.bool, device=x.device))
    return right(x, gate, up, down)


def assert_later(x, gate, up, down):
    """The same, from the 50th call on: while others are timed."""
    global calls
    calls += 1
    torch._assert_async(torch.full((), calls < 50, dtype=torch.bool, device=x.device))
    return right(x, gate, up, down)


def too_large(x, gate, up, down):
    torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
    return right(x, gate, up, down)


def waits(x, gate, up, down):
    out = right(x, gate, up, down)
    return out if out.isfinite().all().item() else -out


def spoils_a_capture(x, gate, up, down):
    """Waits by a call that torch's debug mode for waits does not see."""
    torch.cuda.synchronize()
    return right(x, gate, up, down)


def other_stream(x, gate, up, down):
    """Right once everything is done, but the current stream knows nothing of the work."""
    global _side
    _side = _side or torch.cuda.Stream()
    _side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_side):
        return right(x, gate, up, down)
