"""What a file could replace is noticed, named and put back; what libraries do of their own is not."""

import builtins
import ctypes
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace

import pytest
import torch
from torch._C._dynamo import eval_frame

from ffncli.bench.judge import statistics
from ffncli.bench.timing import clock, correctness, fresh_inputs
from ffncli.bench.timing.cheating.entry_points import EntryPoints, files_of, in_words
from ffncli.bench.timing.cheating.settings import settings
from ffncli.bench.verdict import WrongCode
from ffncli.kernels import built_in
from ffncli.kernels.kernel import REGISTERED


@pytest.fixture(scope="module")
def entry_points():
    built_in("eager")
    return EntryPoints()


@pytest.fixture
def fixed(entry_points):
    entry_points.accept_settings()
    yield entry_points
    entry_points.restore()


libc = ctypes.CDLL(None)


def other(*args, **kwargs):
    """What stands in the place of something."""


@pytest.mark.parametrize(
    ("space", "name", "code", "text"),
    [
        (time, "perf_counter_ns", WrongCode.PATCHED_CLOCK, "time.perf_counter_ns was replaced"),
        (clock.CpuClock, "time", WrongCode.PATCHED_CLOCK, "ffncli.bench.timing.clock.CpuClock.time was replaced"),
        (torch.cuda, "synchronize", WrongCode.PATCHED_CLOCK, "torch.cuda.synchronize was replaced"),
        (torch.cuda.Event, "elapsed_time", WrongCode.PATCHED_CLOCK, "torch.cuda.Event.elapsed_time was replaced"),
        (torch.nn.functional, "linear", WrongCode.PATCHED_TORCH, "torch.nn.functional.linear was replaced"),
        (torch, "mm", WrongCode.PATCHED_TORCH, "torch.mm was replaced"),
        (torch.Tensor, "abs", WrongCode.PATCHED_TORCH, "torch.Tensor.abs was hidden"),
        (torch.nn.Linear, "forward", WrongCode.PATCHED_TORCH, "torch.nn.Linear.forward was replaced"),
        (os, "urandom", WrongCode.PATCHED_LIBRARY, "os.urandom was replaced"),
        (random.Random, "shuffle", WrongCode.PATCHED_LIBRARY, "random.Random.shuffle was replaced"),
        (builtins, "sum", WrongCode.PATCHED_LIBRARY, "builtins.sum was replaced"),
        (statistics, "median", WrongCode.PATCHED_FFN, "ffncli.bench.judge.statistics.median was replaced"),
        (correctness, "max", WrongCode.PATCHED_FFN, "ffncli.bench.timing.correctness.max was hidden"),
        (fresh_inputs, "ROWS", WrongCode.PATCHED_FFN, "ffncli.bench.timing.fresh_inputs.ROWS was replaced"),
    ],
)
def test_a_replaced_attribute(fixed, space, name, code, text):
    setattr(space, name, other)
    changes = fixed.changes()
    assert (changes[0].code, changes[0].text) == (code, text)
    assert files_of(changes) == {__file__}
    fixed.restore()
    assert fixed.changes() == []


def test_new_attributes_are_no_change(fixed, monkeypatch):
    monkeypatch.setattr(torch, "a_new_function", other, raising=False)
    monkeypatch.setattr(torch.Tensor, "a_new_method", other, raising=False)
    assert fixed.changes() == []


def test_code_that_was_swapped_in_its_place(fixed):
    before = clock.CpuClock.time.__code__
    clock.CpuClock.time.__code__ = before.replace(
        co_consts=tuple(5e-10 if const == 1e-9 else const for const in before.co_consts)
    )
    (change,) = fixed.changes()
    assert (change.code, change.text.startswith("the code of ")) == (WrongCode.PATCHED_CLOCK, True)
    fixed.restore()
    assert clock.CpuClock.time.__code__ is before


