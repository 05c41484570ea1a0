"""Which kernels a benchmark compares, with what, and that its workers build each of them."""

import hashlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ffncli.bench.records import ANCHOR, BLOCK, GEMM, TWIN, Case, Method, Outcome
from ffncli.bench.request.grid import BenchRequest, Grid, build_request, from_json, to_json
from ffncli.bench.request.kernels import choose_kernels
from ffncli.bench.results.journal import begin
from ffncli.bench.results.row import ResultRow
from ffncli.bench.timing.arms import kernels_by_label
from ffncli.bench.timing.reporter import REPORTER
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError, spelled
from ffncli.kernels.choice import parse
from ffncli.kernels.kernel import Kernel, kernel_steps
from ffncli.run.user.kernels import kernel_of
from ffncli.system.files import remove_process_folders
from tests.bench.units import RUN, units_of
from tests.oracles.repository import Repository
from tests.run.verify.stored import certificate

DEFAULT = ["eager", "module", "packed", "inplace", "conv1x1", "onednn", "onednn_packed", "mkl", "numpy"]

PLAIN = FFNSpec(4, 8, bias=False)
STEPS = kernel_steps(steps(PLAIN))
CASES = (Case("4x8", "4x8:relu", PLAIN, 1),)
TEXTS = (
    "eager", "conv", "slowed:1.05:eager", "a=slowed:2:conv", "mine.py", "mine.py:mlp", "b=mine.py", "b=mine.py:other",
    "slowed:2:mine.py", "slowed:2:mine.py:other", "b=slowed:1.5:mine.py:mlp",
)  # fmt: skip


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """A file with one kernel in plain sight; the other is made when the file runs."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text("def mlp(x, up, down): return (x @ up.T).relu() @ down.T\nother = mlp\n")
    return file


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_accepted_is_built_by_the_worker_under_its_label(text):
    """From the choice alone, also after it was stored and read back."""
    chosen = choose_kernels([text], text)
    (choice,) = chosen.kernels
    stored = json.loads(json.dumps(to_json(BenchRequest(CASES, chosen.kernels, chosen.baseline))))
    assert from_json(stored).kernels == chosen.kernels
    assert stored["names"] == [choice.label] == [chosen.baseline]
    ((label, kernel),) = kernels_by_label(chosen.kernels, STEPS, PLAIN).items()
    assert isinstance(kernel, Kernel), kernel
    assert label == kernel.name == choice.label
    assert bool(kernel.origin) == ("mine.py" in text)


def test_a_kernel_of_a_commit_is_that_of_the_commit_whatever_becomes_of_branch_and_file(tmp_path):
    repository = Repository(tmp_path / "repo")
    first = repository.commit({"k/mlp.py": b"def mlp(x, up, down): return (x @ up.T).relu() @ down.T"})
    chosen = choose_kernels(["main:repo/k/mlp.py,old=main:repo/k/mlp.py:mlp"], None)
    assert [(c.label, c.ref) for c in chosen.kernels] == [("main:mlp.py:mlp", first), ("old", first)]
    assert chosen.files == {}  # a commit does not change
    repository.commit({"k/mlp.py": b"def other(): pass"})
    stored = json.loads(json.dumps(to_json(BenchRequest(CASES, chosen.kernels, chosen.baseline))))
    assert from_json(stored).kernels == chosen.kernels
    one, other = kernels_by_label(chosen.kernels, STEPS, PLAIN).values()
    assert (one.name, other.name) == ("main:mlp.py:mlp", "old")
    digest = hashlib.sha256(b"def mlp(x, up, down): return (x @ up.T).relu() @ down.T").hexdigest()
    assert one.origin == f"repo/k/mlp.py at commit {first[:12]}, sha256 {digest}"
    with pytest.raises(FFNError, match=rf"^repo/k/mlp.py at commit {first[:12]} has no 'nope'"):
        kernel_of(replace(chosen.kernels[0], attribute="nope"), STEPS, PLAIN)
    (copy,) = [path for path in Path(tempfile.gettempdir()).glob(f"ffn-{os.getpid()}-*/mlp.py")
               if path.read_bytes().startswith(b"def mlp(x, up")]  # fmt: skip
    assert copy.parent.stat().st_mode & 0o077 == 0
    remove_process_folders(os.getpid())  # as after a worker that was killed
    assert not copy.parent.exists()
    assert one.build(STEPS, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("mian:repo/k/mlp.py:mlp", ["git has no commit 'mian'", "'main'"]),
        ("main:repo/k/nope.py:mlp", ["nope.py is not a file at 'main'"]),
        ("main:repo/k/mlp.py:mpl", ["has no 'mpl'", "did you mean 'mlp'"]),
        ("main:repo/bad.py:f", ["bad.py at 'main', line 1", "not valid Python"]),
    ],
)
def test_a_commit_without_the_kernel_is_refused_before_anything_runs(tmp_path, text, parts):
    Repository(tmp_path / "repo").commit({"k/mlp.py": b"def mlp(x): pass", "bad.py": b"def f("})
    with pytest.raises(FFNError) as caught:
        choose_kernels([text], "eager")
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value


def test_what_an_earlier_version_stored_is_read(mine):
    """Texts as they were typed, and their labels; of steps, a kernel that nobody times."""
    mine.write_text("def mlp(x, up, down): return x\n")
    stored = to_json(BenchRequest(CASES, choose_kernels(["mine.py", "a=slowed:2:eager"], "a").kernels, "a"))
    earlier = from_json({**stored, "kernels": ["mine.py", "a=slowed:2:eager"]})
    assert earlier.names == ("mine.py:mlp", "a")
    assert list(kernels_by_label(earlier.kernels, STEPS, PLAIN)) == ["mine.py:mlp", "a"]
    assert isinstance(kernels_by_label(earlier.kernels, STEPS, PLAIN)["mine.py:mlp"], Kernel)
    by_step = to_json(BenchRequest(CASES, (), BLOCK, Method(by_step=True)))
    assert from_json({**by_step, "kernels": ["eager"], "names": [BLOCK]}) == BenchRequest(
        CASES, (), BLOCK, Method(by_step=True)
    )


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("mine.py", "mine.py:mlp"), ("../x/mine.py", "mine.py:mlp"), ("a=mine.py:mlp", "a"),
        ("slowed:1.50:eager", "slowed:1.50:eager"), ("a=slowed:1.50:eager", "a"), ("conv", "conv1x1"),
    ],
)  # fmt: skip
def test_what_an_earlier_version_stored_is_written_as_a_text_of_the_same_choice(text, label):
    stored = to_json(BenchRequest(CASES, (), label))
    (choice,) = from_json({**stored, "kernels": [text], "names": [label]}).kernels
    assert choice.label == label
    assert parse(choice.text) == choice


@pytest.mark.parametrize(
    ("texts", "baseline", "labels", "base", "note"),
    [
        (None, None, [*DEFAULT, "grouped"], "eager", "timed only if named: compiled, max_autotune, frozen, gemv"),
        (["packed"], None, ["eager", "packed"], "eager", "compared with eager"),
        (["packed,module"], None, ["packed", "module"], "packed", ""),
        (["packed,eager"], None, ["packed", "eager"], "eager", ""),
        (["module,conv1x1"], "conv", ["module", "conv1x1"], "conv1x1", ""),
        (["packed"], "module", ["module", "packed"], "module", ""),
        (["a=mine.py", "packed"], "a", ["a", "packed"], "a", ""),
        (["a=mine.py", "packed"], "a=mine.py:mlp", ["a", "packed"], "a", ""),
        (["a=mine.py", "packed"], "mine.py", ["mine.py:mlp", "a", "packed"], "mine.py:mlp", ""),
        (["mine.py"], "slowed:2:mine.py", ["slowed:2:mine.py:mlp", "mine.py:mlp"], "slowed:2:mine.py:mlp", ""),
    ],
)
def test_the_baseline(texts, baseline, labels, base, note):
    chosen = choose_kernels(texts, baseline)
    assert ([kernel.label for kernel in chosen.kernels], chosen.baseline) == (labels, base)
    assert "; ".join(chosen.notes).startswith(note) if note else chosen.notes == ()


def test_blocks_are_timed_by_kernels_of_their_kind():
    dense, mixture = FFNSpec(8, 24, "swiglu"), FFNSpec(8, 24, "swiglu", moe=MoE(4, 2))
    both = [*DEFAULT, "grouped"]
    for specs, labels in (([mixture], ["eager", "grouped"]), ([dense], DEFAULT), ([dense, mixture], both)):
        chosen = choose_kernels(None, None, specs=specs)
        assert [kernel.label for kernel in chosen.kernels] == labels
    (note,) = choose_kernels(None, None, specs=[mixture]).notes
    assert spelled(note) == "timed only if named: batched; kernel='all' adds them"
    assert [kernel.label for kernel in choose_kernels(["packed"], None, specs=[mixture]).kernels] == ["eager", "packed"]


def test_files_are_known_by_what_they_hold(mine):
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()
    assert choose_kernels(["mine.py", "a=slowed:2:./mine.py:other"], None).files == {str(mine): digest}
    assert choose_kernels(["eager"], "mine.py:mlp").files == {str(mine): digest}


@pytest.mark.parametrize(
    ("texts", "baseline", "why"),
    [
        (["eager"], "egaer", "baseline: there is no kernel 'egaer'; did you mean 'eager'"),
        (["a=mine.py"], "b", "baseline: there is no kernel 'b'; measured: a"),
        (["eager"], "all", "baseline: there is no kernel 'all'"),
        (["eager"], "slowed:1..2:eager", "baseline: there is no kernel 'slowed:1..2:eager'"),
        (["eager"], "none.py:f", "kernel: cannot read"),
        (["a=mine.py"], "a=slowed:2:eager", "two kernels are called 'a'"),
        (["mine.py,mine.py:mlp"], None, "two kernels are called 'mine.py:mlp'"),
        (["slowed:2:none.py:f"], None, "kernel: cannot read"),
        *([[f"{arm}=mine.py"], None, f"'{arm}' is reserved for ffn's measurements"] for arm in (TWIN, ANCHOR, GEMM)),
        ([f"{TWIN}=slowed:2:eager"], None, f"'{TWIN}' is reserved for ffn's measurements"),
    ],
)
def test_what_cannot_be_compared_is_refused(texts, baseline, why):
    with pytest.raises(FFNError) as caught:
        choose_kernels(texts, baseline)
    assert why in str(caught.value)


@pytest.mark.parametrize("body", ["def nope(x): ...", "nope = mlp", "if 1:\n    nope = mlp", "import torch as nope",
    "import nope.inner", "from math import sin as nope", "for nope in (mlp,): pass", "a, (nope, *b) = mlp, (mlp, 1)",
    "class nope: pass", "with open(__file__) as nope: pass", "try:\n    import nope\nexcept ImportError: pass",
    "nope: object = mlp", "(nope := mlp)", "globals()['nope'] = mlp", "exec('nope = mlp')", "from math import *",
    "def make():\n    global nope\n    nope = mlp\nmake()", "import sys; setattr(sys.modules[__name__], 'nope', mlp)",
])  # fmt: skip
def test_a_name_that_a_file_may_have_is_left_to_the_worker(mine, body):
    mine.write_text(f"def mlp(x, up, down): return x\n{body}\n")
    assert choose_kernels(["mine.py:nope"], "mine.py:nope").kernels == (parse("mine.py:nope"),)


@pytest.mark.parametrize("body", ["import torch", "other = mlp", "def g(x):\n    nope = x\n    return nope",
    "class A:\n    nope = 1", "print(mlp)", "if 1:\n    import os\nelse:\n    b = 1", "f = lambda nope: nope",
])  # fmt: skip
def test_a_name_that_a_file_does_not_have_is_refused_before_anything_runs(mine, body):
    mine.write_text(f"def mlp(x, up, down): return x\n{body}\n")
    for text in ("mine.py:nope", "a=mine.py:nope", "slowed:2:mine.py:nope"):
        with pytest.raises(FFNError, match=r"mine.py has no 'nope'; .*mlp") as caught:
            choose_kernels([text], None)
        assert caught.value.code == 2


def test_a_name_that_only_running_shows_is_missing_is_an_error_of_the_worker(mine):
    mine.write_text("def mlp(x, up, down): return x\nexec('')\n")
    choice = parse("mine.py:nope")
    assert kernels_by_label((choice,), STEPS, PLAIN)["mine.py:nope"].status == "failed"


def test_files_are_announced_before_they_run_and_not_run_where_they_are_left_out(mine, monkeypatch):
    heard = []
    monkeypatch.setattr(REPORTER, "_send", lambda message: heard.append(message[1:]))
    mine.write_text("print('ran')\ndef mlp(x, up, down): return x\n")
    choices = choose_kernels(["eager", "mine.py", "a=mine.py"], None).kernels
    found = kernels_by_label(choices, STEPS, PLAIN, {"a": Outcome("a", "failed")})
    assert heard == [("loading", "mine.py:mlp")]
    assert [isinstance(kernel, Kernel) for kernel in found.values()] == [True, True, False]


# --- certificates -----------------------------------------------------------------------------------------------------


KERNEL = "def mlp(x, gate, up, down): return x\n"
GRID = Grid("512x2048:swiglu", tokens=(32,), threads=(2,), device=("cpu",))


def stored(change: dict | None = None, block: dict | None = None) -> str:
    Path("mine.py").write_text(KERNEL)
    own = {"sha256": hashlib.sha256(KERNEL.encode()).hexdigest()}
    with open("c.json", "w") as file:
        json.dump(certificate(**own | (change or {}) | (block or {})), file)
    return "c.json"


def request(kernels: str = "eager,fast=mine.py:mlp", **more):
    return build_request(GRID, [kernels], None, Method(), certificates=["c.json"], **more)[0]


def digest() -> str:
    with open("c.json", "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def test_the_row_of_the_kernel_names_it():
    """By its label, also in a run that is read back; the others' rows are empty."""
    stored()
    asked = from_json(json.loads(json.dumps(to_json(request()))))
    (case,) = asked.cases
    assert [asked.certificate_of(label, case) for label in ("eager", "fast")] == ["", digest()]
    other = Case("512x2048:relu", "512x2048:relu", FFNSpec(512, 2048, "relu"), tokens=32)
    assert asked.certificate_of("fast", other) == ""


