"""Two runs on a simulated GPU, one of them with a kernel that waits: replays are not compared with launches."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ffncli.bench.records import Case, Job, Method
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.csv_file import read_rows
from ffncli.bench.suite import new_run
from ffncli.bench.timing import arms
from ffncli.bench.timing import measure_case as measuring
from ffncli.bench.timing.gpu.cuda_graphs import Launching
from ffncli.bench.timing.measure_case import measure_case
from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import choices
from tests.bench.fake_cuda import FakeCuda, FakeGraph
from tests.bench.faulty_cuda import LaunchingClock
from tests.bench.timing.test_measure_case import ROOF, Counters

CASE = Case("8x16:relu", "8x16:relu", FFNSpec(8, 16), tokens=4)
WAITS = """
from tests.bench.timing import test_launches_compared
def mlp(x, up, down, up_bias, down_bias):
    test_launches_compared.CURRENT[0].wait()
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
        method = Method(processes=2, block=1e-3, max_time=0.0, placements=2, rounds=2, launch=launch)
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