def test_a_module_a_kernel_and_an_operator(fixed, monkeypatch):
    monkeypatch.setitem(sys.modules, correctness.__name__, os)
    monkeypatch.setitem(REGISTERED, "eager", replace(REGISTERED["eager"], build=other))
    library = torch.library.Library("aten", "IMPL")
    with pytest.warns(UserWarning, match="Overriding|overridden"):
        library.impl("silu", lambda x: x * torch.sigmoid(x), "CPU")
    assert [change.text for change in fixed.changes()] == [
        "ffncli.bench.timing.correctness was replaced",
        "the kernel eager was replaced",
        "the operator aten::silu was replaced",
    ]
    assert in_words(fixed.changes()) == "ffncli.bench.timing.correctness was replaced, and 2 more things"
    fixed.restore()
    assert fixed.changes() == []


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda: torch.set_num_threads(3), WrongCode.THREADS_CHANGED, "the number of torch's threads changed"),
        (lambda: torch.set_float32_matmul_precision("medium"), WrongCode.ENVIRONMENT_CHANGED,
         "the precision of float32 matmuls changed"),
        (lambda: setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32),
         WrongCode.ENVIRONMENT_CHANGED, "a GPU's arithmetic changed"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
         WrongCode.ENVIRONMENT_CHANGED, "a GPU's arithmetic changed"),
        (lambda: torch._C._set_mkldnn_enabled(False), WrongCode.ENVIRONMENT_CHANGED, "the use of oneDNN changed"),
        (lambda: torch.set_flush_denormal(True), WrongCode.ENVIRONMENT_CHANGED,
         "the treatment of subnormal numbers changed"),
        (lambda: os.environ.update(OMP_NUM_THREADS="7"), WrongCode.ENVIRONMENT_CHANGED, "the environment changed"),
        (lambda: sys.setswitchinterval(0.5), WrongCode.ENVIRONMENT_CHANGED,
         "the interval between thread switches changed"),
        (lambda: torch.nn.modules.module.register_module_forward_hook(other), WrongCode.PATCHED_TORCH,
         "hooks on every nn.Module changed"),
        (lambda: torch.overrides.BaseTorchFunctionMode().__enter__(), WrongCode.PATCHED_TORCH,
         "torch's function modes changed"),
        (lambda: libc.setenv(b"OMP_NUM_THREADS", b"7", 1), WrongCode.ENVIRONMENT_CHANGED, "the environment changed"),
        (lambda: libc.mallopt(-6, 0x55), WrongCode.ENVIRONMENT_CHANGED, "the C library's allocation changed"),
        (lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)), WrongCode.ENVIRONMENT_CHANGED,
         "the priority of the process changed"),
        (lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1])),
         WrongCode.ENVIRONMENT_CHANGED, "a limit of the process changed"),
        (lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), WrongCode.ENVIRONMENT_CHANGED,
         "a signal's handler changed"),
        (tracemalloc.start, WrongCode.ENVIRONMENT_CHANGED, "the tracing of memory changed"),
        (lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE), WrongCode.ENVIRONMENT_CHANGED, "the garbage collector changed"),
        (lambda: torch.autograd.graph.saved_tensors_hooks(other, other).__enter__(), WrongCode.PATCHED_TORCH,
         "hooks on saved tensors changed"),
        (lambda: torch._C._set_default_mobile_cpu_allocator(), WrongCode.ENVIRONMENT_CHANGED,
         "torch's memory for tensors changed"),
        (lambda: eval_frame.set_eval_frame(False), WrongCode.PATCHED_TORCH,
         "the evaluation of Python's functions changed"),
    ],
)  # fmt: skip
def test_a_setting(fixed, change, code, text):
    change()
    first = fixed.changes()[0]
    fixed.restore()
    assert (first.code, first.text) == (code, text)
    assert fixed.changes() == []


def test_a_kernel_that_was_built_is_fixed_with_what_it_closes_over(fixed):
    def inner(x):
        return x

    def outer(x):
        return inner(x)

    fixed.add(outer)
    before = inner.__code__
    inner.__code__ = (lambda x: None).__code__
    (change,) = fixed.changes()
    assert change.text.endswith("inner was replaced")
    fixed.restore()
    assert inner.__code__ is before


def test_a_stream_that_stays_switched_is_a_setting(monkeypatch):
    """Where a GPU is in use; here torch's answers are made up."""
    (setting,) = [one for one in settings() if one.name == "the current stream of a GPU"]
    assert setting.read() is None  # no GPU is in use
    now = ["default"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.__setitem__(0, stream))
    before, now[0] = setting.read(), "mine"
    assert (before, setting.read()) == ("default", "mine")
    setting.write(before)
    assert now == ["default"]


AUDIT = """
import sys
from ffncli.bench.timing.cheating.settings import settings

(setting,) = [one for one in settings() if one.name == "an audit hook"]
assert not setting.read()
sys.addaudithook(lambda event, arguments: None)
assert setting.read()
"""


def test_an_audit_hook_is_noticed_by_its_time():
    """In another process, since it cannot be removed."""
    subprocess.run([sys.executable, "-c", AUDIT], check=True)


def test_tools_that_monitor_python_are_a_setting(monkeypatch):
    """From Python 3.12 on; here its answers are made up."""
    (setting,) = [one for one in settings() if one.name == "a monitor of Python's events"]
    tools, freed = {2: ("theirs", 8)}, []

    class Monitoring:
        get_tool = staticmethod(lambda number: tools.get(number, (None, 0))[0])
        get_events = staticmethod(lambda number: tools[number][1])
        set_events = staticmethod(lambda number, events: None)
        free_tool_id = staticmethod(freed.append)

    monkeypatch.setattr(sys, "version_info", (3, 12))
    monkeypatch.setattr(sys, "monitoring", Monitoring, raising=False)
    before = setting.read()
    tools[4] = ("mine", 2)
    assert (before, setting.read()) == ((("theirs", 8),), (("theirs", 8), ("mine", 2)))
    setting.write(before)
    assert freed == [4]
