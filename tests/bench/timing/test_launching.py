"""The arms of a GPU's case: they replay graphs of their own copies, and what they give is what a plain call gives.

On a processor, with a simulated torch.cuda: a replay hands out what was computed when it was captured.
"""

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Job, Method
from ffncli.bench.referee import process
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.suite import new_run
from ffncli.bench.timing import arms, worker
from ffncli.bench.timing import measure_case as measuring
from ffncli.bench.timing.arms import Arms, kernels_by_label, launching_of, twin_of
from ffncli.bench.timing.gpu.cuda_graphs import Launching, SpoiledCapture
from ffncli.bench.timing.measure_case import measure_case
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.bench.timing.placement import Caching
from ffncli.bench.timing.rounds import Plan, measure
from ffncli.bench.verdict import WrongCode
from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import choices
from tests.bench.fake_clock import FakeCounters
from tests.bench.fake_cuda import FakeCuda, FakeGraph
from tests.bench.faulty_cuda import LaunchingClock
from tests.bench.timing.test_measure_case import ROOF, Counters

SPEC = FFNSpec(8, 16, "silu", gated=True)


INNER = {"eager": 6, "packed": 6, TWIN: 6, GEMM: 12, ANCHOR: 1}


def arms_of(cuda, passes="forward", copies=3, small=True, mode="warm"):
    problem = refereed(Problem.of(Case("8x16:swiglu", "8x16:swiglu", SPEC, 4, passes=passes), 1))
    kernels = kernels_by_label(choices(["eager,packed"]), problem.steps, SPEC)
    draw = random.Random(0)
    kernels = [PlacedKernel(name, build_kernel(kernel, problem), problem, draw) for name, kernel in kernels.items()]
    launching = Launching("auto", small, cuda=cuda)
    return Arms(problem, kernels, twin_of(kernels[0], problem, draw), Caching(mode, copies), 1 << 20, launching)


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_a_replay_makes_the_calls_of_a_block_on_all_copies_in_turn(passes, monkeypatch):
    """An output of the plain calls keeps their stream's part of the gradients' graph, which no capture may wait for."""
    arms, outputs = arms_of(FakeCuda(), passes), set()

    def begun(graph, pool=None, begin=FakeGraph.capture_begin):
        outputs.update(placed.out for placed in (*arms.kernels, arms.twin))
        begin(graph, pool)

    with torch.enable_grad() if passes != "forward" else torch.inference_mode():
        assert {arm.calls for arm in arms.place(0)} == {1}
        for arm in arms.by_name.values():
            arm.call()  # plainly, as before every capture
        called = {placed.name: counted(placed) for placed in (*arms.kernels, arms.twin)}
        monkeypatch.setattr(FakeGraph, "capture_begin", begun)
        by_name = {arm.name: arm for arm in arms.captured(INNER)}
        assert outputs == {None}
        assert (arms.launching.launch, arms.launching.note) == ("graphs", "")
        assert {name: arm.calls for name, arm in by_name.items()} == INNER
        for placed in (*arms.kernels, arms.twin):
            assert called[placed.name][-6:] == [0, 1, 2, 0, 1, 2]
            last = flat(placed.on_copy(placed.copies[2]))
            out = by_name[placed.name].call()
            assert by_name[placed.name].call() is out is placed.out
            torch.testing.assert_close(flat(out), last, rtol=0, atol=0)
        arms.inspect()
    assert not arms.wrong


def counted(placed):
    """On which copies it is called from now on, by number."""
    numbers, on_copy = [], placed.on_copy

    def call(copy):
        numbers.append(next(at for at, one in enumerate(placed.copies) if one is copy))
        return on_copy(copy)

    placed.on_copy = call
    return numbers


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else [out[0], *out[1]]


def test_where_caches_are_emptied_before_every_call_a_graph_is_one_call():
    arms = arms_of(FakeCuda(), copies=1, mode="flush")
    with torch.inference_mode():
        arms.place(0)
        calls = {arm.name: arm.calls for arm in arms.captured(INNER)}
    assert set(calls.values()) == {1}


def test_a_large_case_is_called_as_before():
    arms = arms_of(cuda := FakeCuda(), small=False)
    with torch.inference_mode():
        arms.place(0)
        by_name = {arm.name: arm for arm in arms.captured(INNER)}
        assert by_name["eager"].call() is not by_name["eager"].call()
        assert {arm.calls for arm in by_name.values()} == {1}
    assert (arms.launching.launch, arms.launching.note) == ("plain", "")
    assert not cuda.log


