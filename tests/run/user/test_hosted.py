"""The process that judges, against hosts that die, hang, or answer what no host does; none of them loads torch."""

import os
import sys

import pytest
import torch

from ffncli.block.recipe import FFNSpec, steps
from ffncli.errors import FFNError
from ffncli.kernels.choice import parse
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.user.hosted import KernelFailure, TimeLimits, hosted, same_bits
from tests.oracles.processes import expect_end

pytestmark = pytest.mark.cheats

SPEC = FFNSpec(4, 8, "swiglu")
STEPS = kernel_steps(steps(SPEC))
WEIGHTS = {"gate.weight": torch.ones(8, 4), "up.weight": torch.ones(8, 4), "down.weight": torch.ones(4, 8)}
HOST = """
import json, mmap, os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
line, memory = Connection(int(sys.argv[1])), int(sys.argv[2])

def answer(**what):
    line.send_bytes(json.dumps(what).encode())

line.recv_bytes()
answer(ready=True)
line.recv_bytes()
answer(name="mine.py:mlp", refusal=None)
line.recv_bytes()
"""


def failure(then: str, limits: TimeLimits | None = None) -> KernelFailure:
    """What comes of a call where the host goes on like that."""
    with hosted(
        parse("eager"), threads=1, limits=limits or TimeLimits(call=5.0), command=(sys.executable, "-c", HOST + then)
    ) as host:
        assert host.load(SPEC, STEPS, WEIGHTS, torch.float32, 3) is None
        assert host.name == "mine.py:mlp"
        with pytest.raises(KernelFailure) as error:
            host.call(torch.ones(3, 4))
    with pytest.raises(ProcessLookupError):
        os.kill(host.process.pid, 0)
    return error.value


@pytest.mark.parametrize(
    ("then", "words", "gone"),
    [
        ("os._exit(0)", "its process ended with exit code 0: the kernel's code ended it", True),
        ("os._exit(3)", "its process ended with exit code 3", True),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by signal 11 (segmentation fault)", True),
        ("line.send_bytes(b'[1]')", "unexpected reply from its process", True),
        ("line.send_bytes(b'no JSON')", "unexpected reply from its process", True),
        ("answer(error='ValueError: \\x1b[2J', hint='')", "ValueError: \\x1b[2J", False),
        ("answer(type='list')", "returns a list, not a tensor", False),
        ("answer(shape=[4, 3], dtype='float32')", "returns shape [4, 3], expected [3, 4]", False),
        ("answer(shape=[3, 4], dtype='float64')", "returns float64, expected float32", False),
        ("answer()", "returns shape None, expected [3, 4]", False),
    ],
)
def test_what_a_host_may_do(then, words, gone):
    error = failure(then)
    assert (str(error), error.gone) == (words, gone)


def test_a_call_that_does_not_return_is_ended_with_all_that_it_started(tmp_path):
    pid = tmp_path / "pid"
    then = f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    error = failure(then, TimeLimits(call=0.5))
    assert (str(error), error.gone) == ("did not return within 500 ms (--call-time allows more)", True)
    expect_end(int(pid.read_text()), 5)


def test_an_output_that_is_not_written_is_nan_and_what_is_written_to_is_seen():
    write = """
import struct
view = mmap.mmap(memory, 0)
at = view.find(struct.pack("12f", *[0.5] * 12))  # x
view[at : at + 4] = struct.pack("f", 9.0)
view[0:4] = struct.pack("f", 9.0)  # the first weight
answer(shape=[3, 4], dtype="float32")
line.recv_bytes()
answer()
"""
    with hosted(parse("eager"), threads=1, command=(sys.executable, "-c", HOST + write)) as host:
        host.load(SPEC, STEPS, WEIGHTS, torch.float32, 3)
        assert host.threads() == 1
        assert host.call(torch.full((3, 4), 0.5)).isnan().all()
        host.inspect()
    assert host.changed == {"its input x", "the weight gate.weight"}


def test_a_file_that_cannot_be_loaded_is_an_error_of_its_user():
    bad = HOST.replace("answer(name=", "answer(error='mine.py has no mlp', hint='it has one', name=")
    with (
        hosted(parse("eager"), threads=1, command=(sys.executable, "-c", bad)) as host,
        pytest.raises(FFNError, match=r"mine\.py has no mlp; it has one"),
    ):
        host.load(SPEC, STEPS, WEIGHTS, torch.float32, 3)


def test_bits():
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert same_bits(zero, zero.clone())
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert same_bits(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16))


def test_what_a_kernel_prints_is_shown_until_it_is_enough(capfd):
    """On both of its lines; more than a pipe holds, and the kernel does not wait for anybody to read it."""
    then = "print('one', flush=True); os.write(2, b'y' * 300_000); answer(type='list')"
    assert str(failure(then)) == "returns a list, not a tensor"
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"one\n{'y' * ((64 << 10) - 4)}\nnote: the output of eager was cut after 64 KiB\n"
