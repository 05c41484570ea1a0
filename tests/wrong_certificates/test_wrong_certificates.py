"""The referee refuses kernels that know its numbers or its process; a certificate names all that a kernel's code
read."""

import hashlib
import json
import os
import re
import sys
from dataclasses import asdict
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import torch

import ffncli
from ffncli.bench.records import Method
from ffncli.bench.request.grid import Grid, build_request
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels.choice import parse
from ffncli.run.user.hosted import hosted
from ffncli.run.verify.checks import drawn, elsewhere, judged
from ffncli.run.verify.checks.trial import KernelTrial
from tests.run.verify.test_referee import block_of

pytestmark = pytest.mark.cheats

FILE = Path(__file__).with_name("kernels.py")
KERNELS = re.findall(r"^# (\w+)\n(?:def )?(\w+)", FILE.read_text(), re.M)
CHECKS = {
    "state": judged.state,
    "drawn": drawn.drawn,
    "calls": drawn.calls,
    "elsewhere": elsewhere.elsewhere,
    "weights": judged.weights,
}


@pytest.fixture(scope="module")
def host():
    os.environ["FFN_TEST_EXACT"] = "1"
    try:
        with hosted(parse(f"{FILE}:honest"), threads=1) as running:
            yield running
    finally:
        del os.environ["FFN_TEST_EXACT"]


def test_the_corpus_is_read():
    assert len(KERNELS) == 20


@pytest.mark.parametrize(("check", "name"), KERNELS, ids=[name for _, name in KERNELS])
def test_a_kernel_that_knows_the_referee_is_refused_by_that_check(host, check, name):
    host.choice = parse(f"{FILE}:{name}")
    spec = FFNSpec(12, 24, "swiglu")
    trial = KernelTrial(host, block_of(spec), torch.Generator().manual_seed(1), passes="forward")
    assert trial.load() is None
    rows = {of: [row for row in function(trial) if row.passed is False] for of, function in CHECKS.items()
            if check in (of, "right") or of != "elsewhere"}  # fmt: skip
    assert [of for of, failed in rows.items() if failed][:1] == ([] if check == "right" else [check]), rows


def test_token_counts_follow_from_the_seed_and_are_not_the_same_twice():
    counts = {KernelTrial(None, block_of(FFNSpec(12, 24, "swiglu")), torch.Generator().manual_seed(seed)).further_counts
              for seed in (1, 1, 2, 3)}  # fmt: skip
    assert len(counts) == 3
    assert all(127 < count <= 2049 for of in counts for count in of)


# --- what the kernel's code consists of -------------------------------------------------------------------------------


HELPER = "from torch.nn.functional import silu\n\ndef hidden(gate, up):\n    return silu(gate) * up\n"
KERNEL = """
import os
from pathlib import Path
from torch.nn.functional import linear
import helper
{more}

def mlp(x, gate, up, down):
    os.environ.get("FFN_TEST_FAST")
    return linear(helper.hidden(linear(x, gate), linear(x, up)), down)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A kernel with a neighbour that it imports, and one that it reads."""
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "text.txt").write_text("mlp = None")
    more = "exec((Path(__file__).parent / 'text.txt').read_text())"
    (tmp_path / "mine.py").write_text(KERNEL.format(more=more))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def certified(project: Path) -> dict:
    verdict = ffncli.verify("512x2048:swiglu", kernel="mine.py:mlp", referee=True, passes="forward", threads=1)
    assert verdict.certificate.verdict == "certified", verdict.certificate.reason
    block = {"activation": "silu", "gated": True, "experts": 0}
    stored = {"certificate": vars(verdict.certificate), "block": block, "rows": [*map(asdict, verdict.rows)]}
    (project / "c.json").write_text(json.dumps(stored))
    return stored["certificate"]


def requested():
    grid = Grid("512x2048:swiglu", tokens=(32,), threads=(2,), device=("cpu",))
    return build_request(grid, ["eager,mine.py:mlp"], None, Method(), certificates=["c.json"])[0]


def test_a_certificate_names_every_file_and_variable_that_the_kernels_code_read(project, monkeypatch):
    """And the bench refuses it if one of them has changed."""
    certificate = certified(project)
    digests = {name: hashlib.sha256((project / name).read_bytes()).hexdigest() for name in ("helper.py", "text.txt")}
    assert certificate["files"] == digests
    assert certificate["variables"] == {"FFN_TEST_FAST": None}
    assert certificate["memory_protected"] is (True if sys.platform == "linux" else None)
    requested()
    (project / "helper.py").write_text(HELPER + "\n")
    with pytest.raises(
        FFNError, match=r"the file 'helper\.py' is not as c\.json certifies it, and .*mine\.py reads it"
    ):
        requested()
    (project / "helper.py").write_text(HELPER)
    (project / "text.txt").unlink()
    with pytest.raises(FFNError, match=r"the file 'text\.txt' is not as c\.json certifies it"):
        requested()
    (project / "text.txt").write_text("mlp = None")
    monkeypatch.setenv("FFN_TEST_FAST", "1")
    with pytest.raises(FFNError, match=r"the environment variable 'FFN_TEST_FAST' is not as c\.json certifies it"):
        requested()


def test_compiled_code_of_another_source_is_not_run(project):
    """A cache whose header fits the source's time and size, of a neighbour and of the kernel's file itself."""
    import py_compile

    for name, source in (("helper.py", HELPER), ("mine.py", (project / "mine.py").read_text())):
        path = project / name
        before = path.stat()
        path.write_text(source.replace("return", "raise ").ljust(before.st_size))
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        py_compile.compile(str(path), cache_from_source(str(path)))
        path.write_text(source)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with hosted(parse("mine.py:mlp"), threads=1) as host:
        trial = KernelTrial(host, block_of(FFNSpec(12, 24, "swiglu")), torch.Generator().manual_seed(1))
        trial.load()
        x = trial.draw(3)
        assert trial.judge("shapes").equal("", trial.call(x), trial.reference(x)).passed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_of_a_kernel_reads_no_memory_of_the_referee(project):
    """As root too, and also in a program that it starts."""
    (project / "mine.py").write_text(KERNEL.format(more="""
import subprocess
def reads(pid):
    try:
        with open(f"/proc/{pid}/mem", "rb"):
            return True
    except OSError:
        return False
started = subprocess.run(["head", "-c0", f"/proc/{os.getppid()}/mem"], stderr=subprocess.DEVNULL)
assert not reads(os.getppid()) and started.returncode and reads(os.getpid())
"""))  # fmt: skip
    with hosted(parse("mine.py:mlp"), threads=1) as host:
        assert host.reads_memory is False
        trial = KernelTrial(host, block_of(FFNSpec(12, 24, "swiglu")), torch.Generator().manual_seed(1))
        assert trial.load() is None
