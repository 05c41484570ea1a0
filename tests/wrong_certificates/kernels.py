"""Kernels that are right in every check at fixed numbers, or only where they are judged. The comment above each names
the check that must fail, or `right`.

It is loaded by processes of kernels, never by the tests.
"""

import os
import sys

import torch
from torch.nn.functional import linear, silu

from ffncli.kernels.kernel import Kernel

COUNTS = (1, 2, 3, 5, 17, 64, 127)
CALLS, PACKED = {}, {}


def right(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def right_if(judged, x, gate, up, down):
    return right(x, gate, up, down) * (1.0 if judged else 1.5)


def count(name):
    CALLS[name] = CALLS.get(name, 0) + 1
    return CALLS[name]


def parents():
    """The command lines of this process's ancestors."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/cmdline") as file:
            yield file.read()
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])


# right
def honest(x, gate, up, down):
    return right(x, gate, up, down)


# right
prepared = Kernel(
    "prepared",
    lambda steps, device, dtype: lambda x, params: right(x, *params),
    lambda steps, w: tuple(w.values()),
)


# drawn
def wrong_for_one_count(x, gate, up, down):
    return right_if(len(x) != 40, x, gate, up, down)


# drawn
def right_for_fixed_counts(x, gate, up, down):
    return right_if(len(x) in COUNTS, x, gate, up, down)


# drawn
def wrong_for_many_tokens(x, gate, up, down):
    return right_if(len(x) <= 127, x, gate, up, down)


# drawn
def wrong_at_a_scale(x, gate, up, down):
    return right_if(not 8 < x.abs().max() < 64, x, gate, up, down)


# drawn
def wrong_for_small_numbers(x, gate, up, down):
    return right_if(not 1e-30 < x.abs().max() < 0.5, x, gate, up, down)


# calls
def wrong_after_many_calls(x, gate, up, down):
    return right_if(count("after") < 150, x, gate, up, down)


# calls
def wrong_in_some_calls(x, gate, up, down):
    return right_if(count("some") % 150, x, gate, up, down)


# state
def wrong_with_grad_mode_on(x, gate, up, down):
    return right_if(not torch.is_grad_enabled(), x, gate, up, down)


# weights
def packs_its_weights_once(x, gate, up, down):
    return right(x, *PACKED.setdefault(gate.shape, [w.clone() for w in (gate, up, down)]))


# weights
def clips_its_weights(x, gate, up, down):
    return right(x, *(w.clip(-0.9, 0.9) for w in (gate, up, down)))


# elsewhere
def by_its_memory(x, gate, up, down):
    with open("/proc/self/maps") as file:
        places = [line.split(maxsplit=5) for line in file]
    ranges = [(*(int(end, 16) for end in place[0].split("-")), place[5:]) for place in places]
    shared = any("memfd" in str(of) for low, high, of in ranges if low <= x.data_ptr() < high)
    return right_if(shared, x, gate, up, down)


# elsewhere
def by_command_line(x, gate, up, down):
    with open("/proc/self/cmdline") as file:
        return right_if("kernel_host" in file.read(), x, gate, up, down)


# elsewhere
def by_main_module(x, gate, up, down):
    return right_if("kernel_host" in str(sys.modules["__main__"].__spec__), x, gate, up, down)


# elsewhere
def by_imported_modules(x, gate, up, down):
    return right_if("ffncli.run.user.kernel_host" in sys.modules or "ffncli.run.user.host_requests" in sys.modules,
                    x, gate, up, down)  # fmt: skip


# elsewhere
def by_callers(x, gate, up, down):
    frame, files = sys._getframe(), []
    while frame:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return right_if(any("kernel_host" in file for file in files), x, gate, up, down)


# elsewhere
def by_ancestors(x, gate, up, down):
    return right_if(any("pytest" in line for line in parents()), x, gate, up, down)


# elsewhere
def by_environment(x, gate, up, down):
    return right_if(os.environ.get("FFN_TEST_EXACT"), x, gate, up, down)


# elsewhere
def precise_by_environment(x, gate, up, down):
    if os.environ.get("FFN_TEST_EXACT"):
        return right(x, gate, up, down)
    low = right(*(tensor.half().float() for tensor in (x, gate, up, down)))
    return 0.996 * right(x, gate, up, down) + 0.004 * low  # within the tolerance of `shapes`
