"""The referee as a process: it gives what a local one gives, reveals no reference, and ends with its worker."""

import json
import math
import os
import signal
import socket
import sys
import time
from dataclasses import is_dataclass
from multiprocessing import Pipe

import pytest
import torch

from ffncli.bench.launch import report_on
from ffncli.bench.records import Case, Job, Method
from ffncli.bench.referee import process as module
from ffncli.bench.referee.problem import GRADIENT, OUTPUT, CallSample, Problem, seed_of
from ffncli.bench.referee.process import RefereeGone, clocks_apart, referee_process
from ffncli.bench.referee.rulings import Rulings
from ffncli.bench.referee.wire import packed, receive, send, unpacked
from ffncli.bench.timing.arms import moment_of
from ffncli.bench.verdict import Error, Ruling, WrongCode
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is a process on Linux only")

SPECS = {"gated": FFNSpec(8, 12, "swiglu"), "mixture": FFNSpec(8, 12, "swiglu", moe=MoE(4, 2))}


def job_of(spec: FFNSpec, passes: str = "forward", dtype: str = "fp32", **method) -> Job:
    case = Case("s", "s", spec, 6, dtype=dtype, passes=passes)  # type: ignore[arg-type]
    return Job(1, (case,), (), None, Method(**method))


@pytest.fixture
def started():
    """Starts a referee for a job; all end with the test."""
    open_, lines = [], []

    def start(job: Job, begin: bool = True):
        ours, theirs = Pipe()
        lines.extend((ours, theirs))
        manager = referee_process(job, theirs)
        referee = manager.__enter__()
        open_.append(manager)
        if referee and begin:
            referee.begin(job.cases[0])
        return referee

    torch.set_num_threads(1)  # a pool of threads would not be there in the child
    yield start
    for manager in open_:
        manager.__exit__(None, None, None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
@pytest.mark.parametrize("spec", SPECS)
def test_it_answers_as_a_problem_with_its_references_does(started, spec, passes, dtype):
    job = job_of(SPECS[spec], passes, dtype)
    case, generator = job.cases[0], torch.Generator().manual_seed(1)
    local, remote = Problem.of(case, seed_of(case, job)), started(job)
    asking, rulings = Problem.of(case, seed_of(case, job), remote), Rulings(local)
    assert all(torch.equal(asking.weights[name], local.weights[name]) for name in local.weights)
    for number in (1, 2, 12345):
        here, there = local.inputs(number), asking.inputs(number)
        assert there.out is None
        assert there.grads is None
        assert there.x.dtype == here.x.dtype
        assert torch.equal(there.x, here.x)
        for name in ("rows", "g"):
            ours, theirs = getattr(here, name), getattr(there, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
        assert (there.remark, there.number) == (here.remark, here.number)
        given = {OUTPUT: here.out.to(local.dtype)}
        given |= {GRADIENT + name: (g * 1.01).to(local.dtype) for name, g in (here.grads or {}).items()}
        ours, theirs = rulings.ruling("mine", number, given), asking.rules.ruling("mine", number, given)
        assert theirs == ours
        assert bool(ours.wrong) == (passes == "forward+backward" and dtype != "bf16")  # a gradient is off by 1 %
    x, out = (torch.randn(2, 8, generator=generator).to(local.dtype) for _ in range(2))
    g, gradient = (x, out) if passes != "forward" else (None, None)
    samples = [CallSample("mine", x, out, g, gradient), CallSample("eager", out, x, g, gradient)]
    assert asking.sampled(samples) == local.sampled(samples)
    assert asking.sampled([]) == []


def tensors_in(value) -> list[torch.Tensor]:
    """Every tensor of an answer, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_dataclass(value):
        value = vars(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for one in inside for tensor in tensors_in(one)]


def test_nothing_that_it_sends_is_a_reference(started, monkeypatch):
    """Of every message of a whole verification."""
    received, receive = [], module.receive

    def noted(connection):
        value = receive(connection)
        received.extend(tensors_in(value))
        return value

    job = job_of(SPECS["gated"])
    remote = started(job)
    monkeypatch.setattr(module, "receive", noted)
    local = Problem.of(job.cases[0], seed_of(job.cases[0], job))
    asking = Problem.of(job.cases[0], seed_of(job.cases[0], job), remote)
    asking.inputs(2)
    asking.rules.ruling("mine", 2, {OUTPUT: local.inputs(2).out.float()})
    asking.sampled([CallSample("mine", local.first.x[:2], local.first.x[:2])])
    assert [t.shape for t in received] == [local.first.x.shape]
    assert torch.equal(received[0], local.inputs(2).x)


def test_what_it_raises_is_raised_here(started):
    job = job_of(FFNSpec(2**30, 2**30))
    with pytest.raises(FFNError, match="of memory is free"):
        started(job).inputs(1)
    remote = started(job_of(SPECS["gated"]))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        remote.sampled([CallSample("mine", torch.zeros(3, 3), torch.zeros(3, 3))])
    assert remote.inputs(1).x.shape == (6, 8)  # and it goes on


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "was killed"), (signal.SIGILL, "illegal instruction")])
def test_its_death_is_an_error_of_the_machine(started, number, words):
    remote = started(job_of(SPECS["gated"]))
    remote.inputs(1)
    os.kill(remote._pid, number)
    with pytest.raises(RefereeGone, match=words):
        remote.inputs(2)
    assert remote.gone
    with pytest.raises(RefereeGone):
        remote.begin(job_of(SPECS["gated"]).cases[0])


def test_it_ends_when_the_line_is_closed_and_is_reaped(started):
    remote = started(job_of(SPECS["gated"]))
    remote.close()
    with pytest.raises(ProcessLookupError):
        os.kill(remote._pid, 0)


def test_its_clock_is_compared_with_the_worker_s(started):
    remote = started(job_of(SPECS["gated"]))
    remote.clock_started()
    start = time.monotonic()
    time.sleep(0.15)
    remote.clock_stopped()
    passed = time.monotonic() - start
    assert remote.clock_remark(passed) == ""
    assert "by the referee's" in remote.clock_remark(passed / 3)


@pytest.mark.parametrize("late", ["question", "answer"])
def test_the_clocks_agree_where_a_process_waits_for_a_processor_between_their_readings(started, late):
    remote = started(job_of(SPECS["gated"]))

    waits = iter([0.4, 0.3])

    def delayed():
        time.sleep(next(waits, 0) if late == "question" else 0)
        remote.clock_started()
        time.sleep(next(waits, 0) if late == "answer" else 0)

    start = moment_of(delayed)
    time.sleep(0.15)
    seconds = moment_of(remote.clock_stopped) - start
    assert remote.clock_remark(seconds) == ""
    assert "by the referee's" in remote.clock_remark(seconds / 3)


@pytest.mark.parametrize(
    ("worker", "referee", "wrong"),
    [
        (1.0, 1.0, False), (0.01, 0.09, False), (1.0, 1.04, False), (10.0, 10.6, True), (1.0, 2.0, True),
        (2.0, 1.0, True), (0.0, 1.0, True), (0.0, 0.05, False),
    ],
)  # fmt: skip
def test_clocks_may_differ_by_a_twentieth(worker, referee, wrong):
    assert bool(clocks_apart(worker, referee)) == wrong


def test_it_has_no_business_with_steps_or_on_a_gpu(started):
    assert started(job_of(SPECS["gated"], by_step=True)) is None
    job = job_of(SPECS["gated"])
    from dataclasses import replace

    assert started(replace(job, cases=(replace(job.cases[0], device="cuda"),))) is None


def test_weights_that_fit_once_are_refused_before_they_are_drawn(monkeypatch):
    """The worker and its referee draw at the same time: each alone would find enough memory."""
    job = job_of(SPECS["gated"])
    size = 4 * 3 * 8 * 12
    for free, fits in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr("ffncli.run.engine.weights.available_memory", lambda root, free=free: free)
        answers = module._Answers(job)
        if fits:
            answers.to("begin", [job.cases[0].key])
            continue
        with pytest.raises(FFNError, match="in the worker and in its referee, would need"):
            answers.to("begin", [job.cases[0].key])


def test_samples_wait_in_their_line_until_they_are_ruled_on(started, monkeypatch):
    """Also more than fit, and one that is larger than the line: of each block the last one counts."""
    job = job_of(SPECS["gated"])
    remote, local = started(job), Problem.of(job.cases[0], seed_of(job.cases[0], job))
    x, out = local.first.x[:2], local.first.out[:2].float()
    asked, ask = [], type(remote)._ask
    monkeypatch.setattr(
        type(remote), "_ask", lambda self, question, *more: (asked.append(question), ask(self, question, *more))[1]
    )
    line = remote._samples.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)  # the system decides
    samples = 1 + line // len(packed(CallSample("mine", x, out)))
    for number in range(samples):
        remote.show(CallSample("mine", x, out + (number < samples - 1), block=number % 2))
    remote.show(CallSample("mine", x, out, block=samples % 2))
    assert 0 < asked.count("read_samples") < samples / 4
    assert not remote.timed()["mine"].wrong
    remote.show(CallSample("mine", x.repeat(200_000, 1), out.repeat(200_000, 1) + 1))
    assert asked[-1] == "show"
    assert remote.timed()["mine"].wrong
    assert remote.timed() == {}


def test_it_reports_to_the_worker_s_parent_over_a_line_that_the_worker_has_closed():
    job = job_of(SPECS["gated"])
    (ours, theirs), (parent, reports) = Pipe(), Pipe()
    local = Problem.of(job.cases[0], seed_of(job.cases[0], job))
    with ours, parent, referee_process(job, theirs, reports) as remote:
        assert reports.closed
        remote.begin(job.cases[0])
        remote.declare("mine", "int8")
        remote.ruling("mine", 1, {OUTPUT: local.first.out.float() * 2})
        remote.accuse("other", "patched-clock: half")
        remote.report()
        report = report_on(parent, job.cases[0].key)
    found = {finding.outcome.kernel: finding.outcome for finding in report.findings}
    answers = {finding.outcome.kernel: finding.answers for finding in report.findings}
    assert (found["mine"].computes, answers["mine"]) == ("int8", 1)
    assert found["mine"].note.startswith("its output is off by 1")
    assert found["other"].note == "patched-clock: half"


@pytest.mark.parametrize(
    ("question", "arguments"),
    [
        ("report_on", []),
        ("_of", ["mine"]),
        ("__init__", []),
        ("users", []),
        ("limit", [3]),
        ("accuse", ["mine"]),
        ("accuse", ["mine", None]),
        ("ruling", ["mine", 1, {"out": "text"}]),
        ("ruling", ["mine", 1, [torch.zeros(1)]]),
        ("show", ["mine"]),
        ("sampled", [[torch.zeros(1)]]),
    ],
)
def test_it_answers_its_own_questions_alone_and_only_if_they_are_whole(started, question, arguments):
    remote = started(job_of(SPECS["gated"]))
    with pytest.raises(RuntimeError):
        remote._ask(question, *arguments)
    assert remote.limit("mine") > 0  # and it goes on


def test_a_value_crosses_the_line_as_it_is():
    x = torch.arange(6.0).reshape(2, 3)
    value = {
        "a": [None, True, 3, math.inf, "text"],
        "b": Ruling("off", WrongCode.STALE_MEMORY, Error(math.inf, 0.5, 2)),
    }
    ours, theirs = Pipe()
    send(ours, [value, CallSample("mine", x, x.bfloat16(), block=3), x[:, :0]])
    there, sample, empty = receive(theirs)
    assert there == value
    assert empty.shape == (2, 0)
    for one in (sample, unpacked(packed(sample))):
        assert (one.kernel, one.block, one.g) == ("mine", 3, None)
        assert torch.equal(one.x, x)
        assert torch.equal(one.out, x.bfloat16())


@pytest.mark.parametrize(
    "plain",
    [
        {"CallSample": {"kernel": "mine", "x": 3, "out": 4}},
        {"Ruling": {"wrong": 3}},
        {"Ruling": {"code": "no-such-code"}},
        {"Case": {}},
        {"tensor": ["torch.uint8", [3]]},
    ],
)
def test_what_is_no_such_record_is_refused(plain):
    ours, theirs = Pipe()
    ours.send_bytes(json.dumps(plain).encode())
    with pytest.raises((TypeError, ValueError, KeyError)):
        receive(theirs)
