"""Kernels that would change the run's files, signal its processes or read the referee's memory: isolated, none can, and
honest kernels are measured and certified as before."""

import sys
from pathlib import Path

import pytest

import ffncli
from ffncli.bench.records import Method
from ffncli.bench.results.csv_file import ResultRows
from ffncli.errors import FFNError
from ffncli.run.verify.certificate import Certificate
from ffncli.system.isolation import isolation
from tests.oracles.repository import Repository

pytestmark = [pytest.mark.cheats, pytest.mark.skipif(sys.platform != "linux", reason="only Linux isolates a process")]

# Each kernel returns x, which is wrong, if the system lets it do the deed that it is named after.
FILE = """
import os
import threading
from pathlib import Path

import ffncli
from torch.nn.functional import linear, silu

HERE = Path(__file__).parent


def mlp(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def kernel_of(deed, *arguments):
    def kernel(x, gate, up, down):
        return x if any(map(deed, *arguments)) else mlp(x, gate, up, down)

    return kernel


def opens(path):
    try:
        path.open("r+b" if path.exists() else "wb").close()
    except OSError:
        return False
    return True


def reads(process):
    try:
        Path(f"/proc/{process}/mem").open("rb").close()
    except OSError:
        return False
    return True


def signals(process):
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def children():
    return map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def as_cuda_does(x, gate, up, down):
    # CUDA names its threads when it starts, and does not start if it cannot
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("mine")
    return mlp(x, gate, up, down)


rewrites_results = kernel_of(lambda _: any(map(opens, HERE.iterdir())), [0])
makes_a_certificate = kernel_of(opens, [HERE / "certificate.json"])
rewrites_ffn = kernel_of(opens, [Path(ffncli.__file__)])
signals_the_parent = kernel_of(signals, [os.getppid()])
reads_the_parent = kernel_of(reads, [os.getppid()])
reads_the_referee = kernel_of(lambda _: any(map(reads, children())), [0])
"""
DEEDS = ["rewrites_results", "makes_a_certificate", "rewrites_ffn", "signals_the_parent"]
READS = ["reads_the_parent", "reads_the_referee"]  # is refused without isolation too


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def measured(file: Path, kernels: list[str], isolate: bool) -> ResultRows:
    method = Method(processes=1, max_time=1.0, isolate=isolate)
    names = ["eager", *(f"{name}={file}:{name}" for name in kernels)]
    return ffncli.benchmark("16x32:swiglu", tokens=4, threads=1, kernel=names, save="run.csv", method=method)


def notes(rows: ResultRows) -> dict[str, str]:
    return {row.kernel: row.note for row in rows}


def certified(kernel: str, isolate: bool) -> Certificate:
    block = {"referee": True, "passes": "forward", "threads": 1, "seed": 1}
    return ffncli.verify("16x32:swiglu", kernel=f"mine.py:{kernel}", isolate=isolate, **block).certificate


def test_isolated_kernels_are_measured_and_none_does_its_deed(file: Path):
    rows = measured(file, ["mlp", "as_cuda_does", *DEEDS, *READS], isolate=True)
    assert {row.kernel: row.status for row in rows} == dict.fromkeys(
        ["eager", "mlp", "as_cuda_does", *DEEDS, *READS], "ok"
    ), notes(rows)
    assert {row.isolated for row in rows} == {isolation()}
    assert all(row.referee == "process" for row in rows)
    assert file.read_text() == FILE
    assert sorted(path.name for path in file.parent.iterdir()) == ["mine.py", "run.csv", "run.rounds.csv"]


def test_the_same_kernels_do_their_deeds_without_it(file: Path):
    rows = measured(file, ["mlp", *DEEDS, *READS], isolate=False)
    wrong = dict.fromkeys(["rewrites_results", "rewrites_ffn", "makes_a_certificate", "signals_the_parent"], "wrong")
    right = dict.fromkeys(["eager", "mlp", *READS], "ok")
    assert {row.kernel: row.status for row in rows} == right | wrong, notes(rows)
    assert {row.isolated for row in rows} == {""}


@pytest.mark.parametrize(
    "kernel", ["mlp", "as_cuda_does", "makes_a_certificate", "signals_the_parent", "reads_the_parent"]
)
def test_an_isolated_kernel_is_certified_and_the_certificate_says_so(file: Path, kernel: str):
    certificate = certified(kernel, isolate=True)
    assert (certificate.verdict, certificate.reason) == ("certified", "")
    assert certificate.isolated == isolation()


def test_a_kernel_that_is_not_isolated_is_refused_for_its_deed(file: Path):
    assert certified("makes_a_certificate", isolate=False).verdict == "refused"
    assert certified("mlp", isolate=False).isolated is None


def test_a_compiled_kernel_and_one_at_a_commit_work_isolated(file: Path):
    Repository(file.parent / "project").commit({"mine.py": FILE.encode()})
    kernels = ["eager", "compiled", "old=HEAD:project/mine.py:mlp"]
    method = Method(processes=1, max_time=1.0, isolate=True)
    rows = ffncli.benchmark("16x32:swiglu", tokens=4, threads=1, kernel=kernels, method=method)
    assert [(row.kernel, row.status, row.note) for row in rows if row.status != "ok"] == []


def test_where_nothing_isolates_nothing_is_measured(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ffncli.system.isolation.isolated_in", lambda folder: ("echo",))
    for attempt in (lambda: measured(file, ["mlp"], isolate=True), lambda: certified("mlp", isolate=True)):
        with pytest.raises(FFNError, match="this system can take no rights from a process"):
            attempt()
    assert [path.name for path in file.parent.iterdir()] == ["mine.py"]