def test_each_placement_is_captured_anew():
    arms = arms_of(FakeCuda())
    with torch.inference_mode():
        found = []
        for number in range(2):
            arms.place(number)
            found.append({arm.name: arm.call for arm in arms.captured(INNER)})
    first, second = found
    assert all(first[name] is not second[name] for name in ("eager", "packed", TWIN, GEMM))
    assert arms.kernels[0].call is second["eager"]
    assert arms.by_name["packed"].call is second["packed"]


class Steady:
    """A clock by which every call of a kernel takes 10 µs; it makes the calls."""

    def __init__(self, arms):
        self.arms, self.wall, self.timed = arms, 0.0, []

    def now(self):
        return self.wall

    def time(self, call, inner, before=None):
        for _ in range(inner):
            call()
        calls = next((arm.calls for arm in self.arms.by_name.values() if arm.call is call), 1)
        self.timed.append((inner, calls))
        self.wall += inner * calls * 1e-5
        return inner * calls * 1e-5


def test_a_block_is_one_replay_and_its_calls_are_counted():
    arms = arms_of(FakeCuda())
    clock = Steady(arms)
    plan = Plan("eager", ("eager", "packed"), 1e-4, placements=2, rounds=2, target=0.1, budget=0.001, seed=0)
    with torch.inference_mode():
        found = measure(0, "case", arms.place, clock, FakeCounters(), plan, arms.captured)
    kernels = [block for block in found.blocks if block.kernel != ANCHOR]
    assert {block.inner for block in kernels} == {10}  # calls that last 100 µs
    assert all(block.per_call == pytest.approx(1e-5) for block in kernels)
    assert [inner for inner, calls in clock.timed if calls == 10] == [1] * 2 * len(kernels)  # one leads in


def cheat(cuda, compute):
    """Computes once in every graph: all calls of a block have the same x."""
    kept = []

    def call(x, params):
        if cuda.capturing is None:
            return compute(x, params)
        if not kept or kept[0] is not cuda.capturing:
            kept[:] = [cuda.capturing, compute(x, params)]
        return kept[1].clone()

    return call


@pytest.mark.parametrize(("passes", "honest"), [("forward", False), ("forward", True), ("forward+backward", True)])
def test_an_answer_kept_from_call_to_call_of_a_graph_is_found(passes, honest):
    cuda = FakeCuda()
    arms = arms_of(cuda, passes)
    eager, packed = arms.kernels
    compute = packed.built.compute if honest else cheat(cuda, packed.built.compute)
    packed.built = replace(packed.built, kernel=replace(packed.built.kernel, origin="mine.py"), compute=compute)
    with torch.enable_grad() if passes != "forward" else torch.inference_mode():
        for number in range(3):
            arms.place(number)
            arms.captured(INNER)
        arms.inspect()
    assert {name: wrong.code for name, wrong in arms.wrong.items()} == (
        {} if honest else {"packed": WrongCode.WRONG_WHEN_TIMED}
    )
    assert eager.name not in arms.wrong


def test_every_captured_call_is_judged():
    """One wrong answer of several is found, whichever it is."""
    arms = arms_of(FakeCuda())
    packed = arms.kernels[1]
    shown = []
    arms.problem.rules.show = shown.append
    packed.built = replace(packed.built, kernel=replace(packed.built.kernel, origin="mine.py"))
    with torch.inference_mode():
        arms.place(0)
        arms.captured(INNER)
    blocks = [sample.block for sample in shown if sample.kernel == "packed"]
    assert len(blocks) >= 2
    assert len(set(blocks)) == len(blocks)
    assert max(blocks) < 0


class Line:
    """A connection that has one job, and what was sent over it."""

    def __init__(self, job):
        self.job, self.sent = job, []

    def recv(self):
        return self.job

    def send(self, message):
        self.sent.append(message)


def test_a_spoiled_capture_is_the_last_thing_that_a_worker_says(monkeypatch):
    def spoil(self, inner):
        raise SpoiledCapture("it waits", "packed")

    monkeypatch.setattr(Arms, "captured", spoil)
    monkeypatch.setattr(process, "referee_process", lambda *_: nullcontext(None))
    cases = tuple(Case("8x16:swiglu", "8x16:swiglu", SPEC, tokens) for tokens in (1, 2))
    line = Line(Job(0, cases, choices(["eager,packed"]), "eager", Method(block=1e-5, max_time=0.1)))
    worker.serve(line, None)
    assert [message for message in line.sent if message[0] != "stage"] == [
        ("ready",), ("began", cases[0].key), ("spoiled", "packed", "it waits"),
    ]  # fmt: skip