def test_the_journal_writes_it(tmp_path):
    stored()
    asked = request()

    def rows(case, units, method, run):
        return ResultRow(kernel="eager"), ResultRow(kernel="fast")

    journal = begin(tmp_path / "a.csv", asked, RUN, {}, rows, False)
    for unit in units_of(method=Method(max_time=0.1)):
        journal.add(unit)
    assert [(row.kernel, row.certificate) for row in journal.rows] == [("eager", ""), ("fast", digest())]


def test_a_built_in_kernel_is_certified_for_this_version():
    stored({"kernel": "packed", "attribute": None, "file": None, "sha256": None})
    assert list(request("eager,packed").certificates) == ["packed"]
    stored({"kernel": "packed", "attribute": None, "file": None, "sha256": None, "environment": {"ffncli": "0.0"}})
    with pytest.raises(FFNError, match=r"certifies packed of ffn '0\.0', but this is "):
        request("eager,packed")


@pytest.mark.parametrize(
    ("change", "block", "words"),
    [
        ({"sha256": "0" * 64}, {}, r"mine.py is not the file that c.json certifies \(different sha256\)"),
        ({"verdict": "refused"}, {}, "c.json says refused, but its rows say that no check failed"),
        ({"attribute": "other"}, {}, "certifies 'mine.py:mlp', which is not measured"),
        ({"file": None}, {}, "which is not measured"),
        ({"dtype": "bf16"}, {}, "c.json is for bf16, silu, gated, on cpu, which no case measures"),
        ({}, {"activation": "relu"}, "which no case measures"),
        ({}, {"activation": 3}, "c.json: block: activation must be a string, got 3"),
        ({}, {"activation": ["silu"]}, "c.json: block: activation must be a string, got"),
        ({}, {"gated": 1}, "c.json: block: gated must be true or false, got 1"),
        ({"dtype": None}, {}, "c.json: certificate: dtype must be a string, got None"),
    ],
)
def test_what_is_not_of_this_run_is_refused(change, block, words):
    stored(change, block)
    with pytest.raises(FFNError, match=words) as error:
        request()
    assert error.value.code == 2


def test_a_slowed_kernel_is_another():
    stored()
    with pytest.raises(FFNError, match="which is not measured"):
        request("eager,slowed:1.05:mine.py:mlp")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"certificate": 1, "block": {}}', '{"certificate": {}, "block": {}}']
)
def test_a_file_that_is_no_certificate(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(FFNError, match=r"c\.json"):
        request()
