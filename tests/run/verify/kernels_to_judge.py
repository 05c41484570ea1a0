"""Kernels of a 12x24 swiglu block for the referee. The comment above each names the check that must fail, or `right`.

It is loaded by the kernel's host, never by the tests.
"""

import os
import threading
import time

import torch
from torch import nn
from torch.nn.functional import linear, silu

from ffncli.kernels.kernel import Kernel

LOG = os.environ.get("FFN_TEST_LOG")
if LOG:
    with open(LOG, "a") as log:
        log.write(f"{os.getpid()}\n")


# right
def mlp(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


# right
class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


# right: packs its weights once, and writes into a buffer of its own that it returns
def _build(steps, device, dtype):
    kept = {}

    def run(x, params):
        packed, down = params
        out = kept.setdefault(len(x), torch.empty_like(x))
        gate, up = (x @ packed.T).chunk(2, -1)
        return out.copy_((silu(gate) * up) @ down.T)

    return run


packing = Kernel(
    "packing", _build, lambda steps, w: (torch.cat([w["gate.weight"], w["up.weight"]]), w["down.weight"].clone())
)


_PACKED = {}


# weights: packs the first that it ever saw
def packs_once(x, gate, up, down):
    kept = _PACKED.setdefault(gate.shape, torch.cat([gate, up]))
    gated, linear_part = linear(x, kept).chunk(2, -1)
    return linear(silu(gated) * linear_part, down)


# right: one token after the other
def row_by_row(x, gate, up, down):
    return torch.cat([mlp(token[None], gate, up, down) for token in x])


_POOL = None


# right: its threads stay, and no call adds one
def pooled(x, gate, up, down):
    global _POOL
    if _POOL is None:
        from concurrent.futures import ThreadPoolExecutor

        _POOL = ThreadPoolExecutor(1)
    return _POOL.submit(mlp, x, gate, up, down).result()


# shapes
def swapped(x, gate, up, down):
    return linear(silu(linear(x, up)) * linear(x, gate), down)


# shapes
def other_dtype(x, gate, up, down):
    return mlp(x, gate, up, down).double()


# shapes
def a_list(x, gate, up, down):
    return mlp(x, gate, up, down).tolist()


# shapes
def fails(x, gate, up, down):
    raise ValueError("no such tile")


# shapes
def wrong_tail(x, gate, up, down):
    out = mlp(x, gate, up, down)
    out[len(x) - len(x) % 8 or len(x) :] = 0
    return out


# shapes
def in_bf16(x, gate, up, down):
    return mlp(*(t.bfloat16() for t in (x, gate, up, down))).float()


# right: wrong for one token count that is tried only on demand
def wrong_for_40(x, gate, up, down):
    return mlp(x, gate, up, down) * (2.0 if len(x) == 40 else 1.0)


# special
def overflows(x, gate, up, down):
    g = linear(x, gate)
    return linear(g * g.exp() / (1 + g.exp()) * linear(x, up), down)


# special
def divides_by_the_norm(x, gate, up, down):
    n = x.norm(dim=-1, keepdim=True)
    return linear(silu(n * linear(x / n, gate)) * linear(x, up), down)


# isolation
def hides_nan_in_its_input(x, gate, up, down):
    return mlp(torch.where(x.isnan(), 0.0, x), gate, up, down)


# isolation
def hides_nan_in_its_hidden_units(x, gate, up, down):
    hidden = silu(linear(x, gate)) * linear(x, up)
    return linear(torch.where(hidden.isnan(), 0.0, hidden), down)


# isolation
def hides_nan_in_its_output(x, gate, up, down):
    y = mlp(x, gate, up, down)
    return torch.where(y.isnan(), 1.0, y)


# isolation
def leaks(x, gate, up, down):
    return mlp(x, gate, up, down) + 0 * x.sum()


# repeats
def noisy(x, gate, up, down):
    out = mlp(x, gate, up, down)
    return out * (1 + 1e-7 * torch.randn_like(out))


_ANSWERS = {}


# state
def replays_by_address(x, gate, up, down):
    key = (x.data_ptr(), len(x))
    if key not in _ANSWERS:
        _ANSWERS[key] = mlp(x, gate, up, down)
    return _ANSWERS[key]


# state
def replays_by_count(x, gate, up, down):
    if len(x) not in _ANSWERS:
        _ANSWERS[len(x)] = mlp(x, gate, up, down)
    return _ANSWERS[len(x)]


_CALLS = [0]


# state
def drifts(x, gate, up, down):
    _CALLS[0] += 1
    return mlp(x, gate, up, down) * (1 + 1e-6 * (_CALLS[0] > 30))


# batch
def by_batch(x, gate, up, down):
    return row_by_row(x, gate, up, down) * (1 + 2e-7 * (len(x) == 1))


# threads
def leaves_threads(x, gate, up, down):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    return mlp(x, gate, up, down)


# untouched
def writes_to_x(x, gate, up, down):
    out = mlp(x, gate, up, down)
    x.mul_(0.5)
    return out


_WRITTEN = []


# untouched
def writes_to_weights(x, gate, up, down):
    if not _WRITTEN:
        _WRITTEN.append(gate.data[-1, -1].copy_(torch.nextafter(gate[-1, -1], torch.tensor(9.0))))
    return mlp(x, gate, up, down)


# widths
def only_multiples(x, gate, up, down):
    return mlp(x, gate, up, down) if up.shape[0] % 8 == 0 else torch.zeros_like(x)


def mixture(x, router, gate, up, down):
    """top 2 of softmax, renormalised."""
    scores, chosen = router_of(x, router)
    out = torch.zeros_like(x)
    for e in range(len(gate)):
        out += (scores * (chosen == e)).sum(-1, keepdim=True) * mlp(x, gate[e], up[e], down[e])
    return out


def router_of(x, router):
    scores, chosen = linear(x, router).softmax(-1).topk(2, -1)
    return scores / scores.sum(-1, keepdim=True), chosen


def first_expert_kept(x, router, gate, up, down):
    """It keeps the first experts that it ever saw."""
    kept = torch.__dict__.setdefault("_ffn_test_kept", [t.clone() for t in (gate, up, down)])
    return mixture(x, router, *(kept if kept[0].shape == gate.shape else (gate, up, down)))


_KEPT = {}


def replays_by_content(x, gate, up, down):
    """It keeps right answers by the numbers of x: `replay`, where calls are long enough."""
    key = x.numpy().tobytes()
    if key not in _KEPT:
        _KEPT[key] = mlp(x, gate, up, down)
    return _KEPT[key]
