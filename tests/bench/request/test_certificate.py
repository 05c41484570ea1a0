"""A certificate is named in the rows of the kernel that it is of, and refused for any other file."""

import hashlib
import json

import pytest

from ffncli.bench.records import Case, Method
from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import Grid, from_json, to_json
from ffncli.bench.results.journal import begin
from ffncli.bench.results.row import ResultRow
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.version import __version__
from tests.bench.units import RUN, units_of

KERNEL = "def mlp(x, gate, up, down): return x\n"
BLOCK = {"activation": "silu", "gated": True, "experts": 0}
GRID = Grid("512x2048:swiglu", tokens=(32,), threads=(2,), device=("cpu",))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(KERNEL)


def stored(change: dict | None = None, block: dict | None = None) -> str:
    certificate = {
        "verdict": "certified", "kernel": "mine.py:mlp", "attribute": "mlp", "file": "here/mine.py",
        "sha256": hashlib.sha256(KERNEL.encode()).hexdigest(), "dtype": "fp32", "device": "cpu",
        "environment": {"ffncli": __version__},
    }  # fmt: skip
    with open("c.json", "w") as file:
        json.dump({"certificate": certificate | (change or {}), "block": BLOCK | (block or {})}, file)
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
    with pytest.raises(FFNError, match=r"certifies packed of ffn '0\.0', this is "):
        request("eager,packed")


@pytest.mark.parametrize(
    ("change", "block", "words"),
    [
        ({"sha256": "0" * 64}, {}, r"mine.py is not the file that c.json certifies \(another sha256\)"),
        ({"verdict": "refused"}, {}, "c.json says 'refused'"),
        ({"attribute": "other"}, {}, "is of 'mine.py:mlp', which is not measured"),
        ({"file": None}, {}, "which is not measured"),
        ({"dtype": "bf16"}, {}, "c.json is for bf16, silu, gated, on cpu: no case is of that"),
        ({}, {"activation": "relu"}, "no case is of that"),
        ({}, {"activation": 3}, "c.json does not say what it certifies"),
        ({"dtype": None}, {}, "does not say what it certifies"),
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