def test_which_cases_are_replayed_is_what_was_asked_for_and_found_before():
    small = Case("8x16:swiglu", "8x16:swiglu", SPEC, 4, device="cuda")
    large = Case("large", "large", FFNSpec(4096, 11008, "silu", gated=True), 4096, device="cuda")

    def launch(case, asked="auto", **more):
        return launching_of(case, Job(0, (case,), (), None, Method(launch=asked), **more)).launch

    assert [launch(small), launch(large)] == ["graphs", "plain"]
    assert [launch(small, "plain"), launch(large, "graphs")] == ["plain", "graphs"]
    found = {"plain": ((small.key, "mine cannot be captured: it waits"),)}
    assert [launch(small, **found), launch(small, "graphs", **found)] == ["plain", "graphs"]
    assert launching_of(replace(small, device="cpu"), Job(0, (), (), None, Method())) is None


# --- a case launched in two ways --------------------------------------------------------------------------------------


CASE = Case("8x16:relu", "8x16:relu", FFNSpec(8, 16), tokens=4)
WAITS = """
from tests.bench.timing import test_launching
def mlp(x, up, down, up_bias, down_bias):
    test_launching.CURRENT[0].wait()
    return (x @ up.T + up_bias).relu() @ down.T + down_bias
"""
CURRENT = []


class Recorded(TorchDispatchMode):
    """What torch computes inside, to be computed again into the same tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def again(self):
        for func, args, kwargs, out in self.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                old.copy_(new)


class ComputingGraph(FakeGraph):
    def capture_begin(self, pool=None):
        super().capture_begin(pool)
        self.recorded = Recorded()
        self.recorded.__enter__()

    def capture_end(self):
        self.recorded.__exit__(None, None, None)
        super().capture_end()

    def replay(self):
        super().replay()
        self.recorded.again()


class ComputingCuda(FakeCuda):
    def CUDAGraph(self):
        return ComputingGraph(self)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of these kernels into a file of that name, on a simulated GPU of its own."""

    def launching(case, job):
        return Launching(job.method.launch, True, dict(job.plain).get(case.key, ""), CURRENT[0])

    monkeypatch.setattr(arms, "launching_of", launching)
    monkeypatch.setattr(measuring, "_roof", lambda *_: ROOF)
    monkeypatch.setattr(measuring, "gpu_probe", lambda device: (None, ""))
    monkeypatch.setattr(measuring, "neighbours", lambda device: "")

    def measured(name, kernels, launch="auto"):
        method = Method(processes=2, block=1e-3, max_time=1.0, placements=2, rounds=2, launch=launch)
        request = BenchRequest((CASE,), choices([kernels]), "eager", method)
        path = tmp_path / f"{name}.csv"
        with new_run(path, request) as journal:
            for process in range(2):
                CURRENT[:] = [ComputingCuda()]
                job = Job(process, (CASE,), request.kernels, "eager", method)
                journal.add(measure_case(CASE, job, LaunchingClock(CURRENT[0]), Counters()))
            journal.finish()
        return path

    return measured


def test_a_replayed_baseline_is_not_compared_with_a_launched_one(run, tmp_path, call):
    """One more kernel, which waits, makes every arm of its run a launch: `eager` of both runs is not the same."""
    (tmp_path / "mine.py").write_text(WAITS)
    kernels = f"eager,module,mine={tmp_path}/mine.py:mlp"
    alone, beside, plain = run("alone", "eager,module"), run("beside", kernels), run("plain", "eager", launch="plain")
    launched = [{(row.status, row.launch) for row in read_rows(path)} for path in (alone, beside, plain)]
    assert launched == [{("ok", "graphs")}, {("ok", "plain")}, {("ok", "plain")}]
    why = "no CUDA graphs, as mine cannot be captured: called a synchronizing CUDA operation"
    assert {row.note for row in read_rows(beside)} >= {why}
    code, out, err = call("compare", str(alone), str(beside))
    assert (code, out) == (2, "")
    assert err == (
        "error: BASE and NEW come from different environments: launch: graphs in BASE, plain in NEW; measure both with "
        "the same --launch, or compare without a gate: --allow-mismatch\n"
    )
    assert call("compare", str(alone), str(beside), "--fail-if-slower", "3%")[0] == 2
    assert call("compare", str(plain), str(beside))[0] == 0
